"""A pretrained language model in the same report: which heads copy, what they are needed for, and what they read.

Heads are chosen by their scores on random tokens that repeat, and tested on others and on text. The controls are random
groups of other heads of the same layers with outputs as large, a twin with random parameters, and a toy model that is
trained here and measured in the same way.
"""

import dataclasses
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.progress import track

from jattn import heads, interop
from jattn_experiments import head_scores
from jattn_experiments.config import Config
from jattn_experiments.measure import evaluate, language_metrics, paths, sequences, toy_model
from jattn_experiments.measure.language_metrics import GROUPS, METRICS, OF_TOY, PATTERNS, TOY
from jattn_experiments.measure.sequences import PLACES, Sequences
from jattn_experiments.model_files import model_file
from jattn_experiments.runs import devices
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.terminal import Terminal

NULL_HEADS = 216  # of models with random parameters: what a head scores by chance
SINGLE = 1  # sequences of random tokens, and of text, on which single heads are switched off
PATHS = 4  # sequences whose paths are patched


class Model(NamedTuple):
    """A language model as a graph and its state, so that functions can be compiled over it."""

    graph: Any
    state: Any
    config: interop.Config

    @classmethod
    def of(cls, model: interop.Transformer) -> "Model":
        """Of a model of jattn.interop."""
        return cls(*nnx.split(model), model.config)


