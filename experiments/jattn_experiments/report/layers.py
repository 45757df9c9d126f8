"""Figures of models with too many heads for a panel each: layers by heads, in colours."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jattn.heads import MIXED, WEAK
from jattn.plots import head_grid
from jattn_experiments.report.cells import draw_matrix
from jattn_experiments.report.plot_data import OWN_SCALE, WHEN, Matrix, ablation_matrices, head_names, pooled
from jattn_experiments.report.style import RAMP, WIDTH
from jattn_experiments.runs.findings import Findings, plain

MANY_HEADS = 100  # in a model; above it, these figures replace those with a panel for each
SHOWN = 24  # heads whose weights are drawn, as many of each role


def is_deep(findings: Findings) -> bool:
    """Whether there are too many heads for a panel each."""
    return int(np.prod(findings.ablated.shape[1:3])) > MANY_HEADS


def by_layer(title: str, seeds: np.ndarray, low: float = 0.0, high: float = 1.0) -> Matrix:
    """``seeds [R,L,N]`` as layers by heads, coloured from ``low`` to ``high``."""
    layers, heads = seeds.shape[1:]
    shades = (np.median(seeds, 0) - low) / (high - low if high != low else 1.0)
    return Matrix(title, [*map(str, range(layers))], [*map(str, range(heads))], seeds, shades.clip(0, 1))


def statistics_matrices(findings: Findings) -> list[list[Matrix]]:
    """Layers by heads: a row of matrices, untrained and trained, and in each one for every statistic."""
    rows: list[list[Matrix]] = [[], []]
    for name, values in findings.statistics.items():
        low, high = (values.min(), values.max()) if name in OWN_SCALE else (0.0, 1.0)
        for when in (0, 1):
            rows[when].append(by_layer(plain(name), values[:, when], low, high))
    return rows


def statistics_figure(findings: Findings) -> Figure:
    """Every statistic of every head, untrained and trained."""
    rows = statistics_matrices(findings)
    layers, heads = findings.ablated.shape[1:3]
    figure = Figure(figsize=(1.3 * WIDTH, 2 * (0.075 * layers + 0.6) + 0.5))
    axes = figure.subplots(2, len(rows[0]), sharex=True, sharey=True, squeeze=False)
    for when, matrices in enumerate(rows):
        for at, (ax, matrix) in enumerate(zip(axes[when], matrices, strict=True)):
            image = draw_matrix(ax, matrix, 0.0, findings.seeds)
            ax.set_title(matrix.title.replace(" ", "\n"), fontsize=8)
            step = -(-layers // 10)
            ax.set_yticks(range(0, layers, step), [str(layer) for layer in range(0, layers, step)], fontsize=7)
            ax.tick_params(labeltop=False, labelbottom=bool(when), top=False)
            if not at:
                ax.set_ylabel(f"{WHEN[when]}: layer", fontsize=8)
    figure.colorbar(image, ax=list(axes.flat), aspect=40, pad=0.01)
    scale = "colours: 0 to 1; distance and max logit: their own range"
    figure.suptitle(f"{plain(findings.name)}: each head in numbers, layers by heads\n{scale}", fontsize=10)
    return figure


def ablation_figure(findings: Findings) -> Figure:
    """The accuracy that each place loses without one head, or without all heads of a role."""
    drops = findings.accuracy[:, None, None] - findings.ablated  # [R,L,N,A]
    top = float(drops.max()) or 1.0
    matrices = [
        by_layer(f"{plain(place)}\n(all heads: {np.median(findings.accuracy[:, at]):.2f})", drops[..., at], 0.0, top)
        for at, place in enumerate(findings.places)
    ]
    layers = findings.ablated.shape[1]
    figure = Figure(
        figsize=(WIDTH, 0.17 * layers + (1.0 + 0.3 * len(findings.places) if findings.groups else 0.0) + 1.2)
    )
    whole, below = figure.subfigures(2, 1, height_ratios=[0.17 * layers + 0.9, 1.0 + 0.3 * len(findings.places)])
    axes = whole.subplots(1, len(matrices), squeeze=False)[0]
    for ax, matrix in zip(axes, matrices, strict=True):
        image = draw_matrix(ax, matrix, (WIDTH - 1.5) / len(matrices) / len(matrix.columns), findings.seeds)
        ax.set_xlabel("head")
    axes[0].set_ylabel("layer")
    whole.colorbar(
        image, ax=list(axes), label="accuracy lost", aspect=40, pad=0.01, format=lambda x, _: f"{x * top:.2f}"
    )
    if findings.groups:
        *_, roles = ablation_matrices(findings)
        draw_matrix(below.subplots(), roles, (WIDTH - 2.5) / len(roles.columns), findings.seeds)
    figure.suptitle(f"{plain(findings.name)}: what each head is needed for", fontsize=10)
    return figure


def _colourbar(figure: Any, image: Any, axes: list[Axes], label: str, top: float) -> None:
    """A bar from 0 to ``top``, for cells coloured by shares of it."""
    figure.colorbar(image, ax=axes, label=label, aspect=40, pad=0.01, format=lambda share, _: f"{share * top:.2f}")


def offsets_figure(findings: Findings) -> Figure:
    """Mean weight at each offset: a row for each head, untrained and trained."""
    shown = np.flatnonzero(findings.offset_profile.max((0, 1, 2, 3)) > 0)
    profiles = findings.offset_profile[0][..., shown[0] : shown[-1] + 1]  # [2,L,N,O]
    offsets, (layers, heads) = findings.offsets[shown[0] : shown[-1] + 1], profiles.shape[1:3]
    figure = Figure(figsize=(WIDTH, 0.016 * layers * heads + 1.2))
    for when, ax in enumerate(figure.subplots(1, 2, sharey=True)):
        edges = (offsets[0] - 0.5, offsets[-1] + 0.5, layers - 0.5, -0.5)
        image = ax.imshow(
            profiles[when].reshape(-1, len(offsets)),
            cmap=RAMP,
            vmin=0,
            vmax=1,
            extent=edges,
            aspect="auto",
            interpolation="none",
        )
        ax.set_title(WHEN[when])
        ax.grid(visible=False)
        ax.set_xlabel("key position - query position")
    figure.axes[0].set_ylabel("layer, its heads below each other")
    figure.colorbar(image, ax=figure.axes, label="mean weight", aspect=40, pad=0.01)
    title = f"{plain(findings.name)}: distances at which each head looks (seed {findings.seeds[0]})"
    figure.suptitle(title, fontsize=10)
    return figure


def strongest(findings: Findings, most: int = SHOWN) -> list[int]:
    """The first seed's heads with the largest scores of each role, counted over layers: at most ``most``, role by role.

    Weak and mixed heads only if no head has a role.
    """
    heads = findings.ablated.shape[2]
    rows = [row for row in findings.heads if row["seed"] == findings.seeds[0]]
    clear = [row for row in rows if row["role"] != MIXED and not row["role"].startswith(WEAK)] or rows
    by_role: dict[str, list[int]] = {}
    for row in sorted(clear, key=lambda row: -row["score"]):
        by_role.setdefault(row["role"], []).append(row["layer"] * heads + row["head"])
    each = max(most // max(len(by_role), 1), 1)
    return [at for role in sorted(by_role) for at in by_role[role][:each]][:most]


def heads_figure(findings: Findings) -> Figure:
    """The heads with the largest scores of each role, on the first example."""
    chosen, across = strongest(findings), 6
    weights, tokens = pooled(findings.example_weights[-1, 0].reshape(-1, *findings.example_weights.shape[-2:])[chosen])
    if len(tokens) == len(findings.tokens[0]):
        tokens = findings.tokens[0]
    names = [head_names(findings)[at].replace(" ", "\n", 1) for at in chosen]
    missing = -len(chosen) % across
    grid = np.concatenate([weights, np.zeros((missing, *weights.shape[1:]))]).reshape(-1, across, *weights.shape[1:])
    with matplotlib.rc_context({"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        return head_grid(
            grid,
            tokens,
            vmax=float(grid.max()),
            titles=names + [""] * missing,
            title=f"{plain(findings.name)}: the {len(chosen)} clearest heads of all roles, example 1",
            panel_size=1.5,
        )


def paths_figure(findings: Findings) -> Figure:
    """By how much the score of the induction heads falls if they read a head's output from another sequence."""
    top = max(float(values.max()) for values in findings.paths.values()) or 1.0
    matrices = [by_layer(f"into their {into}", values[None], 0.0, top) for into, values in findings.paths.items()]
    layers, heads = next(iter(findings.paths.values())).shape
    figure = Figure(figsize=(WIDTH, 0.19 * layers + 1.4))
    axes = figure.subplots(1, len(matrices), squeeze=False)[0]
    for ax, matrix in zip(axes, matrices, strict=True):
        image = draw_matrix(ax, matrix, (WIDTH - 2.0) / len(matrices) / heads, findings.seeds)
        ax.set(xlabel="head", ylabel="layer")
    _colourbar(figure, image, list(axes), "score lost", top)
    figure.suptitle(f"{plain(findings.name)}: the paths that the induction heads need", fontsize=10)
    return figure


FIGURES: dict[str, Any] = {
    "heads": heads_figure,
    "offsets": offsets_figure,
    "statistics": statistics_figure,
    "ablation": ablation_figure,
}
