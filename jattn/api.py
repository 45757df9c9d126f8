"""Defines ``dot_product_attention``, its weights, folds over the weights, and ``explain``."""

import dataclasses
from typing import Any, Literal, SupportsIndex, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from jattn._blocks.reduction import FoldStep
from jattn._core import shard
from jattn._core.arguments import make_call, make_lse
from jattn._core.call import AttentionOptions, Call, ScoreOptions, Stack
from jattn._core.sinks import add_sinks, check_sinks, share_of_keys
from jattn._mods.keywords import suggest_keywords
from jattn._mods.pytree import split_arrays
from jattn._mods.validation import flag
from jattn.kernels import Implementation, OverDevices, dense
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.dispatch import check_implementation, choose, explain_choice
from jattn.masks import MaskFunction
from jattn.score_mods import ScoreMod


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    return_residual: Literal[False] = False,
    implementation: str | Implementation | None = None,
    **options: Unpack[AttentionOptions],
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    return_residual: Literal[True],
    implementation: str | Implementation | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...
@suggest_keywords
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None = None,
    implementation: str | Implementation | None = None,
    return_residual: bool = False,
    score_mod: ScoreMod | None = None,
    query_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> Any:
    """``softmax(scale * query key^T + bias, masked) value`` for every head: ``jax.nn.dot_product_attention`` and more.

    ``mask`` functions, ``score_mod``, ``is_causal``, ``local_window_size`` and dropout see positions. A position is the
    slot unless ``query_positions`` or ``kv_positions`` is given. Arrays (``bias``, ``mask``) and sequence lengths are
    indexed by slot.

    Args:
        query: ``[B,T,N,H]`` or ``[T,N,H]``, floating.
        key, value: ``[B,S,K,H]`` and ``[B,S,K,D]`` (or without B), in query's dtype; N is a multiple of K.
        bias: floats added to the scores, broadcastable to ``[B,N,T,S]``; rank 4, 3 (``[N,T,S]``) or 2 (``[T,S]``).
        mask: True where a query sees a key. A bool array shaped like ``bias``, a ``jattn.masks.Mask``, or a function
            ``(b, h, q_idx, kv_idx) -> bool``.
        scale: multiplies the scores; ``1 / sqrt(H)`` by default.
        is_causal: a query sees keys at or before its own position. If T differs from S, the mask is aligned top-left,
            as in ``jax.nn`` and PyTorch. For flash-attn's bottom-right alignment, also pass
            ``query_positions=np.arange(S - T, S)``.
        query_seq_lengths, key_value_seq_lengths: integers ``[B]``, the lengths without padding. Queries in later slots
            see nothing, and no query sees keys in later slots.
        local_window_size: ``(left, right)``, or one number for both: how many keys a query sees before and after its
            own, as in ``jax.nn``. Mistral's ``sliding_window`` of 4096 counts the query's own key: ``(4095, 0)``.
        implementation: None picks one. Otherwise a name from ``jattn.explain``, or an object with
            ``unsupported_reason`` and ``run``, such as a ``jattn.sharding.Ring``.
        return_residual: also return the log-sum-exp of each row of scores.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, applied to ``scale * q·k + bias`` before the mask.
        query_positions, kv_positions: integers ``[T]`` or ``[B,T]``, and ``[S]`` or ``[B,S]``; by default 0, 1, 2, ...
            They must fit in int32; traced values outside its range are clipped.
        sinks: floats ``[N]``, each head's score for attending to nothing. It is included in the softmax's denominator
            and the lse. Source: https://arxiv.org/abs/2309.17453 and gpt-oss's published code.
        dropout_rate: the probability of dropping a weight, in [0, 1], known at trace time.
        dropout_rng: a key from ``jax.random.key``, required if the rate is not 0. A hash of this key and (b, h, q, kv)
            decides whether a weight is dropped.
        broadcast_dropout: drop the same query-key pairs in all heads of all sequences.
        precision: the ``jax.lax.Precision`` of both products, or any ``precision`` that ``jax.numpy.einsum`` accepts.

    Returns:
        ``out [B,T,N,D]`` (or ``[T,N,D]``) in query's dtype. With ``return_residual``, ``(out, lse [B,T,N])``: lse is
        float32 (float64 for float64 input) and differentiable. A query that sees no key has output 0 and lse -inf (in
        ``jax.nn``: the mean of all values and a finite lse).

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype; the message names it.
        Unsupported: the named ``implementation`` does not support this call; the message gives the reason.

    Example:
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))  # [B,T,N,H]
        >>> out, lse = jattn.dot_product_attention(query, key, value, is_causal=True, return_residual=True)
        >>> out.shape, lse.shape
        ((1, 4, 2, 8), (1, 4, 2))
        >>> np.allclose(out[:, 0], value[:, 0], atol=1e-4)  # the first query sees the first key alone
        True
    """
    _check_value(value)
    with_lse = flag("return_residual", return_residual)
    call = make_call(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size, score_mod=score_mod,
        query_positions=query_positions, kv_positions=kv_positions, dropout_rate=dropout_rate, dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout, precision=precision,
    )  # fmt: skip
    out, lse = add_sinks(*_run(call, implementation), sinks)
    if jnp.ndim(query) == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if with_lse else out


