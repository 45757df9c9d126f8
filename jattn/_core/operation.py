"""The array functions computed by deferred operations, with their derivatives and batching; all compare by value.

``jattn._core.deferred`` adds operations to programs. Creating one traces nothing; only calling it does.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Concatenate, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

OPERAND = object()  # placeholder for an array among the leaves of a DeferredCall


# The first reverse derivative, ``(platform, args, cotangents, wanted)``: the operands' cotangents by operand number, at
# least for those ``wanted``. ``cotangents``: one for each floating result, None if nothing depends on it.
ReverseRule = Callable[[str, Any, Sequence, list[int]], Sequence | Mapping]


class Settings(NamedTuple):
    """JAX's settings under which an operation is traced."""

    x64: bool
    matmul_precision: str | None


@dataclasses.dataclass(frozen=True)
class CustomRules:
    """A function whose results or some of whose derivatives are computed by other functions; ``fn`` provides the rest.

    Args:
        fn: a function for ``jattn._core.deferred.call``, which also takes ``platform`` as its first argument.
        run: computes the same results as ``fn``; None uses ``fn`` itself.
        vjp: the first reverse derivative, with respect to the first ``count`` operands.
        count: the number of operands that ``vjp`` covers.
        results: the number of floating results.
        alone: whether ``vjp`` is used only where no other operand is differentiated.
    """

    fn: Callable[Concatenate[str, ...], Any]
    run: Callable[Concatenate[str, ...], Any] | None = None
    vjp: ReverseRule | None = None
    count: int = 0
    results: int = 1
    alone: bool = False

    def __call__(self, platform: str, *args: object) -> Any:
        return (self.run or self.fn)(platform, *args)

    def covers(self, at: Sequence[int]) -> list[int]:
        """The operands among ``at`` whose cotangents ``vjp`` computes."""
        covered = [i for i in at if i < self.count]
        return [] if self.vjp is None or (self.alone and len(covered) < len(at)) else covered


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredCall:
    """``fn(platform, *args)`` as a function of the arrays among the leaves of ``args``."""

    fn: Callable[Concatenate[str, ...], Any]
    structure: Any  # of args
    leaves: tuple[object, ...]
    settings: Settings  # the settings of the call
    linear: ClassVar[int] = 0

    def __call__(self, platform: str, *operands: Array) -> list[Array]:
        return jax.tree.leaves(self.fn(platform, *self.arguments(operands)))

    def arguments(self, operands: Sequence[object]) -> tuple:
        """``args``, with its arrays replaced by ``operands``."""
        rest = iter(operands)
        leaves = [next(rest) if leaf is OPERAND else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)

    @functools.cached_property
    def _value(self) -> tuple:
        arrays = (x if not isinstance(x, np.ndarray) else (x.shape, x.dtype, x.tobytes()) for x in self.leaves)
        return self.fn, self.structure, tuple((type(x), x) for x in arrays), self.settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeferredCall) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        fn = self.fn.fn if isinstance(self.fn, CustomRules) else self.fn
        return getattr(fn, "__name__", type(fn).__name__)


@dataclasses.dataclass(frozen=True)
class _Transformed:
    """A transformation of ``of``."""

    of: "Operation"

    @property
    def settings(self) -> Settings:
        return self.of.settings


@dataclasses.dataclass(frozen=True)
class Jvp(_Transformed):
    """The tangents of ``of``'s floating results ``kept``, linear in its last operands, the tangents of ``at``."""

    at: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def linear(self) -> int:
        return len(self.at)

    def __call__(self, platform: str, *operands: Array) -> list[Array]:
        primals, tangents = operands[: -self.linear], operands[-self.linear :]
        inputs = tuple(primals[i] for i in self.at)
        return jax.jvp(self._function(platform, primals, self.at), inputs, tuple(tangents))[1]

    def _function(self, platform: str, primals: Sequence[Array], at: Sequence[int]) -> Callable[..., list[Array]]:
        def of_inputs(*inputs: Array) -> list[Array]:
            operands = list(primals)
            for i, x in zip(at, inputs, strict=True):
                operands[i] = x
            floating = [x for x in _without_rules(self.of)(platform, *operands) if is_floating(x)]
            return [floating[i] for i in self.kept]

        return of_inputs

    def transposed(self, results: Sequence[int]) -> "Jvp":
        return Vjp(self.of, self.at, tuple(self.kept[i] for i in results))


@dataclasses.dataclass(frozen=True)
class Vjp(Jvp):
    """The cotangents of operands ``at``, linear in its last operands, the cotangents of ``of``'s results ``kept``."""

    @property
    def linear(self) -> int:
        return len(self.kept)

    def __call__(self, platform: str, *operands: Array) -> list[Array]:
        primals, cotangents = operands[: -self.linear], list(operands[-self.linear :])
        rules = self.of.fn if isinstance(self.of, DeferredCall) and isinstance(self.of.fn, CustomRules) else None
        by_rule = [] if rules is None else rules.covers(self.at)
        others = [i for i in self.at if i not in by_rule]
        pulled: dict[int, Array] = {}
        if others:
            _, pull = jax.vjp(self._function(platform, primals, others), *(primals[i] for i in others))
            pulled |= zip(others, pull(cotangents), strict=True)
        if by_rule and rules is not None and rules.vjp is not None and isinstance(self.of, DeferredCall):
            by_result = dict(zip(self.kept, cotangents, strict=True))
            every = [by_result.get(i) for i in range(rules.results)]
            first = rules.vjp(platform, self.of.arguments(primals), every, by_rule)
            pulled |= {i: first[i] for i in by_rule}
        return [pulled[i] for i in self.at]

    def transposed(self, results: Sequence[int]) -> Jvp:
        return Jvp(self.of, tuple(self.at[i] for i in results), self.kept)


@dataclasses.dataclass(frozen=True)
class Batched(_Transformed):
    """``jax.vmap(of, axes)``."""

    axes: tuple[int | None, ...]

    @property
    def linear(self) -> int:
        return self.of.linear

    def __call__(self, platform: str, *operands: Array) -> list[Array]:
        return jax.vmap(functools.partial(self.of, platform), self.axes)(*operands)

    def transposed(self, results: Sequence[int]) -> "Batched":
        assert not isinstance(self.of, DeferredCall)  # which is not linear
        return Batched(self.of.transposed(results), (*self.axes[: -self.linear], *(0,) * len(results)))


# A function ``(platform, *operands) -> list of arrays``, linear in its last ``linear`` operands. ``transposed`` is the
# transpose of a linear one, restricted to ``results``.
Operation = DeferredCall | Jvp | Batched


def _without_rules(operation: Operation) -> Operation:
    """The same operation without custom rules."""
    if not isinstance(operation, DeferredCall):
        return dataclasses.replace(operation, of=_without_rules(operation.of))
    return dataclasses.replace(operation, fn=operation.fn.fn) if isinstance(operation.fn, CustomRules) else operation


def is_floating(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether ``x`` has a differentiable dtype."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
