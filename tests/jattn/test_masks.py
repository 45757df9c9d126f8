"""Masks against brute force: which pairs are visible, and that ``bounds`` never wrongly calls a block empty or full."""

import itertools
import re
import tracemalloc
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
from jattn import masks
from jattn._mods.arrays import mod_semantics
from jattn._mods.lookup import range_in_row
from jattn.masks import Causal, Dense, Padding, Prefix, Segments, SlidingWindow

T, S = 7, 11
IDS = np.array([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4, 4]])
KV_IDS = np.array([[0, 1, 1, 0, 2, 2, 5, 1, 0, 0, 2], [3, 4, 3, 4, 3, 3, 9, 9, 3, 4, 4]])
TABLE = np.random.default_rng(0).random((2, 3, T, S)) < 0.6

# each mask with its meaning for one pair
MEANING = {
    "causal": (Causal(), lambda b, h, q, kv: kv <= q),
    "window": (SlidingWindow(2, 1), lambda b, h, q, kv: q - 2 <= kv <= q + 1),
    "window, left": (SlidingWindow(3), lambda b, h, q, kv: q - 3 <= kv <= q),
    "prefix": (Prefix(4), lambda b, h, q, kv: kv < 4),
    "padding": (Padding(np.array([5, 0])), lambda b, h, q, kv: kv < (5, 0)[b]),
    "padding, one length for all": (Padding(np.array([5])), lambda b, h, q, kv: kv < 5),
    "segments": (Segments(IDS, KV_IDS), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < S and IDS[b, q] == KV_IDS[b, kv]),
    "segments, one row for all": (Segments(IDS[:1]), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < T and IDS[0, q] == IDS[0, kv]),
    "segments, one row": (Segments(IDS[0]), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < T and IDS[0, q] == IDS[0, kv]),
    "dense": (Dense(TABLE), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < S and TABLE[b, h, q, kv]),
    "dense, shared axes": (Dense(TABLE[:1, 0, :, :]), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < S and TABLE[0, 0, q, kv]),
    "dense, one row": (Dense(TABLE[1, :1, :1]), lambda b, h, q, kv: 0 <= kv < S and TABLE[1, 0, 0, kv]),
}  # fmt: skip


def brute_force(sees, b, h, rows, columns):
    return np.array([[bool(sees(b, h, q, kv)) for kv in columns] for q in rows])


def check_pairs(mask, sees, b, h, rows, columns):
    seen = np.broadcast_to(mask(b, h, rows[:, None], columns[None, :]), (len(rows), len(columns)))
    np.testing.assert_array_equal(seen, brute_force(sees, b, h, rows, columns))


@pytest.mark.parametrize("name", MEANING)
@pytest.mark.parametrize("b, h", [(0, 0), (1, 2)])
def test_each_mask_means_what_it_says(name, b, h):
    check_pairs(*MEANING[name], b, h, np.arange(0, T + 3), np.arange(0, S + 3))


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


@pytest.mark.slow
@settings(max_examples=100)
@given(compositions)
def test_bounds_of_compositions_are_sound(composition):
    """And each pair means what the parts say."""
    mask, sees = composition
    for b, h in ((0, 0), (1, 2)):
        check_pairs(mask, sees, b, h, np.arange(T + 2), np.arange(S + 2))
    masks.check_bounds(masks.and_masks(mask), T + 2, S + 2, batch=2, num_heads=3)


@pytest.mark.parametrize("name", MEANING)
def test_bounds_are_sound(name):
    masks.check_bounds(MEANING[name][0], T + 2, S + 2, batch=2, num_heads=3)


@pytest.mark.parametrize("name", ["causal", "window", "prefix"])
def test_bounds_of_long_masks_are_sound(name):
    masks.check_bounds(MEANING[name][0] & Prefix(70), 80, 75)


