"""Runs attention with sharded heads, each device on its own."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, ArrayLike, PyTree

from jattn._core import shard
from jattn._core.call import AttentionOptions, Call
from jattn._core.shard import MeshAxes
from jattn.api import dot_product_attention
from jattn.kernels import Reduction
from jattn.kernels.dispatch import Dispatch, by_name, choose
from jattn.masks import MaskFunction

Axes = str | Sequence[str] | None
OnPart = Callable[..., PyTree]  # ``fn(call, *arrays)`` for a device's part of the call and of arrays


class OverMesh:
    """An implementation that runs on each device's part of a call; ``kinds`` maps fields to their axes."""

    kinds: ClassVar[Mapping[str, str]]
    mesh: jax.sharding.Mesh

    def __post_init__(self):
        """Raises for an invalid mesh or axes, and turns lists of axes into hashable tuples."""
        if not isinstance(self.mesh, jax.sharding.Mesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, as from jax.make_mesh, got {type(self.mesh).__name__}")
        for field in self.kinds.values():
            axes = getattr(self, field)
            if axes is not None and not isinstance(axes, str):
                object.__setattr__(self, field, tuple(axes))
        self._named_axes()

    def mesh_axes(self, call: Call) -> MeshAxes:
        """The axes over which a call is sharded, according to the fields and the query's type."""
        axes = self._named_axes()
        mesh, of_query = shard.explicit_axes(call.query)
        if mesh is None or mesh.shape != self.mesh.shape:
            return axes
        batch, heads = (tuple(name for name in of_query[i] if name not in axes.named) for i in (0, 2))
        return dataclasses.replace(axes, batch=axes.batch or batch, heads=axes.heads or heads)

    @property
    def divides_length(self) -> bool:
        """Whether no device has the whole sequence."""
        return self._named_axes().parts("length") > 1

    def fold_parts(
        self, fold: Callable[[Call, Reduction], dict[str, Array]], call: Call, reduction: Reduction
    ) -> dict[str, Array]:
        """``fold(part, reduction)`` on every device, with its parts of both; the results are sharded like the call."""
        leaves, structure = jax.tree.flatten((reduction.rows, reduction.columns))

        def on_device(part: Call, lse: Array, *data: Array) -> dict[str, Array]:
            rows, columns = jax.tree.unflatten(structure, data)
            return fold(part, dataclasses.replace(reduction, lse=lse, rows=rows, columns=columns))

        of_leaves = ["bt"] * len(reduction.rows) + ["bs"] * len(reduction.columns)
        extra = [(reduction.lse, "btn"), *zip(leaves, of_leaves, strict=True)]
        letters = {"row_sum": "bnt", "row_max": "bnt", "column_sum": "bns", "diagonal_sum": "bn."}
        out_axes = {name: letters[kind] for name, kind in reduction.result_kinds.items()}
        return self.per_device(on_device, call, out_axes, *extra)

    def map_parts(self, fn: OnPart, call: Call, out_axes: PyTree[str], *extra: tuple[Array, str]) -> PyTree:
        """``fn(call, *arrays)``, once for all devices: ``fold`` itself runs on each device."""
        return fn(call, *(array for array, _ in extra))

    def per_device(self, fn: OnPart, call: Call, out_axes: PyTree[str], *extra: tuple[Array, str]) -> PyTree:
        """``jattn._core.shard.per_device``."""
        return shard.per_device(fn, call, self.mesh_axes(call), out_axes, *extra)

    def _named_axes(self) -> MeshAxes:
        return MeshAxes(self.mesh, **self._axes_by_kind())

    def _axes_by_kind(self) -> dict[str, tuple[str, ...]]:
        return axes_by_kind(self.mesh, {kind: (field, getattr(self, field)) for kind, field in self.kinds.items()})


def in_units(size: float | int) -> str:
    """A number of bytes as text."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(int(np.log2(max(size, 1))) // 10, len(units) - 1)
    return f"{size / 2 ** (10 * power):.{min(power, 1)}f} {units[power]}"


class OnOwnPart(OverMesh):
    """An implementation in which each device computes its part alone, using the named kernel or the default."""

    implementation: str | None

    def unsupported_reason(self, call: Call) -> str | None:
        """The reason given by the implementation named for each device, if any."""
        return None if self.implementation is None else by_name(self.implementation).unsupported_reason(call)

    def slots(self, length: int) -> None:
        """None: the slots of a sequence are in token order."""
        return None

    def explain_parts(self, call: Call, explain: Callable[[Call, str | None], str]) -> list[str]:
        """The text of ``explain`` for one device's call."""
        texts = []

        def of_device(part: Call) -> Array:
            texts.append(explain(part, self.implementation))
            return part.query

        jax.eval_shape(lambda: self.per_device(of_device, call, "btnh"))
        return texts


@dataclasses.dataclass(frozen=True)
class HeadParallel(OnOwnPart):
    """``implementation=`` of ``jattn.dot_product_attention`` and the modules: heads over ``axis_name`` of ``mesh``.

    Each device computes its own heads, without communication.

    Args:
        mesh: the devices; the work is replicated along its other axes.
        axis_name: the mesh axis (or axes) over which the N query heads are sharded, and the K key/value heads if
            evenly divisible. If instead K divides the number of devices, each device gets all K heads and uses one.
        batch_axis: the mesh axis (or axes) over which B is sharded.
        implementation: the name of the implementation on each device; None picks one.

    Raises:
        TypeError: ``mesh`` is not a ``jax.sharding.Mesh``.
        ValueError: the mesh has no such axis, or two arguments name the same one.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
        >>> by_head = jattn.sharding.HeadParallel(mesh, "devices")
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 8, 2))  # [B,T,N,H]
        >>> out = jattn.dot_product_attention(query, key, value, implementation=by_head)
        >>> np.allclose(out, jattn.dot_product_attention(query, key, value), atol=1e-4)
        True
    """

    kinds: ClassVar[Mapping[str, str]] = {"heads": "axis_name", "batch": "batch_axis"}

    mesh: jax.sharding.Mesh
    axis_name: Axes
    batch_axis: Axes = None
    implementation: str | None = None

    def run(self, call: Call) -> tuple[Array, Array]:
        """``out [B,T,N,D]`` and ``lse [B,T,N]`` of ``call``; each device computes its own heads."""
        return self.map_parts(lambda part: choose(part, self.implementation).run(part), call, ("btnd", "btn"))

    def describe(self, call: Call, explain: Callable[[Call, str | None], str]) -> list[str]:
        """The lines of ``jattn.explain`` about ``call``: what is divided, what a device sends, and what it runs."""
        mesh_axes, moved = self.mesh_axes(call), "moves nothing"
        if call.key.shape[2] % mesh_axes.parts("heads"):
            moved = "forward moves nothing, backward sums the gradients of a key head over the devices that use it"
        return [f"HeadParallel: {mesh_axes}; {moved}", *self.explain_parts(call, explain)]

    def fold(self, call: Call, reduction: Reduction) -> dict[str, Array]:
        """The sums ``{name: [B,N,...]}`` of ``reduction`` over the weights of ``call``, for one device's part."""
        return Dispatch().fold(call, reduction)

    def map_parts(self, fn: OnPart, call: Call, out_axes: PyTree[str], *extra: tuple[Array, str]) -> PyTree:
        """``per_device``: each device computes and folds its own heads and sequences."""
        return self.per_device(fn, call, out_axes, *extra)


def head_parallel_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    *,
    mesh: jax.sharding.Mesh,
    axis_name: Axes,
    batch_axis: Axes = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """``jattn.dot_product_attention`` with heads sharded over a mesh axis, without communication.

    For arrays on an ``AxisType.Explicit`` mesh, plain ``dot_product_attention`` does the same.

    Args:
        query, key, value: ``[B,T,N,H]``, ``[B,S,K,H]``, ``[B,S,K,D]``, the arrays of all heads.
        bias: floats added to the scores; they broadcast to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``,
            which sees global indices.
        mesh: the devices; the work is replicated along its other axes.
        axis_name: the mesh axis (or axes) over which the N query heads are sharded, and the K key/value heads if
            evenly divisible. If instead K divides the number of devices, each device gets all K heads and uses one.
        batch_axis: the mesh axis (or axes) over which B is sharded.
        implementation: the name of the implementation on each device; None picks one.
        return_residual: also return the log-sum-exp ``[B,T,N]``.
        options: the other keywords of ``jattn.dot_product_attention``.

    Returns:
        ``out [B,T,N,D]``, with heads sharded; with ``return_residual``, ``(out, lse)``.

    Raises:
        ValueError, TypeError: the mesh has no such axis, B, N or K cannot be divided over it, or an argument has the
            wrong shape or dtype.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 8, 2))  # [B,T,N,H]
        >>> out = jattn.sharding.head_parallel_attention(query, key, value, mesh=mesh, axis_name="devices")
        >>> np.allclose(out, jattn.dot_product_attention(query, key, value), atol=1e-4)
        True
        >>> out.sharding.spec[2]  # of the heads
        'devices'
    """
    by_head = HeadParallel(mesh, axis_name, batch_axis, implementation)
    static: dict[str, Any] = {"implementation": by_head, "return_residual": return_residual}
    return dot_product_attention(query, key, value, bias, mask, **static, **options)


def axes_by_kind(
    mesh: Mesh | AbstractMesh, arguments: Mapping[str, tuple[str, str | Sequence[str] | None]]
) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each kind, given its argument's name and value.

    Raises:
        ValueError: the mesh has no such axis, or an axis appears twice.
    """
    by_kind: dict[str, tuple[str, ...]] = {}
    for kind, (argument, axes) in arguments.items():
        names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for i, name in enumerate(names):
            if name not in mesh.shape:
                has = ", ".join(f"{axis!r} ({size} devices)" for axis, size in mesh.shape.items())
                raise ValueError(f"{argument}={axes!r}: the mesh has no axis {name!r}; it has {has}")
            if name in names[:i] or any(name in others for others in by_kind.values()):
                raise ValueError(f"{argument}={axes!r}: the mesh axis {name!r} is given twice")
        by_kind[kind] = names
    return by_kind
