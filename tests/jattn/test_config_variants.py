"""Scaled rotary positions, windows of some layers, and a Gemma 3 with images, as configs say them: transformers' logits."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import safetensors.numpy

from jattn import interop
from jattn.positions import DynamicScaling, LongRopeScaling, YarnScaling
from tests.jattn import test_language_models as language_models
from tests.jattn import test_model_families as model_families
from tests.jattn.test_language_models import by_transformers, close, logits, through_cache

TOKENS, LAYERS, WINDOW = model_families.TOKENS, model_families.LAYERS, model_families.WINDOW
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6, "rope_theta": 100.0}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 8}
USED = {"use_sliding_window": True, "sliding_window": WINDOW}
# The config that each changes, and the change. Texts of 13 tokens are longer than all of the lengths here.
VARIANTS = {
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn said in full": ("llama", {"rope_parameters": YARN | {
        "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 0.25}}),
    "llama, yarn of DeepSeek": ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama, yarn not truncated": ("llama", {"rope_parameters": YARN | {"truncate": False, "beta_slow": 0.25}}),
    "llama, dynamic": ("llama", DYNAMIC),
    "llama, longrope": ("llama", {"rope_parameters": LONGROPE}),
    "gpt_neox, dynamic": ("gpt_neox", DYNAMIC | {"rotary_pct": 1.0}),
    "phi3, longrope": ("phi3", {
        "rope_parameters": {key: x[:2] if isinstance(x, list) else x for key, x in LONGROPE.items() if key != "factor"},
        "original_max_position_embeddings": 8}),
    "olmo2, yarn": ("olmo2", {"rope_parameters": YARN}),
    "qwen2, last layers": ("qwen2", USED | {"max_window_layers": 1}),
    "qwen2, fewer layers than 28": ("qwen2", USED),
    "qwen2, by layer types": ("qwen2", USED | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3, all layers": ("qwen3", USED | {"max_window_layers": 0}),
    "gemma3, bidirectional": ("gemma3", {"use_bidirectional_attention": True, "sliding_window": 5}),
}  # fmt: skip


def of(name):
    """A variant's config and tensors."""
    base, change = VARIANTS[name]
    module = language_models if base in language_models.CONFIGS else model_families
    config = {
        key: x for key, x in module.CONFIGS[base].items() if not ("rope_parameters" in change and key == "rope_theta")
    }
    return config | change, module.tensors_of(base)


@pytest.fixture(scope="module")
def models():
    return functools.cache(lambda name: interop.from_tensors(*reversed(of(name))))


