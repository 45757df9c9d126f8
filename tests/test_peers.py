"""What README's table and docs/answers.md say of other libraries, run with them; what is not installed is skipped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.experiments.test_circuit_peers import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LONG = 8192


def arrays(length=16, seed=0):
    return jax.random.normal(jax.random.key(seed), (3, 1, length, 2, 16))


def temporaries(attend):
    shape = jax.ShapeDtypeStruct((1, LONG, 1, 64), jnp.float32)
    return jax.jit(attend).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


def test_jax_nn():
    """Arrays as masks, dense on a CPU, forward mode, and a log-sum-exp whose gradient is 0."""
    attend, (query, key, value) = jax.nn.dot_product_attention, arrays()
    assert temporaries(attend) >= LONG**2 * 4
    jax.jvp(attend, (query, key, value), (query, key, value))
    of = jax.grad(lambda query: attend(query, key, value, return_residual=True)[1].sum())
    assert not np.asarray(of(query)).any()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        attend(query, key, value, mask=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


def test_flax():
    """Arrays as masks, dense, forward mode, and weights on request."""
    from flax import nnx

    query, key, value = arrays()
    assert temporaries(lambda *qkv: nnx.dot_product_attention(*qkv)) >= LONG**2 * 4
    jax.jvp(nnx.dot_product_attention, (query, key, value), (query, key, value))
    layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    _, seen = nnx.capture(lambda layer: layer(jnp.ones((1, 6, 8)), sow_weights=True), nnx.Intermediate)(layer)
    assert [leaf.shape for leaf in jax.tree.leaves(seen)] == [(1, 2, 6, 6)]


@pytest.mark.parametrize("implementation", ["xla", "xla_chunked"])
def test_tokamax(implementation):
    """Arrays and soft caps; forward mode in none of the implementations that a CPU has; no gradient of a log-sum-exp."""
    tokamax = pytest.importorskip("tokamax")
    attend, qkv = functools.partial(tokamax.dot_product_attention, implementation=implementation), arrays()
    attend(*qkv, logits_soft_cap=20.0)
    with pytest.raises(Exception, match="jvp|forward-mode|JVP|custom_vjp"):
        jax.jvp(attend, tuple(qkv), tuple(qkv))
    chunked = implementation == "xla_chunked"
    assert (temporaries(attend) < LONG**2) == chunked
    assert temporaries(functools.partial(attend, is_causal=True)) > LONG**2 / 2  # quadratic where causal


def test_flex_attention():
    """Functions as masks and scores, and a log-sum-exp; on a CPU no gradient; no forward mode."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    query, key, value = (torch.tensor(np.asarray(x.swapaxes(1, 2))) for x in arrays())
    score = lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx)
    _, aux = flex_attention(query, key, value, score_mod=score, return_aux=AuxRequest(lse=True))
    assert aux.lse.shape == (1, 2, 16)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(query.requires_grad_(), key, value)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(lambda query: flex_attention(query, key, value), (query.detach(),), (query.detach(),))


def test_transformer_lens_patches_key_heads(tmp_path):
    """By head, keys and values that query heads share: docs/answers.md."""
    torch, lens = pytest.importorskip("torch"), pytest.importorskip("transformer_lens")
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = transformers.LlamaConfig(**sizes, intermediate_size=48, vocab_size=50, max_position_embeddings=32)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    bridge = lens.TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    clean, corrupt = torch.arange(8)[None], torch.arange(8).flip(0)[None]
    _, cache = bridge.run_with_cache(clean)
    metric = lambda logits: logits[0, -1, 3]
    patched = lens.patching.get_act_patch_attn_head_k_all_pos(bridge, corrupt, cache, metric)
    assert patched.shape == (2, 2)