def attend_in_stack(
    query: Array,
    key: Array,
    value: Array,
    stack: Stack,
    *,
    implementation: str | None = None,
    sinks: ArrayLike | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """``dot_product_attention`` with its residual, where key and value are a layer of ``stack``.

    Derivatives are with respect to key and value. They do not use the stack, which would otherwise be kept for each
    layer.
    """
    call = dataclasses.replace(make_call(query, key, value, **options), stack=stack)
    arrays, join = split_arrays(call)

    @jax.custom_jvp
    def attend(*arrays: Array) -> tuple[Array, Array]:
        return _run(join(arrays), implementation)

    @attend.defjvp
    def rule(arrays: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *x: _run(dataclasses.replace(join(x), stack=None), implementation), arrays, tangents)

    return add_sinks(*attend(*arrays), sinks)


def _run(call: Call, implementation: object) -> tuple[Array, Array]:
    if implementation is None or isinstance(implementation, str):
        return shard.on_each_device(choose(call, implementation).run, call, ("btnd", "btn"))
    return check_implementation(implementation).run(call)


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    sinks: ArrayLike | None = None,
    **options: Unpack[ScoreOptions],
) -> Array:
    """The weights ``[B,N,T,S]`` (or ``[N,T,S]``) of ``dot_product_attention``, before dropout; float32 (or float64).

    Rows sum to 1, to 0 if the query sees nothing, and to less than 1 with ``sinks``. Memory use is O(N·T·S). Computing
    the weights leaves the output of ``dot_product_attention`` bit-identical.

    Args:
        query, key: ``[B,T,N,H]`` and ``[B,S,K,H]`` (or without B), floating, of one dtype.
        bias: floats added to the scores; they broadcast to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        sinks: floats ``[N]``, each head's score for attending to nothing.
        options: the other keywords of ``dot_product_attention`` that change the weights: ``scale``, ``score_mod``,
            ``is_causal``, ``local_window_size``, ``query_seq_lengths``, ``key_value_seq_lengths``, ``query_positions``,
            ``kv_positions``, ``precision``.

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype; the message names it.

    Example:
        >>> query = key = jnp.zeros((1, 4, 2, 8))  # equal scores
        >>> weights = jattn.attention_weights(query, key, is_causal=True)
        >>> weights.shape, weights[0, 0, 1].tolist()
        ((1, 2, 4, 4), [0.5, 0.5, 0.0, 0.0])
    """
    call = make_call(query, key, None, bias, mask, **options)
    weights, lse = shard.on_each_device(dense.weights, call, ("bnts", "btn"))
    if sinks is not None:
        weights *= jnp.swapaxes(share_of_keys(lse, sinks), 1, 2)[..., None]
    return weights[0] if jnp.ndim(query) == 3 else weights


