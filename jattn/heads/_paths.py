"""Measures paths between heads (``path_patch``) and attributes scores to parts of the stream (``qk_attribution``)."""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PyTree

from jattn._core.call import softmax_dtype
from jattn.heads._ablation import Heads, group_gates, run_each, with_axes


def path_patch(
    read: Callable[[Array], PyTree[Array]],
    stream: Array,
    own: Sequence[Mapping[str, Array]],
    source: Sequence[Mapping[str, Array]],
    out: Sequence[Array],
    *,
    groups: Sequence[Heads] | None = None,
    batch_size: int | None = None,
) -> PyTree[Array]:
    """Path patching: ``read(stream + (z_source - z_own) W_O)`` for each head; results have leading axes ``[L,N]``.

    Only what the reader reads directly from that head comes from the other run, the source. All heads and MLPs in
    between keep their values from this run. With ``groups``, each result patches the paths of one group of heads
    together, and results have one leading axis ``[len(groups)]``. Wrap the call in ``jax.jit``.

    Args:
        read: a function from a residual stream to a result. To patch paths into the logits, it computes them from the
            last stream. To patch paths into a head, it runs the model with that layer's ``patch`` set to the query,
            key or value that the layer projects from the stream.
        stream: ``[B,T,M]``, what the reader reads in this run.
        own, source: the values sown by the attention of the L layers before the reader in this run and in the other
            (``collect(sown)``), as lists of dicts with ``"z"`` ``[B,T,N,D]``.
        out: a list of these layers' output kernels, ``[N,D,M]``.
        groups: lists of ``(layer, head)`` pairs to patch together.
        batch_size: the number of heads, or groups, to run at once; all by default. Smaller batches take less memory.

    Raises:
        ValueError: ``own``, ``source`` and ``out`` have different numbers of layers or shapes; there are no groups, or
            a head does not exist.

    Example:
        >>> own, source = [{"z": jnp.zeros((1, 3, 2, 4))}], [{"z": jnp.ones((1, 3, 2, 4))}]  # [B,T,N,D] of one layer
        >>> out = jnp.zeros((2, 4, 5)).at[0, :, 1].set(1.0)  # [N,D,M]: head 0 writes to feature 1, head 1 nothing
        >>> read = lambda stream: stream[0, -1, 1]  # the reader takes it from there, at the last token
        >>> jattn.heads.path_patch(read, jnp.zeros((1, 3, 5)), own, source, [out]).tolist()
        [[4.0, 0.0]]

    Source: https://arxiv.org/abs/2211.00593 (Wang et al.), section 3.1, and https://arxiv.org/abs/2304.05969.
    """
    if not len(own) == len(source) == len(out) or not len(own):
        raise ValueError(
            f"own, source and out must have an entry for each layer, got {len(own)}, {len(source)} and {len(out)}"
        )
    if any("z" not in layer for layer in (*own, *source)):
        raise ValueError("each layer of own and source must hold 'z'")
    shapes = {
        (mine["z"].shape, other["z"].shape, kernel.shape)
        for mine, other, kernel in zip(own, source, out, strict=True)
    }  # fmt: skip
    expected = next(iter(shapes))
    z = expected[0]
    if len(shapes) > 1 or expected != (z, z, (*z[-2:], stream.shape[-1])) or stream.shape[:-1] != z[:-2]:
        raise ValueError(
            f"own and source must have z [B, T, N, D] and out [N, D, M] of one shape in all layers, for the stream "
            f"{list(stream.shape)}, got {sorted(shapes)}"
        )
    change = jnp.stack([other["z"] - mine["z"] for mine, other in zip(own, source, strict=True)])
    kernels, axes = jnp.stack(list(out)), (len(own), z[-2])

    def read_from(number: Array) -> PyTree[Array]:
        layer, head = jnp.unravel_index(number, axes)
        return read(stream + jnp.matmul(change[layer, ..., head, :], kernels[layer, head]).astype(stream.dtype))

    def read_from_group(gates: Array) -> PyTree[Array]:
        added = jnp.einsum("l...nd,lndm->...m", change, kernels * (1 - gates)[..., None, None].astype(kernels.dtype))
        return read(stream + added.astype(stream.dtype))

    if groups is not None:
        return run_each(read_from_group, group_gates(groups, axes), batch_size)
    return with_axes(run_each(read_from, jnp.arange(axes[0] * axes[1]), batch_size), axes)


