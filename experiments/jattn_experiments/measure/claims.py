"""Claims: metrics of a run, one number per seed, compared with the thresholds in its config."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn_experiments import tasks
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


# What switching off a clean head costs: at least this at its own place, at most this elsewhere.
OWN_DROP, OTHER_DROP = 0.5, 0.05
NEAR = 0.01  # nats
OWN_WEIGHT = 0.9  # on a place, for a head to count as there for it


def clean_heads(found: Measured) -> np.ndarray:
    """``[R]``: how many places have a head that serves only them."""
    fall = drops(found)  # [R,L,N,A]
    others = np.stack([np.delete(fall, place, -1).max(-1, initial=-1.0) for place in range(fall.shape[-1])], -1)
    clean = (fall >= OWN_DROP) & (others <= OTHER_DROP)
    return clean.any((1, 2)).sum(-1)


def own_place_weight(places: tuple[str, ...], trained: Measured, looked_at: Measured) -> np.ndarray:
    """``[R,A]``: each place's weight, in ``looked_at``, from the head that it needs most in ``trained``."""
    fall = drops(trained)
    owner = fall.reshape(len(fall), -1, len(places)).argmax(1)  # [R,A]
    scores = np.stack([looked_at.scores[place].reshape(len(fall), -1) for place in places], -1)  # [R,L*N,A]
    return np.take_along_axis(scores, owner[:, None], 1)[:, 0]


def distinct_places(places: tuple[str, ...], found: Measured) -> np.ndarray:
    """``[R]``: how many places get at least ``OWN_WEIGHT`` of some head's weight."""
    best = np.stack([found.scores[place].max((1, 2)) for place in places], -1)
    return (best >= OWN_WEIGHT).sum(-1)


def mean_divergence(found: Measured) -> np.ndarray:
    """``[R]``: mean over pairs of distinct heads; 0 for a single head."""
    count = found.divergence.shape[-1]
    return found.divergence.sum((1, 2)) / max(count * (count - 1), 1)


Metric = Callable[[Result, Measured], np.ndarray]

# Each takes the result and one of its models, the one to measure.
METRICS: dict[str, Metric] = {
    "worst_place_accuracy": lambda result, found: found.accuracy.min(-1),
    "mean_accuracy": lambda result, found: found.accuracy.mean(-1),
    "hardened_accuracy": lambda result, found: found.hardened.mean(-1),
    "exact_match": lambda result, found: found.exact_match,
    "loss": lambda result, found: found.loss,
    "in_context": lambda result, found: found.in_context,
    "exact_match_at_last_length": lambda result, found: found.curve[:, -1],
    "clean_heads": lambda result, found: clean_heads(found),
    "own_place_weight": lambda result, found: own_place_weight(result.places, result.trained, found).min(-1),
    "own_place_weight_untrained": lambda result, found: own_place_weight(
        result.places, result.trained, result.untrained
    ).max(-1),
    "distinct_places": lambda result, found: distinct_places(result.places, found),
    "divergence": lambda result, found: mean_divergence(found),
    "noise_floor": lambda result, found: found.noise.mean(-1),
}
OF_PLACES = ("own_place_weight", "own_place_weight_untrained", "distinct_places")  # for places of one position each
OF_CURVE = "exact_match_at_last_length"
IN_CONTEXT = "in_context"  # loss of late queries less that of early ones, on held-out sequences
BUMP = "bump"  # by how much more the held-out loss falls in the second half of training than in the quarter before
AT = "accuracy/"  # accuracy/PLACE: accuracy at one place
BEST = "best/"  # best/SCORE: largest score of any head
OFF = "off/"  # off/ROLE: mean accuracy with all heads of that role off
ABOVE = "above/"  # above/LEVEL: loss less that of a reference predictor of the task
RESTS = "rests/"  # rests/LEVEL: steps of training at which the loss is within NEAR of that predictor's
PASSES = "passes/"  # passes/LEVEL: the first step at which the loss is nearer to LEVEL than to the one before
PATCHED = "patched/"  # patched/PATCH: share of the answers that one of the task's patches changes as it predicts
TURN = "turn/"  # turn/SCORE: the step at which the best head's score has risen half its way during training
# A SCORE may be one of a layer: SCORE@LAYER. turn/in_context: half of its fall.
OF_TRAINING = (RESTS, PASSES, TURN, BUMP)  # which an untrained model does not have


