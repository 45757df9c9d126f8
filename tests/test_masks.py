"""Masks against brute force: which pairs are visible, and that ``bounds`` never calls a block empty or full wrongly."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn import masks
from jattn.masks import Causal, Dense, Padding, Prefix, Segments, SlidingWindow

T, S = 7, 11
IDS = np.array([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4, 4]])
KV_IDS = np.array([[0, 1, 1, 0, 2, 2, 5, 1, 0, 0, 2], [3, 4, 3, 4, 3, 3, 9, 9, 3, 4, 4]])
TABLE = np.random.default_rng(0).random((2, 3, T, S)) < 0.6

# each mask beside what it means, for one pair
MEANING = {
    "causal": (Causal(), lambda b, h, q, kv: kv <= q),
    "window": (SlidingWindow(2, 1), lambda b, h, q, kv: q - 2 <= kv <= q + 1),
    "window, left": (SlidingWindow(3), lambda b, h, q, kv: q - 3 <= kv <= q),
    "prefix": (Prefix(4), lambda b, h, q, kv: kv < 4),
    "padding": (Padding(np.array([5, 0])), lambda b, h, q, kv: kv < (5, 0)[b]),
    "padding, one length for all": (Padding(np.array([5])), lambda b, h, q, kv: kv < 5),
    "segments": (
        Segments(IDS, KV_IDS),
        lambda b, h, q, kv: 0 <= q < T and 0 <= kv < S and IDS[b, q] == KV_IDS[b, kv],
    ),
    "segments, one row for all": (Segments(IDS[:1]), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < T and IDS[0, q] == IDS[0, kv]),
    "segments, one row": (Segments(IDS[0]), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < T and IDS[0, q] == IDS[0, kv]),
    "dense": (Dense(TABLE), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < S and TABLE[b, h, q, kv]),
    "dense, shared axes": (Dense(TABLE[:1, 0, :, :]), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < S and TABLE[0, 0, q, kv]),
    "dense, one row": (Dense(TABLE[1, :1, :1]), lambda b, h, q, kv: 0 <= kv < S and TABLE[1, 0, 0, kv]),
}  # fmt: skip


def brute_force(sees, b, h, rows, columns):
    return np.array([[bool(sees(b, h, q, kv)) for kv in columns] for q in rows])


@pytest.mark.parametrize("name", MEANING)
@pytest.mark.parametrize("b, h", [(0, 0), (1, 2)])
def test_each_mask_means_what_it_says(name, b, h):
    mask, sees = MEANING[name]
    rows, columns = np.arange(0, T + 3), np.arange(0, S + 3)
    seen = np.broadcast_to(mask(b, h, rows[:, None], columns[None, :]), (len(rows), len(columns)))
    np.testing.assert_array_equal(seen, brute_force(sees, b, h, rows, columns))
    traced = jax.jit(lambda mask, b, h, q, kv: mask(b, h, q, kv))(mask, b, h, rows[:, None], columns[None, :])
    np.testing.assert_array_equal(np.broadcast_to(traced, seen.shape), seen)


leaves = st.sampled_from(sorted(MEANING)).map(MEANING.__getitem__)
plain = lambda b, h, q, kv: (q + kv + b + h) % 3 == 0
leaves = leaves | st.just((plain, plain))


def join(children):
    def build(kind, a, b):
        (mask_a, sees_a), (mask_b, sees_b) = a, b
        if kind == "and":
            return masks.and_masks(mask_a, mask_b), lambda *at: sees_a(*at) and sees_b(*at)
        if kind == "or":
            return masks.or_masks(mask_a, mask_b), lambda *at: sees_a(*at) or sees_b(*at)
        return ~masks.and_masks(mask_a), lambda *at: not sees_a(*at)

    return st.builds(build, st.sampled_from(["and", "or", "not"]), children, children)


compositions = st.recursive(leaves, join, max_leaves=4)
blocks = st.tuples(st.integers(0, T + 1), st.integers(1, 5), st.integers(0, S + 1), st.integers(1, 5))


@settings(max_examples=300)
@given(compositions, blocks, st.integers(0, 1), st.integers(0, 2))
def test_bounds_are_sound(composition, block, b, h):
    """Where ``may`` is false nothing is visible, where ``must`` is true everything is: against every pair of the block."""
    mask, sees = composition
    q_min, q_size, kv_min, kv_size = block
    seen = brute_force(sees, b, h, range(q_min, q_min + q_size), range(kv_min, kv_min + kv_size))
    may, must = masks.bounds(mask, b, h, q_min, q_min + q_size - 1, kv_min, kv_min + kv_size - 1)
    assert may or not seen.any()
    assert seen.all() or not must


@pytest.mark.parametrize("name", MEANING)
def test_bounds_of_single_masks_are_exact(name):
    """Not promised, but what block skipping lives on. Segments alone may be loose: their ids need not be sorted."""
    mask, sees = MEANING[name]
    for b, (q_min, q_max), (kv_min, kv_max) in itertools.product(
        (0, 1), ((0, 2), (2, 2), (3, 6)), ((0, 0), (1, 4), (5, 9))
    ):
        seen = brute_force(sees, b, 1, range(q_min, q_max + 1), range(kv_min, kv_max + 1))
        may, must = masks.bounds(mask, b, 1, q_min, q_max, kv_min, kv_max)
        assert must == seen.all()
        assert may == seen.any() or name.startswith("segments")


@pytest.mark.parametrize("name", MEANING)
def test_bounds_of_a_grid_of_blocks_static_and_traced(name):
    mask, _ = MEANING[name]
    starts, ends = np.array([0, 3]), np.array([2, 6])
    kv_starts, kv_ends = np.array([0, 4, 8]), np.array([3, 7, 10])
    grid = (1, 2, starts[:, None], ends[:, None], kv_starts[None, :], kv_ends[None, :])
    may, must = masks.bounds(mask, *grid)
    assert not isinstance(may, jax.Array) and not isinstance(must, jax.Array), "static in, NumPy out"
    for i, j in np.ndindex(2, 3):
        one = masks.bounds(mask, 1, 2, starts[i], ends[i], kv_starts[j], kv_ends[j])
        assert one == (np.broadcast_to(may, (2, 3))[i, j], np.broadcast_to(must, (2, 3))[i, j])
    traced = jax.jit(lambda mask, grid: masks.bounds(mask, *grid))(mask, grid)
    for got, expected in zip(traced, (may, must), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(got, (2, 3)), np.broadcast_to(expected, (2, 3)))


def test_a_plain_function_bounds_nothing():
    assert masks.bounds(plain, 0, 0, 0, 3, 0, 3) == (True, False)


def test_operators_build_the_same_as_the_functions():
    q, kv = np.arange(T)[:, None], np.arange(S)[None, :]
    pairs = [
        (Causal() & Prefix(3), masks.and_masks(Causal(), Prefix(3))),
        (Causal() | Prefix(3), masks.or_masks(Causal(), Prefix(3))),
        (Causal() & plain, masks.and_masks(Causal(), plain)),
        (plain | Causal(), masks.or_masks(plain, Causal())),
    ]
    for a, b in pairs:
        np.testing.assert_array_equal(a(0, 0, q, kv), b(0, 0, q, kv))
    np.testing.assert_array_equal((~Causal())(0, 0, q, kv), kv > q)


def test_no_truth_value():
    for write in (lambda: Causal() and Prefix(3), lambda: not Causal(), lambda: Causal() or Prefix(1)):
        with pytest.raises(TypeError, match="&, | and ~"):
            write()


def test_masks_are_pytrees_whose_leaves_are_their_arrays():
    mask = Segments(jnp.asarray(IDS)) & SlidingWindow(2, 1) & plain
    assert [leaf.shape for leaf in jax.tree.leaves(mask)] == [IDS.shape]
    q, kv = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    calls = []

    @jax.jit
    def seen(mask):
        calls.append(1)
        return mask(0, 0, q, kv)

    np.testing.assert_array_equal(seen(mask), mask(0, 0, q, kv))
    other = Segments(jnp.zeros_like(IDS)) & SlidingWindow(2, 1) & plain
    np.testing.assert_array_equal(seen(other), other(0, 0, q, kv))
    assert len(calls) == 1, "new arrays in an equal mask must not compile again"
    seen(Segments(jnp.asarray(IDS)) & SlidingWindow(3, 1) & plain)
    assert len(calls) == 2, "a new number must"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Padding(3), "Padding: lengths must be an array"),
        (lambda: Padding(np.ones((2, 2), int)), r"lengths must be integers of rank 1, got int64 of shape \(2, 2\)"),
        (lambda: Segments(np.ones(3)), "query_ids must be integers"),
        (lambda: Segments(np.ones(3, int), np.ones(3)), "kv_ids must be integers"),
        (lambda: Dense(np.ones((3, 3))), "array must be bools"),
        (lambda: Causal() & np.ones((3, 3), bool), r"wrap an array as masks\.Dense"),
        (lambda: masks.and_masks(), "at least one mask"),
        (lambda: Causal() | 3, "must be a callable"),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
