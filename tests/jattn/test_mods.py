"""Masks, score functions and caches as pytrees: structure, equality, pickling; and user-defined ones."""

import copy
import dataclasses
import pickle
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jattn
from jattn import heads, masks
from jattn._blocks import plan
from jattn._core import shard
from jattn._core.arguments import make_call
from jattn._mods import pytree
from jattn._mods.closure_convert import closure_convert
from jattn.kernels import blockwise
from jattn.masks import Causal, Dense, Padding, Prefix, Segments, SlidingWindow
from jattn.score_mods import Alibi, RelativeBias, SoftCap, then

IDS = np.array([0, 0, 1, 1], np.int32)


def see_even(b, h, q_idx, kv_idx):
    return kv_idx % 2 == 0


def halve(score, b, h, q_idx, kv_idx):
    return score / 2


# each with the names of its leaves
TREES = {
    "Causal": (lambda: Causal(), []),
    "SlidingWindow": (lambda: SlidingWindow(2, 1), [".left", ".right"]),
    "Prefix": (lambda: Prefix(3), [".length"]),
    "Padding": (lambda: Padding(np.array([3, 4])), [".lengths"]),
    "Segments": (lambda: Segments(IDS), [".query_ids"]),
    "Segments, both": (lambda: Segments(IDS, IDS), [".query_ids", ".kv_ids"]),
    "Dense": (lambda: Dense(np.ones((4, 4), bool)), [".array"]),
    "joined": (lambda: ~(Causal() | Prefix(3)) & see_even, [".left.mask.right.length"]),
    "block_mask": (lambda: jattn.block_mask(see_even, 4, 4), [".any_visible", ".all_visible"]),
    "forbid": (lambda: heads.forbid(SlidingWindow(1) & see_even, [0, 2]), [".pattern.left.left", ".pattern.left.right"]),
    "forbid, bools": (lambda: heads.forbid(see_even, np.array([True, False])), [".mask.right.heads"]),
    "Alibi": (lambda: Alibi(np.ones(2, np.float32)), [".slopes"]),
    "RelativeBias": (lambda: RelativeBias(np.ones((8, 2), np.float32), False, 16), [".table"]),
    "then": (lambda: then(SoftCap(2.0), halve, Alibi(np.ones(2))), [".first.first.cap", ".second.slopes"]),
    "KVCache": (lambda: jattn.init_cache(2, 4, 1, 3, rolling=True), [".key", ".value", ".length"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
class TestTrees:
    def test_leaves_are_named_by_their_fields(self, name):
        make, keys = TREES[name]
        assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(make())] == keys

    @pytest.mark.parametrize("leaf", [True, None, 0, PartitionSpec("x"), object()], ids=lambda x: type(x).__name__)
    def test_trees_of_anything_have_the_same_structure(self, name, leaf):
        tree = TREES[name][0]()
        other = jax.tree.map(lambda _: leaf, tree)
        if leaf is not None:
            assert jax.tree.structure(other) == jax.tree.structure(tree)
        again = jax.tree.map(lambda x, _: x, tree, other, is_leaf=lambda x: x is None)
        assert type(again) is type(tree) and jax.tree.structure(again) == jax.tree.structure(tree)

    def test_pickled_and_copied(self, name):
        tree = TREES[name][0]()
        pickled = pickle.loads(pickle.dumps(tree))
        for again in (pickled, copy.copy(tree), copy.deepcopy(tree), dataclasses.replace(tree)):
            assert jax.tree.structure(again) == jax.tree.structure(tree)
            chex.assert_trees_all_equal(again, tree)


class TestEquality:
    @pytest.mark.parametrize("make", [
        lambda: Causal(), lambda: SlidingWindow(2), lambda: Causal() & SlidingWindow(2),
        lambda: ~(Prefix(3) | see_even), lambda: heads.forbid(Causal(), [1]), lambda: then(SoftCap(30.0), halve),
    ])  # fmt: skip
    def test_by_value_where_nothing_is_an_array(self, make):
        assert make() == make() and hash(make()) == hash(make()) and make() is not make()

    def test_what_differs(self):
        different = [
            Causal(), SlidingWindow(2), SlidingWindow(2, 1), SlidingWindow(np.int32(2)), Prefix(2), ~Causal(),
            Causal() & Prefix(2), Causal() | Prefix(2), Prefix(2) & Causal(), Causal() & see_even, SoftCap(2), SoftCap(2.0),
            heads.forbid(Causal(), [1]), heads.forbid(Causal(), [2]), 3, None,
        ]  # fmt: skip
        for i, one in enumerate(different):
            assert [i == j for j in range(len(different))] == [one == other for other in different]

    def test_arrays_are_equal_to_themselves_alone(self):
        one, other = (Causal() & Segments(IDS) for _ in range(2))
        assert one == one and one != other and len({one, other}) == 2

    def test_static_to_jit(self):
        @jax.jit(static_argnums=1)
        @chex.assert_max_traces(2)
        def count(x, mask):
            return x if masks.bounds(mask, 0, 0, 0, 1, 5, 9)[0] else -x

        for mask in (SlidingWindow(2), SlidingWindow(2), Causal() & Prefix(2), Causal() & Prefix(2)):
            count(1, mask)


class TestTransformations:
    """Trees of shardings, axes, specs and booleans, as JAX and Optax take them."""

    def test_shardings(self):
        cache = jattn.init_cache(2, 4, 1, 3)
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        where = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("x")), cache)
        placed = jax.device_put(cache, where)
        assert placed.key.sharding == where.key
        moved = jax.jit(lambda cache: cache, in_shardings=(where,), out_shardings=where)(placed)
        assert moved.length.sharding == where.length
        specs = jattn.KVCache(PartitionSpec("x"), PartitionSpec("x"), PartitionSpec("x"))
        grow = jax.shard_map(lambda cache: dataclasses.replace(cache, length=cache.length + 1), mesh=mesh, in_specs=(specs,), out_specs=specs)  # fmt: skip
        assert grow(placed).length.tolist() == [1, 1]

    def test_vmap_axes(self):
        cache = dataclasses.replace(jattn.init_cache(2, 4, 1, 3), length=jnp.int32(5))
        axes = jattn.KVCache(0, 0, None)
        mapped = jax.vmap(lambda cache: (cache.key[..., 0].sum(), cache.length), in_axes=(axes,))(cache)
        assert mapped[1].tolist() == [5, 5]

    def test_optax(self):
        params = {"score_mod": Alibi(jnp.ones(2)), "w": jnp.ones(3)}
        for train in (True, False):
            chosen = {"score_mod": jax.tree.map(lambda _, train=train: train, params["score_mod"]), "w": True}
            with jax.numpy_dtype_promotion("standard"):
                optimizer = optax.masked(optax.sgd(0.5), chosen)
                updates, _ = optimizer.update(params, optimizer.init(params))
            assert updates["score_mod"].slopes.tolist() == [-0.5 if train else 1.0] * 2