def check(config: Config, known: Callable[[Config], Sequence[str]]) -> None:
    """Raises ``ValueError``, before training, for a claim that no model of ``config`` can be measured on.

    ``known`` returns the metrics of a config. Only the run itself is measured with all heads of a role off.
    """
    configs = {"": config, **variants(config)}
    for claim in config.claims:
        key, given = f"claims.{claim.name}", {"metric": claim.metric, "minus": claim.minus}
        seeds = {}
        for name, asked in given.items():
            if asked is None:
                continue
            control, _, metric = asked.rpartition(":")
            if control not in configs:
                controls = list(configs)[1:]
                raise ValueError(f"{key}.{name}: expected [CONTROL:]METRIC, CONTROL of {controls}, got {asked!r}")
            metrics = [one for one in known(configs[control]) if not (control and one.startswith(OFF))]
            if metric not in metrics:
                raise ValueError(f"{key}.{name}: expected [CONTROL:]METRIC, METRIC of {metrics}, got {asked!r}")
            seeds[name] = configs[control].train.first_seed, configs[control].train.seeds
        if len(set(seeds.values())) > 1:
            raise ValueError(f"{key}.minus: expected the seeds of {claim.metric!r}, got those of {claim.minus!r}")
        if claim.needed > seeds["metric"][1]:
            control = claim.metric.rpartition(":")[0]
            raise ValueError(
                f"{key}.needed: expected at most the {seeds['metric'][1]} seeds of {control}, got {claim.needed}"
            )


def known_metrics(
    config: Config,
    places: Sequence[str],
    located: Sequence[str],
    scores: Mapping[str, Sequence[str]],
    roles: Sequence[str],
    levels: Sequence[str],
) -> list[str]:
    """The metrics of a config, for its task's places (and those located), scores by what is made of them, and so on."""
    layers = ["", *(f"@{layer}" for layer in range(config.model.num_layers))]
    named = [
        *(AT + place for place in places),
        *(kind + score + layer for kind, of in scores.items() for score in of for layer in layers),
        *(OFF + role for role in roles),
        *(kind + level for kind in (ABOVE, RESTS) for level in levels),
        *(PASSES + level for level in levels[1:]),
        *(PATCHED + patch for patch in tasks.make(config.task).patches),
    ]
    curve = config.task.kind == "copy_string" and config.evaluate.lengths
    missing = {name for name in METRICS if name in OF_PLACES and not located} | (set() if curve else {OF_CURVE})
    if tasks.make(config.task).contexts is None:
        missing.add(IN_CONTEXT)
    else:
        named += [BUMP, TURN + IN_CONTEXT]
    return [name for name in (*METRICS, *named) if name not in missing]


def measure(result: Result, found: Measured, metric: str) -> list[float]:
    """``metric`` of the model ``found``, one number per seed."""
    if metric.startswith(AT):
        values = found.accuracy[:, result.places.index(metric.removeprefix(AT))]
    elif metric.startswith(BEST):
        values = _best(found.scores, metric.removeprefix(BEST))
    elif metric == BUMP:
        values = bump(result)
    elif metric.startswith(TURN):
        values = turn(result, metric.removeprefix(TURN))
    elif metric.startswith(PASSES):
        values = _passes(result, metric.removeprefix(PASSES))
    elif metric.startswith(RESTS):
        near = np.abs(result.metrics[ABOVE + metric.removeprefix(RESTS)]) <= NEAR
        values = near.mean(-1) * result.metric_steps[-1]
    elif metric.startswith(ABOVE):
        values = found.loss - found.levels[metric.removeprefix(ABOVE)]
    elif metric.startswith(PATCHED):
        values = found.patched[metric.removeprefix(PATCHED)]
    elif metric.startswith(OFF):  # if no head has the role, nothing is off
        off = result.groups.get(metric.removeprefix(OFF), found.accuracy)
        values = (off if found is result.trained else found.accuracy).mean(-1)
    else:
        values = METRICS[metric](result, found)
    return [float(value) for value in values]


