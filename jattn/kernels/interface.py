"""Defines the interface of an implementation: what ``implementation=`` requires, and optional methods used by jattn."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jattn._blocks.reduction import Reduction
from jattn._core.call import Call
from jattn._mods.arrays import Length


class Unsupported(NotImplementedError):
    """Raised if the named implementation does not support the call; the message gives the reason.

    Example:
        >>> query = key = value = jnp.ones((1, 4, 2, 8))
        >>> try:
        ...     jattn.dot_product_attention(query, key, value, implementation="cudnn")
        ... except jattn.Unsupported as error:
        ...     print(str(error).partition(";")[0])
        implementation='cudnn' cannot do this: it takes float16 and bfloat16, not float32
    """


@runtime_checkable
class Implementation(Protocol):
    """The type of ``implementation=``: a ``Kernel``, or any object with these two methods."""

    def unsupported_reason(self, call: Call, /) -> str | None:
        """None if ``run`` supports the call, otherwise the reason in one phrase."""
        ...

    def run(self, call: Call, /) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]`` in the value's dtype and ``lse [B,T,N]``, both differentiable."""
        ...


@runtime_checkable
class ReducesWeights(Protocol):
    """An implementation that also reduces weights where they are computed, for ``jattn.heads.statistics``."""

    def slots(self, length: Length) -> np.ndarray | None:
        """The token in each slot of a sequence, integers ``[length]``; None if slots are in token order."""
        ...

    def fold(self, call: Call, reduction: Reduction) -> dict[str, jax.Array]:
        """The sums ``{name: [B,N,...]}``, blockwise; differentiable with respect to ``reduction.lse`` and the call."""
        ...

    def map_parts(
        self, fn: Callable[..., PyTree], call: Call, out_axes: PyTree[str], *extra: tuple[jax.Array, str]
    ) -> PyTree[Array]:
        """``fn(call, *arrays)`` on each part of the call that ``fold`` takes, like ``jattn._core.shard.per_device``."""
        ...


@runtime_checkable
class OverDevices(Protocol):
    """An implementation that divides a call over the devices of a mesh, such as ``jattn.sharding.Ring``."""

    @property
    def divides_length(self) -> bool:
        """Whether no device has the whole sequence."""
        ...

    def describe(self, call: Call, explain: Callable[[Call, str | None], str]) -> list[str]:
        """The lines of ``jattn.explain``: what is divided, and what a device sends.

        ``explain``: a function that takes one device's call and the name of an implementation, or None, and returns
        text.
        """
        ...
