"""Draws configs and checkpoints of six families in ``jattn.interop``; forward passes against float64 NumPy.

The reference follows the papers and reads the tensors by their published names. How much rounding a config brings is
what the reference itself changes by, in float32 and with every tensor rounded once; the tolerance is a multiple of that.
Nothing is compiled as a whole, so that each draw may be another config.
"""

from typing import Any

import jax
import numpy as np

from jattn import interop
from tests.soak.draw import Arrays, Random
from tests.soak.forward import Options, forward, sizes
from tests.soak.trial import Difference, compare

FAMILIES = ("bert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2")
VOCABULARY, LENGTH, T, B, INNER = 13, 9, 6, 2, 10
IMPLEMENTATIONS = (None, "xla", "blockwise")


# ---- configs, and their tensors by published names


def draw_config(rng: Random, family: str) -> Options:
    """A ``config.json``, with options left out where that has a meaning."""
    flip = lambda p=0.5: bool(rng.random() < p)
    layers, heads, head_dim = int(rng.integers(1, 3)), int(rng.choice([1, 2, 4])), int(rng.choice([4, 8]))
    epsilon = float(rng.choice([1e-12, 1e-6, 1e-5, 1e-3]))
    activation = str(rng.choice(["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"]))
    if family == "gpt2":
        config: Options = {
            "n_layer": layers, "n_head": heads, "n_embd": heads * head_dim, "vocab_size": VOCABULARY, "n_positions": LENGTH,
            "layer_norm_epsilon": epsilon, "activation_function": activation,
        }  # fmt: skip
        config |= {"n_inner": [INNER, None][rng.integers(2)]} if flip() else {}
        return config | ({"tie_word_embeddings": flip()} if flip() else {}) | {"model_type": family}
    config = {
        "model_type": family, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads * head_dim,
        "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "intermediate_size": INNER,
    }  # fmt: skip
    if family == "bert":
        config |= {"type_vocab_size": int(rng.integers(1, 4))} if flip() else {}
        return config | {"layer_norm_eps": epsilon, "hidden_act": activation}
    config |= {"hidden_act": activation} if flip() else {}
    config |= {"tie_word_embeddings": flip()} if flip() else {}
    config |= draw_rotary(rng, "rotary_emb_base" if family == "gpt_neox" and flip() else "rope_theta")
    if family == "gpt_neox":
        config |= {"rotary_pct": float(rng.choice([0.5, 1.0]))} if head_dim == 4 or flip() else {}
        return config | {"layer_norm_eps": epsilon} | ({"use_parallel_residual": flip()} if flip() else {})
    config |= {"rms_norm_eps": epsilon}
    config |= {"num_key_value_heads": int(rng.choice([x for x in (1, 2, 4) if heads % x == 0]))} if flip(0.7) else {}
    config |= {"head_dim": int(rng.choice([4, 8]))} if flip() else {}
    if family == "llama":
        config |= {name: flip() for name in ("attention_bias", "mlp_bias") if flip()}
    if family == "mistral" and flip(0.8):
        config["sliding_window"] = [None, 1, 3, LENGTH][rng.integers(4)]
    return config


def draw_rotary(rng: Random, base_name: str) -> Options:
    """Base and scaling of rotary positions, as older and as newer configs say it."""
    base = float(rng.choice([100.0, 1e4, 5e5]))
    scaling: Options = [{}, {"rope_type": "linear", "factor": float(rng.choice([2.0, 8.0]))}, {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }][rng.integers(3)]  # fmt: skip
    if rng.random() < 0.3 and base_name == "rope_theta":
        return {"rope_parameters": {"rope_theta": base, "rope_type": "default"} | scaling}
    if scaling.get("rope_type") == "linear" and rng.random() < 0.5:
        scaling = {"type": "linear", "factor": scaling["factor"]}
    given = {"rope_scaling": scaling} if scaling else [{}, {"rope_scaling": None}][rng.integers(2)]
    return given | ({base_name: base} if rng.random() < 0.8 else {})


def tied(config: Options) -> bool:
    """Whether the input embedding serves as the output's."""
    return config.get("tie_word_embeddings", config["model_type"] in ("gpt2", "bert"))


