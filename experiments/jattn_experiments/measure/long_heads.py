"""A language model's heads in long texts: which copy a needle, what they are needed for, and where others look.

Heads are chosen on some texts and judged on others. The controls are random groups of other heads with outputs of
similar norm, in the same layers or the next ones; places of the text outside the needle; and a twin with random
parameters. Finished measurements are kept in ``out/parts``, so that a stopped run can resume.
"""

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from jattn import heads, interop
from jattn_experiments import head_scores
from jattn_experiments.batches import Rule
from jattn_experiments.config import Config
from jattn_experiments.config.rules import follow
from jattn_experiments.measure import evaluate, language_metrics, long_metrics, long_texts, saved_model, sequences
from jattn_experiments.measure.head_groups import Heads, among, matched_groups, strongest
from jattn_experiments.measure.language_model import check_file
from jattn_experiments.measure.long_looks import SPANS, distances, patterns, pictured, sinks, zoom
from jattn_experiments.measure.long_losses import Judge, streams
from jattn_experiments.measure.long_metrics import COPIES, PATTERNS
from jattn_experiments.measure.long_needles import Study, each_off, hidden, needles
from jattn_experiments.measure.long_reader import ROWS
from jattn_experiments.measure.long_windows import alone, other_window
from jattn_experiments.measure.saved_model import Model, output_norms
from jattn_experiments.model_files import model_file
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged
from jattn_experiments.runs.terminal import Terminal


def check(config: Config) -> None:
    """Raises ``ValueError`` for options that do not apply to long texts, or if the model is missing."""
    sections = ("pretrained", "task", "model", "train", "evaluate", "controls", "sweep", "mesh")
    saved_model.refuse(config, sections, "does not apply to long texts, where nothing is trained")
    follow(config, _rules(config))
    long_metrics.check(config)
    long_texts.draw(config, interop.tokenizer(check_file(config, "long")))


def _rules(config: Config) -> Iterator[Rule]:
    options, lengths, longest = config.long, config.long.lengths, max(config.long.lengths)
    most = {"chosen": len(long_texts.CHOSEN), "texts": len(long_texts.JUDGED), "depths": len(long_texts.WORDS)}
    for name, largest in most.items():
        yield f"long.{name}", getattr(options, name) <= largest, f"at most {largest}"
    enough = min(lengths) >= 64 and options.ablated in lengths
    yield "long.lengths", enough, f"numbers of at least 64, including long.ablated={options.ablated}"
    yield "long.lengths", len(set(lengths)) == len(lengths), "distinct numbers"
    once = min([*options.sizes, 1]) >= 1 and len(set(options.sizes)) == len(options.sizes)
    distinct = len(set(options.windows)) == len(options.windows)
    yield "long.windows", min([*options.windows, 1]) >= 1 and distinct, "distinct numbers of at least 1"
    yield "long.sizes", once, "distinct numbers of at least 1"
    twice = f"at least twice long.window={options.window}, so that most tokens leave the window"
    yield "long.streamed", options.streamed >= 2 * options.window, twice
    yield "long.pictured", options.pictured >= SPANS, f"at least {SPANS}, the number of blocks in a picture"
    if max(options.streamed, options.pictured) > longest:
        raise ValueError(
            f"long.streamed, long.pictured: expected at most {longest} tokens, the largest of long.lengths, got "
            f"{options.streamed} and {options.pictured}"
        )
    farthest = longest - ROWS - 1
    near = options.distances and all(1 < distance <= farthest for distance in options.distances)
    yield "long.distances", bool(near), f"2 to {farthest}, the distances that fit into the largest of long.lengths"


