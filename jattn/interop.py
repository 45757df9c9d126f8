"""Checkpoints of other frameworks in jattn's modules: the BERT and the GPT-2 family, by Hugging Face's names.

``load(folder)`` reads ``config.json`` and the safetensors beside it. Projections may be separate or fused, weights
stored ``[out,in]`` (PyTorch's Linear) or ``[in,out]`` (GPT-2's Conv1D). Every tensor finds its place, or an error lists
what is missing, left over or of another shape. Sources: https://arxiv.org/abs/1810.04805, section 3; Radford et al.,
2019, "Language Models are Unsupervised Multitask Learners", section 2.3; the names are those of published checkpoints.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn import masks
from jattn.checkpoint_files import ACTIVATIONS, Config, read_config, read_folder
from jattn.nnx import MultiHeadAttention

Tensors = Mapping[str, Any]

# What checkpoints hold beside their parameters: masks and tables that the code computes.
BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids|attn\.bias|attn\.masked_bias)$")


class Block(nnx.Module):
    """Attention and an MLP, each added to the residual stream, with a layer norm before (GPT-2) or behind (BERT)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(nnx.LayerNorm, config.model_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = MultiHeadAttention(config.num_heads, config.model_dim, rngs=rngs)
        self.attention_norm = norm()
        self.mlp_in = nnx.Linear(config.model_dim, config.mlp_dim, rngs=rngs)
        self.mlp_out = nnx.Linear(config.mlp_dim, config.model_dim, rngs=rngs)
        self.mlp_norm = norm()
        self.norm_first, self.activation = config.causal, config.activation

    def __call__(self, x: Array, **attention: Any) -> Array:
        """``[B,T,M] -> [B,T,M]``; ``attention`` are options of the attention's call."""

        def mlp(x):
            return self.mlp_out(ACTIVATIONS[self.activation](self.mlp_in(x)))

        if self.norm_first:
            x = x + self.attention(self.attention_norm(x), **attention)
            return x + mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, **attention))
        return self.mlp_norm(x + mlp(x))


class Transformer(nnx.Module):
    """A model of the BERT or the GPT-2 family whose attention is ``jattn.nnx.MultiHeadAttention``; without dropout."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        embed = functools.partial(nnx.Embed, features=config.model_dim, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, config.model_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.token_embed = embed(config.vocabulary)
        self.position_embed = embed(config.max_length)
        self.type_embed = embed(config.token_types) if config.token_types else nnx.data(None)
        self.embed_norm = nnx.data(None) if config.causal else norm()
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.last_norm = norm() if config.causal else nnx.data(None)
        self.pooler = nnx.Linear(config.model_dim, config.model_dim, rngs=rngs) if config.pooler else nnx.data(None)
        self.head = (
            nnx.Linear(config.model_dim, config.vocabulary, use_bias=False, rngs=rngs)
            if config.head
            else nnx.data(None)
        )

    def __call__(
        self,
        tokens: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        per_layer: Sequence[Mapping[str, Any]] | None = None,
        **attention: Any,
    ) -> Array:
        """The last hidden state ``[B,T,M]`` of ``tokens``, integers ``[B,T]``.

        Args:
            tokens: ids below ``config.vocabulary``; T is at most ``config.max_length``.
            valid: bool ``[B,T]``: False for padding, which nobody sees.
            token_types: integers ``[B,T]``, BERT's segments; 0 by default.
            per_layer: for each layer options of its attention's call, such as ``head_gate`` (``jattn.heads.ablate``).
            attention: options of every layer's call, such as ``sow_weights``.

        Raises:
            ValueError: ``tokens`` are no integers ``[B,T]``, or longer than the model has positions; ``per_layer`` is
                not one for each layer.
        """
        tokens, config = jnp.asarray(tokens), self.config
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.shape[1] > config.max_length:
            raise ValueError(
                f"tokens must be integers [B, T] with T at most {config.max_length}, got {tokens.dtype} of shape "
                f"{list(tokens.shape)}"
            )
        x = self.token_embed(tokens) + self.position_embed(jnp.arange(tokens.shape[1]))[None]
        if self.type_embed is not None:
            x = x + self.type_embed(jnp.zeros_like(tokens) if token_types is None else jnp.asarray(token_types))
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if per_layer is not None and len(per_layer) != config.num_layers:
            raise ValueError(
                f"per_layer must have options for each of {config.num_layers} layers, got {len(per_layer)}"
            )
        for i, layer in enumerate(self.layers):
            options = {"is_causal": config.causal, **attention, **(per_layer[i] if per_layer else {})}
            if valid is not None:
                options["mask"] = _real_keys(jnp.asarray(valid, bool), options.get("mask"))
            x = layer(x, **options)
        return x if self.last_norm is None else self.last_norm(x)

    def logits(self, hidden: Array) -> Array:
        """``[..., M] -> [..., vocabulary]``: by the output embedding, or by the input's where there is none."""
        return self.token_embed.attend(hidden) if self.head is None else self.head(hidden)

    def pooled(self, hidden: Array) -> Array:
        """BERT's pooler, ``tanh(W x + b)`` of the first token: ``[B,T,M] -> [B,M]``.

        Raises:
            ValueError: the checkpoint has none.
        """
        if self.pooler is None:
            raise ValueError("this checkpoint has no pooler")
        return jnp.tanh(self.pooler(hidden[:, 0]))


