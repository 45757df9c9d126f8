"""A primitive whose function is traced at lowering: each ``call`` is a single operation that JAX transforms.

``call(fn, *args, out=...)`` adds one operation to the program; ``fn(platform, *args)`` is traced when that operation is
lowered. Blockwise attention relies on the consequences:

- ``platform`` is what the program is lowered for (``"cpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"``), not the platform of
  the tracing process. ``jax.export`` for several platforms holds a program for each.
- A remat policy applies to the operation as a whole, not to the products inside, so it cannot save their blocks.
- Inside ``jax.shard_map`` the function sees plain arrays of one device, whichever mesh axes they vary over.
- Eager calls compile once: two operations are equal if they compute the same, whatever objects they were made from.

The operation can be differentiated and batched like ``fn``, in forward and reverse mode and to any order.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

PROGRAMS = 256  # compiled eager calls to cache
OPERAND = object()  # placeholder for an array among the leaves of a Function


@dataclasses.dataclass(frozen=True)
class ByHand:
    """A function of which some derivatives, or the results, are written by hand; all other derivatives are ``fn``'s.

    Args:
        fn: a function for ``call``, which also takes ``platform`` first.
        run: computes the same results as ``fn``, which computes them if this is None.
        vjp: ``(platform, args, cotangents) -> cotangents of the first count operands``: the first reverse derivative.
            A cotangent is None for a floating result that nothing depends on.
        count: the number of operands that ``vjp`` covers.
        results: the number of floating results.
        alone: whether ``vjp`` is only used where no other operand is differentiated.
    """

    fn: Callable
    run: Callable | None = None
    vjp: Callable | None = None
    count: int = 0
    results: int = 1
    alone: bool = False

    def __call__(self, platform: str, *args: Any) -> Any:
        return (self.run or self.fn)(platform, *args)

    def covers(self, at: Sequence[int]) -> list[int]:
        """Those of the operands ``at`` whose cotangents ``vjp`` computes."""
        covered = [i for i in at if i < self.count]
        return [] if self.vjp is None or (self.alone and len(covered) < len(at)) else covered


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """``fn(platform, *args)`` as a function of the arrays among the leaves of ``args``. Compares by value."""

    fn: Callable
    structure: Any
    leaves: tuple[Any, ...]
    settings: tuple[Any, ...]
    linear = 0

    def __call__(self, platform: str, *operands: Any) -> list[Any]:
        return jax.tree.leaves(self.fn(platform, *self.arguments(operands)))

    def arguments(self, operands: tuple[Any, ...]) -> tuple:
        """``args``, with ``operands`` for its arrays."""
        rest = iter(operands)
        leaves = [next(rest) if leaf is OPERAND else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def plain(self) -> "Function":
        """Itself, with nothing written by hand."""
        return dataclasses.replace(self, fn=self.fn.fn) if isinstance(self.fn, ByHand) else self

    @functools.cached_property
    def _value(self) -> tuple:
        arrays = (x if not isinstance(x, np.ndarray) else (x.shape, x.dtype, x.tobytes()) for x in self.leaves)
        return self.fn, self.structure, tuple((type(x), x) for x in arrays), self.settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        fn = self.fn.fn if isinstance(self.fn, ByHand) else self.fn
        return getattr(fn, "__name__", type(fn).__name__)


@dataclasses.dataclass(frozen=True)
class Jvp:
    """The tangents of ``of``'s floating results ``kept``, linear in its last operands, those of the operands ``at``."""

    of: Any
    at: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def linear(self) -> int:
        return len(self.at)

    @property
    def settings(self) -> tuple[Any, ...]:
        return self.of.settings

    @property
    def plain(self) -> Any:
        """Itself, with nothing written by hand."""
        return dataclasses.replace(self, of=self.of.plain)

    def __call__(self, platform: str, *operands: Any) -> list[Any]:
        primals, tangents = operands[: -self.linear], operands[-self.linear :]
        inputs = tuple(primals[i] for i in self.at)
        return jax.jvp(self._function(platform, primals, self.at), inputs, tuple(tangents))[1]

    def _function(self, platform: str, primals: tuple[Any, ...], at: Sequence[int]) -> Callable:
        def of_inputs(*inputs: Any) -> list[Any]:
            operands = list(primals)
            for i, x in zip(at, inputs, strict=True):
                operands[i] = x
            floating = [x for x in self.of.plain(platform, *operands) if is_floating(x)]
            return [floating[i] for i in self.kept]

        return of_inputs

    def transposed(self, results: Sequence[int]) -> Any:
        """The transpose of this linear function, restricted to ``results``."""
        return Vjp(self.of, self.at, tuple(self.kept[i] for i in results))


