"""Maps a function of one head over all heads of a sequence, and over all sequences of a call."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jattn._core.attention import convert_mods
from jattn._core.call import AXES, Call, softmax_dtype
from jattn._core.shard import may_be_sharded
from jattn._mods.arrays import AnyArray

# A function of one head: ``(q [T,H], k [S,H], v [S,D], *rest) -> pytree of arrays``; v may be None.
HeadFunction = Callable[Concatenate[Array, Array, Any, ...], PyTree]
Mapped = Callable[..., PyTree]
Lift = Callable[..., Mapped]  # ``jax.vmap``, or a loop: ``(fn, in_axes, out_axes) -> fn over an axis``


def over_heads(fn: HeadFunction, out_axes: PyTree[int] = 1, *, lift: Lift = jax.vmap) -> Mapped:
    """Maps ``fn(q [T,H], k [S,H], v [S,D], *rest)`` of one head over all heads of a sequence, by ``vmap``.

    If K < N, each group of N/K consecutive query heads shares a key and value head, which is not repeated
    (grouped-query attention, https://arxiv.org/abs/2305.13245).

    Args:
        fn: the function of one head. If it has a keyword-only argument ``head``, as ``attend`` and
            ``functools.partial(attend, ...)`` do, it receives the head's index.
        out_axes: the head axis of each output, counted from the front, as in ``jax.vmap``.
        lift: ``jax.vmap``, or ``jattn._core.vmap.sequential_vmap`` to run the heads in a loop.

    Returns:
        A function of ``query [T,N,H]``, ``key [S,K,H]``, ``value [S,K,D]`` and arrays ``rest`` with a leading axis of N
        (one entry per head) or 1 (shared by all). ``value`` and ``rest`` may be None. It raises ``ValueError`` if N is
        not a multiple of K.

    Example:
        >>> from functools import partial
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 4, 2, 8))  # [T,N,H]
        >>> alibi = jattn.score_mods.Alibi(jattn.score_mods.alibi_slopes(2))  # differs by head
        >>> out, lse = jattn.over_heads(partial(jattn.attend, score_mod=alibi))(query, key, value)
        >>> np.allclose(out, jattn.dot_product_attention(query, key, value, score_mod=alibi), atol=1e-4)
        True
    """
    if _takes_head(fn):

        def with_head(q: Array, k: Array, v: Any, index: Array, *rest: Any) -> PyTree:
            return fn(q, k, v, *rest, head=index)

        one_head = over_heads(with_head, out_axes, lift=lift)
        return lambda query, key, value, *rest: one_head(query, key, value, jnp.arange(query.shape[1]), *rest)

    def mapped(query: AnyArray, key: AnyArray, value: Any, *rest: Any) -> PyTree:
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_kv_heads == 0 or num_heads % num_kv_heads:
            raise ValueError(f"the {num_heads} query heads must be a multiple of the {num_kv_heads} key/value heads")
        arrays, axes = map_axes(rest)
        value_axis = None if value is None else 1
        if num_heads == num_kv_heads:
            return lift(fn, in_axes=(1, 1, value_axis, *axes), out_axes=out_axes)(query, key, value, *arrays)
        groups = (num_kv_heads, num_heads // num_kv_heads)
        query = query.reshape(query.shape[0], *groups, *query.shape[2:])
        arrays = [x if axis is None else x.reshape(*groups, *x.shape[1:]) for x, axis in zip(arrays, axes, strict=True)]
        one_group = lift(fn, in_axes=(1, None, None, *axes), out_axes=out_axes)
        out = lift(one_group, in_axes=(1, 1, value_axis, *axes), out_axes=out_axes)(query, key, value, *arrays)

        def join(axis: int, part: PyTree) -> PyTree:  # joins the kv head axis with the query head axis after it
            return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], num_heads, *x.shape[axis + 2 :]), part)

        return jax.tree.map(join, out_axes, out)

    return mapped


def _takes_head(fn: HeadFunction) -> bool:
    """Whether ``fn`` has an unbound keyword-only argument ``head``."""
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    try:
        return "head" not in bound and inspect.signature(fn).parameters["head"].kind == inspect.Parameter.KEYWORD_ONLY
    except (KeyError, TypeError, ValueError):
        return False


def sequential_vmap(
    fn: Mapped, in_axes: Sequence[int | None], out_axes: PyTree[int] = 0, *, recompute: bool = False
) -> Mapped:
    """``jax.vmap(fn, in_axes, out_axes)`` as a loop, so that only one call's arrays are live at a time.

    ``recompute``: the backward pass calls ``fn`` again instead of saving each call's residuals.
    """

    def mapped(*args: Any) -> PyTree:
        (count,) = {x.shape[axis] for x, axis in zip(args, in_axes, strict=True) if axis is not None}
        if count == 0:
            return jax.vmap(fn, in_axes, out_axes)(*args)

        def call(i: Array) -> PyTree:
            # Index inside the loop: lax.map over the arrays would first copy them with this axis moved to the front.
            pick = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
            return fn(*(x if axis is None else pick(x, axis=axis) for x, axis in zip(args, in_axes, strict=True)))

        def move(axis: int, part: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), part)

        # The checkpoint includes the indexing; otherwise the slices would be saved for every call.
        called = jax.checkpoint(call, prevent_cse=False) if recompute else call
        return jax.tree.map(move, out_axes, jax.lax.map(called, jnp.arange(count)))

    return mapped


def map_axes(arrays: Sequence[Any]) -> tuple[list, list]:
    """``arrays`` for ``vmap`` and their ``in_axes``: a leading axis of 1 is dropped and shared; others are mapped."""
    shared = [x is None or x.shape[0] == 1 for x in arrays]
    arrays = [x[0] if is_shared and x is not None else x for x, is_shared in zip(arrays, shared, strict=True)]
    return arrays, [None if is_shared else 0 for is_shared in shared]


def canonical(call: Call) -> Call:
    """The *canonical call*: a checked call in a form in which equivalent calls are equal and share one compilation.

    Plain masks and score functions are traced, with their captured arrays as leaves, and the scale becomes an array in
    the softmax's dtype. The default scale is dropped (None), because kernels with a built-in default need not multiply
    by it. ``sharded`` records whether the arrays may lie on several devices, which types no longer show at lowering;
    ``make_call`` has already broadcast batch axes and the rank of bias and mask arrays.
    """
    scale, head_dim = call.scale, call.query.shape[-1]
    if scale is not None:
        is_default = isinstance(scale, float) and isinstance(head_dim, int) and head_dim > 0 and scale == head_dim**-0.5
        scale = None if is_default else jnp.asarray(scale, softmax_dtype(call.query))
    return convert_mods(dataclasses.replace(call, scale=scale, sharded=may_be_sharded(call)))


def over_call(
    one_head: Callable[Concatenate[Call, ...], PyTree],
    call: Call,
    out_axes: PyTree[int],
    *,
    per_head: Sequence[Any] = (),
    per_sequence: Sequence[Any] = (),
    sequences: Lift = jax.vmap,
    heads: Lift = jax.vmap,
) -> Any:
    """``one_head(head, *per_head, *per_sequence)`` for every head of every sequence, where ``head`` is its ``Call``.

    Args:
        out_axes: the head axis of each output, not counting the batch axis, which comes first.
        per_head, per_sequence: arrays with leading axes ``[B|1, N|1]`` and ``[B|1]``. NumPy arrays with a leading axis
            of size 1 stay NumPy arrays.
        sequences, heads: ``sequential_vmap`` to run them one by one, with the arrays of only one live at a time.
    """
    of_heads, of_sequences = {}, {}
    for name in AXES.keys() - {"query", "key", "value", "query_seq_lengths", "key_value_seq_lengths"}:
        of_each = of_heads if "n" in AXES[name] else of_sequences
        shared = AXES[name][0] != "b"
        of_each[name] = jax.tree.map(lambda x, shared=shared: x[None] if shared else x, getattr(call, name))
    head_arrays, join_head = jax.tree.flatten((of_heads, tuple(per_head)))
    sequence_arrays, join_sequence = jax.tree.flatten((of_sequences, tuple(per_sequence)))
    arrays, axes = map_axes([*head_arrays, *sequence_arrays])

    def one_sequence(batch: Array, query: Array, key: Array, value: Any, *arrays: Any) -> PyTree:
        fields, of_sequence = join_sequence.unflatten(arrays[len(head_arrays) :])
        # The lengths count slots of the whole call, so only the masks made from them remain.
        fields |= {"query_seq_lengths": None, "key_value_seq_lengths": None, "stack": None, "first_batch": batch}

        def with_fields(q: Array, k: Array, v: Any, index: Array, *arrays: Any) -> PyTree:
            of_head, rest = join_head.unflatten(arrays)
            head = dataclasses.replace(call, query=q, key=k, value=v, first_head=index, **fields, **of_head)
            return one_head(head, *rest, *of_sequence)

        index, arrays = call.first_head + jnp.arange(call.query.shape[2]), arrays[: len(head_arrays)]
        return over_heads(with_fields, out_axes, lift=heads)(query, key, value, index, *arrays)

    batch = call.first_batch + jnp.arange(call.query.shape[0])
    value_axis = None if call.value is None else 0
    return sequences(one_sequence, in_axes=(0, 0, 0, value_axis, *axes))(
        batch, call.query, call.key, call.value, *arrays
    )
