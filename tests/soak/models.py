"""Draws configs and checkpoints of six families in ``jattn.interop``; forward passes against float64 NumPy.

The reference follows the papers and reads the tensors by their published names. How much rounding a config brings is
what the reference itself changes by where every tensor is rounded; the tolerance is a multiple of that. Nothing is
compiled as a whole, so that each draw may be another config.
"""

from typing import Any

import jax
import numpy as np

from jattn import interop
from tests.reference.models import Options, forward, shapes
from tests.soak.trial import Difference, Expected, Trial, compare
from tests.soak.vocabulary import Arrays, Random

FAMILIES = ("bert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2")
VOCABULARY, LENGTH, T, B, INNER = 13, 9, 6, 2, 10
IMPLEMENTATIONS = (None, "xla", "blockwise")
EMBEDDINGS = {"bert": "embeddings.word_embeddings.weight", "gpt2": "wte.weight", "gpt_neox": "embed_in.weight"}
PREFIXES = {"bert": "bert.", "gpt2": "transformer.", "gpt_neox": "gpt_neox."}  # the others: "model."


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
    entry = {"rope_scaling": scaling} if scaling else [{}, {"rope_scaling": None}][rng.integers(2)]
    return entry | ({base_name: base} if rng.random() < 0.8 else {})


def draw_tensors(rng: Random, config: Options) -> Arrays:
    """The checkpoint, float32."""
    scale, embedding = float(rng.choice([0.1, 0.4, 1.0])), EMBEDDINGS.get(config["model_type"])
    tensors = {name: rng.normal(size=shape, scale=scale) for name, shape in shapes(config).items()}
    for name, x in tensors.items():
        x += x.ndim == 1 and name.endswith("weight")  # of norms
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] /= scale
    if embedding and rng.random() < 0.2:  # a stream with a mean far from 0
        tensors[embedding] += scale * float(rng.choice([30.0, 300.0]))
    return {name: x.astype(np.float32) for name, x in tensors.items()}


def stored(rng: Random, config: Options, tensors: Arrays) -> Arrays:
    """The same checkpoint as one of its kind is saved: prefixes, fused or separate, inputs first or last."""
    family, file = config["model_type"], dict(tensors)
    if family == "gpt2":
        if rng.random() < 0.5:
            for name in [x for x in file if ".c_attn." in x]:
                parts = np.split(file.pop(name), 3)
                file |= {name.replace("c_attn", f"{side}_proj"): x for side, x in zip("qkv", parts, strict=True)}
        if rng.random() < 0.7:  # Conv1D, [in, out]
            file = {name: x.T.copy() if name.startswith("h.") and x.ndim == 2 else x for name, x in file.items()}
        if "lm_head.weight" not in file and rng.random() < 0.3:
            file["lm_head.weight"] = file["wte.weight"]
    if family == "bert" and rng.random() < 0.5:
        for name in [x for x in file if "attention.self.query" in x]:
            parts = [file.pop(name.replace("query", side)) for side in ("query", "key", "value")]
            file[name.replace("query", "qkv")] = np.concatenate(parts)
    if family == "gpt_neox" and "lm_head.weight" in file and rng.random() < 0.7:
        file["embed_out.weight"] = file.pop("lm_head.weight")
    if rng.random() < 0.6:
        prefix, outside = PREFIXES.get(family, "model."), ("lm_head.", "embed_out.")
        file = {name if name.startswith(outside) else prefix + name: x for name, x in file.items()}
    return file


def bounded(config: Options, tensors: Arrays, *inputs: np.ndarray) -> Expected:
    """The results in float64, and how far each may be off."""
    rng, unit = np.random.default_rng(0), np.finfo(np.float32).eps
    exact = {name: x.astype(np.float64) for name, x in tensors.items()}
    nearby = [{name: x * (1 + unit * rng.uniform(-1, 1, x.shape)) for name, x in exact.items()} for _ in range(4)]
    wanted, *rounded = (forward(config, of, *inputs) for of in (exact, *nearby))
    change = {name: np.max([abs(x[name] - wanted[name]) for x in rounded], 0) for name in wanted}
    return {name: (x, 20 * change[name] + 2e-6 * (1 + abs(x))) for name, x in wanted.items()}


class ModelTrial(Trial):
    """One family and implementation; each case is a config of its own."""

    stream = 5

    def __init__(self, seed: int, index: int):
        super().__init__(seed, index)
        self.family = FAMILIES[index % len(FAMILIES)]
        self.implementation = IMPLEMENTATIONS[index // len(FAMILIES) % len(IMPLEMENTATIONS)]
        self.label = f"float32, {self.family}"
        self.outcomes = ["kind model", f"interop {self.family}", f"interop on {self.implementation or 'default'}"]

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """Some are padded, on either side; some run in two chunks, through a cache."""
        rng = self.rng(draw)
        config = draw_config(rng, self.family)
        tensors = draw_tensors(rng, config)
        tokens, options = rng.integers(0, VOCABULARY, (B, T)), Options()
        if rng.random() < 0.4:
            order = np.arange(T) if rng.random() < 0.5 else np.arange(T)[::-1]
            options["valid"] = order < rng.integers(1, T + 1, (B, 1))
        if self.family == "bert" and rng.random() < 0.5:
            options["token_types"] = rng.integers(0, config.get("type_vocab_size", 2), (B, T))
        cached = self.family != "bert" and rng.random() < 0.25
        valid, types = options.get("valid", np.ones((B, T), bool)), options.get("token_types", np.zeros((B, T), int))
        wanted = bounded(config, tensors, tokens, valid, types)
        with jax.disable_jit():
            model = interop.from_tensors(stored(rng, config, tensors), config)
            model.layers.attention.implementation = self.implementation
            results = run(model, tokens, options, cached)
        real = {name: valid if x.ndim == 3 else valid[:, 0] for name, (x, _) in wanted.items()}
        wanted = {name: (x[real[name]], off[real[name]].max(initial=0.0)) for name, (x, off) in wanted.items()}
        return compare({name: np.asarray(x)[real[name]] for name, x in results.items()}, wanted)


def run(model: Any, tokens: np.ndarray, options: Options, cached: bool) -> dict[str, Any]:
    """The same by jattn; ``cached``: in two chunks, through a cache."""
    if cached:
        cache, parts = model.init_cache(B, LENGTH), []
        for chunk in (slice(0, T - 2), slice(T - 2, T)):
            hidden, cache = model(tokens[:, chunk], cache=cache, **{name: x[:, chunk] for name, x in options.items()})
            parts.append(hidden)
        hidden = np.concatenate(parts, 1)
    else:
        hidden = model(tokens, **options)
    if model.config.family == "bert":
        return {"hidden": hidden, "pooled": model.pooled(hidden)}
    return {"hidden": hidden, "logits": model.logits(jax.numpy.asarray(hidden))}
