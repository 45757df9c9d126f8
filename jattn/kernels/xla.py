"""``"xla"``: the dense formula of ``jattn.attention``, head by head under vmap. The reference; takes every request."""

import jax

from jattn.attention import attend, head_weights
from jattn.kernels.lift import lift
from jattn.request import Request


def why_not(request: Request) -> str | None:
    """None: the dense formula takes every request."""
    return None


def run(request: Request) -> tuple[jax.Array, jax.Array]:
    """``out [B,T,N,D]``, ``lse [B,T,N]``; keeps the ``[B,N,T,S]`` weights in memory."""

    def one_head(q, k, v, options):
        return attend(q, k, v, dropout=request.dropout, **options)

    return lift(one_head, request, out_axes=1)


def weights(request: Request) -> tuple[jax.Array, jax.Array]:
    """The weights ``[B,N,T,S]`` before dropout and ``lse [B,T,N]``, of the expression that ``run`` uses."""

    def one_head(q, k, v, options):
        return head_weights(q, k, **options)

    return lift(one_head, request, out_axes=(0, 1))
