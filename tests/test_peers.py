"""What README's table, docs/answers.md and docs/coming-from.md say of other libraries, run with them; what is not installed is skipped."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests.experiments.test_circuit_peers import write_tokenizer
from tests.test_docs import blocks

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


def seen_by(attend, mask):
    """The output of a query at row 0, which sees nothing, and the mean of all values."""
    query, key, value = arrays(4)
    return np.asarray(attend(query, key, value, mask))[0, 0], np.asarray(value).mean(1)[0]


def test_a_query_that_sees_no_key():
    """docs/coming-from.md: the mean of all values in jax.nn and Flax, 0 in PyTorch and here."""
    from flax import nnx

    mask = np.tri(4, dtype=bool)
    mask[0] = False
    for attend in (
        lambda query, key, value, mask: jax.nn.dot_product_attention(query, key, value, mask=mask[None, None]),
        lambda query, key, value, mask: nnx.dot_product_attention(query, key, value, mask=mask[None, None]),
    ):
        np.testing.assert_allclose(*seen_by(attend, mask), atol=1e-5)
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    query, key, value = (torch.tensor(np.asarray(x.swapaxes(1, 2))) for x in arrays(4))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert not sdpa(query, key, value, attn_mask=torch.tensor(mask))[0, :, 0].any()
    blocks = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx > 0), 1, 2, 4, 4, device="cpu")
    out, aux = flex_attention(query, key, value, block_mask=blocks, return_aux=AuxRequest(lse=True))
    assert not out[0, :, 0].any() and torch.isneginf(aux.lse[0, :, 0]).all()


def test_causal_masks_of_pytorch_are_aligned_top_left():
    torch = pytest.importorskip("torch")
    query, key, value = (torch.tensor(np.asarray(x.swapaxes(1, 2))) for x in arrays(6))
    out = torch.nn.functional.scaled_dot_product_attention(query[:, :, :2], key, value, is_causal=True)
    np.testing.assert_allclose(out[:, :, 0], value[:, :, 0], atol=1e-6)


@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_of_pytorch_is_converted(biased):
    """By the function of docs/how-to.md; its masks are True where hidden, and weights decide what an empty row gives."""
    torch = pytest.importorskip("torch")
    namespace = {}
    page = Path(__file__).parents[1] / "docs" / "how-to.md"
    exec(blocks(page.read_text(encoding="utf-8"))[0].code.partition("shapes =")[0], namespace)
    module = torch.nn.MultiheadAttention(32, 4, bias=biased, batch_first=True).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    layer = namespace["from_torch"]({name: x.numpy() for name, x in module.state_dict().items()}, num_heads=4)
    x = np.random.default_rng(0).standard_normal((2, 6, 32), np.float32)
    hidden, padding = np.triu(np.ones((6, 6), bool), 1), np.array([[False] * 6, [True] * 2 + [False] * 4])
    three, x = (torch.tensor(x),) * 3, jnp.asarray(x)
    causal, weights = module(*three, attn_mask=torch.tensor(hidden))
    assert weights.shape == (2, 6, 6)  # averaged over heads
    np.testing.assert_allclose(layer(x, is_causal=True), causal.detach(), rtol=1e-4, atol=1e-3)
    padded, _ = module(*three, key_padding_mask=torch.tensor(padding))
    np.testing.assert_allclose(layer(x, mask=~padding[:, None, None, :]), padded.detach(), rtol=1e-4, atol=1e-3)
    masks = {"attn_mask": torch.tensor(hidden), "key_padding_mask": torch.tensor(padding)}
    ours = layer(x, is_causal=True, mask=~padding[:, None, None, :])
    for need_weights, finite in ((True, False), (False, True)):
        out = module(*three, **masks, need_weights=need_weights)[0].detach().numpy()
        assert np.isfinite(out[1, 0]).all() == finite
        np.testing.assert_allclose(ours[1, 2:], out[1, 2:], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(ours[1, 0], out[1, 0], atol=1e-5)  # the output's bias alone


def test_a_window_of_transformers_counts_the_query():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
    config = transformers.MistralConfig(
        **sizes, intermediate_size=32, vocab_size=50, sliding_window=3, attn_implementation="eager"
    )
    model = transformers.MistralForCausalLM(config)
    weights = model(torch.arange(6)[None], output_attentions=True).attentions[0]
    i = np.arange(6)
    expected = (jattn.masks.Causal() & jattn.masks.SlidingWindow(2))(0, 0, i[:, None], i)
    np.testing.assert_array_equal(weights[0, 0].detach().numpy() > 0, expected)


def test_what_a_padded_query_of_transformers_gets_depends_on_the_implementation():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    attended = {}
    for implementation in ("eager", "sdpa"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, vocab_size=50, attn_implementation=implementation)
        model = transformers.LlamaForCausalLM(config).eval()
        projection = model.model.layers[0].self_attn.o_proj
        keep = lambda module, inputs, name=implementation: attended.update({name: inputs[0].detach()})
        projection.register_forward_pre_hook(keep)
        model(torch.arange(1, 7)[None], attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    assert attended["eager"][0, 0].any() and not attended["sdpa"][0, 0].any()