@jattn.pytree_dataclass
class Diagonal(masks.Mask):
    """Visible if the positions are equal, with bounds that a test replaces."""

    answers: Callable = jattn.static_field()
    ends: Callable = jattn.static_field(default=lambda b, h, q_idx: None)

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx == kv_idx

    def bounds(self, *block):
        return self.answers(*block)

    def interval(self, b, h, q_idx):
        return self.ends(b, h, q_idx)


def overlap(b, h, q_min, q_max, kv_min, kv_max):
    return (q_min <= kv_max) & (kv_min <= q_max)


RIGHT = lambda *block: (overlap(*block), np.False_)
# Each with sizes, and what the error says of the block and of the pair.
WRONG = {
    "empty": (Diagonal(lambda b, h, q_min, q_max, kv_min, kv_max: (kv_min < q_max, np.False_)), (4, 5),
        "Diagonal.bounds says any_visible=False of the block q_idx 0..0, kv_idx 0..0, but the pair b=0, h=0, q_idx=0, "
        "kv_idx=0 is visible"),
    "full": (Diagonal(lambda *block: (overlap(*block), overlap(*block))), (4, 5),
        "Diagonal.bounds says all_visible=True of the block q_idx 0..0, kv_idx 0..1, but the pair b=0, h=0, q_idx=0, "
        "kv_idx=1 is not visible"),
    "one head": (Diagonal(lambda b, h, *block: (overlap(b, h, *block), (h == 2) & overlap(b, h, *block))), (4, 5),
        "the block q_idx 0..0, kv_idx 0..1, but the pair b=0, h=2, q_idx=0, kv_idx=1 is not visible"),
    "one sequence": (Diagonal(lambda b, h, *block: (overlap(b, h, *block) & (b != 1), np.False_)), (4, 5),
        "the block q_idx 0..0, kv_idx 0..0, but the pair b=1, h=0, q_idx=0, kv_idx=0 is visible"),
    "far away": (Diagonal(lambda b, h, q_min, *block: (overlap(b, h, q_min, *block) & (q_min < 90), np.False_)), (100, 120),
        "the block q_idx 90..90, kv_idx 90..90, but the pair b=0, h=0, q_idx=90, kv_idx=90 is visible"),
    "only across a multiple of 8": (
        Diagonal(lambda b, h, *ends: (overlap(b, h, *ends) & (ends[0] // 8 == ends[1] // 8), np.False_)), (40, 40),
        "any_visible=False of the block q_idx 7..8, kv_idx 7..7, but the pair b=0, h=0, q_idx=7, kv_idx=7 is visible"),
    "an interval too long": (Diagonal(RIGHT, lambda b, h, q_idx: (q_idx - 1, q_idx)), (4, 5),
        "Diagonal.interval says that q_idx 1 sees the keys 0..1, but the pair b=0, h=0, q_idx=1, kv_idx=0 is not visible"),
    "an interval too short": (Diagonal(RIGHT, lambda b, h, q_idx: (q_idx + 1, q_idx)), (4, 5),
        "Diagonal.interval says that q_idx 0 sees the keys 1..0, but the pair b=0, h=0, q_idx=0, kv_idx=0 is visible"),
    "an interval of one head": (Diagonal(RIGHT, lambda b, h, q_idx: (q_idx, q_idx + h // 2)), (4, 5),
        "Diagonal.interval says that q_idx 0 sees the keys 0..1, but the pair b=0, h=2, q_idx=0, kv_idx=1 is not visible"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_bounds_and_intervals_are_found(name):
    mask, lengths, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        masks.check_bounds(mask, *lengths, batch=2, num_heads=3)


def test_right_bounds_and_intervals_pass():
    mask = Diagonal(RIGHT, lambda b, h, q_idx: (q_idx, q_idx))
    for lengths in ((4, 5), (32, 33), (70, 40), (1, 1), (0, 3), (3, 0)):
        masks.check_bounds(mask, *lengths)


@pytest.mark.parametrize("name", MEANING)
def test_bounds_of_single_masks_are_exact(name):
    """Not guaranteed, but block skipping relies on it. Segments may be loose, since their ids need not be sorted."""
    mask, sees = MEANING[name]
    for b, (q_min, q_max), (kv_min, kv_max) in itertools.product((0, 1), ((0, 2), (2, 2), (3, 6)), ((0, 0), (1, 4), (5, 9))):  # fmt: skip
        seen = brute_force(sees, b, 1, range(q_min, q_max + 1), range(kv_min, kv_max + 1))
        may, must = masks.bounds(mask, b, 1, q_min, q_max, kv_min, kv_max)
        assert must == seen.all()
        assert may or not seen.any()
        assert not may or seen.any() or name.startswith("segments")


HAVE_NO_INTERVAL = {name for name in MEANING if name.startswith(("segments", "dense"))}
KEYS = range(-3, S + 3)


def sees_interval(result, rows):
    first, last = (np.broadcast_to(end, len(rows)) for end in result)
    return np.array([[low <= kv <= high for kv in KEYS] for low, high in zip(first, last, strict=True)])


@settings(max_examples=300)
@given(compositions, st.integers(0, 1), st.integers(0, 2), st.integers(-4, T))
def test_an_interval_is_exact(composition, b, h, start):
    mask, sees = composition
    rows = np.arange(start, start + 5, dtype=np.int32)
    result = masks.interval(mask, np.int32(b), np.int32(h), rows)
    if result is not None:
        assert not any(isinstance(end, jax.Array) for end in result), "static input must give NumPy output"
        np.testing.assert_array_equal(sees_interval(result, rows), brute_force(sees, b, h, rows, KEYS))


@pytest.mark.parametrize("name", MEANING)
def test_which_masks_have_an_interval(name):
    mask, sees = MEANING[name]
    index = np.int32(0)
    at = index, index, np.arange(T, dtype=np.int32)
    assert (masks.interval(mask, *at) is None) == (name in HAVE_NO_INTERVAL)
    assert masks.interval(~mask, *at) is None and masks.interval(mask & plain, *at) is None
    for joined, wanted in (
        (mask & Causal(), lambda *at: sees(*at) and at[3] <= at[2]),
        (mask | Prefix(3), lambda *at: sees(*at) or at[3] < 3),
    ):
        result = masks.interval(joined, *at)
        is_one = name not in HAVE_NO_INTERVAL and ("window" not in name or isinstance(joined, masks.And))
        assert (result is not None) == is_one
        if result is not None:
            np.testing.assert_array_equal(sees_interval(result, range(T)), brute_force(wanted, 0, 0, range(T), KEYS))


def test_intervals_that_leave_no_gap_but_start_apart_are_not_joined():
    """Whether they leave one depends on numbers, which may be traced."""
    at = np.int32(0), np.int32(0), np.arange(T, dtype=np.int32)
    assert masks.interval(SlidingWindow(2) | SlidingWindow(3), *at) is None
    assert masks.interval(Causal() | SlidingWindow(2**31 - 1, 2), *at) is not None


def test_traced_intervals_are_the_same():
    every = {name: mask for name, (mask, _) in MEANING.items()}
    every |= {f"{name} and prefix": mask & Prefix(2) for name, mask in every.items()}
    every |= {"or": (Causal() & Padding(np.array([5, 0]))) | Prefix(2)}
    at = np.array([[0], [1], [9]], np.int32), np.int32(1), np.arange(-3, T, dtype=np.int32)[None, :]

    def of_all(every, at):
        return {name: masks.interval(mask, *at) for name, mask in every.items()}

    traced, static = jax.jit(of_all)(every, at), of_all(every, at)
    assert {name for name, result in static.items() if result is not None} == {
        name for name in every if name.removesuffix(" and prefix") not in HAVE_NO_INTERVAL
    }
    jax.tree.map(lambda got, wanted: np.testing.assert_array_equal(*np.broadcast_arrays(got, wanted)), traced, static)


def test_an_interval_has_only_the_axes_that_it_depends_on():
    at = np.zeros((2, 1, 1), np.int32), np.zeros((1, 3, 1), np.int32), np.arange(T, dtype=np.int32)
    shape = lambda mask: np.broadcast_shapes(*(np.shape(end) for end in masks.interval(mask, *at)))
    assert shape(Causal() & SlidingWindow(2, 1)) == (T,)
    assert shape(Prefix(3)) == shape(Padding(np.array([5]))) == ()
    assert shape(Padding(np.array([5, 0]))) == (2, 1, 1)
    assert shape(Padding(np.array([5, 0])) & Causal()) == (2, 1, T)


(STARTS, KV_STARTS), (ENDS_OF, KV_ENDS) = np.ix_([0, 3], [0, 4, 8]), np.ix_([2, 6], [3, 7, 10])
GRID = (1, 2, STARTS, ENDS_OF, KV_STARTS, KV_ENDS)


@pytest.mark.parametrize("name", MEANING)
def test_bounds_of_a_grid_of_blocks(name):
    mask, _ = MEANING[name]
    result = masks.bounds(mask, *GRID)
    assert not any(isinstance(x, jax.Array) for x in result), "static input must give NumPy output"
    result = [np.broadcast_to(x, (2, 3)) for x in result]
    for i, j in np.ndindex(2, 3):
        q_min, q_max, kv_min, kv_max = (int(np.ravel(x)[at]) for x, at in zip(GRID[2:], (i, i, j, j), strict=True))
        assert masks.bounds(mask, 1, 2, q_min, q_max, kv_min, kv_max) == tuple(x[i, j] for x in result)


@pytest.mark.slow
def test_traced_is_the_same():
    """Pairs and a grid of blocks, for all masks as arguments of one compiled function."""
    every = {name: mask for name, (mask, _) in MEANING.items()}
    pairs = (1, 2, np.arange(T + 3)[:, None], np.arange(S + 3)[None, :])

    def both(every, pairs, grid):
        return {name: (mask(*pairs), *masks.bounds(mask, *grid)) for name, mask in every.items()}

    traced, static = jax.jit(both)(every, pairs, GRID), both(every, pairs, GRID)
    for name in every:
        for got, wanted in zip(traced[name], static[name], strict=True):
            np.testing.assert_array_equal(*np.broadcast_arrays(got, wanted), err_msg=name)


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
        with pytest.raises(TypeError, match=r"&, \| and ~"):
            write()


@pytest.mark.parametrize("combine", [nnx.combine_masks, linen.combine_masks])
def test_flaxs_combine_masks_refuses_mask_objects(combine):
    array = np.ones((1, 1, T, S), bool)
    for mask, name in ((Causal(), "Causal"), (Causal() & Prefix(3), "And")):
        for pair in ((mask, array), (array, mask), (mask, mask)):
            with pytest.raises(AttributeError, match=rf"{name} is a mask object, .* & masks\.Dense\(array\)"):
                combine(*pair)
    assert not hasattr(Causal(), "ndim")
    joined = Causal() & Dense(array)  # what the error says to write
    np.testing.assert_array_equal(joined(0, 0, np.arange(3)[:, None], np.arange(3)), np.tri(3, dtype=bool))


def test_a_mask_as_an_argument_of_a_jitted_function():
    q, kv = np.arange(T)[:, None], np.arange(T)[None, :]

    @jax.jit
    @chex.assert_max_traces(2)
    def seen(mask):
        return mask(0, 0, q, kv)

    # new arrays and numbers in an equal mask must not compile again; a different function must
    for ids, left, function in ((IDS, 2, plain), (0 * IDS, 3, plain), (IDS, 2, lambda *at: plain(*at))):
        mask = Segments(ids) & SlidingWindow(left, 1) & function
        np.testing.assert_array_equal(seen(mask), mask(0, 0, q, kv))


@pytest.mark.parametrize("cast", [
    np.uint8,
    np.int8,
    np.uint32,
    np.int64,
    *(pytest.param(x, marks=pytest.mark.slow) for x in (jnp.uint8, jnp.uint32)),
])  # fmt: skip
def test_narrow_and_unsigned_integers_mean_the_same(cast):
    q = np.arange(T)
    plain = [Causal() & SlidingWindow(2, 1), Prefix(3), Padding(np.array([3, 5])), Segments(IDS)]
    narrow = [Causal() & SlidingWindow(cast(2), cast(1)), Prefix(cast(3)), Padding(cast([3, 5])), Segments(cast(IDS))]

    def seen(some_masks, q):
        with mod_semantics():
            return [np.True_ & mask(0, 0, q[:, None], q[None, :]) for mask in some_masks]

    compiled = seen if cast(0).__class__.__module__ == "numpy" else jax.jit(seen)
    for positions in (q, cast(q)):
        for got, wanted in zip(compiled(narrow, positions), seen(plain, q), strict=True):
            np.testing.assert_array_equal(got, wanted)


ENDS = np.array([-(2**31), -(2**31) + 1, -(2**30), -1, 0, 3, 2**30, 2**31 - 4, 2**31 - 1])


@pytest.mark.parametrize("left, right", [(0, 0), (3, 1), (2**30, 2), (2**31 - 2, 0), (-1, 4), (2**40, 2**40)])
@pytest.mark.parametrize("traced", [False, True])
def test_windows_at_the_ends_of_int32(traced, left, right):
    """Pair by pair and for whole blocks, compared with Python integers, which do not overflow."""
    wanted = np.array([[-left <= int(j) - int(i) <= right for j in ENDS] for i in ENDS])
    first, last = np.array(list(itertools.combinations(range(len(ENDS)), 2))).T
    window = jnp.array(np.clip([left, right], -(2**31), 2**31 - 1), jnp.int32) if traced else (left, right)

    def seen_and_bounds(window, ends):
        mask, (low, high) = SlidingWindow(*window), (ends[first], ends[last])
        with mod_semantics():
            seen = mask(0, 0, ends[:, None], ends[None, :])
        return seen, masks.bounds(mask, 0, 0, low[:, None], high[:, None], low[None, :], high[None, :])

    def interval(window, ends):
        return masks.interval(SlidingWindow(*window), ends[0], ends[0], ends)

    low, high = (jax.jit(interval) if traced else interval)(window, ENDS.astype(np.int32))
    low, high = (np.broadcast_to(end, len(ENDS))[:, None] for end in (low, high))
    inside = (ENDS > -(2**31)) & (ENDS < 2**31 - 1)  # keys at the ends are not part of any interval
    np.testing.assert_array_equal(((low <= ENDS) & (ENDS <= high))[:, inside], wanted[:, inside])

    seen, (may, must) = (jax.jit(seen_and_bounds) if traced else seen_and_bounds)(window, ENDS.astype(np.int32))
    np.testing.assert_array_equal(np.broadcast_to(seen, wanted.shape), wanted)
    may, must = (np.broadcast_to(x, (len(first),) * 2) for x in (may, must))
    for i, j in np.ndindex(may.shape):
        block = wanted[first[i] : last[i] + 1, first[j] : last[j] + 1]
        assert (may[i, j] or not block.any()) and (block.all() or not must[i, j])


@pytest.mark.parametrize("name", MEANING)
def test_bounds_at_the_ends_of_int32(name):
    """Blocks that extend past every sequence are not wrongly called empty or full."""
    mask, sees = MEANING[name]
    for low, high in (((-(2**31), 2), (1, 2**31 - 1)), ((-(2**31), 2**31 - 1), (0, 3))):
        for q_ends, kv_ends in ((low, high), (high, low)):
            may, must = masks.bounds(mask, 1, 2, *(np.int32(x) for x in (*q_ends, *kv_ends)))
            seen = brute_force(sees, 1, 2, *(range(max(a, -3), min(b, 15) + 1) for a, b in (q_ends, kv_ends)))
            assert (may or not seen.any()) and not (must and not seen.all())


@pytest.mark.parametrize("traced", [False, True])
def test_lengths_at_the_ends_of_int32_have_intervals(traced):
    at = np.array([[0], [1], [2]], np.int32), np.int32(0), np.int32(0)
    of = jax.jit(masks.interval) if traced else masks.interval
    for length in (-(2**31), -(2**31) + 1, 2**31 - 1):
        for mask in (Prefix(np.int32(length)), Padding(np.array([length, 5], np.int32))):
            first, last = (np.broadcast_to(end, (3, 1)) for end in of(mask, *at))
            for key in (-(2**31) + 1, 0, 4, 2**31 - 2):
                wanted = [key < length, key < 5, False] if isinstance(mask, Padding) else [key < length] * 3
                np.testing.assert_array_equal(((first <= key) & (key <= last)).ravel(), wanted)


class TestRanges:
    """The basis of ``bounds`` of segments: the smallest and largest id in any interval."""

    @staticmethod
    def by_hand(ids, b, low, high):
        inside = ids[b][max(low, 0) : max(high + 1, 0)] if 0 <= b < len(ids) else ids[0][:0]
        info = np.iinfo(ids.dtype)
        whole = 0 <= b < len(ids) and low >= 0 and high < ids.shape[1]
        return inside.min(initial=info.max), inside.max(initial=info.min), whole

    @pytest.mark.parametrize("length", [0, 1, 7, 511, 512, 513, 1700])
    def test_any_interval(self, length):
        rng = np.random.default_rng(length)
        ids = rng.integers(-5, 5000, (2, length), np.int32)
        low = rng.integers(-20, length + 20, 60)
        high = low + rng.integers(0, rng.choice([3, 600, length + 9], 60))
        low[:3], high[:3] = [0, 0, -(2**31)], [0, length - 1, 2**31 - 1]
        b = rng.integers(0, 3, 60)
        expected = [self.by_hand(ids, *at) for at in zip(b, low, high, strict=True)]
        result = range_in_row(ids, b, low, high)
        assert all(isinstance(x, np.ndarray) for x in result)
        for got, wanted in zip(result, zip(*expected, strict=True), strict=True):
            np.testing.assert_array_equal(got, wanted)

    @staticmethod
    def check_traced(ids, at):
        with mod_semantics():
            result = jax.jit(range_in_row)(ids, *at)
        for got, wanted in zip(result, range_in_row(ids, *at), strict=True):
            np.testing.assert_array_equal(got, wanted)

    def test_traced_is_the_same(self):
        ids = np.random.default_rng(0).integers(0, 5000, (2, 1300), np.int32)
        at = (np.array([0, 1])[:, None], np.array([0, 100, 700, -5]), np.array([511, 1299, 701, 2000]))
        self.check_traced(ids, at)

    @pytest.mark.parametrize("dtype", [np.uint32, pytest.param(np.uint64, marks=pytest.mark.slow)])
    def test_traced_ids_of_any_type(self, dtype):
        ids = np.random.default_rng(0).choice(np.array([0, 3, -1, -2]).astype(dtype), (1, 30))
        at = (0, np.array([0, 9, 40]), np.array([7, 60, 50]))
        with jax.enable_x64(dtype == np.uint64):
            self.check_traced(ids, at)

    def test_linear_memory(self):
        """Static and traced; one bool per block and position would take 128 MiB."""
        ids, low = np.repeat(np.arange(4096, dtype=np.int32), 64), np.arange(0, 2**18, 512)
        tracemalloc.start()
        range_in_row(ids, 0, low, low + 511)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        with mod_semantics():
            compiled = jax.jit(lambda ids: range_in_row(ids, 0, low, low + 511)).lower(ids).compile()
        assert max(peak, compiled.memory_analysis().temp_size_in_bytes) < 24 * 2**20


def test_a_static_table_is_summed_block_by_block():
    """For 2048 by 2048 pairs, a summed-area table takes 16 MiB; one of blocks is small compared with the pairs."""
    mask, low = Dense(np.tri(2048, dtype=bool)), np.arange(0, 2048, 256)
    tracemalloc.start()
    may, must = masks.bounds(mask, 0, 0, low[:, None], low[:, None] + 255, low, low + 255)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(may, np.tri(8, dtype=bool))
    np.testing.assert_array_equal(must, np.tri(8, k=-1, dtype=bool))
    assert peak < 2**20


@pytest.mark.parametrize("mask, sizes, message", [
    (Padding(np.array([8, 8])), (4, 2, 7, 7), r"Padding: lengths must be \[B\] = \[4\] .*got shape \[2\]"),
    (Segments(IDS), (3, 2, 7, 7), r"query_ids must be \[B, T\] = \[3, 7\] .*got shape \[2, 7\]"),
    (Segments(IDS), (2, 2, 7, 8), "query_ids must be .* keys of another length than the queries need kv_ids"),
    (Segments(IDS, KV_IDS), (2, 2, 7, 8), r"kv_ids must be \[B, S\] = \[2, 8\] .*got shape \[2, 11\]"),
    (Segments(IDS), (3, 2, None, None), r"query_ids must be \[B, T\] = \[3, any\]"),
    (Dense(TABLE), (2, 4, T, S), r"array must be \[B, N, T, S\] = \[2, 4, 7, 11\] .*got shape \[2, 3, 7, 11\]"),
    (~(Causal() & Padding(np.array([8, 8]))), (4, 2, 7, 7), "Padding: lengths"),
    (Causal() | (Prefix(3) | Dense(TABLE)), (2, 3, T, 9), "Dense: array"),
])  # fmt: skip
def test_a_mask_that_does_not_fit(mask, sizes, message):
    with pytest.raises(ValueError, match=message):
        mask.check(*sizes)


@pytest.mark.parametrize("mask, sizes", [
    (Padding(np.array([8])), (4, 2, 7, 7)),
    (Segments(IDS[:1]), (3, 2, 7, 7)),
    (Segments(IDS, KV_IDS), (2, 5, 7, 11)),
    (Segments(IDS), (2, 2, None, None)),
    (Dense(TABLE[:1, :, :1]), (4, 3, 9, 11)),
    (Dense(TABLE), (2, 3, None, None)),
    (Causal() & plain & ~SlidingWindow(3), (4, 2, 7, 7)),
])  # fmt: skip
def test_a_mask_that_fits(mask, sizes):
    assert mask.check(*sizes) is None  # it raises if it does not fit: see test_a_mask_that_does_not_fit


@pytest.mark.parametrize("make, message", [
    (lambda: Padding(3), "Padding: lengths must be an array"),
    (lambda: Padding(np.ones((2, 2), int)), r"lengths must be integers of rank 1, got int64 of shape \(2, 2\)"),
    (lambda: Segments(np.ones(3)), "query_ids must be integers"),
    (lambda: Segments(np.ones(3, int), np.ones(3)), "kv_ids must be integers"),
    (lambda: Dense(np.ones((3, 3))), "array must be bools"),
    (lambda: Causal() & np.ones((3, 3), bool), r"wrap an array as masks\.Dense"),
    (lambda: masks.and_masks(), "at least one mask"),
    (lambda: Causal() | 3, "must be a callable"),
    (lambda: Causal() & Causal, r"the class Causal; write Causal\(\.\.\.\)"),
    (lambda: SlidingWindow("2"), "left must be an integer or an integer scalar array, got str"),
    (lambda: SlidingWindow(2, 1.5), "right must be an integer .* got float"),
    (lambda: Prefix(jnp.ones(3, int)), r"length must be an integer .* got int32 of shape \(3,\)"),
    (lambda: Padding(np.array([3, 2**31])), "lengths must lie within int32, .* to 2147483648"),
    (lambda: Segments(np.array([0, 2**32])), "query_ids must lie within int32"),
    (lambda: Segments(IDS, IDS - 2**32), "kv_ids must lie within int32"),
])  # fmt: skip
def test_errors_name_the_argument(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
