"""Tiles, tables of visible blocks and ``block_mask``, compared with brute force over all pairs."""

import functools
import itertools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks
from jattn._blocks import block_lists as block_lists_module
from jattn._blocks.block_lists import LARGE, SMALL, block_lists, choose_blocks, split_axis, tile
from jattn._blocks.block_mask import Visibility
from jattn.masks import Causal, Dense, Padding, Prefix, Segments, SlidingWindow

B, N, T, S = 2, 3, 7, 11
SIZE = (3, 4)
IDS = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3], [3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5]])
TABLE = np.random.default_rng(0).random((B, N, T, S)) < 0.6

# Each mask with its meaning for one pair. Hypothesis draws recipes instead of masks, because the masks' annotations are
# checked by sampling.
MEANING = {
    "causal": (lambda: Causal(), lambda b, h, q, kv: kv <= q),
    "window": (lambda: SlidingWindow(2, 1), lambda b, h, q, kv: q - 2 <= kv <= q + 1),
    "prefix": (lambda: Prefix(4), lambda b, h, q, kv: kv < 4),
    "padding": (lambda: Padding(np.array([9, 0])), lambda b, h, q, kv: kv < (9, 0)[b]),
    "segments": (lambda: Segments(IDS), lambda b, h, q, kv: 0 <= min(q, kv) and max(q, kv) < S and IDS[b, q] == IDS[b, kv]),
    "dense": (lambda: Dense(TABLE), lambda b, h, q, kv: 0 <= q < T and 0 <= kv < S and TABLE[b, h, q, kv]),
    "dense, one row": (lambda: Dense(TABLE[1, :1, :1]), lambda b, h, q, kv: 0 <= kv < S and TABLE[1, 0, 0, kv]),
    "forbid": (lambda: jattn.heads.forbid(SlidingWindow(4, 4), [0, 2]), lambda b, h, q, kv: h == 1 or not -4 <= kv - q <= 4),
    "forbid, bools": (lambda: jattn.heads.forbid(SlidingWindow(4, 4), np.arange(3) != 1), lambda b, h, q, kv: h == 1 or not -4 <= kv - q <= 4),
    "not causal": (lambda: ~Causal(), lambda b, h, q, kv: kv > q),
    "plain": (lambda: lambda b, h, q, kv: (q + 2 * kv + b + h) % 3 != 0, lambda b, h, q, kv: (q + 2 * kv + b + h) % 3 != 0),
}  # fmt: skip

POSITIONS = {
    "slots": (None, None),
    "shifted": (np.arange(T) + 3, np.arange(S) - 2),
    "a row for each sequence": (np.stack([np.arange(T) + 4, np.arange(T)[::-1] * 2])[:, None], np.stack([np.arange(S), np.roll(np.arange(S), 5)])[:, None]),
}  # fmt: skip


def pairs(sees, q_positions=None, kv_positions=None):
    """The visible pairs ``[B,N,T,S]``, one at a time."""
    positions = (q_positions, T), (kv_positions, S)
    q, kv = (np.broadcast_to(np.arange(n) if x is None else x, (B, 1, n)) for x, n in positions)
    visible = np.empty((B, N, T, S), bool)
    for b, h, t, s in np.ndindex(visible.shape):
        visible[b, h, t, s] = sees(b, h, int(q[b, 0, t]), int(kv[b, 0, s]))
    return visible


