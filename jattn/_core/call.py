"""Defines ``Call``, the record of one attention call, taken by every implementation.

An option is declared only here: its keyword in a ``TypedDict``, for type checkers, and its field. The field determines
checks (``jattn._core.arguments``), one head's part (``jattn._core.vmap``), a device's part (``jattn._core.shard``), the
parts cut out by ``Call.take``, and the message of a kernel that rejects it.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jattn._core.chunk import Chunk, Slots, slot_indices, take
from jattn._core.dropout import Dropout
from jattn._mods.arrays import AnyArray, Index, Length
from jattn._mods.pytree import pytree_dataclass
from jattn.masks import MaskFunction
from jattn.score_mods import ScoreMod

MaskLike = ArrayLike | MaskFunction | Sequence[ArrayLike | MaskFunction]


class ModOptions(TypedDict, total=False):
    """The keywords that change scores, shared by calls of one head, calls of all heads, and Flax's modules."""

    scale: ArrayLike | None
    score_mod: ScoreMod | None


class SharedOptions(ModOptions, total=False):
    """The keywords shared by calls of one head and calls of all heads."""

    query_positions: ArrayLike | None
    kv_positions: ArrayLike | None
    precision: jax.lax.PrecisionLike


class HeadOptions(SharedOptions, total=False):
    """The keywords of ``jattn.attend`` except ``head``."""

    mask: MaskLike | None
    bias: Float[Array, "#T #S"] | None
    batch: ArrayLike | None
    dropout: tuple[float, Array] | Dropout | None


class ScoreOptions(SharedOptions, total=False):
    """The keywords of ``jattn.dot_product_attention`` that affect the weights, except ``bias``, ``mask`` and sinks."""

    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None


class AttentionOptions(ScoreOptions, total=False):
    """The keywords of ``jattn.dot_product_attention`` that affect the output, except ``bias`` and ``mask``."""

    sinks: ArrayLike | None
    dropout_rate: float
    dropout_rng: Array | None
    broadcast_dropout: bool


@pytree_dataclass
class Stack:
    """The keys and values of all layers, including the call's own, for kernels that read them in place.

    To hand a layer to a kernel, XLA copies it, which takes as long as attending to it. ``Call.key`` and ``value`` are
    not copied if the kernel does not read them. Differentiated calls have no stack (``jattn.api.attend_in_stack``).
    """

    key: Float[Array, "L B S K H"]
    value: Float[Array, "L B S K D"]
    layer: Any  # an index


def _option(
    axes: str = "", *, kind: Any = None, refused: str | None = None, static: bool = False, default: Any = None
) -> Any:
    """A field of ``Call``.

    Args:
        axes: the axes of its array, in lowercase letters of the legend; ``c`` is the S of all devices in a ring. An
            axis after ``#`` may have size 1 if its entries are shared; leading axes of this kind may be omitted.
        kind: the kind of its entries: ``jnp.floating``, ``jnp.integer`` or ``bool``.
        refused: why a kernel without support for the option rejects the call; if not given, every kernel supports the
            option.
        static: whether it is a hashable part of the program.
    """
    metadata = {"axes": tuple(re.findall("#?[a-z]", axes)), "kind": kind, "refused": refused, "static": static}
    return dataclasses.field(default=default, metadata=metadata)