def _real_keys(valid: Array, mask: Any) -> Any:
    """Only keys that are real ``[B,T]`` are seen, and of these what ``mask``, if any, leaves."""
    if callable(mask):
        return masks.and_masks(mask, lambda b, h, q_idx, kv_idx: valid[b, kv_idx])
    real = valid[:, None, None, :]
    return real if mask is None else real & jnp.asarray(mask, bool)


def load(folder: str | Path, *, ignore: Sequence[str] = (), dtype: Any = jnp.float32) -> Transformer:
    """The model in ``folder``: its ``config.json`` and all ``*.safetensors`` beside it.

    Args:
        folder: as saved by Hugging Face's ``save_pretrained``.
        ignore: beginnings of the names of tensors that shall be left out, such as ``"cls."`` for BERT's training heads.
        dtype: of the parameters.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: the family is neither; a file is damaged; tensors are missing, left over, of another shape, no
            floating-point numbers, or in two files; all are named.
        TypeError: ``ignore`` is one string, or ``dtype`` not floating.
        ImportError: safetensors is not installed.

    Example:
        ``model = load("all-MiniLM-L6-v2"); hidden = model(tokens, valid=tokens != 0)``
    """
    tensors, config = read_folder(Path(folder), leave_out=BUFFERS)
    return from_tensors(tensors, config, ignore=ignore, dtype=dtype)


def from_tensors(
    tensors: Tensors, config: Mapping[str, Any], *, ignore: Sequence[str] = (), dtype: Any = jnp.float32
) -> Transformer:
    """``load`` for what is in memory: arrays by name, and a ``config.json`` as a dict."""
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a sequence of beginnings of names, got the string {ignore!r}: ({ignore!r},)")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype of the parameters must be floating, got {jnp.dtype(dtype)}")
    tensors = {
        name: x for name, x in tensors.items() if not BUFFERS.search(name) and not name.startswith(tuple(ignore))
    }
    tensors = _without_prefix(tensors)
    sizes = read_config(config)
    if sizes.num_layers > len(tensors):  # before as many are made
        raise ValueError(f"the config says {sizes.num_layers} layers, and there are {len(tensors)} tensors in all")
    sizes = dataclasses.replace(sizes, pooler="pooler.dense.weight" in tensors, head="lm_head.weight" in tensors)
    model = nnx.eval_shape(lambda: Transformer(sizes, rngs=nnx.Rngs(0)))
    graph, abstract = nnx.split(model)
    expected = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(abstract)}
    placed = _place(tensors, sizes, expected)
    state = [(path, leaf.replace(jnp.asarray(placed[".".join(map(str, path))], dtype)))
             for path, leaf in nnx.to_flat_state(abstract)]  # fmt: skip
    return nnx.merge(graph, nnx.from_flat_state(state))


def _without_prefix(tensors: Tensors) -> dict[str, Any]:
    """Names without the ``bert.`` or ``transformer.`` that models with a task's head put before them."""
    return {re.sub(r"^(bert|transformer)\.", "", name): x for name, x in tensors.items()}


