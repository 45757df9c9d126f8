"""What is told of a language model on long texts: metrics, what they are compared with, curves, maps and verdicts."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from jattn_experiments.config import Config
from jattn_experiments.measure import claims
from jattn_experiments.measure.language_metrics import Measure, share_as_large
from jattn_experiments.measure.long_texts import JUDGED, depths_of

PATTERNS = ("retrieval", "induction", "previous_token", "first_token")
COPIES = 0.5  # retrieval score from which a head counts as one that copies
SINK = 0.5  # mean weight on the first token from which a head counts as one that rests there
TOP = 10  # heads with the largest induction scores
RESAMPLED = 200  # times that heads are drawn again, for an interval
STABLE = ("lengths", "depths", "texts", "needles")
STREAMS = ("all tokens", "window", "window and 4 first tokens", "all but the first token")  # what queries see
LOSSES = ("repeated bigrams", "other tokens", "loss")

_FIXED = (
    "heads", "share_of_heads", "score/chosen", *(f"stable/{over}" for over in STABLE), "same/induction", "off/found",
    "off/matched", "p/off", *(f"off/{place}" for place in LOSSES), "off/facts", "hidden/found", "hidden/matched",
    "hidden/elsewhere", "p/hidden", "sinks", "sinks/stable", "stream/window", "stream/sinks", "stream/without first",
    "twin/retrieval",
)  # fmt: skip


def names(config: Config) -> list[str]:
    """The metrics that claims can name: some have a length, or a distance, of the config."""
    options = config.long
    each = [f"{what}/{length}" for what in ("found", "score", "heads") for length in options.lengths]
    sinks = [f"{what}/{length}" for what in ("first", "entropy", "share") for length in sink_lengths(options.lengths)]
    return [*_FIXED, *each, *sinks, *(f"induction/{distance}" for distance in options.distances)]


def sink_lengths(lengths: Sequence[int]) -> list[int]:
    """Tokens at which sinks are measured: 128, 512, 2048, ... and the longest."""
    return [*(n for n in (128 * 4**i for i in range(10)) if n < max(lengths)), max(lengths)]


def check(config: Config) -> None:
    """Raises ``ValueError`` for a claim about something that is not measured."""
    known = names(config)
    for claim in config.claims:
        if claim.metric not in known:
            raise ValueError(f"claims.{claim.name}.metric: expected one of {known}, got {claim.metric!r}")
        if claim.metric.startswith("p/") and 1 / (1 + config.language.matched) > 0.05:
            raise ValueError(
                f"claims.{claim.name}.metric: a p-value needs language.matched of at least 19, got "
                f"{config.language.matched}"
            )
        if claim.needed != 1:
            raise ValueError(f"claims.{claim.name}.needed: expected 1, for one model, got {claim.needed}")


def metrics_of(config: Config, found: dict[str, Any]) -> dict[str, Measure]:
    """All of ``names``, from what was measured."""
    options, group = config.long, tuple(np.transpose(found["group"]))
    scores, rng = found["scores"], np.random.default_rng(config.language.seed)
    needles = {length: _joined(parts) for length, parts in found["needles"].items()}
    metrics = {
        "heads": Measure([float((scores >= COPIES).sum())]),
        "share_of_heads": Measure([float((scores >= COPIES).mean())]),
        "score/chosen": Measure([float(scores[group].mean())], [float(scores.mean())], "all heads"),
    }
    for length, each in needles.items():
        score, found_there = each["score"].mean(0), each["found"]
        metrics[f"found/{length}"] = Measure([float(found_there.mean())])
        metrics[f"score/{length}"] = Measure([float(score[group].mean())], [float(score.mean())], "all heads")
        metrics[f"heads/{length}"] = Measure([float((score >= COPIES).sum())])
    for over, values in _stability(options.lengths, found, rng).items():
        metrics[f"stable/{over}"] = Measure([values[0]], list(values[1:]), "95% interval")
    induction = found["patterns"]["induction"]
    metrics["same/induction"] = Measure([len(_top(induction, TOP) & set(found["group"])) / len(found["group"])])

    off = [float(_joined(found["off"][f"off {at}"])["found"].mean()) for at in range(len(found["groups"]))]
    whole = float(np.mean([part["found"].mean() for part in found["needles"][options.ablated][:2]]))
    metrics["off/found"] = Measure([off[0]], off[1:], "matched groups")
    metrics["off/matched"] = Measure([float(np.mean(off[1:]))], [whole], "all heads")
    metrics["p/off"] = Measure([share_as_large(-off[0], -np.array(off[1:]))])
    beside = found["beside"]
    rises = np.stack([beside[f"off {at}"]["loss"] - beside["whole"]["loss"] for at in range(len(off))])
    known = beside["whole"]["facts"]
    facts = [float(beside[f"off {at}"]["facts"][known].mean()) if known.any() else 0.0 for at in range(len(off))]
    for at, place in enumerate(LOSSES):
        metrics[f"off/{place}"] = Measure([float(rises[0, at])], rises[1:, at].tolist(), "matched groups")
    metrics["off/facts"] = Measure([facts[0]], facts[1:], "matched groups")
    hidden = np.concatenate([part["group"] for part in found["hidden"]], 1).mean(1)
    elsewhere = float(np.concatenate([part["elsewhere"] for part in found["hidden"]]).mean())
    metrics["hidden/found"] = Measure([float(hidden[0])], hidden[1:].tolist(), "matched groups")
    metrics["hidden/matched"] = Measure([float(hidden[1:].mean())])
    metrics["hidden/elsewhere"] = Measure([elsewhere])
    metrics["p/hidden"] = Measure([share_as_large(-float(hidden[0]), -hidden[1:])])

    sinks = {name: np.mean([part[name] for part in found["sinks"]], 0) for name in ("first", "entropy")}
    for at, length in enumerate(sink_lengths(options.lengths)):
        first, entropy = sinks["first"][at], sinks["entropy"][at]
        metrics[f"first/{length}"] = Measure([float(first.mean())])
        metrics[f"entropy/{length}"] = Measure([float(entropy.mean())])
        metrics[f"share/{length}"] = Measure([float(entropy.mean() / np.log(length))])
    metrics["sinks"] = Measure([float((sinks["first"][-1] >= SINK).mean())])
    metrics["sinks/stable"] = Measure([_correlation(sinks["first"][0], sinks["first"][-1])])
    beyond = np.mean([part["loss"] for part in found["streams"]], 0)[:, options.window :].mean(1)
    for at, name in enumerate(("window", "sinks", "without first"), 1):
        metrics[f"stream/{name}"] = Measure([float(beyond[at] - beyond[0])])
    strongest = tuple(np.transpose(sorted(_top(induction, TOP))))
    distances = np.mean([part["score"] for part in found["distances"]], 0)
    for at, distance in enumerate(options.distances):
        every = [float(distances[at].mean())]
        metrics[f"induction/{distance}"] = Measure([float(distances[at][strongest].mean())], every, "all heads")
    metrics["twin/retrieval"] = Measure([float(max(twin["scores"].max() for twin in found["twins"]))])
    return metrics


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The needles of several texts, one after another."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _top(scores: np.ndarray, count: int) -> set[tuple[int, int]]:
    order = np.argsort(-scores, axis=None, kind="stable")[:count]
    return {(int(at) // scores.shape[1], int(at) % scores.shape[1]) for at in order}


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Of the ranks of all heads; 0 where one side does not vary."""
    if not (np.ptp(one) and np.ptp(other)):
        return 0.0
    return float(spearmanr(one.ravel(), other.ravel()).statistic)


