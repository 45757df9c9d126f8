"""The forward pass of families in ``jattn.interop`` in NumPy, from their papers, on tensors by their published names."""

from typing import Any

import numpy as np
from scipy.special import erf

from tests import reference
from tests.soak.vocabulary import Arrays

Options = dict[str, Any]
ACTIVATIONS = {
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
}
ACTIVATIONS["gelu_pytorch_tanh"] = ACTIVATIONS["gelu_new"]


def sizes(config: Options) -> tuple[int, ...]:
    """Layers, heads, kv heads, head dim, width and inner width."""
    if config["model_type"] == "gpt2":
        heads, width = config["n_head"], config["n_embd"]
        return config["n_layer"], heads, heads, width // heads, width, config.get("n_inner") or 4 * width
    heads, width = config["num_attention_heads"], config["hidden_size"]
    kv, dim = config.get("num_key_value_heads", heads), config.get("head_dim", width // heads)
    return config["num_hidden_layers"], heads, kv, dim, width, config["intermediate_size"]


def shapes(config: Options) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by their published names; of a GPT-2, outputs first."""
    layers, heads, kv, dim, width, inner = sizes(config)
    family, wide, narrow = config["model_type"], heads * dim, kv * dim
    length, vocabulary = config.get("n_positions", config.get("max_position_embeddings")), config["vocab_size"]
    prefix, biased = {"bert": "encoder.layer.", "gpt2": "h."}.get(family, "layers."), ()
    if family == "bert":
        rows = {"word": vocabulary, "position": length, "token_type": config.get("type_vocab_size", 2)}
        outside = {f"embeddings.{name}_embeddings": (n, width) for name, n in rows.items()}
        outside |= {"embeddings.LayerNorm": (width,), "pooler.dense": (width, width)}
        inside = {f"attention.self.{name}": (wide, width) for name in ("query", "key", "value")}
        inside |= {"attention.output.dense": (width, wide), "attention.output.LayerNorm": (width,), "output.LayerNorm": (width,),
                   "intermediate.dense": (inner, width), "output.dense": (width, inner)}  # fmt: skip
        biased = ("embeddings.LayerNorm", "pooler.dense", *inside)
    elif family == "gpt2":
        outside = {"wte": (vocabulary, width), "wpe": (length, width), "ln_f": (width,)}
        inside = {"attn.c_attn": (3 * wide, width), "attn.c_proj": (width, wide), "mlp.c_fc": (inner, width),
                  "mlp.c_proj": (width, inner), "ln_1": (width,), "ln_2": (width,)}  # fmt: skip
        biased = ("ln_f", *inside)
    elif family == "gpt_neox":
        outside = {"embed_in": (vocabulary, width), "final_layer_norm": (width,)}
        inside = {"attention.query_key_value": (3 * wide, width), "attention.dense": (width, wide), "mlp.dense_h_to_4h": (inner, width),
                  "mlp.dense_4h_to_h": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,)}  # fmt: skip
        biased = ("final_layer_norm", *inside)
    else:
        outside = {"embed_tokens": (vocabulary, width), "norm": (width,)}
        inside = {f"self_attn.{name}_proj": (wide if name == "q" else narrow, width) for name in "qkv"}
        inside |= {"self_attn.o_proj": (width, wide), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
                   "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,)}  # fmt: skip
        parts = {"self_attn": "qkvo" if config.get("attention_bias") else "qkv" if family == "qwen2" else ""}
        parts["mlp"] = ("gate", "up", "down") if config.get("mlp_bias") else ""
        biased = [f"{module}.{name}_proj" for module, names in parts.items() for name in names]
    every, weights = outside | {f"{prefix}{i}.{name}": x for i in range(layers) for name, x in inside.items()}, {}
    for name, shape in every.items():
        weights[f"{name}.weight"] = shape
        if name.removeprefix(prefix).lstrip("0123456789.") in biased:
            weights[f"{name}.bias"] = shape[:1]
    tied = config.get("tie_word_embeddings", family in ("gpt2", "bert"))
    return weights | ({} if tied else {"lm_head.weight": (vocabulary, width)})


def forward(config: Options, w: Arrays, tokens: np.ndarray, valid: np.ndarray, types: np.ndarray) -> Arrays:
    """Hidden states ``[B,T,M]``; logits or, of a BERT, what is pooled."""
    model = Model(config, w, valid)
    if config["model_type"] == "bert":
        hidden = model.bert(tokens, types)
        return {"hidden": hidden, "pooled": np.tanh(model.linear("pooler.dense", hidden[:, 0]))}
    family, embedding = {"gpt2": (model.gpt2, "wte"), "gpt_neox": (model.gpt_neox, "embed_in")}.get(
        config["model_type"], (model.llama, "embed_tokens")
    )
    hidden = family(tokens)
    return {"hidden": hidden, "logits": hidden @ w.get("lm_head.weight", w[f"{embedding}.weight"]).T}


class Model:
    """One model, and which of its tokens are no padding, ``[B,T]``."""

    def __init__(self, config: Options, w: Arrays, valid: np.ndarray):
        self.config, self.w, T = config, w, valid.shape[1]
        self.layers, _, _, self.dim, *_ = sizes(config)
        self.family, self.rms = config["model_type"], "rms_norm_eps" in config
        names = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
        self.epsilon = next(config[name] for name in names if name in config)
        default = "gelu" if self.family == "gpt_neox" else "silu"
        self.act = ACTIVATIONS[config.get("hidden_act", config.get("activation_function", default))]
        self.positions = np.maximum(valid.cumsum(1) - 1, 0)  # learned ones count what is no padding
        self.visible = np.broadcast_to(valid[:, None, None, :], (len(valid), 1, T, T))
        if self.family != "bert":
            self.visible = self.visible & np.tri(T, dtype=bool)
        if config.get("sliding_window"):
            self.visible = self.visible & ~np.tri(T, k=-config["sliding_window"], dtype=bool)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """LayerNorm or RMSNorm."""
        x = x if self.rms else x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.w[f"{name}.weight"]
        return x if self.rms else x + self.w[f"{name}.bias"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """``x W^T + b``, with a bias where there is one."""
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def mlp(self, first: str, second: str, x: np.ndarray) -> np.ndarray:
        """Two linear maps, and the activation between them."""
        return self.linear(second, self.act(self.linear(first, x)))

    def attend(self, *projections: np.ndarray) -> np.ndarray:
        """The heads' outputs side by side, from q, k and v ``[B,T,heads * dim]`` or ``[B,T,heads,dim]``."""
        q, k, v = (x.reshape(*x.shape[:2], -1, self.dim) for x in projections)
        if self.family not in ("bert", "gpt2"):
            angles = np.arange(q.shape[1])[:, None, None] * frequencies(self.config, self.dim)
            q, k = reference.rotate(q, angles), reference.rotate(k, angles)
        return reference.attention(q, k, v, self.visible).reshape(*q.shape[:2], -1)

    def bert(self, tokens: np.ndarray, types: np.ndarray) -> np.ndarray:
        """Norms after attention and MLP."""
        word, position, kind = (self.w[f"embeddings.{x}_embeddings.weight"] for x in ("word", "position", "token_type"))
        x = self.norm("embeddings.LayerNorm", word[tokens] + kind[types] + position[self.positions])
        for at in (f"encoder.layer.{i}" for i in range(self.layers)):
            z = self.attend(*(self.linear(f"{at}.attention.self.{name}", x) for name in ("query", "key", "value")))
            x = self.norm(f"{at}.attention.output.LayerNorm", x + self.linear(f"{at}.attention.output.dense", z))
            x = self.norm(f"{at}.output.LayerNorm", x + self.mlp(f"{at}.intermediate.dense", f"{at}.output.dense", x))
        return x

    def gpt2(self, tokens: np.ndarray) -> np.ndarray:
        x = self.w["wte.weight"][tokens] + self.w["wpe.weight"][self.positions]
        for at in (f"h.{i}" for i in range(self.layers)):
            qkv = np.split(self.linear(f"{at}.attn.c_attn", self.norm(f"{at}.ln_1", x)), 3, -1)
            x = x + self.linear(f"{at}.attn.c_proj", self.attend(*qkv))
            x = x + self.mlp(f"{at}.mlp.c_fc", f"{at}.mlp.c_proj", self.norm(f"{at}.ln_2", x))
        return self.norm("ln_f", x)

    def gpt_neox(self, tokens: np.ndarray) -> np.ndarray:
        """Each head's q, k and v stand side by side; attention and MLP may read the same stream."""
        x, parallel = self.w["embed_in.weight"][tokens], self.config.get("use_parallel_residual", True)
        for at in (f"layers.{i}" for i in range(self.layers)):
            qkv = self.linear(f"{at}.attention.query_key_value", self.norm(f"{at}.input_layernorm", x))
            qkv = np.moveaxis(qkv.reshape(*tokens.shape, -1, 3, self.dim), 3, 0)
            z = self.linear(f"{at}.attention.dense", self.attend(*qkv))
            stream = self.norm(f"{at}.post_attention_layernorm", x if parallel else x + z)
            x = x + z + self.mlp(f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h", stream)
        return self.norm("final_layer_norm", x)

    def llama(self, tokens: np.ndarray) -> np.ndarray:
        """Also Mistral, Qwen2 and StableLM."""
        x = self.w["embed_tokens.weight"][tokens]
        for at in (f"layers.{i}" for i in range(self.layers)):
            y = self.norm(f"{at}.input_layernorm", x)
            z = self.attend(*(self.linear(f"{at}.self_attn.{name}_proj", y) for name in "qkv"))
            x = x + self.linear(f"{at}.self_attn.o_proj", z)
            y = self.norm(f"{at}.post_attention_layernorm", x)
            gate, up = (self.linear(f"{at}.mlp.{name}_proj", y) for name in ("gate", "up"))
            x = x + self.linear(f"{at}.mlp.down_proj", self.act(gate) * up)
        return self.norm("norm", x)


def frequencies(config: Options, dim: int) -> np.ndarray:
    """Of the pairs of a head's first dimensions that are turned, in radians per token."""
    scaling = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    neox = config["model_type"] == "gpt_neox"
    dims = int(dim * (config.get("rotary_pct", 0.25) if neox else config.get("partial_rotary_factor", 1.0)))
    base = scaling.get("rope_theta", config.get("rotary_emb_base", config.get("rope_theta", 10000.0)))
    frequency = base ** (-np.arange(0, dims, 2) / dims)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return frequency / scaling["factor"]
    if kind == "llama3":  # long wavelengths are stretched, short ones are not, those between partly
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequency * (kept + (1 - kept) / scaling["factor"])
    return frequency