def _modules(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """``(kind, path in our model, names in checkpoints)`` of all modules that a checkpoint may have."""
    if config.family == "bert":
        yield "embed", "token_embed", ("embeddings.word_embeddings",)
        yield "embed", "position_embed", ("embeddings.position_embeddings",)
        yield "embed", "type_embed", ("embeddings.token_type_embeddings",)
        yield "norm", "embed_norm", ("embeddings.LayerNorm",)
        yield "linear", "pooler", ("pooler.dense",)
        layer = "encoder.layer.{}."
        query, key, value = (f"attention.self.{name}" for name in ("query", "key", "value"))
        names = {
            "fused": ("attention.self.qkv", "attention.self.Wqkv", "attention.Wqkv"),
            "query": (query,), "key": (key,), "value": (value,), "out": ("attention.output.dense",),
            "attention_norm": ("attention.output.LayerNorm",), "mlp_in": ("intermediate.dense",),
            "mlp_out": ("output.dense",), "mlp_norm": ("output.LayerNorm",),
        }  # fmt: skip
    else:
        yield "embed", "token_embed", ("wte",)
        yield "embed", "position_embed", ("wpe",)
        yield "norm", "last_norm", ("ln_f",)
        yield "head", "head", ("lm_head",)
        layer = "h.{}."
        names = {
            "fused": ("attn.c_attn",), "query": ("attn.q_proj",), "key": ("attn.k_proj",), "value": ("attn.v_proj",),
            "out": ("attn.c_proj", "attn.out_proj"), "attention_norm": ("ln_1",), "mlp_in": ("mlp.c_fc",),
            "mlp_out": ("mlp.c_proj",), "mlp_norm": ("ln_2",),
        }  # fmt: skip
    for i in range(config.num_layers):
        for part, found in names.items():
            path = (
                f"layers.{i}.attention.{part}"
                if part in ("fused", "query", "key", "value", "out")
                else f"layers.{i}.{part}"
            )
            kind = "norm" if part.endswith("norm") else "linear" if part.startswith("mlp") else part
            yield kind, path, tuple(layer.format(i) + name for name in found)


def _place(tensors: Tensors, config: Config, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The tensors under our names and in our shapes. Raises ValueError with all that does not fit."""
    placed, used, misshapen = {}, set(), []
    for source, targets, turned in _sources(tensors, config, expected):
        used.add(source)
        x = np.asarray(tensors[source])
        flat = [_flat(target, expected[target]) for target in targets]
        wanted = (*flat[0][:-1], sum(shape[-1] for shape in flat))
        wanted = wanted[::-1] if turned else wanted
        if x.shape == wanted:
            parts = np.split(x.T if turned else x, len(targets), axis=-1)
            placed |= {target: part.reshape(expected[target]) for target, part in zip(targets, parts, strict=True)}
        else:
            placed |= dict.fromkeys(targets)
            misshapen.append(f"{source} is {list(x.shape)}, expected {list(wanted)}")
    problems = {
        "missing": sorted(expected.keys() - placed.keys()),
        "left over": sorted(tensors.keys() - used),
        "of another shape": misshapen,
        "no floating-point numbers": [
            f"{name} is {tensors[name].dtype}"
            for name in sorted(used)
            if not jnp.issubdtype(tensors[name].dtype, jnp.floating)
        ],
    }
    if any(problems.values()):
        lines = "".join(f"\n{what}: {', '.join(found)}" for what, found in problems.items() if found)
        raise ValueError(f"the checkpoint does not fit a {config.family} of its config's sizes{lines}")
    return placed


def _sources(
    tensors: Tensors, config: Config, expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, list[str], bool]]:
    """``(name in the checkpoint, names in our model, is it stored [out,in])`` of every tensor that has a place."""
    inputs_first = _inputs_first(tensors, config)
    old = {"weight": "gamma", "bias": "beta"}  # TensorFlow's words in a norm
    for kind, path, names in _modules(config):
        for part, leaf in (("weight", {"embed": "embedding", "norm": "scale"}.get(kind, "kernel")), ("bias", "bias")):
            candidates = [f"{name}.{one}" for name in names for one in (part, old[part])]
            source = next((name for name in candidates if name in tensors), None)
            paths = [path.replace("fused", name) for name in ("query", "key", "value")] if kind == "fused" else [path]
            targets = [f"{one}.{leaf}" for one in paths]
            if source is not None and targets[0] in expected:
                turned = leaf == "kernel" and (kind == "head" or not inputs_first)
                yield source, targets, turned


def _flat(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the heads and their dims joined, as other frameworks have it."""
    if re.search(r"attention\.(query|key|value)\.", path):
        return (*shape[:-2], shape[-2] * shape[-1])
    return (shape[0] * shape[1], shape[2]) if path.endswith("attention.out.kernel") else shape


def _inputs_first(tensors: Tensors, config: Config) -> bool:
    """Are weights stored ``[in,out]``? Told by those that are not square; where all are, by the family's custom."""
    votes = 0
    for kind, path, names in _modules(config):
        longer = 3 * config.model_dim if kind == "fused" else config.mlp_dim if path.endswith("mlp_in") else None
        for name in names if longer not in (None, config.model_dim) else ():
            shape = tensors[f"{name}.weight"].shape if f"{name}.weight" in tensors else ()
            votes += (shape == (config.model_dim, longer)) - (shape == (longer, config.model_dim))
    return votes > 0 if votes else config.family == "gpt2"
