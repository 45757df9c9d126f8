"""The retrieval score, beside the paper's definition in plain Python, and while a model decodes from a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import heads, interop
from jattn.heads import retrieval_score


def by_hand(weights, tokens, written, needle):
    """``|copied tokens and those of the needle| / |those of the needle|`` for one head ``[G,S]``."""
    copied = set()
    for row, token in zip(weights, written, strict=True):
        at = int(np.argmax(row))
        if row[at] > 0 and needle[at] and tokens[at] == token:
            copied.add(int(token))
    wanted = {int(token) for token, inside in zip(tokens, needle, strict=True) if inside}
    return len(copied) / max(len(wanted), 1)


@pytest.mark.parametrize("seed", (2, 3))  # 3: without a needle
def test_the_papers_definition(seed):
    rng = np.random.default_rng(seed)
    tokens, needle = rng.integers(0, 6, 17), np.zeros(17, bool)
    needle[4:12] = seed < 3
    written = rng.choice(tokens[4:12], 9)
    weights = rng.random((2, 3, 9, 17)).astype(np.float32)
    weights[..., 4:12] += 0.5
    weights[0, 0, 3:] = 0.0  # rows that see nothing
    scores = retrieval_score(jnp.asarray(weights), tokens, written, needle)
    expected = [[by_hand(head, tokens, written, needle) for head in layer] for layer in weights]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert bool((np.asarray(scores) > 0).any()) == (seed < 3)


def test_a_token_that_the_needle_has_twice_counts_once():
    tokens, needle = jnp.array([5, 5, 6, 5]), jnp.array([True, True, True, False])
    both = jnp.eye(4)[jnp.array([0, 1])]
    assert float(retrieval_score(both, tokens, jnp.array([5, 5]), needle)) == 0.5
    assert float(retrieval_score(both, tokens, jnp.array([5, -1]), needle)) == 0.5
    outside = jnp.eye(4)[jnp.array([3, 3])]  # the same token, but not in the needle
    assert float(retrieval_score(outside, tokens, jnp.array([5, 5]), needle)) == 0.0


@pytest.mark.slow
def test_while_a_model_decodes_from_a_cache():
    """Row by row from a cache with empty slots, and all rows at once, as from the whole matrix."""
    sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 16, "mlp_dim": 16, "vocabulary": 5, "max_length": 24}
    config = interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
    model = interop.Transformer(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 5, (1, 20)))
    needle, answer = (jnp.arange(20) >= 3) & (jnp.arange(20) < 12), 14
    whole = nnx.capture(lambda model: model(tokens, sow_weights=True), nnx.Intermediate)(model)[1]
    dense = jnp.stack(heads.collect(whole, "attention_weights"))[:, 0]  # [L,N,T,S]
    wanted = retrieval_score(dense[:, :, answer - 1 : -1], tokens[0], tokens[0, answer:], needle)
    assert wanted.max() > 0

    def with_cache(model, part, cache):
        return model(part, cache=cache, sow_weights=True)

    step, capacity = nnx.capture(with_cache, nnx.Intermediate), 24
    _, cache = model(tokens[:, : answer - 1], cache=model.init_cache(1, capacity))
    slots, inside = jnp.pad(tokens[0], (0, 4), constant_values=77), jnp.pad(needle, (0, 4))
    at_once = jnp.stack(heads.collect(step(model, tokens[:, answer - 1 : -1], cache)[1], "attention_weights"))[:, 0]
    np.testing.assert_array_equal(retrieval_score(at_once, slots, tokens[0, answer:], inside), wanted)
    rows = []
    for t in range(answer - 1, 19):
        (_, cache), sown = step(model, tokens[:, t : t + 1], cache)
        rows.append(jnp.stack(heads.collect(sown, "attention_weights"))[:, 0])
    np.testing.assert_array_equal(retrieval_score(jnp.concatenate(rows, 2), slots, tokens[0, answer:], inside), wanted)


@pytest.mark.slow
def test_jitted_and_over_a_batch():
    weights = jnp.asarray(np.random.default_rng(1).random((3, 2, 4, 6)), jnp.float32)
    tokens, written = jnp.arange(18).reshape(3, 6) % 5, jnp.arange(12).reshape(3, 4) % 5
    needle = jnp.arange(6) < 4
    scores = jax.jit(jax.vmap(retrieval_score, (0, 0, 0, None)))(weights, tokens, written, needle)
    each = [retrieval_score(*one, needle) for one in zip(weights, tokens, written, strict=True)]
    np.testing.assert_array_equal(scores, jnp.stack(each))


@pytest.mark.parametrize("change, message", [
    ({"tokens": np.arange(5)}, r"tokens, written and needle must be .* = \[6\], \[4\] and \[6\], for weights of shape "),
    ({"written": np.arange(5)}, r"got shapes \[6\], \[5\], \[6\]"),
    ({"needle": np.ones(6, int)}, "needle must be bool"),
])  # fmt: skip
def test_errors_name_what_came(change, message):
    arguments = {"tokens": np.arange(6), "written": np.arange(4), "needle": np.ones(6, bool)} | change
    with pytest.raises(ValueError, match=message):
        retrieval_score(jnp.ones((2, 4, 6)), **arguments)
