"""The base classes of implementations: what all kernels have in common, and what a new one overrides."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jattn._blocks import backward, online_softmax
from jattn._blocks.plan import BlockSizes
from jattn._blocks.reduction import Reduction, reduce_weights
from jattn._core import deferred
from jattn._core.arguments import AttentionArgs
from jattn._core.shard import is_typed, may_be_sharded, on_each_device, per_device, replicated_on
from jattn._core.vmap import canonical
from jattn._mods.arrays import Length
from jattn.kernels.interface import Unsupported

# ``out [B,T,N,D]`` in the value's dtype; ``row_max`` and ``row_sum [B,T,N]`` as in ``jattn._blocks.online_softmax``; of
# ``forward_with_error`` also what rounding took from ``out``, in its dtype.
Results = tuple[Float[Array, "B T N D"], Float[Array, "B T N"], Float[Array, "B T N"], *tuple[Array, ...]]

SEVERAL_DEVICES = "the arrays may lie on several devices: use jax.shard_map or a mesh of AxisType.Explicit"
# The platforms that ``explain`` knows, and what JAX calls them where a program is lowered.
PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}


def _shapes(args: AttentionArgs) -> tuple[Length, ...]:
    return *args.query.shape, *args.key.shape


def _is_symbolic(args: AttentionArgs) -> bool:
    sizes = *_shapes(args), *(() if args.value is None else args.value.shape[3:])
    return not all(isinstance(size, int) for size in sizes)


# What a kernel refuses unless its ``takes`` names it: whether a call has it, and the reason. A new option goes here.
OPTIONS: Mapping[str, tuple[Callable[[AttentionArgs], bool], str]] = {
    "symbolic shapes": (_is_symbolic, "it takes no symbolic shapes"),
    "empty arrays": (lambda args: args.value is None or 0 in _shapes(args), "it takes no empty arrays"),
    "bias": (lambda args: args.bias is not None, "it takes no bias"),
    "mask array": (lambda args: args.has_mask_array, "it takes no mask array"),
    "score_mod": (lambda args: args.score_mod is not None, "it takes no score_mod"),
    "query positions": (lambda args: args.query_positions is not None, "it takes no positions of queries"),
    "key positions": (lambda args: args.kv_positions is not None, "it takes no positions of keys"),
    "dropout": (lambda args: args.dropout is not None, "it takes no dropout"),
    "precision": (lambda args: args.precision is not None, "it has no precision setting"),
    "several devices": (
        lambda args: (
            may_be_sharded(args)
            and not (is_typed(args.query) or is_typed(args.key))  # else ``on_each_device`` raises what is wrong
            and replicated_on(args) is None
        ),
        SEVERAL_DEVICES,
    ),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation in linear memory with the derivative rule of ``jattn._blocks.backward``.

    A subclass is a frozen dataclass of its settings, in a file of its own. To write one, override in this order:

    1. ``name``, and ``platform`` if it runs on one kind of device only.
    2. What it refuses. ``dtypes``; ``takes``, the ``OPTIONS`` that it supports: an option that is added later is
       refused until a kernel that lists its own names it; and ``refusals`` for all else.
    3. ``forward``. Now it is right: its derivatives are blockwise's, which computes the forward pass again in blocks.
    4. ``backward``, the gradients of query, key and value, if it has kernels for them. Forward mode, higher orders and
       the gradients of other arrays stay blockwise's. In 16 bits also ``forward_with_error``, with ``returns_error``:
       without it, the gradient of the query shows the rounding of ``out`` where keys have much in common.
    5. ``rounds_query`` if its log-sum-exp is not exactly that of the scores, ``prepare`` if it reads static arrays
       while tracing, and ``describe_work`` for ``jattn.explain``.

    Then ``jattn.testing.check`` holds it to every case, and a line in ``jattn.kernels.dispatch`` gives it its name. A
    kernel that leaves derivatives to JAX is a ``PlainKernel`` and overrides ``run``; one that also reduces weights for
    ``jattn.heads.statistics`` is a ``ReducingKernel``.

    ``forward`` and ``backward`` get a canonical call, that of ``jattn._core.vmap.canonical``: with a scale that is an
    array or None, and functions whose captured arrays are among its leaves.
    """

    name: ClassVar[str]  # as in ``implementation=``
    platform: ClassVar[str | None] = None  # "cpu", "gpu" or "tpu": the only one it runs on
    dtypes: ClassVar[tuple[DTypeLike, ...]] = ()  # of queries, keys and values; empty: any
    takes: ClassVar[frozenset[str]] = frozenset(OPTIONS)
    # Nobody has run it on its hardware yet: it is taken by name only. After a run, this field is all there is to
    # change.
    never_run: ClassVar[bool] = False
    # Its ``backward`` is used only where no array besides query, key and value has a gradient.
    backward_is_for_qkv_alone: ClassVar[bool] = False
    # It multiplies the query by the scale and rounds it, so its log-sum-exp is not that of blockwise's scores.
    rounds_query: ClassVar[bool] = False
    # Its backward pass takes a row's sum of d_out * out from the output in 16 bits: the gradient of the query is off by
    # what is lost times what the keys have in common.
    reads_rounded_output: ClassVar[bool] = False
    # ``forward_with_error`` knows what rounding took from ``out``.
    returns_error: ClassVar[bool] = False
    # ``backward`` also takes a query in the softmax's dtype, of numbers in the keys': its gradient, from a part of the
    # keys, is then one of several that are summed up, and is not rounded where the kernel can do without.
    wide_query: ClassVar[bool] = False

    def refusals(self, args: AttentionArgs) -> Iterable[tuple[bool, str]]:
        """Further pairs of a condition and the reason that it gives against the kernel, in the order that counts."""
        return ()

    def refusal_at_lowering(self, args: AttentionArgs) -> str | None:
        """A reason against taking the kernel unasked that is known only where the program is lowered, or None."""
        return None

    def describe_work(self, platform: str, args: AttentionArgs) -> str | None:
        """How much of the matrix its forward pass of a canonical call computes, as a predicate; None if not known."""
        return None

    def prepare(self, args: AttentionArgs) -> "Kernel":
        """The kernel for one canonical call, with what it reads of static arrays while tracing."""
        return self

    def forward(self, platform: str, args: AttentionArgs) -> Results:
        """``out``, ``row_max`` and ``row_sum`` of a canonical call, traced for ``platform``."""
        raise NotImplementedError

    def forward_with_error(self, platform: str, args: AttentionArgs) -> Results:
        """``forward``, and what rounding took from ``out``: for the derivatives of calls in 16 bits; 0 if not known."""
        results = self.forward(platform, args)
        return *results, jnp.zeros_like(results[0])

    def backward(
        self, platform: str, args: AttentionArgs, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        """The cotangents of query, key and value, as in ``jattn._blocks.backward.differentiable``."""
        return backward.gradients_of_qkv(platform, args, results, cotangents, self._block_sizes)

    def backward_of_part(
        self, platform: str, args: AttentionArgs, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        """``backward`` for a part of the keys, with the results for all of them, as in a hop of a ring."""
        return self.backward(platform, args, results, cotangents)

    @property
    def _block_sizes(self) -> BlockSizes:
        """The sizes of the blocks in all derivatives that are blockwise's."""
        return None

    def unsupported_reason(self, args: AttentionArgs) -> str | None:
        """The first reason against the kernel, or None."""
        dtype, names = args.key.dtype, [jnp.dtype(x).name for x in self.dtypes]
        if names and dtype.name not in names:
            return f"it takes {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}, not {dtype}"
        for option, (applies, reason) in OPTIONS.items():
            if option not in self.takes and applies(args):
                return reason
        return next((reason for applies, reason in self.refusals(args) if applies), None)

    def run(self, args: AttentionArgs) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``; O(T + S) memory besides inputs and outputs, forward and backward."""
        self._check(self.unsupported_reason(args))  # given as an object, it was not asked before
        everywhere = replicated_on(args) if self.platform else None  # XLA cannot place a kernel on several devices
        if everywhere is not None:
            return per_device(self._run, args, everywhere, ("btnd", "btn"))
        return on_each_device(self._run, args, ("btnd", "btn"))

    def _run(self, args: AttentionArgs) -> tuple[jax.Array, jax.Array]:
        args, lse = canonical(args), _lse if self.rounds_query else None
        rule = {"backward": _backward, "alone": self.backward_is_for_qkv_alone, "lse": lse}
        rule |= {"returns_error": self.returns_error}
        return backward.differentiable(_forward, _accumulate, args, self.prepare(args), **rule)

    @property
    def is_simulated(self) -> bool:
        """Whether its settings let it run on every platform, for tests; by default, if a field ``interpret`` is set."""
        return bool(getattr(self, "interpret", False))

    def lowering_reason(self, platform: str) -> str | None:
        """The reason against lowering the kernel in a program for ``platform``, or None."""
        if self.platform is not None and platform not in PLATFORMS[self.platform]:
            needed = {"cpu": "a CPU", "gpu": "an NVIDIA GPU", "tpu": "a TPU"}[self.platform]
            return f"it needs {needed}, not {platform}"
        return SEVERAL_DEVICES if self.platform is not None and deferred.is_partitioned() else None

    def check_lowering(self, platform: str) -> None:
        """Raises ``Unsupported`` for ``lowering_reason``, unless the kernel is simulated."""
        reason = None if self.is_simulated else self.lowering_reason(platform)
        if reason is not None:
            raise Unsupported(f"implementation={self.name!r} cannot do this: {reason}")

    def _check(self, reason: str | None) -> None:
        if reason is not None:
            raise Unsupported(f"implementation={self!r} cannot do this: {reason}")


def _forward(platform: str, args: AttentionArgs, kernel: Kernel, with_error: bool) -> Results:
    kernel.check_lowering(platform)
    args = narrowed(args)
    return kernel.forward_with_error(platform, args) if with_error else kernel.forward(platform, args)


def narrowed(args: AttentionArgs) -> AttentionArgs:
    """The call with its query in the dtype of its keys; it may be in the softmax's, so that its gradient is, too."""
    return dataclasses.replace(args, query=args.query.astype(args.key.dtype))


def _accumulate(platform: str, args: AttentionArgs, row_max: Array, kernel: Kernel) -> tuple[Array, Array]:
    return backward.accumulate(platform, args, row_max, kernel._block_sizes)


def _lse(platform: str, args: AttentionArgs, kernel: Kernel) -> Array:
    """``[B,T,N]``, of blockwise's scores."""
    no_value = dataclasses.replace(args, value=args.key[..., :0])
    return online_softmax.log_sum_exp(*online_softmax.forward(platform, no_value, kernel._block_sizes)[1:])


def _backward(
    platform: str, inputs: tuple, cotangents: Sequence[Array | None], wanted: Sequence[int]
) -> Sequence[Array]:
    args, results, kernel = inputs
    dtype = args.query.dtype
    d_query, *others = kernel.backward(platform, args if kernel.wide_query else narrowed(args), results, cotangents)
    return d_query.astype(dtype), *others


@dataclasses.dataclass(frozen=True)
class PlainKernel(Kernel):
    """A ``Kernel`` that overrides ``run`` alone: JAX differentiates it."""

    def forward(self, platform: str, args: AttentionArgs) -> Results:
        out, lse = self.run(args)
        seen = lse != -jnp.inf
        return out, jnp.where(seen, lse, jnp.finfo(lse.dtype).min), seen.astype(lse.dtype)

    def backward(
        self, platform: str, args: AttentionArgs, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        run = lambda *qkv: self.run(dataclasses.replace(args, **dict(zip(("query", "key", "value"), qkv, strict=True))))
        (out, lse), pull = jax.vjp(run, args.query, args.key, args.value)
        d_out, d_row_sum = cotangents
        d_out = jnp.zeros_like(out) if d_out is None else d_out.astype(out.dtype)
        # lse = row_max + log(row_sum), at a constant row_max
        return pull((d_out, jnp.zeros_like(lse) if d_row_sum is None else d_row_sum * results[2]))

    def backward_of_part(
        self, platform: str, args: AttentionArgs, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        """By blockwise: JAX's derivative of ``run`` is that of attention over the part alone."""
        return super().backward(platform, args, results, cotangents)


@dataclasses.dataclass(frozen=True)
class ReducingKernel(Kernel):
    """A ``Kernel`` that also reduces weights, by ``reduce``; the derivatives of the reductions are blockwise's."""

    def reduce(self, platform: str, args: AttentionArgs, reduction: Reduction) -> dict[str, Array]:
        """``reduction`` of a canonical call, traced for ``platform``."""
        return reduce_weights(args, reduction, self._block_sizes)

    def reduction_reason(self, args: AttentionArgs, reduction: Reduction) -> str | None:
        """The first reason against ``reduction``, or None."""
        return self.unsupported_reason(dataclasses.replace(args, value=args.key))

    def slots(self, length: Length) -> None:
        return None

    def fold(self, args: AttentionArgs, reduction: Reduction) -> dict[str, jax.Array]:
        self._check(self.reduction_reason(args, reduction))
        return deferred.call(_REDUCE, canonical(args), reduction, self, out=reduction.results(args))

    def map_parts(
        self, fn: Callable[..., PyTree], args: AttentionArgs, out_axes: PyTree[str], *extra: tuple[jax.Array, str]
    ) -> PyTree[Array]:
        return on_each_device(fn, args, out_axes, *extra)


def _reduce_in_blocks(platform: str, args: AttentionArgs, reduction: Reduction, kernel: Kernel) -> dict[str, Array]:
    return reduce_weights(args, reduction, kernel._block_sizes)


def _reduce(platform: str, args: AttentionArgs, reduction: Reduction, kernel: ReducingKernel) -> dict[str, Array]:
    kernel.check_lowering(platform)
    return kernel.reduce(platform, args, reduction)


_REDUCE = deferred.CustomRules(_reduce_in_blocks, run=_reduce)
