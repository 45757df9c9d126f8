"""Configs as they are published are read; what they say about the computation is read or refused, by name."""

import json
from pathlib import Path

import numpy as np
import pytest

from jattn import interop
from jattn.interop.family import refuse_others
from tests.jattn.test_interop import BERT, GPT2
from tests.jattn.test_language_models import CONFIGS, LLAMA, OWN, tensors_of

# All keys of published files, each under a name; sizes are theirs.
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    config = PUBLISHED[name]
    sizes = interop.read_config(config)
    assert sizes.family == config["model_type"] and sizes.vocabulary == config["vocab_size"]
    assert sizes.window == (None if "Qwen" in name else config.get("sliding_window"))
    if name.startswith("Gemma 3"):
        assert [i for i, local in enumerate(sizes.is_local) if not local] == list(range(5, sizes.num_layers, 6))
        assert (sizes.local_position.base, sizes.position.base) == (1e4, 1e6)


OTHERS = {
    "clip_qkv": 8.0, "use_qk_norm": True, "qk_layernorm": True, "rope_interleaved": True, "alibi": True,
    "norm_type": "layernorm", "logit_scale": 0.0625, "scale_emb": 12, "nope_layers": [3], "new_in_2027": False,
    "quantization_config": {"quant_method": "gptq"}, "is_encoder_decoder": True, "pruned_heads": {"0": [1]},
}  # fmt: skip


@pytest.mark.parametrize("key", OTHERS)
@pytest.mark.parametrize("config", [LLAMA, CONFIGS["mistral"], CONFIGS["qwen2"], CONFIGS["gpt_neox"], GPT2, BERT],
                         ids=lambda config: config["model_type"])  # fmt: skip
def test_keys_that_are_not_known_are_refused_by_name(config, key):
    with pytest.raises(ValueError, match=key):
        interop.read_config(config | {key: OTHERS[key]})
    interop.read_config(config | {key: None})


def test_all_unknown_keys_are_named_at_once():
    with pytest.raises(ValueError, match=r"unknown keys that may change .*\{'norm_type': 'a', 'clip_qkv': 1\}"):
        interop.read_config(LLAMA | {"norm_type": "a", "clip_qkv": 1})


@pytest.mark.parametrize("change, message", [
    ({"rope_scaling": {"factor": 4.0}}, "have factor, which rope_type 'default' does not"),
    ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "have factor"),
    ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 4.0}}, "rope_type is 'linear' and 'dynamic'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "attention_factor": 1.2}}, "have attention_factor"),
    ({"rope_scaling": {"type": None, "factor": 4.0}}, "rope_type is None"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
     "have full_attention, sliding_attention"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
])  # fmt: skip
def test_positions_that_are_half_said_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        interop.read_config(LLAMA | change)


def test_an_output_embedding_beside_a_tied_one():
    """Saved twice, it is one; another is a contradiction, which the reader of the file must settle."""
    tensors, config = tensors_of("llama"), CONFIGS["llama"]
    embedding = tensors["model.embed_tokens.weight"]
    same = interop.from_tensors(tensors | {"lm_head.weight": embedding.copy()}, config)
    np.testing.assert_array_equal(same.output_embedding(), embedding)
    other = tensors | {"lm_head.weight": embedding + 1}
    with pytest.raises(ValueError, match=r"lm_head.weight differs from embed_tokens.weight; leave it out with ignore="):
        interop.from_tensors(other, config)
    untied = interop.from_tensors(other, config | {"tie_word_embeddings": False})
    np.testing.assert_array_equal(untied.output_embedding(), embedding + 1)
    assert interop.from_tensors(other, config, ignore=["lm_head"]).head is None


def test_a_family_of_ones_own_says_its_keys_or_none():
    """Without ``refuse_others`` in its config function, its configs are not checked."""
    options = CONFIGS["stablelm"] | {"clip_qkv": 8.0}
    assert OWN["stablelm"].config(options).norm == "layer"
    with pytest.raises(ValueError, match=r"stablelm has unknown keys .*'clip_qkv': 8.0"):
        refuse_others(options, *CONFIGS["stablelm"])


def test_a_mistral_without_the_key_has_the_familys_window():
    config = {key: x for key, x in CONFIGS["mistral"].items() if key != "sliding_window"}
    assert interop.read_config(config).window == 4096
    assert interop.read_config(config | {"sliding_window": None}).window is None


@pytest.mark.parametrize("name", interop.FAMILIES)
def test_a_key_that_is_absent_means_what_it_means_to_transformers(name):
    """Or is refused. Heads of keys and head dims aside, which the tensors' shapes tell."""
    transformers = pytest.importorskip("transformers", reason="compared where transformers is installed")
    whole = json.loads(transformers.CONFIG_MAPPING[name]().to_json_string(use_diff=False))
    expected = interop.read_config(whole)
    read = []
    for key in whole.keys() - {"num_key_value_heads", "head_dim"}:
        try:
            assert interop.read_config({other: x for other, x in whole.items() if other != key}) == expected, key
            read.append(key)
        except ValueError as error:
            assert key in str(error)
    assert "tie_word_embeddings" in read
