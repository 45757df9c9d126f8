"""``jattn look``: the heads of a run, or of any language model on any text, as one page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from jattn_experiments import config
from jattn_experiments.model_files import model_file
from jattn_experiments.runs.findings import plain
from jattn_experiments.runs.folder import Damaged
from jattn_experiments.runs.terminal import Terminal, fail, refusing

EXAMPLES = 4  # sequences of a run's page


def look_command(arguments: Sequence[str]) -> int:
    """Shows the heads of a run at one of its training steps, or of a language model on a text."""
    parser = config.Parser(prog="jattn look", description=look_command.__doc__)
    parser.add_argument("--run", type=str | None, default=None, help="folder of a run, which may still be training")
    parser.add_argument(
        "--step",
        type=int | None,
        default=None,
        help="training step of one of its looks at the heads; default: the last",
    )
    model = "smollm2, gemma3, a GGUF file or a folder; pass it twice to compare two models"
    parser.add_argument("--model", type=str, default=None, action="append", help=model)
    parser.add_argument("--text", type=str | None, default=None, help="file with the text for the model to read")
    parser.add_argument("--tokens", type=int, default=512, help="largest number of tokens to read")
    page = "file for the page; default: heads.html (for a run, in its folder)"
    parser.add_argument("--out", type=str | None, default=None, help=page)
    options = parser.parse_args(arguments)
    if (options.run is None) == (options.model is None):
        return fail("expected either --run (the folder of a run) or --model and --text")
    return _look_at_run(options) if options.model is None else _look_at_models(options)


def _look_at_run(options: Any) -> int:
    """Prints the scores of a look, and writes the page of the newest checkpoint up to its step."""
    from jattn_experiments.runs.history import History
    from jattn_experiments.train import LOOK_BATCH, config_of

    folder = Path(options.run)
    if not (folder / "metrics.jsonl").is_file():
        return fail(f"--run: expected the folder of a training run, got {options.run!r}")
    try:
        with refusing("--run", Damaged, OSError, ValueError):
            steps, scores = History(folder, writes=False).scores()
            first_seed = config_of(folder).train.first_seed
    except IndexError:
        return fail(f"--run: {options.run!r} has no look at its heads yet")
    step = int(steps[-1]) if options.step is None else options.step
    if step not in steps:
        near = int(steps[np.abs(steps - step).argmin()])
        return fail(f"--step: expected the step of a look, {steps[0]} to {steps[-1]}, such as {near}, got {step}")
    at_step = {name: values[:, list(steps).index(step)] for name, values in scores.items()}
    _show(f"{folder.name}, step {step}: means over {LOOK_BATCH} sequences", first_seed, at_step)
    from jattn_experiments import load_run
    from jattn_experiments.runs.checkpoint import saved_steps

    kept = [one for one in saved_steps(folder / "checkpoints") if one <= step]
    if not kept:
        print(f"no page: the run has no checkpoint up to step {step}; train.keep=0 would keep all of them")
        return 0
    with refusing("--run", ValueError, OSError):
        run = load_run.load(f"{folder}@{kept[-1]}")
    with refusing("--out", OSError):
        file = Path(options.out or folder / "heads.html")
        print(f"page: {page_of_runs([run], [f'{folder.name}, step {kept[-1]}'], file)}")
    return 0


def _show(title: str, first_seed: int, scores: dict[str, np.ndarray]) -> None:
    """The scores ``[R,L,N]`` of every head."""
    names = [Column(plain(name).replace(" ", "\n"), no_wrap=True, min_width=4) for name in scores]
    style: dict[str, Any] = {"title_justify": "left", "box": None, "padding": (0, 1, 0, 0)}
    table = Table("seed", "layer", "head", *names, title=title, **style)
    for seed, layer, head in np.ndindex(*next(iter(scores.values())).shape):
        numbers = (f"{values[seed, layer, head]:.2f}" for values in scores.values())
        table.add_row(str(first_seed + seed), str(layer), str(head), *numbers)
    Terminal().print(table)


def page_of_runs(saved: Sequence[Any], names: Sequence[str], path: Path) -> Path:
    """The heads of saved models' first seeds (``jattn_experiments.load_run``), on sequences of the first one's task."""
    import jax

    import jattn
    from jattn_experiments.train import PROBE_DATA

    setup = saved[0].setup.looking
    tokens = setup.task.probe(jax.random.fold_in(setup.keys[0], PROBE_DATA), EXAMPLES).tokens
    labels = [setup.task.labels(example) for example in np.asarray(tokens).tolist()]
    reports: list[jattn.reports.Report] = []
    for one, name in reversed(list(zip(saved, names, strict=True))):
        params = jax.tree.map(lambda leaf: leaf[0], one.params)
        _, kept = one.setup.model.apply(params, tokens, sow_weights=True, mutable=["intermediates"])
        reports.append(jattn.report(kept["intermediates"], labels, title=str(name), compare=reports))
    return reports[-1].save(path)


def _look_at_models(options: Any) -> int:
    """The page of one or more language models on a text."""
    if options.text is None:
        return fail("--text: expected a file with the text for the model to read")
    if options.tokens < 1:
        return fail(f"--tokens: expected at least 1, got {options.tokens}")
    with refusing("--text", OSError, UnicodeDecodeError):
        text = Path(options.text).read_text(encoding="utf-8")
    with refusing("--model", ValueError):
        sources = [model_file(name) for name in options.model]
    # slow to import: a wrong option should not wait for JAX
    import jattn
    from jattn import interop

    reports: list[jattn.reports.Report] = []
    for name, source in reversed(list(zip(options.model, sources, strict=True))):
        with refusing("--model", ValueError, OSError, ImportError):
            tokenizer, model = interop.tokenizer(source), interop.load(source)
        ids = np.array([tokenizer.encode(text).ids[: options.tokens]])
        if not ids.size:
            return fail(f"--text: expected a text with at least one token, got {options.text!r}, which is empty")
        print(f"{name}: {ids.shape[1]} tokens, {model.config.num_layers * model.config.num_heads} heads", flush=True)
        with refusing("--model", ValueError):
            heads = interop.look(model, ids)
        reports.append(jattn.report(heads, ids, tokenizer=tokenizer, title=Path(name).stem, compare=reports))
    with refusing("--out", OSError):
        print(f"page: {reports[-1].save(options.out or 'heads.html')}")
    return 0
