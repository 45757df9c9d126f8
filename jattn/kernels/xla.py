"""``"xla"``: the dense formula of ``jattn.attention``, vmapped over heads. The reference; supports every request."""

from collections.abc import Callable

import jax
from jax.core import Tracer

from jattn.attention import dense, dense_weights
from jattn.batching import canonical, over_request
from jattn.request import Request
from jattn.staged import compiled


def unsupported_reason(request: Request) -> str | None:
    """None: the dense formula supports every request."""
    return None


def run(request: Request) -> tuple[jax.Array, jax.Array]:
    """``out [B,T,N,D]``, ``lse [B,T,N]``; holds the ``[B,N,T,S]`` weights in memory."""
    return _traced_or_compiled(_dense, request)


def weights(request: Request) -> tuple[jax.Array, jax.Array]:
    """The weights ``[B,N,T,S]`` before dropout and ``lse [B,T,N]``, from the same expression as ``run``."""
    return _traced_or_compiled(_dense_weights, request)


def _traced_or_compiled(fn: Callable, request: Request) -> tuple[jax.Array, jax.Array]:
    """``fn(request)``; an eager call is compiled once for all equal calls."""
    hoisted = canonical(request)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(hoisted)):
        return fn(request)  # not the hoisted one: inside jax.shard_map, plain functions see arrays as JAX types them
    return compiled(fn, hoisted)


def _dense(request: Request) -> tuple[jax.Array, jax.Array]:
    return over_request(dense, request, out_axes=1)


def _dense_weights(request: Request) -> tuple[jax.Array, jax.Array]:
    return over_request(lambda q, k, v, head: dense_weights(q, k, head), request, out_axes=(0, 1))
