"""The heads and controls of a run, arranged for drawing by the figures and the page.

Axes as in ``jattn_experiments.runs.findings``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from jattn.heads import MIXED, WEAK
from jattn_experiments.runs.findings import Findings, plain

WHEN = ("untrained", "trained")
OWN_SCALE = ("distance", "max_logit")  # statistics not in [0, 1]
BLOCKS = 128  # most queries and keys drawn
PALETTE_SIZE = 8  # colours of the page and of the figures
TOGETHER = 16  # columns of one matrix before it is split by layer


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Numbers per seed in named rows and columns, ``[R,rows,columns]``, and the colour of each cell."""

    title: str
    rows: list[str]
    columns: list[str]
    seeds: np.ndarray
    shades: np.ndarray  # [rows,columns], of the medians, in [0, 1]

    @property
    def median(self) -> np.ndarray:
        """``[rows,columns]``."""
        return np.median(self.seeds, 0)

    def tooltips(self, seeds: Sequence[int]) -> list[str]:
        """Each cell in words, row by row: its median and, with several ``seeds``, the number of each."""
        texts, median, names = [], self.median, ", ".join(map(str, seeds))
        for row, column in np.ndindex(*median.shape):
            text = f"{self.rows[row]}, {self.columns[column]}: {median[row, column]:z.3f}"
            each = ", ".join(f"{value:z.3f}" for value in self.seeds[:, row, column])
            texts.append(f"{text} · seeds {names}: {each}" if len(seeds) > 1 else text)
        return texts


@dataclasses.dataclass(frozen=True)
class HeadMap:
    """Heads in the plane, ``points [L*N,2]``. ``sides`` say where each name fits, if anywhere."""

    title: str
    points: np.ndarray
    sides: list[tuple[int, int] | None]


