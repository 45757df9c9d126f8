"""The bytes that a ring of one attention layer must send, and the time of a hop at a chip's published rates.

The layer has ``NUM_HEADS`` query and ``KV_HEADS`` key heads of ``HEAD_DIM``, in bfloat16. Nothing is compiled.
"""

import dataclasses
import math
from typing import Any

import numpy as np

NUM_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
WINDOW = 8191
CASES = {
    "causal": "`is_causal=True`",
    "window": f"`local_window_size=({WINDOW}, 0)`",
    "alibi": "causal, with ALiBi as `score_mod`; its slopes `[N]` are an argument with a gradient",
}
PASSES = ("forward", "gradient")
# TPU v5p: https://docs.cloud.google.com/tpu/docs/v5p. A chip's links carry 1200 GB/s in both directions together. A 3D
# torus has six links, and a ring sends over one of them in one direction.
FLOPS, HBM, LINK = 459e12, 2765e9, 1200e9 / 2 / 6
WIDTH, FULL = 2, 4  # bytes of a number in bfloat16 and float32


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile: ``length`` tokens on a ring of all chips of a topology.

    ``passes``: "gradient" is that of the sum of squares by query, key, value and the case's own arrays.
    """

    topology: str
    length: int
    layout: str = "zigzag"
    case: str = "causal"
    passes: str = "forward"

    @property
    def chips(self) -> int:
        """The number of chips, P."""
        return math.prod(map(int, self.topology.partition(":")[2].split("x")))

    @property
    def tokens(self) -> int:
        """Tokens of a chip, T/P."""
        return self.length // self.chips

    @property
    def keys(self) -> int:
        """The bytes of a chip's keys and values."""
        return 2 * KV_HEADS * HEAD_DIM * self.tokens * WIDTH

    def visits(self) -> int:
        """How many chips' keys a chip needs, including its own: keys that it or any chip at this distance sees.

        This follows from the definition of the masks rather than from ``Ring.plan``.
        """
        if self.case != "window":
            return self.chips
        P, chunks = self.chips, 2 if self.layout == "zigzag" else 1
        chunk = np.arange(P * chunks)
        device = np.minimum(chunk, 2 * P - 1 - chunk) if chunks == 2 else chunk
        behind = chunk[:, None] - chunk[None, :]
        nearest = (behind - 1) * (self.tokens // chunks) + 1  # the first query of a chunk is so far from another's end
        sees = (behind >= 0) & (nearest <= WINDOW)
        return len(np.unique(((device[:, None] - device[None, :]) % P)[sees]))

    def permuted(self) -> int:
        """The bytes that a chip sends in the whole program, if it sends nothing in vain.

        In each pass keys and values leave for all visits but the last. In the backward pass both of their gradients
        leave, in float32, after every visit but that of a chip's own keys, which stay at home. Gradients of a score
        function's arrays take one more pass over the keys, if the output is rounded to bfloat16.
        """
        visits = self.visits()
        rounds = 1 if self.passes == "forward" else 3 if self.case == "alibi" else 2
        gradients = visits - 1 if self.passes == "gradient" else 0
        return self.keys * (rounds * (visits - 1) + gradients * FULL // WIDTH)


def hop(tokens: int, passes: str) -> dict[str, Any]:
    """One hop of a balanced causal ring with ``tokens`` on a chip: ``flops``, bytes, and seconds at v5p's rates.

    Half of the pairs are visible, with two matrix products forward and five backward. ``hbm`` counts every array once,
    the possible minimum, and accumulated arrays twice. ``hidden_from`` is the number of tokens at which computing takes
    as long as sending.
    """
    pairs = tokens * tokens / 2
    products = {"forward": 2, "gradient": 5}[passes]
    flops = 2 * products * pairs * HEAD_DIM * NUM_HEADS
    rows, columns = NUM_HEADS * HEAD_DIM * tokens, 2 * KV_HEADS * HEAD_DIM * tokens
    link = WIDTH * columns
    if passes == "forward":  # query, key and value; the output and its log-sum-exp so far
        hbm = WIDTH * (rows + columns) + 2 * FULL * (rows + NUM_HEADS * tokens)
    else:  # query, output and its cotangent, key and value; three gradients so far
        hbm = WIDTH * (3 * rows + columns) + 2 * FULL * (rows + columns) + FULL * NUM_HEADS * tokens
        link += FULL * columns
    seconds = {"compute": flops / FLOPS, "memory": hbm / HBM, "link": link / LINK}
    hidden_from = math.ceil(tokens * seconds["link"] / seconds["compute"])
    return {"flops": flops, "hbm": hbm, "link": link, "seconds": seconds, "hidden_from": hidden_from}