def run(config: Config, out: Path) -> Findings:
    """Chooses heads on some texts; finds needles, switches heads off, hides needles and looks at sinks on others."""
    started = time.monotonic()
    source = model_file(config.language.model)
    tokenizer, model = interop.tokenizer(source), Model.of(interop.load(source))
    sizes = model.config
    if config.long.windows and (sizes.window is None or all(sizes.is_local)):
        raise Damaged(
            f"long.windows: expected a model in which some layers have a window, got {config.language.model}; "
            "remove this option"
        )
    texts, data = long_texts.draw(config, tokenizer), sequences.draw(config.language, tokenizer, sizes.vocabulary)
    ordinary = sequences.ordinary_tokens(tokenizer, sizes.vocabulary)
    with Progress(console=Terminal()) as progress:
        total = _count(config, saved_model.num_twins(sizes), sizes.num_layers * sizes.num_heads)
        tell = functools.partial(progress.update, progress.add_task("long texts", total=total))

        def study(one: Model, name: str) -> Study:
            return Study(config, one, texts, out / "parts" / name, tell)

        measured = _measured(study(model, "model"), data, ordinary)
        for i, twin in enumerate(saved_model.twins(sizes)):
            measured["twins"].append(_twin(study(Model.of(twin), f"twin {i}"), data, pictures=not i))
    return _findings(config, tokenizer, measured, time.monotonic() - started)