def draw_tensors(rng: Random, config: Options) -> Arrays:
    """The checkpoint, float32."""
    layers, heads, kv, dim, width, inner = sizes(config)
    family, wide, narrow = config["model_type"], heads * dim, kv * dim
    found: Arrays = {}
    scale = float(rng.choice([0.1, 0.4, 1.0]))

    def add(name: str, *shape: int, bias: bool = True) -> None:
        found[f"{name}.weight"] = rng.normal(size=shape, scale=scale) + (len(shape) == 1)
        if bias:
            found[f"{name}.bias"] = rng.normal(size=shape[:1], scale=scale)

    if family == "bert":
        for name, rows in (
            ("word", VOCABULARY),
            ("position", LENGTH),
            ("token_type", config.get("type_vocab_size", 2)),
        ):
            add(f"embeddings.{name}_embeddings", rows, width, bias=False)
        add("embeddings.LayerNorm", width)
        add("pooler.dense", width, width)
        modules = {f"attention.self.{name}": (wide, width) for name in ("query", "key", "value")}
        modules |= {"attention.output.dense": (width, wide), "attention.output.LayerNorm": (width,), "output.LayerNorm": (width,),
                    "intermediate.dense": (inner, width), "output.dense": (width, inner)}  # fmt: skip
        prefix, biased = "encoder.layer.", set(modules)
    elif family == "gpt2":
        add("wte", VOCABULARY, width, bias=False)
        add("wpe", LENGTH, width, bias=False)
        add("ln_f", width)
        modules = {"attn.c_attn": (3 * wide, width), "attn.c_proj": (width, wide), "mlp.c_fc": (inner, width),
                   "mlp.c_proj": (width, inner), "ln_1": (width,), "ln_2": (width,)}  # fmt: skip
        prefix, biased = "h.", set(modules)
    elif family == "gpt_neox":
        add("embed_in", VOCABULARY, width, bias=False)
        add("final_layer_norm", width)
        modules = {"attention.query_key_value": (3 * wide, width), "attention.dense": (width, wide), "mlp.dense_h_to_4h": (inner, width),
                   "mlp.dense_4h_to_h": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,)}  # fmt: skip
        prefix, biased = "layers.", set(modules)
    else:
        add("embed_tokens", VOCABULARY, width, bias=False)
        add("norm", width, bias=False)
        modules = {"self_attn.q_proj": (wide, width), "self_attn.k_proj": (narrow, width), "self_attn.v_proj": (narrow, width),
                   "self_attn.o_proj": (width, wide), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
                   "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,)}  # fmt: skip
        prefix, biased = "layers.", set()
        if config.get("attention_bias"):
            biased |= {f"self_attn.{name}_proj" for name in "qkvo"}
        if config.get("mlp_bias"):
            biased |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        if family == "qwen2":
            biased |= {f"self_attn.{name}_proj" for name in "qkv"}
    for i in range(layers):
        for name, shape in modules.items():
            add(f"{prefix}{i}.{name}", *shape, bias=name in biased)
    if not tied(config):
        found["lm_head.weight"] = rng.normal(size=(VOCABULARY, width))
    if family in ("bert", "gpt2", "gpt_neox") and rng.random() < 0.2:  # a stream with a mean far from 0
        name = {"bert": "embeddings.word_embeddings", "gpt2": "wte", "gpt_neox": "embed_in"}[family]
        found[f"{name}.weight"] = found[f"{name}.weight"] + scale * float(rng.choice([30.0, 300.0]))
    return {name: x.astype(np.float32) for name, x in found.items()}


def stored(rng: Random, config: Options, tensors: Arrays) -> Arrays:
    """The same checkpoint as one of its kind is saved: prefixes, fused or separate, inputs first or last."""
    family, found = config["model_type"], dict(tensors)
    if family == "gpt2":
        if rng.random() < 0.5:
            for name in [x for x in found if ".c_attn." in x]:
                parts = np.split(found.pop(name), 3)
                found |= {name.replace("c_attn", f"{one}_proj"): x for one, x in zip("qkv", parts, strict=True)}
        if rng.random() < 0.7:  # Conv1D, [in, out]
            found = {name: x.T.copy() if name.startswith("h.") and x.ndim == 2 else x for name, x in found.items()}
        if tied(config) and rng.random() < 0.3:
            found["lm_head.weight"] = found["wte.weight"]
    if family == "bert" and rng.random() < 0.5:
        names = [x for x in found if "attention.self.query" in x]
        for name in names:
            parts = [found.pop(name.replace("query", one)) for one in ("query", "key", "value")]
            found[name.replace("query", "qkv")] = np.concatenate(parts)
    if family == "gpt_neox" and "lm_head.weight" in found and rng.random() < 0.7:
        found["embed_out.weight"] = found.pop("lm_head.weight")
    prefix = {"bert": "bert.", "gpt2": "transformer.", "gpt_neox": "gpt_neox."}.get(family, "model.")
    if rng.random() < 0.6:
        outside = ("lm_head.", "embed_out.")
        found = {name if name.startswith(outside) else prefix + name: x for name, x in found.items()}
    return found


# ---- trials


def bounded(
    config: Options, tensors: Arrays, tokens: np.ndarray, valid: np.ndarray, types: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The results in float64, and how far each may be off."""
    rng = np.random.default_rng(0)
    exact, unit = {name: x.astype(np.float64) for name, x in tensors.items()}, np.finfo(np.float32).eps
    nearby = [{name: x * (1 + unit * rng.uniform(-1, 1, x.shape)) for name, x in exact.items()} for _ in range(2)]
    wanted, *rounded = (forward(config, of, tokens, valid, types) for of in (exact, tensors, *nearby))
    off = {
        name: 20 * np.max([abs(one[name] - x) for one in rounded], 0) + 2e-6 * (1 + abs(x))
        for name, x in wanted.items()
    }
    return wanted, off


class ModelTrial:
    """One family and implementation; each case is a config of its own."""

    eager = False

    def __init__(self, seed: int, index: int):
        self.seed, self.index = seed, index
        self.family = FAMILIES[index % len(FAMILIES)]
        self.implementation = IMPLEMENTATIONS[index // len(FAMILIES) % len(IMPLEMENTATIONS)]
        self.label = f"float32, {self.family}"

    def covers(self) -> list[str]:
        """What is counted."""
        return ["kind interop config", f"interop {self.family}", f"interop on {self.implementation or 'default'}"]

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """The differences in a case, and the largest ratio of error to tolerance."""
        rng = np.random.default_rng([self.seed, self.index, 5, draw])
        config = draw_config(rng, self.family)
        tensors = draw_tensors(rng, config)
        tokens, types = rng.integers(0, VOCABULARY, (B, T)), np.zeros((B, T), int)
        valid, options = np.ones((B, T), bool), Options()
        if rng.random() < 0.4:
            lengths = rng.integers(1, T + 1, (B, 1))
            valid = np.arange(T) < lengths if rng.random() < 0.5 else np.arange(T)[::-1] < lengths
            options["valid"] = valid
        if self.family == "bert" and rng.random() < 0.5:
            types = rng.integers(0, config.get("type_vocab_size", 2), (B, T))
            options["token_types"] = types
        cached = self.family != "bert" and rng.random() < 0.25
        wanted, off = bounded(config, tensors, tokens, valid, types)
        with jax.disable_jit():
            model = interop.from_tensors(stored(rng, config, tensors), config)
            model.layers.attention.implementation = self.implementation
            found = run(model, tokens, options, cached)
        real = {name: valid if x.ndim == 3 else valid[:, 0] for name, x in wanted.items()}
        expected = {name: (x[real[name]], off[name][real[name]].max(initial=0.0)) for name, x in wanted.items()}
        return compare({name: np.asarray(x)[real[name]] for name, x in found.items()}, expected)


def run(model: Any, tokens: np.ndarray, options: Options, cached: bool) -> dict[str, Any]:
    """The same by jattn; ``cached``: in two chunks, through a cache."""
    if cached:
        cache, parts, valid = model.init_cache(B, LENGTH), [], options.get("valid")
        for chunk in (slice(0, T - 2), slice(T - 2, T)):
            own = options if valid is None else options | {"valid": valid[:, chunk]}
            one, cache = model(tokens[:, chunk], cache=cache, **own)
            parts.append(one)
        hidden = np.concatenate(parts, 1)
    else:
        hidden = model(tokens, **options)
    if model.config.family == "bert":
        return {"hidden": hidden, "pooled": model.pooled(hidden)}
    return {"hidden": hidden, "logits": model.logits(jax.numpy.asarray(hidden))}
