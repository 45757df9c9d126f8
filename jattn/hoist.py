"""Traces plain masks and score functions: captured arrays become arguments, and equal programs compare equal.

A custom derivative rule, ``jax.shard_map`` and a compiled eager call must not close over traced arrays, nor use stale
values of what a function captures. So a function that is not a pytree is traced, for one pair, at every call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var  # pyright: ignore[reportPrivateImportUsage]

from jattn.mods import Function, holds_plain_function, is_function, mod_semantics, pytree_dataclass, static_field

# Parameters that differ in every trace of a function with a custom derivative; its jaxpr identifies it.
_RULES = ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk")


class Program:
    """A jaxpr that compares by what it computes."""

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr

    @functools.cached_property
    def _value(self) -> tuple:  # compared by eager calls only
        return _value_of(self.jaxpr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


@pytree_dataclass
class Traced:
    """A traced function from arrays to a list of arrays: its program and the arrays it captures."""

    captured: list[Any]
    program: Program = static_field()

    def __call__(self, *args: Any) -> list[Any]:
        jaxpr = self.program.jaxpr
        types = [variable.aval for variable in jaxpr.invars]
        cast = (jnp.asarray(x).astype(aval.dtype).reshape(aval.shape) for x, aval in zip(args, types, strict=True))
        return _evaluate(jaxpr, self.captured, *cast)


@pytree_dataclass
class Elementwise:
    """A mask or score function, traced on one pair and vectorized."""

    on_one_pair: Traced

    def __call__(self, *args: Any) -> Any:
        return jnp.vectorize(lambda *pair: self.on_one_pair(*pair)[0])(*args)


def arguments(T: Any, S: Any, *score: Any) -> list[jax.ShapeDtypeStruct]:
    """The types of a mask's arguments for T queries and S keys, or a score function's for a ``score`` of that dtype."""
    shaped = jax.ShapeDtypeStruct
    return [
        *(shaped((T, S), dtype) for dtype in score),
        *[shaped((), jnp.int32)] * 2,
        shaped((T, 1), jnp.int32),
        shaped((1, S), jnp.int32),
    ]


def hoist(mod: Any, check: Callable[[Any], None], lengths: tuple[Any, Any], *score: Any) -> Any:
    """``mod`` with every plain function in it traced.

    Masks that combine others, such as ``masks.And``, keep the ``bounds`` of their other parts.

    Args:
        mod: a mask, a score function, or None.
        check: called with a function's result for T queries and S keys; raises if it is invalid.
        lengths: T and S.
        score: the dtype of the scores, for a score function.
    """
    if mod is None or not holds_plain_function(mod):
        return mod
    leaves = jax.tree.leaves(mod, is_leaf=is_function)
    if not is_function(mod) and all(isinstance(leaf, Function) for leaf in leaves if callable(leaf)):
        return jax.tree.map(lambda x: hoist(x, check, lengths, *score) if callable(x) else x, mod, is_leaf=is_function)

    def checked(*args: Any) -> None:
        with mod_semantics():
            check(mod(*args))

    def on_one_pair(*args: Any) -> Any:
        with mod_semantics():
            return jnp.reshape(mod(*args), ())

    jax.eval_shape(checked, *arguments(*lengths, *score))
    return Elementwise(traced(on_one_pair, *arguments(1, 1, *score)))


def traced(fn: Callable, *types: Any) -> Traced:
    """``fn``, traced for arguments of these types."""
    program = jax.make_jaxpr(fn)(*types)
    return Traced(list(program.consts), Program(program.jaxpr))


def depends_on(mod: Callable, index: int, *score: Any) -> bool:
    """Whether the result of a mask or score function depends on its argument ``index``."""

    def on_one_pair(*args: Any) -> Any:
        with mod_semantics():
            return mod(*args)

    # Indices are no one device's, and a function traced outside of jax.shard_map is evaluated inside.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        program = jax.make_jaxpr(on_one_pair)(*arguments(1, 1, *score)).jaxpr
    dependent: set[Any] = {program.invars[index]}
    for equation in program.eqns:
        if not dependent.isdisjoint(x for x in equation.invars if isinstance(x, Var)):
            dependent.update(equation.outvars)
    return not dependent.isdisjoint(x for x in program.outvars if isinstance(x, Var))


def _evaluate(jaxpr: Any, captured: Any, *args: Any) -> list[Any]:
    """``jax.core.eval_jaxpr`` without the casts to arrays that vary over a mesh.

    A function traced inside ``jax.shard_map`` contains such casts, but is evaluated on one device's own arrays.
    """
    if not any(equation.primitive.name in ("pvary", "jit") for equation in jaxpr.eqns):
        return eval_jaxpr(jaxpr, captured, *args)
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*captured, *args), strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        primitive, inputs = equation.primitive, [read(x) for x in equation.invars]
        if primitive.name == "pvary":
            results = inputs
        elif primitive.name == "jit":
            inner = equation.params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, *inputs)
        else:
            results = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
            results = results if primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _value_of(jaxpr: Any) -> tuple:
    """A hashable that is equal for jaxprs with the same equations."""
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Any:
        if isinstance(x, Literal):
            return str(x.aval), _value(np.asarray(x.val))
        return numbers.setdefault(x, len(numbers)), str(x.aval)

    inputs = tuple(map(atom, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (
            equation.primitive,
            tuple(map(atom, equation.invars)),
            tuple((name, _value(x)) for name, x in sorted(equation.params.items()) if name not in _RULES),
            tuple(map(atom, equation.outvars)),
        )
        for equation in jaxpr.eqns
    )
    return inputs, equations, tuple(map(atom, jaxpr.outvars))


def _value(x: Any) -> Any:
    """A hashable that is equal for equal ``x``."""
    if isinstance(x, ClosedJaxpr):
        return _value_of(x.jaxpr), tuple(map(_value, x.consts))
    if isinstance(x, Jaxpr):
        return _value_of(x)
    if isinstance(x, tuple | list):
        return tuple(map(_value, x))
    if isinstance(x, np.ndarray | jax.Array):
        return x.shape, str(x.dtype), np.asarray(x).tobytes()
    try:
        hash(x)
    except TypeError:
        return object()  # equal to nothing else
    return x