def _best(scores: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """``[R,...]``: the largest score of any head, or of any in one layer; ``scores [R,...,L,N]``."""
    score, _, layer = name.partition("@")
    values = scores[score]
    return (values[..., int(layer), :] if layer else values).reshape(*values.shape[:-2], -1).max(-1)


def _passes(result: Result, level: str) -> np.ndarray:
    """``[R]``: the first step at which the loss is nearer to ``level`` than to the one before; the last if none is."""
    levels = tasks.make(result.config.task).levels
    nearer = -result.metrics[ABOVE + levels[levels.index(level) - 1]] > result.metrics[ABOVE + level]
    first = np.where(nearer.any(-1), nearer.argmax(-1), -1)
    return result.metric_steps[first]


def turn(result: Result, name: str) -> np.ndarray:
    """``[R]``: the step at which the best head's score has risen half its way during training.

    The in-context learning score falls, and its way begins where it was largest.
    """
    if name == IN_CONTEXT:
        return half_fall(result.metric_steps, result.metrics[IN_CONTEXT])
    return half_way(result.look_steps, _best(result.tracked, name))


def bump(result: Result) -> np.ndarray:
    """``[R]``: by how much more the held-out loss falls in the second half of training than in the quarter before.

    These are the last two doublings of the steps: over their logarithm, 0 is a straight line, less flattens, and more
    falls faster again.
    """
    end = result.metric_steps[-1]
    quarter, half = (int(np.argmin(np.abs(result.metric_steps - end / part))) for part in (4, 2))
    loss = result.metrics["held_out_loss"]
    return 2 * loss[:, half] - loss[:, -1] - loss[:, quarter]


def judge(claim: Claim, results: dict[str, Result]) -> dict[str, Any]:
    """One row of ``claims.json``; ``results`` maps controls, and ``""`` for the run itself."""
    result, values, untrained = _measured(claim.metric, results)
    if claim.minus is not None:
        _, less, untrained_less = _measured(claim.minus, results)
        both = untrained and untrained_less
        values = [one - other for one, other in zip(values, less, strict=True)]
        untrained = [one - other for one, other in zip(untrained, untrained_less, strict=True)] if both else []
    return verdict(claim, values, untrained, result.seeds)


def _measured(asked: str, results: dict[str, Result]) -> tuple[Result, list[float], list[float]]:
    """The result that ``asked``, [CONTROL:]METRIC, is of, and that metric trained and, if there is one, untrained."""
    control, _, metric = asked.rpartition(":")
    result = results[control]
    untrained = [] if metric.startswith(OF_TRAINING) else measure(result, result.untrained, metric)
    return result, measure(result, result.trained, metric), untrained


def verdict(
    claim: Claim, values: list[float], reference: list[float], seeds: list[int], what: str = "untrained"
) -> dict[str, Any]:
    """One row of ``claims.json`` from the claim's metric, a number per seed, and numbers to compare them with."""
    if claim.at_least is not None:
        threshold, passed = claim.at_least, [value >= claim.at_least for value in values]
    else:
        threshold, passed = claim.at_most, [value <= claim.at_most for value in values]
    return {
        "name": claim.name,
        "statement": claim.statement,
        "metric": claim.metric if claim.minus is None else f"{claim.metric} - {claim.minus}",
        "side": "at least" if claim.at_least is not None else "at most",
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
