"""Masks, score functions and their derivatives in terms of the operations of Mosaic's GPU compiler."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jattn._mods.jaxpr import bind_equation, evaluate
from jattn._mods.tile_function import CALLS, ELEMENTWISE, spread

_CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")


def run(fn: Callable[..., Any], *arrays: jax.Array) -> list[jax.Array]:
    """The arrays of ``fn(*arrays)``, which consists of elementwise operations, computed equation by equation.

    ``fn`` is traced first, so derivatives follow JAX and custom rules; then calls are inlined, numbers are broadcast,
    and operations missing from the compiler are computed by ``FUNCTIONS``.
    """
    closed = jax.make_jaxpr(fn)(*arrays)
    return evaluate(closed.jaxpr, closed.consts, arrays, _bind, inline=(*CALLS, *_CUSTOM_CALLS))


def _bind(equation: JaxprEqn, inputs: Sequence[ArrayLike]) -> list[jax.Array]:
    name = equation.primitive.name
    if name not in ELEMENTWISE and name not in FUNCTIONS:
        return bind_equation(equation, inputs)
    result_type: Any = equation.outvars[0].aval
    arrays: list[Any] = [spread(x, result_type.shape) for x in inputs]
    function = FUNCTIONS.get(name)
    if name == "convert_element_type" and equation.params["new_dtype"] == bool:
        function = lambda x: x != 0
    elif name == "integer_pow" and equation.params["y"] < 0:
        function = lambda x: 1.0 / jax.lax.integer_pow(x, -equation.params["y"])
    return bind_equation(equation, arrays) if function is None else [function(*arrays)]


def _floor(x: jax.Array) -> jax.Array:
    near = jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(near > x, near - 1.0, near)


def _log1p(x: jax.Array) -> jax.Array:
    y = x + 1.0  # x / (y - 1) cancels its rounding error
    return jnp.where(y == 1.0, x, jnp.log(y) * (x / jnp.where(y == 1.0, 1.0, y - 1.0)))


def _pow(x: jax.Array, y: jax.Array) -> jax.Array:
    y = y.astype(x.dtype)
    size = jnp.exp2(y * jnp.log2(jnp.abs(x)))
    odd = y - 2.0 * _floor(0.5 * y) == 1.0
    of_negative = jnp.where(odd, -size, jnp.where(_floor(y) == y, size, jnp.nan))
    return jnp.where(y == 0.0, 1.0, jnp.where(x < 0.0, of_negative, size))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add_any": lambda x, y: x + y,  # from derivatives
    "ceil": lambda x: -_floor(-x),
    "copy": lambda x: x,
    "expm1": lambda x: jnp.tanh(0.5 * x) * (jnp.exp(x) + 1.0),  # exp(x) - 1 loses the digits of a small x
    "floor": _floor,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "log1p": _log1p,
    "pow": _pow,
    "stop_gradient": lambda x: x,
    "tan": lambda x: jnp.sin(x) / jnp.cos(x),
}