def by_blocks(visible, size=SIZE):
    """Which blocks of ``visible [..., T, S]`` have a visible pair, and which are complete and fully visible."""
    (rows, columns), (T, S) = size, visible.shape[-2:]
    shape = (*visible.shape[:-2], -(-T // rows), -(-S // columns))
    may, must = np.zeros(shape, bool), np.zeros(shape, bool)
    for at in np.ndindex(shape):
        *lead, i, j = at
        block = visible[(*lead, slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))]
        may[at], must[at] = block.any(), block.all() and block.shape == size
    return may, must


def table(some_masks, slot_masks=(), positions=(None, None), size=SIZE):
    pairs = Visibility((T, S), some_masks, slot_masks, np.arange(B)[:, None], np.arange(N)[None, :], *positions)
    return pairs.blocks(size)


def compare(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.broadcast_to(x, y.shape), y)


def check_sound(got, wanted):
    """No block with a visible pair is called empty, and none with a hidden pair or a missing row is called full."""
    (may, must), (exact_may, exact_must) = got, wanted
    assert (may | ~exact_may).all() and (exact_must | ~np.asarray(must)).all()


class TestTile:
    @hypothesis.given(st.integers(0, 6000), st.sampled_from([16, SMALL, LARGE]))
    def test_the_fewest_equal_parts(self, length, largest):
        part = block_lists_module._part(length, largest)
        parts = -(-length // part)
        assert 1 <= part <= largest and parts == -(-length // largest)
        if length <= largest:
            assert part == max(length, 1)
        else:
            assert part % 16 == 0 and (part - 16) * parts < length

    def test_rows_and_columns_by_themselves(self):
        assert tile(5, 3000) == (5, 1008) and tile(1025, 0) == (528, 1) and tile(2048, 600, SMALL) == (512, 304)


class TestCut:
    @hypothesis.given(st.data())
    def test_every_axis_and_fill(self, data):
        shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        axis = data.draw(st.integers(-len(shape), len(shape) - 1))
        size, fill = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0, 9, None]))
        x = np.random.default_rng(0).integers(0, 9, shape)
        result = split_axis(x, axis, size, fill)
        assert isinstance(result, np.ndarray)
        axis %= len(shape)
        moved, parts = np.moveaxis(result, (axis, axis + 1), (0, 1)), np.moveaxis(x, axis, 0)
        assert moved.shape == (-(-shape[axis] // size), size, *parts.shape[1:])
        for at, entry in enumerate(moved.reshape(-1, *parts.shape[1:])):
            np.testing.assert_array_equal(entry, parts[at] if at < len(parts) else parts[-1] if fill is None else fill)

    @pytest.mark.parametrize("fill", [False, None])
    def test_traced(self, fill):
        got = jax.jit(lambda x: split_axis(x, -2, 4, fill))(TABLE)
        np.testing.assert_array_equal(got, split_axis(TABLE, -2, 4, fill))

    def test_nothing_to_cut(self):
        assert split_axis(np.arange(0), 0, 3, fill=None).shape == (0, 3)


class TestVisibleBlocks:
    @pytest.mark.parametrize("where", POSITIONS)
    @pytest.mark.parametrize("name", MEANING)
    def test_each_mask(self, name, where):
        make, sees = MEANING[name]
        got, wanted = table([make()], positions=POSITIONS[where]), by_blocks(pairs(sees, *POSITIONS[where]))
        check_sound(got, wanted)
        assert all(isinstance(x, np.ndarray) for x in got), "static input must give NumPy output"
        # unsorted positions bound a block by their range, and a plain function has no bounds
        if where != "a row for each sequence" and name != "plain":
            compare(got[1:], wanted[1:])
            if name != "segments" or where == "slots":  # positions beyond the table have no exact ids
                compare(got, wanted)

    def test_traced_is_the_same(self):
        """All masks and positions are arguments of one compiled function, with leading axes ``[B,N]``."""
        every = {name: make() for name, (make, _) in MEANING.items() if name != "plain"}
        q, kv = POSITIONS["a row for each sequence"]

        def tables(every, q, kv):
            return {name: (table([mask]), table([mask], positions=(q, kv))) for name, mask in every.items()}

        traced, static = jax.jit(tables)(every, q, kv), tables(every, q, kv)
        for name in every:
            compare(jax.tree.leaves(traced[name]), jax.tree.leaves(static[name]))

    def test_captured_arrays_are_static(self):
        """For masks, positions and slot masks, inside a jitted function and in NumPy."""
        q, kv = POSITIONS["shifted"]
        some = [Segments(jnp.asarray(IDS)) & SlidingWindow(jnp.int32(3)), ~Dense(jnp.asarray(TABLE))]
        some.append(Padding(jnp.array([9, 4])))
        slots, positions = jnp.ones((T, S), bool), (jnp.asarray(q), jnp.asarray(kv))
        kinds = []
        jax.eval_shape(lambda: kinds.extend(map(type, table(some, [slots], positions))))
        assert kinds == [np.ndarray] * 2
        plain = [Segments(IDS) & SlidingWindow(3), ~Dense(TABLE), Padding(np.array([9, 4]))]
        compare(table(some, [slots], positions), table(plain, [np.ones((T, S), bool)], (q, kv)))

    def test_an_axis_stays_1_where_nothing_depends_on_it(self):
        q, kv = POSITIONS["a row for each sequence"]
        shapes = {(3, 3): table([Causal()]), (B, 1, 3, 3): table([Causal()], positions=(q, kv)), (B, N, 3, 3): table([Dense(TABLE)])}  # fmt: skip
        for shape, blocks in shapes.items():
            assert all(x.shape == shape for x in blocks)

    @pytest.mark.parametrize(
        "part",
        [np.s_[0, 0], np.s_[0, 0, :1], np.s_[0, 0, :, :1], np.s_[:, :1], np.s_[:1, :, :1], np.s_[:, :1, :, :1], np.s_[:]],
        ids=lambda part: str(TABLE[part].shape),
    )  # fmt: skip
    def test_slot_masks(self, part):
        array = TABLE[part] if TABLE[part].shape[-2] != 1 else np.arange(S) < TABLE[part].sum(-1, keepdims=True)
        wanted = by_blocks(np.broadcast_to(array, (B, N, T, S)))
        got = table([], [array])
        assert all(isinstance(x, np.ndarray) for x in got)
        compare(got, wanted)
        compare(jax.jit(lambda array: table([], [array]))(array), wanted)

    def test_everything_must_hold_at_once(self):
        lengths = np.array([4, 9])
        by_slot = [np.arange(S)[None, None, None, :] < lengths[:, None, None, None], np.arange(T)[:, None] < 6]
        q, kv = POSITIONS["shifted"]
        seen = pairs(lambda b, h, q, kv: q - 7 <= kv <= q, q, kv) & by_slot[0] & by_slot[1]
        got = table([Causal(), SlidingWindow(7)], by_slot, (q, kv))
        check_sound(got, by_blocks(seen))
        assert got[0].mean() < 0.7 and got[1].any()

    @hypothesis.given(st.data())
    def test_sound_for_any_composition(self, data):
        names = st.sampled_from(sorted(MEANING))
        first, second, third = (MEANING[data.draw(names)] for _ in range(3))
        size = data.draw(st.tuples(st.integers(1, T + 1), st.integers(1, S + 1)))
        q, kv = (data.draw(st.permutations(range(length)).map(np.array)) for length in (T, S))
        mask = masks.or_masks(first[0](), ~masks.and_masks(second[0]()))
        seen = pairs(lambda *at: (first[1](*at) or not second[1](*at)) and third[1](*at), q, kv)
        check_sound(table([mask, third[0]()], positions=(q, kv), size=size), by_blocks(seen, size))

    @pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, lengths):
        got = Visibility(lengths, [Causal()], [np.ones(lengths, bool)]).blocks(SIZE)
        assert [x.shape for x in got] == [(-(-lengths[0] // 3), -(-lengths[1] // 4))] * 2


class TestChooseBlocks:
    @staticmethod
    def see(mask, T, S):
        return Visibility((T, S), mask).blocks

    @pytest.mark.parametrize("mask, length, wanted", [
        ([SlidingWindow(256)], 4096, SMALL),
        ([Causal()], 2048, SMALL),
        ([Causal()], 4096, LARGE),
        ([], 2048, LARGE),
        ([Prefix(512)], 4096, SMALL),
        ([lambda b, h, q, kv: kv <= q], 4096, LARGE),
        ([SlidingWindow(10)], 300, 300),
    ])  # fmt: skip
    def test_small_where_that_leaves_out_enough(self, mask, length, wanted):
        see = self.see(mask, length, length)
        size, blocks, pieces = choose_blocks(see, length, length)
        assert size == (wanted, wanted) and pieces == ()
        compare(blocks, see(size))

    def test_a_table_known_only_when_it_runs(self):
        sizes, width = [], jnp.int32(256)
        choose = lambda width: sizes.append(choose_blocks(self.see([SlidingWindow(width)], 4096, 4096), 4096, 4096)[0])
        jax.jit(choose)(width)
        jax.jit(lambda: choose(width))()  # captured, so its value is known
        assert sizes == [(LARGE, LARGE), (SMALL, SMALL)]

    @pytest.mark.parametrize("mask, length, size, pieces", [
        ([Causal()], 2048, LARGE, [(0, 256, 0, 256), (256, 512, 0, 512), (512, 768, 0, 768), (768, 1024, 0, 1024)]),
        ([Causal()], 1024, SMALL, [(0, 256, 0, 256), (256, 512, 0, 512)]),
        ([~Causal()], 2048, LARGE, [(0, 256, 0, 1024), (256, 512, 256, 1024), (512, 768, 512, 1024), (768, 1024, 768, 1024)]),
        ([Prefix(256)], 4096, LARGE, [(at, at + 256, 0, 256) for at in (0, 256, 512, 768)]),
        ([lambda b, h, q, kv: (q // 256) % 2 == 1], 2048, LARGE, []),  # what a plain function sees is not known
        ([Causal()], 3000, LARGE, []),  # the last blocks are partial for their padding, too
        ([SlidingWindow(600)], 4096, SMALL, []),  # both edges of the window together need all
        ([], 2048, LARGE, []),
    ])  # fmt: skip
    def test_partial_blocks_are_cut_where_that_leaves_out_enough(self, mask, length, size, pieces):
        see = self.see(mask, length, length)
        result, _, cut = choose_blocks(see, length, length, cuts=True, large_if_cut=True)
        assert [(r.start, r.stop, c.start, c.stop) for r, c in cut] == pieces and result == tile(length, length, size)

    def test_sizes_do_not_depend_on_cuts_where_large_blocks_are_not_asked_for(self):
        for length, mask in itertools.product((1024, 2048, 4096), ([Causal()], [Prefix(256)], [SlidingWindow(600)])):
            see = self.see(mask, length, length)
            assert choose_blocks(see, length, length, cuts=True)[0] == choose_blocks(see, length, length)[0]
        _, _, pieces = choose_blocks(self.see([Causal()], 2048, 2048), 2048, 2048, cuts=True)
        assert pieces == ((slice(0, 256), slice(0, 256)), (slice(256, 512), slice(0, 512)))

    def test_rows_that_no_partial_block_sees_are_in_no_piece(self):
        seen = np.zeros((1024, 1024), bool)
        seen[300:310, :20] = True
        see = Visibility((1024, 1024), [Dense(seen[None, None])]).blocks
        _, _, cut = choose_blocks(see, 1024, 1024, (512, 512), cuts=True)
        assert cut == ((slice(256, 512), slice(0, 256)),)

    def test_block_sizes_override_and_are_cut_to_the_lengths(self):
        wanted = {(3, 4): (3, 4), (100, 4): (T, 4), (3, 100): (3, S)}
        for request, size in wanted.items():
            result = choose_blocks(self.see([Causal()], T, S), T, S, request, cuts=True)
            assert result[0] == size and result[2] == ()
            compare(result[1], self.see([Causal()], T, S)(size))
        assert choose_blocks(self.see([], 0, 0), 0, 0, (3, 4))[0] == (1, 1)

    @pytest.mark.parametrize("lengths", [(0, 2000), (2000, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, lengths):
        _, (may, must), pieces = choose_blocks(self.see([Causal()], *lengths), *lengths, cuts=True)
        assert pieces == () and may.size == must.size == 0

    @pytest.mark.parametrize("sizes", [(0, 1), (3, -4)])
    def test_sizes_that_are_not_positive(self, sizes):
        by_choice = lambda: choose_blocks(self.see([], T, S), T, S, sizes)
        for call in by_choice, lambda: jattn.block_mask(Causal(), T, S, block_sizes=sizes):
            with pytest.raises(
                ValueError, match=f"block_sizes must be two positive integers .* got {re.escape(str(sizes))}"
            ):
                call()

    @pytest.mark.parametrize("sizes", [(3,), (1, 2, 3), 5, "ab", (2.0, 3.0), (None, 3)])
    def test_sizes_that_are_not_two_integers(self, sizes):
        with pytest.raises(ValueError, match=r"block_sizes must be two .* got"):
            block_lists_module.two_sizes(sizes)


class TestBlockLists:
    @pytest.mark.slow
    @hypothesis.given(st.sampled_from([(3, 5), (4, 1), (0, 3), (3, 0)]), st.integers(0, 99))
    def test_static_and_dynamic_have_the_same_blocks_in_the_same_order(self, shape, seed):
        may, full = (np.random.default_rng([seed, i]).random(shape) < 0.6 for i in range(2))
        must = may & full
        for static, dynamic, wanted in zip(
            block_lists(may, must), block_lists(jnp.asarray(may), jnp.asarray(must)), (must, may & ~must), strict=True
        ):
            assert static.whole and not dynamic.whole
            starts, count = np.concatenate([[0], np.cumsum(wanted.sum(1))]), int(wanted.sum())
            in_order = np.argwhere(wanted)
            np.testing.assert_array_equal(np.stack([static.row, static.column], 1), in_order)
            np.testing.assert_array_equal(np.stack([dynamic.row, dynamic.column], 1)[:count], in_order)
            assert dynamic.row.shape == dynamic.column.shape == (may.size,)
            for one in (static, dynamic):
                np.testing.assert_array_equal(one.starts, starts)
                assert one.row.dtype == one.column.dtype == one.starts.dtype == np.int32


class TestAllSeen:
    @staticmethod
    def known(some_masks, slot_masks=(), positions=(None, None), lengths=(S, S)):
        return Visibility(lengths, some_masks, slot_masks, np.arange(B)[:, None], np.arange(N), *positions).all_seen()

    def test_where_every_query_sees_the_key_in_its_own_slot(self):
        q = np.stack([np.arange(S), np.arange(S)[::-1]])[:, None]
        assert self.known([]) and self.known([Causal(), SlidingWindow(2)]) and self.known([Segments(IDS) & Causal()])
        assert self.known([Causal()], positions=(q, q))

    def test_where_one_does_not_or_nothing_is_known(self):
        q = np.stack([np.arange(S), np.arange(S)[::-1]])[:, None]
        assert not self.known([~Causal()]) and not self.known([Padding(np.array([S, S - 1]))])
        assert not self.known([Causal()], positions=(q, q[::-1])) and not self.known([Causal()], lengths=(S, S + 1))
        assert not self.known([], [np.ones((S, S), bool)])
        answers = []
        jax.eval_shape(lambda n: answers.append(self.known([Prefix(n)])), jnp.int32(S))
        assert answers == [False]

    def test_arrays_that_are_captured_are_looked_at(self):
        answers, mask, q = [], Prefix(jnp.int32(S)) & Segments(jnp.asarray(IDS)), jnp.arange(S)
        jax.eval_shape(lambda: answers.append(self.known([mask], positions=(q, q))))
        assert answers == [True]


class TestBlockMask:
    @pytest.mark.parametrize("sizes", [SIZE, (1, 5), (7, 11), (9, 2), None], ids=str)
    def test_pair_by_pair_and_exact_on_its_own_grid(self, sizes):
        plain, sees = MEANING["plain"][0](), MEANING["plain"][1]
        mask = jattn.block_mask(plain, T, S, batch=B, num_heads=N, block_sizes=sizes)
        at = np.ix_(range(B), range(N), range(-2, T + 3), range(-2, S + 3))
        np.testing.assert_array_equal(mask(*at), plain(*at))
        rows, columns = sizes or (T, S)
        q_min, kv_min = np.arange(0, T, rows)[:, None], np.arange(0, S, columns)
        q_max, kv_max = np.minimum(q_min + rows, T) - 1, np.minimum(kv_min + columns, S) - 1
        may, must = masks.bounds(mask, *np.ix_(range(B), range(N), [0], [0])[:2], q_min, q_max, kv_min, kv_max)
        visible = pairs(sees)
        for b, h, i, j in np.ndindex(may.shape):
            block = visible[b, h, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert (may[b, h, i, j], must[b, h, i, j]) == (block.any(), block.all())

    @hypothesis.given(st.data())
    def test_sound_for_any_block_also_beyond_the_table(self, data):
        """Nothing is known about other positions, sequences and heads: they may be visible, but none must be."""
        sees = lambda b, h, q, kv: kv <= q + 3 * b - h
        mask = self.staircase()
        ends = (st.lists(st.integers(-1, length), min_size=2, max_size=2).map(sorted) for length in (T, S))
        (q_min, q_max), (kv_min, kv_max) = (data.draw(pair) for pair in ends)
        b, h = data.draw(st.integers(0, B)), data.draw(st.integers(0, N))
        may, must = masks.bounds(mask, b, h, q_min, q_max, kv_min, kv_max)
        visible = [sees(b, h, q, kv) for q in range(q_min, q_max + 1) for kv in range(kv_min, kv_max + 1)]
        assert (may or not any(visible)) and (all(visible) or not must)
        if b == B or h == N or min(q_min, kv_min) < 0 or q_max == T or kv_max == S:
            assert may and not must

    @staticmethod
    @functools.cache
    def staircase():
        return jattn.block_mask(lambda b, h, q, kv: kv <= q + 3 * b - h, T, S, batch=B, num_heads=N, block_sizes=(2, 3))

    def test_one_table_for_all_where_the_mask_is_the_same(self):
        mask = jattn.block_mask(lambda b, h, q, kv: kv <= q, T, S, block_sizes=SIZE)
        got = table([mask])
        assert all(x.shape == (3, 3) for x in got), "sequences and heads that share it need no axis"
        compare(got, [x[0, 0] for x in by_blocks(pairs(lambda b, h, q, kv: kv <= q))])

    def test_static_outside_jit_also_where_it_is_used_inside(self):
        mask = self.staircase()
        static = table([mask])
        assert all(isinstance(x, np.ndarray) for x in static)
        kinds = []
        jax.jit(lambda _: kinds.extend(type(x) for x in table([mask])))(0)
        assert kinds == [np.ndarray, np.ndarray]

    def test_as_an_argument_and_made_inside_jit(self):
        mask = self.staircase()
        static, slope = table([mask]), jnp.int32(3)

        def inside(slope, argument):
            sizes = {"batch": B, "num_heads": N, "block_sizes": (2, 3)}
            local = jattn.block_mask(lambda b, h, q, kv: kv <= q + slope * b - h, T, S, **sizes)
            return table([argument]), table([local])

        for traced in jax.jit(inside)(slope, mask):
            compare(traced, static)
        again = jax.tree.unflatten(jax.tree.structure(mask), jax.tree.leaves(mask))
        compare(table([again]), static)

    def test_joins(self):
        sees = lambda b, h, q, kv: kv <= q + 3 * b - h
        mask, q, kv = self.staircase(), np.arange(T)[:, None], np.arange(S)
        for joined, meaning in (
            (mask & Prefix(5), lambda *at: sees(*at) and at[3] < 5),
            (Prefix(5) | mask, lambda *at: sees(*at) or at[3] < 5),
            (~mask, lambda *at: not sees(*at)),
            (mask & mask, sees),
        ):
            visible = pairs(meaning)
            np.testing.assert_array_equal(joined(1, 2, q, kv), visible[1, 2])
            check_sound(table([joined]), by_blocks(visible))
        assert not table([~mask])[0].all(), "a full block must be empty in the inverse"

    @pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, lengths):
        mask = jattn.block_mask(lambda b, h, q, kv: kv <= q, *lengths)
        may, must = masks.bounds(mask, 0, 0, 0, 2, 0, 2)
        assert may and not must
        got = Visibility(lengths, [mask]).blocks(SIZE)
        assert all(x.size == 0 for x in got)

    def test_attention_by_it(self):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.normal(size=(B + 1, n, N + 1, 4)), jnp.float32) for n in (T, S, S))
        options = {"implementation": "blockwise", "return_residual": True}
        plain = lambda b, h, q, kv: kv <= q + 3 * b - h
        got = jattn.dot_product_attention(q, k, v, mask=self.staircase(), **options)
        wanted = jattn.dot_product_attention(q, k, v, mask=plain, **options | {"implementation": "xla"})
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-6)

    @pytest.mark.parametrize("mask, error, message", [
        (lambda b, h, q, kv: 2 * (kv <= q), TypeError, "mask must return bool, got int32"),
        (lambda b, h, q, kv: kv - q.astype(float), TypeError, "mask must return bool, got float32"),
        (lambda b, h, q, kv: (kv <= q)[None], ValueError, "mask must return an array that broadcasts"),
        (lambda b, h, q, kv: jnp.ones((2, 2), bool), ValueError, "mask must return an array that broadcasts"),
    ])  # fmt: skip
    def test_what_a_mask_must_not_return(self, mask, error, message):
        with pytest.raises(error, match=message):
            jattn.block_mask(mask, T, S)

    @pytest.mark.parametrize("mask, index, argument", [
        (lambda b, h, q, kv: kv <= q + h, "h", "num_heads"),
        (lambda b, h, q, kv: kv < jnp.array([3, 4])[b], "b", "batch"),
        (Segments(IDS) & Causal(), "b", "batch"),
        (Dense(TABLE[:1]), "h", "num_heads"),
    ])  # fmt: skip
    def test_a_mask_that_differs_where_nobody_says_so(self, mask, index, argument):
        with pytest.raises(ValueError, match=f"mask depends on {index}; pass {argument}="):
            jattn.block_mask(mask, T, S)
        with pytest.raises(ValueError, match=f"mask depends on {index}"):
            jax.jit(lambda: jattn.block_mask(mask, T, S))()

    @pytest.mark.parametrize("mask", [Segments(IDS[:1]), Dense(TABLE[:1, :1]), Padding(np.array([3]))])
    def test_a_table_of_one_row_does_not_differ(self, mask):
        block_mask = jattn.block_mask(mask, T, S)
        assert block_mask.any_visible.shape[:2] == (1, 1)
        at = np.ix_(range(B), range(N), range(T), range(S))
        np.testing.assert_array_equal(*np.broadcast_arrays(block_mask(*at), mask(0, 0, *at[2:])))

    def test_asking_takes_linear_memory(self):
        n = 4096
        visible = jax.jit(lambda shift: jattn.block_mask(lambda b, h, q, kv: kv <= q + shift, n, n).any_visible)
        memory = visible.lower(jnp.int32(0)).compile().memory_analysis()
        assert memory.temp_size_in_bytes < n * n / 8  # one byte per pair would be eight times as much


def test_runs_of_rows_have_as_many_blocks():
    def runs(*counts, full=()):
        table = np.arange(9) < np.array(counts)[:, None]
        is_full = np.isin(np.arange(len(counts)), full)[:, None]
        return block_lists_module.runs_of_rows(block_lists(table, table & is_full))

    assert runs(3, 3, 3) == [(0, 3)]
    assert runs(2, 3, 3, 3) == [(0, 1), (1, 4)]  # a window
    assert runs(2, 2, 2, full=[2]) == [(0, 2), (2, 3)]
    assert runs(1, 2, 3, 4) == [(0, 4)]  # causal: too many
    table = jnp.ones((3, 3), bool)
    assert block_lists_module.runs_of_rows(block_lists(table, table)) == [(0, 3)] and runs() == [(0, 0)]
