"""The worked examples that the project was founded on, with their numbers.

A French sentence of seven words, with the matrices and results that were printed with it (`french_sentence.json`):
`meant` holds what the formula gives, in float64; `printed` what was printed, which leaves out the scale or treats each
word as a sequence of its own. Then the shapes and masks of the other texts: many sequences, -1e9 as a mask, eight heads.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests import reference

GOLDEN = json.loads((Path(__file__).parent / "french_sentence.json").read_text())
MEANT, PRINTED = GOLDEN["meant"], GOLDEN["printed"]


@pytest.fixture
def qkv():
    """The queries, keys and values ``[7,2]`` of the sentence, in float64."""
    with jax.enable_x64(True):
        x = jnp.asarray(GOLDEN["embeddings"])
        yield tuple(x @ jnp.asarray(GOLDEN[name]) for name in ("W_Q", "W_K", "W_V"))


def assert_close(got, expected, decimals=6):
    np.testing.assert_allclose(got, expected, atol=0.51 * 10**-decimals)


@pytest.mark.slow
def test_the_sentence_with_one_head(qkv):
    q, k, v = qkv
    assert_close(q, PRINTED["Q"], 12)
    assert_close(q @ k.T, MEANT["single_head"]["scores"], 12)
    out, _ = jattn.attend(q, k, v)
    weights = jattn.attention_weights(q[:, None], k[:, None])[0]
    assert_close(weights, MEANT["single_head"]["weights"])
    assert_close(out, MEANT["single_head"]["output"])


def test_the_sentence_as_printed_is_scale_1(qkv):
    q, k, v = qkv
    weights = jattn.attention_weights(q[:, None], k[:, None], scale=1.0)[0]
    out, _ = jattn.attend(q, k, v, scale=1.0)
    assert_close(weights, MEANT["single_head"]["weights_scale_1"])
    assert_close(out, MEANT["single_head"]["output_scale_1"])
    assert_close(weights[0], PRINTED["weights_Le_scale_1"], 4)
    assert_close(out[0], PRINTED["output_Le_scale_1"], 4)
    assert_close((q @ k.T)[0], PRINTED["scores_Le"], 12)


@pytest.mark.slow
def test_the_sentence_with_two_heads(qkv):
    q, k, v = (x[:, :, None] for x in qkv)  # seven words, one sequence, two heads of size 1
    assert_close(jattn.attention_weights(q, k), MEANT["two_heads"]["weights"])
    out, _ = jattn.over_heads(jattn.attend)(q, k, v)
    assert_close(out[..., 0], MEANT["two_heads"]["head_outputs"])
    names = {"query": "W_Q", "key": "W_K", "value": "W_V"}
    params = {name: {"kernel": jnp.asarray(GOLDEN[matrix])[:, :, None]} for name, matrix in names.items()}
    params["out"] = {"kernel": jnp.asarray(GOLDEN["W_O"])[:, None, :]}
    assert_close(jattn.multi_head_attention(params, jnp.asarray(GOLDEN["embeddings"])), MEANT["two_heads"]["final"])


def test_the_sentence_with_each_word_alone(qkv):
    """A common mistake: seven sequences of one word each. Every weight is 1."""
    q, k, v = (x[:, None, :, None] for x in qkv)
    expected = PRINTED["two_heads_each_word_alone"]
    weights = jattn.attention_weights(q, k)
    assert_close(weights, np.ones((7, 2, 1, 1)), 12)
    assert_close(weights[0, :, 0], expected["weights_Le"], 12)
    assert_close((q * k)[0, 0], expected["scores_Le"], 12)
    out = jattn.dot_product_attention(q, k, v)
    assert_close(out[0, 0], expected["head_outputs_Le"], 12)
    assert_close(out[0].ravel() @ jnp.asarray(GOLDEN["W_O"]), expected["final_Le"], 12)


@pytest.mark.slow
def test_output_and_weights_of_many_sequences(getkey):
    """``self_attention(q, k, v) -> (output, weights)`` on ``[10,5,64]``, and eight heads of ``d_model`` 64."""
    x = jax.random.normal(getkey(), (10, 5, 64))
    out = jattn.dot_product_attention(*[x[:, :, None]] * 3)[:, :, 0]
    one_head = x[:, :, None]
    weights = jattn.attention_weights(one_head, one_head)
    np.testing.assert_allclose(weights, reference.weights(one_head, one_head), atol=1e-6)
    np.testing.assert_allclose(out, reference.attention(*[one_head] * 3)[:, :, 0], atol=2e-5)
    params = jattn.init_multi_head(getkey(), 64, 8)
    y, weights = jattn.multi_head_attention(params, x, return_weights=True)
    assert y.shape == (10, 5, 64) and weights.shape == (10, 8, 5, 5)


@pytest.mark.slow
def test_a_mask_of_minus_1e9_is_not_needed(getkey):
    """A fully masked row is 0 instead of a uniform average, also in half precision, where -1e9 overflows."""
    q, k, v = (jax.random.normal(getkey(), (1, 5, 2, 8), jnp.float16) for _ in range(3))
    mask = jnp.ones((5, 5), bool).at[2].set(False)
    out, lse = jattn.dot_product_attention(q, k, v, mask=mask, return_residual=True)
    assert (out[:, 2] == 0).all() and (lse[:, 2] == -jnp.inf).all()
    assert jnp.isfinite(out).all() and jnp.isfinite(lse[:, jnp.array([0, 1, 3, 4])]).all()


def test_eight_heads_with_values_of_another_size(getkey):
    """``W_i^Q, W_i^K [d_model, d_k]``, ``W_i^V [d_model, d_v]``, ``W^O [h d_v, d_model]``: d_v can be any size."""
    params = jax.eval_shape(lambda key: jattn.init_multi_head(key, 512, 8, head_dim=64, value_dim=24), getkey())
    assert params["value"]["kernel"].shape == (512, 8, 24) and params["out"]["kernel"].shape == (8, 24, 512)
    y = jax.eval_shape(jattn.multi_head_attention, params, jax.ShapeDtypeStruct((3, 512), jnp.float32))
    assert y.shape == (3, 512)
