"""Models like those in Flax's examples, with Flax's attention and with jattn's: bit-identical parameters.

Linen: an encoder and a decoder with a cache, as for translation and language modelling. NNX: a vision transformer with
a class token and a head that pools by attention. Each model is written once for both libraries.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jattn.linen
import jattn.nnx

pytestmark = pytest.mark.slow  # whole models

B, S, T, M, N, VOCABULARY = 2, 7, 6, 16, 4, 11


@pytest.fixture(autouse=True)
def flaxs_promotion():
    """Flax's own code mixes ranks and dtypes, but jattn's tests are strict."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def assert_close(got, expected, tolerance):
    """Compares every leaf, relative to the largest value of all."""
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale), got, expected)


class Feed(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(M)(linen.relu(linen.Dense(2 * M)(linen.LayerNorm()(x))))


class Seq2Seq(linen.Module):
    library: Any
    decode: bool = False

    def attention(self, **options):
        return self.library.MultiHeadDotProductAttention(
            N, qkv_features=M, use_bias=False, kernel_init=linen.initializers.xavier_uniform(), **options
        )

    def setup(self):
        self.embed = linen.Embed(VOCABULARY, M, embedding_init=linen.initializers.normal(1.0))
        self.place = self.param("place", linen.initializers.normal(1.0), (max(S, T), M))
        self.read, self.read_norm, self.read_feed = self.attention(), linen.LayerNorm(), Feed()
        self.look, self.look_norm = self.attention(decode=self.decode), linen.LayerNorm()
        self.cross, self.cross_norm, self.feed = self.attention(), linen.LayerNorm(), Feed()
        self.norm = linen.LayerNorm()

    def encode(self, source):
        x = self.embed(source) + self.place[: source.shape[1]]
        mask = linen.make_attention_mask(source > 0, source > 0)
        return self.read_feed(x + self.read(self.read_norm(x), mask=mask))

    def logits(self, encoded, source, target, start=0):
        x = self.embed(target) + jax.lax.dynamic_slice_in_dim(self.place, start, target.shape[1])
        causal = None if self.decode else linen.make_causal_mask(target)
        mask = linen.make_attention_mask(jnp.ones_like(target), source > 0)
        x = x + self.look(self.look_norm(x), mask=causal)
        x = self.feed(x + self.cross(self.cross_norm(x), encoded, mask=mask))
        return self.embed.attend(self.norm(x))

    def __call__(self, source, target):
        return self.logits(self.encode(source), source, target)


def test_a_sequence_to_sequence_model_in_linen():
    rng = np.random.default_rng(0)
    source, target = (jnp.asarray(rng.integers(1, VOCABULARY, (B, length))) for length in (S, T))
    source = source.at[0, 5:].set(0)  # padding
    results = {}
    for library in (linen, jattn.linen):
        model, decoder = Seq2Seq(library), Seq2Seq(library, decode=True)
        variables = jax.jit(decoder.init)(jax.random.key(0), source, jnp.zeros_like(target))

        def loss(params, model=model):
            encoded = model.apply({"params": params}, source, method="encode")
            logits = model.apply({"params": params}, encoded, source, target, method="logits")
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1).mean(), (logits, encoded)

        params, cache = variables["params"], variables["cache"]
        (_, (logits, encoded)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

        @jax.jit
        def step(params, cache, encoded, token, start, decoder=decoder):
            variables = {"params": params, "cache": cache}
            return decoder.apply(variables, encoded, source, token, start, method="logits", mutable=["cache"])

        decoded = []
        for i in range(T):
            y, updated = step(params, cache, encoded, target[:, i : i + 1], i)
            cache = updated["cache"]
            decoded.append(y)
        results[library] = params, logits, gradients, jnp.concatenate(decoded, axis=1), cache
    theirs, ours = results[linen], results[jattn.linen]
    jax.tree.map(np.testing.assert_array_equal, ours[0], theirs[0])
    for got, expected, tolerance in zip(ours[1:], theirs[1:], (1e-6, 1e-5, 1e-6, 1e-6), strict=True):
        assert_close(got, expected, tolerance)
    assert_close(ours[3], ours[1], 1e-5)  # decoding gives the same as the whole sequence


class Encoder(nnx.Module):
    def __init__(self, library, rngs):
        self.norms = nnx.List([nnx.LayerNorm(M, rngs=rngs) for _ in range(2)])
        self.attention = library.MultiHeadAttention(
            N, M, dropout_rate=0.1, broadcast_dropout=False, decode=False, normalize_qk=True, rngs=rngs
        )
        self.wide, self.narrow = nnx.Linear(M, 2 * M, rngs=rngs), nnx.Linear(2 * M, M, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), deterministic=True)
        return x + self.narrow(nnx.gelu(self.wide(self.norms[1](x))))


class VisionTransformer(nnx.Module):
    def __init__(self, library, rngs):
        self.patches = nnx.Conv(3, M, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.token = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (1, 1, M)))
        self.place = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (1, 17, M)))
        self.encoders = nnx.List([Encoder(library, rngs) for _ in range(2)])
        self.probe = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (1, 1, M)))
        self.pool = library.MultiHeadAttention(N, M, decode=False, rngs=rngs)
        self.head = nnx.Linear(M, VOCABULARY, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images).reshape(images.shape[0], -1, M)
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (x.shape[0], 1, M)), x], axis=1) + self.place[...]
        for encoder in self.encoders:
            x = encoder(x)
        probe = jnp.broadcast_to(self.probe[...], (x.shape[0], 1, M))
        return self.head(self.pool(probe, x)[:, 0] + x[:, 0])


def test_a_vision_transformer_in_nnx():
    images = jax.random.normal(jax.random.key(1), (B, 16, 16, 3))
    results = []
    for library in (nnx, jattn.nnx):
        graphdef, params, rest = nnx.split(VisionTransformer(library, nnx.Rngs(0)), nnx.Param, ...)

        def loss(params, graphdef=graphdef, rest=rest):
            logits = nnx.merge(graphdef, params, rest)(images)
            return -jax.nn.log_softmax(logits)[:, 3].mean(), logits

        (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        results.append((nnx.to_pure_dict(params), logits, nnx.to_pure_dict(gradients)))
    theirs, ours = results
    jax.tree.map(np.testing.assert_array_equal, ours[0], theirs[0])
    assert_close(ours[1], theirs[1], 1e-6)
    assert_close(ours[2], theirs[2], 1e-5)
