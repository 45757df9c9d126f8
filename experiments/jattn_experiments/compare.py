"""``jattn compare``: the heads of two models side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Table

from jattn_experiments import config
from jattn_experiments.look import page_of_runs
from jattn_experiments.runs.folder import save_figure
from jattn_experiments.runs.terminal import Terminal, fail, refusing

if TYPE_CHECKING:  # it imports JAX
    from jattn_experiments.load_run import Saved

MANY = 40  # rows of heads that a terminal shows


def compare_command(arguments: Sequence[str]) -> int:
    """Compares the heads of two models: two runs, or two checkpoints of one run."""
    parser = config.Parser(prog="jattn compare", description=compare_command.__doc__)
    run = "folder of a run, or FOLDER@STEP for one of its checkpoints; pass it twice"
    parser.add_argument("--run", type=str, required=True, action="append", help=run)
    picture = "picture (.png) or page (.html) with the first seed's heads side by side"
    parser.add_argument("--out", type=str | None, default=None, help=picture)
    options = parser.parse_args(arguments)
    if len(options.run) != 2:
        return fail(f"--run: expected two runs (pass --run twice), got {len(options.run)}")
    from jattn_experiments import load_run

    with refusing("--run", ValueError, OSError):
        both = [load_run.load(run) for run in options.run]
        comparison = compare(*both)
    _show(comparison, both[0].setup.seeds[0], *options.run)
    if options.out:
        with refusing("--out", OSError, ValueError):
            if Path(options.out).suffix == ".html":
                page_of_runs(both, options.run, Path(options.out))
            else:
                _draw(comparison, Path(options.out), *options.run)
        print(f"picture: {options.out}")
    return 0


class Comparison(NamedTuple):
    """Heads of two models on the same sequences, for R seeds, the first ones of both models."""

    match: np.ndarray  # [R,L,N] the second model's head for each of the first's
    distance: np.ndarray  # [R,L,N] between their mean patterns: Jensen-Shannon over ln 2
    floor: np.ndarray  # [R,L,N] of one head, between two halves of the sequences: the larger of both heads'
    scores: dict[str, np.ndarray]  # name -> [R,2,L,N], of the first's heads and of those matched
    patterns: np.ndarray  # [2,L,N,T,T] the first seed's mean patterns, matched


def compare(first: "Saved", second: "Saved") -> Comparison:
    """The heads of two saved models, matched within each layer by their mean patterns.

    Both look at sequences of the first model's task. Only a distance above the floor is a difference.

    Raises ``ValueError`` if the models differ in layers, heads or tokens.
    """
    import jax
    from scipy.optimize import linear_sum_assignment

    from jattn import heads
    from jattn_experiments import head_scores
    from jattn_experiments.measure.evaluate import LOOK_BATCH, of_patterns
    from jattn_experiments.model import Transformer
    from jattn_experiments.train import LOOK_DATA, PROBE_DATA

    setups = [one.setup for one in (first, second)]
    task, others = setups[0].task, setups[1].task
    for name, a, b in (
        ("layers x heads", *((s.config.model.num_layers, s.config.model.num_heads) for s in setups)),
        ("tokens", task.vocabulary, others.vocabulary),
        ("length", task.max_length, others.max_length),
    ):
        if a != b:
            raise ValueError(f"expected two models with the same {name}, got {a} and {b}")
    seeds = min(len(setup.seeds) for setup in setups)

    def of_seed(model: Transformer, params: Any, key: jax.Array) -> tuple[Any, ...]:
        probe = task.probe(jax.random.fold_in(key, PROBE_DATA), LOOK_BATCH)
        patterns = of_patterns(head_scores.weights_of(model, params, probe.tokens), probe.real[0])
        batch = task.look(jax.random.fold_in(key, LOOK_DATA), LOOK_BATCH)
        scores = head_scores.scores(model, task, params, batch)[0]
        return patterns["mean_weights"], patterns["noise"], scores, probe.real[0]

    measured = []
    for setup, one in zip(setups, (first, second), strict=True):
        of_model = jax.jit(lambda params, key, model=setup.model: of_seed(model, params, key))
        each = [of_model(jax.tree.map(lambda leaf, r=r: leaf[r], one.params), setups[0].keys[r]) for r in range(seeds)]
        measured.append(jax.tree.map(lambda *leaves: np.stack(leaves), *each))
    (ours, our_floor, our_scores, real), (theirs, their_floor, their_scores, _) = measured
    layers, count = ours.shape[1:3]
    between = jax.jit(jax.vmap(heads.pattern_divergence))
    match, distance = np.empty((seeds, layers, count), int), np.empty((seeds, layers, count))
    for layer in range(layers):
        each = np.asarray(between(np.concatenate([ours[:, layer], theirs[:, layer]], 1), real))[:, :count, count:]
        for r in range(seeds):
            match[r, layer] = linear_sum_assignment(each[r])[1]
            distance[r, layer] = each[r, np.arange(count), match[r, layer]]
    matched = lambda values: np.take_along_axis(values, match.reshape(*match.shape, *(1,) * (values.ndim - 3)), 2)
    floors = [floor.reshape(seeds, layers, count) for floor in (our_floor, their_floor)]
    return Comparison(
        match=match,
        distance=distance,
        floor=np.maximum(floors[0], matched(floors[1])),
        scores={name: np.stack([our_scores[name], matched(their_scores[name])], 1) for name in our_scores},
        patterns=np.stack([ours[0], matched(theirs)[0]]),
    )


def _show(comparison: Comparison, first_seed: int, first: str, second: str) -> None:
    title = f"{first} and {second}: heads matched by their attention patterns"
    columns = ("seed", "layer", "head", "matched", "distance", "noise floor", "largest change")
    table = Table(*columns, title=title, title_justify="left")
    rows = list(np.ndindex(comparison.match.shape))
    for at in rows[:MANY]:
        (name, before, after) = max(
            ((name, values[at[0], 0][at[1:]], values[at[0], 1][at[1:]]) for name, values in comparison.scores.items()),
            key=lambda row: np.nan_to_num(abs(row[1] - row[2]), nan=np.inf),
        )
        distance, floor = comparison.distance[at], comparison.floor[at]
        shown = f"[bold]{distance:.3f}[/]" if distance > floor else f"{distance:.3f}"
        which = (str(first_seed + at[0]), *map(str, at[1:]), str(comparison.match[at]))
        table.add_row(*which, shown, f"{floor:.3f}", f"{name}: {before:.2f} to {after:.2f}")
    if len(rows) > MANY:
        table.caption = f"and {len(rows) - MANY} more heads"
    Terminal().print(table)
    above = int((comparison.distance > comparison.floor).sum())
    median = f"median distance {np.median(comparison.distance):.3f}"
    print(f"{above} of {len(rows)} heads differ by more than the noise floor; {median}")


def _draw(comparison: Comparison, file: Path, first: str, second: str) -> None:
    """The first seed's mean patterns: a column per head, the first model's above the second's."""
    from matplotlib.figure import Figure

    layers, count = comparison.patterns.shape[1:3]
    figure = Figure(figsize=(1.6 * layers * count + 0.4, 4), layout="constrained")
    axes = figure.subplots(2, layers * count, squeeze=False)
    for row, (name, patterns) in enumerate(zip((first, second), comparison.patterns, strict=True)):
        for column, (layer, head) in enumerate(np.ndindex(layers, count)):
            number = comparison.match[0, layer, head] if row else head
            apart = f"\n{comparison.distance[0, layer, head]:.2f} apart" if row else ""
            axes[row, column].imshow(patterns[layer, head], cmap="Greys", vmin=0, vmax=1)
            axes[row, column].set(xticks=[], yticks=[])
            axes[row, column].set_title(f"layer {layer} head {number}{apart}", fontsize=8)
        axes[row, 0].set_ylabel(name, fontsize=8)
    save_figure(figure, file, dpi=120)