def _stability(lengths: Sequence[int], found: dict[str, Any], rng: Any) -> dict[str, tuple[float, float, float]]:
    """The mean rank correlation between pairs of lengths, depths, texts, and halves of the needles, and its interval.

    Of heads' mean retrieval scores on needles that were found; a length at which none was is left out. The interval is
    that of heads drawn again, at random.
    """
    scores = np.stack([np.stack([part["score"] for part in found["needles"][length]]) for length in lengths])
    hits = np.stack([np.stack([part["found"] for part in found["needles"][length]]) for length in lengths])
    A, B, D = hits.shape  # lengths, texts, depths
    at = {"lengths": np.indices(hits.shape)[0], "texts": np.indices(hits.shape)[1], "depths": np.indices(hits.shape)[2]}
    at["needles"] = (np.indices(hits.shape)[1] * D + np.indices(hits.shape)[2]) % 2
    flat, hit = scores.reshape(A * B * D, -1), hits.ravel()

    def mean_correlation(means: list[np.ndarray]) -> float:
        pairs = list(itertools.combinations(means, 2))
        return float(np.mean([_correlation(*pair) for pair in pairs])) if pairs else 0.0

    result = {}
    for over in STABLE:
        labels = at[over].ravel()
        groups = [np.flatnonzero(hit & (labels == one)) for one in np.unique(labels)]
        means = [flat[group].mean(0) for group in groups if len(group)]
        drawn = rng.integers(flat.shape[1], size=(RESAMPLED, flat.shape[1]))
        again = [mean_correlation([mean[own] for mean in means]) for own in drawn]
        low, high = (float(x) for x in np.quantile(again, [0.025, 0.975]))
        result[over] = mean_correlation(means), low, high
    return result


