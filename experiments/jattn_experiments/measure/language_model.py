"""A pretrained language model: which heads copy, what they are needed for, and what they read.

Heads are chosen by their scores on random tokens that repeat, and tested on other random tokens and on text. The
controls are random groups of other heads in the same layers with outputs of similar norm, a twin with random
parameters, and a toy model that is trained here and measured in the same way.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.progress import track

from jattn import heads, interop
from jattn_experiments import head_scores
from jattn_experiments.config import Config
from jattn_experiments.measure import evaluate, induction_paths, language_metrics, saved_model, sequences, toy_baseline
from jattn_experiments.measure.head_groups import Heads, among, matched_groups, one_off, strongest
from jattn_experiments.measure.language_metrics import GROUPS, METRICS, OF_TOY, PATTERNS, TOY
from jattn_experiments.measure.saved_model import Model, output_norms, pair
from jattn_experiments.measure.sequences import PLACES, Sequences
from jattn_experiments.model_files import model_file
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged
from jattn_experiments.runs.terminal import Terminal

SINGLE = 1  # sequences, of random tokens and of text, on which single heads are switched off
PATHS = 4  # sequences whose paths are patched


def check(config: Config) -> None:
    """Raises ``ValueError`` for options that do not apply to a language model, or if the model is missing."""
    sections = ("pretrained", "long", "controls", "sweep", "mesh")
    saved_model.refuse(config, sections, "does not apply to a language model")
    if config.task.kind != "induction":
        kind = config.task.kind
        raise ValueError(f"task.kind: expected 'induction', the task of a language model's toy model, got {kind!r}")
    for claim in config.claims:
        saved_model.check_claim(claim, [*METRICS, *(TOY + name for name in OF_TOY)], not claim.metric.startswith(TOY))
    check_file(config, "language")


def check_file(config: Config, section: str) -> Path:
    """The file of the language model. Raises ``ValueError`` if it, or a package that reads it, is missing."""
    saved_model.need(section, "experiments,hf,gguf", ("safetensors", "tokenizers", "gguf"))
    try:
        return model_file(config.language.model)
    except ValueError as wrong:
        raise ValueError(f"language.model: {wrong}") from None


def run(config: Config, out: Path) -> Findings:
    """Looks at every head, switches groups and single heads off, patches paths, and does the same to the toy model."""
    started, options = time.monotonic(), config.language
    source = model_file(options.model)
    sizes = interop.load(source, progress=False).config  # free the model: the twins take as much memory
    refuse_other_paths(options.model, sizes)
    toy = toy_baseline.measure(config, out / "toy")
    data = sequences.draw(options, interop.tokenizer(source), sizes.vocabulary)
    twins = [look_at(Model.of(twin), data) for twin in saved_model.twins(sizes)]
    model = Model.of(interop.load(source))
    looked = look_at(model, data)
    ranked = {name: strongest(looked["chosen"][name], options.group) for name in GROUPS}
    rng = np.random.default_rng(options.seed)
    besides = [at for group in ranked.values() for at in group]
    matches = {
        name: matched_groups(group, options.matched, looked["norms"], besides, rng) for name, group in ranked.items()
    }
    measured = _measured(model, data, ranked, matches)
    few = np.arange(SINGLE)
    single = judge(model, data, np.concatenate([few, len(data.tested) + few]))
    accuracy = single(np.ones(model.shape))[1]
    each = [single(gates)[1] for gates in track(one_off(model.shape), "each head off", console=Terminal())]
    roles, twin = roles_of(looked, twins), twins[0]
    off = {str(role): single(roles.label[0] != role)[1][None] for role in np.unique(roles.label) if role in PATTERNS}
    metrics = language_metrics.metrics_of(measured, looked, twin, ranked)
    metrics |= {TOY + name: value for name, value in toy.items()}
    return saved_model.findings(
        config,
        time.monotonic() - started,
        seeds=[options.seed],
        places=list(PLACES),
        **of_heads(twin, looked, data),
        accuracy=accuracy[None],
        ablated=np.stack(each).reshape(1, *model.shape, -1),
        groups=off,
        paths={into: measured["paths"]["clean"] - measured["paths"][into] for into in induction_paths.INTO},
        heads=evaluate.head_rows([options.seed], roles),
        controls=language_metrics.controls(config, metrics),
        claims=[language_metrics.verdict(claim, config, metrics) for claim in config.claims],
    )


def of_heads(twin: dict[str, Any], looked: dict[str, Any], data: Sequences) -> dict[str, Any]:
    """The findings of ``look_at`` on every head of the twin and of the model."""
    return {
        "tokens": data.words,
        "scores": pair(twin, looked, (*PATTERNS, "max_weight", "entropy")),
        "statistics": pair(twin, looked, head_scores.ALL),
        "offsets": np.arange(1 - data.short.shape[1], data.short.shape[1]),
        "example_weights": np.stack([twin["example_weights"], looked["example_weights"]]),
        "mean_weights": np.stack([twin["mean_weights"], looked["mean_weights"]]),
        **pair(twin, looked, ("offset_profile", "divergence", "noise")),
    }


def refuse_other_paths(name: str, config: interop.Config) -> None:
    """Raises ``Damaged`` if heads do not write directly to the stream, or do not see all earlier tokens."""
    reasons = {
        "norms of attention outputs": config.norm_outputs or not config.norm_first,
        "layers with a window": config.window is not None,
        "a scale of its scores": config.scale is not None,
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise Damaged(
            f"language.model: {name} has {', '.join(found)}, for which paths between heads cannot be measured; "
            "set long.lengths to examine it on long texts, as configs/long_heads.yaml does"
        )


def look_at(model: Model, data: Sequences) -> dict[str, Any]:
    """The values that the report shows for every head, and the scores and output norms that form the groups."""
    tested, chosen, short = jnp.asarray(data.tested), jnp.asarray(data.chosen), jnp.asarray(data.short)

    @jax.jit
    def patterns(state: nnx.State) -> dict[str, Array]:
        layers = heads.collect(model.sown(state, short, sow_weights=True), "attention_weights")
        weights = jnp.stack(layers, 1)  # [B,L,N,T,T]
        random, rows = weights[: sequences.SHOWN], jnp.ones(short.shape[1], bool)
        profile = jax.vmap(jax.vmap(heads.offset_profile))(random.mean(0))
        return {
            "example_weights": weights[sequences.EXAMPLE_ROWS],
            "offset_profile": profile,
            **evaluate.of_patterns(random, rows),
        }

    statistics = saved_model.statistics_of(model)
    looked: dict[str, Any] = statistics(tested, tested, head_scores.ALL)
    looked["chosen"] = statistics(chosen, chosen, head_scores.ALL)
    looked["shuffled"] = statistics(tested, jnp.roll(tested, 1, 0), head_scores.ALL)
    looked["norms"] = output_norms(model, chosen[:PATHS])
    return jax.tree.map(np.asarray, looked | patterns(model.state))


Judge = Callable[[np.ndarray], np.ndarray]  # of gates [L,N]: [2,3], the loss in nats and the accuracy at each place


def judge(model: Model, data: Sequences, rows: Any = slice(None)) -> Judge:
    """The model's results on these sequences with some of its heads off."""
    tokens, places = jnp.asarray(data.judged[rows]), jnp.asarray(data.places()[:, rows])

    @jax.jit
    def of(state: nnx.State, gates: Array) -> Array:
        per_layer = [{"head_gate": gate} for gate in gates]

        def one_sequence(tokens: Array) -> tuple[Array, Array]:
            whole = model.whole(state)
            logits = whole.logits(whole(tokens[None], per_layer=per_layer))[0, :-1].astype(jnp.float32)
            return answers(logits, tokens[1:])

        # One after another: the logits of all would take more memory than the model.
        loss, right = jax.lax.map(one_sequence, tokens)
        return jnp.stack([jnp.stack([x.mean(where=place) for place in places]) for x in (loss, right)])

    return lambda gates: np.asarray(of(model.state, jnp.asarray(gates, jnp.float32)))


