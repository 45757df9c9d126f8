"""Attention on a mesh: each device has its own sequences, heads or stretch of them, and what it needs of the rest.

``Placement`` says which mesh axes the sequences, the heads and the length are divided over, ``per_device`` runs a
function of a ``Request`` on each device's part of it, by ``jax.shard_map``. Masks, score functions and dropout see the
indices of the whole: the part knows its first sequence and head, and positions are data.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jattn.attention import hoisted
from jattn.request import Request

# What is divided with what. A letter is an axis, as in the legend in lower case; with "." every device has the whole.
AXES: Mapping[str, str] = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskd",
    "bias": "bnt.",
    "slot_masks": "bnt.",
    "query_lengths": "b",
    "kv_lengths": "b",
    "query_positions": "bt",
    "kv_positions": "bs",
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Over which axes of ``mesh`` sequences, heads and length are divided; ``()`` where they are not."""

    mesh: Any
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    length: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Any, **asked: tuple[str, str | Sequence[str] | None]) -> "Placement":
        """``batch``, ``heads`` and ``length``, each as the argument's name and the mesh axis or axes given for it.

        Raises:
            ValueError: the mesh has no such axis, or an axis is given twice.
        """
        found: dict[str, tuple[str, ...]] = {}
        for kind, (argument, axes) in asked.items():
            names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
            for at, name in enumerate(names):
                if name not in mesh.shape:
                    has = ", ".join(f"{one!r} ({size} devices)" for one, size in mesh.shape.items())
                    raise ValueError(f"{argument}={axes!r}: the mesh has no axis {name!r}; it has {has}")
                if name in names[:at] or any(name in others for others in found.values()):
                    raise ValueError(f"{argument}={axes!r}: the mesh axis {name!r} is given twice")
            found[kind] = names
        return cls(mesh, **found)

    def with_types(self, query: Any) -> "Placement":
        """With what the query's type says of sequences and heads, where nothing else was said."""
        mesh, axes = _explicit(query)
        if mesh is None or mesh.shape != self.mesh.shape:
            return self
        taken = {*self.batch, *self.heads, *self.length}
        batch, heads = (tuple(name for name in names if name not in taken) for names in (axes[0], axes[2]))
        return dataclasses.replace(self, batch=self.batch or batch, heads=self.heads or heads)

    def __str__(self):
        divided = {"sequences": "batch", "heads": "heads", "length": "length"}
        parts = [f"{what} over {self._axes(kind)}" for what, kind in divided.items() if getattr(self, kind)]
        return ", ".join(parts) or "nothing divided"

    def parts(self, kind: str) -> int:
        """Over how many devices ``"batch"``, ``"heads"`` or ``"length"`` is divided."""
        return math.prod(self.mesh.shape[name] for name in getattr(self, kind))

    def check(self, request: Request, multiple: int = 1) -> None:
        """Raises ``ValueError`` where what is divided does not come out even; lengths also by ``multiple``."""
        (B, T, N, _), (_, S, K, _) = request.query.shape, request.key.shape
        heads = self.parts("heads")
        for kind, what, size in (
            ("batch", "sequences (B)", B), ("heads", "query heads (N)", N), ("length", "queries (T)", T),
            ("length", "keys (S)", S),
        ):  # fmt: skip
            wanted = self.parts(kind) * (multiple if kind == "length" and self.length else 1)
            if size % wanted:
                raise ValueError(
                    f"{size} {what} cannot be divided over {self._axes(kind)}: they must be a multiple of {wanted}"
                )
        if K % heads and heads % K:
            raise ValueError(
                f"{K} key/value heads (K) cannot be divided over {self._axes('heads')}: one must divide the other"
            )

    def spec(self, axes: str, shape: Sequence[int], whole_kv_heads: bool) -> PartitionSpec:
        """Where an array with these ``axes`` lies; an axis of 1 that serves all others is not divided."""
        of = {"b": self.batch, "n": self.heads, "t": self.length, "s": self.length,
              "k": () if whole_kv_heads else self.heads}  # fmt: skip
        names = [of.get(axis, ()) if size != 1 else () for axis, size in zip(axes, shape, strict=False)]
        return PartitionSpec(*(name or None for name in names))

    def _axes(self, kind: str) -> str:
        sizes = (f"{name!r} ({self.mesh.shape[name]} devices)" for name in getattr(self, kind))
        return f"mesh {'axes' if len(getattr(self, kind)) > 1 else 'axis'} {' and '.join(sizes)}"


