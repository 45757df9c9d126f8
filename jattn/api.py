"""``dot_product_attention``: checks the input, chooses an implementation, calls it."""

import operator
from typing import Any, SupportsIndex

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from jattn.attention import merge
from jattn.kernels import Implementation, Request, Unsupported, cudnn, xla
from jattn.masks import Causal, MaskFunction, SlidingWindow
from jattn.score_mods import ScoreMod

# The order in which ``implementation=None`` tries them: it takes the first whose ``why_not`` has no objection. cudnn
# stands behind xla, so it is taken by name alone, until the conformance table has passed on a GPU.
IMPLEMENTATIONS: dict[str, Implementation] = {"xla": xla, "cudnn": cudnn}


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    score_mod: ScoreMod | None = None,
    query_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    precision: Any = None,
) -> Any:
    """``softmax(scale * query key^T + bias, masked) value`` for every head: ``jax.nn.dot_product_attention`` and more.

    Positions against slots: ``mask`` functions, ``score_mod``, ``is_causal``, ``local_window_size`` and dropout go by
    position, which is the slot unless ``query_positions`` / ``kv_positions`` say otherwise. Arrays (``bias``, ``mask``)
    and sequence lengths go by slot.

    Args:
        query: ``[B,T,N,H]`` or ``[T,N,H]``, floating.
        key, value: ``[B,S,K,H]`` and ``[B,S,K,D]`` (or without B), of query's dtype; N a multiple of K.
        bias: added to the scores; broadcastable to ``[B,N,T,S]``; of rank 4, 3 (``[N,T,S]``) or 2 (``[T,S]``).
        mask: True where a query sees a key: a bool array like ``bias``, a ``jattn.masks.Mask``, or a function
            ``(b, h, q_idx, kv_idx) -> bool``.
        scale: of the scores; ``1 / sqrt(H)`` by default.
        is_causal: a query sees keys at its own position and before (top-left where T differs from S).
        query_seq_lengths, key_value_seq_lengths: integers ``[B]``; what stands behind is not seen, and sees nothing.
        local_window_size: ``(left, right)``, or one number for both: a query sees so many keys beside its own.
        implementation: a name from ``explain``; None takes the first that can.
        return_residual: also return the log-sum-exp.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, as in ``jattn.score_mods``.
        query_positions, kv_positions: integers ``[T]`` or ``[B,T]``, ``[S]`` or ``[B,S]``.
        sinks: floats ``[N]``: a score for attending to nothing, part of the softmax's denominator and of the lse.
            Source: https://arxiv.org/abs/2309.17453 and gpt-oss's published code.
        dropout_rate, dropout_rng: weights dropped with this probability, by a hash of the key and (b, h, q, kv).
        precision: of the products, as in ``jax.numpy.einsum``.

    Returns:
        ``out [B,T,N,D]`` (or ``[T,N,D]``) in query's dtype; with ``return_residual``, ``(out, lse [B,T,N])``, lse in
        float32 (float64 for float64 input) and differentiable. A query that sees no key gets 0 and lse -inf (in
        ``jax.nn``: the mean of all values, and a finite lse).

    Raises:
        ValueError, TypeError: an argument's shape or dtype does not fit; the message names it.
        Unsupported: the named ``implementation`` cannot do this; the message says why.
    """
    request = _request(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size, score_mod=score_mod,
        query_positions=query_positions, kv_positions=kv_positions, dropout_rate=dropout_rate, dropout_rng=dropout_rng,
        precision=precision,
    )  # fmt: skip
    out, lse = IMPLEMENTATIONS[_choose(request, implementation)].run(request)
    if sinks is not None:
        out, lse = merge(out, lse, jnp.zeros_like(out), _sinks(sinks, lse))
    if jnp.ndim(query) == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None = None,
    score_mod: ScoreMod | None = None,
    query_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    precision: Any = None,
) -> Array:
    """The weights ``[B,N,T,S]`` (or ``[N,T,S]``) of ``dot_product_attention``, before dropout; float32 (or float64).

    Same arguments, same meaning, same errors. Rows sum to 1; to 0 where nothing is seen; with ``sinks``, to less.
    Memory O(N·T·S). Asking for them does not change the bits of the output.
    """
    request = _request(
        query, key, None, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size, score_mod=score_mod,
        query_positions=query_positions, kv_positions=kv_positions, precision=precision,
    )  # fmt: skip
    weights, lse = xla.weights(request)
    if sinks is not None:
        # what the merge leaves of an output of 1 is the share that the sinks leave to the keys
        one = jnp.ones((*lse.shape, 1), lse.dtype)
        share, _ = merge(one, lse, jnp.zeros_like(one), _sinks(sinks, lse))
        weights *= jnp.swapaxes(share, 1, 2)
    return weights[0] if jnp.ndim(query) == 3 else weights


