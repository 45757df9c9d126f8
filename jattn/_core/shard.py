"""Calls on a mesh: which axes are sharded, and how to run a function on each device's part.

``MeshAxes`` names the mesh axes over which sequences, heads and length are sharded. With ``jax.shard_map``,
``per_device`` runs a function of ``Call`` on each device's part. Masks, score functions and dropout see global indices:
each part knows its first sequence and head, and positions are data.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jattn._core.attention import convert_mods
from jattn._core.call import AXES, Call
from jattn._mods.pytree import split_arrays

# A function run on each device's part of a call: ``(call, *arrays) -> pytree of arrays``.
PartFunction = Callable[Concatenate[Call, ...], PyTree]


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The axes of ``mesh`` over which sequences, heads and length are sharded; ``()`` for no sharding.

    ``length`` shards both queries and keys. ``keys`` shards only keys, and the columns of query-key arrays.
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def named(self) -> set[str]:
        """All axes over which anything is sharded."""
        return {*self.batch, *self.heads, *self.length, *self.keys}

    @property
    def leaves_axes(self) -> bool:
        """Whether the mesh has other axes. XLA handles these and may partition one device's computation over them."""
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return any(
            kind == AxisType.Auto and self.mesh.shape[name] > 1 and name not in self.named for name, kind in kinds
        )

    def __str__(self):
        kinds = {"sequences": "batch", "heads": "heads", "length": "length", "keys": "keys"}
        parts = [f"{name} over {self.names(kind)}" for name, kind in kinds.items() if getattr(self, kind)]
        return ", ".join(parts) or "nothing divided"

    def parts(self, kind: str) -> int:
        """The number of devices over which ``"batch"``, ``"heads"``, ``"length"`` or ``"keys"`` is sharded."""
        return math.prod(self.mesh.shape[name] for name in getattr(self, kind))

    def check(self, call: Call, multiple: int = 1) -> None:
        """Raises ``ValueError`` unless sizes are multiples of their device counts (lengths: times ``multiple``)."""
        (B, T, N, _), (_, S, K, _) = call.query.shape, call.key.shape
        heads, multiple = self.parts("heads"), multiple if self.length else 1
        self.check_size("batch", "sequences (B)", B)
        self.check_size("heads", "query heads (N)", N)
        self.check_size("length", "queries (T)", T, multiple)
        self.check_size("length", "keys (S)", S, multiple)
        self.check_size("keys", "keys (S)", S)
        if K % heads and heads % K:
            raise ValueError(
                f"{K} key/value heads (K) cannot be divided over {self.names('heads')}: K must divide the number of "
                "devices or be a multiple of it"
            )

    def check_size(self, kind: str, label: str, size: int, multiple: int = 1) -> None:
        """Raises ``ValueError`` unless ``size`` is a multiple of ``multiple`` times the device count of ``kind``."""
        wanted = self.parts(kind) * multiple
        if size % wanted:
            raise ValueError(
                f"{size} {label} cannot be divided over {self.names(kind)}: they must be a multiple of {wanted}"
            )

    def spec(self, axes: str, shape: Sequence[int], whole_kv_heads: bool) -> PartitionSpec:
        """The spec of an array with these ``axes``; a broadcast axis (of size 1) is not sharded."""
        by_letter = {"b": self.batch, "n": self.heads, "t": self.length, "s": self.length or self.keys, "c": self.keys,
              "k": () if whole_kv_heads else self.heads}  # fmt: skip
        names = [by_letter.get(axis, ()) if size != 1 else () for axis, size in zip(axes, shape, strict=False)]
        return PartitionSpec(*(name or None for name in names))

    def names(self, kind: str) -> str:
        """The mesh axes of a kind and their sizes, in words."""
        sizes = (f"{name!r} ({self.mesh.shape[name]} devices)" for name in getattr(self, kind))
        return f"mesh {'axes' if len(getattr(self, kind)) > 1 else 'axis'} {' and '.join(sizes)}"


def on_each_device(fn: PartFunction, call: Call, out_axes: PyTree[str], *extra: tuple[Array, str]) -> Any:
    """``fn(call, *arrays)``, run on each device's part if the query's type is sharded.

    Types carry shardings on ``AxisType.Explicit`` meshes; on other meshes, XLA partitions the work.
    """
    mesh_axes = mesh_axes_of(call)
    if mesh_axes is None:
        return fn(call, *(array for array, _ in extra))
    return per_device(fn, call, mesh_axes, out_axes, *extra)


def mesh_axes_of(call: Call) -> MeshAxes | None:
    """The mesh axes in the query's type; None if the type has none.

    Raises:
        ValueError: the length or the head dim is sharded, or key and value are sharded differently from the query.
    """
    mesh, axes = explicit_axes(call.query)
    if not any(axes) and not any(any(explicit_axes(x)[1]) for x in (call.key, call.value) if x is not None):
        return None
    batch, length, heads, dim = axes
    for label, names, hint in (
        ("length (axis T)", length, "use jattn.sharding.ring_attention, or jax.sharding.reshard"),
        ("head dim (axis H)", dim, "use jax.sharding.reshard"),
    ):
        if math.prod(mesh.shape[name] for name in names) > 1:
            sizes = ", ".join(f"{name!r} ({mesh.shape[name]} devices)" for name in names)
            raise ValueError(f"the queries' {label} is sharded over {sizes}, but attention needs it whole: {hint}")
    for name in ("key", "value"):
        other = getattr(call, name)
        of_batch, of_length, of_heads, of_dim = explicit_axes(other)[1] if other is not None else ((),) * 4
        if of_batch not in ((), batch) or of_length or of_heads not in ((), heads) or of_dim:
            raise ValueError(
                f"{name} is sharded as {jax.typeof(other)}, query as {jax.typeof(call.query)}: sequences and heads "
                f"of {name} must be sharded like the query's or replicated, and its other axes must be whole; keys "
                f"sharded by length take implementation=jattn.sharding.SplitKeys(mesh, axis)"
            )
    return MeshAxes(mesh, batch, heads)


