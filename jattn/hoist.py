"""Plain masks and score functions as programs: what they capture becomes an argument, what they compute compares.

A custom derivative rule, ``jax.shard_map`` and a compiled eager call may close over nothing that is traced, and must
not miss what a function captures that has changed since. So a function that is no pytree is traced, for one pair, every
time that it is given.
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

# Of a function with a derivative rule of its own, every trace makes the rule anew; its program stands for it.
_RULES = ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk")


class Program:
    """A jaxpr that compares by what it computes."""

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr

    @functools.cached_property
    def _value(self) -> tuple:  # which eager calls alone compare
        return _value_of(self.jaxpr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


@pytree_dataclass
class Traced:
    """A function of arrays that gives a list of them: its program, and what it captures."""

    captured: list[Any]
    program: Program = static_field()

    def __call__(self, *args: Any) -> list[Any]:
        jaxpr = self.program.jaxpr
        types = [variable.aval for variable in jaxpr.invars]
        cast = (jnp.asarray(x).astype(one.dtype).reshape(one.shape) for x, one in zip(args, types, strict=True))
        return _evaluate(jaxpr, self.captured, *cast)


@pytree_dataclass
class Elementwise:
    """A mask or score function, as what it does with one pair."""

    of_one_pair: Traced

    def __call__(self, *args: Any) -> Any:
        return jnp.vectorize(lambda *one: self.of_one_pair(*one)[0])(*args)


def arguments(T: Any, S: Any, *score: Any) -> list[jax.ShapeDtypeStruct]:
    """The types of a mask's arguments for T queries and S keys, or a score function's for a ``score`` of that dtype."""
    of = jax.ShapeDtypeStruct
    return [
        *(of((T, S), dtype) for dtype in score),
        *[of((), jnp.int32)] * 2,
        of((T, 1), jnp.int32),
        of((1, S), jnp.int32),
    ]


def hoist(mod: Any, check: Callable[[Any], None], lengths: tuple[Any, Any], *score: Any) -> Any:
    """``mod`` with every part that is no pytree as its program.

    What joins others, such as ``masks.And``, keeps what it knows beside them.

    Args:
        mod: a mask, a score function, or None.
        check: called with what a function returned for T queries and S keys; raises where it may not.
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

    def of_one_pair(*args: Any) -> Any:
        with mod_semantics():
            return jnp.reshape(mod(*args), ())

    jax.eval_shape(checked, *arguments(*lengths, *score))
    return Elementwise(traced(of_one_pair, *arguments(1, 1, *score)))


def traced(fn: Callable, *types: Any) -> Traced:
    """``fn`` of arrays of these types, as its program and what it captures."""
    program = jax.make_jaxpr(fn)(*types)
    return Traced(list(program.consts), Program(program.jaxpr))


def depends_on(mod: Callable, index: int, *score: Any) -> bool:
    """Does any path lead from the argument ``index`` of a mask or score function to what it returns?"""

    def of_one_pair(*args: Any) -> Any:
        with mod_semantics():
            return mod(*args)

    program = jax.make_jaxpr(of_one_pair)(*arguments(1, 1, *score)).jaxpr
    reached: set[Any] = {program.invars[index]}
    for equation in program.eqns:
        if not reached.isdisjoint(x for x in equation.invars if isinstance(x, Var)):
            reached.update(equation.outvars)
    return not reached.isdisjoint(x for x in program.outvars if isinstance(x, Var))


def _evaluate(jaxpr: Any, captured: Any, *args: Any) -> list[Any]:
    """``jax.core.eval_jaxpr`` without the casts to arrays that vary over a mesh.

    A function traced inside ``jax.shard_map`` has them, but where it is evaluated all arrays are one device's own.
    """
    if not any(equation.primitive.name in ("pvary", "jit") for equation in jaxpr.eqns):
        return eval_jaxpr(jaxpr, captured, *args)
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*captured, *args), strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        primitive, given = equation.primitive, [read(x) for x in equation.invars]
        if primitive.name == "pvary":
            results = given
        elif primitive.name == "jit":
            inner = equation.params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, *given)
        else:
            results = primitive.bind(*given, **primitive.get_bind_params(equation.params))
            results = results if primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _value_of(jaxpr: Any) -> tuple:
    """Equal for jaxprs that compute the same, equation by equation."""
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
    """``x`` as something hashable that is equal where ``x`` is."""
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
