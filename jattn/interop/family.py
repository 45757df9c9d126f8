"""Defines ``Family``: how a family of models names its configuration and its tensors."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jattn.interop._config import ACTIVATIONS, Config
from jattn.positions import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, Rotary, YarnScaling

# The kinds of layers in ``layer_types``.
LOCAL, GLOBAL = "sliding_attention", "full_attention"
# The keys of a ``Config``'s sizes in most families' configs.
SIZES: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "model_dim": "hidden_size",
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
}
# Config keys that do not change what the model computes, for training, generation, files and tools.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path _num_labels
    architectures attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout cls_token_id
    cross_attention_hidden_size custom_pipelines decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout hidden_dropout_prob
    id2label initializer_range is_decoder is_llama_config label2id language length_penalty mask_token_id max_length
    max_new_tokens max_sequence_length min_length model_type n_ctx name_or_path no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions output_hidden_states output_past output_scores
    pad_token_id prefix pretraining_tp problem_type remove_invalid_values reorder_and_upcast_attn repetition_penalty
    resid_pdrop return_dict return_dict_in_generate sentence_transformers sep_token_id suppress_tokens
    sbert_ce_default_activation_function task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attn use_return_dict
    """.split()
)
# Keys of the rotary positions, by kind.
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
_ROTARY = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": _LLAMA3,
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}


def in_blocks(x: np.ndarray, widths: Sequence[int], head_dim: int) -> list[np.ndarray]:
    """Query, key and value ``[..., width]`` from a fused projection ``[..., sum(widths)]``, one after another."""
    return np.split(x, np.cumsum(widths)[:-1], axis=-1)


@dataclasses.dataclass(frozen=True)
class Family:
    """The names in the ``config.json`` and the checkpoints of one family.

    Modules have a weight and possibly a bias. If a checkpoint lacks a module, ``Config`` must state that the model has
    none. ``"attention.fused"`` is one module for query, key and value, ``"mlp_fused"`` one for the MLP's gate and
    input.

    Attributes:
        name: ``model_type`` in the config.
        config: reads the config; raises ``ValueError`` for unsupported values (``numbers``, ``refuse``),
            and for unknown keys, if it calls ``refuse_others``.
        modules: maps the path of each module in ``Transformer`` to its possible names in a checkpoint.
        layer: the same for the modules of a layer, with ``{}`` for the number of the layer.
        fused: ``(x [...,in], widths, head_dim)``: splits a fused projection; by default into consecutive blocks.
        inputs_first: whether weights are usually stored ``[in,out]``; by default ``[out,in]``, like PyTorch's Linear.
        prefixes: name prefixes in models with a task head; the first that matches a name is removed.
        skipped: prefixes of tensors that are not part of the text model, such as image tensors.
        norm_offset: the number added to the norms' weights, 1 if a checkpoint's norms multiply by ``1 + weight``,
            because the norms here multiply by the scale.

    Example:
        >>> import dataclasses
        >>> llama = jattn.interop.FAMILIES["llama"]
        >>> llama.layer["attention.query"]  # its name in a checkpoint
        ('layers.{}.self_attn.q_proj',)
        >>> inside = ("language_model.model.", "language_model.")  # prefixes of layers and of the output embedding
        >>> inside = dataclasses.replace(llama, prefixes=inside)  # for load(source, family=inside)
    """

    name: str
    config: Callable[[Mapping[str, Any]], Config]
    modules: Mapping[str, tuple[str, ...]]
    layer: Mapping[str, tuple[str, ...]]
    fused: Callable[[np.ndarray, Sequence[int], int], Sequence[np.ndarray]] = in_blocks
    inputs_first: bool = False
    prefixes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    norm_offset: float = 0.0