@dataclasses.dataclass(frozen=True)
class Vjp(Jvp):
    """The cotangents of the operands ``at``, linear in its last operands, those of ``of``'s results ``kept``."""

    @property
    def linear(self) -> int:
        return len(self.kept)

    def __call__(self, platform: str, *operands: Any) -> list[Any]:
        primals, cotangents = operands[: -self.linear], list(operands[-self.linear :])
        own = self.of.fn if isinstance(self.of, Function) and isinstance(self.of.fn, ByHand) else None
        by_hand = [] if own is None else own.covers(self.at)
        others = [i for i in self.at if i not in by_hand]
        pulled: dict[int, Any] = {}
        if others:
            _, pull = jax.vjp(self._function(platform, primals, others), *(primals[i] for i in others))
            pulled |= zip(others, pull(cotangents), strict=True)
        if own is not None and own.vjp is not None and by_hand:
            given = dict(zip(self.kept, cotangents, strict=True))
            every = [given.get(i) for i in range(own.results)]
            first = own.vjp(platform, self.of.arguments(primals), every)
            pulled |= {i: first[i] for i in by_hand}
        return [pulled[i] for i in self.at]

    def transposed(self, results: Sequence[int]) -> Any:
        return Jvp(self.of, tuple(self.at[i] for i in results), self.kept)


@dataclasses.dataclass(frozen=True)
class Batched:
    """``jax.vmap(of, axes)``."""

    of: Any
    axes: tuple[int | None, ...]

    @property
    def linear(self) -> int:
        return self.of.linear

    @property
    def settings(self) -> tuple[Any, ...]:
        return self.of.settings

    @property
    def plain(self) -> Any:
        """Itself, with nothing written by hand."""
        return dataclasses.replace(self, of=self.of.plain)

    def __call__(self, platform: str, *operands: Any) -> list[Any]:
        return jax.vmap(functools.partial(self.of, platform), self.axes)(*operands)

    def transposed(self, results: Sequence[int]) -> Any:
        return Batched(self.of.transposed(results), (*self.axes[: -self.linear], *(0,) * len(results)))


def call(fn: Callable, *args: Any, out: Any) -> Any:
    """``fn(platform, *args)``, traced at lowering.

    Args:
        fn: a function at module level, or another that compares by value. It returns a pytree of arrays and captures no
            traced values.
        args: pytrees. Arrays among their leaves are operands. Under a transformation only JAX arrays are, and NumPy
            arrays stay static in ``fn``. Other leaves, and the pytrees' structure, must be hashable.
        out: ``jax.ShapeDtypeStruct``s (or arrays) like ``fn``'s results.
    """
    function, operands = _function(fn, args)
    return jax.tree.unflatten(jax.tree.structure(out), _bind(function, operands, jax.tree.leaves(out)))


def jvp(fn: Callable, args: tuple, tangents: list[Any], *, out: Any) -> Any:
    """The tangents of ``call(fn, *args, out=out)``, without its results, which must all be floating.

    ``tangents``: one for each leaf of ``args[0]``, None for zero.
    """
    function, operands = _function(fn, args)
    numbers = iter(range(len(operands)))
    positions = [next(numbers) if leaf is OPERAND else None for leaf in function.leaves]
    at = tuple(n for n, x in zip(positions, tangents, strict=False) if x is not None and n is not None)
    nonzero = [x for n, x in zip(positions, tangents, strict=False) if x is not None and n is not None]
    types = jax.tree.leaves(out)
    results = _bind(Jvp(function, at, tuple(range(len(types)))), [*operands, *nonzero], types)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def at_lowering(fn: Callable, *args: Any) -> Any:
    """``fn(*args)``, which must return no arrays, with those of ``args`` traced as ``call`` traces them at lowering."""
    function, operands = _function(fn, args)
    found = []
    jax.eval_shape(lambda *operands: found.append(fn(*function.arguments(operands))), *operands)
    return found[0]


