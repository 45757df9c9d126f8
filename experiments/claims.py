"""Claims: metrics of a run, one number a seed, held against the thresholds in its config."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.config import Claim, Config
from experiments.evaluate import Measured, drops


class Result(NamedTuple):
    """One config's models, trained and untrained; leaves have a leading axis of seeds."""

    config: Config
    places: tuple[str, ...]
    seeds: list[int]
    parameters: int  # of one seed's model
    trained: Measured
    untrained: Measured
    groups: dict[str, np.ndarray]  # role -> [R,A], accuracy with all heads of that role off; empty for a control


# What a clean head's absence costs: at least this at its own place, at most this at every other.
OWN_DROP, OTHER_DROP = 0.5, 0.05
OWN_WEIGHT = 0.9  # on its place, from which on a head is there for it


def clean_heads(found: Measured) -> np.ndarray:
    """``[R]``: how many places have a head that serves them alone."""
    fall = drops(found)  # [R,L,N,A]
    others = np.stack([np.delete(fall, place, -1).max(-1, initial=-1.0) for place in range(fall.shape[-1])], -1)
    clean = (fall >= OWN_DROP) & (others <= OTHER_DROP)
    return clean.any((1, 2)).sum(-1)


def own_place_weight(places: tuple[str, ...], trained: Measured, looked_at: Measured) -> np.ndarray:
    """``[R,A]``: the weight on each place, in ``looked_at``, of the head whose absence costs it most in ``trained``."""
    fall = drops(trained)
    owner = fall.reshape(len(fall), -1, len(places)).argmax(1)  # [R,A]
    scores = np.stack([looked_at.scores[place].reshape(len(fall), -1) for place in places], -1)  # [R,L*N,A]
    return np.take_along_axis(scores, owner[:, None], 1)[:, 0]


def distinct_places(places: tuple[str, ...], found: Measured) -> np.ndarray:
    """``[R]``: how many places have a head with at least ``OWN_WEIGHT`` of its weight on them."""
    best = np.stack([found.scores[place].max((1, 2)) for place in places], -1)
    return (best >= OWN_WEIGHT).sum(-1)


def mean_divergence(found: Measured) -> np.ndarray:
    """``[R]``: mean over pairs of different heads; 0 for a single head."""
    count = found.divergence.shape[-1]
    return found.divergence.sum((1, 2)) / max(count * (count - 1), 1)


Metric = Callable[[Result, Measured], np.ndarray]

# Each takes the result and the one of its models that is asked about.
METRICS: dict[str, Metric] = {
    "worst_place_accuracy": lambda result, found: found.accuracy.min(-1),
    "mean_accuracy": lambda result, found: found.accuracy.mean(-1),
    "hardened_accuracy": lambda result, found: found.hardened.mean(-1),
    "exact_match": lambda result, found: found.exact_match,
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
BEST = "best/"  # best/SCORE is the largest score among the heads
OFF = "off/"  # off/ROLE is the mean accuracy with all heads of that role switched off


def check(config: Config, scores: Sequence[str], roles: Sequence[str]) -> None:
    """Raises ``ValueError`` for a claim whose metric does not exist, before anything is trained."""
    known = [*METRICS, *(BEST + score for score in scores)]
    if config.task.kind != "copy_string" or not config.evaluate.lengths:
        known.remove("exact_match_at_last_length")
    controls = list(config.variants())
    for claim in config.claims:
        control, _, metric = claim.metric.rpartition(":")
        of_run = [] if control else [OFF + role for role in roles]
        if (control and control not in controls) or metric not in [*known, *of_run]:
            expected = f"[CONTROL:]METRIC with CONTROL of {controls} and METRIC of {[*known, *of_run]}"
            raise ValueError(f"claims.{claim.name}.metric: expected {expected}, got {claim.metric!r}")


def measure(result: Result, found: Measured, metric: str) -> list[float]:
    """``metric`` of the model ``found``, one number a seed."""
    if metric.startswith(BEST):
        values = found.scores[metric.removeprefix(BEST)].max((1, 2))
    elif metric.startswith(OFF):  # where no head has the role, nothing is switched off
        off = result.groups.get(metric.removeprefix(OFF), found.accuracy)
        values = (off if found is result.trained else found.accuracy).mean(-1)
    else:
        values = METRICS[metric](result, found)
    return [float(value) for value in values]


def judge(claim: Claim, results: dict[str, Result]) -> dict[str, Any]:
    """One row of ``claims.json``; ``results`` by control, that of the run itself under ``""``."""
    control, _, metric = claim.metric.rpartition(":")
    result = results[control]
    seeds = result.seeds
    values, untrained = (measure(result, found, metric) for found in (result.trained, result.untrained))
    return verdict(claim, values, untrained, seeds)


def verdict(claim: Claim, values: list[float], untrained: list[float], seeds: list[int]) -> dict[str, Any]:
    """One row of ``claims.json`` from the claim's metric, one number a seed, and that of the untrained models."""
    if claim.at_least is not None:
        threshold, passed = claim.at_least, [value >= claim.at_least for value in values]
    else:
        threshold, passed = claim.at_most, [value <= claim.at_most for value in values]
    return {
        "name": claim.name,
        "statement": claim.statement,
        "metric": claim.metric,
        "side": "at least" if claim.at_least is not None else "at most",
        "threshold": threshold,
        "values": values,
        "untrained": untrained,
        "seeds": seeds,
        "passed": [seed for seed, good in zip(seeds, passed, strict=True) if good],
        "failed": [seed for seed, good in zip(seeds, passed, strict=True) if not good],
        "needed": claim.needed,
        "holds": sum(passed) >= claim.needed,
    }