def answers(logits: Array, tokens: Array) -> tuple[Array, Array]:
    """``[T]`` each, of ``logits [T,V]``: the loss of the right ``tokens [T]``, and whether no other is likelier."""
    right = jnp.take_along_axis(logits, tokens[:, None], 1)
    # Each number is compared, because JAX's maximum on a CPU drops NaN among 4096 or more numbers.
    return jax.nn.logsumexp(logits, -1) - right[:, 0], (right >= logits).all(-1)


def _measured(
    model: Model, data: Sequences, ranked: dict[str, Heads], matches: dict[str, list[Heads]]
) -> dict[str, Any]:
    """The losses with groups off, and the paths from the previous-token heads into the induction heads."""
    judged = judge(model, data)
    whole = judged(np.ones(model.shape))
    every = [(name, group) for name in GROUPS for group in (ranked[name], *matches[name])]
    losses: dict[str, list[np.ndarray]] = {name: [] for name in GROUPS}
    for name, group in track(every, "groups off", console=Terminal()):
        losses[name].append(judged(~among(group, model.shape))[0] - whole[0])
    senders = [ranked["previous_token"], *matches["previous_token"]]
    return {
        "loss": whole[0],
        "accuracy": whole[1],
        "rises": {name: np.stack(values) for name, values in losses.items()},  # [1+matched,3]
        "paths": _paths(model, data.tested[:PATHS], ranked["induction"], senders),
    }


def _paths(model: Model, tokens: np.ndarray, readers: Heads, groups: Sequence[Heads]) -> dict[str, np.ndarray]:
    seen = jnp.asarray(tokens)

    @jax.jit
    def streams_of(state: nnx.State) -> tuple[Array, list[dict[str, Array]]]:
        sown = model.sown(state, seen, sow_heads=True, sow_parts=True)
        return sown["layers"]["residual_parts"][0]["input"], heads.collect(sown)

    whole = nnx.merge(model.graph, model.state)
    graph, stacked = nnx.split(whole.layers)

    def run(state: nnx.State, stream: Array, **options: Any) -> Mapping[str, Any]:
        def forward(block: Any) -> Any:
            return block.attention(block.attention_norm(stream), is_causal=True, **options)

        sown: Any = nnx.capture(forward, nnx.Intermediate)(nnx.merge(graph, state))[1]["attention"]
        return {name: sown[name][0] for name in sown}

    streams, sown = streams_of(model.state)
    return induction_paths.scores(
        run,
        layers=lambda i: jax.tree.map(lambda x: x[i], stacked),
        streams=streams,
        sown=sown,
        kernels=whole.layers.attention.out.kernel[...],
        readers=readers,
        groups=groups,
        tokens=seen,
    )


def roles_of(looked: dict[str, Any], twins: Sequence[dict[str, Any]]) -> heads.Roles:
    """The role of every head ``[1,L,N]``, tested against the twins and, for token patterns, other sequences' tokens."""
    usual = looked["chosen"] | {name: looked["shuffled"][name] for name in heads.OF_TOKENS}
    baseline = {name: usual[name] for name in PATTERNS}
    return saved_model.roles(looked, twins, PATTERNS, [looked["shuffled"]], baseline)