def on_each_device(fn: Callable, request: Request, out_axes: Any, *extra: tuple[Any, str]) -> Any:
    """``fn(request, *arrays)``; on each device's own part of it where the types say that the query is sharded.

    Arrays have such types on meshes of ``AxisType.Explicit``; on others XLA divides the work.
    """
    placement = placement_of(request)
    if placement is None:
        return fn(request, *(array for array, _ in extra))
    return per_device(fn, request, placement, out_axes, *extra)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Any:
    """``jax.lax.dot_general``, also where what is summed over is sharded and nobody says how the result shall lie.

    Then it lies as the axes that are left do, and is summed over the devices: ``sum_i z_i W_i^O`` with a head on each.
    """
    if out_sharding is None:
        (contracted, others), (batch, batch_others) = dimension_numbers
        mesh, left = _explicit(lhs)
        _, right = _explicit(rhs)
        if not batch and any(left[axis] for axis in contracted) and any(right[axis] for axis in others):
            rest = [names for axis, names in enumerate(left) if axis not in contracted]
            rest += [names for axis, names in enumerate(right) if axis not in others]
            out_sharding = NamedSharding(mesh, PartitionSpec(*(names or None for names in rest)))
    return jax.lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
    )


def whole_if_explicit(arrays: Any) -> Any:
    """``arrays``; those with explicit mesh axes in their types whole on every device, where all can be done with them.

    On other meshes XLA sees to it, and divides the work.
    """

    def whole(x: Any) -> Any:
        mesh, axes = _explicit(x)
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec())) if any(axes) else x

    return jax.tree.map(whole, arrays)


def placement_of(request: Request) -> Placement | None:
    """Where the query's type says that it lies; None where it says nothing.

    Raises:
        ValueError: the length or the head dim is sharded, or key and value lie elsewhere than the query.
    """
    mesh, axes = _explicit(request.query)
    if not any(axes) and not any(any(_explicit(x)[1]) for x in (request.key, request.value) if x is not None):
        return None
    batch, length, heads, dim = axes
    for what, names, hint in (
        ("length (axis T)", length, "jattn.sharding.ring_attention takes such, or jax.sharding.reshard them"),
        ("head dim (axis H)", dim, "jax.sharding.reshard them"),
    ):
        if math.prod(mesh.shape[name] for name in names) > 1:
            sizes = ", ".join(f"{name!r} ({mesh.shape[name]} devices)" for name in names)
            raise ValueError(f"the queries' {what} is sharded over {sizes}, and attention needs it whole: {hint}")
    for name in ("key", "value"):
        other = getattr(request, name)
        own = _explicit(other)[1] if other is not None else ((),) * 4
        if own[0] not in ((), batch) or own[1] or own[2] not in ((), heads) or own[3]:
            raise ValueError(
                f"{name} is sharded as {jax.typeof(other)}, query as {jax.typeof(request.query)}: its sequences and "
                "heads must lie where the query's do, or everywhere, and its other axes be whole"
            )
    return Placement(mesh, batch, heads)


def _explicit(x: Any) -> tuple[Any, list[tuple[str, ...]]]:
    """The mesh of an array's type, and for each axis the explicit mesh axes that it lies on."""
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if mesh.empty:
        return None, [()] * x.ndim
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    spec = [() if names is None else names if isinstance(names, tuple) else (names,) for names in sharding.spec]
    spec += [()] * (x.ndim - len(spec))
    return mesh, [tuple(name for name in names if kinds[name] == AxisType.Explicit) for names in spec]


