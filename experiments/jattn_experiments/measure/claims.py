"""Claims: metrics of a run, one number per seed, compared with the thresholds in its config."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jattn_experiments import head_scores, tasks
from jattn_experiments.config import Claim, Config, variants
from jattn_experiments.measure.evaluate import Measured, drops
from jattn_experiments.onset import again, half_fall, half_way, rate


class Result(NamedTuple):
    """One config's models, trained and untrained; leaves have a leading axis of seeds."""

    config: Config
    places: tuple[str, ...]
    seeds: list[int]
    parameters: int  # of one seed's model
    trained: Measured
    untrained: Measured
    groups: dict[str, np.ndarray]  # role -> [R,A], accuracy with all its heads off; empty for a control
    look_steps: np.ndarray = np.zeros(0)  # [P]
    tracked: Mapping[str, np.ndarray] = {}  # score -> [R,P,L,N] in these looks
    metric_steps: np.ndarray = np.zeros(0)  # [E]
    metrics: Mapping[str, np.ndarray] = {}  # of training: name -> [R,E]


# The cost of switching off a clean head: at least this at its own place, at most this elsewhere.
OWN_DROP, OTHER_DROP = 0.5, 0.05
NEAR = 0.01  # nats
OWN_WEIGHT = 0.9  # weight on a place for a head to count as that place's own


def clean_heads(measured: Measured) -> np.ndarray:
    """``[R]``: the number of places that have a head of their own."""
    fall = drops(measured)  # [R,L,N,A]
    others = np.stack([np.delete(fall, place, -1).max(-1, initial=-1.0) for place in range(fall.shape[-1])], -1)
    clean = (fall >= OWN_DROP) & (others <= OTHER_DROP)
    return clean.any((1, 2)).sum(-1)


def own_place_weight(places: tuple[str, ...], trained: Measured, looked_at: Measured) -> np.ndarray:
    """``[R,A]``: each place's weight in ``looked_at``, from the head that it needs most in ``trained``."""
    fall = drops(trained)
    owner = fall.reshape(len(fall), -1, len(places)).argmax(1)  # [R,A]
    scores = np.stack([looked_at.scores[place].reshape(len(fall), -1) for place in places], -1)  # [R,L*N,A]
    return np.take_along_axis(scores, owner[:, None], 1)[:, 0]


def distinct_places(places: tuple[str, ...], measured: Measured) -> np.ndarray:
    """``[R]``: the number of places that get at least ``OWN_WEIGHT`` of some head's weight."""
    best = np.stack([measured.scores[place].max((1, 2)) for place in places], -1)
    return (best >= OWN_WEIGHT).sum(-1)


def mean_divergence(measured: Measured) -> np.ndarray:
    """``[R]``: mean over pairs of distinct heads; 0 for a single head."""
    count = measured.divergence.shape[-1]
    return measured.divergence.sum((1, 2)) / max(count * (count - 1), 1)


def bump(result: Result) -> np.ndarray:
    """``[R]``: how much more the held-out loss falls in the second half of training than in the quarter before.

    These are the last two doublings of the number of steps. Over its logarithm, 0 is a straight line, a negative value
    flattens, and a positive value falls faster again.
    """
    end = result.metric_steps[-1]
    quarter, half = (int(np.argmin(np.abs(result.metric_steps - end / part))) for part in (4, 2))
    loss = result.metrics["held_out_loss"]
    return 2 * loss[:, half] - loss[:, -1] - loss[:, quarter]


