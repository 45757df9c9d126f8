"""Defines a primitive that traces its function at lowering: JAX transforms each ``call`` as a single operation.

``call(fn, *args, out=...)`` adds one operation to the program; ``fn(platform, *args)`` is traced when that operation is
lowered. Blockwise attention relies on these consequences:

- ``platform`` is the target of lowering (``"cpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"``), not the platform of the tracing
  process. A ``jax.export`` for several platforms holds a program for each.
- A remat policy applies to the operation as a whole rather than to the products inside it, so it cannot save their
  blocks.
- Inside ``jax.shard_map``, the function sees one device's plain arrays, whichever mesh axes they vary over.
- Eager calls compile once: two operations are equal if they compute the same thing, regardless of the objects they were
  made from.

The operation can be differentiated, in forward and reverse mode and to any order, and batched like ``fn``.
"""

import contextlib
import contextvars
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray, Tracer
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jattn._core.operation import OPERAND, Batched, CustomRules, DeferredCall, Jvp, Operation, Settings, is_floating
from jattn._mods.arrays import Length

if TYPE_CHECKING:
    from jax.extend.core import Primitive
else:
    Primitive = Any  # slow to import

PROGRAMS = 256  # compiled eager calls to cache
Function = Callable[Concatenate[str, ...], Any] | CustomRules  # ``(platform, *args) -> pytree of arrays``
Types = tuple[tuple[tuple[Length, ...], np.dtype], ...]  # the shapes and dtypes of an operation's results


def call(fn: Function, *args: object, out: object) -> Any:
    """``fn(platform, *args)``, traced at lowering.

    Args:
        fn: a module-level function, or an object that compares by value, such as ``CustomRules``. It returns a pytree
            of arrays and captures no traced values.
        args: pytrees. Arrays among their leaves are operands. Under a transformation, only JAX arrays are operands, and
            NumPy arrays stay static in ``fn``. Other leaves, and the pytrees' structure, must be hashable.
        out: ``jax.ShapeDtypeStruct``s (or arrays) with the shapes and dtypes of ``fn``'s results.
    """
    function, operands = _deferred_call(fn, args)
    return jax.tree.unflatten(jax.tree.structure(out), _bind(function, operands, jax.tree.leaves(out)))


def jvp(fn: Function, args: tuple, tangents: Sequence[Array | None], *, out: object) -> Any:
    """The tangents of ``call(fn, *args, out=out)``, without its results, which must all be floating.

    ``tangents``: one for each leaf of ``args[0]``, None for zero.
    """
    function, operands = _deferred_call(fn, args)
    numbers = iter(range(len(operands)))
    positions = [next(numbers) if leaf is OPERAND else None for leaf in function.leaves]
    at = tuple(n for n, x in zip(positions, tangents, strict=False) if x is not None and n is not None)
    nonzero = [x for n, x in zip(positions, tangents, strict=False) if x is not None and n is not None]
    types = jax.tree.leaves(out)
    results = _bind(Jvp(function, at, tuple(range(len(types)))), [*operands, *nonzero], types)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def at_lowering(fn: Callable[..., Any], *args: object) -> Any:
    """``fn(*args)``, which must return no arrays, with the arrays in ``args`` traced as ``call`` does at lowering."""
    function, operands = _deferred_call(fn, args)
    results = []
    jax.eval_shape(lambda *operands: results.append(fn(*function.arguments(operands))), *operands)
    return results[0]


def compiled(fn: Callable[..., Any], *args: object) -> Any:
    """``fn(*args)`` without traced arrays, compiled once. Arguments as in ``call``."""
    function, operands = _deferred_call(fn, args)
    return _jitted(function)(*operands)


@functools.lru_cache(PROGRAMS)
def _jitted(function: DeferredCall) -> Callable[..., Any]:
    return jax.jit(lambda *operands: function.fn(*function.arguments(operands)), inline=True)


