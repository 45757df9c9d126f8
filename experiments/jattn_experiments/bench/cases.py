"""What the attention benchmark measures: the cases, and the work in each. Imports neither JAX nor peers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

WINDOW, CAP, BUCKETS, DOCUMENTS = 512, 30.0, 32, 8
CASES = {
    "full": "every query sees every key",
    "causal": "a query sees no later key; counted as half of the pairs",
    "window": f"`local_window_size=({WINDOW}, 0)`",
    "segments": f"{DOCUMENTS} packed documents of random lengths, causal; their ids known when compiled",
    "segments-traced": "the same, the ids an argument of the compiled function",
    "alibi": "ALiBi as `score_mod`, causal",
    "softcap": f"`{CAP:g} * tanh(score / {CAP:g})` as `score_mod`",
    "t5": f"T5's bias of {BUCKETS} buckets as `score_mod`, with the gradient of its table",
}
PLAIN = {"causal": "full", "window": "full", "alibi": "causal", "softcap": "full"}  # timed beside it, in one row
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PASSES = ("forward", "both")  # both: forward and backward, the gradient of sum(sin(out))
PEERS = ("jax", "torch", "tokamax", "splash", "jattn-xla", "jattn-kernels", "jattn-avx2")
PARTS = ("times", "memory", "peak", "compile")
DTYPES = {"cpu": ("float32",), "gpu": ("bfloat16", "float32"), "tpu": ("bfloat16", "float32")}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of attention, B = ``batch``, T = S = ``length``; all contestants get the same inputs."""

    case: str
    length: int
    dtype: str = "float32"
    num_heads: int = 8
    head_dim: int = 64
    batch: int = 1

    def arrays(self) -> list[np.ndarray]:
        """Query, key and value ``[B,T,N,H]`` in float32, and the case's extra argument, if any.

        That is the document ids ``[T]`` or T5's table ``[32,N]``.
        """
        rng = np.random.default_rng(0)
        shape = (self.batch, self.length, self.num_heads, self.head_dim)
        arrays = [rng.standard_normal(shape, np.float32) for _ in range(3)]
        if self.case.startswith("segments"):
            arrays.append(document_ids(self.length))
        if self.case == "t5":
            arrays.append(rng.standard_normal((BUCKETS, self.num_heads), np.float32))
        return arrays

    def differentiated(self) -> tuple[int, ...]:
        """Which of ``arrays()`` the backward pass differentiates."""
        return (0, 1, 2, 3) if self.case == "t5" else (0, 1, 2)

    def pairs(self) -> float:
        """How many (query, key) pairs one head sees."""
        n = self.length
        if self.case in ("causal", "alibi"):
            return n * n / 2
        if self.case == "window":
            return float(np.minimum(np.arange(n), WINDOW).sum() + n)
        if self.case.startswith("segments"):
            sizes = np.unique(document_ids(n), return_counts=True)[1].astype(float)
            return float((sizes * (sizes + 1) / 2).sum())
        return float(n * n)

    def flops(self, passes: str) -> float:
        """Operations of the products only: two forward, and five backward, which recomputes the scores."""
        heads = self.batch * self.num_heads
        return {"forward": 4.0, "both": 14.0}[passes] * self.pairs() * self.head_dim * heads


def document_ids(length: int) -> np.ndarray:
    """Ids ``[T]``, rising from 0, of ``DOCUMENTS`` documents cut at random places; always the same ones."""
    rng = np.random.default_rng(1)
    cuts = np.sort(rng.choice(np.arange(1, length), min(DOCUMENTS, length) - 1, replace=False))
    return np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one run measures.

    ``seconds``: the time that one row's calls take, all contestants together. ``batch``: B of the attention suite's
    problems. ``kernels``: of the chip suite, ``cells``: of ``tools``, both unparsed. ``minutes``: of the former.
    """

    out: Path
    device: str = "cpu"
    peers: Sequence[str] = PEERS[:3]
    lengths: Sequence[int] = LENGTHS
    cases: Sequence[str] = tuple(CASES)
    parts: Sequence[str] = PARTS
    seconds: float = 6.0
    cells: str = ""
    batch: int = 1
    kernels: str = ""
    minutes: float = 8.0

    @classmethod
    def read(cls, out: Path, **options: Any) -> "Plan":
        """Parses options of the command line; lists are separated by commas.

        Raises:
            ValueError: an option is invalid; one line that names it.
        """
        for name, known in {"peers": PEERS, "lengths": None, "cases": tuple(CASES), "parts": PARTS}.items():
            if name in options:
                options[name] = _words(name, options[name], known)
        plan = cls(out, **options)
        if plan.device not in DTYPES:
            raise ValueError(f"--device: expected one of {', '.join(DTYPES)}, got {plan.device!r}")
        if not plan.seconds > 0:
            raise ValueError(f"--seconds: expected > 0, got {plan.seconds}")
        if plan.batch < 1:
            raise ValueError(f"--batch: expected >= 1, got {plan.batch}")
        if not plan.minutes > 0:
            raise ValueError(f"--minutes: expected > 0, got {plan.minutes}")
        return plan


def _words(option: str, text: str, known: Sequence[str] | None) -> tuple[Any, ...]:
    """The words of a list in the order of ``known``, or where there is none, whole numbers that rise."""
    words = {word.strip() for word in text.split(",") if word.strip()}
    if known is None:
        good, expected = all(word.isdecimal() and int(word) > 1 for word in words), "whole numbers above 1"
    else:
        good, expected = words <= set(known), f"some of {', '.join(known)}"
    if not (words and good):
        raise ValueError(f"--{option}: expected {expected}, separated by commas, got {text!r}")
    return tuple(sorted(map(int, words)) if known is None else (word for word in known if word in words))
