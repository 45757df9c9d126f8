"""Computes circuits of heads from parameters alone: what a head copies, what it compares, and how heads compose.

With row vectors, a head reads ``x W_Q W_K^T y^T`` (the QK circuit) and writes ``y W_V W_O`` (the OV circuit). Kernels
have Flax's shapes: ``query [M,N,H]``, ``key [M,K,H]``, ``value [M,K,D]``, ``out [N,D,M]``; K divides N. Norms, biases
and positions between the factors are ignored; fold a norm's scale into the kernels if it matters.
Source: https://transformer-circuits.pub/2021/framework (Elhage et al.).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

from jattn._core.call import softmax_dtype
from jattn._mods.validation import to_int32

LOGITS = 2**22  # at once, for one head


def ov_circuit(
    embed: Float[Array, "V M"],
    value: Float[Array, "M K D"],
    out: Float[Array, "N D M"],
    unembed: Float[Array, "M C"],
) -> Float[Array, "N V C"]:
    """The OV circuit ``W_E W_V W_O W_U``: what attending to each token adds to each class's logit, ``[N,V,C]``.

    Args:
        embed: the embedding ``[V,M]`` of V tokens.
        value: the value kernel ``[M,K,D]`` of a layer.
        out: its output kernel ``[N,D,M]``.
        unembed: the unembedding ``[M,C]`` of C classes.

    Raises:
        ValueError: N is not a multiple of K.

    Example:
        >>> embed, value = jnp.eye(3), jnp.eye(3)[:, None]
        >>> out = jnp.roll(jnp.eye(3), 1, 1)[None]  # a head that writes the next token
        >>> jattn.heads.ov_circuit(embed, value, out, embed.T)[0].argmax(1).tolist()
        [1, 2, 0]

    Source: https://transformer-circuits.pub/2021/framework (Elhage et al.).
    """
    value = _for_each_head(value, out.shape[0])
    return jnp.einsum("vm,mnd,ndw,wc->nvc", embed, value, out, unembed, optimize=True)


def qk_circuit(
    embed: Float[Array, "V M"], query: Float[Array, "M N H"], key: Float[Array, "M K H"], scale: float | None = None
) -> Float[Array, "N V V"]:
    """The QK circuit ``scale * W_E W_Q W_K^T W_E^T``: each head's scores for all pairs of tokens, ``[N,V,V]``.

    Args:
        embed: the embedding ``[V,M]`` of V tokens.
        query: the query kernel ``[M,N,H]`` of a layer.
        key: its key kernel ``[M,K,H]``.
        scale: factor on the scores; ``1 / sqrt(H)`` by default.

    Raises:
        ValueError: N is not a multiple of K.

    Example:
        >>> embed, query = jnp.eye(3), jnp.eye(3)[:, None]
        >>> key = jnp.roll(jnp.eye(3), 1, 0)[:, None]  # a head in which each token looks for the one after it
        >>> jattn.heads.qk_circuit(embed, query, key)[0].argmax(1).tolist()
        [1, 2, 0]

    Source: https://transformer-circuits.pub/2021/framework (Elhage et al.).
    """
    key = _for_each_head(key, query.shape[1])
    scores = jnp.einsum("vm,mnh,wk,knh->nvw", embed, query, embed, key, optimize=True)
    return scores * (query.shape[2] ** -0.5 if scale is None else scale)


def copying_score(
    embed: Float[Array, "V M"],
    value: Float[Array, "M K D"],
    out: Float[Array, "N D M"],
    unembed: Float[Array, "M C"],
) -> dict[str, Float[Array, " N"]]:
    """Measures whether a head that attends to a token outputs that token, by two scores of its OV circuit ``[V,V]``.

    - ``"argmax"``: the share of tokens whose own logit is the largest, in [0, 1]; ``1 / V`` by chance.
    - ``"eigenvalues"``: ``sum l / sum |l|`` over its eigenvalues ``l``, in [-1, 1]: 1 if all are positive (copying),
      -1 if all are negative (anti-copying), about 0 by chance.

    The circuit itself is never formed: tokens are processed one by one, and the eigenvalues are computed from
    ``W_O W_U W_E W_V [D,D]``. Eigenvalues need a CPU or a GPU.

    Args:
        embed: the embedding ``[V,M]`` of V tokens.
        value: the value kernel ``[M,K,D]`` of a layer.
        out: its output kernel ``[N,D,M]``.
        unembed: the unembedding ``[M,V]`` of the same tokens.

    Returns:
        ``{"argmax": [N], "eigenvalues": [N]}``, float32 (or float64) for kernels of any dtype.

    Raises:
        ValueError: ``embed`` and ``unembed`` have different numbers of tokens; N is not a multiple of K.

    Example:
        >>> embed, eye = jnp.eye(3), jnp.eye(3)
        >>> value, out = jnp.stack([eye, eye], 1), jnp.stack([eye, -eye])  # one head copies, one does the opposite
        >>> scores = jattn.heads.copying_score(embed, value, out, embed.T)
        >>> print(scores["argmax"], np.array(scores["eigenvalues"]).round(3))
        [1. 0.] [ 1. -1.]

    Source: https://transformer-circuits.pub/2021/framework (Elhage et al.).
    """
    if unembed.shape[1] != embed.shape[0]:
        raise ValueError(
            f"unembed must have a column for each of the {embed.shape[0]} rows of embed, got {list(unembed.shape)}"
        )
    embed, value, out, unembed = _wide(embed, _for_each_head(value, out.shape[0]), out, unembed)

    def one_head(value: Array, out: Array) -> tuple[Array, Array]:  # [M,D], [D,M]
        read, write = embed @ value, out @ unembed  # [V,D], [D,V]
        copied = jax.lax.map(lambda row: jnp.argmax(row @ write), read) == jnp.arange(len(read))
        return copied.mean(dtype=read.dtype), write @ read

    argmax, small = jax.vmap(one_head, (1, 0))(value, out)
    eigenvalues = jnp.linalg.eigvals(small)
    size = jnp.maximum(abs(eigenvalues).sum(-1), jnp.finfo(small.dtype).tiny)
    return {"argmax": argmax, "eigenvalues": eigenvalues.sum(-1).real / size}


def target_rank(
    embed: Float[Array, "V M"],
    value: Float[Array, "M K D"],
    out: Float[Array, "N D M"],
    unembed: Float[Array, "M C"],
    sources: ArrayLike,
    targets: ArrayLike,
) -> Float[Array, "N E"]:
    """Ranks a target's logit when a head attends to the source: 0 for the largest of C logits, C - 1 for the smallest.

    The logits are ``embed[source] W_V W_O W_U``, a row of the head's OV circuit. The rank is the number of larger
    logits plus half the number of equal ones, so it is ``(C - 1) / 2`` for a head that writes nothing. It is NaN if a
    logit is NaN. The share of the E pairs ranked at one end is a score in [0, 1], ``k / C`` by chance, which ``roles``
    can test:

    - ``(rank < k).mean(-1)`` for pairs ``(x, x)``: the head copies what it attends to, as a name mover does. For names
      and k = 5, this is the copy score of Wang et al., https://arxiv.org/abs/2211.00593, section 3.
    - ``(rank >= C - k).mean(-1)`` for pairs ``(x, x)``: it suppresses what it attends to, as a negative name mover does
      (same source). A copy-suppression head also attends to the token about to be predicted, which the output circuit
      of one layer does not show. Source: McDougall et al., https://arxiv.org/abs/2310.04625.
    - ``(rank < k).mean(-1)`` for pairs of a number, weekday or month and its successor: a successor head. To rank only
      within that series, pass its columns of ``unembed``, with places in the series as targets. Source: Gould et al.,
      https://arxiv.org/abs/2312.09230.

    A positive factor on a whole row changes no rank, so only a norm's scale (and LayerNorm's mean) matters.
    Heads are processed one by one and pairs in chunks, so no ``[E,C]`` array is formed.

    Args:
        embed: the embedding ``[V,M]`` or, as in the papers above, rows of the residual stream after the first MLP.
        value: the value kernel ``[M,K,D]`` of a layer; use ``jax.lax.map`` over stacked layers.
        out: its output kernel ``[N,D,M]``.
        unembed: the unembedding ``[M,C]`` of C classes.
        sources, targets: integers ``[E]``: rows of ``embed`` and columns of ``unembed``; a sample of 1000 suffices.

    Returns:
        ``[N,E]``, float32 (or float64).

    Raises:
        ValueError: sources or targets are not integers of equal length, or are out of range (traced ones get rank
            NaN).

    Example:
        >>> embed, eye, names = jnp.eye(3), jnp.eye(3), np.array([0, 2])
        >>> value, out = jnp.stack([eye, eye], 1), jnp.stack([eye, -eye])  # one head copies, one suppresses
        >>> jattn.heads.target_rank(embed, value, out, embed.T, names, names).tolist()
        [[0.0, 0.0], [2.0, 2.0]]
    """
    sources = _indices("sources", sources, embed.shape[0])
    targets = _indices("targets", targets, unembed.shape[1])
    if sources.shape != targets.shape:
        raise ValueError(f"sources and targets must have one length, got {sources.shape[0]} and {targets.shape[0]}")
    value, out, unembed = _wide(_for_each_head(value, out.shape[0]), out, unembed)
    return _ranks(embed, _by_head(value), out, unembed, (sources, targets), max(1, LOGITS // unembed.shape[1]))


@functools.partial(jax.jit, static_argnames="chunk")
def _ranks(embed: Array, value: Array, out: Array, unembed: Array, pairs: tuple[Array, Array], chunk: int) -> Array:
    """``target_rank`` for ``value [N,M,D]``, ``chunk`` pairs at a time."""

    def of_head(kernels: tuple[Array, Array]) -> Array:
        read, write = kernels[0], kernels[1] @ unembed  # [M,D], [D,C]

        def rank(pair: tuple[Array, Array]) -> Array:
            # Without the barrier, XLA may compute the target's logit twice with different rounding. A product and a
            # difference may be fused into one operation with one rounding, so only a comparison detects equal values.
            logits = jax.lax.optimization_barrier(_entry(embed, pair[0]).astype(read.dtype) @ read @ write)
            target = _entry(logits, pair[1])
            larger_less_smaller = jnp.where(logits == target, 0.0, jnp.sign(logits - target)).sum()
            return (logits.shape[0] - 1 + larger_less_smaller) / 2

        return jax.lax.map(rank, pairs, batch_size=chunk)

    return jax.lax.map(of_head, (value, out))


def _entry(x: Array, index: Array) -> Array:
    """``x[index]``, or NaN out of range."""
    return x.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _indices(argument: str, x: ArrayLike, size: int) -> Array:
    """Integers ``[E]`` in ``[0, size)``; the range of traced integers is unknown."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{argument} must be integers [E], got {x.dtype} of shape {list(x.shape)}")
    if not isinstance(x, Tracer) and x.size and not (x.min() >= 0 and x.max() < size):
        raise ValueError(f"{argument} must lie in [0, {size}), got values from {x.min()} to {x.max()}")
    return jnp.asarray(to_int32(argument, x))