def may_be_divided(request: Request) -> bool:
    """May the arrays lie on several devices? Their types say so, or the mesh in force, by axes that are not manual.

    Inside ``jax.shard_map`` all axes are, and the arrays are one device's own.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in (request.query, request.key)] + [jax.sharding.get_abstract_mesh()]
    return any(
        size > 1 and kind != AxisType.Manual
        for mesh in meshes
        if not mesh.empty
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def is_typed(x: Any) -> bool:
    """Does the array's type say that it is sharded?"""
    return any(_explicit(x)[1])


def per_device(
    fn: Callable, request: Request, place: Placement, out_axes: Any, *extra: tuple[Any, str], multiple: int = 1
) -> Any:
    """``fn(part of the request, *parts of arrays)`` on every device of a mesh, and its results put together.

    ``out_axes``: for each result (a pytree of them) the letters of its axes, as in ``AXES``; further axes are whole.
    ``extra``: arrays with their axes.

    Raises:
        ValueError: something is no multiple of the devices that it is divided over (a length also of ``multiple``).
    """
    place.check(request, multiple)
    whole_kv_heads = request.key.shape[2] % place.parts("heads") != 0
    request = hoisted(request, request.query, (request.query.shape[1], request.key.shape[1]))
    divided, divided_specs = {}, {}
    for name, axes in AXES.items():
        whole = getattr(request, name)
        if whole is None:
            continue
        divided_specs[name] = jax.tree.map(lambda x, axes=axes: place.spec(axes, x.shape, whole_kv_heads), whole)
        divided[name] = whole
    extra_specs = [place.spec(axes, array.shape, whole_kv_heads) for array, axes in extra]
    leaves, structure = jax.tree.flatten((request.masks, request.score_mod, request.scale, request.dropout))
    traced = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]  # NumPy stays: what is static may be looked at
    (B, _, N, _), K = request.query.shape, request.key.shape[2]

    def part(divided: dict[str, Any], traced: list, *arrays: Any) -> Any:
        rest = iter(traced)
        joined = jax.tree.unflatten(structure, [next(rest) if isinstance(x, jax.Array) else x for x in leaves])
        here = dict(zip(("masks", "score_mod", "scale", "dropout"), joined, strict=True)) | divided
        for kind, size in (("batch", B), ("heads", N)):
            if names := getattr(place, kind):
                first = jax.lax.axis_index(names) * (size // place.parts(kind))
                here["first_batch" if kind == "batch" else "first_head"] = first
        if whole_kv_heads:  # one of them serves all heads that this device has
            for name in ("key", "value"):
                if here.get(name) is not None:
                    at = here["first_head"] // (N // K)
                    here[name] = jax.lax.dynamic_slice_in_dim(here[name], at, 1, axis=2)
        return fn(dataclasses.replace(request, **here), *arrays)

    arrays = (divided, traced, *(array for array, _ in extra))
    in_specs = (divided_specs, [PartitionSpec()] * len(traced), *extra_specs)
    out_specs = jax.tree.map(lambda axes: place.spec(axes, [0] * len(axes), whole_kv_heads), out_axes)
    # what nobody named is left to XLA, which may be dividing something over it
    kinds = zip(place.mesh.axis_names, place.mesh.axis_types, strict=True)
    named = {*place.batch, *place.heads, *place.length}
    manual = {name for name, kind in kinds if name in named or kind != AxisType.Auto}
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    divide = jax.shard_map(part, mesh=place.mesh, axis_names=manual, check_vma=False, **specs)

    @jax.jit  # also where jit is at work already: in it constants have types, too
    def run(*arrays: Any) -> Any:
        if AxisType.Explicit in place.mesh.axis_types:
            lay = lambda x, spec: jax.sharding.reshard(x, NamedSharding(place.mesh, spec))
            arrays = jax.tree.map(lay, arrays, in_specs)
        return divide(*arrays)

    return run(*arrays)