# By transformers 5.24 in float32: logits of both sequences at two positions, the first three.
KEPT = {
    "llama, yarn": [[[1.861762, 0.35943, 0.973267], [0.038189, 0.002527, 0.407074]], [[-2.636556, -0.673169, 2.735145], [1.323491, -0.243695, 0.857431]]],
    "llama, yarn said in full": [[[2.357631, 0.69009, 0.186184], [0.742552, 0.475314, 0.869612]], [[-2.860321, -0.682655, 2.794704], [0.112972, -0.582048, -1.001122]]],
    "llama, yarn of DeepSeek": [[[1.871173, 0.204744, 1.101009], [0.010559, 0.056645, 0.346962]], [[-2.604675, -0.631036, 2.723268], [1.123335, -0.148894, 0.795142]]],
    "llama, yarn not truncated": [[[1.657817, 0.380691, 0.934365], [0.31392, -0.027362, 0.569773]], [[-2.669387, -0.661371, 2.811973], [0.876223, -0.057674, 0.539544]]],
    "llama, dynamic": [[[1.854505, 0.08496, 1.273106], [-0.253033, 0.265429, 0.351145]], [[-2.588507, -0.6131, 2.699416], [0.700965, 0.049183, 0.715254]]],
    "llama, longrope": [[[1.913789, 0.457585, 0.839404], [-0.889102, 0.447355, 0.395331]], [[-2.809026, -0.663944, 2.64845], [1.275296, -0.308598, 0.990309]]],
    "gpt_neox, dynamic": [[[0.868016, -0.565685, 8.586368], [-3.606083, -3.44035, 2.599274]], [[3.485324, 0.27021, 6.821536], [-10.030854, -0.080915, 4.012764]]],
    "phi3, longrope": [[[-0.484226, 0.794566, -1.309716], [-1.451312, 0.489736, 1.979357]], [[-1.124305, 0.856581, -0.593744], [-1.718952, 2.281144, 0.400051]]],
    "olmo2, yarn": [[[0.03616, 0.864064, 2.086718], [-0.276619, 0.741804, 3.767783]], [[0.988475, 2.10459, 3.032236], [1.6872, 1.599082, 4.096866]]],
    "qwen2, last layers": [[[-1.825251, 2.06648, 1.368042], [0.556562, 1.685047, -1.226464]], [[-2.825507, 1.341895, -0.742434], [-2.877691, 1.080632, 0.467934]]],
    "qwen2, fewer layers than 28": [[[-0.827241, 1.39411, 0.762035], [0.446134, 1.48121, -0.79425]], [[-3.349281, 1.353068, -0.841627], [-3.667877, 1.604767, 1.902998]]],
    "qwen2, by layer types": [[[-1.478463, 1.915597, 0.685176], [-1.343531, 0.531246, 1.213936]], [[-3.86284, 1.475458, -0.448983], [-2.427498, 1.329922, 0.354057]]],
    "qwen3, all layers": [[[-0.034237, 2.583357, 0.131766], [-0.21557, 0.88047, 1.189632]], [[0.166998, -0.87896, 1.126564], [0.832513, -0.81148, 0.283218]]],
    "gemma3, bidirectional": [[[0.712878, -0.836891, 0.340363], [-0.431317, 0.629237, 0.50372]], [[0.596652, -1.044245, 2.549206], [0.477375, 1.399689, 0.537603]]],
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_the_logits_that_were_kept(models, name):
    close(logits(models(name), TOKENS)[:, [7, 12], :3], np.array(KEPT[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_transformers(models, name):
    config, tensors = of(name)
    close(logits(models(name), TOKENS), by_transformers(config, tensors, TOKENS))
    close(logits(models(name), TOKENS[:, :5]), by_transformers(config, tensors, TOKENS[:, :5]))


@pytest.mark.parametrize("name", ["llama, longrope", "gpt_neox, dynamic", "qwen2, last layers"])
def test_chunks_through_a_cache_are_the_full_pass(models, name):
    """Also where frequencies depend on the length, which chunks do not know: the cache's capacity counts."""
    model = models(name)
    result, _ = through_cache(model, np.split(TOKENS, [4, 5, 12], axis=1), model.init_cache(2, 13))
    close(result, logits(model, TOKENS))


def test_a_rolling_cache_has_no_length(models):
    with pytest.raises(ValueError, match="rolling: the rotary positions of this llama depend on the length"):
        models("llama, longrope").init_cache(1, 16, rolling=True)


def test_what_stands_in_the_configs():
    read = lambda name: interop.read_config(of(name)[0])
    assert read("llama, yarn said in full").position.scaling == YarnScaling(4.0, 6, 16.0, 0.25, 1.3)
    assert read("llama, dynamic").position.scaling == DynamicScaling(2.0, 8)
    assert isinstance(read("phi3, longrope").position.scaling, LongRopeScaling)
    assert read("qwen2, last layers").local == (False, True, True)
    assert read("qwen2, fewer layers than 28").window is None
    bidirectional = read("gemma3, bidirectional")
    assert not bidirectional.causal and bidirectional.window_sides == (2, 2)


@pytest.mark.parametrize("name, change, message", [
    ("llama, yarn", {"rope_parameters": YARN | {"truncate": 1}}, "truncate of the rotary positions must be true or false"),
    ("llama, longrope", {"rope_parameters": LONGROPE | {"long_factor": [1.0]}}, "must each have 4 entries, half"),
    ("llama, longrope", {"rope_parameters": LONGROPE | {"short_factor": 1.0}}, "short_factor .* must be a list"),
    ("phi3, longrope", {"original_max_position_embeddings": 9}, "original_max_position_embeddings .* is 8, but .* is 9"),
    ("qwen2, last layers", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * LAYERS}, "has no window"),
    ("qwen2, last layers", {"max_window_layers": -1}, "max_window_layers must be a number of layers"),
    ("qwen2, last layers", {"sliding_window": 0}, "sliding_window must be a positive integer"),
])  # fmt: skip
def test_variants_that_are_half_said(name, change, message):
    with pytest.raises(ValueError, match=message):
        interop.read_config(of(name)[0] | change)


def test_entries_of_one_config_that_differ(models):
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling of this config differ: .*4.0.* and .*8.0"):
        interop.read_config(of("llama, yarn")[0] | {"rope_scaling": YARN | {"factor": 8.0}})


def test_what_config_says_is_in_place_of_the_files(tmp_path):
    config, tensors = of("llama, yarn")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = lambda **change: interop.load(tmp_path, config=change).config.position
    assert read(rope_scaling=YARN | {"factor": 8.0}).scaling.factor == 8.0
    assert read(rope_scaling=None).scaling is None and read(rope_scaling=None).base == 100.0
    assert (read(rope_theta=50.0).base, read(rope_theta=50.0).scaling.factor) == (50.0, 4.0)
    by_kind = {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}}
    (tmp_path / "config.json").write_text(json.dumps(config | by_kind))
    with pytest.raises(ValueError, match="config: this model's positions are in rope_parameters; pass rope_parameters"):
        read(rope_theta=50.0)


def test_what_is_written_does_not_depend_on_rounding(models):
    """The cache's capacity, which is the length to the rotary positions, is what a text needs."""
    model = models("llama, longrope")
    prompt = TOKENS[0, :5].tolist()
    (short,) = interop.generate(model, [prompt], 3)  # 7 tokens at most are read, where 8 are short
    following = prompt.copy()
    for _ in range(3):
        following.append(int(logits(model, np.array([following]))[0, -1].argmax()))
    assert short.tolist() == following[5:]


def test_arrays_of_other_libraries_and_names_as_errors_call_them():
    class Foreign:
        def __init__(self, x):
            self.x, self.shape, self.dtype = x, x.shape, x.dtype

        def __array__(self, dtype=None, copy=None):
            return self.x

    config, tensors = of("llama, yarn")
    foreign = {key: Foreign(x) for key, x in tensors.items()}
    expected = logits(interop.from_tensors(tensors, config), TOKENS)
    np.testing.assert_array_equal(logits(interop.from_tensors(foreign, config), TOKENS), expected)
    more = tensors | {"model.layers.0.extra.weight": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match="left over: layers.0.extra.weight"):
        interop.from_tensors(more, config)
    for name in ("layers.0.extra", "model.layers.0.extra"):
        interop.from_tensors(more, config, ignore=[name])


# a Gemma 3 with images


IMAGES = {"vision_config": {"hidden_size": 8}, "boi_token_index": 1, "image_token_index": 2, "mm_tokens_per_image": 4}
LEFT_OUT = ("model_type", "tie_word_embeddings", "head_dim", "num_attention_heads", "num_key_value_heads")


def with_images(folder, prefix, head_prefix, **text):
    """A Gemma 3 as published, with the text model under a prefix and other tensors beside it."""
    config, tensors = dict(model_families.CONFIGS["gemma3"]), model_families.tensors_of("gemma3")
    stored = {
        (head_prefix if name.startswith("lm_head") else prefix) + name.removeprefix("model."): x
        for name, x in tensors.items()
    }
    stored |= {prefix.split("language_model")[0] + "vision_tower.patch.weight": np.ones(3, np.float32)}
    stored |= {prefix.split("language_model")[0] + "multi_modal_projector.weight": np.ones(3, np.float32)}
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    whole = {"model_type": "gemma3", "text_config": config | {"model_type": "gemma3_text"} | text, **IMAGES}
    whole["text_config"].pop("tie_word_embeddings")
    (folder / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    return interop.from_tensors(tensors, config)


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_the_text_model_of_a_gemma_3_with_images(tmp_path, prefixes):
    expected = with_images(tmp_path, *prefixes)
    result = interop.load(tmp_path)
    assert result.config == expected.config
    np.testing.assert_array_equal(logits(result, TOKENS), logits(expected, TOKENS))


def test_a_text_config_that_says_little():
    """That of the published Gemma 3 of 4B, whose other sizes are its family's defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = interop.read_config({"model_type": "gemma3", "text_config": text, **IMAGES})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocabulary) == (8, 4, 256, 262208)
    assert (config.window, config.is_local[:6], config.scale) == (1024, (True,) * 5 + (False,), 1 / 16)
    assert config.position.base == 1e6 and config.position.scaling.factor == 8.0 and config.local_position.base == 1e4
    with pytest.raises(ValueError, match="text_config must be a dict"):
        interop.read_config({"model_type": "gemma3"})
    with pytest.raises(ValueError, match=r"unknown keys that may change .*'video_config'"):
        interop.read_config({"model_type": "gemma3", "text_config": text, "video_config": {}})


def test_prefixes_of_a_family_are_taken_off():
    """As the docstring of ``Family`` says: layers under one prefix, the output embedding under another."""
    config, tensors = model_families.CONFIGS["olmo2"], model_families.tensors_of("olmo2")
    stored = {
        ("language_model." if name.startswith("lm_head") else "language_model.model.") + name.removeprefix("model."): x
        for name, x in tensors.items()
    }
    inside = ("language_model.model.", "language_model.")
    family = dataclasses.replace(interop.FAMILIES["olmo2"], prefixes=inside)
    result = interop.from_tensors(stored, config, family=family)
    np.testing.assert_array_equal(logits(result, TOKENS), logits(interop.from_tensors(tensors, config), TOKENS))


# configs that are drawn: what is read is transformers' model, what is not is refused by name


DRAWN = {
    "sliding_window": [None, 3, 5, 64], "use_sliding_window": [True, False], "max_window_layers": [0, 1, 2, 28],
    "layer_types": [None, ["full_attention"] * 3, ["sliding_attention"] * 3, ["sliding_attention", "full_attention"] * 2,
        ["full_attention", "sliding_attention", "full_attention"]],
    "rope_parameters": [None, YARN, LONGROPE, DYNAMIC["rope_parameters"], {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "default", "rope_theta": 50.0}, {"rope_type": "llama3"} | language_models.SCALING,
        {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}],
    "rope_scaling": [None, {"type": "linear", "factor": 2.0}, YARN, {"type": "dynamic", "factor": 2.0}],
    "rope_theta": [100.0, 1e6], "partial_rotary_factor": [0.5, 1.0], "hidden_act": ["gelu", "silu", "relu", "tanh"],
    "hidden_activation": ["gelu", "gelu_pytorch_tanh", "silu"], "attention_bias": [True, False], "mlp_bias": [True, False],
    "query_pre_attn_scalar": [4, 11], "final_logit_softcapping": [None, 3.0], "attn_logit_softcapping": [None, 2.0],
    "use_bidirectional_attention": [True, False], "max_position_embeddings": [8, 64], "rms_norm_eps": [1e-2, 1e-6],
    "num_key_value_heads": [1, 4], "tie_word_embeddings": [True, False], "original_max_position_embeddings": [8],
    "rotary_pct": [0.5, 1.0], "use_parallel_residual": [True, False], "sliding_window_pattern": [1, 2, 3],
    "rope_local_base_freq": [40.0], "head_dim": [4, 8],
}  # fmt: skip


def drawn(seed):
    """A config of some family with some of its keys changed or left out, and random tensors of transformers' model."""
    torch = pytest.importorskip("torch", reason="compared where PyTorch and transformers are installed")
    transformers = pytest.importorskip("transformers", reason="compared where PyTorch and transformers are installed")
    rng = np.random.default_rng(seed)
    bases = {**language_models.CONFIGS, **model_families.CONFIGS}
    bases = [config for config in bases.values() if config["model_type"] in interop.FAMILIES]
    config = dict(bases[rng.integers(len(bases))])
    known = transformers.CONFIG_MAPPING[config["model_type"]]().to_dict().keys() | {"rope_scaling"}
    keys = sorted(DRAWN.keys() & known if rng.random() < 0.9 else DRAWN)  # the others are refused, mostly
    for key in rng.permutation(keys)[: rng.integers(1, 5)]:
        config[str(key)] = DRAWN[key][rng.integers(len(DRAWN[key]))]
    for key in rng.permutation(sorted(config.keys() - {"model_type"}))[: rng.random() < 0.2]:
        del config[str(key)]
    options = {key: x for key, x in config.items() if key != "model_type"}
    options = json.loads(json.dumps(options))  # transformers changes the dicts that it is given
    torch.manual_seed(seed)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **options, attn_implementation="eager")
    )
    for parameter in theirs.parameters():
        parameter.data.normal_(0.0, 0.3)
    tensors = {key: x.float().numpy() for key, x in theirs.state_dict().items()}
    if theirs.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    tokens = TOKENS % theirs.config.vocab_size
    with torch.no_grad():
        return config, tensors, tokens, theirs.eval()(torch.tensor(tokens)).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_config_is_transformers_or_refused(seed):
    pytest.importorskip("transformers", reason="compared where PyTorch and transformers are installed")
    try:
        config, tensors, tokens, expected = drawn(seed)
    except Exception as error:  # whatever transformers raises for what it cannot be
        pytest.skip(f"no model of transformers: {error!r}")
    try:
        model = interop.from_tensors(tensors, config)
    except ValueError as error:
        assert str(error)
        return
    close(logits(model, tokens), expected, 2e-5)