def explain(query: ArrayLike, key: ArrayLike, value: ArrayLike, *args: Any, **options: Any) -> str:
    """Which implementation ``dot_product_attention`` takes for these arguments, and why not the others, as text.

    Takes the same arguments and raises for the same mistakes, a named implementation that cannot excepted.
    """
    named = options.pop("implementation", None)
    sinks = options.pop("sinks", None)
    options.pop("return_residual", None)  # never changes the choice
    request = _request(query, key, value, *args, **options)
    if sinks is not None:
        _sinks(sinks, request.query[..., 0])
    if named is not None:
        _known(named)
    reasons = {name: implementation.why_not(request) for name, implementation in IMPLEMENTATIONS.items()}
    able = [name for name, reason in reasons.items() if reason is None]
    chosen = named if named is not None else able[0]
    lines = [f"{chosen}: taken" + (" by name" if named else "") if reasons[chosen] is None
             else f"{chosen}: named, but {reasons[chosen]}"]  # fmt: skip
    for name, reason in reasons.items():
        if name != chosen:
            lines.append(f"{name}: {reason or 'could, too; name it to take it'}")
    return "\n".join(lines)


def _choose(request: Request, named: str | None) -> str:
    if named is None:
        return next(name for name, one in IMPLEMENTATIONS.items() if one.why_not(request) is None)
    reason = _known(named).why_not(request)
    if reason is not None:
        raise Unsupported(f"implementation={named!r} cannot do this: {reason}; implementation=None takes one that can")
    return named


def _known(name: str) -> Implementation:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name]


def _request(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, score_mod=None, query_positions=None, kv_positions=None,
    dropout_rate=0.0, dropout_rng=None, precision=None,
) -> Request:  # fmt: skip
    """The checked request: everything batched, masks that were keywords as masks."""
    query, key, value = _qkv(query, key, value)
    B, T, N, H = query.shape
    S = key.shape[1]
    masks: list[MaskFunction] = [Causal()] if is_causal else []
    if local_window_size is not None:
        masks.append(SlidingWindow(*_window(local_window_size)))
    slot_mask = None
    if callable(mask):
        masks.append(mask)
    elif mask is not None:
        slot_mask = _pairs("mask", mask, (B, N, T, S))
        if slot_mask.dtype != bool:
            raise TypeError(f"mask must be bool (True: visible), got {slot_mask.dtype}; what is to be added is bias=")
    if bias is not None:
        bias = _pairs("bias", bias, (B, N, T, S))
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias must be floating (it is added to the scores), got {bias.dtype}; bools are mask=")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a callable (score, b, h, q_idx, kv_idx) -> score, got {type(score_mod)}")
    return Request(
        query=query,
        key=key,
        value=value,
        scale=H**-0.5 if scale is None and H else scale,
        bias=bias,
        slot_mask=slot_mask,
        masks=tuple(masks),
        query_lengths=_lengths("query_seq_lengths", query_seq_lengths, B),
        kv_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, B),
        score_mod=score_mod,
        query_positions=_positions("query_positions", query_positions, B, T),
        kv_positions=_positions("kv_positions", kv_positions, B, S),
        dropout=_dropout(dropout_rate, dropout_rng),
        precision=precision,
    )


