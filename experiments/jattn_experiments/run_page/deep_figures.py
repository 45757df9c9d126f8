"""Figures of models with too many heads for a panel each: layers by heads, in colours."""

from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from jattn.heads import MIXED, WEAK
from jattn.plots import head_grid
from jattn_experiments.run_page.cells import colour_bar, draw_matrix
from jattn_experiments.run_page.plot_data import OWN_SCALE, WHEN, Matrix, ablation_matrices, head_names, pooled
from jattn_experiments.run_page.style import RAMP, WIDTH, titled
from jattn_experiments.runs.findings import Findings, plain

MANY_HEADS = 100  # heads in a model; with more, these figures replace those with one panel per head
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
    """Layers by heads: a row of matrices, untrained and trained, with one matrix for every statistic."""
    rows: list[list[Matrix]] = [[], []]
    for name, values in findings.statistics.items():
        low, high = (values.min(), values.max()) if name in OWN_SCALE else (0.0, 1.0)
        for when in (0, 1):
            rows[when].append(by_layer(plain(name), values[:, when], low, high))
    return rows


def statistics_figure(findings: Findings) -> Figure:
    """Every statistic of every head, untrained and trained."""
    rows = statistics_matrices(findings)
    layers = findings.ablated.shape[1]
    figure = Figure(figsize=(1.3 * WIDTH, 2 * (0.075 * layers + 0.6) + 0.5))
    axes = figure.subplots(2, len(rows[0]), sharex=True, sharey=True, squeeze=False)
    ticks = range(0, layers, -(-layers // 10))
    for when, matrices in enumerate(rows):
        for ax, matrix in zip(axes[when], matrices, strict=True):
            cells = draw_matrix(ax, matrix, 0.0, findings.seeds)
            ax.set_title(matrix.title.replace(" ", "\n"), fontsize=8)
            ax.set_yticks(ticks, [*map(str, ticks)], fontsize=7)
            ax.tick_params(labeltop=False, labelbottom=bool(when), top=False)
        axes[when, 0].set_ylabel(f"{WHEN[when]}: layer", fontsize=8)
    colour_bar(figure, cells, axes.flat)
    scale = "colours: 0 to 1; distance and max logit: their own range"
    return titled(figure, findings, f"each head in numbers, layers by heads\n{scale}")


def ablation_figure(findings: Findings) -> Figure:
    """The accuracy that each place loses without one head, or without all heads of a role."""
    drops = findings.accuracy[:, None, None] - findings.ablated  # [R,L,N,A]
    top = float(drops.max()) or 1.0
    matrices = [
        by_layer(f"{plain(place)}\n(all heads: {np.median(findings.accuracy[:, at]):.2f})", drops[..., at], 0.0, top)
        for at, place in enumerate(findings.places)
    ]
    height, roles_height = 0.17 * findings.ablated.shape[1], 1.0 + 0.3 * len(findings.places)
    figure = Figure(figsize=(WIDTH, height + (roles_height if findings.groups else 0.0) + 1.2))
    above, below = figure.subfigures(2, 1, height_ratios=[height + 0.9, roles_height])
    _draw_layers(above, findings, matrices, 1.5, "accuracy lost", top)[0].set_ylabel("layer")
    if findings.groups:
        *_, roles = ablation_matrices(findings)
        draw_matrix(below.subplots(), roles, (WIDTH - 2.5) / len(roles.columns), findings.seeds)
    return titled(figure, findings, "what each head is needed for")


def _draw_layers(
    figure: Figure | SubFigure, findings: Findings, matrices: list[Matrix], margin: float, label: str, top: float
) -> list[Axes]:
    """Matrices of layers by heads side by side, with a colour bar from 0 to ``top``, all within ``WIDTH - margin``."""
    axes = list(figure.subplots(1, len(matrices), squeeze=False)[0])
    for ax, matrix in zip(axes, matrices, strict=True):
        cells = draw_matrix(ax, matrix, (WIDTH - margin) / len(matrices) / len(matrix.columns), findings.seeds)
        ax.set_xlabel("head")
    colour_bar(figure, cells, axes, label, top)
    return axes


def offsets_figure(findings: Findings) -> Figure:
    """Mean weight at each offset: a row for each head, untrained and trained."""
    seen = np.flatnonzero(findings.offset_profile.max((0, 1, 2, 3)) > 0)
    profiles = findings.offset_profile[0][..., seen[0] : seen[-1] + 1]  # [2,L,N,O]
    offsets, (layers, heads) = findings.offsets[seen[0] : seen[-1] + 1], profiles.shape[1:3]
    figure = Figure(figsize=(WIDTH, 0.016 * layers * heads + 1.2))
    scale = {"cmap": RAMP, "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "none"}
    edges = (offsets[0] - 0.5, offsets[-1] + 0.5, layers - 0.5, -0.5)
    for when, ax in enumerate(figure.subplots(1, 2, sharey=True)):
        image = ax.imshow(profiles[when].reshape(-1, len(offsets)), extent=edges, **scale)
        ax.set_title(WHEN[when])
        ax.grid(visible=False)
        ax.set_xlabel("key position - query position")
    figure.axes[0].set_ylabel("layer, with its heads from top to bottom")
    colour_bar(figure, image, figure.axes, "mean weight")
    return titled(figure, findings, f"distances at which each head looks (seed {findings.seeds[0]})")


def strongest(findings: Findings, most: int = SHOWN) -> list[int]:
    """The first seed's heads with the largest scores of each role, counted over layers: at most ``most``, role by role.

    Weak and mixed heads are used only if no head has a role.
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
    titles = names + [""] * missing
    title = f"{findings.title}: the {len(chosen)} clearest heads across roles, example 1"
    with matplotlib.rc_context({"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        return head_grid(grid, tokens, vmax=float(grid.max()), titles=titles, title=title, panel_size=1.5)


def paths_figure(findings: Findings) -> Figure:
    """How much the score of the induction heads falls if they read a head's output from another sequence."""
    top = max(float(values.max()) for values in findings.paths.values()) or 1.0
    matrices = [by_layer(f"into their {into}", values[None], 0.0, top) for into, values in findings.paths.items()]
    figure = Figure(figsize=(WIDTH, 0.19 * len(matrices[0].rows) + 1.4))
    for ax in _draw_layers(figure, findings, matrices, 2.0, "score lost", top):
        ax.set_ylabel("layer")
    return titled(figure, findings, "the paths that the induction heads need")


FIGURES: dict[str, Callable[[Findings], Figure]] = {
    "heads": heads_figure,
    "offsets": offsets_figure,
    "statistics": statistics_figure,
    "ablation": ablation_figure,
}
