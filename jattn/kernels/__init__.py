"""Implementations of attention, one per file. Each takes a ``Request`` (``jattn.request``).

To add one, add a file here and a row to ``jattn.choice.IMPLEMENTATIONS``. The conformance table of the tests then runs
it on every case.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from jattn.mods import pytree_dataclass, static_field
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


# forward and backward, as ``jattn.online_softmax.differentiable`` takes them, and what is static among their arguments.
Program = tuple[Callable, Callable, tuple]


class InBlocks(Implementation, Protocol):
    """An implementation whose result is that of ``jattn.online_softmax.differentiable``, in linear memory."""

    def program(self, request: Request, divided: bool) -> Program:
        """What computes a request that is canonical and whose arrays may be ``divided`` over devices."""
        ...


@pytree_dataclass
class Fold:
    """Sums over the pairs of a query and a key, for ``FoldsWeights``.

    ``values(log_weights, row, column) -> {name: values}`` is elementwise: the data of queries and keys, ``row`` and
    ``column``, broadcast against the log weights, whose axes may come in either order. It compares by value and holds
    no arrays. A pair of weight 0 must add nothing, or -inf to a ``"largest"``.

    ``kinds``: each name with the last axis of its sums: ``"queries"`` (``"largest"``: the largest, not the sum),
    ``"keys"``, or the ``"offsets"`` of the key from the query.
    """

    lse: Any  # [B,T,N]
    rows: dict[str, jax.Array]  # [B|1,T], bool or integers
    columns: dict[str, jax.Array]  # [B|1,S]
    values: Callable = static_field()
    kinds: tuple[tuple[str, str], ...] = static_field()
    count_visible: bool = static_field()  # also return the number of keys that each query sees, as ``visible``

    @property
    def result_kinds(self) -> dict[str, str]:
        """The kind of each result."""
        return dict(self.kinds) | ({"visible": "queries"} if self.count_visible else {})

    def named(self, *kinds: str) -> list[str]:
        """The names of these kinds, without ``visible``."""
        return [name for one in kinds for name, kind in self.kinds if kind == one]


@runtime_checkable
class FoldsWeights(Protocol):
    """An implementation that also folds over weights where they are computed, for ``jattn.heads.statistics``."""

    def slots(self, length: Any) -> Any:
        """The token that each slot of a sequence holds, integers ``[length]``; None if the order is the tokens' own."""
        ...

    def fold(self, request: Request, fold: Fold) -> dict[str, jax.Array]:
        """The sums ``{name: [B,N,...]}``, computed block by block; differentiable in ``fold.lse`` and the request."""
        ...

    def map_parts(self, fn: Callable, request: Request, out_axes: Any, *extra: tuple[jax.Array, str]) -> Any:
        """``fn(request, *arrays)`` on each part of the request that ``fold`` takes; as ``placement.per_device``."""
        ...
