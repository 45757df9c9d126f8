"""The base classes of implementations: what all kernels share, and what a new kernel overrides."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jattn._blocks import backward, online_softmax
from jattn._blocks.plan import BlockSizes
from jattn._blocks.reduction import Reduction, reduce_weights
from jattn._core import deferred
from jattn._core.call import REFUSED, Call
from jattn._core.shard import is_typed, may_be_sharded, on_each_device, per_device, replicated_on
from jattn._core.vmap import canonical
from jattn._mods.arrays import Length
from jattn.kernels.interface import Unsupported

# ``out [B,T,N,D]`` in the value's dtype; ``row_max`` and ``row_sum [B,T,N]`` as in ``jattn._blocks.online_softmax``;
# from ``forward_with_error``, also the rounding error of ``out``, in its dtype.
Results = tuple[Float[Array, "B T N D"], Float[Array, "B T N"], Float[Array, "B T N"], *tuple[Array, ...]]

# Blocks pay off if T * S >= MIN_PAIRS, or if B * N * T * S >= MIN_SCORES, 256 MiB of dense scores in float32, but never
# with fewer queries than FEW.
MIN_PAIRS, MIN_SCORES, FEW = 2**20, 2**26, 16

SEVERAL_DEVICES = "the arrays may lie on several devices: use jax.shard_map or a mesh of AxisType.Explicit"
# The platforms known to ``explain``, and JAX's names for them at lowering.
PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}


def _shapes(call: Call) -> tuple[Length, ...]:
    return *call.query.shape, *call.key.shape


def _is_symbolic(call: Call) -> bool:
    sizes = *_shapes(call), *(() if call.value is None else call.value.shape[3:])
    return not all(isinstance(size, int) for size in sizes)


# Options that a kernel refuses unless its ``takes`` names them: whether a call has the option, and the reason. They
# include all fields of ``Call`` with a ``refused`` text.
OPTIONS: Mapping[str, tuple[Callable[[Call], bool], str]] = {
    "symbolic shapes": (_is_symbolic, "it takes no symbolic shapes"),
    "empty arrays": (lambda call: call.value is None or 0 in _shapes(call), "it takes no empty arrays"),
    **{name: (operator.methodcaller("has", name), reason) for name, reason in REFUSED.items()},
    "several devices": (
        lambda call: (
            may_be_sharded(call)
            and not (is_typed(call.query) or is_typed(call.key))  # otherwise ``on_each_device`` raises the error
            and replicated_on(call) is None
        ),
        SEVERAL_DEVICES,
    ),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation in linear memory with the derivative rule of ``jattn._blocks.backward``.

    A subclass is a frozen dataclass of its settings, in its own file. To write one, override these, in order:

    1. ``name``, and ``platform`` if it runs on only one kind of device.
    2. What it rejects: ``dtypes``; ``takes``, the supported ``OPTIONS``, including fields of ``Call``; and ``refusals``
       for everything else. A kernel that lists its ``takes`` rejects options added later until it names them, unless
       its scores come from ``jattn._core.attention`` or ``jattn._blocks``.
    3. ``forward``. The kernel is now correct: blockwise provides its derivatives, recomputing the forward pass in
       blocks.
    4. ``backward``, the gradients of query, key and value, if it has kernels for them. Blockwise still computes forward
       mode, higher orders and the gradients of other arrays. In 16 bits, also ``forward_with_error``, with
       ``returns_error``: without it, the rounding of ``out`` shows in the query's gradient if keys share a large common
       component.
    5. ``pays`` and ``pays_when``, unless it should be a default in the same cases as blocks.
    6. ``rounds_query`` if its log-sum-exp does not match the scores exactly, ``prepare`` if it reads static arrays
       while tracing, and ``describe_work`` for ``jattn.explain``.

    Then test it with ``jattn.testing.check``, and register its name with a line in ``jattn.kernels.dispatch``. A kernel
    that leaves derivatives to JAX is a ``PlainKernel`` and overrides ``run``; a kernel that also reduces weights for
    ``jattn.heads.statistics`` is a ``ReducingKernel``.

    ``forward`` and ``backward`` get a canonical call (``jattn._core.vmap.canonical``): its scale is an array or None,
    and the arrays captured by its functions are among its leaves.
    """

    name: ClassVar[str]  # as in ``implementation=``
    platform: ClassVar[str | None] = None  # "cpu", "gpu" or "tpu": the only one it runs on
    dtypes: ClassVar[tuple[DTypeLike, ...]] = ()  # of queries, keys and values; empty: any
    takes: ClassVar[frozenset[str]] = frozenset(OPTIONS)
    # Where it pays off, in words.
    pays_when: ClassVar[str] = ""
    # Not yet run on its hardware, and therefore taken only by name. After a run, only this field needs to change.
    never_run: ClassVar[bool] = False
    # Its ``backward`` is used only if no array besides query, key and value has a gradient.
    backward_is_for_qkv_alone: ClassVar[bool] = False
    # It multiplies the query by the scale and rounds it, so its log-sum-exp differs from blockwise's.
    rounds_query: ClassVar[bool] = False
    # Its backward pass computes a row's sum of d_out * out from the 16-bit output: the gradient of the query is off by
    # the rounding error times the component shared by the keys.
    reads_rounded_output: ClassVar[bool] = False
    # ``forward_with_error`` knows the rounding error of ``out``.
    returns_error: ClassVar[bool] = False
    # ``backward`` also accepts a query in the softmax's dtype that holds numbers representable in the keys' dtype: its
    # gradient, from a part of the keys, is then one of several to be summed, and is not rounded where the kernel can
    # avoid it.
    wide_query: ClassVar[bool] = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if unknown := sorted(cls.takes - OPTIONS.keys()):
            raise TypeError(f"{cls.__name__}.takes: no option is called {unknown}; there are {', '.join(OPTIONS)}")

    def pays(self, call: Call) -> bool:
        """Whether ``implementation=None`` prefers it to later kernels in ``jattn.kernels.dispatch.ORDER``.

        By default, it does where blocks pay off: the dense matrix then takes more time than the loop over blocks
        (measured on CPU), or a lot of memory. With few queries or keys, the matrix grows only linearly.
        """
        (B, T, N, _), S = call.query.shape, call.key.shape[1]
        if not isinstance(T, int) or not isinstance(S, int):
            return False
        scores = math.prod(size if isinstance(size, int) else 1 for size in (B, N, T, S))
        return (T * S >= MIN_PAIRS or scores >= MIN_SCORES) and min(T, S) >= FEW

    def refusals(self, call: Call) -> Iterable[tuple[bool, str]]:
        """Further reasons to reject a call, as (condition, reason); the first that applies is reported."""
        return ()

    def refusal_at_lowering(self, call: Call) -> str | None:
        """A reason not to use the kernel by default that is known only at lowering, or None."""
        return None

    def describe_work(self, platform: str, call: Call) -> str | None:
        """How much of the matrix its forward pass computes for a canonical call, as a verb phrase; None if unknown."""
        return None

    def describe_products(self, call: Call) -> str | None:
        """The dtype of its products, as a verb phrase, if it depends on the machine; otherwise None."""
        return None

    def formula(self, call: Call) -> Callable[[Call], tuple[Array, Array]] | None:
        """``call -> (out, lse)``, from which JAX derives everything not covered by ``backward``; None for blockwise."""
        return None

    def prepare(self, call: Call) -> "Kernel":
        """The kernel for one canonical call, with the data that it reads from static arrays while tracing."""
        return self

    def forward(self, platform: str, call: Call) -> Results:
        """``out``, ``row_max`` and ``row_sum`` of a canonical call, traced for ``platform``."""
        raise NotImplementedError

    def forward_with_error(self, platform: str, call: Call) -> Results:
        """``forward``, and the rounding error of ``out``, for the derivatives of 16-bit calls; 0 if unknown."""
        results = self.forward(platform, call)
        return *results, jnp.zeros_like(results[0])

    def forward_of_part(self, platform: str, call: Call, with_error: bool = True) -> Results:
        """``forward_with_error``, or ``forward``, for a part of the keys, as in a hop of a ring."""
        return self.forward_with_error(platform, call) if with_error else self.forward(platform, call)

    def backward(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        """The cotangents of query, key and value, as in ``jattn._blocks.backward.differentiable``."""
        return backward.gradients_of_qkv(platform, call, results, cotangents, self._block_sizes)

    def backward_of_part(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        """``backward`` for a part of the keys, with the results for all of them, as in a hop of a ring."""
        return self.backward(platform, call, results, cotangents)

    @property
    def _block_sizes(self) -> BlockSizes:
        """The block sizes used in all derivatives computed by blockwise."""
        return None

    def unsupported_reason(self, call: Call) -> str | None:
        """The first reason against the kernel, or None."""
        dtype, names = call.key.dtype, [jnp.dtype(x).name for x in self.dtypes]
        if names and dtype.name not in names:
            return f"it takes {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}, not {dtype}"
        for option, (applies, reason) in OPTIONS.items():
            if option not in self.takes and applies(call):
                return reason
        return next((reason for applies, reason in self.refusals(call) if applies), None)

    def run(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``; O(T + S) memory plus inputs and outputs, forward and backward."""
        self._check(self.unsupported_reason(call))  # not yet checked if given as an object
        everywhere = replicated_on(call) if self.platform else None  # XLA cannot partition a kernel over devices
        if everywhere is not None:
            return per_device(self._run, call, everywhere, ("btnd", "btn"))
        return on_each_device(self._run, call, ("btnd", "btn"))

    def _run(self, call: Call) -> tuple[jax.Array, jax.Array]:
        call = canonical(call)
        kernel = self.prepare(call)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(call)):
            return _differentiable(call, kernel)
        return deferred.compiled(_differentiable, call, kernel)

    @property
    def is_simulated(self) -> bool:
        """Whether its settings let it run on every platform, for tests; by default, if ``interpret`` is set."""
        return bool(getattr(self, "interpret", False))

    def lowering_reason(self, platform: str) -> str | None:
        """The reason against lowering the kernel in a program for ``platform``, or None."""
        if self.platform is not None and platform not in PLATFORMS[self.platform]:
            needed = {"cpu": "a CPU", "gpu": "an NVIDIA GPU", "tpu": "a TPU"}[self.platform]
            return f"it needs {needed}, not {platform}"
        return SEVERAL_DEVICES if self.platform is not None and deferred.is_partitioned() else None

    def check_lowering(self, platform: str) -> None:
        """Raises ``Unsupported`` with any ``lowering_reason``, unless the kernel is simulated."""
        reason = None if self.is_simulated else self.lowering_reason(platform)
        if reason is not None:
            raise Unsupported(f"implementation={self.name!r} cannot do this: {reason}")

    def _check(self, reason: str | None) -> None:
        if reason is not None:
            raise Unsupported(f"implementation={self!r} cannot do this: {reason}")


def _differentiable(call: Call, kernel: Kernel) -> tuple[jax.Array, jax.Array]:
    rule = {"backward": _backward, "alone": kernel.backward_is_for_qkv_alone, "returns_error": kernel.returns_error}
    rule |= {"lse": _lse if kernel.rounds_query else None, "formula": kernel.formula(call)}
    return backward.differentiable(_forward, _accumulate, call, kernel, **rule)


def _forward(platform: str, call: Call, kernel: Kernel, with_error: bool) -> Results:
    kernel.check_lowering(platform)
    is_part, call = call.query.dtype != call.key.dtype, narrowed(call)
    if is_part:
        return kernel.forward_of_part(platform, call, with_error)
    return kernel.forward_with_error(platform, call) if with_error else kernel.forward(platform, call)


def narrowed(call: Call) -> Call:
    """The call with its query in the keys' dtype.

    The query may come in the softmax's dtype, so that its gradient has that dtype.
    """
    return dataclasses.replace(call, query=call.query.astype(call.key.dtype))


def _accumulate(platform: str, call: Call, row_max: Array, kernel: Kernel) -> tuple[Array, Array]:
    return backward.accumulate(platform, call, row_max, kernel._block_sizes)


def _lse(platform: str, call: Call, kernel: Kernel) -> Array:
    """The lse ``[B,T,N]`` of blockwise's scores."""
    no_value = dataclasses.replace(call, value=call.key[..., :0])
    return online_softmax.log_sum_exp(*online_softmax.forward(platform, no_value, kernel._block_sizes)[1:])


def _backward(
    platform: str, inputs: tuple, cotangents: Sequence[Array | None], wanted: Sequence[int]
) -> Sequence[Array]:
    call, results, kernel = inputs
    dtype = call.query.dtype
    d_query, *others = kernel.backward(platform, call if kernel.wide_query else narrowed(call), results, cotangents)
    return d_query.astype(dtype), *others


@dataclasses.dataclass(frozen=True)
class PlainKernel(Kernel):
    """A ``Kernel`` that overrides only ``run``: JAX differentiates it."""

    def forward(self, platform: str, call: Call) -> Results:
        out, lse = self.run(call)
        seen = lse != -jnp.inf
        return out, jnp.where(seen, lse, jnp.finfo(lse.dtype).min), seen.astype(lse.dtype)

    def backward(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        run = lambda *qkv: self.run(dataclasses.replace(call, **dict(zip(("query", "key", "value"), qkv, strict=True))))
        (out, lse), pull = jax.vjp(run, call.query, call.key, call.value)
        d_out, d_row_sum = cotangents
        d_out = jnp.zeros_like(out) if d_out is None else d_out.astype(out.dtype)
        # lse = row_max + log(row_sum), at a constant row_max
        return pull((d_out, jnp.zeros_like(lse) if d_row_sum is None else d_row_sum * results[2]))

    def backward_of_part(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        """Uses blockwise: JAX's derivative of ``run`` would be for attention over the part alone."""
        return super().backward(platform, call, results, cotangents)


@dataclasses.dataclass(frozen=True)
class ReducingKernel(Kernel):
    """A ``Kernel`` that also reduces weights, with ``reduce``; blockwise computes the reductions' derivatives."""

    def reduce(self, platform: str, call: Call, reduction: Reduction) -> dict[str, Array]:
        """``reduction`` of a canonical call, traced for ``platform``."""
        return reduce_weights(call, reduction, self._block_sizes)

    def reduction_reason(self, call: Call, reduction: Reduction) -> str | None:
        """The first reason against ``reduction``, or None."""
        return self.unsupported_reason(dataclasses.replace(call, value=call.key))

    def slots(self, length: Length) -> None:
        return None

    def fold(self, call: Call, reduction: Reduction) -> dict[str, jax.Array]:
        self._check(self.reduction_reason(call, reduction))
        return deferred.call(_REDUCE, canonical(call), reduction, self, out=reduction.results(call))

    def map_parts(
        self, fn: Callable[..., PyTree], call: Call, out_axes: PyTree[str], *extra: tuple[jax.Array, str]
    ) -> PyTree[Array]:
        return on_each_device(fn, call, out_axes, *extra)


def _reduce_in_blocks(platform: str, call: Call, reduction: Reduction, kernel: Kernel) -> dict[str, Array]:
    return reduce_weights(call, reduction, kernel._block_sizes)


def _reduce(platform: str, call: Call, reduction: Reduction, kernel: ReducingKernel) -> dict[str, Array]:
    kernel.check_lowering(platform)
    return kernel.reduce(platform, call, reduction)


_REDUCE = deferred.CustomRules(_reduce_in_blocks, run=_reduce)