def curves(config: Config, found: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """What the report draws: ``"Y over X" -> line -> [[x, y], ...]``."""
    options, group, scores = config.long, tuple(np.transpose(found["group"])), found["scores"]
    kinds = _kinds(options.texts)
    lengths = sorted(options.lengths)
    others = np.ones(scores.shape, bool)
    others[group] = False
    by_length = {length: _joined(found["needles"][length])["score"].mean(0) for length in lengths}
    joined = {
        kind: [[n, float(np.mean([found["needles"][n][i]["found"] for i in own]))] for n in lengths]
        for kind, own in kinds.items()
    }
    drawn: dict[str, dict[str, list[list[float]]]] = {"needles found over tokens": joined}
    sizes = [size for size in options.sizes if f"largest {size}" in found["off"]]
    if sizes:
        drawn["needles found over heads off"] = {
            label: [[size, float(_joined(found["off"][f"{name} {size}"])["found"].mean())] for size in sizes]
            for label, name in (("largest retrieval scores", "largest"), ("others, matched", "random"))
        }
    drawn["mean retrieval score over tokens"] = {
        "those that copy": [[n, float(by_length[n][group].mean())] for n in lengths],
        "all others": [[n, float(by_length[n][others].mean())] for n in lengths],
    }
    fresh, twin = by_length[options.ablated], found["twins"][0]["scores"]
    drawn["retrieval score over rank"] = {
        label: [[i + 1, float(x)] for i, x in enumerate(np.sort(values, axis=None)[::-1])]
        for label, values in (("texts to choose on", scores), ("other texts", fresh), ("random parameters", twin))
    }
    sinks = {name: np.mean([part[name] for part in found["sinks"]], 0) for name in ("first", "entropy")}
    at_lengths = sink_lengths(options.lengths)
    over_tokens = {
        "weight on the first token": sinks["first"],
        "entropy as a share of log(tokens)": sinks["entropy"] / np.log(at_lengths)[:, None, None],
        "entropy in nats": sinks["entropy"],
    }
    for title, each in over_tokens.items():
        drawn[f"{title} over tokens"] = {
            label: [[n, float(value)] for n, value in zip(at_lengths, values, strict=True)]
            for label, values in _quantiles(each).items()
        }
    loss = np.mean([part["loss"] for part in found["streams"]], 0)
    step = max(options.window // 2, 1)
    ends = range(step, loss.shape[1] + 1, step)
    drawn["loss in nats over position"] = {
        name: [[end, float(values[end - step : end].mean())] for end in ends]
        for name, values in zip(STREAMS, loss, strict=True)
    }
    distances = np.mean([part["score"] for part in found["distances"]], 0)
    strongest = tuple(np.transpose(sorted(_top(found["patterns"]["induction"], TOP))))
    of = {f"the {TOP} strongest": strongest, "those that copy needles": group}
    drawn["induction score over distance"] = {
        name: [[d, float(distances[i][at].mean())] for i, d in enumerate(options.distances)] for name, at in of.items()
    }
    return drawn


def grids(config: Config, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The map of needles found: lengths by depths."""
    lengths, depths = sorted(config.long.lengths), depths_of(config.long.depths)
    values = [np.mean([part["found"] for part in found["needles"][n]], 0).tolist() for n in lengths]
    rows, columns = [f"{n} tokens" for n in lengths], [f"{depth:.0%}" for depth in depths]
    right = [np.mean([part["right"] for part in found["needles"][n]], 0).tolist() for n in lengths]
    return {
        "needles found": {"rows": rows, "columns": columns, "values": values},
        "tokens of their answers": {"rows": rows, "columns": columns, "values": right},
    }


def _quantiles(values: np.ndarray) -> dict[str, np.ndarray]:
    """Of all heads, at each length."""
    flat = values.reshape(len(values), -1)
    return {
        name: np.quantile(flat, q, 1)
        for name, q in (("90% of heads below", 0.9), ("median head", 0.5), ("10% below", 0.1))
    }


def _kinds(texts: int) -> dict[str, list[int]]:
    return {kind: [i for i, one in enumerate(JUDGED[:texts]) if one == kind] for kind in dict.fromkeys(JUDGED[:texts])}


def controls(config: Config, metrics: Mapping[str, Measure]) -> list[dict[str, Any]]:
    """A row for the model, and one for what it is compared with, of each metric of a claim."""
    rows = []
    for metric in dict.fromkeys(claim.metric for claim in config.claims):
        measure = metrics[metric]
        for name, values in ((config.name, measure.values), (measure.what, measure.reference)):
            if measure.reference:
                rows.append({"name": name, "metric": metric, "values": values, "parameters": ""})
    return rows


def verdicts(config: Config, metrics: Mapping[str, Measure]) -> list[dict[str, Any]]:
    """Every claim with its verdict."""
    seeds = [config.language.seed]
    return [
        claims.verdict(claim, measure.values, measure.reference, seeds, measure.what)
        for claim in config.claims
        for measure in (metrics[claim.metric],)
    ]
