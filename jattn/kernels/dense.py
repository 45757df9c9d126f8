"""``"xla"``: the dense formula of ``jattn._core.attention``, vmapped over heads. The reference; supports every call."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
from jax.core import Tracer

from jattn._core.attention import dense, dense_weights
from jattn._core.call import Call
from jattn._core.deferred import compiled
from jattn._core.vmap import canonical, over_call
from jattn.kernels.kernel import PlainKernel


@dataclasses.dataclass(frozen=True)
class Dense(PlainKernel):
    """``implementation="xla"``; holds the ``[B,N,T,S]`` weights in memory. Derivatives are computed by JAX."""

    name: ClassVar[str] = "xla"
    wide_query: ClassVar[bool] = True

    def pays(self, call: Call) -> bool:
        """Always true: this kernel comes last in every order."""
        return True

    def describe_work(self, platform: str, call: Call) -> str:
        """The whole matrix."""
        return "computes all pairs"

    def run(self, call: Call) -> tuple[jax.Array, jax.Array]:
        return _traced_or_compiled(formula, call)


def weights(call: Call) -> tuple[jax.Array, jax.Array]:
    """The pre-dropout weights ``[B,N,T,S]`` and ``lse [B,T,N]``, from the same expression as ``Dense.run``."""
    return _traced_or_compiled(_dense_weights, call)


def _traced_or_compiled(fn: Callable[[Call], tuple[jax.Array, jax.Array]], call: Call) -> tuple[jax.Array, jax.Array]:
    """``fn(call)``; equal eager calls are compiled once."""
    traced = canonical(call)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(traced)):
        return fn(call)  # the original call: inside jax.shard_map, plain functions see arrays as typed by JAX
    return compiled(fn, traced)


def formula(call: Call) -> tuple[jax.Array, jax.Array]:
    """``out [B,T,N,D]`` and ``lse [B,T,N]``, traced."""
    return over_call(dense, call, out_axes=1)


def _dense_weights(call: Call) -> tuple[jax.Array, jax.Array]:
    return over_call(dense_weights, call, out_axes=(0, 1))