def _count(config: Config, twins: int, num_heads: int) -> int:
    """The parts to measure; one part of each model is the texts."""
    options, groups, few = config.long, 1 + config.language.matched, min(2, config.long.texts)
    sizes = sum(size <= num_heads // 2 for size in options.sizes)
    needles = options.chosen + (len(options.lengths) + 1) * options.texts + few * (groups + 2 * sizes)
    windows = few * (len(options.windows) + 1) + 1 if options.windows else 0
    return needles + groups + 1 + 3 * few + 7 + 3 * twins + few + 1 + windows


def _measured(study: Study, data: sequences.Sequences, ordinary: np.ndarray) -> dict[str, Any]:
    options, matched, part, parts = study.options, study.config.language.matched, study.part, study.parts
    chosen, judged = range(options.chosen), range(options.chosen, options.chosen + options.texts)
    rng = np.random.default_rng(study.config.language.seed)

    scores = np.concatenate([one["score"] for one in parts("chosen", chosen, needles, options.ablated)]).mean(0)
    norms = part("norms", lambda: {"norms": output_norms(study.model, jnp.asarray(data.chosen[:4]))})["norms"]
    ranked = strongest(scores, scores.size)
    group = [at for at in ranked if scores[at] >= COPIES] or ranked[:1]
    groups = [group, *matched_groups(group, matched, norms, [], rng)]
    measured: dict[str, Any] = {"scores": scores, "group": group, "groups": groups, "twins": []}

    def on(off: Heads) -> np.ndarray:
        return 1.0 - among(off, study.model.shape)

    # Long ones first, so that a run that does not fit into memory fails early.
    measured["needles"] = {
        length: parts(f"needles {length}", judged, needles, length) for length in sorted(options.lengths, reverse=True)
    }
    measured["hidden"] = parts("hidden", judged, hidden, groups)
    every = {f"off {at}": one for at, one in enumerate(groups)}
    for size in options.sizes:
        if size <= len(ranked) // 2:
            every[f"largest {size}"] = ranked[:size]
            every[f"random {size}"] = matched_groups(ranked[:size], 1, norms, [], rng)[0]
    measured["off"] = {name: parts(name, judged[:2], needles, options.ablated, on(off)) for name, off in every.items()}
    every["whole"] = []
    judge = Judge(study)
    measured["beside"] = {
        name: part(f"beside {name}", judge, on(off)) for name, off in every.items() if name.startswith(("off", "whole"))
    }
    measured["each"] = part("each head off", each_off, study, judged[0])
    measured["sinks"] = parts("sinks", judged[:2], sinks)
    measured["streams"] = parts("streams", judged[:2], streams)
    measured["distances"] = parts("distances", range(2), distances, ordinary)
    measured["patterns"] = part("patterns", patterns, study, data)
    if options.windows:
        measured["local"], measured["window"] = np.array(study.model.config.is_local), study.model.config.window
        every = sorted({*options.windows, measured["window"]})
        measured["windows"] = {window: parts(f"window {window}", judged[:2], other_window, window) for window in every}
        measured["alone"] = parts("alone", judged[:1], alone)
    return measured | _pictures(study)


def _twin(study: Study, data: sequences.Sequences, pictures: bool) -> dict[str, Any]:
    """The scores of a model with random parameters on the first judged text."""
    part = study.part("needles", needles, study, study.options.chosen, study.options.ablated)
    measured = {"scores": part["score"].mean(0), "patterns": study.part("patterns", patterns, study, data)}
    return measured | (_pictures(study) if pictures else {})


def _pictures(study: Study) -> dict[str, Any]:
    """The weights that the report shows, for the model and its first twin."""
    return {
        "pictures": study.parts("pictures", range(len(study.texts.judged[:2])), pictured),
        "zoom": study.part("zoom", zoom, study, study.options.chosen),
    }


def _findings(config: Config, tokenizer: Any, measured: dict[str, Any], seconds: float) -> Findings:
    metrics = long_metrics.metrics_of(config, measured)
    both, each = (measured["twins"][0], measured), measured["each"]
    statistics = saved_model.pair(*(one["patterns"] for one in both), head_scores.ALL)
    retrieval = np.stack([one["scores"] for one in both])[None]
    pictures = [np.stack([part["weights"] for part in one["pictures"]]) for one in both]
    mean = np.stack([one.mean(0) for one in pictures])
    flat = [one.reshape(len(one), -1, *one.shape[3:]) for one in pictures]
    rows, spans = jnp.ones(mean.shape[-1], bool), mean.shape[-1]
    divergence = np.stack([np.asarray(heads.pattern_divergence(jnp.asarray(one.mean(0)), rows)) for one in flat])
    noise = np.stack([np.asarray(evaluate.noise_floor(*map(jnp.asarray, one[[0, -1]]), rows)) for one in flat])
    ends = [-(-i * config.long.pictured // spans) for i in range(spans + 1)]
    blocks = [f"{start}-{end - 1}" for start, end in zip(ends, ends[1:], strict=False)]
    words = [tokenizer.decode([token], skip_special_tokens=False) for token in measured["zoom"]["tokens"].tolist()]
    profile = jax.vmap(jax.vmap(heads.offset_profile))  # the mean weight at each distance, in spans
    examples = [np.stack([shown[0], one["zoom"]["weights"]]) for shown, one in zip(pictures, both, strict=True)]
    return saved_model.findings(
        config,
        seconds,
        seeds=[config.language.seed],
        places=["answers"],
        tokens=[blocks, words],
        scores={"retrieval": retrieval, **{name: statistics[name] for name in head_scores.TRACKED}},
        statistics=statistics,
        offsets=np.arange(1 - spans, spans) * (config.long.pictured // spans),
        offset_profile=np.stack([np.asarray(profile(jnp.asarray(one))) for one in mean])[None],
        example_weights=np.stack(examples),
        mean_weights=mean,
        divergence=divergence[None],
        noise=noise[None],
        accuracy=each["whole"][None],
        ablated=each["each"][None],
        heads=evaluate.head_rows([config.language.seed], _roles(measured)),
        curves=long_metrics.curves(config, measured),
        grids=long_metrics.grids(config, measured),
        controls=language_metrics.controls(config, metrics),
        claims=[language_metrics.verdict(claim, config, metrics) for claim in config.claims],
    )


def _roles(measured: dict[str, Any]) -> heads.Roles:
    """The role of every head ``[1,L,N]``, tested against the twins; weak if not among the strongest of its model."""
    model, *twins = ({"retrieval": one["scores"], **one["patterns"]} for one in (measured, *measured["twins"]))
    return saved_model.roles(model, twins, PATTERNS, baseline={name: model[name] for name in PATTERNS})
