"""Masks, score functions and their derivatives by the operations that Mosaic's GPU compiler has."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jattn.separate import ELEMENTWISE, spread


def run(fn: Callable, *arrays: Any) -> Any:
    """``fn(*arrays)``, one array of elementwise operations, equation by equation.

    ``fn`` is traced first, so derivatives are those that JAX and custom rules define; then calls are inlined, numbers
    are broadcast, and what the compiler lacks is computed by ``FUNCTIONS``.
    """
    closed = jax.make_jaxpr(fn)(*arrays)
    return _run(closed.jaxpr, closed.consts, arrays)[0]


def _run(jaxpr: Any, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arrays), strict=True))

    def read(x: Any) -> Any:
        return np.asarray(x.val, jnp.result_type(x.aval)) if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs, name = [read(x) for x in equation.invars], equation.primitive.name
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None:
            results = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
        elif name in ELEMENTWISE or name in FUNCTIONS:
            inputs = [spread(x, equation.outvars[0].aval.shape) for x in inputs]
            own = FUNCTIONS.get(name)
            if name == "convert_element_type" and equation.params["new_dtype"] == bool:
                own = _to_bool
            elif name == "integer_pow" and equation.params["y"] < 0:
                own = functools.partial(_inverse_power, equation.params["y"])
            results = [own(*inputs) if own is not None else equation.primitive.bind(*inputs, **equation.params)]
        else:
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return [read(x) for x in jaxpr.outvars]


def _to_bool(x: jax.Array) -> jax.Array:
    return x != 0


def _inverse_power(y: int, x: jax.Array) -> jax.Array:
    return 1.0 / jax.lax.integer_pow(x, -y)


def _floor(x: jax.Array) -> jax.Array:
    near = jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(near > x, near - 1.0, near)


def _expm1(x: jax.Array) -> jax.Array:
    return jnp.tanh(0.5 * x) * (jnp.exp(x) + 1.0)  # exp(x) - 1 loses the digits of a small x


def _log1p(x: jax.Array) -> jax.Array:
    y = x + 1.0  # its rounding error is taken back by x / (y - 1)
    return jnp.where(y == 1.0, x, jnp.log(y) * (x / jnp.where(y == 1.0, 1.0, y - 1.0)))


def _pow(x: jax.Array, y: jax.Array) -> jax.Array:
    y = y.astype(x.dtype)
    size = jnp.exp2(y * jnp.log2(jnp.abs(x)))
    odd = y - 2.0 * _floor(0.5 * y) == 1.0
    of_negative = jnp.where(odd, -size, jnp.where(_floor(y) == y, size, jnp.nan))
    return jnp.where(y == 0.0, 1.0, jnp.where(x < 0.0, of_negative, size))


FUNCTIONS: Mapping[str, Callable] = {
    "add_any": lambda x, y: x + y,  # of derivatives
    "ceil": lambda x: -_floor(-x),
    "copy": lambda x: x,
    "expm1": _expm1,
    "floor": _floor,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "log1p": _log1p,
    "pow": _pow,
    "stop_gradient": lambda x: x,
    "tan": lambda x: jnp.sin(x) / jnp.cos(x),
}
