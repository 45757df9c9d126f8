"""Which implementation ``jattn.dot_product_attention`` uses."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jattn import staged
from jattn.attention import softmax_dtype
from jattn.batching import canonical
from jattn.kernels import Fold, Implementation, Program, Unsupported, xla
from jattn.kernels.blockwise import Blockwise, accumulate, staged_fold
from jattn.kernels.cudnn import Cudnn
from jattn.kernels.decode import Decode
from jattn.kernels.native import Native
from jattn.kernels.pallas_gpu import PallasGPU
from jattn.kernels.pallas_tpu import PallasTPU, fold_on_tpu
from jattn.kernels.splash import Splash
from jattn.online_softmax import differentiable
from jattn.placement import may_be_divided, on_each_device
from jattn.request import Request

# ``implementation=None`` takes the first that supports the request, and "decode" and "blockwise" only where they pay
# off (``_pays``). xla supports everything, so those after it are taken by name only, or for blockwise: ``IN_BLOCKS``.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "decode": Decode(),
    "blockwise": Blockwise(),
    "xla": xla,
    "cudnn": Cudnn(),
    "splash": Splash(),
    "pallas_tpu": PallasTPU(),
    "pallas_gpu": PallasGPU(),
    "native": Native(),
}
# Those that need a platform.
ONLY = {"cudnn": "gpu", "splash": "tpu", "pallas_tpu": "tpu", "pallas_gpu": "gpu", "native": "cpu"}
# Where blockwise pays off, a platform's first of these that supports the request. Kernels that others run, too, come
# before ours. pallas_gpu does not: nobody has run it yet. Nor does native: what a call computes on a CPU shall not
# depend on whether another package is installed.
IN_BLOCKS = {"tpu": ("splash", "pallas_tpu", "blockwise"), "cuda": ("cudnn", "blockwise")}
# cudnn from this JAX on: before, it broadcast keys that a vmap shares wrongly.
CUDNN_SINCE = (0, 11, 2)

# "blockwise" from this T * S on: there the dense matrix takes more time than the loop over blocks (measured on CPU:
# experiments/results), and more memory anyway. With fewer than FEW queries or keys the matrix grows only linearly.
PAIRS, FEW = 2**20, 16
# "blockwise" from this B * N * T * S on: 256 MiB of dense scores in float32.
SCORES = 2**26
# "decode" from this many numbers in the keys per query on (measured on CPU).
KEYS = 2**20
# "decode" up to this T * K: multiplying all query heads with all key heads then costs less than transposing the keys.
TOGETHER = 64


# The platforms that ``explain`` knows, and what JAX calls them where a program is lowered.
PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}


@dataclasses.dataclass(frozen=True)
class ByPlatform:
    """One implementation on CPU, another elsewhere; resolved when the program is lowered."""

    cpu: str
    others: str

    def unsupported_reason(self, request: Request) -> str | None:
        """None: both support the request."""
        return None

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``."""
        (B, T, N, _), D = request.query.shape, request.value.shape[3]
        lse = jax.ShapeDtypeStruct((B, T, N), softmax_dtype(request.query))
        out = jax.ShapeDtypeStruct((B, T, N, D), request.value.dtype)
        return staged.call(_run, canonical(request), self, out=(out, lse))


def _run(platform: str, request: Request, names: ByPlatform) -> tuple[jax.Array, jax.Array]:
    return IMPLEMENTATIONS[names.cpu if platform == "cpu" else names.others].run(request)


@dataclasses.dataclass(frozen=True)
class InBlocks:
    """Linear memory: the platform's first of ``IN_BLOCKS`` that supports the request; resolved at lowering.

    All of them keep the same sums for the backward pass, so it runs no forward pass again. Where arrays besides query,
    key and value have gradients, all gradients are blockwise's.
    """

    def unsupported_reason(self, request: Request) -> str | None:
        """None: blockwise supports every request."""
        return None

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``."""
        divided = may_be_divided(request)
        return differentiable(_forward, _accumulate, canonical(request), divided, backward=_backward, alone=True)


def _forward(platform: str, request: Request, divided: bool) -> Any:
    forward, _, static = _program(platform, request, divided)
    return forward(platform, request, *static)


def _backward(platform: str, args: tuple, cotangents: Sequence[Any]) -> Any:
    request, results, divided = args
    _, backward, static = _program(platform, request, divided)
    return backward(platform, (request, results, *static), cotangents)


def _accumulate(platform: str, request: Request, row_max: jax.Array, divided: bool) -> Any:
    return accumulate(platform, request, row_max, None, divided)


def _program(platform: str, request: Request, divided: bool) -> Program:
    implementation: Any = IMPLEMENTATIONS[in_blocks(platform, request, divided)]
    return implementation.program(request, divided)


def in_blocks(platform: str, request: Request, divided: bool) -> str:
    """The first of ``IN_BLOCKS`` that supports a canonical request, whose arrays may be ``divided`` over devices."""
    names = ("blockwise",) if divided or staged.is_partitioned() else IN_BLOCKS.get(platform, ("blockwise",))
    return next(name for name in names if _on_one_device(_reason_here, name, request) is None)


def _reason_here(name: str, request: Request) -> str | None:
    """The first reason against an implementation of the program that is being lowered."""
    implementation = IMPLEMENTATIONS[name]
    reason = implementation.unsupported_reason(request)
    if reason is not None or not isinstance(implementation, Cudnn):
        return reason
    if jax.__version_info__ < CUDNN_SINCE:
        return f"it is the default from JAX {'.'.join(map(str, CUDNN_SINCE))} on"
    return "jax.export does not take its calls" if staged.is_exported() else implementation.refusal(request)


def _on_one_device(fn: Callable, *args: Any) -> Any:
    """``fn(*args)`` for arrays of one device. Kernels refuse others, and the current mesh makes them look so."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return fn(*args)