# Each takes the result and one of its models, the one to measure.
METRICS: dict[str, Callable[[Result, Measured], np.ndarray]] = {
    "worst_place_accuracy": lambda result, model: model.accuracy.min(-1),
    "mean_accuracy": lambda result, model: model.accuracy.mean(-1),
    "hardened_accuracy": lambda result, model: model.hardened.mean(-1),
    "exact_match": lambda result, model: model.exact_match,
    "loss": lambda result, model: model.loss,
    "in_context": lambda result, model: model.in_context,
    "exact_match_at_last_length": lambda result, model: model.curve[:, -1],
    "clean_heads": lambda result, model: clean_heads(model),
    "own_place_weight": lambda result, model: own_place_weight(result.places, result.trained, model).min(-1),
    "own_place_weight_untrained": lambda result, model: own_place_weight(
        result.places, result.trained, result.untrained
    ).max(-1),
    "distinct_places": lambda result, model: distinct_places(result.places, model),
    "divergence": lambda result, model: mean_divergence(model),
    "noise_floor": lambda result, model: model.noise.mean(-1),
    "bump": lambda result, model: bump(result),
}
OF_PLACES = ("own_place_weight", "own_place_weight_untrained", "distinct_places")  # for places of one position each
OF_CURVE = "exact_match_at_last_length"
IN_CONTEXT = "in_context"  # loss of late queries minus that of early ones, on held-out sequences
OF_CONTEXTS = (IN_CONTEXT, "bump")  # for tasks with early and late queries
AT = "accuracy/"  # accuracy/PLACE: accuracy at one place
BEST = "best/"  # best/SCORE: largest score of any head
OFF = "off/"  # off/ROLE: mean accuracy with all heads of that role off
ABOVE = "above/"  # above/LEVEL: loss minus that of a reference predictor of the task
RESTS = "rests/"  # rests/LEVEL: steps of training at which the loss is within NEAR of that predictor's
PASSES = "passes/"  # passes/LEVEL: the first step at which the loss is nearer to LEVEL than to the one before
PATCHED = "patched/"  # patched/PATCH: share of the answers that one of the task's patches changes as it predicts
TURN = "turn/"  # turn/SCORE: the step at which the best head's score has risen half its way during training
# A SCORE may be one of a layer: SCORE@LAYER. turn/in_context: half of its fall.
OF_TRAINING = (RESTS, PASSES, TURN, "bump")  # which an untrained model does not have

# Metrics that also take the name after their slash.
FAMILIES: dict[str, Callable[[Result, Measured, str], np.ndarray]] = {
    AT: lambda result, model, place: model.accuracy[:, result.places.index(place)],
    BEST: lambda result, model, score: _best(model.scores, score),
    OFF: lambda result, model, role: _without(result, model, role).mean(-1),
    ABOVE: lambda result, model, level: model.loss - model.levels[level],
    RESTS: lambda result, model, level: (
        (np.abs(result.metrics[ABOVE + level]) <= NEAR).mean(-1) * result.metric_steps[-1]
    ),
    PASSES: lambda result, model, level: _passes(result, level),
    PATCHED: lambda result, model, patch: model.patched[patch],
    TURN: lambda result, model, score: turn(result, score),
}


def check(config: Config) -> None:
    """Raises ``ValueError``, before training, for a claim that no model of ``config`` can be measured on.

    Metrics with all heads of a role off exist only for the run itself.
    """
    configs = {"": config, **variants(config)}
    for claim in config.claims:
        key, seeds = f"claims.{claim.name}", {}
        for name, text in (("metric", claim.metric), ("minus", claim.minus)):
            if text is None:
                continue
            control, _, metric = text.rpartition(":")
            if control not in configs:
                controls = list(configs)[1:]
                raise ValueError(
                    f"{key}.{name}: expected [CONTROL:]METRIC with CONTROL one of {controls}, got {text!r}"
                )
            metrics = [one for one in known_metrics(configs[control]) if not (control and one.startswith(OFF))]
            if metric not in metrics:
                raise ValueError(f"{key}.{name}: expected [CONTROL:]METRIC with METRIC one of {metrics}, got {text!r}")
            seeds[name] = configs[control].train.first_seed, configs[control].train.seeds
        if len(set(seeds.values())) > 1:
            raise ValueError(
                f"{key}.minus: expected a metric on the same seeds as {claim.metric!r}, got {claim.minus!r}"
            )
        control, most = claim.metric.rpartition(":")[0], seeds["metric"][1]
        if claim.needed > most:
            raise ValueError(
                f"{key}.needed: expected at most {most}, the number of seeds of {control}, got {claim.needed}"
            )


def known_metrics(config: Config) -> list[str]:
    """The metrics that can be measured for a config, whether its model is trained from scratch or not."""
    task, layers = tasks.make(config.task), ["", *(f"@{layer}" for layer in range(config.model.num_layers))]
    scores = {BEST: (*task.located, *head_scores.ALL), TURN: (*task.located, *head_scores.TRACKED)}
    named = [
        *(AT + place for place in task.places),
        *(kind + score + layer for kind, of in scores.items() for score in of for layer in layers),
        *(OFF + role for role in task.roles),
        *(kind + level for kind in (ABOVE, RESTS) for level in task.levels),
        *(PASSES + level for level in task.levels[1:]),
        *(PATCHED + patch for patch in task.patches),
        *([TURN + IN_CONTEXT] if task.contexts else []),
    ]
    missing = {*(() if task.located else OF_PLACES), *(() if task.contexts else OF_CONTEXTS)}
    if config.task.kind != "copy_string" or not config.evaluate.lengths:
        missing.add(OF_CURVE)
    return [name for name in (*METRICS, *named) if name not in missing]