@jattn.pytree_dataclass
class Dilated(masks.Mask):
    """A user-defined mask: every ``step``-th key, starting at a different one for each sequence."""

    starts: Any
    step: int = jattn.static_field(default=2)

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx >= self.starts[b]) & ((q_idx - kv_idx) % self.step == 0)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max):
        return kv_max >= self.starts[b], np.False_


class Unregistered(masks.Mask):
    def __init__(self, offset):
        self.offset = offset

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + self.offset


@dataclasses.dataclass
class Mutable:
    offset: int

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + self.offset


class TestOfOnesOwn:
    B, T, N, H = 2, 64, 2, 4

    @pytest.mark.parametrize("joined", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_bounds_are_kept_on_a_mesh(self, joined):
        mask = Dilated(jnp.array([32, 48]))
        mask = mask & see_even if joined else mask
        shape = self.B, self.T, self.N, self.H
        q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32) for i in range(3))
        args = make_call(q, k, v, mask=mask)
        place = shard.MeshAxes(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), batch=("x",))
        kinds = []

        def run(args):
            (one,) = args.masks
            kinds.append(type(one))
            may, _ = plan.block_table(args, (16, 16))
            return blockwise.Blockwise().run(args)[0], may

        out, may = jax.jit(lambda args: shard.per_device(run, args, place, ("btnd", "b")))(args)
        assert kinds == [type(mask)]
        np.testing.assert_array_equal(may[:, 0], [[False, False, True, True], [False, False, False, True]])
        wanted = jattn.dot_product_attention(q, k, v, mask=lambda *at: mask(*at), implementation="xla")
        np.testing.assert_allclose(out, wanted, atol=1e-5)

    @pytest.mark.parametrize("mod, plain", [
        (Causal() & SlidingWindow(2), False),
        (Dilated(IDS), False),
        (Causal() & Dilated(IDS), False),
        (see_even, True),
        (Causal() & see_even, True),
        (Unregistered(2), True),
        (~(Causal() | Unregistered(2)), True),
        (Mutable(2), True),
        (Causal() & Mutable(2), True),
        (then(halve, SoftCap(2.0)), True),
        (jax.tree_util.Partial(halve), True),
        (then(Alibi(np.ones(2)), SoftCap(2.0)), False),
        (jattn.block_mask(see_even, 4, 4), True),
        (heads.forbid(see_even, [0]), True),
        (None, False),
    ])  # fmt: skip
    def test_which_hold_plain_functions(self, mod, plain):
        assert pytree.holds_plain_function(mod) == plain
        if not plain:
            assert closure_convert(mod, lambda result: None, (2, 2)) is mod

    def test_hoisted_in_place(self):
        """The other parts of a mask stay as they are, and arrays captured by its function become leaves."""
        limit = jnp.int32(3)
        mask = closure_convert(Prefix(5) & (lambda b, h, q, kv: kv < limit), lambda result: None, (2, 2))
        assert jax.tree.leaves(mask) == [5, limit] and not pytree.holds_plain_function(mask)
        assert masks.bounds(mask, 0, 0, 0, 9, 5, 9) == (False, False)
        assert mask(0, 0, 0, np.arange(5)).tolist() == [True, True, True, False, False]
