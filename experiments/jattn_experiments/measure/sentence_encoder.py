"""A pretrained sentence encoder: its heads compared with those of a randomly initialised twin."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from rich.progress import track

from jattn import heads, interop
from jattn_experiments import head_scores
from jattn_experiments.config import Config, SentenceEncoder
from jattn_experiments.measure import claims, evaluate, saved_model
from jattn_experiments.model_files import package_folder
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.terminal import Terminal

PATTERNS = (
    "previous_token", "next_token", "current_token", "first_token", "separator", "duplicate_token", "induction",
)  # fmt: skip
METRICS = ("margin", "nearest_accuracy", *(claims.BEST + name for name in PATTERNS))
SHIFTS = (1, 2, 3)  # compare a sentence with the one this many places before it
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
    sections = ("task", "model", "train", "evaluate", "long", "controls", "sweep")
    saved_model.refuse(config, sections, "does not apply to a pretrained model")
    for claim in config.claims:
        saved_model.check_claim(claim, METRICS)
    saved_model.need("pretrained", "experiments,hf", ("safetensors", "tokenizers"))
    folder_of(config.pretrained)


def folder_of(options: SentenceEncoder) -> Path:
    """The folder of the saved model. Raises ``ValueError`` if there is none."""
    folder = Path(options.folder)
    if options.package:
        try:
            folder = package_folder(options.package) / folder
        except ValueError as wrong:
            raise ValueError(f"pretrained.package: {wrong}") from None
    if not (folder / "config.json").is_file():
        raise ValueError(f"pretrained.folder: expected the folder of a saved model, got {str(folder)!r}")
    return folder


def run(config: Config, out: Path) -> Findings:
    """Embeds the sentences, looks at all heads of the model and its twins, and ablates the model's; ignores ``out``."""
    started = time.monotonic()
    folder = folder_of(config.pretrained)
    sentences = read_sentences(config.pretrained, folder)
    model = interop.load(folder)
    models, looking = [*saved_model.twins(model.config), model], looker(sentences)
    *twins, looked = [looking(one) for one in track(models, "heads", console=Terminal())]
    roles = saved_model.roles(looked, twins, PATTERNS, looked["shuffled"])
    looked |= {"ablated": ablate(model, sentences), "groups": _groups(model, sentences, roles.label[0])}
    return _findings(config, sentences, (twins[0], looked), roles, time.monotonic() - started)


def read_sentences(options: SentenceEncoder, folder: Path) -> Sentences:
    """The sentences as tokens of the model's tokenizer."""
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


def embed(model: interop.Transformer, tokens: ArrayLike, valid: ArrayLike, **options: Any) -> Array:
    """Sentence embeddings ``[B,M]`` of length 1: the mean of the last hidden states of real tokens."""
    hidden, real = model(tokens, valid=valid, **options), jnp.asarray(valid)[..., None]
    mean = jnp.sum(jnp.where(real, hidden, 0.0), 1) / real.sum(1).astype(hidden.dtype)
    return mean / jnp.linalg.norm(mean, axis=1, keepdims=True)


def qualities(embeddings: Array, groups: np.ndarray) -> Array:
    """``[2]``: the share of sentences with their nearest sentence in the same group, and the cosine margin of groups.

    The margin is the mean cosine of distinct sentences within a group minus that across groups.
    """
    cosines = embeddings @ embeddings.T
    same, itself = groups[:, None] == groups[None, :], np.eye(len(groups), dtype=bool)
    nearest = jnp.argmax(jnp.where(itself, -jnp.inf, cosines), 1)
    margin = cosines.mean(where=same & ~itself) - cosines.mean(where=~same)
    return jnp.stack([(jnp.asarray(groups)[nearest] == groups).mean(), margin])


def looker(sentences: Sentences) -> Callable[[interop.Transformer], dict[str, Any]]:
    """A function that measures what the report shows, compiled once for all models of a config."""
    tokens, valid = jnp.asarray(sentences.tokens), jnp.asarray(sentences.valid)

    def forward(model: interop.Transformer, seen: Array) -> Array:
        request = {"names": head_scores.ALL, "tokens": seen, "eligible": valid}
        return embed(model, tokens, valid, sow_weights=True, sow_statistics=request)

    capture = nnx.jit(nnx.capture(forward, nnx.Intermediate))
    scores = jax.jit(_scores)

    def looking(model: interop.Transformer) -> dict[str, Any]:
        embeddings, sown = capture(model, tokens)
        each = (sown, *(capture(model, jnp.roll(tokens, shift, 0))[1] for shift in SHIFTS))
        layers, *beside = (heads.collect(one, "attention_statistics") for one in each)
        weights = jnp.stack(heads.collect(sown, "attention_weights"), 1)
        looked = {
            "weights": weights,  # [B,L,N,T,T]
            "accuracy": qualities(embeddings, sentences.groups),  # [2]
            "shuffled": [head_scores.of_layers(one, heads.OF_TOKENS) for one in beside],
            **head_scores.of_layers(layers, head_scores.ALL),  # [L,N]
            **scores(weights, valid),
        }
        return jax.tree.map(np.asarray, looked)

    return looking


