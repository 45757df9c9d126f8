"""Scores each edge of a model by its effect on a metric (``edge_attribution``)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn.circuits._edge_scores import EdgeScores
from jattn.circuits._examples import Examples, as_outputs, check_finite, metric_at_ends
from jattn.circuits._parts import Parts
from jattn.circuits._runs import (
    Example,
    Metric,
    Outputs,
    changes_of,
    cut_run,
    gradient_scores,
    nothing_of,
    outputs_of,
)
from jattn.interop._progress import track

METHODS = ("eap", "eap-ig", "exact")


def edge_attribution(
    model: nnx.Module,
    clean: ArrayLike,
    corrupt: ArrayLike | Outputs | str,
    metric: Metric,
    *,
    method: str = "eap",
    steps: int = 5,
    edges: ArrayLike | None = None,
    within: ArrayLike | None = None,
    labels: Any = None,
    valid: ArrayLike | None = None,
    per_example: bool = False,
    progress: bool = True,
) -> EdgeScores:
    """Scores each edge of a model by how much a metric changes when the edge carries the output of another run.

    An edge leads from a writer (the embedding, a head, an MLP) to a later reader (the query, key or value of a head, an
    MLP, the logits). Cutting an edge gives the writer's corrupt output to this reader only; all other readers still get
    the clean one. Sequences run one at a time, in at least float32, with memory linear in their length.

    Args:
        model: a model of ``jattn.interop``, or a :class:`~jattn.circuits.CircuitModel`.
        clean: integers ``[B,T]``, the tokens.
        corrupt: sets what cut edges carry. Pass other tokens ``[B,T]``, such as the same text with another name, for
            the outputs on these tokens; the result of :func:`~jattn.circuits.mean_outputs`; or ``"zero"`` for no
            output.
        metric: ``(logits [T,V], tokens [T]) -> []`` of one sequence, such as the difference between two logits; with
            ``labels``, ``(logits, tokens, labels)``. Gradient methods differentiate the metric. Each function object is
            compiled once, so define the metric once and pass whatever changes between calls as ``labels``.
        method: ``"eap"``: the metric's derivative at the clean input times the change, in ``2 + 3`` passes for all
            edges. ``"eap-ig"``: the mean of the derivatives at ``steps`` inputs from the corrupt to the clean
            embeddings. ``"exact"``: cuts each of ``edges`` in a separate run.
        steps: the number of inputs for ``"eap-ig"``.
        edges: bool ``[R,W]``, the edges to score (``Graph.select``); all by default. Required for ``"exact"``.
        within: bool ``[R,W]``, for ``"exact"``: a circuit. Every run cuts the edges outside it. If ``edges`` is the
            same circuit, the scores show whether each of its edges is needed (minimality).
        labels: a pytree of arrays ``[B, ...]``; the metric receives the entry of each sequence.
        valid: bool ``[B,T]``, False for padding in both ``clean`` and ``corrupt``; only for ``jattn.interop`` models.
        per_example: keep the scores of each sequence.
        progress: show a line of progress.

    Returns:
        An ``EdgeScores``, with ``scores [R,W]`` for R readers and W writers.

    Raises:
        ValueError: shapes do not match; clean and corrupt tokens are equal; the metric is not a finite floating-point
            scalar; an edge does not exist; ``method`` is unknown; the residual stream is not a sum (see ``graph_of``).
        TypeError: the model is of neither kind.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> clean, corrupt = np.array([[3, 1, 4, 1]]), np.array([[3, 2, 4, 1]])
        >>> metric = lambda logits, tokens: logits[-1, 1] - logits[-1, 2]
        >>> found = jattn.circuits.edge_attribution(model, clean, corrupt, metric, progress=False)
        >>> found.scores.shape, int(found.top(5).sum())
        ((15, 7), 5)

    Source: https://arxiv.org/abs/2310.10348 (Syed, Rager and Conmy) for ``"eap"``; https://arxiv.org/abs/2403.17806
    (Hanna, Pezzelle and Belinkov) for ``"eap-ig"``, section 3; https://arxiv.org/abs/2304.14997 for edges.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method == "eap-ig" and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    parts, examples = Parts.of(model), Examples.of(clean, corrupt, labels, valid)
    examples.check_outputs(parts)
    graph = parts.graph
    if method == "exact" and edges is None:
        raise ValueError(f"method='exact' runs the model once per edge, here {graph.edges.sum()} times; choose edges=")
    if method != "exact" and within is not None:
        raise ValueError(f"within needs method='exact', got method={method!r}")
    scored = graph.edges if edges is None else graph.checked(edges)
    whole = graph.edges if within is None else graph.checked(within)
    every, total, ends = [], np.zeros(whole.shape), []
    for i in track(range(len(examples)), "edges scored, examples", progress):
        example, base = examples.one(i)
        if method == "exact":
            ends.append(metric_at_ends(parts, example, base, metric, i))
            scores = _exact(parts, example, as_outputs(parts, example, base), scored, whole, metric)
        else:
            nothing = nothing_of(parts, example) if base is None else base
            changes, at_clean, at_corrupt = changes_of(parts, example, nothing, metric)
            ends.append(check_finite(float(at_clean), float(at_corrupt), i))
            scores = _by_gradient(parts, example, changes, metric, steps if method == "eap-ig" else None)
        scores = np.where(scored, scores, 0.0)
        total += scores
        if per_example:
            every.append(scores)
    before, corrupted = np.array(ends).T
    return EdgeScores(
        graph, total / len(examples), scored, before, corrupted, method, np.stack(every) if per_example else None
    )


