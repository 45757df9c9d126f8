"""Turns masks and score functions into pytrees: ``pytree_dataclass``, and plain functions inside pytrees."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey
from jaxtyping import PyTree

from jattn._mods.keywords import suggest_keywords

Class = TypeVar("Class", bound=type)


def static_field(**options: Any) -> Any:
    """A ``pytree_dataclass`` field that is part of the tree's structure: hashable and static under tracing.

    ``options`` are the keywords of ``dataclasses.field``, such as ``default``.

    Example:
        >>> @jattn.pytree_dataclass
        ... class Near(jattn.masks.Mask):
        ...     width: int = jattn.static_field(default=2)
        ...     def __call__(self, b, h, q_idx, kv_idx):
        ...         return abs(q_idx - kv_idx) < self.width
        >>> jax.tree.leaves(Near()), Near() == Near(2), Near() == Near(3)
        ([], True, False)
    """
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(dataclasses.field, static_field))
def pytree_dataclass(cls: Class) -> Class:
    """Makes ``cls`` a frozen dataclass and a pytree. Fields are children; a ``static_field`` is part of the structure.

    Which fields are children depends on the class alone, not on their values, so trees of shardings, axes or booleans
    fit wherever trees of arrays do. The field names are the keys. ``__init__`` and ``__post_init__`` do not run when
    JAX unflattens, because leaves may then be anything.

    Instances without arrays are equal, with equal hashes, if their types and fields are equal. An instance with arrays
    equals only itself, because arrays have no single truth value.

    Example:
        A custom mask that works on every mesh, with ``bounds`` that allow skipping blocks:

        >>> @jattn.pytree_dataclass
        ... class Dilated(jattn.masks.Mask):
        ...     starts: jax.Array  # [B]: an array
        ...     step: int = jattn.static_field(default=2)
        ...     def __call__(self, b, h, q_idx, kv_idx):
        ...         return (kv_idx >= self.starts[b]) & ((q_idx - kv_idx) % self.step == 0)
        ...     def bounds(self, b, h, q_min, q_max, kv_min, kv_max):
        ...         return kv_max >= self.starts[b], False
        >>> jattn.masks.check_bounds(Dilated(np.array([3])), 8, 8)  # raises if bounds are wrong
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    cls.__init__ = suggest_keywords(cls.__init__)
    fields = dataclasses.fields(cls)
    data = tuple(field.name for field in fields if not field.metadata.get("static"))
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    keys = tuple(map(GetAttrKey, data))

    def flatten(tree: object) -> tuple[tuple, tuple]:
        return tuple(getattr(tree, name) for name in data), tuple(getattr(tree, name) for name in static)

    def flatten_with_keys(tree: object) -> tuple[tuple, tuple]:
        children, structure = flatten(tree)
        return tuple(zip(keys, children, strict=True)), structure

    def unflatten(structure: tuple, children: Iterable) -> object:
        tree = object.__new__(cls)  # not cls(...): JAX also unflattens placeholders, which __post_init__ would reject
        for name, value in (*zip(data, children, strict=True), *zip(static, structure, strict=True)):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    for name, method in (("__eq__", _equal), ("__hash__", _hash)):
        if name not in vars(cls):
            setattr(cls, name, method)
    return cls


def _equal(self: object, other: object) -> Any:
    if type(self) is not type(other):
        return NotImplemented
    return self is other or (_values(self) is not None and _values(self) == _values(other))


def _hash(self: object) -> int:
    values = _values(self)
    return object.__hash__(self) if values is None else hash(values)


def _values(tree: PyTree) -> tuple | None:
    """Structure and leaves, for comparison; None if there are arrays."""
    leaves, structure = jax.tree.flatten(tree)
    if any(hasattr(leaf, "dtype") and not isinstance(leaf, np.generic) for leaf in leaves):
        return None
    return structure, tuple((type(leaf), leaf) for leaf in leaves)  # with the types: 2 == 2.0 == np.float32(2)


@pytree_dataclass
class StaticFunction:
    """A plain function in a pytree: part of its structure, compared by identity like static ``jax.jit`` arguments."""

    function: Callable[..., Any] = static_field()

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def as_part(mod: PyTree) -> PyTree:
    """``mod`` as a child of a pytree: a plain function becomes a ``StaticFunction``, anything else is unchanged."""
    is_plain = isinstance(mod, functools.partial) or callable(mod) and jax.tree_util.all_leaves([mod])
    return StaticFunction(mod) if is_plain else mod


def holds_plain_function(mod: PyTree) -> bool:
    """Whether ``mod`` is or contains a plain function. Its captured values may change from call to call.

    A callable whose class is not registered with JAX counts as one.
    """
    leaves = jax.tree.leaves(mod, is_leaf=is_function)
    return any(map(callable, leaves))


def is_function(tree: object) -> bool:
    """Whether ``tree`` is a plain function wrapped for a pytree."""
    return isinstance(tree, StaticFunction | functools.partial)  # jax.tree_util.Partial is one of these


def known(tree: PyTree) -> PyTree:
    """``tree`` with every concrete ``jax.Array`` as a NumPy array, which is static while tracing."""

    def to_numpy(x: PyTree) -> PyTree:
        concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_addressable
        return np.asarray(x) if concrete and not jnp.issubdtype(x.dtype, jax.dtypes.extended) else x

    leaves, structure = jax.tree.flatten(tree)
    converted = [to_numpy(leaf) for leaf in leaves]
    same = all(x is y for x, y in zip(leaves, converted, strict=True))
    return tree if same else jax.tree.unflatten(structure, converted)


def split_arrays(
    tree: PyTree, kind: type = jax.Array, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Iterable[Any]], PyTree]]:
    """The leaves that are JAX arrays, or of another ``kind``, and a function that replaces them."""
    leaves, structure = jax.tree.flatten(tree, is_leaf)
    is_array = [isinstance(leaf, kind) for leaf in leaves]
    # Without the arrays: JAX's caches keep functions that close over join, and traced arrays must not outlive their
    # trace.
    static = [None if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]

    def join(arrays: Iterable[Any]) -> PyTree:
        rest = iter(arrays)
        return structure.unflatten([next(rest) if array else x for x, array in zip(static, is_array, strict=True)])

    return [x for x, array in zip(leaves, is_array, strict=True) if array], join