def ablate(model: interop.Transformer, sentences: Sentences) -> np.ndarray:
    """``[L,N,2]``: the qualities with each head switched off."""
    tokens, valid = jnp.asarray(sentences.tokens), jnp.asarray(sentences.valid)
    graph, state = nnx.split(model)
    _, sown = nnx.capture(lambda model: model(tokens, valid=valid, sow_heads=True), nnx.Intermediate)(model)

    @jax.jit
    def switched(state: Any) -> Array:
        def without(per_layer: list[dict[str, Array]]) -> Array:
            return qualities(embed(nnx.merge(graph, state), tokens, valid, per_layer=per_layer), sentences.groups)

        return heads.ablate(without, heads.collect(sown), batch_size=model.config.num_heads)

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


def _groups(model: interop.Transformer, sentences: Sentences, labels: np.ndarray) -> dict[str, np.ndarray]:
    """``{role: [1,2]}``: the qualities with all heads of a role off; ``labels [L,N]``."""

    @nnx.jit
    def without(model: interop.Transformer, gates: Array) -> Array:
        per_layer = [{"head_gate": gate} for gate in gates]
        return qualities(embed(model, sentences.tokens, sentences.valid, per_layer=per_layer), sentences.groups)

    roles = evaluate.clear_roles(labels)
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
    T, pairs = valid.shape[1], valid[:, :, None] & valid[:, None, :]
    offset = np.arange(T)[None, :] - np.arange(T)[:, None]
    each = (pairs & (offset == one) for one in range(1 - T, T))
    return np.stack([(weights * here[:, None, None]).sum((0, 3, 4)) / max(here.sum(), 1) for here in each], -1)


def _mean_weights(weights: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """``[L,N,T,T]``: the mean over sentences with both tokens."""
    pairs = (valid[:, :, None] & valid[:, None, :])[:, None, None]
    return (weights * pairs).sum(0) / np.maximum(pairs.sum(0), 1)


def _findings(
    config: Config, sentences: Sentences, looked: Sequence[dict[str, Any]], roles: heads.Roles, seconds: float
) -> Findings:
    twin, model = looked
    T, longest = sentences.tokens.shape[1], max(map(len, sentences.words))
    shown = sorted(range(len(sentences.words)), key=lambda at: -len(sentences.words[at]))[:EXAMPLES]
    rows = sentences.valid[shown][:, None, None, :, None]

    def both(measure: Callable[[dict[str, Any]], Any]) -> np.ndarray:
        return np.stack([measure(one) for one in looked])

    quality = dict(zip(("nearest_accuracy", "margin"), both(lambda one: one["accuracy"]).T.tolist(), strict=True))
    best = {claims.BEST + name: both(lambda one, name=name: one[name].max()).tolist() for name in PATTERNS}
    measured = quality | best  # the twin's and the model's
    compared = [(claim, *measured[claim.metric]) for claim in config.claims]
    divergence, noise = zip(*(_divergence(one["weights"], sentences.valid) for one in looked), strict=True)
    fields = dataclasses.asdict(config)
    return saved_model.findings(
        config,
        seconds,
        config={name: fields[name] for name in ("name", "description", "pretrained", "claims")},
        seeds=[0],
        places=["nearest sentence", "cosine margin"],
        tokens=[sentences.words[one] + ["·"] * (longest - len(sentences.words[one])) for one in shown],
        scores=saved_model.pair(twin, model, (*PATTERNS, "max_weight", "entropy")),
        statistics=saved_model.pair(twin, model, tuple(dict.fromkeys((*PATTERNS, *head_scores.ALL)))),
        offsets=np.arange(1 - T, T),
        offset_profile=both(lambda one: _offset_profile(one["weights"], sentences.valid))[None],
        example_weights=both(lambda one: (one["weights"][shown] * rows)[..., :longest, :longest]),
        mean_weights=both(lambda one: _mean_weights(one["weights"], sentences.valid)[..., :longest, :longest]),
        divergence=np.stack(divergence)[None],
        noise=np.stack(noise)[None],
        accuracy=model["accuracy"][None],
        ablated=model["ablated"][None],
        groups=model["groups"],
        heads=evaluate.head_rows([0], roles),
        controls=[
            claims.row(name, metric, [values[when]])
            for metric, values in quality.items()
            for when, name in ((1, config.name), (0, "random twin"))
        ],
        claims=[claims.verdict(claim, [number], [of_twin], [0]) for claim, of_twin, number in compared],
    )
