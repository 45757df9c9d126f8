"""Results on a language model in long texts: metrics and what they are compared with, curves and maps."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from jattn_experiments.config import Config
from jattn_experiments.measure.head_groups import strongest
from jattn_experiments.measure.language_metrics import Measure, share_as_large
from jattn_experiments.measure.long_texts import JUDGED, depths_of
from jattn_experiments.measure.saved_model import check_claim

PATTERNS = ("retrieval", "induction", "previous_token", "first_token")
COPIES = 0.5  # least retrieval score of a head that counts as copying
LENGTH = 2048  # tokens of a text whose loss is measured with other windows, at most
SINK = 0.5  # least mean weight on the first token of a head that counts as resting there
TOP = 10  # heads with the largest induction scores
RESAMPLED = 200  # times that heads are resampled for an interval
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
    """The metrics that claims can name. Some contain a length or a distance from the config."""
    options = config.long
    each = [f"{what}/{length}" for what in ("found", "score", "heads") for length in options.lengths]
    sinks = [f"{what}/{length}" for what in ("first", "entropy", "share") for length in sink_lengths(options.lengths)]
    every = [*_FIXED, *each, *sinks, *(f"induction/{distance}" for distance in options.distances)]
    return every + _names_of_kinds(config) if options.windows else every


KINDS = ("global", "local")  # layers without a window, and with one


def _names_of_kinds(config: Config) -> list[str]:
    """The metrics that compare layers with a window and layers without."""
    options = config.long
    fixed = [
        "share_of_global",
        *(f"{what}/{kind}" for what in ("score", "alone") for kind in KINDS),
        "score/local beyond",
    ]
    by_kind = [f"induction/{distance}/{kind}" for distance in options.distances for kind in KINDS]
    by_kind += [f"first/{length}/{kind}" for length in sink_lengths(options.lengths) for kind in KINDS]
    return fixed + by_kind + [f"window/{size}/{what}" for size in options.windows for what in ("found", "loss")]


def sink_lengths(lengths: Sequence[int]) -> list[int]:
    """Tokens at which sinks are measured: 128, 512, 2048, ... and the longest."""
    return [*(n for n in (128 * 4**i for i in range(10)) if n < max(lengths)), max(lengths)]


def check(config: Config) -> None:
    """Raises ``ValueError`` for a claim about something that is not measured."""
    known, matched = names(config), config.language.matched
    for claim in config.claims:
        if claim.metric in known and claim.metric.startswith("p/") and 1 / (1 + matched) > 0.05:
            enough = f"language.matched to be at least 19, got {matched}"
            raise ValueError(f"claims.{claim.name}.metric: a p-value needs {enough}")
        check_claim(claim, known)


def metrics_of(config: Config, measured: dict[str, Any]) -> dict[str, Measure]:
    """The values of all ``names``, computed from the measurements."""
    options, group = config.long, tuple(np.transpose(measured["group"]))
    scores, rng = measured["scores"], np.random.default_rng(config.language.seed)
    metrics = {
        "heads": Measure([float((scores >= COPIES).sum())]),
        "share_of_heads": Measure([float((scores >= COPIES).mean())]),
        "score/chosen": Measure([float(scores[group].mean())], [float(scores.mean())], "all heads"),
    }
    for length, parts in measured["needles"].items():
        each = _joined(parts)
        score = each["score"].mean(0)
        metrics[f"found/{length}"] = Measure([float(each["found"].mean())])
        metrics[f"score/{length}"] = Measure([float(score[group].mean())], [float(score.mean())], "all heads")
        metrics[f"heads/{length}"] = Measure([float((score >= COPIES).sum())])
    for over, values in _stability(options.lengths, measured, rng).items():
        metrics[f"stable/{over}"] = Measure([values[0]], list(values[1:]), "95% interval")
    top = set(strongest(measured["patterns"]["induction"], TOP))
    metrics["same/induction"] = Measure([len(top & set(measured["group"])) / len(measured["group"])])
    metrics["twin/retrieval"] = Measure([float(np.max([twin["scores"] for twin in measured["twins"]]))])
    metrics |= _metrics_of_groups(config, measured) | _metrics_of_looks(config, measured)
    return metrics | (_metrics_of_kinds(config, measured) if options.windows else {})


def _metrics_of_kinds(config: Config, measured: dict[str, Any]) -> dict[str, Measure]:
    """What heads do in layers with a window and in layers without, and what other windows change."""
    options, local = config.long, measured["local"]
    of = {"global": ~local, "local": local}
    each = _joined(measured["needles"][options.ablated])
    scores = each["score"]
    # Needles outside the window, apart from the length of the needle and of its question.
    far = np.tile((1 - depths_of(options.depths)) * options.ablated > measured["window"], options.texts)
    copies, alone = (measured["scores"] >= COPIES).sum(1), _mean(measured["alone"], "found").mean(-1)
    metrics = {
        "share_of_global": Measure(
            [float(copies[~local].sum() / max(copies.sum(), 1))], [float((~local).mean())], "all heads"
        ),
        "score/local beyond": Measure([float(scores[far].mean(0)[local].max()) if far.any() else 0.0]),
    }
    sinks = _mean(measured["sinks"], "first")
    induction = _mean(measured["distances"], "score")
    for kind, layers in of.items():
        metrics[f"score/{kind}"] = Measure([float(scores.mean(0)[layers].max())])
        metrics[f"alone/{kind}"] = Measure([float(alone[layers].min())])
        for distance, by_head in zip(options.distances, induction, strict=True):
            metrics[f"induction/{distance}/{kind}"] = Measure([float(by_head[layers].max())])
        for length, by_head in zip(sink_lengths(options.lengths), sinks, strict=True):
            metrics[f"first/{length}/{kind}"] = Measure([float(by_head[layers].mean())])
    trained = [_mean(measured["windows"][measured["window"]], name).mean() for name in ("found", "loss")]
    for size in options.windows:
        found, loss = (_mean(measured["windows"][size], name).mean() for name in ("found", "loss"))
        metrics[f"window/{size}/found"] = Measure([float(found)], [float(trained[0])], "as trained")
        metrics[f"window/{size}/loss"] = Measure([float(loss - trained[1])])
    return metrics


def _metrics_of_groups(config: Config, measured: dict[str, Any]) -> dict[str, Measure]:
    """The model's results without the heads that copy needles, and without matched random groups."""
    beside, groups = measured["beside"], [f"off {at}" for at in range(len(measured["groups"]))]
    off = [float(_joined(measured["off"][name])["found"].mean()) for name in groups]
    whole = float(np.mean([part["found"].mean() for part in measured["needles"][config.long.ablated][:2]]))
    hidden = np.concatenate([part["group"] for part in measured["hidden"]], 1).mean(1).tolist()
    elsewhere = float(np.concatenate([part["elsewhere"] for part in measured["hidden"]]).mean())
    known = beside["whole"]["facts"]
    facts = [float(beside[name]["facts"][known].mean()) if known.any() else 0.0 for name in groups]
    metrics = {
        "off/matched": Measure([float(np.mean(off[1:]))], [whole], "all heads"),
        "p/off": Measure([share_as_large(-off[0], -np.array(off[1:]))]),
        "hidden/matched": Measure([float(np.mean(hidden[1:]))]),
        "hidden/elsewhere": Measure([elsewhere]),
        "p/hidden": Measure([share_as_large(-hidden[0], -np.array(hidden[1:]))]),
    }
    rises = np.stack([beside[name]["loss"] - beside["whole"]["loss"] for name in groups])
    losses = {f"off/{place}": rises[:, at].tolist() for at, place in enumerate(LOSSES)}
    for name, values in {"off/found": off, "off/facts": facts, "hidden/found": hidden, **losses}.items():
        metrics[name] = Measure(values[:1], values[1:], "matched groups")
    return metrics


