"""What masks and score functions share: they are pytrees and run under NumPy's promotion rules."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey

Class = TypeVar("Class", bound=type)


def static_field(**options: Any) -> Any:
    """A field of a ``pytree_dataclass`` that is part of the tree's structure: hashable and static under tracing.

    Takes the options of ``dataclasses.field``, such as ``default``.
    """
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(dataclasses.field, static_field))
def pytree_dataclass(cls: Class) -> Class:
    """Makes ``cls`` a frozen dataclass and a pytree. Fields are children; a ``static_field`` is structure.

    Which fields are children depends on the class alone, not on their values, so trees of shardings, axes or booleans
    fit wherever trees of arrays do. The fields' names are the keys. ``__init__`` and ``__post_init__`` do not run when
    JAX unflattens, because leaves may then be anything.

    Instances without arrays are equal, with equal hashes, if their types and fields are. An instance with arrays equals
    only itself, because arrays have no single truth value.

    Example: your own mask, whose ``bounds`` let blocks be skipped, on every mesh::

        @jattn.pytree_dataclass
        class Dilated(jattn.masks.Mask):
            starts: jax.Array  # [B]: an array
            step: int = jattn.static_field(default=2)

            def __call__(self, b, h, q_idx, kv_idx):
                return (kv_idx >= self.starts[b]) & ((q_idx - kv_idx) % self.step == 0)

            def bounds(self, b, h, q_min, q_max, kv_min, kv_max):
                return kv_max >= self.starts[b], False
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(cls)
    data = tuple(field.name for field in fields if not field.metadata.get("static"))
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    keys = tuple(map(GetAttrKey, data))

    def flatten(tree):
        return tuple(getattr(tree, name) for name in data), tuple(getattr(tree, name) for name in static)

    def flatten_with_keys(tree):
        children, structure = flatten(tree)
        return tuple(zip(keys, children, strict=True)), structure

    def unflatten(structure, children):
        tree = object.__new__(cls)  # not cls(...): JAX also unflattens placeholders, which __post_init__ would refuse
        for name, value in (*zip(data, children, strict=True), *zip(static, structure, strict=True)):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    for name, method in (("__eq__", _equal), ("__hash__", _hash)):
        if name not in vars(cls):
            setattr(cls, name, method)
    return cls


def _equal(self: Any, other: Any) -> Any:
    if type(self) is not type(other):
        return NotImplemented
    return self is other or (_values(self) is not None and _values(self) == _values(other))


def _hash(self: Any) -> int:
    values = _values(self)
    return object.__hash__(self) if values is None else hash(values)


def _values(tree: Any) -> Any:
    """Structure and leaves, for comparison; None if there are arrays."""
    leaves, structure = jax.tree.flatten(tree)
    if any(hasattr(leaf, "dtype") and not isinstance(leaf, np.generic) for leaf in leaves):
        return None
    return structure, tuple((type(leaf), leaf) for leaf in leaves)  # with the types: 2 == 2.0 == np.float32(2)


@pytree_dataclass
class Function:
    """A plain function in a pytree: part of its structure, compared by identity, as static arguments of ``jax.jit``."""

    function: Callable = static_field()

    def __call__(self, *args):
        return self.function(*args)


def as_part(mod: Any) -> Any:
    """``mod`` as a child of a pytree: a plain function becomes a ``Function``, anything else is unchanged."""
    return Function(mod) if isinstance(mod, functools.partial) or _is_leaf(mod) and callable(mod) else mod


def _is_leaf(tree: Any) -> bool:
    return jax.tree_util.all_leaves([tree])


def holds_plain_function(mod: Any) -> bool:
    """Whether ``mod`` is or contains a plain function, whose captured values may change from call to call.

    A callable of a class that is not registered with JAX counts as one.
    """
    leaves = jax.tree.leaves(mod, is_leaf=is_function)
    return any(map(callable, leaves))


def is_function(tree: Any) -> bool:
    """Whether ``tree`` is a plain function wrapped for a pytree."""
    return isinstance(tree, Function | functools.partial)  # jax.tree_util.Partial is one of these


@contextlib.contextmanager
def mod_semantics() -> Iterator[None]:
    """Promotion rules for masks and score functions: NumPy's, whatever the caller's are."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def check(mod: Any, B: Any, N: Any, T: Any, S: Any) -> None:
    """Calls ``mod.check(B, N, T, S)``, if it exists, with the numbers of sequences, heads, queries and keys.

    T and S are None if positions are given; tables by position may then have any length.

    Raises:
        ValueError: ``mod`` does not fit; the message names the field, its shape and the expected shape.
    """
    checks = getattr(mod, "check", None)
    if callable(checks):
        checks(B, N, T, S)


def known(tree: Any) -> Any:
    """``tree`` with every concrete ``jax.Array`` as a NumPy array, which is static while tracing."""

    def to_numpy(x: Any) -> Any:
        concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_addressable
        return np.asarray(x) if concrete and not jnp.issubdtype(x.dtype, jax.dtypes.extended) else x

    leaves, structure = jax.tree.flatten(tree)
    converted = [to_numpy(leaf) for leaf in leaves]
    same = all(x is y for x, y in zip(leaves, converted, strict=True))
    return tree if same else jax.tree.unflatten(structure, converted)


def checked(name: str, mod: Any) -> Any:
    """``mod``. Raises for common mistakes: a class, a list of several, a function with the wrong arguments."""
    if isinstance(mod, type):
        raise TypeError(f"{name}={mod.__name__} is a class; write {name}={mod.__name__}(...)")
    if isinstance(mod, list | tuple) and any(map(callable, mod)):
        hint = "masks by & (or masks.and_masks)" if name == "mask" else "score functions by score_mods.then"
        raise TypeError(f"{name} must be one callable, got a {type(mod).__name__} of {len(mod)}; join {hint}")
    if callable(mod):
        arguments = ["b", "h", "q_idx", "kv_idx"] if name == "mask" else ["score", "b", "h", "q_idx", "kv_idx"]
        try:
            signature = inspect.signature(mod)
        except (TypeError, ValueError):  # not every callable has a signature
            return mod
        try:
            signature.bind(*arguments)
        except TypeError:
            raise TypeError(f"{name} must take ({', '.join(arguments)}), got a function of {signature}") from None
    return mod