def _deferred_call(fn: Callable[..., Any], args: tuple) -> tuple[DeferredCall, list[Array]]:
    leaves, structure = jax.tree.flatten(args)
    eager = not any(isinstance(leaf, Tracer) for leaf in leaves)
    kinds = (jax.Array, np.ndarray, np.generic, float) if eager else jax.Array
    is_operand = [isinstance(leaf, kinds) for leaf in leaves]
    static = tuple(OPERAND if dynamic else leaf for leaf, dynamic in zip(leaves, is_operand, strict=True))
    operands = [jnp.asarray(leaf) for leaf, dynamic in zip(leaves, is_operand, strict=True) if dynamic]
    # fn is traced later, under the current settings.
    return DeferredCall(fn, structure, static, _settings()), operands


def _settings() -> Settings:
    return Settings(jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)


def _bind(
    function: Operation, operands: Sequence[Any], out: Sequence[Array | ShapedArray | jax.ShapeDtypeStruct]
) -> list[Array]:
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    if varying:
        operands = [_varying(x, varying) for x in operands]
    results = tuple((tuple(x.shape), jnp.dtype(x.dtype)) for x in out)
    return primitive().bind(*operands, function=function, results=results)


def _varying(x: ArrayLike, axes: frozenset[str]) -> ArrayLike:
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


@functools.cache
def primitive() -> Primitive:
    """The primitive that ``call`` adds to programs. Created on first use: jax.extend imports Pallas, which is slow."""
    from jax.extend.core import Primitive

    deferred_p = Primitive("jattn")
    deferred_p.multiple_results = True
    deferred_p.def_impl(_eager)
    deferred_p.def_abstract_eval(_types)
    for platform in ("cpu", "cuda", "rocm", "tpu"):
        mlir.register_lowering(deferred_p, functools.partial(_lower, platform), platform=platform)
    ad.primitive_jvps[deferred_p] = _jvp
    ad.primitive_transposes[deferred_p] = _transpose
    batching.primitive_batchers[deferred_p] = _batch
    return deferred_p


def _eager(*operands: ArrayLike, function: Operation, results: Types) -> list[Array]:
    with jax.disable_jit(False):  # only jit lowers
        return _compiled(function, results)(*operands)


@functools.lru_cache(PROGRAMS)
def _compiled(function: Operation, results: Types) -> Callable[..., list[Array]]:
    return jax.jit(functools.partial(primitive().bind, function=function, results=results))


def _types(*operands: ShapedArray, function: Operation, results: Types) -> list[ShapedArray]:
    like = next((x for x in operands if not x.sharding.mesh.empty), operands[0])
    whole = (PartitionSpec(*(None,) * len(shape)) for shape, _ in results)
    return [
        like.update(shape=shape, dtype=dtype, weak_type=False, sharding=NamedSharding(like.sharding.mesh, spec))
        for (shape, dtype), spec in zip(results, whole, strict=True)
    ]


def _lower(platform: str, ctx: Any, *operands: Any, function: Operation, results: Types) -> Sequence[Any]:
    def run(*operands: Array) -> list[Array]:
        x64, precision = function.settings
        with jax.enable_x64(x64), jax.default_matmul_precision(precision), _lowered_as(ctx):
            outputs = function(platform, *operands)
        types = tuple((tuple(x.shape), x.dtype) for x in outputs)
        assert types == results, f"{function}: {types} is not {results}"
        return outputs

    plain = [ShapedArray(x.shape, x.dtype, x.weak_type) for x in ctx.avals_in]
    module, context = ctx.module_context, _of_jax(ctx, "axis_context")
    if getattr(context, "num_devices", 0) == 1 and context.device_assignment is None:
        # JAX lists the devices only where it sees an operation with custom partitioning, and cuDNN's is hidden here.
        module = module.replace(axis_context=dataclasses.replace(context, device_assignment=(None,)))
    ctx = ctx.replace(module_context=module, avals_in=plain, avals_out=[ShapedArray(*result) for result in results])
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


class Lowering(NamedTuple):
    """The properties of the program being lowered that an implementation can query."""

    partitioned: bool
    exported: bool
    device: Any


_NO_PROGRAM = Lowering(False, False, None)
_lowering: contextvars.ContextVar[Lowering] = contextvars.ContextVar("lowering", default=_NO_PROGRAM)


def is_partitioned() -> bool:
    """Whether XLA partitions the program being lowered over devices, which it cannot do to a kernel.

    XLA partitions what ``jax.jit`` compiles for arrays on several devices, unless all axes of their mesh are manual.
    """
    return _lowering.get().partitioned


