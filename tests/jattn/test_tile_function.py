"""Masks and score functions, separated into what depends on one index and what depends on pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import masks, score_mods
from jattn._mods.tile_function import HEAD, KEY, QUERY, NotElementwise, make_tile_function

B, N, L = 2, 4, 6
IDS = np.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2]], np.int32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
SCORES = np.random.default_rng(0).normal(size=(L, L)).astype(np.float32)
MODS = {
    "causal": masks.Causal(),
    "segments": masks.Segments(jnp.asarray(IDS)) & masks.Causal(),
    "window": masks.SlidingWindow(jnp.asarray(2), 1),
    "lengths": masks.Padding(jnp.asarray(np.array([3, 5]))) | masks.Prefix(2),
    "not": ~masks.Prefix(3),
    "dilated": lambda b, h, q, kv: ((q - kv) % 4 == 0) & (kv <= q),
    "by head": lambda b, h, q, kv: q < h + b,
}
SCORE_MODS = {
    "alibi": score_mods.Alibi(jnp.asarray(SLOPES)),
    "capped": score_mods.then(score_mods.Alibi(SLOPES), score_mods.SoftCap(jnp.asarray(2.0))),
    "captures": lambda s, b, h, q, kv: jnp.maximum(s, 0.0) * jnp.asarray(SLOPES)[h] + jnp.where(q > kv, 1.0, 2.0),
}


def of_all_pairs(mod, *score):
    """``[B,N,L,L]``, pair by pair."""
    indices = np.indices((B, N, L, L), dtype=np.int32)
    scores = [np.broadcast_to(x, (B, N, L, L)) for x in score]
    for _ in range(4):
        mod = jax.vmap(mod)
    with jax.numpy_rank_promotion("allow"):
        return np.asarray(jax.jit(mod)(*scores, *indices))


def separated(mod, *score):
    """The same from tiles ``[keys, queries]`` of each head, and what is computed outside."""
    parts, positions = make_tile_function(mod, *(x.dtype for x in score)), np.arange(L, dtype=np.int32)

    @jax.jit
    def every_tile(*score):
        arrays = parts.arrays(jnp.arange(B), jnp.arange(N), positions[None], positions[None])
        return jnp.stack([jnp.stack([one_tile(arrays, b, h, *score) for h in range(N)]) for b in range(B)])

    def one_tile(arrays, b, h, *score):
        here = [array[min(b, array.shape[0] - 1), min(h, array.shape[1] - 1)] for array in arrays]
        shaped = [
            x if over == HEAD else x[None, :] if over == QUERY else x[:, None]
            for x, over in zip(here, parts.outside.values(), strict=True)
        ]
        tile = parts.on_tile(score[0].T if score else None, positions[None, :], positions[:, None], shaped)
        return jnp.broadcast_to(tile, (L, L)).T

    return np.asarray(every_tile(*score)), set(parts.outside.values())


@pytest.mark.slow_except("causal", "lengths", "not", "dilated", "by head")
@pytest.mark.parametrize("name", MODS)
def test_a_mask_on_tiles(name):
    np.testing.assert_array_equal(separated(MODS[name])[0], of_all_pairs(MODS[name]))


@pytest.mark.parametrize("name", SCORE_MODS)
def test_a_score_function_on_tiles(name):
    result, _ = separated(SCORE_MODS[name], SCORES)
    np.testing.assert_allclose(result, of_all_pairs(SCORE_MODS[name], SCORES), rtol=1e-6, atol=1e-6)


def test_look_ups_by_one_index_happen_outside():
    assert {QUERY, KEY} <= separated(MODS["segments"])[1]
    assert separated(SCORE_MODS["alibi"], SCORES)[1] == {HEAD}
    assert separated(MODS["causal"])[1] == set()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tile_captures_no_traced_number(shape):
    """A kernel cannot."""

    @jax.make_jaxpr
    def trace(slope):
        mod = score_mods.Alibi(slope) if shape else lambda s, b, h, q, kv: s * slope
        parts = make_tile_function(mod, jnp.float32)
        position = np.zeros((1, 1), np.int32)
        outside = [x[0, 0] for x in parts.arrays(np.arange(B), np.arange(1), position, position)]
        tile = jax.make_jaxpr(parts.on_tile)(jnp.zeros((L, L)), 0, 0, outside)
        assert len(outside) == 1
        assert not tile.consts
        return outside

    trace(jnp.ones(shape))


def test_64_bits_stay_outside():
    """A kernel's arrays have 32."""
    with jax.enable_x64(True):
        wide = jnp.asarray(np.array([2**33, 2**34, 0, -(2**33)]))
        mask = lambda b, h, q, kv: (jnp.asarray(q, jnp.int64) + wide[h] < 2**33 + 3) & (kv <= q)
        np.testing.assert_array_equal(separated(mask)[0], of_all_pairs(mask))
        at = np.arange(N), np.arange(L, dtype=np.int32)[None]
        arrays = jax.eval_shape(lambda: make_tile_function(mask).arrays(np.arange(B), *at, at[1]))
    assert [x.dtype for x in arrays] == [bool]


@pytest.mark.parametrize(("mod", "score", "operation"), [
    (masks.Dense(jnp.ones((L, L), bool)), None, "dynamic_slice|gather"),
    (score_mods.RelativeBias(jnp.ones((8, N))), jnp.float32, "dynamic_slice|gather"),
    (lambda s, b, h, q, kv: s + jax.scipy.special.gammaln(s), jnp.float32, "lgamma"),
    (lambda b, h, q, kv: (jnp.arange(3) + q < kv).any(), None, "of arrays"),
])  # fmt: skip
def test_what_is_no_elementwise_operation_is_named(mod, score, operation):
    with pytest.raises(NotElementwise, match=operation):
        make_tile_function(mod, score)
