"""A run's quantities over training steps and over its sweep, a panel for each pair of axes.

Axes as in ``jattn_experiments.runs.findings``.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jattn_experiments.onset import half_fall, half_way
from jattn_experiments.runs.findings import Findings, plain

NOT_PATTERNS = ("entropy", "max_weight")  # of scores in training
RISE, RISE_LOOKS = 0.2, 5  # least rise of a score that counts; least number of looks


@dataclasses.dataclass(frozen=True)
class Line:
    """One quantity over ``x``: ``[R, len(x)]``, a row per seed. ``colour`` indexes the palette; -1 is ink."""

    label: str
    x: np.ndarray
    seeds: np.ndarray
    colour: int


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines that share a pair of axes."""

    title: str
    lines: list[Line]
    unit: bool  # all values in [0, 1]
    log: bool = False
    x_label: str = "training step"


def time_panels(findings: Findings) -> list[Panel]:
    """Losses, accuracies, scores of places and other scores: the panels with a shared axis of steps.

    Empty if nothing was trained.
    """
    if not findings.metrics:
        return []
    losses, above, units, others = ({} for _ in range(4))
    for name, values in findings.metrics.items():
        if name.startswith("above/"):
            above[name.removeprefix("above/")] = values
        else:
            (losses if "loss" in name else units if in_unit(values) else others)[name] = values
    # A place's pattern is in a different head for every seed, so a seed is shown by its best head. Entropy is not
    # such a pattern: it is averaged over heads.
    scores = {
        name: values.mean((2, 3)) if "entropy" in name else values.max((2, 3))
        for name, values in findings.scores.items()
    }
    placed = {name: values for name, values in scores.items() if plain(name) in map(plain, findings.places)}
    rest = {name: values for name, values in scores.items() if name not in placed}
    panels = [
        _panel(findings, "loss", findings.metric_steps, losses, log=True),
        _panel(findings, "loss above that of", findings.metric_steps, above),
        _panel(findings, " / ".join(map(plain, units)) if len(units) < 3 else "accuracy", findings.metric_steps, units),
        *(_panel(findings, plain(name), findings.metric_steps, {name: values}) for name, values in others.items()),
        _panel(findings, "best head's weight\non its place", findings.look_steps, placed),
        _panel(findings, "other head scores" if placed else "best head's scores", findings.look_steps, rest),
    ]
    return [panel for panel in panels if panel.lines]


def turns(findings: Findings) -> list[tuple[str, np.ndarray]]:
    """What rises in training, and the step ``[R]`` at which each seed has half of the rise behind it, earliest first.

    The loss and the in-context learning score fall instead. Included are the scores of each layer's best head that rise
    by ``RISE`` in half of the seeds.
    """
    if not findings.metrics or len(findings.look_steps) < RISE_LOOKS:
        return []
    changes = [("loss falls", half_way(findings.metric_steps, -findings.metrics["loss"]))]
    if "in_context" in findings.metrics:
        changes.append(("in-context score falls", half_fall(findings.metric_steps, findings.metrics["in_context"])))
    for name, values in findings.scores.items():
        if name in NOT_PATTERNS:
            continue
        for layer in range(values.shape[2]):
            best = values[:, :, layer].max(-1)
            if np.median(best.max(1) - best[:, 0]) >= RISE:
                where = f", layer {layer}" if values.shape[2] > 1 else ""
                changes.append((plain(name) + where, half_way(findings.look_steps, best)))
    return sorted(changes, key=lambda row: float(np.nan_to_num(np.median(row[1]), nan=np.inf)))


def curve_panels(findings: Findings) -> list[Panel]:
    """One panel for each title in ``findings.curves``."""
    panels = []
    for title, curves in findings.curves.items():
        lines = []
        for colour, (label, rows) in enumerate(curves.items()):
            table = np.array(rows, float)
            lines.append(Line(plain(label), table[:, 0], table[:, 1:].T, colour))
        x_label = title.partition(" over ")[2]  # "exact match over string length"
        panels.append(Panel(title, lines, all(in_unit(line.seeds) for line in lines), x_label=x_label))
    return panels


def _panel(
    findings: Findings, title: str, steps: np.ndarray, named: Mapping[str, np.ndarray], log: bool = False
) -> Panel:
    places = [plain(place) for place in findings.places]
    lines, free = [], len(places) if any(plain(name) in places for name in findings.scores) else 0
    for name, values in named.items():
        known = [i for i, place in enumerate(places) if place == plain(name).rpartition("/")[2].strip()]
        colour = known[0] if known else -1 if len(named) == 1 else free
        free += not known
        lines.append(Line(plain(name) + (" (mean of heads)" if "entropy" in name else ""), steps, values, colour))
    log = log and all((line.seeds > 0).all() for line in lines)
    return Panel(title, lines, all(in_unit(line.seeds) for line in lines) and not log, log)


def in_unit(values: np.ndarray) -> bool:
    """Whether all values are in [0, 1]."""
    return bool(np.all((values >= -1e-6) & (values <= 1 + 1e-6)))
