"""Runs circuits (models with all other edges cut) and measures how much of a metric they keep."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn.circuits._edge_scores import EdgeScores
from jattn.circuits._examples import Examples, as_outputs, metric_at_ends
from jattn.circuits._parts import Parts
from jattn.circuits._runs import Metric, Outputs, cut_run
from jattn.interop._progress import track

RESAMPLED = 1000  # the number of resamples for an interval
CHOICES = ("greedy", "top")


def run_circuit(
    model: nnx.Module,
    clean: ArrayLike,
    corrupt: ArrayLike | Outputs | str,
    edges: ArrayLike,
    metric: Metric | None = None,
    *,
    labels: Any = None,
    valid: ArrayLike | None = None,
) -> Array | np.ndarray:
    """Runs a model with only these edges; all other edges carry exactly the outputs of the corrupt run.

    With all edges, the result equals the model's result on the clean tokens; with none, on the corrupt tokens. One
    compilation serves all sets of edges.

    Args:
        model: a model of ``jattn.interop``, or a :class:`~jattn.circuits.CircuitModel`.
        clean: integers ``[B,T]``, the tokens.
        corrupt: what a cut edge carries: the outputs on other tokens ``[B,T]``, the result of ``mean_outputs``, or
            ``"zero"``.
        edges: bool ``[R,W]``, such as ``EdgeScores.top(100)`` or ``Graph.select(pairs)``; or S sets, ``[S,R,W]``.
        metric: ``(logits [T,V], tokens [T]) -> []``, with ``labels`` as a third argument if given; None returns logits.
        labels: a pytree of arrays ``[B, ...]``; the metric receives the entry of each sequence.
        valid: bool ``[B,T]``, False for padding; only for ``jattn.interop`` models.

    Returns:
        The metric of each example, ``[B]`` or ``[S,B]``; or the logits ``[B,T,V]`` or ``[S,B,T,V]``.

    Raises:
        ValueError: an edge does not exist; shapes do not match; the result is not finite; the residual stream is not a
            sum (see ``graph_of``).

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> clean, corrupt = np.array([[3, 1, 4, 1]]), np.array([[3, 2, 4, 1]])
        >>> graph = jattn.circuits.graph_of(model)
        >>> logits = jattn.circuits.run_circuit(model, clean, corrupt, graph.edges)
        >>> np.allclose(logits, model.logits(model(clean)), atol=1e-5)
        True
    """
    parts, examples = Parts.of(model), Examples.of(clean, corrupt, labels, valid)
    examples.check_outputs(parts)
    edges = parts.graph.checked(edges)
    sets = edges.reshape(-1, *edges.shape[-2:])
    results = []
    for i in range(len(examples)):
        example, base = examples.one(i)
        base = as_outputs(parts, example, base)
        results.append([np.asarray(cut_run(parts, example, base, each, metric)) for each in sets])
        if not np.isfinite(results[-1]).all():
            raise ValueError(
                f"{'logits' if metric is None else 'metric'} of example {i} are not finite (are all tokens within the "
                "vocabulary?)"
            )
    stacked = np.stack([np.stack(of_example) for of_example in results], 1)  # [S,B,...]
    return stacked if edges.ndim > 2 else stacked[0]


@dataclasses.dataclass(frozen=True)
class Faithfulness:
    """The result of :func:`~jattn.circuits.faithfulness`, as NumPy arrays for S circuit sizes.

    The kept share is ``(metric - corrupt) / (clean - corrupt)`` of means over examples, which is 1 with all edges and 0
    with none.

    Attributes:
        sizes: ``[S]``, the number of edges in each circuit.
        edges: bool ``[S,R,W]``, the edges of each circuit.
        kept: ``[S]``, the share kept by each circuit.
        interval: ``[S,2]``, the 95% interval of ``kept`` from resampled examples; a point for a single example.
        random: ``[S]``, the share kept by the same number of random edges.
        left: ``[S]``, the share kept by all edges outside the circuit; near 0 if the circuit is complete.
        clean, corrupt: ``[B]``, the metric of each example with all edges and with none.
        values: ``{"circuit" | "random" | "left": [S,B]}``, the metric of each example.
        area: the mean of ``kept`` over the share of edges, from the first size to the last, by the trapezoidal rule.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> clean, corrupt = np.array([[3, 1, 4, 1]]), np.array([[3, 2, 4, 1]])
        >>> metric = lambda logits, tokens: logits[-1, 1] - logits[-1, 2]
        >>> scores = jattn.circuits.edge_attribution(model, clean, corrupt, metric, progress=False)
        >>> found = jattn.circuits.faithfulness(model, clean, corrupt, metric, scores, sizes=[5, 46], progress=False)
        >>> found.kept.shape, round(float(found.kept[-1]), 4)  # with all 46 edges
        ((2,), 1.0)
    """

    sizes: np.ndarray
    edges: np.ndarray
    kept: np.ndarray
    interval: np.ndarray
    random: np.ndarray
    left: np.ndarray
    clean: np.ndarray
    corrupt: np.ndarray
    values: Mapping[str, np.ndarray]
    area: float

    def table(self) -> str:
        """A text table: sizes, and shares kept by the circuit (with interval), random edges and all other edges."""
        lines = [f"{'edges':>8} {'kept':>7} {'95% interval':>18} {'random':>7} {'left':>7}"]
        every = zip(self.sizes, self.kept, self.interval, self.random, self.left, strict=True)
        for size, kept, (low, high), random, left in every:
            low, high, kept, random, left = (round(float(x), 3) + 0.0 for x in (low, high, kept, random, left))
            lines.append(f"{size:8} {kept:7.3f} {f'{low:.3f} to {high:.3f}':>18} {random:7.3f} {left:7.3f}")
        return "\n".join([*lines, f"area under kept: {self.area:.3f}"])


def faithfulness(
    model: nnx.Module,
    clean: ArrayLike,
    corrupt: ArrayLike | Outputs | str,
    metric: Metric,
    scores: EdgeScores,
    *,
    sizes: Sequence[int] | None = None,
    choose: str = "greedy",
    labels: Any = None,
    valid: ArrayLike | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Faithfulness:
    """Measures the share of a metric kept by circuits of several sizes, by random edges, and without the circuits.

    Choose edges on one set of examples and judge them on another: pass ``scores`` from the first set and ``clean`` from
    the second.

    Args:
        model: a model of ``jattn.interop``, or a :class:`~jattn.circuits.CircuitModel`.
        clean: integers ``[B,T]``, the tokens.
        corrupt: what a cut edge carries: the outputs on other tokens ``[B,T]``, the result of ``mean_outputs``, or
            ``"zero"``.
        metric: ``(logits [T,V], tokens [T]) -> []``, with ``labels`` as a third argument if given.
        scores: the ``EdgeScores`` used to choose the edges.
        sizes: sorted numbers of edges; by default ten from 0.1% to 100%, evenly spaced on a logarithmic scale.
        choose: ``"greedy"``, from the logits backwards (``EdgeScores.greedy``), or ``"top"``, the largest scores.
        labels: a pytree of arrays ``[B, ...]``; the metric receives the entry of each sequence.
        valid: bool ``[B,T]``, False for padding; only for ``jattn.interop`` models.
        seed: the seed of the random edges.
        progress: show a line of progress.

    Returns:
        A ``Faithfulness``; ``table()`` shows it as text.

    Raises:
        ValueError: a size is not a valid number of edges; ``choose`` is unknown; the arguments do not match.

    Warns:
        UserWarning: the metric differs between clean and corrupt by no more than it varies between examples, so shares
            of the difference mean little.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> clean, corrupt = np.array([[3, 1, 4, 1]]), np.array([[3, 2, 4, 1]])
        >>> metric = lambda logits, tokens: logits[-1, 1] - logits[-1, 2]
        >>> scores = jattn.circuits.edge_attribution(model, clean, corrupt, metric, progress=False)
        >>> found = jattn.circuits.faithfulness(model, clean, corrupt, metric, scores, sizes=[0, 46], progress=False)
        >>> print(found.table().splitlines()[0])
           edges    kept       95% interval  random    left

    Source: https://arxiv.org/abs/2403.17806, section 4, and https://arxiv.org/abs/2504.13151 (MIB) for the area.
    """
    if choose not in CHOICES:
        raise ValueError(f"choose must be one of {', '.join(CHOICES)}, got {choose!r}")
    parts, examples = Parts.of(model), Examples.of(clean, corrupt, labels, valid)
    examples.check_outputs(parts)
    graph, total = parts.graph, int(scores.scored.sum())
    if graph != scores.graph:
        raise ValueError("scores must be of this model, but they have other layers or heads")
    by_default = np.unique(np.geomspace(max(1, total // 1000), total, 10).round().astype(int)).tolist()
    wanted: Sequence[int] = by_default if sizes is None else sorted(set(sizes))
    if not wanted or not scores.scored[-1].any():
        raise ValueError("sizes must not be empty, and scores must include edges into the logits")
    every = np.stack([scores.greedy(size) if choose == "greedy" else scores.top(size) for size in wanted])
    counts, rng = every.sum((1, 2)), np.random.default_rng(seed)
    if counts.tolist() != list(wanted):
        warnings.warn(
            f"only {counts.max()} of the scored edges lead to the logits, so sizes {list(wanted)} become "
            f"{counts.tolist()}",
            UserWarning,
            stacklevel=2,
        )
    drawn = np.stack([_random(scores.scored, int(count), rng) for count in counts])
    sets = {"circuit": every, "random": drawn, "left": graph.edges & ~every}
    values: dict[str, list[list[float]]] = {name: [] for name in sets}
    ends = []
    for i in track(range(len(examples)), "circuits run, examples", progress):
        example, base = examples.one(i)
        ends.append(metric_at_ends(parts, example, base, metric, i))
        base = as_outputs(parts, example, base)
        for name, of_sizes in sets.items():
            values[name].append([float(cut_run(parts, example, base, cut, metric)) for cut in of_sizes])
    whole, corrupted = np.array(ends).T
    by_name = {name: np.array(each).T for name, each in values.items()}
    _warn_if_small(whole - corrupted)
    kept = {name: _share(each, whole, corrupted) for name, each in by_name.items()}
    again = np.random.default_rng(seed).integers(len(whole), size=(RESAMPLED, len(whole)))
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = np.stack([_share(by_name["circuit"][:, at], whole[at], corrupted[at]) for at in again])
    share = counts / graph.edges.sum()
    span = share[-1] - share[0]
    area = float(np.trapezoid(kept["circuit"], share) / span) if span > 0 else float(kept["circuit"][0])
    interval = np.nanquantile(resampled, [0.025, 0.975], axis=0).T
    return Faithfulness(
        counts, every, kept["circuit"], interval, kept["random"], kept["left"], whole, corrupted, by_name, area
    )


def _share(values: np.ndarray, clean: np.ndarray, corrupt: np.ndarray) -> np.ndarray:
    """``[S,B] -> [S]``: the kept share of the mean difference between clean and corrupt."""
    return (values.mean(-1) - corrupt.mean()) / (clean.mean() - corrupt.mean())


def _random(edges: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    every = np.flatnonzero(edges)
    mask = np.zeros(edges.size, bool)
    mask[rng.permutation(every)[:count]] = True
    return mask.reshape(edges.shape)


def _warn_if_small(gaps: np.ndarray) -> None:
    error = gaps.std(ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    if abs(gaps.mean()) <= 2 * error or not gaps.mean():
        warnings.warn(
            f"clean and corrupt differ in the metric by {gaps.mean():.3g} on average, with a standard error of "
            f"{error:.3g}: shares of that difference mean little; use a corruption that changes the metric",
            UserWarning,
            stacklevel=3,
        )
