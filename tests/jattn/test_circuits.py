"""Circuits, compared with the matrices they represent, and on heads built by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import heads
from jattn.heads import _circuits

M, N, K, H, D, V = 13, 6, 3, 5, 4, 17


@pytest.fixture(scope="module")
def kernels():
    rng = np.random.default_rng(0)
    shapes = {"query": (M, N, H), "key": (M, K, H), "value": (M, K, D), "out": (N, D, M)}
    shapes |= {"embed": (V, M), "unembed": (M, V)}
    return {name: normal(rng, shape) for name, shape in shapes.items()}


def normal(rng, shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def of_head(kernels, n):
    """``W_V W_O`` and ``W_Q W_K^T`` in float64, each [M,M]."""
    exact = {name: np.asarray(x, np.float64) for name, x in kernels.items()}
    shared = n // (N // K)
    ov = exact["value"][:, shared] @ exact["out"][n]
    return ov, exact["query"][:, n] @ exact["key"][:, shared].T


def test_ranks_of_heads_of_dimension_1_are_whole():
    """With one feature, a logit is one product; fused with the comparison, it is not what it was compared with."""
    rng = np.random.default_rng(0)
    embed, value, out, unembed = (normal(rng, size) for size in ((9, 4), (4, 2, 1), (2, 1, 4), (4, 6)))
    sources, targets = np.arange(9), np.arange(9) % 6
    logits = np.einsum("em,mnd,ndw,wc->nec", *(np.asarray(x, np.float64) for x in (embed, value, out, unembed)))
    expected = (logits > logits[:, sources, targets][..., None]).sum(-1)
    np.testing.assert_array_equal(heads.target_rank(embed, value, out, unembed, sources, targets), expected)


def test_circuits_are_the_products(kernels):
    @jax.jit
    def circuits(w):
        of_scores = w["embed"], w["query"], w["key"]
        ov = heads.ov_circuit(w["embed"], w["value"], w["out"], w["unembed"])
        return ov, heads.qk_circuit(*of_scores), heads.qk_circuit(*of_scores, scale=1.0)

    ov, qk, whole = circuits(kernels)
    assert ov.shape == qk.shape == (N, V, V)
    for n in range(N):
        writes, reads = of_head(kernels, n)
        embed, unembed = (np.asarray(kernels[name], np.float64) for name in ("embed", "unembed"))
        np.testing.assert_allclose(ov[n], embed @ writes @ unembed, rtol=1e-4, atol=1e-4)
        expected = embed @ reads @ embed.T / np.sqrt(H)
        np.testing.assert_allclose(qk[n], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(whole, np.sqrt(H) * np.asarray(qk), rtol=1e-5)


def test_the_copying_score_is_that_of_the_circuit(kernels):
    names = ("embed", "value", "out", "unembed")
    result = jax.jit(lambda arrays: heads.copying_score(*arrays))([kernels[name] for name in names])
    for n in range(N):
        circuit = np.asarray(kernels["embed"]) @ of_head(kernels, n)[0] @ np.asarray(kernels["unembed"])
        eigenvalues = np.linalg.eigvals(circuit)
        np.testing.assert_allclose(result["eigenvalues"][n], eigenvalues.sum().real / abs(eigenvalues).sum(), atol=1e-4)
        np.testing.assert_allclose(result["argmax"][n], (circuit.argmax(1) == np.arange(V)).mean(), atol=1e-6)


@pytest.mark.slow
def test_a_head_that_copies_and_one_that_does_the_opposite():
    """A token's embedding is a column of the identity; D is smaller than V, so copying uses a code."""
    code = jnp.linalg.qr(normal(np.random.default_rng(1), (12, 12)))[0][:, :8]
    value = jnp.stack([code, code], 1)  # [M,N,D]
    out = jnp.stack([code.T, -code.T])
    result = heads.copying_score(jnp.eye(12), value, out, jnp.eye(12))
    np.testing.assert_allclose(result["eigenvalues"], [1, -1], atol=1e-4)
    np.testing.assert_allclose(result["argmax"], [1, 0])


