"""Decides which weights a page keeps: of which sequences, how many of each query, in how many bits.

``kept`` decides by the sizes alone what is computed; if that is too much for the file, ``STAGES`` say what goes first.
At 4,096 tokens and 8 heads, it is each query's 32 largest weights and a coarse picture of 64 blocks a side.
"""

import math

# Weights of all sequences and heads up to which all are kept, as of 600 tokens and 23 heads; beyond, only each query's
# largest and a coarse picture. More would hardly fit: at a byte each, these are 8 MB before they are compressed.
ALL_WEIGHTS = 2**23
# How many of the largest are kept in total, evenly over queries: at four bytes, 8 MB before they are compressed.
LARGEST_WEIGHTS = 2**21
# Those of one query, at least and at most. One shows where it looks most, two what competes with that.
LEAST_OF_QUERY, MOST_OF_QUERY = 2, 32
# Queries of all heads that are drawn; of more sequences only the first are, so that each keeps several weights a query.
DRAWN_QUERIES = 600_000
# Blocks along a side of a coarse picture, at least and at most: fewer show no pattern.
LEAST_BLOCKS, MOST_BLOCKS = 16, 64
# Cells of all coarse pictures: 1 MB before they are compressed.
COARSE_CELLS = 2**20
# Letters of the file, nearly all of one byte, which stays under 6 MB; and those that a frame's description may take.
PAGE_LETTERS, FRAME_LETTERS = 5_900_000, 600
# Of each query's largest weights, so many outlive smaller ones that are left out, as long as possible.
LAST_OF_QUERY = 2
# Bits of a coarse cell, which is only seen as a colour (data.js reads bytes); and at least those of a largest weight.
COARSE_BITS, LEAST_BITS_OF_LARGEST = 8, 10
# What is tried until the file is small enough: the bits of a weight; the share of the largest weight below which others
# are left out; and how many of each query's largest are kept nevertheless. Digits go before weights.
STAGES = (
    *((bits, 0.0, 0) for bits in (16, 12, 10, 8)),
    *((8, 0.002 * 1.5**i, LAST_OF_QUERY) for i in range(14)),
    *((8, 0.002 * 1.5**i, 0) for i in range(17)),
)


def kept(B: int, rows: int, T: int, S: int) -> tuple[int, int, int]:
    """What is kept of B sequences of T queries and S keys, each with so many ``rows``: the queries of all heads.

    The number of sequences; that of each query's largest weights, 0 for all; and that of blocks along a coarse side.
    """
    if B * rows * S <= ALL_WEIGHTS:
        return B, 0, 1
    drawn = min(B, max(DRAWN_QUERIES // rows, 1))
    of_query = min(max(LARGEST_WEIGHTS // (drawn * rows), LEAST_OF_QUERY), MOST_OF_QUERY, S)
    blocks = min(max(math.isqrt(COARSE_CELLS * T // (drawn * rows)), LEAST_BLOCKS), MOST_BLOCKS)
    return drawn, of_query, blocks
