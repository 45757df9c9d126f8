"""Chooses what ``jattn.dot_product_attention`` runs, from one table read while tracing and at lowering."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from jaxtyping import Array

from jattn._blocks.reduction import Reduction
from jattn._core import deferred
from jattn._core.call import Call
from jattn._core.vmap import canonical
from jattn._mods.arrays import without_mesh
from jattn._mods.pytree import holds_plain_function
from jattn.kernels import dense
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.cudnn import Cudnn
from jattn.kernels.decode import Decode
from jattn.kernels.dense import Dense
from jattn.kernels.interface import Implementation, OverDevices, Unsupported
from jattn.kernels.kernel import MIN_SCORES, PLATFORMS, Kernel, ReducingKernel, Results, narrowed
from jattn.kernels.native import Native
from jattn.kernels.pallas_gpu import PallasGPU
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash

IMPLEMENTATIONS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (Decode(), Blockwise(), Dense(), Cudnn(), Splash(), PallasTPU(), PallasGPU(), Native())
}
# The candidates for ``implementation=None`` on each platform: the first that pays off (``Kernel.pays``) and supports
# the call is taken. Widely used kernels come before our own. A kernel never run on its hardware (``Kernel.never_run``)
# is skipped.
ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "decode", "blockwise", "xla"),
    "cuda": ("cudnn", "pallas_gpu", "blockwise", "xla"),
    "rocm": ("blockwise", "xla"),
    "tpu": ("splash", "pallas_tpu", "blockwise", "xla"),
}


@dataclasses.dataclass(frozen=True)
class Dispatch(ReducingKernel):
    """``implementation=None``: each platform's choice, resolved when the program is lowered.

    If arrays other than query, key and value have gradients, blockwise computes all gradients, or JAX differentiates
    the dense formula where blocks do not pay off.
    """

    name: ClassVar[str] = "by platform"  # not a name to pass: no table contains it
    backward_is_for_qkv_alone: ClassVar[bool] = True
    returns_error: ClassVar[bool] = True
    wide_query: ClassVar[bool] = True

    def kernel(self, platform: str, call: Call) -> Kernel:
        """The attention kernel chosen for a canonical call in the program being lowered."""

        def takes(kernel: Kernel) -> bool:
            reason = kernel.unsupported_reason(call) or kernel.lowering_reason(platform)
            return (reason or kernel.refusal_at_lowering(call)) is None

        return _first(platform, call, lambda kernel: kernel.pays(call) and takes(kernel))

    def formula(self, call: Call) -> Callable[[Call], tuple[Array, Array]] | None:
        scores = math.prod(size for size in (*call.query.shape[:3], call.key.shape[1]) if isinstance(size, int))
        in_blocks = IMPLEMENTATIONS["blockwise"].pays(call) or scores >= MIN_SCORES
        return None if in_blocks else dense.formula

    def forward(self, platform: str, call: Call) -> Results:
        return self.kernel(platform, call).forward(platform, call)

    def forward_with_error(self, platform: str, call: Call) -> Results:
        return self.kernel(platform, call).forward_with_error(platform, call)

    def forward_of_part(self, platform: str, call: Call, with_error: bool = True) -> Results:
        return self.kernel(platform, call).forward_of_part(platform, call, with_error)

    def backward(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        kernel = self.kernel(platform, call)
        call = call if kernel.wide_query else narrowed(call)
        return kernel.backward(platform, call, results if kernel.returns_error else results[:3], cotangents)

    def reduce(self, platform: str, call: Call, reduction: Reduction) -> dict[str, Array]:
        """Computed by the first kernel that reduces weights and supports this reduction."""
        empty = 0 in (*call.query.shape, *call.key.shape)

        def takes(kernel: Kernel) -> bool:
            if not isinstance(kernel, ReducingKernel) or kernel.platform and empty:
                return False
            return (kernel.reduction_reason(call, reduction) or kernel.lowering_reason(platform)) is None

        kernel = _first(platform, call, takes)
        assert isinstance(kernel, ReducingKernel)
        return kernel.reduce(platform, call, reduction)


def _first(platform: str, call: Call, takes: Callable[[Kernel], bool]) -> Kernel:
    """The first kernel in ``ORDER`` that accepts the call."""
    several = call.sharded or deferred.is_partitioned()  # a kernel for one platform runs on one device
    kernels = (IMPLEMENTATIONS[name] for name in ORDER[platform])
    with without_mesh():
        return next(k for k in kernels if not (k.never_run or k.platform and several) and takes(k))


def choose(call: Call, named: str | None) -> Kernel:
    """The named implementation, or each platform's default choice.

    Raises:
        Unsupported: the named implementation does not support the call.
    """
    if named is None:
        # Only where a platform may take something else: ``Dispatch`` has its own derivative rule, for any order.
        others = (IMPLEMENTATIONS[name] for name in ("decode", "blockwise", "native"))
        pays = any(kernel.pays(call) and kernel.unsupported_reason(call) is None for kernel in others)
        return Dispatch() if pays else IMPLEMENTATIONS["xla"]
    reason = by_name(named).unsupported_reason(call)
    if reason is not None:
        raise Unsupported(f"implementation={named!r} cannot do this: {reason}; implementation=None picks one that can")
    return IMPLEMENTATIONS[named]


def _taken(call: Call, platform: str, sharded: bool) -> str:
    """The name of the kernel that ``choose(call, None)`` picks on a platform in ``PLATFORMS``."""
    lowered, platform_of = dataclasses.replace(canonical(call), sharded=sharded), PLATFORMS[platform][0]
    if choose(call, None).name == "xla":
        return "xla"
    return deferred.at_lowering(lambda call: Dispatch().kernel(platform_of, call).name, lowered)


def explain_choice(call: Call, implementation: object, platform: str | None, sharded: bool) -> str:
    """The choice on one or every platform, and the reasons against the other kernels, one line each."""
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(f"platform must be None or one of {', '.join(PLATFORMS)}, got {platform!r}")
    platforms = tuple(PLATFORMS) if platform is None else (platform,)
    if implementation is not None and not isinstance(implementation, str):
        kernel = check_implementation(implementation)
        if isinstance(kernel, OverDevices):
            of_part = lambda part, named: explain_choice(part, named, platform, part.sharded)
            return "\n".join(kernel.describe(call, of_part))
        reason = kernel.unsupported_reason(call)
        line = f"{type(implementation).__name__}: given, as an object"
        if reason is not None or not isinstance(implementation, Kernel):
            return line + ("" if reason is None else f", but {reason}")
        return "\n".join([line, *_work(implementation.prepare(canonical(call)), call, platforms, sharded)])
    reasons = {name: _reason(name, call, platforms) for name in IMPLEMENTATIONS}
    if implementation is not None:
        by_name(implementation)
        reason = reasons[implementation]
        on = {implementation: ()}
        lines = [f"{implementation}: " + ("taken by name" if reason is None else f"named, but {reason}")]
        if reason is None:
            lines += _work(IMPLEMENTATIONS[implementation].prepare(canonical(call)), call, platforms, sharded)
    else:
        on = {}
        for one in platforms:
            on.setdefault(_taken(call, one, sharded), []).append(one.upper())
        everywhere = len(on) == 1 and platform is None
        lines = [f"{name}: taken" + ("" if everywhere else f" on {' and '.join(on[name])}") for name in on]
        for name, taken_on in on.items():
            lines += _work(IMPLEMENTATIONS[name], call, [one.lower() for one in taken_on], sharded)
    for name, reason in reasons.items():
        if name not in on:
            lines.append(f"{name}: {reason or f'also possible, by name{_where_it_pays(name, call)}'}")
    return "\n".join(lines)


def _work(kernel: Kernel, call: Call, platforms: Sequence[str], sharded: bool) -> list[str]:
    """How a kernel multiplies, and how much of the masked matrix it computes, one line for all platforms that agree."""
    products = kernel.describe_products(call)
    lines = [] if products is None else [f"{kernel.name} {products}"]
    if not call.masks and not call.slot_masks:
        return lines
    lowered = dataclasses.replace(canonical(call), sharded=sharded)
    on: dict[str | None, list[str]] = {}
    for platform in platforms:
        if kernel.platform in (None, platform):
            text = deferred.at_lowering(_describe_work, kernel, PLATFORMS[platform][0], lowered)
            on.setdefault(text, []).append(platform.upper())
    for text, names in on.items():
        if text is not None:
            lines.append(f"{kernel.name} {text}" + ("" if len(on) == 1 else f" on {' and '.join(names)}"))
            if " 100% " in text and any(map(holds_plain_function, call.masks)):
                lines[-1] += "; block_mask finds the empty ones of a plain function"
    return lines


def _describe_work(kernel: Kernel, platform: str, call: Call) -> str | None:
    with without_mesh():
        return kernel.describe_work(platform, call)


def _reason(name: str, call: Call, platforms: tuple[str, ...]) -> str | None:
    kernel = IMPLEMENTATIONS[name]
    if kernel.platform is not None and kernel.platform not in platforms:
        return f"it needs a {kernel.platform.upper()}"
    return kernel.unsupported_reason(call)


def _where_it_pays(name: str, call: Call) -> str:
    kernel = IMPLEMENTATIONS[name]
    on = f", on a {kernel.platform.upper()}" if kernel.platform else ""
    on += "; never run on hardware" if kernel.never_run else ""
    return on if not kernel.pays_when or kernel.pays(call) else f"{on}; {kernel.pays_when}"


def check_implementation(implementation: object) -> Implementation:
    """The checked ``implementation``, given as an object."""
    if isinstance(implementation, type) or not isinstance(implementation, Implementation):
        raise TypeError(
            f"implementation must be a name, an object with unsupported_reason and run, or None, got {implementation!r}"
        )
    return implementation


def by_name(name: str) -> Kernel:
    """The implementation with this name."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name]
