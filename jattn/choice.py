"""Which implementation ``jattn.dot_product_attention`` uses."""

import dataclasses
from typing import Any

import jax

from jattn import staged
from jattn.attention import softmax_dtype
from jattn.batching import canonical
from jattn.kernels import Implementation, Unsupported, cudnn, xla
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.decode import Decode
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash
from jattn.request import Request

# ``implementation=None`` takes the first that supports the request, and "decode" and "blockwise" only where they pay
# off (``_pays``). Those after xla are used by name only, until the conformance table has passed on a GPU or a TPU.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "decode": Decode(),
    "blockwise": Blockwise(),
    "xla": xla,
    "cudnn": cudnn,
    "splash": Splash(),
    "pallas_tpu": PallasTPU(),
}

# "blockwise" from this T * S on: there the dense matrix takes more time than the loop over blocks (measured on CPU:
# experiments/results), and more memory anyway. With fewer than FEW queries or keys the matrix grows only linearly.
PAIRS, FEW = 2**20, 16
# "blockwise" from this B * N * T * S on: 256 MiB of dense scores in float32.
SCORES = 2**26
# "decode" from this many numbers in the keys per query on (measured on CPU).
KEYS = 2**20
# "decode" up to this T * K: multiplying all query heads with all key heads then costs less than transposing the keys.
TOGETHER = 64


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


def choose(request: Request, named: str | None) -> Implementation:
    """The named implementation, or the first that supports the request and pays off.

    Raises:
        Unsupported: the named implementation does not support the request.
    """
    if named is None:
        names = _by_platform(request)
        return names if names.cpu != names.others else IMPLEMENTATIONS[names.cpu]
    reason = by_name(named).unsupported_reason(request)
    if reason is not None:
        raise Unsupported(f"implementation={named!r} cannot do this: {reason}; implementation=None picks one that can")
    return IMPLEMENTATIONS[named]


def _by_platform(request: Request) -> ByPlatform:
    def first(platform: str) -> str:
        order = [name for name in IMPLEMENTATIONS if _pays(name, request, platform)]
        return next(name for name in order if IMPLEMENTATIONS[name].unsupported_reason(request) is None)

    return ByPlatform(first("cpu"), first("others"))


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


def explain_choice(request: Request, implementation: Any) -> str:
    """The choice and the reasons against the others, one line each."""
    if implementation is not None and not isinstance(implementation, str):
        reason = check_implementation(implementation).unsupported_reason(request)
        return f"{type(implementation).__name__}: given, as an object" + ("" if reason is None else f", but {reason}")
    reasons = {name: candidate.unsupported_reason(request) for name, candidate in IMPLEMENTATIONS.items()}
    if implementation is not None:
        by_name(implementation)
        reason = reasons[implementation]
        taken = [implementation]
        lines = [f"{implementation}: " + ("taken by name" if reason is None else f"named, but {reason}")]
    else:
        names = _by_platform(request)
        taken = [names.cpu, names.others]
        lines = [f"{names.cpu}: taken"]
        if names.cpu != names.others:
            lines = [f"{names.cpu}: taken on CPU", f"{names.others}: taken elsewhere"]
    for name, reason in reasons.items():
        if name not in taken:
            lines.append(f"{name}: {reason or f'also possible, by name{_where_it_pays(name, request)}'}")
    return "\n".join(lines)


def _where_it_pays(name: str, request: Request) -> str:
    if _pays(name, request, "cpu"):
        return ""
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