def _metrics_of_looks(config: Config, measured: dict[str, Any]) -> dict[str, Measure]:
    """Where heads rest, what hidden tokens cost, and from how far away induction heads copy."""
    options, first, entropy = config.long, *(_mean(measured["sinks"], name) for name in ("first", "entropy"))
    metrics = {"sinks": Measure([float((first[-1] >= SINK).mean())])}
    metrics["sinks/stable"] = Measure([_correlation(first[0], first[-1])])
    for at, length in enumerate(sink_lengths(options.lengths)):
        metrics[f"first/{length}"] = Measure([float(first[at].mean())])
        metrics[f"entropy/{length}"] = Measure([float(entropy[at].mean())])
        metrics[f"share/{length}"] = Measure([float(entropy[at].mean() / np.log(length))])
    beyond = _mean(measured["streams"], "loss")[:, options.window :].mean(1)
    for at, name in enumerate(("window", "sinks", "without first"), 1):
        metrics[f"stream/{name}"] = Measure([float(beyond[at] - beyond[0])])
    top = _top_induction(measured)
    for distance, scores in zip(options.distances, _mean(measured["distances"], "score"), strict=True):
        metrics[f"induction/{distance}"] = Measure([float(scores[top].mean())], [float(scores.mean())], "all heads")
    return metrics