def qk_attribution(
    query_parts: Array,
    key_parts: Array,
    query: Mapping[str, Array],
    key: Mapping[str, Array],
    *,
    position: Callable[[Array, Array], Array] | None = None,
    query_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    scale: float | None = None,
) -> Float[Array, "E N P R"]:
    """Attributes scores to pairs of parts of the residual stream: ``[E,N,P,R]``, for E query-key pairs.

    A score is bilinear in what query and key read: ``sum_ij scale * R(x_i W_Q) . R(y_j W_K)`` over the parts of both,
    with R a linear position embedding, such as ``Rotary``. The sum of the result over its last two axes is the score
    before any mask, bias or score function. The computation uses at least float32.

    Args:
        query_parts: ``[P,E,M]``, the parts of the stream at the queries, such as heads' outputs
            (``residual_contributions``). If a norm precedes the layer, pass the parts after it, with its scale fixed.
        key_parts: ``[R,E,M]``, the same at the keys.
        query, key: the parameters, ``{"kernel": [M,N,H]}`` and ``{"kernel": [M,K,H]}``. Their ``"bias"``, if any,
            counts as one more part at the end, for P + 1 or R + 1 parts.
        position: ``(x, positions) -> x``, linear in x, such as ``jattn.positions.Rotary()``. If its frequencies depend
            on the length of the text, pass ``jattn.positions.at_length(position, length)``.
        query_positions, kv_positions: integers ``[E]``, needed with ``position``.
        scale: factor on the scores; ``1 / sqrt(H)`` by default.

    Raises:
        ValueError: parts do not match each other or the kernels; ``position`` is given without positions.

    Example:
        >>> query_parts = jnp.array([[[1.0, 0.0]], [[0.0, 2.0]]])  # [P,E,M]: a token, and what a head wrote there
        >>> key_parts = jnp.array([[[3.0, 0.0]]])  # [R,E,M]
        >>> kernel = {"kernel": jnp.eye(2)[:, None]}  # [M,N,H]
        >>> score = jattn.heads.qk_attribution(query_parts, key_parts, kernel, kernel, scale=1.0)
        >>> score[0, 0].tolist()  # the key matches the token, and not what the head wrote
        [[3.0], [0.0]]
    """
    for name, parts, params in (("query_parts", query_parts, query), ("key_parts", key_parts, key)):
        M, E = params["kernel"].shape[0], query_parts.shape[1]
        if parts.ndim != 3 or parts.shape[1:] != (E, M):
            raise ValueError(f"{name} must be [parts, E, M] = [parts, {E}, {M}], got shape {list(parts.shape)}")
    if position is not None and (query_positions is None or kv_positions is None):
        raise ValueError("position needs query_positions and kv_positions, the positions [E] of the queries and keys")
    q, k = _projected(query_parts, query), _projected(key_parts, key)  # [P,E,N,H], [R,E,K,H]
    if position is not None:
        q, k = position(q, jnp.asarray(query_positions)), position(k, jnp.asarray(kv_positions))
    N, H = q.shape[-2:]
    if N % k.shape[-2]:
        raise ValueError(f"{N} query heads cannot share {k.shape[-2]} key heads")
    k = jnp.repeat(k, N // k.shape[-2], -2)
    return jnp.einsum("penh,renh->enpr", q, k, precision="highest") * (H**-0.5 if scale is None else scale)


def _projected(parts: Array, params: Mapping[str, Array]) -> Array:
    """Each part's share of the projection, and the bias as one more part."""
    dtype = softmax_dtype(parts)
    kernel = params["kernel"].astype(dtype)
    shares = jnp.einsum("pem,mnh->penh", parts.astype(dtype), kernel, precision="highest")
    bias = params.get("bias")
    if bias is None:
        return shares
    return jnp.concatenate([shares, jnp.broadcast_to(bias.astype(dtype), (1, *shares.shape[1:]))])