def check(config: Config) -> None:
    """Raises ``ValueError`` for options that do not apply to a language model, or if the model is missing."""
    for section in ("pretrained", "long", "controls", "sweep", "mesh"):
        default = next(field for field in dataclasses.fields(Config) if field.name == section).default_factory()
        if getattr(config, section) != default:
            raise ValueError(f"{section}: does not apply to a language model; leave its options out")
    if config.task.kind != "induction":
        raise ValueError(
            f"task.kind: the toy model beside a language model learns 'induction', got {config.task.kind!r}"
        )
    for claim in config.claims:
        known = OF_TOY if claim.metric.startswith(TOY) else METRICS
        if claim.metric.removeprefix(TOY) not in known:
            of_toy = [TOY + name for name in OF_TOY]
            raise ValueError(f"claims.{claim.name}.metric: expected one of {[*METRICS, *of_toy]}, got {claim.metric!r}")
        if claim.needed != 1 and known is METRICS:
            raise ValueError(f"claims.{claim.name}.needed: expected 1, for one model, got {claim.needed}")
    for package in ("safetensors", "tokenizers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"language: {package} is not installed; pip install 'jattn[experiments,hf,gguf]'")
    try:
        model_file(config.language.model)
    except ValueError as wrong:
        raise ValueError(f"language.model: {wrong}") from None


def run(config: Config, out: Path) -> Findings:
    """Looks at every head, switches groups and single heads off, patches paths, and does the same to the toy model."""
    started, options = time.monotonic(), config.language
    toy = toy_model.measure(config, out / "toy")
    source = model_file(options.model)
    sizes = interop.load(source).config  # of a model that is let go: the twins take as much memory
    data = sequences.draw(options, interop.tokenizer(source), sizes.vocabulary)
    count = math.ceil(NULL_HEADS / (sizes.num_layers * sizes.num_heads))
    twins = [look_at(Model.of(interop.Transformer(sizes, rngs=nnx.Rngs(i))), data) for i in range(count)]
    model = Model.of(interop.load(source))
    looked = look_at(model, data)
    ranked = {name: _strongest(looked["chosen"][name], options.group) for name in GROUPS}
    rng = np.random.default_rng(options.seed)
    besides = [at for group in ranked.values() for at in group]
    compared = {
        name: paths.matched_groups(group, options.matched, looked["norms"], besides, rng)
        for name, group in ranked.items()
    }
    found = _measured(model, data, ranked, compared)
    single = judge(model, data, _rows(data, SINGLE))
    accuracy, ablated = single(np.ones(looked["norms"].shape))[1], _ablate_each(single, looked["norms"].shape)
    roles, twin = _roles(looked, twins), twins[0]
    off = {str(role): single(roles.label[0] != role)[1][None] for role in _strong(roles)}
    metrics = language_metrics.metrics_of(found, looked, twin, ranked) | {
        TOY + name: value for name, value in toy.items()
    }
    return Findings(
        name=config.name,
        description=config.description,
        config=dataclasses.asdict(config),
        environment=devices.environment(time.monotonic() - started),
        seeds=[options.seed],
        places=list(PLACES),
        tokens=data.words,
        metric_steps=np.zeros(0, int),
        metrics={},
        look_steps=np.array([0, 1]),  # the twin, the model
        scores=_both(twin, looked, (*PATTERNS, "max_weight", "entropy")),
        statistics=_both(twin, looked, head_scores.ALL),
        offsets=np.arange(1 - data.short.shape[1], data.short.shape[1]),
        offset_profile=_both(twin, looked, ["profile"])["profile"],
        example_steps=np.array([0, 1]),
        example_weights=np.stack([twin["examples"], looked["examples"]]),
        mean_weights=np.stack([twin["mean"], looked["mean"]]),
        divergence=_both(twin, looked, ["divergence"])["divergence"],
        noise=_both(twin, looked, ["noise"])["noise"],
        accuracy=accuracy[None],
        ablated=ablated[None],
        groups=off,
        paths={into: found["paths"]["clean"] - found["paths"][into] for into in paths.INTO},
        heads=evaluate.head_rows([options.seed], roles),
        curves={},
        grids={},
        controls=language_metrics.controls(config, metrics),
        claims=[language_metrics.verdict(claim, config, metrics) for claim in config.claims],
    )


# ---- the model


def look_at(model: Model, data: Sequences) -> dict[str, Any]:
    """What the report shows of every head, and the scores and output norms that groups are made by."""
    tested, chosen, short = jnp.asarray(data.tested), jnp.asarray(data.chosen), jnp.asarray(data.short)
    graph, L = model.graph, model.config.num_layers

    def statistics(state: Any, tokens: Array, of: Array, names: Sequence[str]) -> dict[str, Array]:
        """``[L,N]``, with the patterns of the tokens ``of``."""
        asked = {"names": tuple(names), "tokens": of}
        forward = nnx.capture(lambda model: model(tokens, sow_statistics=asked), nnx.Intermediate)
        layers = heads.collect(forward(nnx.merge(graph, state))[1], "attention_statistics")
        return {name: jnp.stack([layer[name].mean(0) for layer in layers]) for name in names}

    def patterns(state: Any) -> dict[str, Array]:
        forward = nnx.capture(lambda model: model(short, sow_weights=True), nnx.Intermediate)
        weights = jnp.stack(heads.collect(forward(nnx.merge(graph, state))[1], "attention_weights"), 1)  # [B,L,N,T,T]
        random, rows = weights[: sequences.SHOWN], jnp.ones(short.shape[1], bool)
        flat = random.reshape(len(random), -1, *random.shape[3:])
        return {
            "examples": weights[data.examples],
            "mean": random.mean(0),
            "profile": jax.vmap(heads.offset_profile)(flat.mean(0)).reshape(L, -1, 2 * short.shape[1] - 1),
            "divergence": heads.pattern_divergence(flat.mean(0), rows),
            "noise": evaluate.noise_floor(flat[0::2].mean(0), flat[1::2].mean(0), rows),
        }

    of = jax.jit(statistics, static_argnums=3)
    looked = of(model.state, tested, tested, head_scores.ALL)
    looked["chosen"] = of(model.state, chosen, chosen, head_scores.ALL)
    looked["shuffled"] = of(model.state, tested, jnp.roll(tested, 1, 0), head_scores.ALL)
    looked["norms"] = output_norms(model, chosen[:PATHS])
    return jax.tree.map(np.asarray, looked | jax.jit(patterns)(model.state))


def output_norms(model: Model, tokens: Array) -> Array:
    """``[L,N]``: the mean length of what each head adds to the residual stream."""

    @jax.jit
    def norms(state: Any) -> Array:
        whole = nnx.merge(model.graph, state)
        sown = nnx.capture(lambda model: model(tokens, sow_heads=True), nnx.Intermediate)(whole)[1]
        out = whole.layers.attention.out.kernel[...]
        gram, z = jnp.einsum("lndm,lnem->lnde", out, out), jnp.stack([layer["z"] for layer in heads.collect(sown)])
        return jnp.sqrt(jnp.einsum("lbtnd,lnde,lbtne->lbtn", z, gram, z)).mean((1, 2))

    return norms(model.state)


def judge(model: Model, data: Sequences, rows: Any = slice(None)) -> Callable[[Any], np.ndarray]:
    """A function of gates ``[L,N]``: ``[2,3]``, the loss in nats and the accuracy at each place, on these sequences."""
    tokens, places = jnp.asarray(data.judged[rows]), jnp.asarray(data.places()[:, rows])

    @jax.jit
    def of(state: Any, gates: Array) -> Array:
        per_layer = [{"head_gate": gate} for gate in gates]

        def one_sequence(tokens: Array) -> tuple[Array, Array]:
            whole = nnx.merge(model.graph, state)
            logits = whole.logits(whole(tokens[None], per_layer=per_layer))[0, :-1].astype(jnp.float32)
            right = jnp.take_along_axis(logits, tokens[1:, None], 1)[:, 0]
            return jax.nn.logsumexp(logits, -1) - right, right >= logits.max(-1)

        # One after another: the logits of all would take more memory than the model.
        loss, right = jax.lax.map(one_sequence, tokens)
        return jnp.stack([jnp.stack([x.mean(where=place) for place in places]) for x in (loss, right)])

    return lambda gates: np.asarray(of(model.state, jnp.asarray(gates, jnp.float32)))


def _rows(data: Sequences, count: int) -> np.ndarray:
    """The first ``count`` sequences of random tokens and of text in ``data.judged``."""
    return np.concatenate([np.arange(count), len(data.tested) + np.arange(count)])


def _ablate_each(single: Callable[[Any], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """``[L,N,3]``: the accuracy at each place with one head switched off."""
    one_off = 1.0 - np.eye(int(np.prod(shape))).reshape(-1, *shape)
    found = [single(gates)[1] for gates in track(one_off, "each head off", console=Terminal())]
    return np.stack(found).reshape(*shape, -1)


def _measured(model: Model, data: Sequences, ranked: Any, compared: Any) -> dict[str, Any]:
    """The losses with groups off, and the paths from the previous-token heads into the induction heads."""
    judged, shape = judge(model, data), (model.config.num_layers, model.config.num_heads)
    whole = judged(np.ones(shape))
    every = [(name, group) for name in GROUPS for group in (ranked[name], *compared[name])]
    losses: dict[str, list[Any]] = {name: [] for name in GROUPS}
    for name, group in track(every, "groups off", console=Terminal()):
        gates = np.ones(shape)
        gates[tuple(np.transpose(group))] = 0.0
        losses[name].append(judged(gates)[0] - whole[0])
    senders = [ranked["previous_token"], *compared["previous_token"]]
    return {
        "loss": whole[0],
        "accuracy": whole[1],
        "rises": {name: np.stack(values) for name, values in losses.items()},  # [1+matched,3]
        "paths": _paths(model, data.tested[:PATHS], ranked["induction"], senders),
    }


def _paths(model: Model, tokens: np.ndarray, readers: paths.Heads, groups: Sequence[paths.Heads]) -> Any:
    seen = jnp.asarray(tokens)

    @jax.jit
    def streams_of(state: Any) -> tuple[Any, Any]:
        forward = nnx.capture(lambda model: model(seen, sow_heads=True, sow_parts=True), nnx.Intermediate)
        sown: Any = forward(nnx.merge(model.graph, state))[1]
        return sown["layers"]["residual_parts"][0]["input"], heads.collect(sown)

    whole = nnx.merge(model.graph, model.state)
    graph, stacked = nnx.split(whole.layers)

    def sown_by(state: Any, stream: Array, **options: Any) -> Mapping[str, Any]:
        def forward(block: Any) -> Any:
            return block.attention(block.attention_norm(stream), is_causal=True, **options)

        sown: Any = nnx.capture(forward, nnx.Intermediate)(nnx.merge(graph, state))[1]["attention"]
        return {name: sown[name][0] for name in sown}

    streams, own = streams_of(model.state)
    asked = {"names": ("induction",), "tokens": seen}
    found = paths.scores(
        sown_by,
        lambda i: jax.tree.map(lambda x: x[i], stacked),
        streams,
        own,
        whole.layers.attention.out.kernel[...],
        readers,
        groups,
        asked,
    )
    return jax.tree.map(np.asarray, found)


# ---- roles


def _strongest(scores: np.ndarray, count: int) -> paths.Heads:
    """The heads ``(layer, head)`` with the largest scores ``[L,N]``."""
    order = np.argsort(-scores, axis=None, kind="stable")[:count]
    return [(int(at) // scores.shape[1], int(at) % scores.shape[1]) for at in order]


def _roles(looked: dict[str, Any], twins: Sequence[dict[str, Any]]) -> heads.Roles:
    """The role of every head ``[1,L,N]``, tested against the twins and, for tokens, other sequences' tokens."""
    null = {name: [twin[name] for twin in twins] for name in PATTERNS}
    usual = {name: looked["chosen"][name] for name in PATTERNS}
    for name in heads.OF_TOKENS:
        null[name].append(looked["shuffled"][name])
        usual[name] = looked["shuffled"][name]
    null = {name: np.stack(scores) for name, scores in null.items()}
    return heads.roles({name: looked[name][None] for name in PATTERNS}, null, baseline=usual)


def _strong(roles: heads.Roles) -> list[str]:
    return [role for role in np.unique(roles.label) if role in PATTERNS]


def _both(twin: dict[str, Any], looked: dict[str, Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    """``[1,2,...]``: the twin's and the model's."""
    return {name: np.stack([twin[name], looked[name]])[None] for name in names}
