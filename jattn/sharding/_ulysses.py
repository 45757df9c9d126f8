"""Runs attention with the sequence sharded over devices, which exchange it for heads."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, PyTree

from jattn._core import shard
from jattn._core.call import AttentionOptions, Call
from jattn._core.shard import MeshAxes
from jattn.api import dot_product_attention
from jattn.kernels import Reduction
from jattn.masks import MaskFunction
from jattn.sharding._head_parallel import Axes, HeadParallel, OnPart, OverMesh, in_units
from jattn.sharding._ring import Ring


@dataclasses.dataclass(frozen=True)
class Ulysses(OverMesh):
    """``implementation=`` of ``jattn.dot_product_attention`` and the modules: the sequence over an axis of ``mesh``.

    For attention, all-to-alls exchange the sequence for heads and back (``ulysses_attention``).

    Args:
        mesh: the devices; the work is replicated along its other axes.
        axis_name: the mesh axis (or axes) over which T and S are sharded, and N instead during attention.
        batch_axis, head_axis: the mesh axes (one or several each) over which B, and N and K, are sharded throughout.
        ring_axis: the mesh axis of a ring; T and S are then sharded over ``(ring_axis, axis_name)``.
        layout: the ring's layout, ``"contiguous"`` or ``"zigzag"``.
        implementation: the name of the implementation on each device; None picks one. Not with ``ring_axis``.

    Raises:
        TypeError: ``mesh`` is not a ``jax.sharding.Mesh``, ``axis_name`` names no axis, or ``ring_axis`` several.
        ValueError: the mesh has no such axis, or two arguments name the same one; the layout is unknown; ``layout`` is
            given without ``ring_axis``, or ``implementation`` with it.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
        >>> ulysses = jattn.sharding.Ulysses(mesh, "devices")
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 8, 2))  # [B,T,N,H]
        >>> out = jattn.dot_product_attention(query, key, value, is_causal=True, implementation=ulysses)
        >>> np.allclose(out, jattn.dot_product_attention(query, key, value, is_causal=True), atol=1e-4)
        True
    """

    kinds: ClassVar[Mapping[str, str]] = {
        "ring": "ring_axis", "length": "axis_name", "batch": "batch_axis", "heads": "head_axis"
    }  # fmt: skip

    mesh: jax.sharding.Mesh
    axis_name: str | Sequence[str]
    batch_axis: Axes = None
    head_axis: Axes = None
    ring_axis: str | None = None
    layout: str = "contiguous"
    implementation: str | None = None

    def __post_init__(self):
        if not self.axis_name:
            raise TypeError(f"axis_name must name an axis of the mesh, or several, got {self.axis_name!r}")
        super().__post_init__()
        if self.ring_axis is not None:
            if not isinstance(self.ring_axis, str):
                raise TypeError(f"ring_axis must name one axis of the mesh, got {self.ring_axis!r}")
            Ring(self.mesh, self.ring_axis, layout=self.layout)  # raises the error
            if self.implementation is not None:
                raise ValueError(
                    f"implementation={self.implementation!r} needs whole sequences, which a ring along "
                    f"ring_axis={self.ring_axis!r} does not have; omit one of them"
                )
        elif self.layout != "contiguous":
            raise ValueError(
                f"layout={self.layout!r} is for a ring, but ring_axis is None; pass ring_axis=, or omit layout"
            )

    def unsupported_reason(self, call: Call) -> str | None:
        """The reason given by the implementation named for each device, if any."""
        return self._inner(self.mesh_axes(call)).unsupported_reason(call)

    def run(self, call: Call) -> tuple[Array, Array]:
        """``out [B,T,N,D]`` and ``lse [B,T,N]`` of ``call``, in the order of the layout; T and S are sharded."""
        mesh_axes = self.mesh_axes(call)
        out, lse = self._inner(mesh_axes).run(self._by_heads(mesh_axes, call))
        return self._to_length(mesh_axes, out, "btnd"), self._to_length(mesh_axes, lse, "btn")

    def slots(self, length: int) -> np.ndarray | None:
        """The token in each slot of the layout, ``[length]``; None if contiguous."""
        return None if self.ring_axis is None else Ring(self.mesh, self.ring_axis, layout=self.layout).slots(length)

    def map_parts(self, fn: OnPart, call: Call, out_axes: PyTree[str], *extra: tuple[Array, str]) -> PyTree:
        """``fn(call, *arrays)`` on each part, after the exchange, like ``HeadParallel`` or ``Ring``."""
        mesh_axes = self.mesh_axes(call)
        extra = tuple((self._to_heads(mesh_axes, x, axes) if "n" in axes else x, axes) for x, axes in extra)
        return self._inner(mesh_axes).map_parts(fn, self._by_heads(mesh_axes, call), out_axes, *extra)

    def fold(self, call: Call, reduction: Reduction) -> dict[str, Array]:
        """The sums ``{name: [B,N,...]}`` of ``reduction`` over the weights of ``call``, after the exchange."""
        return self._inner(self.mesh_axes(call)).fold(call, reduction)

    def describe(self, call: Call, explain: Callable[[Call, str | None], str]) -> list[str]:
        """The lines of ``jattn.explain`` about ``call``: what is divided, what a device sends, and what it runs."""
        mesh_axes, inner = self.mesh_axes(call), []

        def exchanged() -> Array:
            by_heads = self._by_heads(mesh_axes, call)
            inner.append(by_heads.key.shape[2])
            inner.extend(self._inner(mesh_axes).describe(by_heads, explain))
            return by_heads.query

        jax.eval_shape(exchanged)
        (B, T, N, H), (_, S, K, D), sent_heads = call.query.shape, call.value.shape, inner.pop(0)
        devices = math.prod(mesh_axes.parts(kind) for kind in ("batch", "length", "heads"))
        others = call.query.dtype.itemsize / devices * (1 - 1 / self._devices)  # for a device, all but its own share
        queries, keys, out = (in_units(B * n * others) for n in (T * N * H, S * sent_heads * (H + D), T * N * D))
        times = "" if sent_heads == K else f" (each key head {sent_heads // K} times)"
        return [
            f"Ulysses: {mesh_axes}; all-to-alls",
            f"forward, a device sends {queries} of queries, {keys} of keys and values{times} and {out} of outputs",
            "backward, as much of their gradients",
            *inner,
        ]

    def _axes_by_kind(self) -> dict[str, tuple[str, ...]]:
        names = super()._axes_by_kind()
        return names | {"length": names.pop("ring") + names["length"]}

    @property
    def _exchanging(self) -> tuple[str, ...]:
        """The mesh axes of the all-to-alls."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name or ())

    @property
    def _devices(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self._exchanging)

    def _while_by_heads(self, mesh_axes: MeshAxes) -> MeshAxes:
        """``mesh_axes`` between the all-to-alls."""
        ring = () if self.ring_axis is None else (self.ring_axis,)
        return dataclasses.replace(mesh_axes, heads=mesh_axes.heads + self._exchanging, length=ring)

    def _inner(self, mesh_axes: MeshAxes) -> HeadParallel | Ring:
        """The implementation that runs between the all-to-alls."""
        heads = self._while_by_heads(mesh_axes).heads
        if self.ring_axis is None:
            return HeadParallel(self.mesh, heads, mesh_axes.batch, self.implementation)
        return Ring(self.mesh, self.ring_axis, mesh_axes.batch, heads, self.layout)

    def _by_heads(self, mesh_axes: MeshAxes, call: Call) -> Call:
        """The call with its heads sharded over the devices that previously sharded its sequence.

        Raises:
            ValueError: a size cannot be divided.
        """
        mesh_axes.check(call)
        self._while_by_heads(mesh_axes).check_size("heads", "query heads (N)", call.query.shape[2])
        query, key = self._to_heads(mesh_axes, call.query, "btnh"), self._to_heads(mesh_axes, call.key, "bskh")
        value = None if call.value is None else self._to_heads(mesh_axes, call.value, "bskd")
        return dataclasses.replace(call, query=query, key=key, value=value)

    def _to_heads(self, mesh_axes: MeshAxes, x: Array, axes: str) -> Array:
        """``x``, with these axis letters, with its heads sharded over the devices that previously sharded its sequence.

        Key heads are repeated until divisible by the devices: if there are fewer heads than devices, each goes to the
        devices that use it.
        """
        P, heads, K = self._devices, mesh_axes.parts("heads"), x.shape[2]
        whole = K % heads != 0  # each device along the head axes has all key heads and uses one
        times = P // math.gcd(1 if whole else K // heads, P)

        def exchange(x: Array) -> Array:
            if whole:
                x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(mesh_axes.heads) * K // heads, 1, 2)
            return jax.lax.all_to_all(jnp.repeat(x, times, 2), self._exchanging, 2, 1, tiled=True)

        before, after = self._specs(mesh_axes, axes, whole)
        return shard.map_shards(exchange, mesh_axes.mesh, mesh_axes.named, (before,), after)(x)

    def _to_length(self, mesh_axes: MeshAxes, x: Array, axes: str) -> Array:
        """The inverse of ``_to_heads``."""

        def exchange(x: Array) -> Array:
            return jax.lax.all_to_all(x, self._exchanging, 1, 2, tiled=True)

        before, after = self._specs(mesh_axes, axes)
        return shard.map_shards(exchange, mesh_axes.mesh, mesh_axes.named, (after,), before)(x)

    def _specs(self, mesh_axes: MeshAxes, axes: str, whole_kv_heads: bool = False) -> list[PartitionSpec]:
        """The axes with the sequence over all devices, and with heads in its place."""
        sides = (mesh_axes, whole_kv_heads), (self._while_by_heads(mesh_axes), False)
        return [side.spec(axes, [0] * len(axes), whole) for side, whole in sides]


