"""Implementations of attention: what they are (``Implementation``); what they are asked is a ``Request``.

One file each. Adding one is adding a file here and a row to ``jattn.api.IMPLEMENTATIONS``; the conformance table of the
tests then runs it on every case.
"""

from typing import Protocol, runtime_checkable

import jax

from jattn.request import Request


class Unsupported(NotImplementedError):
    """The named implementation cannot do what was asked; the message says why."""


@runtime_checkable
class Implementation(Protocol):
    """What a module in this package, or an object of its class, defines."""

    @staticmethod
    def why_not(request: Request) -> str | None:
        """None where ``run`` can take the request, otherwise the reason, in one phrase."""
        ...

    @staticmethod
    def run(request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]`` in the value's dtype and ``lse [B,T,N]``, both differentiable."""
        ...