def compiled(fn: Callable, *args: Any) -> Any:
    """``fn(*args)``, traced and differentiated by JAX as usual, and compiled once. Arguments as in ``call``."""
    leaves, structure = jax.tree.flatten(args)
    is_operand = [isinstance(leaf, jax.Array | np.ndarray | np.generic | float) for leaf in leaves]
    static = tuple(OPERAND if dynamic else leaf for leaf, dynamic in zip(leaves, is_operand, strict=True))
    operands = [leaf for leaf, dynamic in zip(leaves, is_operand, strict=True) if dynamic]
    return _jitted(Function(fn, structure, static, ()))(*operands)


@functools.lru_cache(PROGRAMS)
def _jitted(function: Function) -> Callable:
    return jax.jit(lambda *operands: function.fn(*function.arguments(operands)), inline=True)


def _function(fn: Callable, args: tuple) -> tuple[Function, list[Any]]:
    leaves, structure = jax.tree.flatten(args)
    eager = not any(isinstance(leaf, Tracer) for leaf in leaves)
    kinds = (jax.Array, np.ndarray, np.generic, float) if eager else jax.Array
    is_operand = [isinstance(leaf, kinds) for leaf in leaves]
    static = tuple(OPERAND if dynamic else leaf for leaf, dynamic in zip(leaves, is_operand, strict=True))
    # fn is traced later, under the settings of now.
    settings = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
    operands = [jnp.asarray(leaf) for leaf, dynamic in zip(leaves, is_operand, strict=True) if dynamic]
    return Function(fn, structure, static, settings), operands


def _bind(function: Any, operands: list[Any], out: list[Any]) -> list[Any]:
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    if varying:
        operands = [_varying(x, varying) for x in operands]
    results = tuple((tuple(x.shape), jnp.dtype(x.dtype)) for x in out)
    return staged_p.bind(*operands, function=function, results=results)


