"""Provides small array helpers for NumPy and JAX, and the context for calling masks and score functions."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

# Common pitfalls of functions written for FlexAttention, noted on the exceptions they raise.
CONVENTION = (
    "with index arrays that broadcast (such as q_idx [T, 1] and kv_idx [1, S]), not with scalars as in FlexAttention: "
    "write x[..., 0] for x[0], (a * b).sum(-1) for jnp.dot(a, b), jnp.where for if, & | ~ for and, or, not, and "
    "jnp.asarray(table)[h] for table[h] of a NumPy array"
)

Length = Any  # an int, or a symbolic dimension of jax.export
if TYPE_CHECKING:  # type checkers know no operators shared by both kinds of arrays
    AnyArray = Index = Bools = Any
else:
    AnyArray = jax.Array | np.ndarray | np.generic  # NumPy if everything is static, otherwise JAX
    Index = AnyArray | int
    Bools = AnyArray | bool


def namespace(*arrays: object) -> Any:
    """NumPy, or jax.numpy if any of the arrays is a JAX array."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def cdiv(length: Length, size: int) -> Length:
    """``ceil(length / size)``, in a form that JAX can bound if the length is symbolic."""
    return (length + size - 1) // size


def pad_end(x: AnyArray, shape: Sequence[Length], fill: ArrayLike = 0) -> AnyArray:
    """``x`` padded with ``fill`` at the end of each axis, up to ``shape``."""
    missing = [new - old for new, old in zip(shape, x.shape, strict=True)]
    if isinstance(x, np.ndarray):
        return np.pad(x, [(0, count) for count in missing], constant_values=fill)
    # jnp.pad would compare a symbolic width with 0.
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), [(0, count, 0) for count in missing])


def arange(length: Length, dtype: DTypeLike | None = None) -> AnyArray:
    """``0 .. length - 1``; NumPy, unless the length is symbolic."""
    return np.arange(length, dtype=dtype) if isinstance(length, int) else jnp.arange(length, dtype=dtype)


def maximum(x: jax.Array, axis: int | None = -1) -> jax.Array:
    """The maximum along an axis; NaN if any entry is NaN, -inf if the axis is empty.

    On CPUs, ``jnp.max`` loses a NaN in float32 or float64 arrays of 4096 or more numbers (JAX 0.10.2 to 0.12.0.1): XLA
    hands such reductions to YNNPACK, unless ``XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=``. If the array lies on
    several devices, this happens at any size.
    """
    return jnp.where(jnp.isnan(x).any(axis), jnp.nan, jnp.max(x, axis, initial=-jnp.inf))


def without_mesh() -> contextlib.AbstractContextManager:
    """Sets the current mesh aside: indices belong to no device, and one device's arrays would look sharded on it."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


@contextlib.contextmanager
def mod_semantics() -> Iterator[None]:
    """Promotion rules for masks and score functions: NumPy's, regardless of the caller's."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def calling(argument: str) -> Iterator[None]:
    """The context for calling a user's mask or score function: ``mod_semantics``, and a note on any exception raised.

    ``argument``: the keyword under which the function was passed, ``"mask"`` or ``"score_mod"``.
    """
    try:
        with mod_semantics():
            yield
    except Exception as error:
        if not any(CONVENTION in note for note in getattr(error, "__notes__", ())):  # calls may be nested
            error.add_note(f"jattn called {argument} {CONVENTION}")
        raise
