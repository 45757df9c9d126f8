"""Traces plain masks and score functions: captured arrays become arguments, and equal programs compare equal.

A custom derivative rule, ``jax.shard_map`` and a compiled eager call must neither close over traced arrays nor use
stale captured values. A function that is not a pytree is therefore traced, for one query-key pair, at every call.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, PyTree

from jattn._mods.arrays import Length, calling, without_mesh
from jattn._mods.contracts import MaskFunction, ScoreMod
from jattn._mods.jaxpr import HashableJaxpr, array_type, bind_equation, evaluate
from jattn._mods.pytree import StaticFunction, holds_plain_function, is_function, pytree_dataclass, static_field


@pytree_dataclass
class Traced:
    """A traced function from arrays to a list of arrays: its program and captured arrays."""

    captured: list[Any]
    hashable: HashableJaxpr = static_field()

    def __call__(self, *args: ArrayLike) -> list[Array]:
        jaxpr = self.hashable.jaxpr
        types = [array_type(variable) for variable in jaxpr.invars[len(self.captured) :]]
        cast = (jnp.asarray(x).astype(aval.dtype).reshape(aval.shape) for x, aval in zip(args, types, strict=True))
        return evaluate(jaxpr, (), [*self.captured, *cast], bind_equation)


@pytree_dataclass
class Elementwise:
    """A mask or score function, traced on one pair and vectorized."""

    on_one_pair: Traced

    def __call__(self, *args: ArrayLike) -> Array:
        return jnp.vectorize(lambda *pair: self.on_one_pair(*pair)[0])(*args)


def arguments(T: Length, S: Length, *score: DTypeLike) -> list[jax.ShapeDtypeStruct]:
    """The argument types of a mask for T queries and S keys, or of a score function for a ``score`` of this dtype."""
    shaped = jax.ShapeDtypeStruct
    return [
        *(shaped((T, S), dtype) for dtype in score),
        *[shaped((), jnp.int32)] * 2,
        shaped((T, 1), jnp.int32),
        shaped((1, S), jnp.int32),
    ]


def closure_convert(
    mod: PyTree, check: Callable[[Array], None], lengths: tuple[Length, Length], *score: DTypeLike
) -> PyTree:
    """A mask, or a score function for scores of dtype ``score``, with all its plain functions traced; None stays None.

    Masks that combine others, such as ``masks.And``, keep the ``bounds`` of their other parts. ``check`` is called with
    each function's result for ``lengths`` (T queries and S keys) and raises if the result is invalid.
    """
    if mod is None or not holds_plain_function(mod):
        return mod
    leaves = jax.tree.leaves(mod, is_leaf=is_function)
    if not is_function(mod) and all(isinstance(leaf, StaticFunction) for leaf in leaves if callable(leaf)):
        return jax.tree.map(
            lambda x: closure_convert(x, check, lengths, *score) if callable(x) else x, mod, is_leaf=is_function
        )

    in_context = calling("score_mod" if score else "mask")
    jax.eval_shape(in_context(lambda *args: check(mod(*args))), *arguments(*lengths, *score))
    on_one_pair = in_context(lambda *args: jnp.reshape(mod(*args), ()))
    return Elementwise(traced(on_one_pair, *arguments(1, 1, *score)))


def traced(fn: Callable[..., PyTree], *types: jax.ShapeDtypeStruct) -> Traced:
    """``fn``, traced for arguments of these types."""
    program = jax.make_jaxpr(fn)(*types)
    # Without its constants: program caches keep it, and traced arrays must not outlive their trace.
    open_jaxpr = program.jaxpr.replace(constvars=[], invars=[*program.jaxpr.constvars, *program.jaxpr.invars])
    return Traced(list(program.consts), HashableJaxpr(open_jaxpr))


def depends_on(mod: MaskFunction | ScoreMod, index: int, *score: DTypeLike) -> bool:
    """Whether the result of a mask or score function depends on its argument ``index``."""

    on_one_pair = calling("score_mod" if score else "mask")(lambda *args: mod(*args))
    with without_mesh():  # a function traced outside jax.shard_map is evaluated inside
        program = jax.make_jaxpr(on_one_pair)(*arguments(1, 1, *score)).jaxpr
    from jax.extend.core import Var  # slow to import

    dependent: set[Any] = {program.invars[index]}
    for equation in program.eqns:
        if not dependent.isdisjoint(x for x in equation.invars if isinstance(x, Var)):
            dependent.update(equation.outvars)
    return not dependent.isdisjoint(x for x in program.outvars if isinstance(x, Var))
