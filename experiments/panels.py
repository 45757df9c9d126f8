"""What the pictures of a run show: the findings arranged for drawing, shared by the PNGs and the report.

Axes as in ``experiments.findings``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from experiments.findings import Findings


@dataclasses.dataclass(frozen=True)
class Line:
    """One quantity over ``x``: ``[R, len(x)]``, a row per seed. ``colour`` counts through the palette, -1 is ink."""

    label: str
    x: np.ndarray
    seeds: np.ndarray
    colour: int


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines that share one pair of axes."""

    title: str
    lines: list[Line]
    unit: bool  # all values in [0, 1]
    log: bool = False
    x_label: str = "training step"


def matched_heads(findings: Findings) -> np.ndarray:
    """``[R,L,N]``: the head of each seed that plays the part of the first seed's head ``n``.

    Training puts the same pattern into another head with every seed. Heads of a layer are matched by assignment, on
    their final scores and on what switching them off costs.
    """
    features = [values[:, -1, ..., None] for values in findings.scores.values()]
    features = np.concatenate([*features, findings.ablated], axis=-1)  # [R,L,N,features]
    order = np.empty(features.shape[:3], int)
    for seed, layers in enumerate(features):
        for layer, heads in enumerate(layers):
            distance = np.abs(features[0, layer][:, None] - heads[None]).sum(-1)
            order[seed, layer] = linear_sum_assignment(np.nan_to_num(distance, nan=1e9))[1]
    return order


def head_titles(findings: Findings) -> list[str]:
    """ "layer l head n · role" of the first seed's heads, layer by layer."""
    layers, heads = findings.example_weights.shape[1:3]
    first = findings.seeds[0]
    roles = {(row["layer"], row["head"]): plain(row["role"]) for row in findings.heads if row["seed"] == first}
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    return [f"layer {at[0]} head {at[1]}" + (f" · {roles[at]}" if roles.get(at) else "") for at in places]


def head_codes(findings: Findings) -> list[str]:
    """ "L0H1": the short name of every head, layer by layer."""
    layers, heads = findings.example_weights.shape[1:3]
    return [f"L{layer}H{head}" for layer in range(layers) for head in range(heads)]


def plain(name: object) -> str:
    """A name as a person writes it."""
    return str(name).replace("_", " ")


def matched_profiles(findings: Findings) -> np.ndarray:
    """``offset_profile`` as ``[R,2,L*N,O]``, heads of every seed in the order of the first seed's."""
    order = matched_heads(findings)[:, None, :, :, None]
    profiles = np.take_along_axis(findings.offset_profile, order, 3)
    return profiles.reshape(*profiles.shape[:2], -1, profiles.shape[-1])


def matched_ablation(findings: Findings) -> np.ndarray:
    """``ablated`` as ``[R,L*N,A]``, heads of every seed in the order of the first seed's."""
    ablated = np.take_along_axis(findings.ablated, matched_heads(findings)[..., None], 2)
    return ablated.reshape(len(ablated), -1, ablated.shape[-1])


def matched_divergence(findings: Findings) -> np.ndarray:
    """``divergence`` as ``[R,2,L*N,L*N]``, heads of every seed in the order of the first seed's."""
    order = matched_heads(findings)
    layers, heads = order.shape[1:]
    order = (order + heads * np.arange(layers)[:, None]).reshape(len(order), -1)
    return np.stack([both[:, at][:, :, at] for both, at in zip(findings.divergence, order, strict=True)])


def divergence_text(findings: Findings, when: int) -> str:
    """The mean over pairs of heads: its median and range over seeds."""
    pairs = np.triu_indices(findings.divergence.shape[-1], 1)
    means = findings.divergence[:, when][:, pairs[0], pairs[1]].mean(-1) if len(pairs[0]) else np.zeros(1)
    return f"mean of pairs {np.median(means):.2f} ({means.min():.2f} to {means.max():.2f})"


def control_rows(findings: Findings) -> dict[str, list[Mapping[str, Any]]]:
    """The controls by their metric."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in findings.controls:
        rows.setdefault(plain(row["metric"]), []).append(row)
    return rows


def time_panels(findings: Findings) -> list[Panel]:
    """Losses, accuracies, the places' scores and the other scores: the panels that share the axis of steps.

    None where nothing was trained.
    """
    if not findings.metrics:
        return []
    losses = {name: values for name, values in findings.metrics.items() if "loss" in name}
    units = {name: values for name, values in findings.metrics.items() if name not in losses and in_unit(values)}
    others = {name: values for name, values in findings.metrics.items() if name not in losses and name not in units}
    # The pattern of a place sits in another head with every seed, so a seed is shown by the best of its heads.
    # Entropy is no such pattern: there the heads are averaged.
    scores = {
        name: values.mean((2, 3)) if "entropy" in name else values.max((2, 3))
        for name, values in findings.scores.items()
    }
    placed = {name: values for name, values in scores.items() if plain(name) in map(plain, findings.places)}
    rest = {name: values for name, values in scores.items() if name not in placed}
    panels = [
        _panel(findings, "loss", findings.metric_steps, losses, log=True),
        _panel(findings, " / ".join(map(plain, units)) if len(units) < 3 else "accuracy", findings.metric_steps, units),
        *(_panel(findings, plain(name), findings.metric_steps, {name: values}) for name, values in others.items()),
        _panel(findings, "best head's weight\non its place", findings.look_steps, placed),
        _panel(findings, "other head scores" if placed else "best head's scores", findings.look_steps, rest),
    ]
    return [panel for panel in panels if panel.lines]


def curve_panels(findings: Findings) -> list[Panel]:
    """One panel per title of ``findings.curves``."""
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
    """Whether every value lies between 0 and 1."""
    return bool(np.all((values >= -1e-6) & (values <= 1 + 1e-6)))