def measure(result: Result, model: Measured, metric: str) -> list[float]:
    """``metric`` of one of the result's models, one number per seed."""
    kind, slash, name = metric.partition("/")
    values = FAMILIES[kind + slash](result, model, name) if slash else METRICS[metric](result, model)
    return [float(value) for value in values]


def _without(result: Result, model: Measured, role: str) -> np.ndarray:
    """``[R,A]``: the accuracy with all heads of a role off. If no head has the role, no head is off."""
    return result.groups.get(role, model.accuracy) if model is result.trained else model.accuracy


def _best(scores: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """``[R,...]``: the largest score of any head, or of any in one layer; ``scores [R,...,L,N]``."""
    score, _, layer = name.partition("@")
    values = scores[score]
    return (values[..., int(layer), :] if layer else values).reshape(*values.shape[:-2], -1).max(-1)


def _passes(result: Result, level: str) -> np.ndarray:
    """``[R]``: the first step at which the loss is nearer to ``level`` than to the level before; else the last step.

    NaN if the loss is NaN at any step.
    """
    levels = tasks.make(result.config.task).levels
    before, after = (result.metrics[ABOVE + name] for name in (levels[levels.index(level) - 1], level))
    nearer = -before > after
    first = np.where(nearer.any(-1), nearer.argmax(-1), -1)
    return np.where(np.isnan(before + after).any(-1), np.nan, result.metric_steps[first])


def turn(result: Result, name: str) -> np.ndarray:
    """``[R]``: the step at which the best head's score has made half of its rise during training.

    The in-context learning score falls instead, from its largest value.
    """
    if name == IN_CONTEXT:
        return half_fall(result.metric_steps, result.metrics[IN_CONTEXT])
    return half_way(result.look_steps, _best(result.tracked, name))


def judge(claim: Claim, results: dict[str, Result]) -> dict[str, Any]:
    """One row of ``claims.json``; ``results`` maps controls, and ``""`` for the run itself."""
    result, values, untrained = _measured(claim.metric, results)
    if claim.minus is not None:
        _, less, untrained_less = _measured(claim.minus, results)
        both = untrained and untrained_less
        values = [one - other for one, other in zip(values, less, strict=True)]
        untrained = [one - other for one, other in zip(untrained, untrained_less, strict=True)] if both else []
    return verdict(claim, values, untrained, result.seeds)


def _measured(text: str, results: dict[str, Result]) -> tuple[Result, list[float], list[float]]:
    """The result that ``text`` ([CONTROL:]METRIC) names, its metric, and the untrained model's if there is one."""
    control, _, metric = text.rpartition(":")
    result = results[control]
    untrained = [] if metric.startswith(OF_TRAINING) else measure(result, result.untrained, metric)
    return result, measure(result, result.trained, metric), untrained


def row(name: str, metric: str, values: list[float], parameters: int | str = "") -> dict[str, Any]:
    """One row of the table of controls."""
    return {"name": name, "metric": metric, "values": values, "parameters": parameters}


def verdict(
    claim: Claim, values: list[float], reference: list[float], seeds: list[int], what: str = "untrained"
) -> dict[str, Any]:
    """One row of ``claims.json``, from the claim's metric (a number per seed) and numbers to compare it with."""
    below = claim.at_least is None
    threshold = claim.at_most if below else claim.at_least
    passed = [value <= threshold if below else value >= threshold for value in values]
    return {
        "name": claim.name,
        "statement": claim.statement,
        "metric": claim.metric if claim.minus is None else f"{claim.metric} - {claim.minus}",
        "side": "at most" if below else "at least",
        "threshold": threshold,
        "values": values,
        "reference": reference,
        "reference_name": what,
        "seeds": seeds,
        "passed": [seed for seed, good in zip(seeds, passed, strict=True) if good],
        "failed": [seed for seed, good in zip(seeds, passed, strict=True) if not good],
        "needed": claim.needed,
        "holds": sum(passed) >= claim.needed,
        "rate": rate(sum(passed), len(passed)),
        "again": again(sum(passed), len(passed), claim.needed),
    }