def mean_outputs(
    model: nnx.Module, tokens: ArrayLike, *, valid: ArrayLike | None = None, progress: bool = True
) -> Outputs:
    """Averages the output of each writer of a model over all tokens of a data set, for mean ablation of edges.

    Args:
        model: a model of ``jattn.interop``, or a :class:`~jattn.circuits.CircuitModel`.
        tokens: integers ``[B,T]``.
        valid: bool ``[B,T]``, False for padding, which is excluded.
        progress: show a line of progress.

    Returns:
        ``Outputs`` with 1 in place of T, to pass as ``corrupt``.

    Raises:
        ValueError: shapes do not match; an output is not finite; the residual stream is not a sum (see ``graph_of``).
        TypeError: the model is of neither kind.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> mean = jattn.circuits.mean_outputs(model, np.array([[3, 1, 4, 1]]), progress=False)
        >>> mean.heads.shape  # [L,N,1,M]
        (2, 2, 1, 8)
    """
    parts, examples = Parts.of(model), Examples.of(tokens, "zero", None, valid, name="tokens")
    tokens, valid = examples.clean, examples.valid
    total: Any = None
    for i in track(range(len(examples)), "means, examples", progress):
        sums = _sums(parts, Example(jnp.asarray(tokens[i]), None if valid is None else jnp.asarray(valid[i]), None))
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    count = tokens.size if valid is None else int(valid.sum())
    mean = jax.tree.map(lambda x: x / count, total)
    if not count or not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(mean)):
        raise ValueError("tokens: an output of the model is not finite (are all tokens within the vocabulary?)")
    return mean


@jax.jit
def _sums(parts: Parts, example: Example) -> Outputs:
    """The sum over tokens, ``[...,1,M]``."""
    counts = jnp.ones(example.tokens.shape, bool) if example.valid is None else example.valid
    of_tokens = lambda x: jnp.where(counts.reshape((1,) * (x.ndim - 2) + (-1, 1)), x, 0).sum(-2, keepdims=True)
    return jax.tree.map(of_tokens, outputs_of(parts, example))


def _by_gradient(parts: Parts, example: Example, changes: Array, metric: Metric, steps: int | None) -> np.ndarray:
    """Scores ``[R,W]`` by ``"eap"``, or by ``"eap-ig"`` if ``steps`` are given."""
    shares, total = ([1.0] if steps is None else [k / steps for k in range(1, steps + 1)]), 0.0
    embedding = parts.embed(example.tokens, example.valid)
    for share in shares:
        at = embedding + (1.0 - share) * changes[0]
        total += np.asarray(gradient_scores(parts, example, at, changes, metric))
    if not np.isfinite(total).all():
        raise ValueError("metric has a derivative that is not finite, so gradients give no scores; use method='exact'")
    return np.asarray(total / len(shares))


def _exact(
    parts: Parts, example: Example, base: Outputs, edges: np.ndarray, whole: np.ndarray, metric: Metric
) -> np.ndarray:
    before, result = float(cut_run(parts, example, base, whole, metric)), np.zeros(edges.shape)
    for reader, writer in np.argwhere(edges & whole):
        cut = whole.copy()
        cut[reader, writer] = False
        result[reader, writer] = float(cut_run(parts, example, base, cut, metric)) - before
    return result
