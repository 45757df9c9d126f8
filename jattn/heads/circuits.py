"""Circuits of heads, from their parameters alone: what a head copies, what it compares, and how heads compose.

With row vectors, a head reads ``x W_Q W_K^T y^T`` (the QK circuit) and writes ``y W_V W_O`` (the OV circuit). Kernels
have Flax's shapes: ``query [M,N,H]``, ``key [M,K,H]``, ``value [M,K,D]``, ``out [N,D,M]``; K divides N. Norms, biases
and positions between the factors are ignored; fold a norm's scale into the kernels if it matters.
Source: https://transformer-circuits.pub/2021/framework (Elhage et al.).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.attention import softmax_dtype


def ov_circuit(
    embed: Float[Array, "V M"],
    value: Float[Array, "M K D"],
    out: Float[Array, "N D M"],
    unembed: Float[Array, "M C"],
) -> Float[Array, "N V C"]:
    """``W_E W_V W_O W_U``: what attending to each token adds to each class's logit, ``[N,V,C]``."""
    value = _for_each_head(value, out.shape[0])
    return jnp.einsum("vm,mnd,ndw,wc->nvc", embed, value, out, unembed, optimize=True)


def qk_circuit(
    embed: Float[Array, "V M"], query: Float[Array, "M N H"], key: Float[Array, "M K H"], scale: float | None = None
) -> Float[Array, "N V V"]:
    """``W_E W_Q W_K^T W_E^T`` times ``scale`` (by default ``1 / sqrt(H)``): scores between all tokens, ``[N,V,V]``."""
    key = _for_each_head(key, query.shape[1])
    scores = jnp.einsum("vm,mnh,wk,knh->nvw", embed, query, embed, key, optimize=True)
    return scores * (query.shape[2] ** -0.5 if scale is None else scale)


def copying_score(
    embed: Float[Array, "V M"],
    value: Float[Array, "M K D"],
    out: Float[Array, "N D M"],
    unembed: Float[Array, "M C"],
) -> dict[str, Float[Array, " N"]]:
    """Whether a head that attends to a token outputs that token: two scores of each head's OV circuit ``[V,V]``.

    - ``"argmax"``: the share of tokens whose own logit is the largest, in [0, 1]; ``1 / V`` by chance.
    - ``"eigenvalues"``: ``sum l / sum |l|`` over its eigenvalues ``l``, in [-1, 1]: 1 if all are positive (copying),
      -1 if all are negative (anti-copying), about 0 by chance.

    The circuit itself is never formed: tokens are processed one by one, and its eigenvalues are those of
    ``W_O W_U W_E W_V [D,D]``. Eigenvalues need a CPU or a GPU. Float32 (or float64) for kernels of any dtype.

    Args:
        embed, unembed: ``[V,M]`` and ``[M,V]``, for the same V tokens.
        value, out: the kernels.

    Raises:
        ValueError: ``embed`` and ``unembed`` have different numbers of tokens.
    """
    if unembed.shape[1] != embed.shape[0]:
        raise ValueError(
            f"unembed must have a column for each of the {embed.shape[0]} rows of embed, got {list(unembed.shape)}"
        )
    embed, value, out, unembed = _wide(embed, _for_each_head(value, out.shape[0]), out, unembed)

    def one_head(value: Array, out: Array) -> tuple[Array, Array]:  # [M,D], [D,M]
        read, write = embed @ value, out @ unembed  # [V,D], [D,V]
        own = jax.lax.map(lambda row: jnp.argmax(row @ write), read) == jnp.arange(len(read))
        return own.mean(dtype=read.dtype), write @ read

    argmax, small = jax.vmap(one_head, (1, 0))(value, out)
    eigenvalues = jnp.linalg.eigvals(small)
    size = jnp.maximum(abs(eigenvalues).sum(-1), jnp.finfo(small.dtype).tiny)
    return {"argmax": argmax, "eigenvalues": eigenvalues.sum(-1).real / size}


def composition(
    value: Float[Array, "M K D"],
    out: Float[Array, "N D M"],
    *,
    query: Float[Array, "M P H"] | None = None,
    key: Float[Array, "M Q H"] | None = None,
    later_value: Float[Array, "M Q E"] | None = None,
    later_out: Float[Array, "P E M"] | None = None,
) -> dict[str, Float[Array, "N P"]]:
    """How much the P heads of a later layer read from the N heads of an earlier one: ``{"Q" | "K" | "V": [N,P]}``.

    ``|A B| / (|A| |B|)`` in Frobenius norms, with ``A = W_V W_O`` of the earlier head and, from the later one,
    ``B = W_Q W_K^T`` for Q-composition, ``W_K W_Q^T`` for K, ``W_V W_O`` for V. In [0, 1]; unrelated matrices give
    about ``1 / sqrt(M)``. An induction head K-composes with a previous-token head.
    No ``[M,M]`` matrix is formed; the R of its QR decomposition replaces each factor.

    Args:
        value, out: kernels of the earlier layer.
        query, key: kernels of the later layer, for Q and K; both or neither.
        later_value, later_out: kernels of the later layer, for V; both or neither.

    Raises:
        ValueError: both pairs are missing, or a pair is incomplete.
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
    """``z_i W_i^O``: what each head adds to the residual stream. Summed over heads, plus the output projection's
    bias if any, this is the layer's output. Modules sow ``z`` as ``attention_heads["z"]``."""
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
