"""Converts masks and score functions for kernels, which evaluate them on tiles of query-key pairs.

A kernel has only elementwise operations. But most lookups in a ``mod(b, h, q_idx, kv_idx)`` depend on one index: a
slope on the head, a segment id on the query or the key. ``make_tile_function`` traces the function and separates the
two: values of one index are computed outside the kernel, as arrays over heads, queries or keys, and the kernel reads
them with its blocks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Int

from jattn._mods.arrays import calling, mod_semantics
from jattn._mods.contracts import MaskFunction, ScoreMod
from jattn._mods.jaxpr import bind_equation, evaluate
from jattn._mods.pytree import known

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn
else:
    JaxprEqn = Any  # slow to import

# Operations that kernels compute on tiles. Others must not depend on both a query and a key, nor on the score.
ELEMENTWISE = frozenset(
    "abs add and ceil clamp convert_element_type copy cos div eq exp exp2 expm1 floor ge gt integer_pow is_finite le "
    "log log1p logistic lt max min mul ne neg not or pow rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sqrt square stop_gradient sub tan tanh xor".split()
)
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint")
_SAME_VALUE = ("broadcast_in_dim", "reshape", "squeeze")  # for an array of one number
# What an array of values runs over. A score runs over pairs.
HEAD, QUERY, KEY, PAIR = "head", "query", "key", "pair"
_ARGUMENTS = ({"b"}, {"h"}, {"q"}, {"kv"})


class NotElementwise(Exception):
    """Raised if a mask or score function needs non-elementwise operations on pairs; the message names the operation."""


@dataclasses.dataclass
class _Step:
    """One equation, and the numbers of its inputs and outputs."""

    equation: JaxprEqn
    inputs: list[int]
    outputs: list[int]


@dataclasses.dataclass
class TileFunction:
    """A traced mask or score function: equations on scalars, with numbered values.

    ``axes``: for each value, the indices on which it depends. ``arguments``: the score's number, if any, then the
    numbers of ``b, h, q_idx, kv_idx``. ``outside``: the values to compute outside the kernel, and what each runs over:
    HEAD, QUERY or KEY.
    """

    steps: list[_Step]
    axes: list[set[str]]
    constants: dict[int, Any]
    arguments: list[int]
    result: int
    outside: dict[int, str]

    def arrays(
        self, batch: Int[ArrayLike, " B"], heads: Int[ArrayLike, " N"], q_positions: Int[ArrayLike, "#B T"],
        kv_positions: Int[ArrayLike, "#B S"],
    ) -> list[Array]:  # fmt: skip
        """The ``outside`` values, in order: ``[B|1,N|1]``, ``[B|1,N|1,T]`` or ``[B|1,N|1,S]``."""
        results = []
        batch, heads = jnp.asarray(batch, jnp.int32), jnp.asarray(heads, jnp.int32)  # wider with x64
        for number, axis in self.outside.items():
            positions = {HEAD: np.zeros((1, 1), np.int32), QUERY: q_positions, KEY: kv_positions}[axis]
            depends = self.axes[number]
            array_batch = batch if "b" in depends or positions.shape[0] != 1 else batch[:1]
            array_heads = heads if "h" in depends else heads[:1]

            def value(b: Array, h: Array, index: Array, number: int = number) -> Array:
                of_pair = dict(zip(self.arguments[-4:], (b, h, index, index), strict=True))
                return jnp.reshape(self._evaluate(number, self.constants | of_pair, _bind), ())

            of_index = jax.vmap(value, (None, None, 0))
            of_head = jax.vmap(of_index, (None, 0, None))
            rows = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), (array_batch.shape[0], positions.shape[1]))
            with mod_semantics():
                array = jax.vmap(of_head, (0, None, 0))(array_batch, array_heads, rows)
            results.append(array[..., 0] if axis == HEAD else array)
        return results

    def on_tile(self, score: Array | None, q_idx: ArrayLike, kv_idx: ArrayLike, outside: Sequence[ArrayLike]) -> Array:
        """The result on a tile of pairs, computed from arrays that broadcast against the tile.

        ``outside``: scalars for the head, and arrays over the tile's queries or keys, in the order of ``arrays``.
        """
        known = dict(zip(self.outside, outside, strict=True))
        indices = dict(zip(self.arguments[-2:], (q_idx, kv_idx), strict=True))
        scores = {} if score is None else {self.arguments[0]: score}
        # Not the traced arrays, which a kernel must not capture. The values it needs from them are in outside.
        constants = {i: np.reshape(x, ()) for i, x in self.constants.items() if _is_number(x)}
        return self._evaluate(self.result, constants | scores | indices | known, _bind_broadcast)

    def _evaluate(self, number: int, known: dict[int, Any], bind: Callable[[_Step, list[Any]], list[Any]]) -> Any:
        values = dict(known)
        needed = self._needed(number, set(values))
        for step in self.steps:
            if needed.isdisjoint(step.outputs):
                continue
            results = bind(step, [values[i] for i in step.inputs])
            values.update(zip(step.outputs, results, strict=True))
        return values[number]

    def _needed(self, number: int, known: set[int]) -> set[int]:
        needed = {number} - known
        for step in reversed(self.steps):
            if not needed.isdisjoint(step.outputs):
                needed.update(i for i in step.inputs if i not in known)
        return needed


def make_tile_function(mod: MaskFunction | ScoreMod, score_dtype: DTypeLike | None = None) -> TileFunction:
    """``mod``, a mask (or a score function if ``score_dtype`` is given), traced for one pair.

    Raises ``NotElementwise`` if an operation on pairs is not among ``ELEMENTWISE``.
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)
    types = [*([] if score_dtype is None else [jax.ShapeDtypeStruct((), score_dtype)]), *[index] * 4]

    in_context = calling("mask" if score_dtype is None else "score_mod")
    on_one_pair = in_context(lambda *args: jnp.reshape(mod(*args), ()))
    closed = jax.make_jaxpr(on_one_pair)(*types)
    axes = [*([] if score_dtype is None else [{"q", "kv", "score"}]), *map(set, _ARGUMENTS)]
    traced = TileFunction([], axes, {}, list(range(len(types))), 0, {})

    def constant(value: Any) -> int:
        traced.axes.append(set())
        traced.constants[len(traced.axes) - 1] = known(value)
        return len(traced.axes) - 1

    def add_step(equation: JaxprEqn, inputs: list[int]) -> list[int]:
        depends = set[str]().union(*(traced.axes[i] for i in inputs))
        if _over(depends) == PAIR:
            _check_elementwise(equation)
        outputs = list(range(len(traced.axes), len(traced.axes) + len(equation.outvars)))
        traced.axes += [depends] * len(outputs)
        traced.steps.append(_Step(equation, inputs, outputs))
        return outputs

    jaxpr, constants = closed.jaxpr, closed.consts
    (traced.result,) = evaluate(jaxpr, constants, traced.arguments, add_step, inline=CALLS, constant=constant)
    _choose_outside(traced)
    return traced


