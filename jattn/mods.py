"""What masks and score functions have in common: they are pytrees, and run under NumPy's promotion rules."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

Class = TypeVar("Class", bound=type)


@dataclass_transform(eq_default=False, frozen_default=True)
def pytree_dataclass(cls: Class) -> Class:
    """Makes ``cls`` a frozen dataclass and a pytree: arrays are leaves, pytrees are subtrees, all else is static.

    Equality is identity (``eq=False``), because arrays have no single truth value.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    names = tuple(field.name for field in dataclasses.fields(cls))

    def flatten(tree):
        values = {name: getattr(tree, name) for name in names}
        dynamic = tuple(name for name, value in values.items() if _holds_arrays(value))
        static = tuple((name, value) for name, value in values.items() if name not in dynamic)
        return tuple(values[name] for name in dynamic), (dynamic, static)

    def unflatten(structure, leaves):
        dynamic, static = structure
        tree = object.__new__(cls)  # not cls(...): JAX also unflattens placeholders, which __post_init__ would refuse
        for name, value in (*zip(dynamic, leaves, strict=True), *static):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


def _holds_arrays(value: Any) -> bool:
    if value is None or isinstance(value, np.generic):
        return False
    return hasattr(value, "dtype") or not jax.tree_util.all_leaves([value])


def holds_plain_function(mod: Any) -> bool:
    """Is ``mod`` a plain function, or does it join one? What those capture may change from call to call."""
    if not dataclasses.is_dataclass(mod):
        return callable(mod)
    return any(holds_plain_function(part) for part in vars(mod).values() if callable(part))


@pytree_dataclass
class Hoisted:
    """A plain mask or score function, and what it captures as arrays, so that both can be handed on."""

    program: Any  # of scalars: the function is elementwise
    captured: list[Any]

    def __call__(self, *args):
        kinds = [variable.aval.dtype for variable in self.program.invars]
        scalars = (jnp.asarray(arg).astype(kind) for arg, kind in zip(args, kinds, strict=True))
        return jnp.vectorize(lambda *one: eval_jaxpr(self.program, self.captured, *one)[0])(*scalars)


def hoist(mod: Any, *scalars: Any) -> Any:
    """``mod`` with every function in it that is no pytree ``Hoisted``; ``scalars``: the arguments of one pair.

    What joins others names them in ``joins``, and keeps what it knows beside them.
    """
    if mod is None:
        return None
    unknown = jax.tree_util.all_leaves([mod])  # a class that JAX cannot look into
    if not holds_plain_function(mod) and not unknown:
        return mod
    if names := getattr(mod, "joins", ()):
        hoisted = copy.copy(mod)
        for name in names:
            object.__setattr__(hoisted, name, hoist(getattr(mod, name), *scalars))
        return hoisted
    with mod_semantics():
        program = jax.make_jaxpr(mod)(*scalars)
    return Hoisted(program.jaxpr, list(program.consts))


@contextlib.contextmanager
def mod_semantics() -> Iterator[None]:
    """The promotion rules that masks and score functions run under: NumPy's, whatever the caller's are."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
