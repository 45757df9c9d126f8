"""Implementations of attention, one per file. Each takes a ``Request`` (``jattn.request``).

To add one, add a file here and a row to ``jattn.choice.IMPLEMENTATIONS``. The conformance table of the tests then runs
it on every case.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from jattn.request import Request


class Unsupported(NotImplementedError):
    """The named implementation does not support the request; the message gives the reason."""


@runtime_checkable
class Implementation(Protocol):
    """What a module in this package, or an object passed as ``implementation=``, defines."""

    @staticmethod
    def unsupported_reason(request: Request) -> str | None:
        """None if ``run`` supports the request, otherwise the reason in one phrase."""
        ...

    @staticmethod
    def run(request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]`` in the value's dtype and ``lse [B,T,N]``, both differentiable."""
        ...


@runtime_checkable
class FoldsWeights(Protocol):
    """An implementation that also folds over weights where they are computed, for ``jattn.heads.statistics``."""

    def slots(self, length: Any) -> Any:
        """The token that each slot of a sequence holds, integers ``[length]``; None if the order is the tokens' own."""
        ...

    def fold(
        self,
        request: Request,
        step: Callable,
        kinds: Mapping[str, str],
        lse: jax.Array,
        rows: dict[str, jax.Array],
        columns: dict[str, jax.Array],
        count_visible: bool,
    ) -> dict[str, jax.Array]:
        """Arrays ``{name: [B,N,...]}`` that ``step`` accumulates over the blocks of each head's weights.

        Args:
            step: ``(carry, log_weights, q_idx, kv_idx, rows, columns) -> carry``.
            kinds: for each result, what its last axis is: ``"queries"`` (a sum, or the ``"largest"``), ``"keys"``, or
                ``"offsets"`` of the key from the query.
            rows, columns: data of the queries ``[B|1,T]`` and keys ``[B|1,S]``; a step gets those of its sequence.
            count_visible: also return the number of keys that each query sees, as ``visible``.
        """
        ...

    def map_parts(self, fn: Callable, request: Request, out_axes: Any, *extra: tuple[jax.Array, str]) -> Any:
        """``fn(request, *arrays)`` on each part of the request that ``fold`` takes; as ``placement.per_device``."""
        ...