def numbers(
    config: Mapping[str, Any], keys: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Positive integers keyed by their names in ``Config``: all ``keys`` and any ``optional`` keys that are given.

    Raises ``ValueError`` if a key is missing, or is not a positive integer.
    """
    kind = config.get("model_type")
    if missing := [key for key in keys.values() if key not in config]:
        raise ValueError(f"the config of a {kind} has no {', '.join(missing)}")
    present = {**keys, **{name: key for name, key in (optional or {}).items() if config.get(key) is not None}}
    for key in present.values():
        if type(config[key]) is not int or config[key] < (key != "type_vocab_size"):
            raise ValueError(f"{key} must be a positive integer in the config of a {kind}, got {config[key]!r}")
    return {name: config[key] for name, key in present.items()}


def small(config: Mapping[str, Any], key: str) -> float:
    """The number in [0, 1) under a key, such as a norm's epsilon. Raises ``ValueError`` if it is missing."""
    kind = config.get("model_type")
    if key not in config:
        raise ValueError(f"the config of a {kind} has no {key}")
    if isinstance(config[key], bool) or not isinstance(config[key], int | float) or not 0 <= config[key] < 1:
        raise ValueError(f"{key} must be a small number in the config of a {kind}, got {config[key]!r}")
    return config[key]


def positive(config: Mapping[str, Any], key: str) -> float:
    """The positive number under a key, such as a soft cap. Raises ``ValueError`` if it is missing."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        kind = config.get("model_type")
        raise ValueError(f"{key} must be a positive number in the config of a {kind}, got {value!r}")
    return float(value)


def activation(config: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """The name of the activation under a key. Raises ``ValueError`` if it is not one of ``ACTIVATIONS``."""
    name = config.get(key, default)
    if name is None:
        raise ValueError(f"the config of a {config.get('model_type')} has no {key}")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{key} is {name!r} in this config, which the model here does not support")
    return name


def rotary(config: Mapping[str, Any], base_key: str = "rope_theta", fraction: float = 1.0) -> Rotary:
    """The rotary positions of a config; newer configs keep base, fraction and scaling in one entry.

    Raises:
        ValueError: there are two scalings; the scaling is unknown or has unknown entries, such as one per type of
            layer; a number is not positive.
    """
    entries = [config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"rope_parameters and rope_scaling must be dicts, got {entries}")
    merged: dict[str, Any] = {**entries[1], **entries[0]}
    if all(entries) and entries[0] != entries[1]:  # transformers 5.24 takes rope_scaling alone
        raise ValueError(f"rope_parameters and rope_scaling of this config differ: {entries[0]} and {entries[1]}")
    named = [entry[key] for entry in entries for key in ("rope_type", "type") if key in entry]
    kinds = [kind for at, kind in enumerate(named) if kind != "default" and kind not in named[:at]]
    if len(kinds) > 1 or not all(isinstance(kind, str) and kind in _ROTARY for kind in kinds):
        raise ValueError(
            f"rope_type is {' and '.join(map(repr, kinds))} in this config, which the model here does not support"
        )
    kind = kinds[0] if kinds else "default"
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROTARY[kind]}
    if others := [key for key in merged if key not in known and merged[key] is not None]:
        raise ValueError(
            f"the rotary positions of this config have {', '.join(map(str, others))}, which rope_type {kind!r} does not"
        )
    base = _number(merged, "rope_theta", config.get(base_key, 10000.0))
    share = _number(merged, "partial_rotary_factor", fraction)
    trained = config.get("max_position_embeddings")
    return Rotary(base, share, _scaling(kind, merged, trained))


def _scaling(kind: str, entry: Mapping[str, Any], trained: Any) -> Any:
    """The scaling of this kind, from the ``entry`` of a config; ``trained``: its ``max_position_embeddings``."""
    if kind == "default":
        return None
    if kind == "longrope":
        original = int(_number(entry, _ORIGINAL))
        factor = _number(entry, "factor", _number({}, "max_position_embeddings", trained) / original)
        # As in Phi-3's published code.
        stretched = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 < original else 1.0
        short, long = (_factors(entry, name) for name in ("short_factor", "long_factor"))
        return LongRopeScaling(short, long, original, _number(entry, "attention_factor", stretched))
    factor = _number(entry, "factor")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "dynamic":
        return DynamicScaling(factor, int(_number({}, "max_position_embeddings", trained)))
    if kind == "llama3":
        low, high, original = (_number(entry, name) for name in _LLAMA3[1:])
        return Llama3Scaling(factor, low, high, int(original))
    attention = None if entry.get("attention_factor") is None else _number(entry, "attention_factor")
    if attention is None and entry.get("mscale") and entry.get("mscale_all_dim"):  # DeepSeek's
        logs = (0.1 * _number(entry, name) * math.log(factor) for name in ("mscale", "mscale_all_dim"))
        one, other = (1.0 + log if factor > 1.0 else 1.0 for log in logs)
        attention = one / other
    truncate = entry.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate of the rotary positions must be true or false, got {truncate!r}")
    fast, slow = _number(entry, "beta_fast", 32.0), _number(entry, "beta_slow", 1.0)
    return YarnScaling(factor, int(_number(entry, _ORIGINAL)), fast, slow, attention, truncate)


def _number(entry: Mapping[str, Any], name: str, default: Any = None) -> float:
    """The positive number under a key of the rotary positions; null counts as absent."""
    value = default if entry.get(name) is None else entry[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} of the rotary positions must be a positive number, got {value!r}")
    return float(value)


def _factors(entry: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """The positive numbers under a key of the rotary positions."""
    values = entry.get(name)
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{name} of the rotary positions must be a list of positive numbers, got {values!r}")
    return tuple(_number({name: value}, name) for value in values)


def local_layers(options: Mapping[str, Any], num_layers: int, default: Sequence[str]) -> list[bool]:
    """Whether each layer has the window, according to ``layer_types`` or else the ``default``."""
    kinds = default if options.get("layer_types") is None else options["layer_types"]
    known = isinstance(kinds, list | tuple) and all(kind in (LOCAL, GLOBAL) for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise ValueError(
            f"layer_types must be {LOCAL} or {GLOBAL} for each of {num_layers} layers in this config, got {kinds!r}"
        )
    return [kind == LOCAL for kind in kinds]


def of_whole_heads(position: Rotary) -> Rotary:
    """The same positions. Raises ``ValueError`` if they rotate only part of each head."""
    if position.fraction != 1.0:
        raise ValueError(
            f"partial_rotary_factor is {position.fraction} in this config, which the model here does not support"
        )
    return position


def refuse(config: Mapping[str, Any], **supported: Any) -> None:
    """Raises ``ValueError`` if a key of the config has an unsupported value.

    A null counts as a missing key, unless the supported value is True or a name, where null may mean false or none.
    """
    for key, value in supported.items():
        missing = config.get(key) is None and value is not True and not isinstance(value, str)
        if not missing and config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r} in this config, which the model here does not support")


def refuse_others(config: Mapping[str, Any], *known: str) -> None:
    """Raises ``ValueError`` for keys that may change what the model computes: neither ``known`` nor ``HARMLESS``.

    A null counts as a missing key. ``known`` holds the keys that the family reads or checks itself.
    """
    refuse(config, is_encoder_decoder=False, add_cross_attention=False, pruned_heads={})
    checked = {*known, *HARMLESS, "is_encoder_decoder", "add_cross_attention", "pruned_heads"}
    if others := {key: value for key, value in config.items() if key not in checked and value is not None}:
        raise ValueError(
            f"the config of a {config.get('model_type')} has unknown keys that may change what the model computes: "
            f"{others}; remove those that do not"
        )