def _qkv(query, key, value) -> tuple[Array, Array, Array | None]:
    arrays = {"query": query, "key": key} if value is None else {"query": query, "key": key, "value": value}
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    shapes = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays.items())
    rank = arrays["query"].ndim
    if rank not in (3, 4) or any(x.ndim != rank for x in arrays.values()):
        raise ValueError(
            f"query, key, value must all be [B, length, heads, dim] or all [length, heads, dim], got {shapes}"
        )
    if len({x.dtype for x in arrays.values()}) != 1 or not jnp.issubdtype(arrays["query"].dtype, jnp.floating):
        raise TypeError(f"query, key and value must have one floating dtype, got {shapes}; cast them first")
    arrays = {name: x[None] if rank == 3 else x for name, x in arrays.items()}
    query, key, value = arrays["query"], arrays["key"], arrays.get("value")
    wrong = None
    if any(x.shape[0] != query.shape[0] for x in arrays.values()):
        wrong = "one batch size"
    elif key.shape[3] != query.shape[3]:
        wrong = "one head dim for query and key (the last axis)"
    elif value is not None and value.shape[1:3] != key.shape[1:3]:
        wrong = "one length and one number of heads for key and value"
    elif key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        wrong = "query heads that are a multiple of the key/value heads"
    if wrong:
        raise ValueError(f"dot_product_attention needs {wrong}, got {shapes} (layout [B, length, heads, dim])")
    return query, key, value


def _pairs(name: str, array: ArrayLike, full: tuple[int, ...]) -> Array:
    """``bias`` or ``mask`` as ``[B|1, N|1, T|1, S|1]``."""
    array = jnp.asarray(array)
    axes = full[4 - array.ndim :] if 2 <= array.ndim <= 4 else ()
    if not axes or any(size not in (1, wanted) for size, wanted in zip(array.shape, axes, strict=True)):
        B, N, T, S = full
        hint = ""
        if array.shape == (B, S):
            hint = f"; a padding mask [B, S] is {name}[:, None, None, :]"
        elif array.shape in ((B, T, S), (B, 1, S)):
            hint = f"; one per sequence is {name}[:, None]"
        raise ValueError(
            f"{name} must broadcast to [B, N, T, S] = {list(full)} and have rank 4, 3 ([N, T, S]) or 2 ([T, S]), "
            f"got shape {list(array.shape)}{hint}"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _lengths(name: str, lengths: ArrayLike | None, batch: int) -> Array | None:
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers [B] = [{batch}], got {lengths.dtype} of shape {list(lengths.shape)}")
    return lengths


def _positions(name: str, positions: ArrayLike | None, batch: int, length: int) -> Array | None:
    if positions is None:
        return None
    positions = jnp.asarray(positions)
    if positions.shape not in ((length,), (batch, length), (1, length)) or not jnp.issubdtype(
        positions.dtype, jnp.integer
    ):
        raise ValueError(
            f"{name} must be integers [{length}] or [B, length] = [{batch}, {length}], "
            f"got {positions.dtype} of shape {list(positions.shape)}"
        )
    return positions.reshape(-1, length)


def _window(window: SupportsIndex | tuple[SupportsIndex, SupportsIndex]) -> tuple[int, int]:
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or any(operator.index(side) < 0 for side in sides):  # NumPy's integers are welcome, too
        raise ValueError(f"local_window_size must be (left, right) or one number, none negative, got {window}")
    return operator.index(sides[0]), operator.index(sides[1])


def _dropout(rate: float, rng: Array | None) -> tuple[float, Array] | None:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must lie in [0, 1), got {rate}")
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(f"dropout_rate={rate} needs dropout_rng, a key from jax.random.key; or pass dropout_rate=0")
    return rate, rng


def _sinks(sinks: ArrayLike, lse: Array) -> Array:
    """``sinks [N]`` in lse's shape ``[B,T,N]`` and dtype."""
    sinks = jnp.asarray(sinks)
    if sinks.shape != lse.shape[2:] or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be floats [N] = {list(lse.shape[2:])}, got {sinks.dtype} of shape {list(sinks.shape)}"
        )
    return jnp.broadcast_to(sinks.astype(lse.dtype).reshape(1, 1, -1), lse.shape)
