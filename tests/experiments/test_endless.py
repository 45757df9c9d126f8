"""Losses of a long text through caches of one size, on a tiny model."""

import numpy as np
import pytest
from flax import nnx

from jattn import interop
from jattn.positions import Rotary
from jattn_experiments.measure import endless
from jattn_experiments.measure.saved_model import Model

T, SIZE = 60, 16


@pytest.fixture(scope="module")
def measured():
    sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 16, "mlp_dim": 8, "vocabulary": 19, "max_length": 64}
    kind = {"norm_epsilon": 1e-5, "activation": "silu", "norm": "rms", "position": Rotary(100.0)}
    model = interop.Transformer(interop.Config("tiny", **sizes, **kind), rngs=nnx.Rngs(0))
    nnx.update(model, {"layers": {"attention": {"query": {"kernel": 4 * model.layers.attention.query.kernel[...]}}}})
    tokens = np.random.default_rng(0).integers(0, 19, T).astype(np.int32)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endless, "BLOCKS", ((16, 32), (48, 60)))
        found = endless.losses_of(Model.of(model), tokens, SIZE, lambda: told.append(1))
        blocks = endless.in_blocks(found)
        table = endless.table(blocks)
    assert len(told) == len(found) == 5
    return model, tokens, found, blocks, table


def loss(model, tokens):
    logits = np.asarray(model.logits(model(tokens[None])), np.float64)[0, :-1]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return -logits[np.arange(len(tokens) - 1), tokens[1:]]


def test_all_caches_agree_until_they_are_full(measured):
    model, tokens, found, _, _ = measured
    expected = loss(model, tokens)
    np.testing.assert_allclose(found["all tokens"], expected, atol=1e-5)
    for name in ("window", "in the text", "in the cache"):
        np.testing.assert_allclose(found[name][:SIZE], expected[:SIZE], atol=1e-5)
        assert np.abs(found[name] - expected)[SIZE:].max() > 1e-3
    assert np.abs(found["in the text"] - found["in the cache"])[SIZE:].max() > 1e-3


def test_a_context_that_is_read_afresh(measured):
    """Each token of the last quarter has the first token and those before it in a text of its own."""
    model, tokens, found, _, _ = measured
    end = 24
    alone = loss(model, np.append(tokens[:1], tokens[end - SIZE + 1 : end]))
    np.testing.assert_allclose(found["read afresh"][end - 1 - 4 : end - 1], alone[-4:], atol=1e-5)
    known = np.flatnonzero(np.isfinite(found["read afresh"]))
    assert known.tolist() == [*range(15, 31), *range(47, 59)]


def test_blocks_are_means_of_tokens_that_all_have(measured):
    _, _, found, blocks, table = measured
    np.testing.assert_allclose(
        blocks["window"], [found["window"][16:31].mean(), found["window"][48:59].mean()], rtol=1e-5
    )
    assert table.splitlines()[2].startswith("| 16 to 32 |")