def test_the_rank_is_that_of_the_circuit(kernels, monkeypatch):
    monkeypatch.setattr(_circuits, "LOGITS", 4 * 2 * V)  # chunks of four pairs: 4, 4 and 3
    rng = np.random.default_rng(4)
    unembed = normal(rng, (M, 2 * V))
    sources, targets = rng.integers(0, V, 11), rng.integers(0, 2 * V, 11)
    args = [*(kernels[name] for name in ("embed", "value", "out")), unembed]
    ranks = heads.target_rank(*args, sources, targets)
    assert ranks.shape == (N, 11) and ranks.dtype == jnp.float32
    for n in range(N):
        logits = np.asarray(kernels["embed"], np.float64)[sources] @ of_head(kernels, n)[0] @ np.asarray(unembed)
        target = logits[np.arange(11), targets][:, None]
        assert np.sort(abs(logits - target), 1)[:, 1].min() > 1e-4  # no logit so close that rounding could swap them
        np.testing.assert_array_equal(ranks[n], (logits > target).sum(1))
    traced = jax.jit(heads.target_rank)
    outside, beyond = sources.copy(), targets.copy()
    outside[:2], beyond[2:4] = (-1, V), (-1, 2 * V)
    there = traced(*args, outside, beyond)
    there, ranks = np.asarray(there), np.asarray(ranks)
    assert np.isnan(there[:, :4]).all()
    np.testing.assert_array_equal(there[:, 4:], ranks[:, 4:])
    assert traced(*args, sources[:0], targets[:0]).shape == (N, 0)
    broken = np.array(kernels["out"])
    broken[1, 0, 0] = np.nan
    there = np.asarray(traced(*args[:2], broken, unembed, sources, targets))
    assert np.isnan(there[1]).all()
    np.testing.assert_array_equal(np.delete(there, 1, 0), np.delete(ranks, 1, 0))


SERIES, NEXT, LOUD = np.arange(24), np.roll(np.arange(24), -1), 39
KINDS = ("copies", "suppresses", "succeeds", "succeeds, and calls LOUD", "random", "silent")


@pytest.fixture(scope="module", params=["one-hot", "orthogonal"])
def built(request):
    """``embed, value, out, unembed`` of six heads in three groups, 40 tokens: see KINDS."""
    rng = np.random.default_rng(5)
    embed = np.eye(40) if request.param == "one-hot" else np.linalg.qr(rng.normal(size=(40, 40)))[0]
    code = np.linalg.qr(rng.normal(size=(40, 24)))[0]  # [M,D]: D is smaller than V
    value = np.stack([code, embed[SERIES].T, rng.normal(size=(40, 24))], 1)
    out = [code.T, -code.T, embed[NEXT], embed[NEXT] + 3 * embed[LOUD], rng.normal(size=(24, 40)), np.zeros((24, 40))]
    return [jnp.asarray(x, jnp.float32) for x in (embed, value, np.stack(out), embed.T)]


def shares(arrays):
    """The shares of pairs at the first and last place, by relation."""
    every, (embed, value, out, unembed) = np.arange(40), arrays
    same = heads.target_rank(*arrays, every, every)
    after = heads.target_rank(*arrays, SERIES, NEXT)
    among = heads.target_rank(embed, value, out, unembed[:, SERIES], SERIES, NEXT)
    passes = {"copying": same < 1, "suppression": same >= 39, "successor": after < 1, "successor in series": among < 1}
    return {name: np.asarray(x).mean(-1) for name, x in passes.items()}


def test_a_detector_knows_its_own_kind_alone(built):
    kinds = {"copying": [0], "suppression": [1], "successor": [2], "successor in series": [2, 3]}
    for name, share in shares(built).items():
        assert (share[kinds[name]] == 1).all(), name
        assert (np.delete(share, kinds[name]) <= 0.25).all(), (name, share)  # 1/40 or 1/24 by chance
    silent = heads.target_rank(*built, SERIES, NEXT)[KINDS.index("silent")]
    assert (silent == 39 / 2).all()  # neither first nor last


def test_detectors_give_roles_against_random_heads(built):
    embed, value, out, unembed = built
    rng = np.random.default_rng(6)
    untrained = [embed, normal(rng, (40, 10, 24)), normal(rng, (100, 24, 40)), unembed]
    roles = heads.roles(shares(built), shares(untrained))
    assert roles.label.tolist() == ["copying", "suppression", "successor", "successor in series", "mixed", "mixed"]


def test_random_heads_rank_by_chance():
    rng = np.random.default_rng(7)
    arrays = [normal(rng, shape) for shape in ((200, 32), (32, 20, 8), (20, 8, 32), (32, 200))]
    sources, targets = rng.integers(0, 200, (2, 200))
    rank = np.asarray(heads.target_rank(*arrays, sources, targets))
    bound = 5 * np.sqrt(0.05 * 0.95 / rank.size)  # of a binomial
    assert abs((rank < 10).mean() - 10 / 200) < bound and abs((rank >= 190).mean() - 10 / 200) < bound
    assert abs(rank.mean() / 199 - 0.5) < 5 / np.sqrt(12 * rank.size)


