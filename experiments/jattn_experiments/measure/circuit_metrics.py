"""Results on circuits: metrics and what they are compared with, curves and maps."""

from typing import Any

import numpy as np

from jattn.circuits import Graph
from jattn_experiments.config import Config
from jattn_experiments.measure.language_metrics import Measure

TASKS = ("copying", "names", "capitals")


def names(config: Config) -> list[str]:
    """The metrics that claims can name."""
    options = config.circuits
    of_tasks = [f"{what}/{task}" for task in TASKS for what in ("gap", "right")]
    of_sizes = [
        f"{what}/{task}/{size}"
        for what in ("kept", "nodes", "over", "left")
        for task in TASKS
        for size in options.sizes
    ]
    of_lengths = [f"{what}/{length}" for length in options.lengths[1:] for what in ("same", "carries")]
    carried = [f"carried/{judged}/{chosen}" for judged in options.lengths for chosen in options.lengths]
    return [*of_tasks, *of_sizes, "key/previous_token", "key/induction", *of_lengths, *carried]


def metrics_of(config: Config, measured: dict[str, Any], looked: dict[str, Any]) -> dict[str, Measure]:
    """The values of all ``names``, computed from the measurements."""
    options, metrics = config.circuits, {}
    for task, one in measured["tasks"].items():
        kept, nodes = one["kept"], one["nodes"]
        metrics[f"gap/{task}"] = Measure([float((kept["clean"] - kept["corrupt"]).mean())])
        right = np.concatenate([kept["clean"] > 0, kept["corrupt"] < 0])
        metrics[f"right/{task}"] = Measure([float(right.mean())], [0.5], "chance")
        for i, size in enumerate(sorted(options.sizes)):
            random = [float(kept["random"][i])]
            metrics[f"kept/{task}/{size}"] = Measure([float(kept["kept"][i])], random, "random edges")
            metrics[f"nodes/{task}/{size}"] = Measure([float(nodes["kept"][i])], random, "random edges")
            over = float(kept["kept"][i] - nodes["kept"][i])
            metrics[f"over/{task}/{size}"] = Measure([over])
            metrics[f"left/{task}/{size}"] = Measure([float(kept["left"][i])])
    previous, induction = _strongest_key(measured["tasks"]["copying"]["scores"]["scores"], looked)
    metrics["key/previous_token"] = Measure([previous], [float(looked["previous_token"].mean())], "all heads")
    metrics["key/induction"] = Measure([induction], [float(looked["induction"].mean())], "all heads")
    common = _in_common(config, measured)
    for at, length in enumerate(options.lengths[1:], 1):
        metrics[f"same/{length}"] = Measure([float(common[at, 0] / common[at, at]) if common[at, at] else np.nan])
        kept = measured["carried"][length]["kept"]
        metrics[f"carries/{length}"] = Measure([float(kept[0] / kept[at])])
    for judged, one in measured["carried"].items():
        for chosen, kept in zip(options.lengths, one["kept"], strict=True):
            metrics[f"carried/{judged}/{chosen}"] = Measure([float(kept)])
    return metrics


def _strongest_key(scores: np.ndarray, looked: dict[str, Any]) -> tuple[float, float]:
    """The scores at the strongest edge from a head into a key: previous-token of the writer, induction of the reader.

    If several heads share the key, the reader is the one with the largest induction score.
    """
    layers, heads = looked["induction"].shape
    per_layer = (len(scores) - 1) // layers
    kv_heads = (per_layer - 1 - heads) // 2
    graph = Graph(layers, heads, kv_heads)
    keys = [at for at, name in enumerate(graph.readers) if name.startswith("key")]
    writers = [at for at, name in enumerate(graph.writers) if name.startswith("head")]
    strength = np.abs(scores[np.ix_(keys, writers)])
    key, writer = np.unravel_index(strength.argmax(), strength.shape)
    readers = [divmod(at - 1, heads + 1) for at in graph.heads_of(keys[int(key)]).tolist()]
    return float(looked["previous_token"].ravel()[writer]), max(float(looked["induction"][at]) for at in readers)


def _in_common(config: Config, measured: dict[str, Any]) -> np.ndarray:
    """``[J,C]``: the share of the largest edges on judged pairs of length J that are also largest on chosen pairs."""
    count, each = config.circuits.compared, [measured["lengths"][length] for length in config.circuits.lengths]
    largest = [
        [set(np.argsort(-np.abs(half["scores"]), axis=None, kind="stable")[:count].tolist()) for half in halves]
        for halves in each
    ]
    return np.array([[len(judged & chosen) / count for chosen, _ in largest] for _, judged in largest])


def curves(config: Config, measured: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """The share kept over the number of edges, for each task."""
    sizes = sorted(config.circuits.sizes)

    def line(values: np.ndarray) -> list[list[float]]:
        return [[float(size), float(value)] for size, value in zip(sizes, values, strict=True)]

    return {
        f"share kept over edges, {task}": {
            "circuit": line(one["kept"]["kept"]),
            "heads and MLPs": line(one["nodes"]["kept"]),
            "random": line(one["kept"]["random"]),
            "all but the circuit": line(one["kept"]["left"]),
        }
        for task, one in measured["tasks"].items()
    }


def grids(config: Config, measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What circuits chosen at one length keep at another, and how many edges they share."""
    lengths = config.circuits.lengths
    named = {"rows": [f"judged at {n}" for n in lengths], "columns": [f"chosen at {n}" for n in lengths]}
    kept = [np.clip(measured["carried"][n]["kept"], 0, 1).tolist() for n in lengths]
    return {
        "share kept of copying": {**named, "values": kept},
        "edges in common, of other texts": {**named, "values": _in_common(config, measured).tolist()},
    }
