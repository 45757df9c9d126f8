"""Runs attention with the sequence sharded over a ring of devices, and orders its tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, PyTree

from jattn._blocks.block_lists import tile
from jattn._blocks.block_mask import Visibility
from jattn._blocks.plan import block_table
from jattn._core import shard
from jattn._core.call import AttentionOptions, Call, softmax_dtype
from jattn._mods.arrays import AnyArray
from jattn.api import dot_product_attention
from jattn.kernels import Kernel, Reduction
from jattn.kernels.dispatch import by_name
from jattn.masks import MaskFunction
from jattn.sharding._head_parallel import Axes, OnPart, OverMesh, in_units
from jattn.sharding._mask_tables import divide, with_tables
from jattn.sharding._pairs import seen_by_distance
from jattn.sharding._ring_attention import ring_attend
from jattn.sharding._ring_fold import ring_fold
from jattn.sharding._rotation import LAYOUTS, RingPlan


@dataclasses.dataclass(frozen=True)
class Ring(OverMesh):
    """``implementation=`` of ``jattn.dot_product_attention`` and the modules: the sequence over an axis of ``mesh``.

    Keys and values rotate around the ring of devices (``ring_attention``).

    Args:
        mesh: the devices; the work is replicated along its other axes.
        axis_name: the mesh axis over which T and S are sharded.
        batch_axis, head_axis: the mesh axes (one or several each) over which B, and N and K, are sharded.
        layout: ``"contiguous"``: tokens in their own order; ``"zigzag"``: in the order of ``to_zigzag``.
        implementation: the implementation of each hop: a name or a ``jattn.kernels.Kernel``; None picks one.
        gradient_dtype: the dtype in which key and value gradients travel; float32 by default (float64 for float64
            input).

    Raises:
        TypeError: ``mesh`` is not a ``jax.sharding.Mesh``, ``axis_name`` not a string, ``gradient_dtype`` not floating,
            or ``implementation`` neither a name nor a kernel.
        ValueError: the mesh has no such axis, or the layout or implementation is unknown.

    Example:
        >>> P = jax.device_count()
        >>> ring = jattn.sharding.Ring(jax.make_mesh((P,), ("devices",)), "devices", layout="zigzag")
        >>> x = jax.random.normal(jax.random.key(0), (1, 16, 8, 2))  # [B,T,N,H]
        >>> whole, zigzag = jattn.dot_product_attention(x, x, x, is_causal=True), jattn.sharding.to_zigzag(x, P)
        >>> out = jattn.dot_product_attention(zigzag, zigzag, zigzag, is_causal=True, implementation=ring)
        >>> np.allclose(jattn.sharding.from_zigzag(out, P), whole, atol=1e-4)
        True
    """

    kinds: ClassVar[Mapping[str, str]] = {"length": "axis_name", "batch": "batch_axis", "heads": "head_axis"}

    mesh: jax.sharding.Mesh
    axis_name: str
    batch_axis: Axes = None
    head_axis: Axes = None
    layout: str = "contiguous"
    implementation: str | Kernel | None = None
    gradient_dtype: DTypeLike | None = None

    def __post_init__(self):
        if not isinstance(self.axis_name, str):
            raise TypeError(f"axis_name must name one axis of the mesh, got {self.axis_name!r}")
        super().__post_init__()
        _chunks(self.layout)
        self._kernel()
        if self.gradient_dtype is not None:
            dtype = jnp.dtype(self.gradient_dtype)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(f"gradient_dtype must be floating, such as jnp.bfloat16, got {dtype}")
            object.__setattr__(self, "gradient_dtype", dtype)

    def _kernel(self) -> Kernel | None:
        """The kernel that each hop runs, if given."""
        kernel = by_name(self.implementation) if isinstance(self.implementation, str) else self.implementation
        if not isinstance(kernel, Kernel | None):
            raise TypeError(f"implementation must be a name, a jattn.kernels.Kernel or None, got {kernel!r}")
        return kernel

    def unsupported_reason(self, call: Call) -> str | None:
        """None, because it supports every call; ``run`` raises if a size does not divide evenly."""
        return None

    def run(self, call: Call) -> tuple[Array, Array]:
        """``out [B,T,N,D]`` and ``lse [B,T,N]`` of ``call``, in the order of the layout; T and S are sharded."""
        call = self._without_default_positions(call)
        plan = self.plan(call)
        return self.per_device(lambda part: ring_attend(plan, part), call, ("btnd", "btn"))

    def fold(self, call: Call, reduction: Reduction) -> dict[str, Array]:
        """The sums ``{name: [B,N,...]}`` of ``reduction`` over the weights of ``call``, sharded like the call."""
        call = self._without_default_positions(call)
        plan = dataclasses.replace(self.plan(call), gradient_dtype=None)
        platform = self.mesh.devices.flat[0].platform  # from the mesh, because the tracing process may run elsewhere
        return self.fold_parts(lambda part, of_part: ring_fold(plan, platform, part, of_part), call, reduction)

    def describe(self, call: Call, explain: Callable[[Call, str | None], str]) -> list[str]:
        """The lines of ``jattn.explain`` about ``call``: what is divided, what a device sends, what each hop runs."""
        call = self._without_default_positions(call)
        mesh_axes, plan = self.mesh_axes(call), self.plan(call)
        (B, S, K, H), D, heads = call.key.shape, call.value.shape[3], mesh_axes.parts("heads")
        keys = B // mesh_axes.parts("batch") * (S // mesh_axes.parts("length"))  # for one head on a device
        numbers = keys * (H + D) * (K // heads if K % heads == 0 else 1)
        of_gradients = softmax_dtype(call.key) if self.gradient_dtype is None else self.gradient_dtype
        sizes = [np.dtype(dtype).itemsize for dtype in (call.key.dtype, of_gradients)]
        keys_sent, gradients_sent = (in_units(numbers * size) for size in sizes)
        hops = len(plan.steps) - 1
        each = "1 hop" if hops == 1 else f"each of {hops} hops"
        kernel = "the platform's kernel, or blockwise" if plan.kernel is None else plan.kernel.name
        lines = [f"Ring: {mesh_axes}, {self.layout}; each hop: {kernel}"]
        if not hops:
            return [*lines, "moves nothing: no device needs the keys of another"]
        fewer = f", of {plan.devices - 1} without this mask" if hops < plan.devices - 1 else ""
        lines.append(f"forward, a device sends {keys_sent} of keys and values in {each}{fewer}")
        lines.append(f"backward, the same again, and {gradients_sent} of their gradients in {each}")
        return lines

    def slots(self, length: int) -> np.ndarray | None:
        """The token in each slot of the layout, ``[length]``; None if contiguous."""
        return None if self.layout == "contiguous" else _order(length, self.mesh.shape[self.axis_name], self.layout)

    def per_device(self, fn: OnPart, call: Call, out_axes: PyTree[str], *extra: tuple[Array, str]) -> PyTree:
        """``jattn._core.shard.per_device`` with a sharded sequence and tables, without the lengths' slot masks."""
        call, tables = divide(call, self._turn)

        def on_part(part: Call, *arrays: Array) -> PyTree:
            return fn(with_tables(part, arrays[len(extra) :]), *arrays[: len(extra)])

        mesh_axes, multiple = self.mesh_axes(call), LAYOUTS[self.layout]
        return shard.per_device(on_part, call, mesh_axes, out_axes, *extra, *tables, multiple=multiple)

    def _without_default_positions(self, call: Call) -> Call:
        """The call without known positions that match the layout, as given by the layer functions."""
        fields = {"query_positions": (call.query_positions, call.query), "kv_positions": (call.kv_positions, call.key)}
        default = {
            name: None
            for name, (positions, x) in fields.items()
            if isinstance(positions, np.ndarray) and (positions == self._turn(np.arange(x.shape[1]), 0)).all()
        }
        return dataclasses.replace(call, **default)

    def _turn(self, x: AnyArray, axis: int) -> AnyArray:
        """``x`` with the tokens along ``axis`` in the order of the layout."""
        order = self.slots(x.shape[axis]) if x.shape[axis] > 1 else None
        return x if order is None else x[(slice(None),) * axis + (order,)]

    def plan(self, call: Call) -> RingPlan:
        """The rotation plan for ``call``. With static masks, keys travel only as far as a device sees them."""
        mesh_axes, chunks = self.mesh_axes(call), LAYOUTS[self.layout]
        mesh_axes.check(call, chunks)
        P, T, S = mesh_axes.parts("length"), call.query.shape[1], call.key.shape[1]
        steps, slot_masks = range(P), call.slot_masks[: call.has("slot_masks")]
        visibility = (call.masks, call.query_positions, call.kv_positions, slot_masks)
        if T and S and not any(isinstance(x, jax.Array) for x in jax.tree.leaves(visibility)):
            positions = {
                name: _order(length, P, self.layout)[None] if getattr(call, name) is None else getattr(call, name)
                for name, length in (("query_positions", T), ("kv_positions", S))
            }
            whole = dataclasses.replace(call, slot_masks=slot_masks, **positions)
            any_visible, _ = block_table(whole, (T // (P * chunks), S // (P * chunks)))
            if isinstance(any_visible, np.ndarray):
                needed, devices = any_visible.any(0).reshape(P, chunks, P, chunks).any((1, 3)), np.arange(P)
                steps = [step for step in steps if step == 0 or needed[devices, (devices - step) % P].any()]
        distances = seen_by_distance(dataclasses.replace(call, slot_masks=slot_masks), P * chunks) if T and S else None
        kernel = self._kernel()
        return RingPlan(self.axis_name, P, self.layout, tuple(steps), kernel, self.gradient_dtype, distances)


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    mesh: jax.sharding.Mesh,
    axis_name: str,
    batch_axis: Axes = None,
    head_axis: Axes = None,
    layout: str = "contiguous",
    implementation: str | Kernel | None = None,
    gradient_dtype: DTypeLike | None = None,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """``jattn.dot_product_attention`` with the sequence sharded over a mesh axis: no device ever holds all of it.

    Keys and values rotate around the ring of P devices. Blocks emptied by the mask are skipped, and with static masks
    and positions, keys travel only as far as they are needed. Each device holds O((T + S) / P), even in the backward
    pass. Keys travel in their own dtype while the device computes. Computation hides the traffic if a hop's attention
    takes longer than the transfer of its keys.

    Args:
        query, key, value: ``[B,T,N,H]``, ``[B,S,K,H]``, ``[B,S,K,D]``, the arrays of the whole sequence; T and S are
            multiples of the number of devices (twice that number for ``"zigzag"``).
        bias: floats added to the scores; they broadcast to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        mesh: the devices; the work is replicated along its other axes.
        axis_name: the mesh axis over which T and S are sharded.
        batch_axis, head_axis: the mesh axes (one or several each) over which B, and N and K, are sharded.
        layout: ``"contiguous"``: tokens in their own order. ``"zigzag"``: queries, keys and output in the order of
            ``to_zigzag``, which balances causal work.
        implementation: the implementation of each hop: a name or a ``jattn.kernels.Kernel``; by default, the
            platform's kernel, or ``"blockwise"``.
        gradient_dtype: the dtype in which key and value gradients travel: float32 by default (float64 for float64
            input); ``jnp.bfloat16`` halves their traffic and rounds them once per hop.
        return_residual: also return the log-sum-exp ``[B,T,N]``.
        options: all other keywords of ``jattn.dot_product_attention``. Arrays indexed by slot (``bias``, ``mask``
            arrays, positions) are in layout order. Positions default to the tokens' positions, and sequence lengths
            count tokens. Each device holds its own rows of bias and mask arrays.

    Returns:
        ``out [B,T,N,D]``, with the sequence sharded; with ``return_residual``, ``(out, lse)``.

    Raises:
        ValueError, TypeError: the mesh has no such axis, a length or number of heads is not a multiple of its devices,
            or an argument has the wrong shape or dtype.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 8, 2))  # [B,T,N,H]
        >>> out = jattn.sharding.ring_attention(query, key, value, mesh=mesh, axis_name="devices", is_causal=True)
        >>> np.allclose(out, jattn.dot_product_attention(query, key, value, is_causal=True), atol=1e-4)
        True
        >>> out.sharding.spec[1]  # of the sequence
        'devices'
    """
    ring = Ring(mesh, axis_name, batch_axis, head_axis, layout, implementation, gradient_dtype)
    static: dict[str, Any] = {"implementation": ring, "return_residual": return_residual}
    return dot_product_attention(query, key, value, bias, mask, **static, **options)


def to_zigzag(x: ArrayLike, devices: int, axis: int = 1) -> Array:
    """Puts the sequence in zigzag order: device p gets the p-th and (2P-1-p)-th of 2P chunks.

    Applied to ``jnp.arange(T)``, it gives the tokens' positions in that order.

    Args:
        x: an array with the whole sequence.
        devices: P.
        axis: the sequence axis of x.

    Raises:
        ValueError: the length is not a multiple of ``2 * devices``, or x has no such axis.

    Example:
        >>> jattn.sharding.to_zigzag(jnp.arange(8), devices=2, axis=0).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _reorder(x, devices, axis, lambda order: order)


def from_zigzag(x: ArrayLike, devices: int, axis: int = 1) -> Array:
    """The inverse of ``to_zigzag``: restores token order along ``axis``.

    Raises:
        ValueError: the length is not a multiple of ``2 * devices``, or x has no such axis.

    Example:
        >>> there = jattn.sharding.to_zigzag(jnp.arange(8), devices=2, axis=0)
        >>> jattn.sharding.from_zigzag(there, devices=2, axis=0).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _reorder(x, devices, axis, np.argsort)


def ring_blocks(
    mask: MaskFunction, query_length: int, kv_length: int, *, devices: int, layout: str = "contiguous"
) -> np.ndarray:
    """The number of blocks computed by each device at each step of a ring, integers ``[devices, steps]``.

    Args:
        mask: a static mask over the tokens' own positions, the same for all sequences and heads.
        query_length, kv_length: T and S.
        devices: the number of devices in the ring.
        layout: ``"contiguous"`` or ``"zigzag"``.

    Raises:
        TypeError: ``mask`` is not callable.
        ValueError: the layout is unknown, or a length cannot be divided over the devices.

    Example:
        >>> print(jattn.sharding.ring_blocks(jattn.masks.Causal(), 16, 16, devices=2))
        [[1 0]
         [1 1]]
        >>> print(jattn.sharding.ring_blocks(jattn.masks.Causal(), 16, 16, devices=2, layout="zigzag"))
        [[3 2]
         [3 2]]
    """
    if not callable(mask):
        raise TypeError(f"mask must be a jattn.masks.Mask or a function, got {type(mask).__name__}")
    chunks = _chunks(layout)
    orders = [_order(length, devices, layout) for length in (query_length, kv_length)]
    rows, columns = (order.reshape(devices * chunks, -1) for order in orders)
    lengths = rows.shape[1], columns.shape[1]
    pairs = ((Visibility(lengths, [mask], q_positions=row, kv_positions=column) for column in columns) for row in rows)
    table = [[one.blocks(tile(*lengths))[0].sum() for one in row] for row in pairs]
    blocks = np.array(table, int).reshape(devices, chunks, devices, chunks).sum((1, 3))
    device = np.arange(devices)
    return np.stack([blocks[device, (device - step) % devices] for step in range(devices)], 1)


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


def _reorder(x: ArrayLike, devices: int, axis: int, choose_order: Callable[[np.ndarray], np.ndarray]) -> Array:
    x = jnp.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"x of shape {list(x.shape)} has no axis {axis}; pass the sequence axis as axis=")
    order = choose_order(_order(x.shape[axis], devices, "zigzag"))
    sharding = jax.typeof(x).sharding if shard.is_typed(x) else None
    return x.at[(slice(None),) * (axis % x.ndim) + (order,)].get(out_sharding=sharding)


def _chunks(layout: object) -> int:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return LAYOUTS[layout]
