"""Jaxprs: evaluates them equation by equation, and compares them by what they compute."""

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.core import Atom, ShapedArray

# Slow to import, because it imports Pallas: deferred until the first function is traced.
if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var  # pyright: ignore[reportPrivateImportUsage]
else:
    Jaxpr = JaxprEqn = Any

Value = TypeVar("Value")

# Parameters that differ in every trace of a function with a custom derivative; the jaxpr identifies the function.
_RULES = ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk")


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Value],
    bind: Callable[[JaxprEqn, list[Value]], Sequence[Value]],
    *,
    inline: Collection[str] = ("jit",),
    constant: Callable[[Any], Value] = lambda x: x,
) -> list[Value]:
    """The results of a jaxpr, with ``bind(equation, inputs)`` called for the results of each equation, in order.

    The values may be of any type accepted by ``bind``: arrays or stand-ins for them. Casts to arrays that vary over a
    mesh are dropped: a function traced inside ``jax.shard_map`` contains them, but is evaluated on one device's own
    arrays.

    Args:
        jaxpr, consts: as in ``jax.core.eval_jaxpr``.
        inputs: one value for each of the jaxpr's arguments.
        bind: returns a sequence of values, even for a single result.
        inline: the names of primitives that call a jaxpr; ``bind`` sees that jaxpr's equations instead of the call.
        constant: makes a value from a constant, or from a literal as a NumPy array of rank 0.
    """
    from jax.extend.core import ClosedJaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]

    values: dict[Var, Value] = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Atom) -> Value:
        return constant(np.asarray(x.val, array_type(x).dtype)) if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        arguments, name = [read(x) for x in equation.invars], equation.primitive.name
        if name == "pvary":
            results: Sequence[Value] = arguments
        elif name in inline:
            called = equation.params["jaxpr"] if "jaxpr" in equation.params else equation.params["call_jaxpr"]
            inner, inner_consts = (called.jaxpr, called.consts) if isinstance(called, ClosedJaxpr) else (called, ())
            results = evaluate(inner, inner_consts, arguments, bind, inline=inline, constant=constant)
        else:
            results = bind(equation, arguments)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def array_type(x: Atom) -> ShapedArray:
    """The shape and dtype of a jaxpr's variable or literal."""
    assert isinstance(x.aval, ShapedArray)
    return x.aval


def bind_equation(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """The results of applying an equation's own primitive."""
    primitive = equation.primitive
    results = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


class HashableJaxpr:
    """A jaxpr that compares by what it computes."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr

    @functools.cached_property
    def _contents(self) -> Hashable:  # compared only by eager calls
        return _contents_of(self.jaxpr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashableJaxpr) and self._contents == other._contents

    def __hash__(self) -> int:
        return hash(self._contents)


def _contents_of(jaxpr: Jaxpr) -> Hashable:
    """A hashable object that is equal for jaxprs with the same equations."""
    from jax.extend.core import Literal  # pyright: ignore[reportPrivateImportUsage]

    numbers: dict[Var, int] = {}

    def atom(x: Atom) -> Hashable:
        if isinstance(x, Literal):
            return str(x.aval), _hashable(np.asarray(x.val))
        return numbers.setdefault(x, len(numbers)), str(x.aval)

    inputs = tuple(map(atom, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (
            equation.primitive,
            tuple(map(atom, equation.invars)),
            tuple((name, _hashable(x)) for name, x in sorted(equation.params.items()) if name not in _RULES),
            tuple(map(atom, equation.outvars)),
        )
        for equation in jaxpr.eqns
    )
    return inputs, equations, tuple(map(atom, jaxpr.outvars))


def _hashable(x: object) -> Hashable:
    """A hashable object that is equal for equal ``x``."""
    from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]

    if isinstance(x, ClosedJaxpr):
        return _contents_of(x.jaxpr), tuple(map(_hashable, x.consts))
    if isinstance(x, Jaxpr):
        return _contents_of(x)
    if isinstance(x, tuple | list):
        return tuple(map(_hashable, x))
    if isinstance(x, np.ndarray | jax.Array):
        return x.shape, str(x.dtype), np.asarray(x).tobytes()
    try:
        hash(x)
    except TypeError:
        return object()  # equal to nothing else
    return x
