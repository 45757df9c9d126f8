"""``"xla"``: the dense formula of ``jattn.attention``, head by head under vmap. The reference; takes every request."""

from collections.abc import Callable

import jax
from jax.core import Tracer

from jattn.attention import dense, dense_weights
from jattn.kernels.lift import lift, ready
from jattn.request import Request
from jattn.staged import compiled


def why_not(request: Request) -> str | None:
    """None: the dense formula takes every request."""
    return None


def run(request: Request) -> tuple[jax.Array, jax.Array]:
    """``out [B,T,N,D]``, ``lse [B,T,N]``; keeps the ``[B,N,T,S]`` weights in memory."""
    return _ready_or_traced(_run, request)


def weights(request: Request) -> tuple[jax.Array, jax.Array]:
    """The weights ``[B,N,T,S]`` before dropout and ``lse [B,T,N]``, of the expression that ``run`` uses."""
    return _ready_or_traced(_weights, request)


def _ready_or_traced(fn: Callable, request: Request) -> tuple[jax.Array, jax.Array]:
    """``fn(request)``; eagerly compiled, once for all calls that do the same."""
    hoisted = ready(request)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(hoisted)):
        return fn(request)
    return compiled(fn, hoisted)


def _run(request: Request) -> tuple[jax.Array, jax.Array]:
    return lift(dense, request, out_axes=1)


def _weights(request: Request) -> tuple[jax.Array, jax.Array]:
    return lift(lambda q, k, v, options: dense_weights(q, k, options), request, out_axes=(0, 1))