def fold_weights(
    step: FoldStep,
    init: Any,
    query: ArrayLike,
    key: ArrayLike,
    *,
    lse: ArrayLike | None = None,
    implementation: Blockwise | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    **options: Unpack[ScoreOptions],
) -> Any:
    """Folds ``step`` over the blocks of each head's weights, in O(T + S) memory, at any length.

    Each nonempty block updates the carry: ``carry = step(carry, weights, q_idx, kv_idx)``. The ``weights [t,s]`` match
    ``attention_weights`` and are float32 (float64 for float64 input). ``q_idx [t,1]`` and ``kv_idx [1,s]`` are the
    slots of the block's rows and columns.

    - The order and size of the blocks are unspecified, and blocks emptied by the mask are skipped. A step must
      therefore leave the carry unchanged where weights are 0.
    - The last blocks may extend past T and S. There, weights are 0 and slots are out of range: ``x.at[q_idx].add``
      drops them, and ``x[q_idx]`` reads the last entry.
    - If a step only adds to the carry, reverse mode also takes linear memory: no block is saved.

    Args:
        step: ``(carry, weights, q_idx, kv_idx) -> carry``; captured arrays are differentiated.
        init: the initial carry of each head, any pytree of arrays.
        query, key: ``[B,T,N,H]`` and ``[B,S,K,H]`` (or without B), floating, of one dtype.
        lse: ``[B,T,N]`` (or ``[T,N]``), from ``return_residual=True``; computed if None. With the lse of a call with
            sinks, rows sum to the share left by the sinks.
        implementation: a ``jattn.kernels.blockwise.Blockwise`` with custom block sizes.
        bias: floats added to the scores; they broadcast to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        options: the keywords of ``attention_weights`` except ``sinks``, such as ``scale`` and ``is_causal``.

    Returns:
        The final carries, each array with leading axes ``[B,N]`` (or ``[N]``).

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype, or the step changes its carry's shapes or
            dtypes.

    Example:
        The total weight received by each key. A sum over keys would be ``carry.at[q_idx[:, 0]].add(weights.sum(1))``.

        >>> def received(carry, weights, q_idx, kv_idx):
        ...     return carry.at[kv_idx[0]].add(weights.sum(0))
        >>> query, key = jax.random.normal(jax.random.key(0), (2, 1, 4, 2, 8))
        >>> sums = jattn.fold_weights(received, jnp.zeros(4), query, key)  # [B,N,S]
        >>> np.allclose(sums, jattn.attention_weights(query, key).sum(2), atol=1e-4)
        True
    """
    if implementation is not None and not isinstance(implementation, Blockwise):
        raise TypeError(f"implementation must be a jattn.kernels.blockwise.Blockwise, got {implementation!r}")
    call = make_call(query, key, None, bias, mask, **options)
    one_sequence = jnp.ndim(query) == 3
    if lse is not None:
        lse = make_lse(lse, call, one_sequence)

    def step_on_logs(carry: Any, log_weights: Array, q_idx: Array, kv_idx: Array) -> Any:
        return step(carry, jnp.exp(log_weights), q_idx, kv_idx)

    init = jax.tree.map(jnp.asarray, init)
    leaves, structure = jax.tree.flatten(init)

    def fold(call: Call, *data: Array) -> Any:  # on a mesh, sharded arrays must be arguments
        start, rest = structure.unflatten(data[: len(leaves)]), data[len(leaves) :]
        return (implementation or Blockwise()).fold_weights(call, step_on_logs, start, rest[0] if rest else None)

    extra = [*((leaf, "") for leaf in leaves), *([] if lse is None else [(lse, "btn")])]
    carries = shard.on_each_device(fold, call, jax.tree.map(lambda x: "bn", init), *extra)
    return jax.tree.map(lambda x: x[0], carries) if one_sequence else carries


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    implementation: Any = None,
    platform: str | None = None,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> str:
    """Says which implementation ``dot_product_attention`` picks for these arguments, and why it rejects the others.

    With a mask, the text also gives the share of the score matrix computed by the forward pass (averaged over
    sequences) and the block size, if the implementation reports them. Blocks emptied by traced arrays in a mask are
    known only when the call runs; in an eager call, every array counts as traced. Under ``jit``, NumPy arrays are
    known.

    For an ``implementation`` from ``jattn.sharding``, the text says what the mesh divides, how many bytes a device
    sends per call, and what each device runs.

    Args:
        query, key, value, bias, mask, options: the arguments of ``dot_product_attention``. Any array may be a
            ``jax.ShapeDtypeStruct``.
        implementation: ask about this name or object; None asks which one jattn would pick.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``, whether present or not; by default, the text covers all three.
        return_residual: accepted so that a call's arguments can be passed on; it does not affect the choice.

    Returns:
        The text, one finding per line.

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype. ``Unsupported`` is never raised.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
        >>> jattn.explain(x, x, x, is_causal=True, platform="tpu").splitlines()[:2]
        ['splash: taken on TPU', 'splash computes 56% of the pairs in blocks of 512 x 512']
        >>> by_head = jattn.sharding.HeadParallel(jax.make_mesh((jax.device_count(),), ("x",)), "x")
        >>> jattn.explain(x, x, x, implementation=by_head, platform="tpu").splitlines()[0].partition("; ")[2]
        'moves nothing'
    """
    # return_residual does not affect the choice.
    types, join = split_arrays(((query, key, value, bias, mask), dict(options)), jax.ShapeDtypeStruct, callable)
    texts: list[str] = []

    def trace(*arrays: Array) -> None:
        positional, named = join(arrays)
        texts.append(_explain(*positional, implementation=implementation, platform=platform, **named))

    jax.eval_shape(trace, *types) if types else trace()
    return texts[0]


def _explain(
    query: Any, key: Any, value: Any, *bias_and_mask: Any, implementation: Any, platform: str | None,
    sinks: Any = None, **options: Any,
) -> str:  # fmt: skip
    _check_value(value)
    call = make_call(query, key, value, *bias_and_mask, **options)
    if sinks is not None:
        check_sinks(sinks, call.query.shape[2])
    place = None if isinstance(implementation, OverDevices) else shard.mesh_axes_of(call)
    sharded = place.leaves_axes if place is not None else shard.may_be_sharded(call)
    text = explain_choice(call, implementation, platform, sharded)
    return text if place is None else f"{text}\non each device for itself, as the query's type says: {place}"


def _check_value(value: Any) -> None:
    if value is None:  # as make_call expects for attention_weights
        raise TypeError("value must be an array [B,S,K,D], got None; for the weights alone, use attention_weights")