@dataclasses.dataclass(frozen=True)
class FoldInBlocks:
    """Folds by ``"pallas_tpu"`` where that supports it and the program is lowered for a TPU, otherwise as blockwise."""

    def slots(self, length: Any) -> None:
        """None: each slot holds its own token."""
        return None

    def fold(self, request: Request, fold: Fold) -> dict[str, jax.Array]:
        """As in ``jattn.kernels.FoldsWeights``."""
        if may_be_divided(request) or 0 in (*request.query.shape, *request.key.shape):
            return Blockwise().fold(request, fold)
        return staged_fold(_fold, request, fold, None)

    def map_parts(self, fn: Callable, request: Request, out_axes: Any, *extra: tuple[jax.Array, str]) -> Any:
        """``jattn.placement.on_each_device``."""
        return on_each_device(fn, request, out_axes, *extra)


def _fold(platform: str, request: Request, fold: Fold, _: None) -> dict[str, jax.Array]:
    kernel = PallasTPU()
    if platform == "tpu" and not staged.is_partitioned() and _on_one_device(kernel.fold_reason, request, fold) is None:
        return fold_on_tpu(platform, request, fold, kernel)
    return Blockwise().fold(request, fold)


def choose(request: Request, named: str | None) -> Implementation:
    """The named implementation, or the first that supports the request and pays off.

    Raises:
        Unsupported: the named implementation does not support the request.
    """
    if named is None:
        cpu, others = (_first(request, platform) for platform in ("cpu", "others"))
        if cpu != others:
            return ByPlatform(cpu, others)
        return InBlocks() if cpu == "blockwise" else IMPLEMENTATIONS[cpu]
    reason = by_name(named).unsupported_reason(request)
    if reason is not None:
        raise Unsupported(f"implementation={named!r} cannot do this: {reason}; implementation=None picks one that can")
    return IMPLEMENTATIONS[named]


def _first(request: Request, platform: str) -> str:
    names = [name for name in IMPLEMENTATIONS if _pays(name, request, platform)]
    return next(name for name in names if IMPLEMENTATIONS[name].unsupported_reason(request) is None)


def _taken(request: Request, platform: str, divided: bool) -> str:
    """What ``choose`` takes on a platform of ``PLATFORMS``."""
    name = _first(request, platform)
    if name != "blockwise":
        return name
    return staged.at_lowering(functools.partial(in_blocks, PLATFORMS[platform][0]), canonical(request), divided)


def _pays(name: str, request: Request, platform: str) -> bool:
    """Whether the implementation's loop pays off at these sizes."""
    (B, T, N, _), (S, K) = request.query.shape, request.key.shape[1:3]
    if name not in ("decode", "blockwise"):
        return True
    if not isinstance(T, int) or not isinstance(S, int):
        return False
    if name == "decode":
        keys = request.key.size if isinstance(B, int) else request.key.size // B
        return platform == "cpu" and 0 < T < FEW and K * T <= TOGETHER and keys >= T * KEYS
    many = isinstance(B, int) and B * N * T * S >= SCORES
    return (T * S >= PAIRS or many) and min(T, S) >= FEW


def explain_choice(request: Request, implementation: Any, platform: str | None, divided: bool) -> str:
    """The choice on a platform, or on each, and the reasons against the others, one line each."""
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(f"platform must be None or one of {', '.join(PLATFORMS)}, got {platform!r}")
    if implementation is not None and not isinstance(implementation, str):
        reason = check_implementation(implementation).unsupported_reason(request)
        return f"{type(implementation).__name__}: given, as an object" + ("" if reason is None else f", but {reason}")
    platforms = tuple(PLATFORMS) if platform is None else (platform,)
    reasons = {name: _reason(name, request, platforms) for name in IMPLEMENTATIONS}
    if implementation is not None:
        by_name(implementation)
        reason = reasons[implementation]
        on = {implementation: ()}
        lines = [f"{implementation}: " + ("taken by name" if reason is None else f"named, but {reason}")]
    else:
        on = {}
        for one in platforms:
            on.setdefault(_taken(request, one, divided), []).append(one.upper())
        everywhere = len(on) == 1 and platform is None
        lines = [f"{name}: taken" + ("" if everywhere else f" on {' and '.join(on[name])}") for name in on]
    for name, reason in reasons.items():
        if name not in on:
            lines.append(f"{name}: {reason or f'also possible, by name{_where_it_pays(name, request)}'}")
    return "\n".join(lines)


def _reason(name: str, request: Request, platforms: tuple[str, ...]) -> str | None:
    only = ONLY.get(name)
    if only is not None and only not in platforms:
        return f"it needs a {only.upper()}"
    return IMPLEMENTATIONS[name].unsupported_reason(request)


def _where_it_pays(name: str, request: Request) -> str:
    on = f", on a {ONLY[name].upper()}" if name in ONLY else ""
    if name not in ("decode", "blockwise") or _pays(name, request, "cpu"):
        return on
    if name == "decode":
        return (
            f"; faster on CPU for fewer than {FEW} queries, T * K up to {TOGETHER}, and {KEYS} or more numbers in the "
            "keys per query"
        )
    return f"; faster from T * S = {PAIRS}, saves memory from B * N * T * S = {SCORES}"


def check_implementation(implementation: Any) -> Implementation:
    """An ``implementation`` given as an object, checked."""
    if isinstance(implementation, type) or not isinstance(implementation, Implementation):
        raise TypeError(
            f"implementation must be a name, an object with unsupported_reason and run, or None, got {implementation!r}"
        )
    return implementation


def by_name(name: str) -> Implementation:
    """The implementation of that name."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name]