def _varying(x: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def is_floating(x: Any) -> bool:
    """Whether ``x`` has a differentiable dtype."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


staged_p = Primitive("jattn")
staged_p.multiple_results = True


@staged_p.def_impl
def _eager(*operands: Any, function: Any, results: tuple) -> list[Any]:
    with jax.disable_jit(False):  # only jit lowers
        return _compiled(function, results)(*operands)


@functools.lru_cache(PROGRAMS)
def _compiled(function: Any, results: tuple) -> Callable:
    return jax.jit(functools.partial(staged_p.bind, function=function, results=results))


@staged_p.def_abstract_eval
def _types(*operands: Any, function: Any, results: tuple) -> list[Any]:
    like = next((x for x in operands if not x.sharding.mesh.empty), operands[0])
    whole = (PartitionSpec(*(None,) * len(shape)) for shape, _ in results)
    return [
        like.update(shape=shape, dtype=dtype, weak_type=False, sharding=NamedSharding(like.sharding.mesh, spec))
        for (shape, dtype), spec in zip(results, whole, strict=True)
    ]


def _lower(platform: str, ctx: Any, *operands: Any, function: Any, results: tuple) -> Any:
    def run(*operands: Any) -> list[Any]:
        with _settings(function.settings), _lowered_as(ctx.module_context):
            outputs = function(platform, *operands)
        types = tuple((tuple(x.shape), x.dtype) for x in outputs)
        assert types == results, f"{function}: {types} is not {results}"
        return outputs

    plain = [ShapedArray(x.shape, x.dtype, x.weak_type) for x in ctx.avals_in]
    module, context = ctx.module_context, ctx.module_context.axis_context
    if getattr(context, "num_devices", 0) == 1 and context.device_assignment is None:
        # JAX lists the devices only where it sees an operation that XLA asks how to divide, and cuDNN's is hidden here.
        module = module.replace(axis_context=dataclasses.replace(context, device_assignment=(None,)))
    ctx = ctx.replace(module_context=module, avals_in=plain, avals_out=[ShapedArray(*result) for result in results])
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(staged_p, functools.partial(_lower, _platform), platform=_platform)


@contextlib.contextmanager
def _settings(values: tuple[Any, ...]) -> Iterator[None]:
    x64, precision = values
    with jax.enable_x64(x64), jax.default_matmul_precision(precision):
        yield


_partitioned: contextvars.ContextVar[bool] = contextvars.ContextVar("partitioned", default=False)
_exported: contextvars.ContextVar[bool] = contextvars.ContextVar("exported", default=False)


def is_partitioned() -> bool:
    """Whether the program that is being lowered is one that XLA divides over devices, which it cannot do to a kernel.

    What ``jax.jit`` makes of arrays on several devices is, unless all axes of their mesh are manual.
    """
    return _partitioned.get()


def is_exported() -> bool:
    """Whether the program that is being lowered is for ``jax.export``: to be run by other versions, elsewhere."""
    return _exported.get()


@contextlib.contextmanager
def _lowered_as(module: Any) -> Iterator[None]:
    context = module.axis_context
    if hasattr(context, "manual_axes"):  # inside jax.shard_map
        manual = context.manual_axes | set(context.mesh.manual_axes)
        partitioned = bool(context.manual_axes) and manual != set(context.mesh.axis_names)
    else:
        partitioned = getattr(context, "num_devices", 1) != 1
    tokens = _partitioned.set(partitioned), _exported.set(module.lowering_parameters.for_export)
    try:
        yield
    finally:
        _partitioned.reset(tokens[0])
        _exported.reset(tokens[1])


def _jvp(
    operands: Sequence[Any], tangents: Sequence[Any], *, function: Any, results: tuple
) -> tuple[list[Any], list[Any]]:
    primals_out = staged_p.bind(*operands, function=function, results=results)
    at = tuple(i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero))
    floating = [is_floating(x) for x in primals_out]
    types = [jax.ShapeDtypeStruct(*result) for result, is_float in zip(results, floating, strict=True) if is_float]
    kept = tuple(range(len(types)))
    tangents_out = iter(_bind(Jvp(function, at, kept), [*operands, *(tangents[i] for i in at)], types))
    zeros = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in primals_out)
    return primals_out, [
        next(tangents_out) if has_tangent else zero for has_tangent, zero in zip(floating, zeros, strict=True)
    ]


ad.primitive_jvps[staged_p] = _jvp


def _transpose(cotangents: Sequence[Any], *operands: Any, function: Any, results: tuple) -> list[Any]:
    primals, linear = operands[: -function.linear], operands[-function.linear :]
    types = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in linear]
    nonzero = [i for i, x in enumerate(cotangents) if not isinstance(x, ad.Zero)]
    if not nonzero:
        return [None] * len(operands)
    results_ct = _bind(function.transposed(nonzero), [*primals, *(cotangents[i] for i in nonzero)], types)
    linear_ct = [y if ad.is_undefined_primal(x) else None for x, y in zip(linear, results_ct, strict=True)]
    return [None] * len(primals) + linear_ct


ad.primitive_transposes[staged_p] = _transpose


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], *, function: Any, results: tuple
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    linear_from = len(operands) - function.linear
    moved, to = [], []
    for i, (x, axis) in enumerate(zip(operands, axes, strict=True)):
        if axis is not None:
            moved.append(jnp.moveaxis(x, axis, 0))
        else:  # every entry of the batch gets its own cotangent
            moved.append(jnp.broadcast_to(x, (size, *x.shape)) if i >= linear_from else x)
        to.append(None if axis is None and i < linear_from else 0)
    out = [jax.ShapeDtypeStruct((size, *shape), dtype) for shape, dtype in results]
    return _bind(Batched(function, tuple(to)), moved, out), [0] * len(out)


batching.primitive_batchers[staged_p] = _batch