def test_ranks_in_a_large_vocabulary_take_little_memory():
    """All logits of one head would be 1 GiB."""
    shapes = ((2**14, 8), (8, 1, 4), (2, 4, 8), (8, 2**14))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    pairs = [jax.ShapeDtypeStruct((2**14,), jnp.int32)] * 2
    compiled = jax.jit(heads.target_rank).lower(*arrays, *pairs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


@pytest.mark.slow
def test_composition_is_the_ratio_of_norms(kernels):
    rng = np.random.default_rng(2)
    later_value, later_out = normal(rng, (M, K, 7)), normal(rng, (N, 7, M))
    result = heads.composition(kernels["value"], kernels["out"], query=kernels["query"], key=kernels["key"],
                              later_value=later_value, later_out=later_out)  # fmt: skip
    norm = np.linalg.norm
    for n, p in np.ndindex(N, N):
        writes, reads = of_head(kernels, n)[0], of_head(kernels, p)[1]
        ov = np.asarray(later_value[:, p // 2], np.float64) @ np.asarray(later_out[p], np.float64)
        for name, other in {"Q": reads, "K": reads.T, "V": ov}.items():
            expected = norm(writes @ other) / (norm(writes) * norm(other))
            np.testing.assert_allclose(result[name][n, p], expected, rtol=1e-4)


@pytest.mark.slow
def test_composition_tells_a_wired_pair_of_heads_from_chance():
    rng = np.random.default_rng(3)
    dim = 64
    value, out, query, key = (normal(rng, shape) for shape in ((dim, 2, 8), (2, 8, dim), (dim, 2, 8), (dim, 2, 8)))
    key = key.at[:, 1].set(out[0].T)  # head 1 of the later layer looks for what head 0 of the earlier one writes
    result = heads.composition(value, out, query=query, key=key)
    assert set(result) == {"Q", "K"}
    others = np.delete(np.ravel(result["K"]), 1)
    assert result["K"][0, 1] > 0.35 and others.max() < 0.2
    np.testing.assert_allclose(np.mean(result["Q"]), dim**-0.5, rtol=0.2)


@pytest.mark.slow
def test_contributions_add_up_to_the_layer_s_output():
    params = jattn.init_multi_head(jax.random.key(0), M, N, num_kv_heads=K, head_dim=H, value_dim=D, use_bias=True)
    params["out"]["bias"] += 0.5
    x = jax.random.normal(jax.random.key(1), (2, 9, M))
    query, key, value = (jattn.multi_head.project(params[name], x) for name in ("query", "key", "value"))
    _, outputs = jattn.multi_head.attend_heads(query, key, value, is_causal=True, return_heads=True)
    parts = heads.residual_contributions(outputs["z"], params["out"]["kernel"])
    assert parts.shape == (2, 9, N, M)
    expected = jattn.multi_head_attention(params, x, is_causal=True)
    np.testing.assert_allclose(parts.sum(-2) + params["out"]["bias"][None, None], expected, atol=1e-5)


@pytest.mark.slow
def test_kernels_of_16_bits(kernels):
    names = ("embed", "value", "out", "unembed")
    half = [kernels[name].astype(jnp.bfloat16) for name in names]
    exact = heads.copying_score(*(x.astype(jnp.float32) for x in half))
    for name, values in heads.copying_score(*half).items():
        assert values.dtype == jnp.float32
        np.testing.assert_allclose(values, exact[name], atol=1e-5)
    pairs = np.arange(V), np.arange(V)[::-1]
    rank = heads.target_rank(*half, *pairs)
    assert rank.dtype == jnp.float32
    wide = heads.target_rank(*(x.astype(jnp.float32) for x in half), *pairs)
    np.testing.assert_allclose(rank, wide, atol=1)  # equal unless two logits are
    assert (rank == wide).mean() > 0.95
    query, key = (kernels[name].astype(jnp.bfloat16) for name in ("query", "key"))
    assert heads.composition(half[1], half[2], query=query, key=key)["K"].dtype == jnp.float32


def test_kernels_that_do_not_belong_together_and_pairs_that_are_none(kernels):
    args = embed, value, out, unembed = [kernels[name] for name in ("embed", "value", "out", "unembed")]
    pair, four = np.arange(3), jnp.zeros((M, 4, D))
    for function, arguments, message in (
        (lambda value, out: heads.composition(value, out, query=kernels["query"]), (value, out), "each as a complete pair"),
        (heads.composition, (value, out), "each as a complete pair"),
        (heads.ov_circuit, (embed, four, out, unembed), "6 heads cannot share kernels of 4 heads"),
        (heads.copying_score, (embed, value, out, jnp.zeros((M, V + 1))), "a column for each of the 17 rows of embed"),
        (heads.target_rank, (*args, pair / 2, pair), r"sources must be integers \[E\], got float64 of shape \[3\]"),
        (heads.target_rank, (*args, pair, pair[:, None]), r"targets must be integers \[E\], got int64 of shape \[3, 1\]"),
        (heads.target_rank, (*args, pair, pair[:2]), "sources and targets must have one length, got 3 and 2"),
        (heads.target_rank, (*args, np.array([0, 17]), pair[:2]), r"sources must lie in \[0, 17\), got values from 0 to 17"),
        (heads.target_rank, (*args, pair, jnp.arange(3) - 1), r"targets must lie in \[0, 17\), got values from -1 to 1"),
        (heads.target_rank, (embed, four, out, unembed, pair, pair), "6 heads cannot share kernels of 4 heads"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            function(*arguments)
