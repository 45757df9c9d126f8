"""The forward pass of six families in ``jattn.interop`` in NumPy, from their papers, on tensors by their published names."""

from typing import Any

import numpy as np
from scipy.special import erf

from tests.soak.draw import Arrays

Options = dict[str, Any]


def sizes(config: Options) -> tuple[int, ...]:
    """Layers, heads, kv heads, head dim, width and inner width."""
    if config["model_type"] == "gpt2":
        heads, width = config["n_head"], config["n_embd"]
        return config["n_layer"], heads, heads, width // heads, width, config.get("n_inner") or 4 * width
    heads, width = config["num_attention_heads"], config["hidden_size"]
    kv, dim = config.get("num_key_value_heads", heads), config.get("head_dim", width // heads)
    return config["num_hidden_layers"], heads, kv, dim, width, config["intermediate_size"]


ACTIVATIONS = {
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
}
ACTIVATIONS["gelu_pytorch_tanh"] = ACTIVATIONS["gelu_new"]


def forward(
    config: Options, w: Arrays, tokens: np.ndarray, valid: np.ndarray, types: np.ndarray
) -> dict[str, np.ndarray]:
    """Hidden states, logits and, of a BERT, what is pooled; in the dtype of the tensors ``w``."""
    formula = Formula(config, w, valid)
    if config["model_type"] == "bert":
        hidden = formula.bert(tokens, types)
        return {"hidden": hidden, "pooled": np.tanh(formula.linear("pooler.dense", hidden[:, 0]))}
    hidden, embedding = {"gpt2": formula.gpt2, "gpt_neox": formula.gpt_neox}.get(config["model_type"], formula.llama)(
        tokens
    )
    return {"hidden": hidden, "logits": hidden @ w.get("lm_head.weight", embedding).T}


class Formula:
    """One model, and which of its tokens are no padding, ``[B,T]``."""

    def __init__(self, config: Options, w: Arrays, valid: np.ndarray):
        self.config, self.w, self.dtype = config, w, next(iter(w.values())).dtype
        self.layers, self.heads, self.kv, self.dim, *_ = sizes(config)
        self.family, self.rms, T = config["model_type"], "rms_norm_eps" in config, valid.shape[1]
        names = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
        self.epsilon = self.dtype.type(next(config[name] for name in names if name in config))
        default = "gelu" if self.family == "gpt_neox" else "silu"
        self.act = ACTIVATIONS[config.get("hidden_act", config.get("activation_function", default))]
        self.positions = np.maximum(valid.cumsum(1) - 1, 0)  # learned ones count what is no padding
        self.seen = np.broadcast_to(valid[:, None, None, :], (len(valid), 1, T, T))
        if self.family != "bert":
            self.seen = self.seen & np.tri(T, dtype=bool)
        if config.get("sliding_window"):
            self.seen = self.seen & ~np.tri(T, k=-config["sliding_window"], dtype=bool)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """LayerNorm or RMSNorm."""
        x = x if self.rms else x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.w[f"{name}.weight"]
        return x if self.rms else x + self.w[f"{name}.bias"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """``x W^T + b``, with a bias where there is one."""
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """The heads' outputs side by side, from projections ``[B,T,heads * dim]`` or ``[B,T,heads,dim]``."""
        q, k, v = (x.reshape(*x.shape[:2], -1, self.dim) for x in (q, k, v))
        if self.family not in ("bert", "gpt2"):
            q, k = rotated(q, self.config), rotated(k, self.config)
        k, v = (x.repeat(self.heads // self.kv, 2) for x in (k, v))
        scores = np.einsum("btnh,bsnh->bnts", q, k) / self.dtype.type(np.sqrt(self.dim))
        scores = np.where(self.seen, scores, -np.inf)
        high = scores.max(-1, keepdims=True)
        p = np.exp(scores - np.where(np.isinf(high), 0, high))
        p = p / np.maximum(p.sum(-1, keepdims=True), np.finfo(self.dtype).tiny)
        return np.einsum("bnts,bsnd->btnd", p, v).reshape(*q.shape[:2], -1)

    def bert(self, tokens: np.ndarray, types: np.ndarray) -> np.ndarray:
        """Norms after attention and MLP."""
        word, position, kind = (self.w[f"embeddings.{x}_embeddings.weight"] for x in ("word", "position", "token_type"))
        x = self.norm("embeddings.LayerNorm", word[tokens] + kind[types] + position[self.positions])
        for i in range(self.layers):
            at = f"encoder.layer.{i}"
            z = self.attend(*(self.linear(f"{at}.attention.self.{name}", x) for name in ("query", "key", "value")))
            x = self.norm(f"{at}.attention.output.LayerNorm", x + self.linear(f"{at}.attention.output.dense", z))
            inner = self.act(self.linear(f"{at}.intermediate.dense", x))
            x = self.norm(f"{at}.output.LayerNorm", x + self.linear(f"{at}.output.dense", inner))
        return x

    def gpt2(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Also the input embedding."""
        x = self.w["wte.weight"][tokens] + self.w["wpe.weight"][self.positions]
        for i in range(self.layers):
            at = f"h.{i}"
            qkv = np.split(self.linear(f"{at}.attn.c_attn", self.norm(f"{at}.ln_1", x)), 3, -1)
            x = x + self.linear(f"{at}.attn.c_proj", self.attend(*qkv))
            x = x + self.linear(f"{at}.mlp.c_proj", self.act(self.linear(f"{at}.mlp.c_fc", self.norm(f"{at}.ln_2", x))))
        return self.norm("ln_f", x), self.w["wte.weight"]

    def gpt_neox(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Also the input embedding."""
        x, parallel = self.w["embed_in.weight"][tokens], self.config.get("use_parallel_residual", True)
        for i in range(self.layers):
            at = f"layers.{i}"
            qkv = self.linear(f"{at}.attention.query_key_value", self.norm(f"{at}.input_layernorm", x))
            q, k, v = np.moveaxis(qkv.reshape(*tokens.shape, self.heads, 3, self.dim), 3, 0)
            z = self.linear(f"{at}.attention.dense", self.attend(q, k, v))
            read = self.norm(f"{at}.post_attention_layernorm", x if parallel else x + z)
            inner = self.act(self.linear(f"{at}.mlp.dense_h_to_4h", read))
            x = x + z + self.linear(f"{at}.mlp.dense_4h_to_h", inner)
        return self.norm("final_layer_norm", x), self.w["embed_in.weight"]

    def llama(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Also the input embedding."""
        x = self.w["embed_tokens.weight"][tokens]
        for i in range(self.layers):
            at = f"layers.{i}"
            y = self.norm(f"{at}.input_layernorm", x)
            z = self.attend(*(self.linear(f"{at}.self_attn.{name}_proj", y) for name in "qkv"))
            x = x + self.linear(f"{at}.self_attn.o_proj", z)
            y = self.norm(f"{at}.post_attention_layernorm", x)
            gate, up = (self.linear(f"{at}.mlp.{name}_proj", y) for name in ("gate", "up"))
            x = x + self.linear(f"{at}.mlp.down_proj", self.act(gate) * up)
        return self.norm("norm", x), self.w["embed_tokens.weight"]


def rotated(x: np.ndarray, config: Options) -> np.ndarray:
    """``[B,T,N,H]``, the pairs ``(i, i + half)`` of the first dimensions turned by position times frequency."""
    given = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    share = config.get("rotary_pct", 0.25) if config["model_type"] == "gpt_neox" else 1.0
    base = given.get("rope_theta", config.get("rotary_emb_base", config.get("rope_theta", 10000.0)))
    dims = int(x.shape[-1] * share)
    frequency = (base ** (-np.arange(0, dims, 2, dtype=x.dtype) / dims)).astype(x.dtype)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "linear":
        frequency = frequency / given["factor"]
    if kind == "llama3":  # long wavelengths are stretched, short ones are not, those between partly
        turns = given["original_max_position_embeddings"] * frequency / (2 * np.pi)
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / given["factor"])
    angle = (np.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency.astype(x.dtype))[None, :, None]
    cos, sin = np.cos(angle), np.sin(angle)
    a, b, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
