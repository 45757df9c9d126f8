"""``"xla"``: the dense formula of ``jattn._core.attention``, vmapped over heads. The reference; supports every call."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
from jax.core import Tracer

from jattn._core.arguments import AttentionArgs
from jattn._core.attention import dense, dense_weights
from jattn._core.deferred import compiled
from jattn._core.vmap import canonical, over_args
from jattn.kernels.kernel import PlainKernel


@dataclasses.dataclass(frozen=True)
class Dense(PlainKernel):
    """``implementation="xla"``; holds the ``[B,N,T,S]`` weights in memory. Its derivatives are JAX's."""

    name: ClassVar[str] = "xla"
    wide_query: ClassVar[bool] = True

    def describe_work(self, platform: str, args: AttentionArgs) -> str:
        """All of it."""
        return "computes all pairs"

    def run(self, args: AttentionArgs) -> tuple[jax.Array, jax.Array]:
        return _traced_or_compiled(_dense, args)


def weights(args: AttentionArgs) -> tuple[jax.Array, jax.Array]:
    """The weights ``[B,N,T,S]`` before dropout and ``lse [B,T,N]``, from the same expression as ``Dense.run``."""
    return _traced_or_compiled(_dense_weights, args)


def _traced_or_compiled(
    fn: Callable[[AttentionArgs], tuple[jax.Array, jax.Array]], args: AttentionArgs
) -> tuple[jax.Array, jax.Array]:
    """``fn(args)``; an eager call is compiled once for all equal calls."""
    traced = canonical(args)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(traced)):
        return fn(args)  # the given one: inside jax.shard_map, plain functions see arrays as JAX types them
    return compiled(fn, traced)


def _dense(args: AttentionArgs) -> tuple[jax.Array, jax.Array]:
    return over_args(dense, args, out_axes=1)


def _dense_weights(args: AttentionArgs) -> tuple[jax.Array, jax.Array]:
    return over_args(lambda q, k, v, head: dense_weights(q, k, head), args, out_axes=(0, 1))