def is_exported() -> bool:
    """Whether the program is being lowered for ``jax.export``, to be run elsewhere, by other versions."""
    return _lowering.get().exported


def device() -> Any:
    """A device, present or not, of the backend used for lowering the program; None outside of lowering.

    When a program is lowered for another platform, as by ``jax.export``, this is a device of the present machine.
    """
    return _lowering.get().device


# Everything read from JAX's undocumented objects: attributes of the context passed to a lowering rule. From its
# ``axis_context``, also ``mesh`` and ``manual_axes`` inside jax.shard_map, otherwise ``num_devices`` and
# ``device_assignment``. tests/jattn/test_deferred.py reports any that a new JAX lacks.
OF_JAX = {
    "axis_context": "module_context.axis_context",
    "exported": "module_context.lowering_parameters.for_export",
    "backend": "module_context.backend",
}


def _of_jax(ctx: Any, name: str) -> Any:
    return operator.attrgetter(OF_JAX[name])(ctx)


@contextlib.contextmanager
def _lowered_as(ctx: Any) -> Iterator[None]:
    context, backend = _of_jax(ctx, "axis_context"), _of_jax(ctx, "backend")
    if hasattr(context, "manual_axes"):
        manual = context.manual_axes | set(context.mesh.manual_axes)
        partitioned = bool(context.manual_axes) and manual != set(context.mesh.axis_names)
    else:
        partitioned = context.num_devices != 1
    device = None if backend is None else backend.devices()[0]
    token = _lowering.set(Lowering(partitioned, _of_jax(ctx, "exported"), device))
    try:
        yield
    finally:
        _lowering.reset(token)


def _jvp(
    operands: Sequence[ArrayLike], tangents: Sequence[ArrayLike | ad.Zero], *, function: Operation, results: Types
) -> tuple[list[Array], list[Array | ad.Zero]]:
    primals_out = primitive().bind(*operands, function=function, results=results)
    at = tuple(i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero))
    floating = [is_floating(x) for x in primals_out]
    types = [jax.ShapeDtypeStruct(*result) for result, is_float in zip(results, floating, strict=True) if is_float]
    kept = tuple(range(len(types)))
    tangents_out = iter(_bind(Jvp(function, at, kept), [*operands, *(tangents[i] for i in at)], types))
    zeros = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in primals_out)
    both = zip(floating, zeros, strict=True)
    return primals_out, [next(tangents_out) if has_tangent else zero for has_tangent, zero in both]


def _transpose(
    cotangents: Sequence[ArrayLike | ad.Zero],
    *operands: ArrayLike | ad.UndefinedPrimal,
    function: Jvp | Batched,
    results: Types,
) -> list[Array | None]:
    primals, linear = operands[: -function.linear], operands[-function.linear :]
    types = [x.aval if isinstance(x, ad.UndefinedPrimal) else jax.typeof(x) for x in linear]
    nonzero = [i for i, x in enumerate(cotangents) if not isinstance(x, ad.Zero)]
    if not nonzero:
        return [None] * len(operands)
    results_ct = _bind(function.transposed(nonzero), [*primals, *(cotangents[i] for i in nonzero)], types)
    linear_ct = [y if ad.is_undefined_primal(x) else None for x, y in zip(linear, results_ct, strict=True)]
    return [None] * len(primals) + linear_ct


def _batch(
    operands: Sequence[ArrayLike], axes: Sequence[int | None], *, function: Operation, results: Types
) -> tuple[list[Array], list[int]]:
    size = next(jnp.shape(x)[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    linear_from = len(operands) - function.linear
    moved, to = [], []
    for i, (x, axis) in enumerate(zip(operands, axes, strict=True)):
        if axis is not None:
            moved.append(jnp.moveaxis(x, axis, 0))
        else:  # each batch entry gets its own cotangent
            moved.append(jnp.broadcast_to(x, (size, *jnp.shape(x))) if i >= linear_from else x)
        to.append(None if axis is None and i < linear_from else 0)
    out = [jax.ShapeDtypeStruct((size, *shape), dtype) for shape, dtype in results]
    return _bind(Batched(function, tuple(to)), moved, out), [0] * len(out)