def pooled(weights: np.ndarray, most: int = BLOCKS) -> tuple[np.ndarray, list[str]]:
    """Weights ``[...,T,T]`` in at most ``most x most`` blocks, with the blocks' names: "0-7", or "0" for one token.

    Rows of a block are averaged and columns summed, so every row of blocks still sums to 1.
    """
    size = weights.shape[-1]
    starts = np.arange(0, size, -(-size // most))
    ends = [*starts[1:], size]
    names = [f"{start}-{end - 1}" if end - start > 1 else str(start) for start, end in zip(starts, ends, strict=True)]
    if len(starts) == size:
        return weights, names
    summed = np.add.reduceat(np.add.reduceat(weights, starts, -1), starts, -2)
    return summed / (ends - starts)[:, None], names


def matched_heads(findings: Findings) -> np.ndarray:
    """``[R,L,N]``: the head of each seed that corresponds to the first seed's head ``n``.

    Every seed learns the same patterns in different heads. Heads of a layer are matched by assignment, on their final
    scores and their ablations.
    """
    features = [values[:, -1, ..., None] for values in findings.scores.values()]
    features = np.concatenate([*features, findings.ablated], axis=-1)  # [R,L,N,features]
    order = np.empty(features.shape[:3], int)
    for seed, layers in enumerate(features):
        for layer, heads in enumerate(layers):
            distance = np.abs(features[0, layer][:, None] - heads[None]).sum(-1)
            order[seed, layer] = linear_sum_assignment(np.nan_to_num(distance, nan=1e9))[1]
    return order


def head_places(findings: Findings) -> list[tuple[int, int]]:
    """The layer of every head, and its number there."""
    return list(np.ndindex(*findings.ablated.shape[1:3]))


def head_roles(findings: Findings) -> list[str]:
    """The roles of the first seed's heads, by layer; "" for none."""
    first = findings.seeds[0]
    roles = {(row["layer"], row["head"]): plain(row["role"]) for row in findings.heads if row["seed"] == first}
    return [roles.get(place, "") for place in head_places(findings)]


def head_codes(findings: Findings) -> list[str]:
    """ "L0H1": the short name of every head, by layer."""
    return [f"L{layer}H{head}" for layer, head in head_places(findings)]


def head_names(findings: Findings) -> list[str]:
    """ "L0H1 role" for the first seed's heads, by layer."""
    return [f"{code} {role}".strip() for code, role in zip(head_codes(findings), head_roles(findings), strict=True)]


def matched_profiles(findings: Findings) -> np.ndarray:
    """``offset_profile`` as ``[R,2,L*N,O]``, heads of every seed in the order of the first seed's."""
    order = matched_heads(findings)[:, None, :, :, None]
    profiles = np.take_along_axis(findings.offset_profile, order, 3)
    return profiles.reshape(*profiles.shape[:2], -1, profiles.shape[-1])


def drawn_profiles(findings: Findings, most: int) -> tuple[np.ndarray, np.ndarray, int]:
    """At most ``most`` offsets, the maximum over neighbours in ``matched_profiles``, and the number of neighbours."""
    offsets, values = findings.offsets, matched_profiles(findings)
    step = -(-len(offsets) // most)
    starts = np.arange(0, len(offsets), step)
    return offsets[starts], np.maximum.reduceat(values, starts, -1), step


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


def first_look(findings: Findings) -> str:
    """The name of the first look: an untrained model, or the one from which training started (``train.start``)."""
    return "start" if findings.config.get("train", {}).get("start") else WHEN[0]


def divergence_matrices(findings: Findings) -> list[Matrix]:
    """Heads by heads, untrained and trained."""
    matrices, codes = matched_divergence(findings), head_codes(findings)
    titles = [f"{name}: {divergence_text(findings, when)}" for when, name in enumerate(WHEN)]
    medians = np.median(matrices, 0)
    return [Matrix(titles[when], codes, codes, matrices[:, when], medians[when]) for when in (0, 1)]


def divergence_text(findings: Findings, when: int) -> str:
    """The mean over pairs of heads, by seed, and the noise floor, by seed and head: medians and ranges."""
    pairs = np.triu_indices(findings.divergence.shape[-1], 1)
    means = findings.divergence[:, when][:, pairs[0], pairs[1]].mean(-1) if len(pairs[0]) else np.zeros(1)
    return " · ".join(
        f"{name} {np.median(values):.3f} ({values.min():.3f} to {values.max():.3f})"
        for name, values in (("mean of pairs", means), ("noise floor", findings.noise[:, when]))
    )


def statistics_matrices(findings: Findings) -> list[Matrix]:
    """Heads by statistics, untrained and trained; empty without statistics.

    Statistics in ``OWN_SCALE`` are coloured from the smallest to the largest number in their columns of both.
    """
    if not findings.statistics:
        return []
    order = matched_heads(findings)[:, None]
    columns, shades = [], []
    for name, values in findings.statistics.items():
        column = np.take_along_axis(values, order, 3).reshape(*values.shape[:2], -1)  # [R,2,L*N]
        median = np.median(column, 0)
        low, high = (median.min(), median.max()) if name in OWN_SCALE else (0.0, 1.0)
        columns.append(column)
        shades.append((median - low) / (high - low if high != low else 1.0))
    seeds, shade, names = np.stack(columns, -1), np.stack(shades, -1), [plain(name) for name in findings.statistics]
    return [Matrix(WHEN[when], head_names(findings), names, seeds[:, when], shade[when]) for when in (0, 1)]


def ablation_matrices(findings: Findings) -> list[Matrix]:
    """The accuracy lost, places by what is switched off: each head, and each role's heads.

    It is one matrix, or with more than ``TOGETHER`` columns one per layer and one for the roles.
    """
    layers, heads = findings.ablated.shape[1:3]
    off = np.concatenate([matched_ablation(findings), *(v[:, None] for v in findings.groups.values())], 1)
    drops = (findings.accuracy[:, None] - off).swapaxes(1, 2)  # [R,A,columns]
    columns = head_names(findings) + [f"all {plain(role)}" for role in findings.groups]
    cuts = [0, len(columns)]
    if len(columns) > TOGETHER:
        cuts = sorted({*range(0, layers * heads + 1, heads), len(columns)})
    titles = [f"layer {layer}" for layer in range(layers)] + ["all heads of a role"] if len(cuts) > 2 else [""]
    places, shades = [plain(place) for place in findings.places], np.median(drops, 0).clip(0, 1)
    return [
        Matrix(title, places, columns[low:high], drops[..., low:high], shades[:, low:high])
        for title, low, high in zip(titles, cuts, cuts[1:], strict=False)
    ]


def plane(divergence: np.ndarray) -> tuple[np.ndarray, float]:
    """Points ``[H,2]`` that approximate the distances of ``H`` heads, and the share of the distances that they keep.

    The square root of the Jensen-Shannon divergence ``[H,H]`` is a metric (Endres and Schindelin 2003), so the
    divergence is the squared distance. Classical scaling: the eigenvectors of the doubly centred squared distances
    (Torgerson 1952). The share is of the sum of all squared distances.
    """
    count = len(divergence)
    centring = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centring @ np.nan_to_num(divergence) @ centring)
    values, vectors = values[::-1].clip(0), vectors[:, ::-1]
    points = np.zeros((count, 2))
    points[:, : min(count, 2)] = (vectors * np.sqrt(values))[:, :2]
    furthest = points[np.abs(points).argmax(0), (0, 1)]
    points *= np.where(furthest < 0, -1, 1)  # the sign of an eigenvector is arbitrary
    return points, float(values[:2].sum() / values.sum()) if values.sum() > 0 else 1.0


def head_maps(findings: Findings) -> tuple[list[HeadMap], float]:
    """The first seed's heads in the plane, untrained and trained, and the extent of the shared axes."""
    placed = [plane(matrix) for matrix in findings.divergence[0]]
    reach = 1.12 * max(float(np.abs(points).max()) for points, _ in placed) or 1.0
    maps = []
    for when, (points, share) in enumerate(placed):
        floor = float(np.sqrt(np.median(findings.noise[0, when])))
        title = f"{WHEN[when]}: {share:.0%} of the squared distances kept · noise floor {floor:.3f}"
        maps.append(HeadMap(title, points, _free_sides(points / reach)))
    return maps, reach


def _free_sides(points: np.ndarray) -> list[tuple[int, int] | None]:
    """Where each name overlaps nothing in a picture of 360 pixels: right, left, above or below."""
    dot, word = (10, 10), (36, 12)
    taken = [(point * 180, dot) for point in points]
    sides: list[tuple[int, int] | None] = []
    for at, _ in taken[: len(points)]:
        sides.append(None)
        for side in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            middle = at + np.multiply(side, (24, 12))
            others = (entry for entry in taken if entry[0] is not at)
            inside = (abs(middle) + np.divide(word, 2) < 180).all()
            if inside and all((abs(middle - other) >= np.add(word, size) / 2).any() for other, size in others):
                sides[-1] = side
                taken.append((middle, word))
                break
    return sides


def role_colours(findings: Findings) -> dict[str, int]:
    """A colour for each role of the first seed's heads: the place's own, or ink for mixed and weak heads."""
    places = [plain(place) for place in findings.places]
    roles = sorted({plain(row["role"]) for row in findings.heads if row["seed"] == findings.seeds[0]})
    colours = {role: places.index(role) if role in places else -1 for role in roles}
    others = (role for role in roles if role not in places and role != MIXED and not role.startswith(WEAK))
    after = range(len(places), len(places) + PALETTE_SIZE)
    free = (at % PALETTE_SIZE for at in after if at % PALETTE_SIZE not in colours.values())
    return colours | dict(zip(others, free, strict=False))


def by_metric(controls: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of controls, by metric."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in controls:
        rows.setdefault(plain(row["metric"]), []).append(row)
    return rows