def _mean(parts: Sequence[Mapping[str, np.ndarray]], name: str) -> np.ndarray:
    """The mean over several texts."""
    return np.mean([part[name] for part in parts], 0)


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The needles of several texts, one after another."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _top_induction(measured: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """The indices of the heads with the largest induction scores."""
    return tuple(np.transpose(sorted(strongest(measured["patterns"]["induction"], TOP))))


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of the ranks of all heads; 0 if one side does not vary."""
    if not (np.ptp(one) and np.ptp(other)):
        return 0.0
    return float(spearmanr(one.ravel(), other.ravel()).statistic)


def _stability(
    lengths: Sequence[int], measured: dict[str, Any], rng: np.random.Generator
) -> dict[str, tuple[float, float, float]]:
    """The mean rank correlation between pairs of lengths, depths, texts, and halves of the needles, with its interval.

    It compares heads' mean retrieval scores on needles that were found. A length at which none was found is left out.
    The interval comes from resampling the heads.
    """
    scores, hits = (
        np.stack([np.stack([part[name] for part in measured["needles"][length]]) for length in lengths])
        for name in ("score", "found")
    )
    A, B, D = hits.shape  # lengths, texts, depths
    at = dict(zip(("lengths", "texts", "depths"), np.indices(hits.shape), strict=True))
    at["needles"] = (at["texts"] * D + at["depths"]) % 2
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
        again = [mean_correlation([mean[sample] for mean in means]) for sample in drawn]
        low, high = (float(x) for x in np.quantile(again, [0.025, 0.975]))
        result[over] = mean_correlation(means), low, high
    return result


Curves = dict[str, dict[str, list[list[float]]]]  # "Y over X" -> line -> [[x, y], ...]