@pytree_dataclass
class Call:
    """One checked attention call: of all heads of all sequences, or, without the axes b, n and k, of one head.

    ``bias`` and ``slot_masks`` are indexed by slot. ``masks`` and ``score_mod`` see positions; None means the slots
    themselves. Masks and positions given as NumPy arrays stay NumPy arrays, which are static while tracing. Sinks are
    not part of the call; they are merged into the result (``jattn._core.sinks``).
    """

    query: Array = _option("btnh", kind=jnp.floating)
    key: Array = _option("bskh", kind=jnp.floating)
    value: Any = _option("bskd", kind=jnp.floating)  # None if only the weights are needed
    scale: AnyArray | int | float | None = _option()  # None: 1 / sqrt(H)
    bias: Array | None = _option("#b#n#t#c", kind=jnp.floating, refused="it takes no bias")
    # A pair is visible if all masks and slot_masks agree.
    masks: tuple[MaskFunction, ...] = _option(default=(), refused="it takes no masks")
    slot_masks: tuple[AnyArray, ...] = _option("#b#n#t#c", kind=bool, default=(), refused="it takes no mask array")
    # Included in the slot_masks.
    query_seq_lengths: AnyArray | None = _option("b", kind=jnp.integer, refused="it takes no lengths of queries")
    key_value_seq_lengths: AnyArray | None = _option("b", kind=jnp.integer, refused="it takes no lengths of keys")
    score_mod: ScoreMod | None = _option(refused="it takes no score_mod")
    query_positions: AnyArray | None = _option("#bt", kind=jnp.integer, refused="it takes no positions of queries")
    kv_positions: AnyArray | None = _option("#bs", kind=jnp.integer, refused="it takes no positions of keys")
    dropout: Dropout | None = _option(refused="it takes no dropout")
    # The indices of its first sequence and head, as seen by masks, score functions and dropout.
    first_batch: Index = _option(default=0)
    first_head: Index = _option(default=0)
    stack: Stack | None = _option()  # for exactly this key and value; otherwise None
    precision: jax.lax.PrecisionLike = _option(static=True, refused="it has no precision setting")
    sharded: bool = _option(static=True, default=False)  # arrays may lie on several devices; set by ``canonical``

    @property
    def lengths(self) -> tuple[Length, Length]:
        """T and S."""
        axis = int(self.query.ndim == 4)
        return self.query.shape[axis], self.key.shape[axis]

    @property
    def score_scale(self) -> AnyArray | int | float:
        """``scale``, with the default as a number."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def indices(self) -> tuple[Any, Any, Array, Array]:
        """The indices seen by one head's masks, score functions and dropout: ``(b, h, q_idx [T,1], kv_idx [1,S])``."""
        rows, columns = (
            jnp.arange(length, dtype=jnp.int32) if positions is None else positions
            for length, positions in zip(self.lengths, (self.query_positions, self.kv_positions), strict=True)
        )
        return self.first_batch, self.first_head, jnp.asarray(rows)[:, None], jnp.asarray(columns)[None, :]

    def has(self, option: str) -> bool:
        """Whether the option with this field is given; ``slot_masks`` made from lengths do not count."""
        value = getattr(self, option)
        if not isinstance(value, tuple):
            return value is not None
        lengths = (self.query_seq_lengths, self.key_value_seq_lengths) if option == "slot_masks" else ()
        return len(value) > sum(x is not None for x in lengths)

    def take(
        self,
        *,
        rows: Slots | None = None,
        columns: Slots | None = None,
        heads: Chunk | None = None,
        pair_columns: Chunk | None = None,
    ) -> "Call":
        """The call restricted to some of its queries and heads, over some of its keys.

        This also slices bias and mask arrays. Masks, score functions and dropout see the same heads and positions as in
        the whole call; positions not given become the selected slots. The lengths count slots of the whole call, so
        only the mask arrays made from them remain.

        Args:
            rows, columns: the slots of queries and of keys.
            heads: key/value heads, with the query heads that share them.
            pair_columns: the columns of bias and mask arrays, if they differ from ``columns``.
        """
        group = self.query.shape[2] // self.key.shape[2]
        query_heads = None if heads is None else Chunk(heads.first * group, heads.size * group)
        slots = {"t": rows, "s": columns, "c": pair_columns or columns, "k": heads, "n": query_heads}

        def cut(x: AnyArray, axes: Sequence[str]) -> AnyArray:
            for axis, letter in enumerate(axes):
                part = slots.get(letter[-1])
                if part is not None and not (letter[0] == "#" and x.shape[axis] == 1):
                    x = take(x, part, axis)
            return x

        fields: dict[str, Any] = {}
        for name, (axes, _) in ARRAYS.items():
            fields[name] = jax.tree.map(lambda x, axes=axes: cut(x, axes), getattr(self, name))
        for positions, lengths, part in (
            ("query_positions", "query_seq_lengths", rows),
            ("kv_positions", "key_value_seq_lengths", columns),
        ):
            if part is not None:
                fields[lengths] = None
                if fields[positions] is None:
                    fields[positions] = slot_indices(part)[None]
        if query_heads is not None:
            fields["first_head"] = self.first_head + query_heads.first
        stack = self.stack if columns is None and heads is None else None
        return dataclasses.replace(self, stack=stack, **fields)

    def __repr__(self) -> str:
        """Its non-default fields, with arrays shown by type."""
        shown = jax.tree.map(lambda x: _Bare(f"{x.dtype}{list(x.shape)}") if hasattr(x, "dtype") else x, self)
        fields = (f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not f.default)
        return f"Call({', '.join(f'{name}={getattr(shown, name)!r}' for name in fields)})"


class _Bare(str):
    __repr__ = str.__str__


_FIELDS = {field.name: field.metadata for field in dataclasses.fields(Call)}
# By field: the axes of its arrays, with axes that may be shared after ``#``, and the kind of entries. AXES: letters
# only.
ARRAYS: Mapping[str, tuple[tuple[str, ...], Any]] = {
    name: (of["axes"], of["kind"]) for name, of in _FIELDS.items() if of["axes"]
}
AXES: Mapping[str, str] = {name: "".join(axes).replace("#", "") for name, (axes, _) in ARRAYS.items()}
# By option: the message with which a kernel refuses it.
REFUSED: Mapping[str, str] = {name: of["refused"] for name, of in _FIELDS.items() if of["refused"]}


def softmax_dtype(x: Array) -> Any:
    """The dtype of scores, weights and lse: float32, or float64 for float64 input."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