def composition(
    value: Float[Array, "M K D"],
    out: Float[Array, "N D M"],
    *,
    query: Float[Array, "M P H"] | None = None,
    key: Float[Array, "M Q H"] | None = None,
    later_value: Float[Array, "M Q E"] | None = None,
    later_out: Float[Array, "P E M"] | None = None,
) -> dict[str, Float[Array, "N P"]]:
    """Measures how much the P heads of a later layer read from the N heads of an earlier layer.

    The score is ``|A B| / (|A| |B|)`` in Frobenius norms, with ``A = W_V W_O`` from the earlier head and, from the
    later head, ``B = W_Q W_K^T`` for Q-composition, ``W_K W_Q^T`` for K, ``W_V W_O`` for V. It lies in [0, 1];
    unrelated matrices give about ``1 / sqrt(M)``. An induction head K-composes with a previous-token head.
    No ``[M,M]`` matrix is formed: each factor is replaced by the R of its QR decomposition.

    Args:
        value, out: the kernels ``[M,K,D]`` and ``[N,D,M]`` of the earlier layer.
        query, key: the kernels ``[M,P,H]`` and ``[M,K,H]`` of the later layer, for Q and K; pass both or neither.
        later_value, later_out: the kernels ``[M,K,D]`` and ``[P,D,M]`` of the later layer, for V; pass both or neither.

    Returns:
        ``{"Q": [N,P], "K": [N,P], "V": [N,P]}``, with the entries for which kernels are given.

    Raises:
        ValueError: both pairs are missing, or a pair is incomplete; N is not a multiple of K.

    Example:
        >>> low, high = jnp.eye(4)[:, :2], jnp.eye(4)[:, 2:]  # [M,D]
        >>> value, out = low[:, None], high.T[None]  # a head that moves features 0 and 1 to 2 and 3
        >>> query, key = low[:, None], high[:, None]  # a later head whose keys read 2 and 3
        >>> scores = jattn.heads.composition(value, out, query=query, key=key)
        >>> {name: round(float(score[0, 0]), 3) for name, score in scores.items()}
        {'Q': 0.0, 'K': 0.707}

    Source: https://transformer-circuits.pub/2021/framework (Elhage et al.).
    """
    pairs = {"query and key": (query, key), "later_value and later_out": (later_value, later_out)}
    if any((a is None) != (b is None) for a, b in pairs.values()) or query is None and later_out is None:
        raise ValueError(f"composition needs {' or '.join(pairs)}, each as a complete pair")
    value, out = _wide(value, out)
    left, right = _triangles(_by_head(_for_each_head(value, out.shape[0]))), out
    scores = {}
    if query is not None and key is not None:
        query, key = _wide(query, key)
        query_factors, key_factors = _by_head(query), _by_head(_for_each_head(key, query.shape[1]))  # [P,M,H]
        scores["Q"] = _composed(left, right, query_factors, key_factors)
        scores["K"] = _composed(left, right, key_factors, query_factors)
    if later_value is not None and later_out is not None:
        later_value, later_out = _wide(later_value, later_out)
        value_factors = _by_head(_for_each_head(later_value, later_out.shape[0]))
        scores["V"] = _composed(left, right, value_factors, jnp.swapaxes(later_out, 1, 2))
    return scores


