"""Computes ``dot_general`` with large weights stored in 16 bits.

On a CPU, XLA converts the whole 16-bit weight to float32 before multiplying, in every call. With few rows, as in
decoding, the conversion takes several times as long as reading the weight. XLA fuses a sum of elementwise products with
the conversion, so it reads the weight once, in 16 bits.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jattn.sharding import _dot_general as sharded

FEW = 4  # rows; the weight is read once per row
LARGE = 2**22  # numbers in a weight; smaller ones stay in the processor's cache when converted


def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, **options: Any) -> Array:
    """``jax.lax.dot_general`` of ``lhs [..., in]`` and a weight ``rhs``, ``[in, ...]`` or ``[..., in]``."""
    (contracted, others), (batch, _) = dimension_numbers
    by_product = functools.partial(sharded.dot_general, dimension_numbers=dimension_numbers, **options)
    rows = math.prod(size for axis, size in enumerate(lhs.shape) if axis not in contracted)
    leading = tuple(others) == tuple(range(len(others)))
    trailing = tuple(others) == tuple(range(rhs.ndim - len(others), rhs.ndim))
    at_the_end = tuple(contracted) == tuple(range(lhs.ndim - len(contracted), lhs.ndim))
    if (
        batch or options.get("out_sharding") is not None or not at_the_end or not (leading or trailing)
        or rhs.dtype.itemsize != 2 or lhs.dtype != rhs.dtype or rhs.size < LARGE
        or not isinstance(rows, int) or not 0 < rows <= FEW  # symbolic: jax.export
    ):  # fmt: skip
        return by_product(lhs, rhs)

    def by_sums(lhs: Array, rhs: Array) -> Array:
        inner = math.prod(rhs.shape[axis] for axis in others)
        x = lhs.reshape(rows, inner).astype(jnp.float32)
        weight = rhs.reshape((inner, -1) if leading else (-1, inner)).astype(jnp.float32)
        sums = [(weight * (row[:, None] if leading else row[None, :])).sum(0 if leading else 1) for row in x]
        left = [size for axis, size in enumerate(rhs.shape) if axis not in others]
        dtype = options.get("preferred_element_type") or lhs.dtype
        return jnp.stack(sums).reshape(*lhs.shape[: lhs.ndim - len(contracted)], *left).astype(dtype)

    return jax.lax.platform_dependent(lhs, rhs, cpu=by_sums, default=by_product)
