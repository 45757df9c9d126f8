"""Attention over the devices of a mesh: heads divided (``head_parallel_attention``), the sequence (``ring_attention``).

With a causal mask the last device of a ``"contiguous"`` layout has the most work, the first hardly any. In a
``"zigzag"`` layout the sequence is cut into two chunks for each device, which has the p-th from the front and the p-th
from the back: the same work for all, in every step. Source: Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jattn.api import dot_product_attention
from jattn.blocks import tile, visible_blocks
from jattn.choice import choose, known
from jattn.kernels import shards
from jattn.kernels.blockwise import Blockwise, block_table
from jattn.kernels.shards import Placement
from jattn.masks import MaskFunction
from jattn.request import AttentionOptions, Request
from jattn.ring import LAYOUTS, Circle, attend, fold

Axes = str | Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class HeadParallel:
    """``implementation=`` of ``jattn.dot_product_attention`` and the modules: heads over ``axis_name`` of ``mesh``.

    Each device attends with its own heads, and nothing travels. Arguments as of ``head_parallel_attention``.
    """

    mesh: jax.sharding.Mesh
    axis_name: Axes
    batch_axis: Axes = None
    implementation: str | None = None

    def __post_init__(self):
        _check(self, heads="axis_name", batch="batch_axis")

    def why_not(self, request: Request) -> str | None:
        """None, or what each device's implementation, named, has against it."""
        return None if self.implementation is None else known(self.implementation).why_not(request)

    def run(self, request: Request) -> tuple[Array, Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``."""
        return self.per_device(choose(request, self.implementation).run, request, ("btnd", "btn"))

    def per_device(self, fn: Callable, request: Request, out_axes: Any, *extra: tuple[Array, str]) -> Any:
        """``shards.per_device`` with heads and sequences divided."""
        axes = {"batch": ("batch_axis", self.batch_axis), "heads": ("axis_name", self.axis_name)}
        place = Placement.of(self.mesh, **axes).with_types(request.query)
        return shards.per_device(fn, request, place, out_axes, *extra)


def head_parallel_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *args: Any,
    mesh: jax.sharding.Mesh,
    axis_name: Axes,
    batch_axis: Axes = None,
    implementation: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """``jattn.dot_product_attention`` with the heads divided over a mesh axis: nothing travels between devices.

    For arrays on a mesh of ``AxisType.Explicit`` plain ``dot_product_attention`` does the same by itself.

    Args:
        mesh: of devices; further axes than those named repeat the work.
        axis_name: the mesh axis (or axes) that N, the query heads, is divided over. Key/value heads are divided, too,
            where they can be; where their number divides the number of devices, each has all and uses one.
        batch_axis: the mesh axis (or axes) that B is divided over.
        implementation: what each device runs.
        others: as in ``jattn.dot_product_attention``; masks and score functions see the indices of the whole.

    Raises:
        ValueError: the mesh has no such axis; B, N or K cannot be divided over it; as ``dot_product_attention``.

    Example:
        ``head_parallel_attention(query, key, value, mesh=jax.make_mesh((4,), ("heads",)), axis_name="heads")``
    """
    how = HeadParallel(mesh, axis_name, batch_axis, implementation)
    return dot_product_attention(query, key, value, *args, implementation=how, **options)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Ring:
    """``implementation=`` of ``jattn.dot_product_attention`` and the modules: the sequence over an axis of ``mesh``.

    Arguments as of ``ring_attention``; ``block_sizes`` as of ``jattn.kernels.blockwise.Blockwise``.
    """

    mesh: jax.sharding.Mesh
    axis_name: str
    batch_axis: Axes = None
    head_axis: Axes = None
    layout: str = "contiguous"
    block_sizes: tuple[int, int] | None = None

    def __post_init__(self):
        if not isinstance(self.axis_name, str):
            raise TypeError(f"axis_name must name one axis of the mesh, got {self.axis_name!r}")
        _check(self, length="axis_name", batch="batch_axis", heads="head_axis")
        _chunks(self.layout)

    def why_not(self, request: Request) -> str | None:
        """None: it takes every request, or ``run`` says what does not come out even."""
        return None

    def run(self, request: Request) -> tuple[Array, Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``."""
        circle = self.circle(request)
        return self.per_device(lambda part: attend(circle, part), request, ("btnd", "btn"))

    def fold(
        self,
        request: Request,
        step: Callable,
        kinds: Mapping[str, str],
        lse: Array,
        rows: dict[str, Array],
        columns: dict[str, Array],
        counted: bool,
    ) -> dict[str, Array]:
        """``jattn.ring.fold`` on every device, ``{name: [B,N,...]}``: for ``jattn.heads.statistics``."""
        circle, kinds_of_all = self.circle(request), {**kinds, **({"visible": "queries"} if counted else {})}
        letters = {"queries": "bnt", "largest": "bnt", "keys": "bns", "offsets": "bn."}
        leaves, structure = jax.tree.flatten((rows, columns))

        def of_device(request: Request, lse: Array, *data: Array) -> dict[str, Array]:
            rows, columns = jax.tree.unflatten(structure, data)
            return fold(circle, request, step, kinds, lse, rows, columns, counted)

        extra = [(lse, "btn"), *((x, "bt" if n < len(rows) else "bs") for n, x in enumerate(leaves))]
        out_axes = {name: letters[kind] for name, kind in kinds_of_all.items()}
        return self.per_device(of_device, request, out_axes, *extra)

    def slots(self, length: int) -> np.ndarray:
        """Which token of a sequence stands in each slot of the layout, ``[length]``."""
        return _order(length, self.mesh.shape[self.axis_name], self.layout)

    def per_device(self, fn: Callable, request: Request, out_axes: Any, *extra: tuple[Array, str]) -> Any:
        """``shards.per_device`` with the sequence divided; masks by slot that come of lengths are left out."""
        request = dataclasses.replace(request, slot_masks=request.slot_masks[: request.has_mask_array])
        place = self._placement(request)
        return shards.per_device(fn, request, place, out_axes, *extra, multiple=LAYOUTS[self.layout])

    def circle(self, request: Request) -> Circle:
        """The way of the keys: they travel as far as any device sees any of them, where that is known while tracing."""
        place, chunks = self._placement(request), LAYOUTS[self.layout]
        place.check(request, chunks)
        P, T, S = place.parts("length"), request.query.shape[1], request.key.shape[1]
        steps, by_slot = range(P), request.slot_masks[: request.has_mask_array]
        given = (request.masks, request.query_positions, request.kv_positions, by_slot)
        if T and S and not any(isinstance(x, jax.Array) for x in jax.tree.leaves(given)):
            positions = {
                name: _order(length, P, self.layout)[None] if getattr(request, name) is None else getattr(request, name)
                for name, length in (("query_positions", T), ("kv_positions", S))
            }
            whole = dataclasses.replace(request, slot_masks=by_slot, **positions)
            may, _ = block_table(whole, (T // (P * chunks), S // (P * chunks)))
            if isinstance(may, np.ndarray):
                of_devices, here = may.any(0).reshape(P, chunks, P, chunks).any((1, 3)), np.arange(P)
                steps = [r for r in steps if r == 0 or of_devices[here, (here - r) % P].any()]
        platform = self.mesh.devices.flat[0].platform  # the mesh says where this runs, whatever traces it
        return Circle(self.axis_name, P, self.layout, tuple(steps), Blockwise(self.block_sizes), platform)

    def _placement(self, request: Request) -> Placement:
        axes = {
            "length": ("axis_name", self.axis_name),
            "batch": ("batch_axis", self.batch_axis),
            "heads": ("head_axis", self.head_axis),
        }
        return Placement.of(self.mesh, **axes).with_types(request.query)


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *args: Any,
    mesh: jax.sharding.Mesh,
    axis_name: str,
    batch_axis: Axes = None,
    head_axis: Axes = None,
    layout: str = "contiguous",
    **options: Unpack[AttentionOptions],
) -> Any:
    """``jattn.dot_product_attention`` with the sequence divided over a mesh axis: no device ever holds all of it.

    Keys and values travel round the ring of devices; what a mask lets nobody see is skipped, and where masks and
    positions are static keys travel only as far as somebody sees them. Each device keeps O((T + S) / P), in the
    backward pass, too (reverse mode alone); traffic and when compute hides it: ``docs/scale.md``.

    Args:
        query, key, value: ``[B,T,N,H]``, ``[B,S,K,H]``, ``[B,S,K,D]``, the arrays of the whole sequence; T and S
            multiples of the devices (of twice as many, for ``"zigzag"``).
        mesh: of devices; further axes than those named repeat the work.
        axis_name: the mesh axis that T and S are divided over.
        batch_axis, head_axis: the mesh axes (one or several each) that B, and N and K, are divided over.
        layout: ``"contiguous"``: tokens stand in their own order. ``"zigzag"``: they stand as ``to_zigzag`` puts them,
            queries and keys, and so does the output; causal work is then balanced.
        others: as in ``jattn.dot_product_attention``, every one of them. By slot (``bias``, ``mask`` arrays, positions)
            means in the order of the layout; positions are by default those of the tokens themselves, and sequence
            lengths count tokens. Each device keeps the rows of bias and mask arrays that are its own.

    Raises:
        ValueError: the mesh has no such axis; a length or number of heads is no multiple of the devices it is divided
            over; as ``dot_product_attention``.

    Example:
        ``out = ring_attention(query, key, value, mesh=jax.make_mesh((8,), ("sequence",)), axis_name="sequence")``
    """
    how = Ring(mesh, axis_name, batch_axis, head_axis, layout)
    return dot_product_attention(query, key, value, *args, implementation=how, **options)  # type: ignore[arg-type]


def to_zigzag(x: ArrayLike, devices: int, axis: int = 1) -> Array:
    """``x`` with the sequence along ``axis`` in zigzag order: of 2P chunks device p has the p-th and the (2P-1-p)-th.

    Of ``jnp.arange(T)`` it makes the positions of the tokens in that order.

    Raises:
        ValueError: the length is no multiple of ``2 * devices``.
    """
    return _turn(x, devices, axis, lambda order: order)


def from_zigzag(x: ArrayLike, devices: int, axis: int = 1) -> Array:
    """What ``to_zigzag`` made ``x`` of."""
    return _turn(x, devices, axis, np.argsort)


def ring_blocks(
    mask: MaskFunction, query_length: int, kv_length: int, *, devices: int, layout: str = "contiguous"
) -> np.ndarray:
    """How many blocks each device computes at each step of a ring, integers ``[devices, steps]``: is it balanced?

    ``mask``: of positions that are the tokens' own, static, and the same for all sequences and heads.
    """
    if not callable(mask):
        raise TypeError(f"mask must be a jattn.masks.Mask or a function, got {type(mask).__name__}")
    chunks = _chunks(layout)
    rows, columns = (
        _order(length, devices, layout).reshape(devices * chunks, -1) for length in (query_length, kv_length)
    )
    lengths = rows.shape[1], columns.shape[1]
    table = [[visible_blocks([mask], [], 0, 0, row, column, lengths, tile(*lengths))[0].sum() for column in columns]
             for row in rows]  # fmt: skip
    of_devices = np.array(table, int).reshape(devices, chunks, devices, chunks).sum((1, 3))
    here = np.arange(devices)
    return np.stack([of_devices[here, (here - r) % devices] for r in range(devices)], 1)


def _order(length: int, devices: int, layout: str) -> np.ndarray:
    chunks = _chunks(layout)
    if devices < 1:
        raise ValueError(f"devices must be positive, got {devices}")
    if length % (devices * chunks):
        raise ValueError(
            f"a length of {length} cannot be divided over {devices} devices in a {layout} layout: it must be a "
            f"multiple of {devices * chunks}"
        )
    pieces = np.arange(length).reshape(devices * chunks, -1)
    if layout == "zigzag":
        pieces = pieces[[part for p in range(devices) for part in (p, 2 * devices - 1 - p)]]
    return pieces.reshape(-1)


def _turn(x: ArrayLike, devices: int, axis: int, which: Callable) -> Array:
    x = jnp.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"x of shape {list(x.shape)} has no axis {axis}; say by axis= along which the sequence stands")
    order = which(_order(x.shape[axis], devices, "zigzag"))
    lies = jax.typeof(x).sharding if shards.is_typed(x) else None
    return x.at[(slice(None),) * (axis % x.ndim) + (order,)].get(out_sharding=lies)


def _chunks(layout: Any) -> int:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return LAYOUTS[layout]


def _check(how: Any, **arguments: str) -> None:
    """Raises for a mesh or axes that cannot be, and makes lists of axes tuples, which can be hashed."""
    if not isinstance(how.mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes it, got {type(how.mesh).__name__}")
    for argument in arguments.values():
        axes = getattr(how, argument)
        if axes is not None and not isinstance(axes, str):
            object.__setattr__(how, argument, tuple(axes))
    Placement.of(how.mesh, **{kind: (argument, getattr(how, argument)) for kind, argument in arguments.items()})