def reason_against(masks: Sequence[MaskFunction], score_mod: ScoreMod | None) -> str | None:
    """The reason why a kernel cannot evaluate these functions, or None."""
    mods = [("mask", mask, None) for mask in masks]
    mods += [] if score_mod is None else [("score_mod", score_mod, jnp.float32)]
    for name, mod, score_dtype in mods:
        try:
            make_tile_function(mod, score_dtype)
        except NotElementwise as reason:
            return f"its {name} needs {reason}"
    return None


def _over(depends: set[str]) -> str:
    """The axis over which a value depending on these indices runs."""
    if {"q", "kv"} <= depends:
        return PAIR
    return QUERY if "q" in depends else KEY if "kv" in depends else HEAD


def _check_elementwise(equation: JaxprEqn) -> None:
    name = equation.primitive.name
    if name.startswith("custom_"):  # its rule is traced for arrays of one number
        raise NotElementwise("a function with a derivative of its own (jax.custom_jvp) by query and key together")
    if name not in ELEMENTWISE and name not in _SAME_VALUE:
        raise NotElementwise(f"{name} by query and key together")
    if any(x.size != 1 for x in _types(equation)):
        raise NotElementwise(f"{name} of arrays by query and key together")
    if _has_64_bits(equation):
        raise NotElementwise(f"{name} in 64 bits by query and key together")


def _types(equation: JaxprEqn) -> list[Any]:
    return [x.aval for x in (*equation.invars, *equation.outvars)]


def _has_64_bits(equation: JaxprEqn) -> bool:
    return any(x.dtype.itemsize > 4 for x in _types(equation))


def _choose_outside(traced: TileFunction) -> None:
    """Fills ``outside``: values over heads, and values that the kernel needs but cannot compute."""
    inside = {*traced.arguments[-2:], *traced.arguments[:-4]}  # computed by the kernel itself
    simple = {i for i, x in traced.constants.items() if _is_number(x)}
    for step in traced.steps:
        over = _over(traced.axes[step.outputs[0]])
        cheap = all(i in inside or i in simple or _over(traced.axes[i]) == HEAD for i in step.inputs)
        elementwise = step.equation.primitive.name in ELEMENTWISE and cheap and not _has_64_bits(step.equation)
        if over == PAIR or (over != HEAD and elementwise):
            inside.update(step.outputs)
    wanted, seen = [traced.result], set[int]()
    while wanted:
        number = wanted.pop()
        if number in seen:
            continue
        seen.add(number)
        if number in inside:
            step = next((step for step in traced.steps if number in step.outputs), None)
            wanted += [] if step is None else step.inputs
        elif number not in simple:
            traced.outside[number] = _over(traced.axes[number])


def _is_number(constant: Any) -> bool:
    """Whether the constant is a single number known while tracing."""
    return isinstance(constant, np.ndarray | np.generic) and np.size(constant) == 1


def spread(x: ArrayLike, shape: tuple[int, ...]) -> ArrayLike:
    """``x`` broadcast to ``shape``; bools via integers, because kernels cannot broadcast bools."""
    if np.shape(x) == shape:
        return x
    if jnp.result_type(x) == bool:
        return jnp.broadcast_to(jnp.asarray(x).astype(jnp.int32), shape) != 0
    return jnp.broadcast_to(x, shape)


def _bind(step: _Step, inputs: list[Any]) -> list[Any]:
    return bind_equation(step.equation, inputs)


def _bind_broadcast(step: _Step, inputs: list[Any]) -> list[Any]:
    """The equation applied to arrays that broadcast, although it was traced on scalars."""
    if step.equation.primitive.name in _SAME_VALUE:
        return inputs[:1]
    shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
    return _bind(step, [spread(x, shape) for x in inputs])
