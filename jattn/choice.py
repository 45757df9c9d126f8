"""Which implementation ``jattn.dot_product_attention`` takes."""

import dataclasses
from typing import Any

import jax

from jattn import staged
from jattn.attention import softmax_dtype
from jattn.kernels import Implementation, Unsupported, cudnn, xla
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.decode import Decode
from jattn.kernels.lift import ready
from jattn.request import Request

# The order in which ``implementation=None`` tries them: it takes the first whose ``why_not`` has no objection, and
# "decode" and "blockwise" only where they pay (``_pays``). cudnn stands behind xla, so it is taken by name alone, until
# the conformance table has passed on a GPU.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "decode": Decode(), "blockwise": Blockwise(), "xla": xla, "cudnn": cudnn,
}  # fmt: skip

# T * S of a head, from where on the dense matrix costs more time than the loop over its blocks (measured on CPU:
# experiments/results), and memory anyway. Beside few queries or keys the matrix itself grows linearly.
PAIRS, FEW = 2**20, 16
# B * N * T * S, from where on dense scores are not held at once: 256 MiB of them in float32.
SCORES = 2**26
# Numbers in all keys for each query, from where on reading them chunk by chunk pays (measured on CPU).
KEYS = 2**20
# T * K, up to where the products of all query heads with all key heads cost less than turning the keys round.
TOGETHER = 64


@dataclasses.dataclass(frozen=True)
class ByPlatform:
    """One implementation on a CPU, another elsewhere: which it is shows when the program is lowered."""

    cpu: str
    others: str

    def why_not(self, request: Request) -> str | None:
        """None: each was asked."""
        return None

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``."""
        (B, T, N, _), D = request.query.shape, request.value.shape[3]
        lse = jax.ShapeDtypeStruct((B, T, N), softmax_dtype(request.query))
        out = jax.ShapeDtypeStruct((B, T, N, D), request.value.dtype)
        return staged.call(_run, ready(request), self, out=(out, lse))


def _run(platform: str, request: Request, names: ByPlatform) -> tuple[jax.Array, jax.Array]:
    return IMPLEMENTATIONS[names.cpu if platform == "cpu" else names.others].run(request)


def choose(request: Request, named: str | None) -> Implementation:
    """The implementation named, or the first that can and pays.

    Raises:
        Unsupported: the named one cannot.
    """
    if named is None:
        names = _by_platform(request)
        return names if names.cpu != names.others else IMPLEMENTATIONS[names.cpu]
    reason = known(named).why_not(request)
    if reason is not None:
        raise Unsupported(f"implementation={named!r} cannot do this: {reason}; implementation=None takes one that can")
    return IMPLEMENTATIONS[named]


def _by_platform(request: Request) -> ByPlatform:
    def first(platform: str) -> str:
        order = [name for name in IMPLEMENTATIONS if _pays(name, request, platform)]
        return next(name for name in order if IMPLEMENTATIONS[name].why_not(request) is None)

    return ByPlatform(first("cpu"), first("others"))


def _pays(name: str, request: Request, platform: str) -> bool:
    """Is the implementation worth its loop at these lengths?"""
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
    """The choice and every reason as text, a line each."""
    if implementation is not None and not isinstance(implementation, str):
        reason = object_given(implementation).why_not(request)
        return f"{type(implementation).__name__}: given, as an object" + ("" if reason is None else f", but {reason}")
    reasons = {name: one.why_not(request) for name, one in IMPLEMENTATIONS.items()}
    if implementation is not None:
        known(implementation)
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
            lines.append(f"{name}: {reason or f'could, too; name it to take it{_where_it_pays(name, request)}'}")
    return "\n".join(lines)


def _where_it_pays(name: str, request: Request) -> str:
    if _pays(name, request, "cpu"):
        return ""
    if name == "decode":
        return (
            f"; faster on CPU, below {FEW} queries, up to {TOGETHER} of them over all key heads (T * K), from {KEYS} "
            "numbers in the keys on for each"
        )
    return f"; faster from T * S = {PAIRS} on, smaller from B * N * T * S = {SCORES}"


def object_given(implementation: Any) -> Implementation:
    """An ``implementation`` that is no name, checked."""
    if isinstance(implementation, type) or not isinstance(implementation, Implementation):
        raise TypeError(
            f"implementation must be a name, an object with why_not and run, or None, got {implementation!r}"
        )
    return implementation


def known(name: str) -> Implementation:
    """The implementation of that name."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name]
