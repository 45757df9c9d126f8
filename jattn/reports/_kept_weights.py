"""Decides which weights a page keeps: from which sequences, how many per query, and in how many bits.

``kept`` decides from the sizes alone what is computed; if the file gets too large, ``STAGES`` lists what goes first.
At 4,096 tokens and 8 heads, a page keeps each query's 32 largest weights and a coarse picture of 64 blocks per side.
"""

import math

# The number of weights up to which all are kept, such as 600 tokens and 23 heads; beyond it, only each query's
# largest and a coarse picture. More would hardly fit: at a byte each, they take 8 MB before compression.
ALL_WEIGHTS = 2**23
# The total number of largest weights kept, spread evenly over queries: at four bytes each, 8 MB before compression.
LARGEST_WEIGHTS = 2**21
# The least and the most per query. One shows where the query looks most, two what competes with it.
LEAST_OF_QUERY, MOST_OF_QUERY = 2, 32
# Queries drawn over all heads; of many sequences, only the first are drawn, so that each query keeps several weights.
DRAWN_QUERIES = 600_000
# The least and the most blocks along a side of a coarse picture; fewer show no pattern.
LEAST_BLOCKS, MOST_BLOCKS = 16, 64
# Cells of all coarse pictures: 1 MB before compression.
COARSE_CELLS = 2**20
# Characters of the file, nearly all of one byte, so that it stays under 6 MB; and the most for a frame's description.
PAGE_LETTERS, FRAME_LETTERS = 5_900_000, 600
# The number of each query's largest weights that are kept as long as possible when smaller ones are dropped.
LAST_OF_QUERY = 2
# Bits of a coarse cell, which is only seen as a colour (data.js reads bytes); and the least bits of a largest weight.
COARSE_BITS, LEAST_BITS_OF_LARGEST = 8, 10
# Settings tried until the file is small enough: the bits of a weight; the share of the largest weight below which
# others are dropped; and how many of each query's largest are kept anyway. Digits go before weights.
STAGES = (
    *((bits, 0.0, 0) for bits in (16, 12, 10, 8)),
    *((8, 0.002 * 1.5**i, LAST_OF_QUERY) for i in range(14)),
    *((8, 0.002 * 1.5**i, 0) for i in range(17)),
)


def kept(B: int, rows: int, T: int, S: int) -> tuple[int, int, int]:
    """What to keep of B sequences of T queries and S keys, each with ``rows`` queries over all heads.

    The numbers of sequences, of largest weights per query (0 for all), and of blocks along a side of a coarse picture.
    """
    if B * rows * S <= ALL_WEIGHTS:
        return B, 0, 1
    drawn = min(B, max(DRAWN_QUERIES // rows, 1))
    of_query = min(max(LARGEST_WEIGHTS // (drawn * rows), LEAST_OF_QUERY), MOST_OF_QUERY, S)
    blocks = min(max(math.isqrt(COARSE_CELLS * T // (drawn * rows)), LEAST_BLOCKS), MOST_BLOCKS)
    return drawn, of_query, blocks
