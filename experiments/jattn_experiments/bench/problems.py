"""The problems of the attention benchmark: the cases, and the work in each. Imports neither JAX nor peers."""

import dataclasses

import numpy as np

WINDOW, CAP, BUCKETS, DOCUMENTS = 512, 30.0, 32, 8
CASES = {
    "full": "every query sees every key",
    "causal": "no query sees a later key; counted as half of the pairs",
    "window": f"`local_window_size=({WINDOW}, 0)`",
    "segments": f"{DOCUMENTS} packed documents of random lengths, causal; their ids are known at compile time",
    "segments-traced": "the same, with the ids as an argument of the compiled function",
    "alibi": "ALiBi as `score_mod`, causal",
    "softcap": f"`{CAP:g} * tanh(score / {CAP:g})` as `score_mod`",
    "t5": f"T5's bias of {BUCKETS} buckets as `score_mod`, with the gradient of its table",
}
PLAIN = {"causal": "full", "window": "full", "alibi": "causal", "softcap": "full"}  # timed in the same row
PASSES = ("forward", "both")  # both: forward and backward, the gradient of sum(sin(out))
DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("bfloat16", "float32"), "tpu": ("bfloat16", "float32")}  # by device


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
        """Operations of the matrix products only: two forward, and five backward, which recomputes the scores."""
        heads = self.batch * self.num_heads
        return {"forward": 4.0, "both": 14.0}[passes] * self.pairs() * self.head_dim * heads


def document_ids(length: int) -> np.ndarray:
    """Ids ``[T]``, rising from 0, of ``DOCUMENTS`` documents cut at random places, the same in every run."""
    rng = np.random.default_rng(1)
    cuts = np.sort(rng.choice(np.arange(1, length), min(DOCUMENTS, length) - 1, replace=False))
    return np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