def ulysses_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    mesh: jax.sharding.Mesh,
    axis_name: str | Sequence[str],
    batch_axis: Axes = None,
    head_axis: Axes = None,
    ring_axis: str | None = None,
    layout: str = "contiguous",
    implementation: str | None = None,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """``jattn.dot_product_attention`` with the sequence sharded over a mesh axis, and heads instead during attention.

    All-to-alls of queries, keys and values give each device whole sequences for its share of the heads; another
    all-to-all returns the output for its share of the sequence. Unlike in a ring, each device's traffic decreases as
    devices are added. However, there can be no more devices than query heads, and each device holds the full sequence
    for its heads. Source: https://arxiv.org/abs/2309.14509.

    With ``ring_axis``, a device has a share of the sequence instead of whole sequences, and keys and values rotate
    along that axis as in ``ring_attention``: heads within a node, a ring between nodes. Source:
    https://arxiv.org/abs/2405.07719.

    Args:
        query, key, value: ``[B,T,N,H]``, ``[B,S,K,H]``, ``[B,S,K,D]``, the arrays of the whole sequence. T and S are
            multiples of the number of devices along ``ring_axis`` and ``axis_name``; N is a multiple of the number
            along ``head_axis`` and ``axis_name``.
        bias: floats added to the scores; they broadcast to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        mesh: the devices; the work is replicated along its other axes.
        axis_name: the mesh axis (or axes) over which T and S are sharded, and N instead during attention. Key/value
            heads are repeated until divisible by the number of devices. So if K divides the number of devices, each
            device gets only the head that it uses.
        batch_axis, head_axis: the mesh axes (one or several each) over which B, and N and K, are sharded throughout.
        ring_axis: the mesh axis of a ring. T and S are then sharded over ``(ring_axis, axis_name)``, in that order.
        layout: the ring's layout, ``"contiguous"``, or ``"zigzag"`` for the order of ``to_zigzag`` over the devices
            along ``ring_axis``.
        implementation: the name of the implementation on each device; None picks one. Not with ``ring_axis``.
        return_residual: also return the log-sum-exp ``[B,T,N]``.
        options: all other keywords of ``jattn.dot_product_attention``. Arrays indexed by slot (``bias``, ``mask``
            arrays, positions) are in layout order. Each device holds its own heads of bias and mask arrays, and all
            positions (with ``ring_axis``, its own rows and its share of positions).

    Returns:
        ``out [B,T,N,D]``, with the sequence sharded; with ``return_residual``, ``(out, lse)``.

    Raises:
        ValueError, TypeError: the mesh has no such axis, a length or number of heads is not a multiple of its devices,
            or an argument has the wrong shape or dtype.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 8, 2))  # [B,T,N,H]
        >>> out = jattn.sharding.ulysses_attention(query, key, value, mesh=mesh, axis_name="devices", is_causal=True)
        >>> np.allclose(out, jattn.dot_product_attention(query, key, value, is_causal=True), atol=1e-4)
        True
        >>> out.sharding.spec[1]  # of the sequence
        'devices'
    """
    ulysses = Ulysses(mesh, axis_name, batch_axis, head_axis, ring_axis, layout, implementation)
    static: dict[str, Any] = {"implementation": ulysses, "return_residual": return_residual}
    return dot_product_attention(query, key, value, bias, mask, **static, **options)