def curves(config: Config, measured: dict[str, Any]) -> Curves:
    """The curves that the report draws."""
    options, loss = config.long, _mean(measured["streams"], "loss")
    step = max(options.window // 2, 1)
    ends = range(step, loss.shape[1] + 1, step)
    scores, group = _mean(measured["distances"], "score"), tuple(np.transpose(measured["group"]))
    copying = {f"the {TOP} strongest": _top_induction(measured), "those that copy needles": group}
    return {
        **_needle_curves(config, measured),
        **_sink_curves(config, measured),
        **(_kind_curves(config, measured) if options.windows else {}),
        "loss in nats over position": {
            name: _line(ends, [values[end - step : end].mean() for end in ends])
            for name, values in zip(STREAMS, loss, strict=True)
        },
        "induction score over distance": {
            name: _line(options.distances, [each[at].mean() for each in scores]) for name, at in copying.items()
        },
    }


def _line(x: Iterable[int], y: Iterable[float]) -> list[list[float]]:
    return [[one, float(value)] for one, value in zip(x, y, strict=True)]


def _needle_curves(config: Config, measured: dict[str, Any]) -> Curves:
    options, group, scores = config.long, tuple(np.transpose(measured["group"])), measured["scores"]
    lengths, needles, kinds = sorted(options.lengths), measured["needles"], JUDGED[: options.texts]
    others = np.ones(scores.shape, bool)
    others[group] = False
    by_length = {length: _joined(needles[length])["score"].mean(0) for length in lengths}
    fresh, twin = by_length[options.ablated], measured["twins"][0]["scores"]
    sizes = [size for size in options.sizes if f"largest {size}" in measured["off"]]

    def share(kind: str, length: int) -> np.floating:
        return np.mean([part["found"] for part, one in zip(needles[length], kinds, strict=True) if one == kind])

    def without(name: str) -> list[list[float]]:
        return _line(sizes, [_joined(measured["off"][f"{name} {size}"])["found"].mean() for size in sizes])

    by_kind = {kind: _line(lengths, [share(kind, n) for n in lengths]) for kind in dict.fromkeys(kinds)}
    off = {"largest retrieval scores": without("largest"), "others, matched": without("random")}
    copying = {"those that copy": group, "all others": others}
    ranked = {"texts to choose on": scores, "other texts": fresh, "random parameters": twin}
    return {
        "needles found over tokens": by_kind,
        **({"needles found over heads off": off} if sizes else {}),
        "mean retrieval score over tokens": {
            label: _line(lengths, [by_length[n][at].mean() for n in lengths]) for label, at in copying.items()
        },
        "retrieval score over rank": {
            label: _line(range(1, values.size + 1), np.sort(values, axis=None)[::-1])
            for label, values in ranked.items()
        },
    }


def _sink_curves(config: Config, measured: dict[str, Any]) -> Curves:
    first, entropy = (_mean(measured["sinks"], name) for name in ("first", "entropy"))
    lengths = sink_lengths(config.long.lengths)
    over_tokens = {
        "weight on the first token": first,
        "entropy as a share of log(tokens)": entropy / np.log(lengths)[:, None, None],
        "entropy in nats": entropy,
    }
    quantiles = {"90% of heads below": 0.9, "median head": 0.5, "10% below": 0.1}
    return {
        f"{title} over tokens": {label: _line(lengths, np.quantile(each, q, (1, 2))) for label, q in quantiles.items()}
        for title, each in over_tokens.items()
    }


def _kind_curves(config: Config, measured: dict[str, Any]) -> Curves:
    options, local, sizes = config.long, measured["local"], sorted(measured["windows"])
    lengths = sink_lengths(options.lengths)
    induction, first = _mean(measured["distances"], "score"), _mean(measured["sinks"], "first")
    of = {"global": ~local, "local": local}
    loss = {size: _mean(measured["windows"][size], "loss") for size in sizes}
    found = {size: _mean(measured["windows"][size], "found").mean() for size in sizes}
    return {
        "largest induction score over distance": {
            kind: _line(options.distances, [each[layers].max() for each in induction]) for kind, layers in of.items()
        },
        "weight on the first token over tokens, by kind": {
            kind: _line(lengths, [each[layers].mean() for each in first]) for kind, layers in of.items()
        },
        "needles found over the local layers' window": {f"{options.ablated} tokens": _line(sizes, found.values())},
        "loss in nats over the local layers' window": {
            f"text of {min(LENGTH, max(options.lengths))} tokens": _line(sizes, loss.values())
        },
    }


def grids(config: Config, measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The map of needles found: lengths by depths."""
    lengths, depths = sorted(config.long.lengths), depths_of(config.long.depths)
    rows, columns = [f"{n} tokens" for n in lengths], [f"{depth:.0%}" for depth in depths]
    titles = {"needles found": "found", "tokens of their answers": "right"}
    values = {name: [_mean(measured["needles"][n], name).tolist() for n in lengths] for name in titles.values()}
    return {title: {"rows": rows, "columns": columns, "values": values[name]} for title, name in titles.items()}
