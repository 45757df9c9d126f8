"""Configs as they are published are read; what they say about the computation is read or refused, by name."""

import numpy as np
import pytest

from jattn import interop
from jattn.interop.family import refuse_others
from tests.jattn.test_interop import BERT, GPT2
from tests.jattn.test_language_models import CONFIGS, LLAMA, OWN, tensors_of

SAVED = {
    "_name_or_path": "someone/model", "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True,
    "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None, "initializer_range": 0.02,
    "auto_map": {"AutoConfig": "configuration.Config"}, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
    "_attn_implementation_autoset": True, "quantization_config": None,
}  # fmt: skip
# All keys of published files; sizes are theirs.
PUBLISHED = {
    "Llama 2": SAVED | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "max_length": 4096, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "Llama 3.2": SAVED | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "SmolLM2": SAVED | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
        "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Mistral 7B": SAVED | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0, "head_dim": None,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "Qwen2.5": SAVED | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen2.5, by a newer version": SAVED | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "layer_types": ["full_attention"] * 24, "sliding_window": None, "use_sliding_window": False,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen3": SAVED | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_window_layers": 28,
        "max_position_embeddings": 40960, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Gemma 2": SAVED | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "vocab_size": 256000,
    },
    "Gemma 3": SAVED | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "Gemma 3, by a newer version": SAVED | {
        "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None, "dtype": "bfloat16",
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
        "intermediate_size": 2048, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "sliding_window": 512, "tie_word_embeddings": True,
        "rope_parameters": {"full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
                            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
        "use_bidirectional_attention": False, "vocab_size": 262144,
    },
    "Phi-3": SAVED | {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0,
        "embd_pdrop": 0.0, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "OLMo 2": SAVED | {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False, "attention_dropout": 0.0,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
    },
    "Pythia": SAVED | {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "attention_bias": True,
        "attention_dropout": 0.0, "classifier_dropout": 0.1, "hidden_act": "gelu", "hidden_dropout": 0.0,
        "hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "num_attention_heads": 8, "num_hidden_layers": 6, "rope_scaling": None, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
    },
    "GPT-2": SAVED | {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1,
        "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_inner": None,
        "n_layer": 12, "n_positions": 1024, "reorder_and_upcast_attn": False, "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "BERT": SAVED | {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": None, "directionality": "bidi", "gradient_checkpointing": False, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12, "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform", "position_embedding_type": "absolute", "type_vocab_size": 2,
        "vocab_size": 28996, "sentence_transformers": {"version": "4.1.0"},
    },
}  # fmt: skip


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
    with pytest.raises(ValueError, match=r"keys that are not known here .*\{'norm_type': 'a', 'clip_qkv': 1\}"):
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
    with pytest.raises(ValueError, match=r"stablelm has keys .*'clip_qkv': 8.0"):
        refuse_others(options, *CONFIGS["stablelm"])
