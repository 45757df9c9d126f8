"""Gemma 2 and 3, Qwen3, Phi-3 and OLMo 2 on jattn's modules: transformers' logits, windows, caches, and looking inside."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import heads, interop, masks
from jattn.score_mods import SoftCap
from tests.jattn import test_language_models as language_models
from tests.jattn.test_language_models import (
    by_transformers,
    close,
    close_gguf,
    gguf_writer,
    logits,
    products,
    through_cache,
)

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER, WINDOW = 37, 3, 4, 2, 8, 20, 24, 5
COMMON = {
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": WIDTH,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "intermediate_size": INNER, "rms_norm_eps": 1e-3,
}  # fmt: skip
GEMMA = COMMON | {"head_dim": HEAD_DIM, "query_pre_attn_scalar": 11, "sliding_window": WINDOW, "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
BIASED = {"attention_bias": True}
CONFIGS = {
    "gemma2": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "rope_theta": 100.0},
    "gemma3": GEMMA | BIASED | {"model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_theta": 1e4, "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "tie_word_embeddings": False},
    "qwen3": COMMON | {"model_type": "qwen3", "head_dim": HEAD_DIM, "hidden_act": "silu", "rope_theta": 100.0, "tie_word_embeddings": True},
    "phi3": COMMON | {"model_type": "phi3", "hidden_size": HEADS * HEAD_DIM, "hidden_act": "silu", "sliding_window": WINDOW,
        "partial_rotary_factor": 0.5, "rope_theta": 100.0, "pad_token_id": 0},
    "olmo2": COMMON | BIASED | {"model_type": "olmo2", "hidden_size": HEADS * HEAD_DIM, "hidden_act": "silu", "rope_theta": 100.0},
}  # fmt: skip
TIED = ("gemma2", "qwen3")
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 13))


def tensors_of(name):
    """Random tensors as saved by Hugging Face."""
    rng, config = np.random.default_rng(1), CONFIGS[name]
    width, wide, narrow = config["hidden_size"], HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    if name == "phi3":
        sizes = {"self_attn.qkv_proj": (wide + 2 * narrow, width), "mlp.gate_up_proj": (2 * INNER, width)}
    else:
        sizes = {f"self_attn.{one}_proj": (wide if one == "q" else narrow, width) for one in "qkv"}
        sizes |= {"mlp.gate_proj": (INNER, width), "mlp.up_proj": (INNER, width)}
    sizes |= {"self_attn.o_proj": (width, wide), "mlp.down_proj": (width, INNER)}
    norms = {"post_attention_layernorm": width}
    norms |= {} if name == "olmo2" else {"input_layernorm": width}
    norms |= {"pre_feedforward_layernorm": width} if "gemma" in name else {}
    norms |= {"post_feedforward_layernorm": width} if "gemma" in name or name == "olmo2" else {}
    if name in ("gemma3", "qwen3", "olmo2"):
        of_all = name == "olmo2"
        norms |= {"self_attn.q_norm": wide if of_all else HEAD_DIM, "self_attn.k_norm": narrow if of_all else HEAD_DIM}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, width), "model.norm.weight": (width,)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{module}.weight": size for module, size in sizes.items()}
        shapes |= {f"model.layers.{i}.{module}.weight": (size,) for module, size in norms.items()}
        if config.get("attention_bias"):
            shapes |= {f"model.layers.{i}.self_attn.{x}_proj.bias": (sizes[f"self_attn.{x}_proj"][0],) for x in "qkvo"}
    shapes |= {} if name in TIED else {"lm_head.weight": (VOCABULARY, width)}
    tensors = {key: rng.normal(size=shape, scale=0.3) for key, shape in sorted(shapes.items())}
    one = 0.0 if "gemma" in name else 1.0  # what Gemma's norms add themselves
    return {key: (x + one * ("norm" in key)).astype(np.float32) for key, x in tensors.items()}


@pytest.fixture(scope="module")
def models():
    """Models by name, each loaded once."""
    return functools.cache(lambda name: interop.from_tensors(tensors_of(name), CONFIGS[name]))


# By transformers 5.24 in float32: logits of both sequences at two positions beyond the window, the first five.
KEPT = {
    "gemma2": [[[1.115237, -2.589541, -0.683537, -0.94651, 0.714965], [-0.478582, -0.723404, 0.331689, -1.798837, 1.825317]],
        [[0.66223, -1.002606, -0.352626, 0.072687, 1.701341], [0.893242, -1.775126, -0.179337, -1.353499, 2.864001]]],
    "gemma3": [[[-0.393176, -1.337123, 0.460398, -0.132062, 0.223595], [-0.192589, 1.309922, 0.104274, 0.529939, -0.585774]],
        [[0.767222, -0.790745, 1.052821, -0.927315, 2.386637], [0.3308, -0.689214, 0.857915, 0.22958, 1.127982]]],
    "qwen3": [[[0.902118, -1.745381, 1.732857, -0.750455, 2.491571], [0.38669, -0.042126, 0.335684, -1.137885, 1.679016]],
        [[0.428486, -2.606836, 1.315728, -0.654194, 3.010355], [0.491145, -1.564728, 0.554789, -0.607757, 1.183192]]],
    "phi3": [[[-2.494566, 3.07784, -1.0996, -0.655761, 3.173566], [-2.659619, 2.605206, 1.852307, -2.595481, 1.186202]],
        [[-1.792982, 0.323252, -0.44273, 2.0252, 1.325914], [-0.980771, 2.05759, 0.319003, -0.619737, 3.524042]]],
    "olmo2": [[[-0.266431, 1.367058, 2.485549, -2.287876, 0.892003], [-0.516006, 0.991009, 4.02622, -2.019764, -0.830798]],
        [[0.942857, 2.107205, 3.045144, -0.62465, -1.351733], [1.877231, 1.766235, 3.54067, -1.750954, -0.373845]]],
}  # fmt: skip


@pytest.mark.slow_except("gemma3", "qwen3")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_gives_the_logits_that_were_kept(models, name):
    result = logits(models(name), TOKENS)
    close(result[:, [7, 12], :5], np.array(KEPT[name]))
    assert (models(name).head is None) == (name in TIED)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_transformers(models, name):
    close(logits(models(name), TOKENS), by_transformers(CONFIGS[name], tensors_of(name), TOKENS))


# layers with a window and layers without


@pytest.mark.slow
def test_two_kinds_of_layers_are_two_programs():
    of_layers = lambda number, name="gemma2": products(CONFIGS[name] | {"num_hidden_layers": number})
    assert of_layers(2) == of_layers(7) == 2 * of_layers(1) > 0
    assert of_layers(2, "phi3") == of_layers(5, "phi3") == of_layers(1, "phi3")


def test_long_sequences_take_linear_memory(models):
    """No matrix of T·T weights, in either kind of layer."""
    model, T = models("gemma2"), 4096
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    compiled = run.lower(state, jax.ShapeDtypeStruct((1, T), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_chunks_through_a_cache_are_the_full_pass(models, name):
    model = models(name)
    chunks = np.split(TOKENS, [5, 11, 12], axis=1)
    close(through_cache(model, chunks, model.init_cache(2, 16))[0], logits(model, TOKENS))


@pytest.mark.slow
def test_padding_on_the_left_changes_nothing(models):
    model, expected = models("gemma3"), logits(models("gemma3"), TOKENS)
    padded = np.concatenate([np.full((2, 3), 7), TOKENS], 1)
    valid = np.broadcast_to(np.arange(16) >= 3, (2, 16))
    close(logits(model, padded, valid=valid)[:, 3:], expected)
    positions = np.maximum(valid.cumsum(1) - 1, 0)  # padding is where it stands, not where its position is
    close(logits(model, padded, valid=valid, input_positions=positions)[:, 3:], expected)
    functions = {"mask": masks.Causal(), "input_positions": positions}
    close(logits(model, padded, valid=valid, **functions)[:, 3:], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma3", "phi3"])
def test_packed_documents_are_each_as_alone(models, name):
    """Positions that start again reach the embeddings; masks see slots, under jit, and with a cache, too."""
    if name == "gpt2":
        model = interop.from_tensors(language_models.gpt2_tensors(), language_models.GPT2)
    elif name == "mistral":
        model = interop.from_tensors(language_models.tensors_of(name), language_models.CONFIGS[name])
    else:
        model = models(name)
    lengths, tokens = [6, 1, 4], TOKENS[:, :11] % model.config.vocabulary
    ids, positions = np.repeat([7, 3, 5], lengths), np.concatenate([np.arange(length) for length in lengths])
    expected = np.concatenate([logits(model, part) for part in np.split(tokens, [6, 7], axis=1)], axis=1)
    close(logits(model, tokens, mask=masks.Segments(ids), input_positions=positions), expected)  # all traced
    by_ids = lambda b, h, q, kv: jnp.asarray(ids)[q] == jnp.asarray(ids)[kv]
    close(model.logits(model(tokens, mask=by_ids, input_positions=positions)), expected)
    options = {"mask": masks.Segments(ids), "input_positions": np.broadcast_to(positions, (2, 11))}
    close(model.logits(model(tokens, cache=model.init_cache(2, 11), **options)[0]), expected)


PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2],
    [6],
    [27, 18, 28, 18, 28, 4, 5, 9, 0, 4, 5],
]  # beyond the window, within it, beyond it
# By generate of transformers 5.24 in float32, each prompt alone; those padded on the left in one batch are the same.
CONTINUED = {
    "gemma2": [[2, 35, 35, 35, 35, 35, 35, 35], [6, 6, 6, 6, 6, 6, 6, 6], [22, 22, 22, 22, 20, 20, 34, 34]],
    "gemma3": [[24, 36, 22, 1, 28, 24, 36, 13], [30, 24, 30, 24, 36, 28, 20, 4], [34, 24, 23, 20, 31, 18, 13, 33]],
    "qwen3": [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1], [34, 30, 30, 18, 18, 30, 18, 34]],
    "phi3": [[36, 18, 15, 9, 2, 16, 18, 32], [1, 1, 1, 2, 2, 26, 7, 5], [27, 12, 12, 30, 1, 30, 32, 4]],
    "olmo2": [[32, 32, 32, 32, 32, 32, 32, 30], [15, 36, 11, 1, 14, 14, 15, 2], [21, 21, 21, 21, 32, 32, 32, 32]],
}


def padded_by_hand(model, prompts, count, left):
    """Greedy continuations through a cache of prompts in one batch, padded with token 7 on the left or the right."""
    longest, sizes = max(map(len, prompts)), np.array([[len(prompt)] for prompt in prompts])
    order = np.arange(longest)[:: -1 if left else 1]
    valid = order < sizes
    tokens = np.full(valid.shape, 7)
    tokens[valid] = np.concatenate(prompts)
    last = longest - 1 if left else sizes[:, 0] - 1
    hidden, cache = model(tokens, valid=valid, cache=model.init_cache(len(prompts), longest + count))
    steps = [np.asarray(model.logits(hidden))[np.arange(len(prompts)), last].argmax(-1)]
    while len(steps) < count:
        hidden, cache = model(steps[-1][:, None], cache=cache)
        steps.append(np.asarray(model.logits(hidden))[:, -1].argmax(-1))
    return np.stack(steps, 1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_padded_prompts_are_continued_as_transformers_continues_each_alone(models, name):
    model = models(name)
    assert [list(row) for row in interop.generate(model, PROMPTS, 8)] == CONTINUED[name]
    for left in (True, False):
        assert padded_by_hand(model, PROMPTS, 8, left) == CONTINUED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kept_continuations_are_those_of_transformers(name):
    for prompt, continued in zip(PROMPTS, CONTINUED[name], strict=True):
        rows = by_transformers(CONFIGS[name], tensors_of(name), np.array([prompt + continued]))[0]
        assert rows[len(prompt) - 1 : -1].argmax(-1).tolist() == continued


@pytest.mark.slow
def test_a_layer_on_its_own_has_its_rotary_positions(models):
    few = TOKENS[:, :4]  # the window hides none of them

    @nnx.jit
    def one_after_another(model):
        x = model.token_embed.embedding[...][few] * WIDTH**0.5
        for i in range(LAYERS):
            x = model.layer(i)(x, is_causal=True)
        return model.last_norm(x)

    close(one_after_another(models("gemma3")), nnx.jit(lambda model: model(few))(models("gemma3")))


@pytest.mark.slow
def test_gradients_of_both_kinds_of_layers(models):
    """Of gates, as ``importance`` takes them, against central differences."""
    graph, state = nnx.split(models("gemma2"))

    @jax.jit
    def loss(gates):
        return nnx.merge(graph, state)(TOKENS, per_layer=[{"head_gate": gate} for gate in gates])[:, 6:].sum()

    gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.ones((LAYERS, HEADS))))
    for at in ((0, 1), (1, 2), (2, 3)):
        step = 0.02 * (np.arange(LAYERS * HEADS).reshape(LAYERS, HEADS) == at[0] * HEADS + at[1])
        difference = (float(loss(jnp.asarray(1 + step))) - float(loss(jnp.asarray(1 - step)))) / 0.04
        np.testing.assert_allclose(gradient[at], difference, rtol=0.02, atol=0.02)


# options of each layer, and looking inside


@pytest.mark.slow
def test_layers_take_options_and_sow_as_before(models):
    model = models("gemma2")
    look = nnx.capture(lambda model, layers: model(TOKENS, per_layer=layers, **SOW), nnx.Intermediate)
    gates = np.ones((LAYERS, HEADS), np.float32)
    hidden, sown = nnx.jit(look)(model, [{"head_gate": gate} for gate in gates])
    weights, statistics = (heads.collect(sown, f"attention_{name}") for name in ("weights", "statistics"))
    assert [x.shape for x in weights] == [(2, HEADS, 13, 13)] * LAYERS
    close(hidden, nnx.jit(lambda model: model(TOKENS))(model))
    seen = [np.asarray(x).max((0, 1)) > 0 for x in weights]
    causal, window = np.tri(13, dtype=bool), np.tri(13, dtype=bool) & ~np.tri(13, k=-WINDOW, dtype=bool)
    for result, expected in zip(seen, (window, causal, window), strict=True):
        np.testing.assert_array_equal(result, expected)
    for result, x in zip(statistics, weights, strict=True):
        np.testing.assert_allclose(result["current_token"], np.diagonal(x, axis1=2, axis2=3).mean(-1), atol=1e-5)
    gates[1, 2] = 0.0
    assert not np.allclose(nnx.jit(look)(model, [{"head_gate": gate} for gate in gates])[0], hidden, atol=1e-3)


SOW = {"sow_weights": True, "sow_statistics": ["current_token"]}
VALID = np.arange(13) >= np.array([[0], [4]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3"])
def test_look_gives_the_options_of_the_weights(models, name):
    model = models(name)
    layers = interop.look(model, TOKENS, valid=VALID)
    sow = nnx.capture(lambda model: model(TOKENS, valid=VALID, sow_weights=True), nnx.Intermediate)
    sown = heads.collect(nnx.jit(sow)(model)[1], "attention_weights")
    assert len(layers) == LAYERS

    def received(carry, block, q_idx, kv_idx):
        return carry.at[kv_idx[0]].add(block.sum(0))

    def again(query, key, lse, **options):
        folded = jattn.fold_weights(received, jnp.zeros(13), query, key, lse=lse, **options)
        return jattn.attention_weights(query, key, **options), folded

    for (result, folded), weights in zip(of_every_layer(layers, again), sown, strict=True):
        np.testing.assert_allclose(result, weights, atol=1e-6)
        np.testing.assert_allclose(folded, np.asarray(weights).sum(2), atol=1e-5)
    windows = [layer.get("local_window_size") for layer in layers]
    assert windows == [(4, 0), (4, 0) if name == "phi3" else None, (4, 0)]
    assert layers[0].get("score_mod") == (SoftCap(2.0) if name == "gemma2" else None)
    assert layers[0].get("scale") == (None if name == "phi3" else 11**-0.5)


def of_every_layer(layers, fn):
    """``fn(query, key, lse, **options)`` of each, in one program."""
    names = ("query", "key", "value", "lse", "z")
    options = [{name: x for name, x in layer.items() if name not in names} for layer in layers]
    arrays = [[layer[name] for name in ("query", "key", "lse")] for layer in layers]
    return jax.jit(lambda arrays: [fn(*one, **of) for one, of in zip(arrays, options, strict=True)])(arrays)


@pytest.mark.slow
def test_look_takes_the_options_of_the_call(models):
    model, per_layer = models("gemma2"), [{"head_gate": np.full(HEADS, i, np.float32)} for i in range(LAYERS)]
    options = {"mask": np.arange(13) < 6, "per_layer": per_layer, "input_positions": np.arange(13) * 2, "valid": VALID}
    layers = interop.look(model, TOKENS, **options)
    run = lambda model: model(TOKENS, **options, sow_weights=True)
    sown = heads.collect(nnx.jit(nnx.capture(run, nnx.Intermediate))(model)[1], "attention_weights")
    statistics = functools.partial(heads.statistics, names=["max_weight"])
    again = lambda query, key, lse, **options: statistics(query, key, lse=lse, **options)["max_weight"]
    for result, weights in zip(of_every_layer(layers, again), sown, strict=True):
        # No query is what pads a sequence, by valid or at the end of it by a mask of the keys.
        counted = np.asarray(weights).any(-1) & (VALID & options["mask"])[:, None]
        np.testing.assert_allclose(result, np.asarray(weights).max(-1).mean(-1, where=counted), atol=1e-5)
    assert not np.asarray(layers[0]["z"]).any() and np.asarray(layers[1]["z"]).any()


def test_what_look_cannot_give(models):
    model = models("gemma2")
    with pytest.raises(TypeError, match="look sees whole sequences"):
        interop.look(model, TOKENS, cache=model.init_cache(2, 16))
    pattern = {"patch": {"pattern": (np.ones(HEADS), (np.ones((2, 13, HEADS, HEAD_DIM)), None))}}
    with pytest.raises(ValueError, match="mixes the weights of two queries"):
        interop.look(model, TOKENS, per_layer=[pattern, {}, {}])


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_parts_sum_to_the_logit_before_its_cap(models, name):
    model, token = models(name), 5
    direction = model.output_embedding()[token]
    parts = nnx.jit(lambda model: interop.logit_parts(model, TOKENS, direction))(model)
    assert parts["heads"].shape == (LAYERS, 2, 13, HEADS)
    total = parts["embedding"] + parts["bias"] + parts["mlp"].sum(0) + np.asarray(parts["heads"]).sum((0, -1))
    cap, result = CONFIGS[name].get("final_logit_softcapping"), np.asarray(logits(models(name), TOKENS))[..., token]
    close(total if cap is None else cap * np.tanh(total / cap), result)


@pytest.mark.slow
def test_a_heads_part_is_what_the_norm_leaves_of_it(models):
    """With the factors of attention's norm and the last one held, a head's part is its output through both."""
    model, direction = models("olmo2"), np.random.default_rng(4).normal(size=32).astype(np.float32)
    sow = nnx.capture(lambda model: model(TOKENS, sow_heads=True, sow_parts=True), nnx.Intermediate)
    sown = nnx.jit(sow)(model)[1]
    exact = lambda x: np.asarray(x, np.float64)
    z = exact(heads.collect(sown)[1]["z"])[..., 2, :]
    attention = exact(heads.collect(sown, "residual_parts")[1]["attention"])
    share = z @ exact(model.layers.attention.out.kernel[...])[1, 2]
    share = share / np.sqrt((attention**2).mean(-1, keepdims=True) + 1e-3)
    share = share * exact(model.layers.attention_out_norm.scale[...])[1]
    stream = exact(sown["last_stream"][0])
    share = share / np.sqrt((stream**2).mean(-1, keepdims=True) + 1e-3) * exact(model.last_norm.scale[...])
    parts = nnx.jit(lambda model: interop.logit_parts(model, TOKENS, jnp.asarray(direction)))(model)
    close(parts["heads"][1, ..., 2], share @ direction.astype(np.float64))


# configs


def test_both_ways_to_say_the_layers_and_positions_of_a_gemma_3():
    older = CONFIGS["gemma3"]
    renamed = ("sliding_window_pattern", "rope_theta", "rope_local_base_freq", "rope_scaling")
    newer = {key: value for key, value in older.items() if key not in renamed} | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "_sliding_window_pattern": 6,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    }  # fmt: skip
    assert interop.read_config(newer) == interop.read_config(older)
    assert interop.read_config(older).local == (True, False, True)
    saved = {key: value for key, value in newer.items() if key != "layer_types"} | {"_sliding_window_pattern": 2}
    with pytest.raises(
        ValueError, match="_sliding_window_pattern is 2"
    ):  # transformers takes it to be 6, whatever it is
        interop.read_config(saved)
    assert interop.read_config(saved | {"_sliding_window_pattern": 6}).local == (True,) * 3


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
EVERYWHERE = {
    "use_bidirectional_attention": True, "layer_types": ["chunked_attention"] * 3, "num_experts": 8, "mlp_bias": True,
    "quantization_config": {"quant_method": "gptq"}, "partial_rotary_factor": 1.5, "is_causal": False, "alibi": True,
}  # fmt: skip
REFUSED = {
    "gemma2": {"hidden_activation": "swish2", "hidden_act": "gelu", "attn_logit_softcapping": 0.0,
        "final_logit_softcapping": "30", "query_pre_attn_scalar": None, "sliding_window": None, "head_dim": None,
        "sliding_window_pattern": 2, "layer_types": ["full_attention"] * 2, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_parameters": {"partial_rotary_factor": 0.5},
        "use_qk_norm": True},
    "gemma3": {"hidden_activation": "gelu_fast", "attn_logit_softcapping": 50.0, "final_logit_softcapping": -1.0,
        "query_pre_attn_scalar": 0, "sliding_window": 0, "sliding_window_pattern": 0, "text_config": {},
        "layer_types": ["full_attention"] * 3, "rope_parameters": {"rope_theta": 1e4},
        "rope_scaling": LONGROPE | {"rope_type": "longrope"}, "rope_local_base_freq": 0.5,
        "use_bidirectional_attention": "all"},
    "qwen3": {"use_sliding_window": "yes", "layer_types": ["sliding_attention"] * 3, "hidden_act": "swiglu", "head_dim": None,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": {"partial_rotary_factor": 0.5},
        "use_mrope": True},
    "phi3": {"rope_scaling": LONGROPE | {"long_factor": [2.0]}, "rope_parameters": {"rope_type": "su"}, "attention_bias": True,
        "layer_types": ["full_attention"] * 3, "hidden_act": "swish", "partial_rotary_factor": 0.0},
    "olmo2": {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3, "hidden_act": "swiglu", "clip_qkv": 8.0,
        "rope_scaling": LONGROPE, "rope_parameters": {"partial_rotary_factor": 0.5}, "norm_after": True},
}  # fmt: skip
NAMED = {  # where the message names what is wrong with an entry
    "rope_scaling": "rope_type|rope_scaling|original_max_position_embeddings|long_factor", "rope_parameters": "partial_rotary_factor|rope_type|rope_parameters|short_factor",
    "rope_local_base_freq": "base|rope_local_base_freq", "sliding_window_pattern": "sliding_window_pattern",
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_what_changes_the_computation_is_read_or_refused_by_name(name):
    interop.read_config(CONFIGS[name] | {"cache_implementation": "hybrid", "num_experts": None})
    for key, value in (EVERYWHERE | REFUSED[name]).items():
        changed = CONFIGS[name] | {key: value}
        if value is None:
            del changed[key]
        with pytest.raises(ValueError, match=NAMED.get(key, key)) as caught:
            interop.read_config(changed)
        assert "\n" not in str(caught.value)


def test_a_phi_3_is_stretched_by_longrope_alone():
    with pytest.raises(
        ValueError, match=r"rope_type of a phi3 must be default or longrope, got LinearScaling\(factor=2.0\)"
    ):
        interop.read_config(CONFIGS["phi3"] | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})


def test_caps_must_be_said_and_may_be_none():
    config = CONFIGS["gemma2"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert interop.read_config(config).score_cap is interop.read_config(config).logit_cap is None
    del config["attn_logit_softcapping"]
    with pytest.raises(ValueError, match="lacks attn_logit_softcapping; set it to null"):
        interop.read_config(config)


@pytest.mark.parametrize("change, message", [
    ({"local": (True,)}, "local must have an entry for each of 3 layers"),
    ({"norm_outputs": True}, "norm_outputs needs norm='rms'"),
    ({"qk_norm": "layer"}, "qk_norm must be"),
])  # fmt: skip
def test_a_config_that_contradicts_itself(change, message):
    sizes = {"num_layers": 3, "num_heads": 2, "model_dim": 8, "mlp_dim": 8, "vocabulary": 9, "max_length": 8}
    with pytest.raises(ValueError, match=message):
        interop.Config("test", **sizes, norm_epsilon=1e-5, activation="relu", **change)


def test_norms_of_a_gemma_hold_what_they_multiply_by(models):
    weight = tensors_of("gemma2")["model.norm.weight"]
    np.testing.assert_array_equal(models("gemma2").last_norm.scale[...], 1 + weight)
    tensors = {key: jnp.asarray(x, jnp.bfloat16) for key, x in tensors_of("gemma2").items()}
    half = interop.from_tensors(tensors, CONFIGS["gemma2"])
    exact = 1 + np.asarray(weight.astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(half.last_norm.scale[...], exact)


# GGUF


def write_gguf(file, name):
    """The tensors of a model as llama.cpp's converter writes them: by its own table of names, in float32."""
    gguf = pytest.importorskip("gguf")
    config = CONFIGS[name]
    writer = gguf_writer(
        file, name, block_count=LAYERS, context_length=64, embedding_length=config["hidden_size"],
        feed_forward_length=INNER, head_count=HEADS, head_count_kv=KV_HEADS, layer_norm_rms_eps=config["rms_norm_eps"],
        rope_freq_base=config["rope_theta"], key_length=HEAD_DIM, value_length=HEAD_DIM,
    )  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], LAYERS)
    tensors = {key: x for key, x in tensors_of(name).items() if not key.endswith("bias")}
    for key, x in tensors.items():
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), x)
    close_gguf(writer)
    return interop.from_tensors(tensors, config | {"attention_bias": False})


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_gguf_is_the_same_model(tmp_path, name):
    expected = write_gguf(tmp_path / "tiny.gguf", name)
    result = interop.load(tmp_path / "tiny.gguf")
    assert result.config.norm_epsilon == np.float32(1e-3)  # as it is stored
    exact = {"norm_epsilon": 1e-3, "head_dim": HEAD_DIM}
    assert dataclasses.replace(result.config, **exact) == dataclasses.replace(expected.config, **exact)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(result), nnx.state(expected))


def test_gguf_of_other_families_is_refused(tmp_path):
    close_gguf(gguf_writer(tmp_path / "tiny.gguf", "mamba"))
    with pytest.raises(ValueError, match="holds a 'mamba'; GGUF files of llama, qwen2, .*gpt2 can be read"):
        interop.load(tmp_path / "tiny.gguf")
