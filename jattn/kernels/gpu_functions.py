"""Elementwise operations that Mosaic's GPU compiler lacks, by those that it has, for masks and score functions."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp


def _floor(x: jax.Array) -> jax.Array:
    near = jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(near > x, near - 1.0, near)


def _expm1(x: jax.Array) -> jax.Array:
    return jnp.tanh(0.5 * x) * (jnp.exp(x) + 1.0)  # exp(x) - 1 loses the digits of a small x


@jax.custom_jvp
def _log1p(x: jax.Array) -> jax.Array:
    y = x + 1.0  # its rounding error is taken back by x / (y - 1)
    return jnp.where(y == 1.0, x, jnp.log(y) * (x / jnp.where(y == 1.0, 1.0, y - 1.0)))


@_log1p.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return _log1p(x), dx / (x + 1.0)


@jax.custom_jvp
def _power(x: jax.Array, y: jax.Array) -> jax.Array:
    size = jnp.exp2(y * jnp.log2(jnp.abs(x)))
    odd = y - 2.0 * _floor(0.5 * y) == 1.0
    of_negative = jnp.where(odd, -size, jnp.where(_floor(y) == y, size, jnp.nan))
    return jnp.where(y == 0.0, 1.0, jnp.where(x < 0.0, of_negative, size))


@_power.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x, y), (dx, dy) = primals, tangents
    z = _power(x, y)
    by_x = jnp.where(y == 0.0, 0.0, y * _power(x, y - 1.0))
    by_y = jnp.where(x == 0.0, 0.0, z * jnp.log(jnp.where(x > 0.0, x, 1.0)))
    return z, dx * by_x + dy * by_y


def _pow(x: jax.Array, y: jax.Array) -> jax.Array:
    return _power(x, y.astype(x.dtype))


FUNCTIONS: Mapping[str, Callable] = {
    "ceil": lambda x: -_floor(-x),
    "copy": lambda x: x,
    "expm1": _expm1,
    "floor": _floor,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "log1p": _log1p,
    "pow": _pow,
    "stop_gradient": jax.lax.stop_gradient,
    "tan": lambda x: jnp.sin(x) / jnp.cos(x),
}