def residual_contributions(z: Float[Array, "*B T N D"], out: Float[Array, "N D M"]) -> Float[Array, "*B T N M"]:
    """What each head adds to the residual stream, ``z_i W_i^O``: ``[B,T,N,M]``.

    The sum over heads, plus the output projection's bias if there is one, is the layer's output.

    Args:
        z: the heads' outputs ``[B,T,N,D]``, or without B; modules sow them as ``attention_heads["z"]``.
        out: the output kernel ``[N,D,M]``.

    Example:
        >>> z = jnp.array([[[2.0], [3.0]]])  # [T,N,D]: two heads at one query
        >>> out = jnp.array([[[1.0, 0.0]], [[1.0, -1.0]]])  # [N,D,M]
        >>> jattn.heads.residual_contributions(z, out).tolist()
        [[[2.0, 0.0], [3.0, -3.0]]]
    """
    return jnp.einsum("...tnd,ndm->...tnm", z, out)


def _composed(left: Array, out: Array, first: Array, second: Array) -> Array:
    """``[N,P]`` for ``A = left out`` (``left`` triangular, ``[N,D,D]``) and ``B = first second^T`` (``[P,M,H]``)."""
    triangle = _triangles(second)  # |X second^T| = |X triangle^T|
    between = jnp.einsum("ndm,pmh->npdh", out, first)
    both = jnp.einsum("nad,npdh,pbh->npab", left, between, triangle, optimize=True)
    norm_left = _norm(jnp.einsum("nad,ndm->nam", left, out))
    norm_right = _norm(jnp.einsum("pmh,pbh->pmb", first, triangle))
    return _norm(both) / jnp.maximum(norm_left[:, None] * norm_right[None], jnp.finfo(both.dtype).tiny)


def _wide(*kernels: Array) -> list[Array]:
    """The kernels in at least float32, as decompositions require."""
    return [kernel.astype(softmax_dtype(kernel)) for kernel in kernels]


def _triangles(factors: Array) -> Array:
    """R ``[...,H,H]`` of the QR decompositions of ``[...,M,H]``."""
    return jnp.linalg.qr(factors, mode="r")


def _norm(matrices: Array) -> Array:
    return jnp.sqrt(jnp.sum(matrices**2, (-2, -1)))


def _by_head(kernel: Array) -> Array:
    return jnp.moveaxis(kernel, 1, 0)


def _for_each_head(kernel: Array, heads: int) -> Array:
    """``[M,K,D]`` as ``[M,N,D]``: each of the K heads is repeated ``N / K`` times."""
    if heads % kernel.shape[1]:
        raise ValueError(f"{heads} heads cannot share kernels of {kernel.shape[1]} heads, {list(kernel.shape)}")
    return jnp.repeat(kernel, heads // kernel.shape[1], 1)
