"""Results on a language model and its toy model: metrics and what they are compared with, rows, and verdicts."""

from typing import Any, NamedTuple

import numpy as np

from jattn_experiments.config import Claim, Config
from jattn_experiments.measure import claims, induction_paths
from jattn_experiments.measure.head_groups import Heads
from jattn_experiments.measure.sequences import PLACES

PATTERNS = ("previous_token", "current_token", "first_token", "duplicate_token", "induction")
GROUPS = ("induction", "previous_token")  # one of the heads with the largest score of each
TOY = "toy:"

_OF_GROUPS = [f"{what}/{group}/{place}" for what in ("rise", "p") for group in GROUPS for place in PLACES]
_OF_PATHS = [f"kept/{into}" for into in induction_paths.INTO]
METRICS = (
    *(f"loss/{place}" for place in PLACES), *(claims.BEST + name for name in PATTERNS), "chosen/induction",
    "chosen/previous_token", *_OF_GROUPS, *_OF_PATHS, "p/key", "strongest_path", "mean_accuracy",
)  # fmt: skip
OF_TOY = ("mean_accuracy", *(claims.BEST + name for name in PATTERNS), *_OF_PATHS, "strongest_path")


class Measure(NamedTuple):
    """A metric: its values (one per seed), the values that they are compared with, and a name for those."""

    values: list[float]
    reference: list[float] = []
    what: str = "untrained"


def share_as_large(value: float, others: np.ndarray) -> float:
    """The p-value of ``value`` among random groups: the share that is at least as large, ``value`` itself included.

    NaN if any of the numbers is NaN.
    """
    if np.isnan([value, *others]).any():  # NaN compares false with everything
        return np.nan
    return float((1 + (others >= value).sum()) / (1 + len(others)))


def metrics_of(
    measured: dict[str, Any], looked: dict[str, Any], twin: dict[str, Any], ranked: dict[str, Heads]
) -> dict[str, Measure]:
    """``METRICS``, from what was ``measured`` with groups off and the scores of each head of the model and its twin."""
    metrics = {f"loss/{place}": Measure([float(measured["loss"][at])]) for at, place in enumerate(PLACES)}
    metrics["mean_accuracy"] = Measure([float(measured["accuracy"].mean())])
    for name in PATTERNS:
        metrics[claims.BEST + name] = Measure([float(looked[name].max())], [float(twin[name].max())])
    for name, group in ranked.items():
        at = tuple(np.transpose(group))
        every = [float(looked[name].mean())]
        metrics[f"chosen/{name}"] = Measure([float(looked[name][at].mean())], every, "all heads")
        rises = measured["rises"][name]
        for i, place in enumerate(PLACES):
            itself, others = float(rises[0, i]), rises[1:, i]
            metrics[f"rise/{name}/{place}"] = Measure([itself], others.tolist(), "matched groups")
            metrics[f"p/{name}/{place}"] = Measure([share_as_large(itself, others)])
    routes = measured["paths"]
    for into in induction_paths.INTO:
        kept = routes[f"{into} groups"] / routes["clean"]
        metrics[f"kept/{into}"] = Measure([float(kept[0])], kept[1:].tolist(), "matched groups")
        if into == "key":
            metrics["p/key"] = Measure([share_as_large(-float(kept[0]), -kept[1:])])
    metrics["strongest_path"] = Measure([score_of_strongest(routes["key"], looked["previous_token"])])
    return metrics


def score_of_strongest(scores: np.ndarray, previous_token: np.ndarray) -> float:
    """The weight on the previous token of the head whose path into the keys matters most (``scores [L,N]``)."""
    if np.isnan(scores).any():
        return np.nan
    return float(previous_token.ravel()[scores.argmin()])


def controls(config: Config, metrics: dict[str, Measure]) -> list[dict[str, Any]]:
    """For each metric of a claim: a row for the model, one for what it is compared with, one for the toy model."""
    rows = []
    for metric in dict.fromkeys(claim.metric.removeprefix(TOY) for claim in config.claims):
        measure, toy = metrics[metric], metrics.get(TOY + metric)
        if not (measure.reference or toy):
            continue
        each = [(config.name, measure.values), (measure.what, measure.reference), ("toy", toy.values if toy else [])]
        rows += [claims.row(name, metric, values) for name, values in each if values]
    return rows


def verdict(claim: Claim, config: Config, metrics: dict[str, Measure]) -> dict[str, Any]:
    """The claim with its verdict."""
    measure = metrics[claim.metric]
    first = config.train.first_seed if claim.metric.startswith(TOY) else config.language.seed
    seeds = list(range(first, first + len(measure.values)))
    return claims.verdict(claim, measure.values, measure.reference, seeds, measure.what)