def explicit_axes(x: Array) -> tuple[Any, list[tuple[str, ...]]]:
    """The mesh in an array's type, and the explicit mesh axes over which each array axis is sharded."""
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if mesh.empty:
        return None, [()] * x.ndim
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    spec = [() if names is None else names if isinstance(names, tuple) else (names,) for names in sharding.spec]
    spec += [()] * (x.ndim - len(spec))
    return mesh, [tuple(name for name in names if kinds[name] == AxisType.Explicit) for names in spec]


def replicated_on(call: Call) -> MeshAxes | None:
    """The mesh of a call replicated on every device: all axes are explicit, and types name none of them."""
    mesh = jax.typeof(call.query).sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    if mesh.empty or any(is_typed(x) for x in (call.query, call.key, call.value) if x is not None):
        return None
    kinds = {kind for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if size > 1}
    return MeshAxes(mesh) if kinds == {AxisType.Explicit} else None


def may_be_sharded(call: Call) -> bool:
    """Whether the arrays may lie on several devices: their types or the current mesh have non-manual axes.

    Inside ``jax.shard_map``, all axes are manual, and the arrays belong to one device.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in (call.query, call.key)] + [jax.sharding.get_abstract_mesh()]
    return any(
        size > 1 and kind != AxisType.Manual
        for mesh in meshes
        if not mesh.empty
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def is_typed(x: Array) -> bool:
    """Whether the array's type is sharded."""
    return any(explicit_axes(x)[1])


def per_device(
    fn: PartFunction,
    call: Call,
    mesh_axes: MeshAxes,
    out_axes: PyTree[str],
    *extra: tuple[Array, str],
    multiple: int = 1,
) -> Any:
    """``fn(part of the call, *parts of arrays)`` on every device of a mesh, with the results assembled.

    Args:
        out_axes: for each result (a pytree), the letters of its axes; all other axes are unsharded.
        extra: arrays, each with the letters of its axes.
        multiple: the number of chunks of the sequence on each device.
    """
    mesh_axes.check(call, multiple)
    whole_kv_heads = call.key.shape[2] % mesh_axes.parts("heads") != 0
    call = convert_mods(call)
    sharded = {name: getattr(call, name) for name in AXES if getattr(call, name) is not None}
    sharded_specs = {
        name: jax.tree.map(lambda x, axes=AXES[name]: mesh_axes.spec(axes, x.shape, whole_kv_heads), whole)
        for name, whole in sharded.items()
    }
    extra_specs = [mesh_axes.spec(axes, array.shape, whole_kv_heads) for array, axes in extra]
    # The other fields are replicated. NumPy arrays stay static.
    traced, join = split_arrays(dataclasses.replace(call, **dict.fromkeys(sharded), stack=None))
    (B, _, N, _), K = call.query.shape, call.key.shape[2]

    def part(sharded: dict[str, Any], traced: list, *arrays: Array) -> PyTree:
        fields = dict(sharded)
        for kind, size in (("batch", B), ("heads", N)):
            if names := getattr(mesh_axes, kind):
                first = jax.lax.axis_index(names) * (size // mesh_axes.parts(kind))
                fields["first_batch" if kind == "batch" else "first_head"] = first
        if whole_kv_heads:  # a single kv head serves all heads of this device
            for name in ("key", "value"):
                if fields.get(name) is not None:
                    kv_head = fields["first_head"] // (N // K)
                    fields[name] = jax.lax.dynamic_slice_in_dim(fields[name], kv_head, 1, axis=2)
        local = dataclasses.replace(join(traced), **fields)
        return fn(dataclasses.replace(local, sharded=may_be_sharded(local)), *arrays)

    arrays = (sharded, traced, *(array for array, _ in extra))
    in_specs = (sharded_specs, [PartitionSpec()] * len(traced), *extra_specs)
    out_specs = jax.tree.map(lambda axes: mesh_axes.spec(axes, [0] * len(axes), whole_kv_heads), out_axes)
    return map_shards(part, mesh_axes.mesh, mesh_axes.named, in_specs, out_specs)(*arrays)


def map_shards(
    fn: Callable[..., PyTree], mesh: Mesh | AbstractMesh, named: Collection[str], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """``jax.shard_map`` of ``fn`` over the ``named`` axes, on both kinds of mesh, for arrays placed anywhere."""
    # Unnamed Auto axes are left to XLA, which may be partitioning over them.
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    manual = {name for name, kind in kinds if name in named or kind != AxisType.Auto}
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    sharded = jax.shard_map(fn, mesh=mesh, axis_names=manual, check_vma=False, **specs)

    @jax.jit  # needed even inside jit, where constants get types
    def run(*arrays: Any) -> PyTree:
        if AxisType.Explicit in mesh.axis_types:
            reshard = lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec))
            arrays = jax.tree.map(reshard, arrays, in_specs)
        return sharded(*arrays)

    return run
