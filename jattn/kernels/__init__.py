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


# forward and backward, as ``jattn.online_softmax.differentiable`` and ``jattn.staged.ByHand`` take them, and what is
# static among their arguments.
Program = tuple[Callable, Callable, tuple]


class InBlocks(Implementation, Protocol):
    """An implementation whose result is that of ``jattn.online_softmax.differentiable``, in linear memory."""

    def program(self, request: Request, divided: bool) -> Program:
        """What computes a request that is canonical and whose arrays may be ``divided`` over devices."""
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
        values: Callable,
        kinds: Mapping[str, str],
        lse: jax.Array,
        rows: dict[str, jax.Array],
        columns: dict[str, jax.Array],
        count_visible: bool,
    ) -> dict[str, jax.Array]:
        """Sums ``{name: [B,N,...]}`` of the ``values`` of all pairs of a query and a key, computed block by block.

        Args:
            values: ``(log_weights, row, column) -> {name: values}``, elementwise: the data of queries and keys, ``row``
                and ``column``, broadcast against the block of log weights, whose axes may come in either order.
                Compares by value and captures no arrays. A pair of weight 0 adds nothing, or -inf to the largest.
            kinds: for each name, the last axis of its sums: ``"queries"`` (``"largest"``: the largest, not the sum),
                ``"keys"``, or the ``"offsets"`` of the key from the query.
            rows, columns: data of the queries ``[B|1,T]`` and keys ``[B|1,S]``, bool or integers.
            count_visible: also return the number of keys that each query sees, as ``visible``.
        """
        ...

    def map_parts(self, fn: Callable, request: Request, out_axes: Any, *extra: tuple[jax.Array, str]) -> Any:
        """``fn(request, *arrays)`` on each part of the request that ``fold`` takes; as ``placement.per_device``."""
        ...
