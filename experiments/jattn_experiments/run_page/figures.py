"""Figures of one run, as PNG and SVG, drawn from a ``Findings`` in one style. The page embeds the SVGs.

Every seed is shown as a thin line or dot, and their median as a strong line. A mark's ``url`` is its tooltip.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jattn.plots import head_grid
from jattn_experiments.onset import rate
from jattn_experiments.run_page import deep_figures, plot_data
from jattn_experiments.run_page.cells import colour_bar, draw_matrix, names_height
from jattn_experiments.run_page.curves import Panel, curve_panels, in_unit, time_panels, turns
from jattn_experiments.run_page.style import DASHES, DPI, FAINT, INK, PALETTE, STYLE, WIDTH, titled
from jattn_experiments.run_page.svg import with_tooltips
from jattn_experiments.runs.findings import Findings, plain
from jattn_experiments.runs.folder import write_atomically

EACH = "thin: each of {} seeds, strong: median"
MANY = 6  # with more heads per layer, names are short and figures wider
MOST_TICKS = 8  # most values of a curve's option that its axis writes in full
WIDE = 16  # range of a curve's x above which its axis is logarithmic
LINE_BUDGET = 400  # points per line, more than the eye can separate
PROFILE_BUDGET = 50_000  # numbers of all offset profiles; above it, only medians are drawn


def write_figures(findings: Findings, folder: Path) -> list[Path]:
    """Writes every figure that the findings have data for to ``folder``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Callable[[Findings], Figure]] = {
        "heads": heads_figure,
        "training": training_figure,
        "turns": turns_figure,
        "offsets": offsets_figure,
        "statistics": statistics_figure,
        "ablation": ablation_figure,
        "paths": deep_figures.paths_figure,
        "divergence": divergence_figure,
        "map": map_figure,
        "grids": grids_figure,
        "curves": curves_figure,
        "controls": controls_figure,
    }
    optional = {"training": time_panels(findings), "turns": len(turns(findings)) > 1}
    optional |= {name: getattr(findings, name) for name in ("statistics", "paths", "grids", "curves", "controls")}
    if deep_figures.is_deep(findings):
        drawn |= deep_figures.FIGURES
    files = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawn.items():
            if not optional.get(name, True):
                continue
            figure = draw(findings)
            for kind, options in (("png", {"dpi": DPI}), ("svg", {"metadata": {"Date": None}})):
                files.append(folder / f"{name}.{kind}")
                content = io.BytesIO()
                figure.savefig(content, format=kind, **options)
                write_atomically(files[-1], with_tooltips(content.getvalue()) if kind == "svg" else content.getvalue())
    return files


def _ink(colour: int) -> dict[str, Any]:
    if colour < 0:
        return {"color": INK}
    return {"color": PALETTE[colour % len(PALETTE)], "dashes": DASHES[colour % len(DASHES)]}


def _draw_lines(ax: Axes, panel: Panel, seeds: Sequence[int] = ()) -> None:
    for line in panel.lines:
        keep = np.unique(np.linspace(0, len(line.x) - 1, min(len(line.x), LINE_BUDGET)).astype(int))
        ink, x, values = _ink(line.colour), line.x[keep], line.seeds[:, keep]
        several = len(values) > 1
        for i, each in enumerate(values if several else ()):
            tooltip = f"seed {seeds[i]}: {line.label}" if seeds else line.label
            ax.plot(x, each, color=ink["color"], linewidth=0.6, alpha=0.35, url=tooltip)
        # The median lies above every thin line, also those of later quantities.
        tooltip = f"median: {line.label}" if several else line.label
        ax.plot(x, np.median(values, 0), linewidth=1.9, label=line.label, url=tooltip, zorder=2.1, **ink)
    if panel.log:
        ax.set_yscale("log")
    elif panel.unit:
        ax.set_ylim(-0.03, 1.03)


def training_figure(findings: Findings) -> Figure:
    """Loss, accuracy and head scores over steps, on a shared axis."""
    panels = time_panels(findings)
    figure = Figure(figsize=(WIDTH, 1.75 * len(panels) + 0.6))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for at, (ax, panel) in enumerate(zip(axes, panels, strict=True)):
        _draw_lines(ax, panel, findings.seeds)
        # The page marks the explorer's step in this range. It is drawn only to give the page its position.
        ax.axvspan(*findings.look_steps[[0, -1]], alpha=0, gid=f"steps{at}")
        ax.set_ylabel(panel.title)
        ax.margins(x=0.01)
        if len(panel.lines) > 1 or panel.lines[0].label != panel.title:
            ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[-1].set_xlabel("training step")
    figure.align_ylabels(axes)
    return titled(figure, findings, f"training ({_seeds(findings, EACH)})")


def turns_figure(findings: Findings) -> Figure:
    """When each quantity rises: a dot per seed, the median, and in how many seeds it precedes the next one."""
    rows, last = turns(findings), findings.look_steps[-1]
    figure = Figure(figsize=(WIDTH, 0.42 * len(rows) + 1.1))
    ax = figure.subplots()
    for at, (name, steps) in enumerate(rows):
        height = at + np.linspace(-0.18, 0.18, len(steps))
        for seed, step, y in zip(findings.seeds, steps, height, strict=True):
            when, fill = (f"at {step:.0f}", "full") if step < last else ("never", "none")
            tooltip = f"seed {seed}: {name} {when}"
            ax.plot(step, y, "o", fillstyle=fill, color=PALETTE[0], markersize=4, alpha=0.7, url=tooltip)
        ax.plot([np.median(steps)] * 2, [at - 0.3, at + 0.3], color=INK, linewidth=1.6)
        if at + 1 < len(rows):
            first = int((steps < rows[at + 1][1]).sum())
            share = rate(first, len(steps))
            text = f"{first} of {len(steps)} in this order" + (f" ({share[0]:.0%} to {share[1]:.0%})" if share else "")
            place = {"transform": ax.get_yaxis_transform(), "va": "center"}
            ax.text(1.01, at + 0.5, text, fontsize=7, color=FAINT, **place)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    never = " (hollow: never)" if any((steps >= last).any() for _, steps in rows) else ""
    ax.set_xlabel(f"training step at which half of the change is done{never}")
    return titled(figure, findings, "what comes first")


def _seeds(findings: Findings, several: str = "median of {} seeds") -> str:
    count = len(findings.seeds)
    return several.format(count) if count > 1 else f"seed {findings.seeds[0]}"


def _names(findings: Findings) -> list[str]:
    """The title of each head of the first seed: its position and, on the next line, its role."""
    if findings.ablated.shape[2] > MANY:
        parted = (name.partition(" ") for name in plot_data.head_names(findings))
        return [code + "\n" + (role if len(role) <= 15 else role[:14] + "…") for code, _, role in parted]
    places, roles = plot_data.head_places(findings), plot_data.head_roles(findings)
    return [f"layer {layer} head {head}\n{role}".strip() for (layer, head), role in zip(places, roles, strict=True)]


def heads_figure(findings: Findings) -> Figure:
    """Every head of the first seed on the first example, with the first look above the last, in blocks if needed.

    With one head per layer, the looks are side by side.
    """
    (first, last), tokens = plot_data.pooled(findings.example_weights[[0, -1], 0])
    if len(tokens) == len(findings.tokens[0]):
        tokens = findings.tokens[0]
    heads = first.shape[1]
    columns = max(heads, len(plot_data.WHEN))  # one head a layer would be a tall column
    rows = np.stack([first, last], 1).reshape(-1, columns, *first.shape[2:])  # [2L,N,T,T], or [L,2,T,T]
    titles = []
    for layer in range(first.shape[0]):
        names = _names(findings)[layer * heads : (layer + 1) * heads]
        titles += [name.partition("\n")[0] + f"\n{plot_data.first_look(findings)}" for name in names] + names
    panel = (max(WIDTH, 1.5 + 1.05 * columns) - 1.5) / columns - 0.15
    with matplotlib.rc_context({"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        title = f"{findings.title}: example 1, seed {findings.seeds[0]}"
        return head_grid(rows, tokens, vmax=float(rows.max()), titles=titles, title=title, panel_size=panel)


def _head_axes(findings: Findings, height: float) -> tuple[Figure, list[Axes]]:
    layers, heads = findings.ablated.shape[1:3]
    columns = min(heads, 4 if heads <= MANY else MANY)
    rows = layers * -(-heads // columns)
    figure = Figure(figsize=(WIDTH if columns <= 4 else 1.5 * WIDTH, height * rows + 0.7))
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for ax in axes[layers * heads :]:
        ax.set_axis_off()
    return figure, axes


def offsets_figure(findings: Findings) -> Figure:
    """Mean weight at each offset from the query: one panel per head, untrained and trained."""
    offsets, profiles, step = plot_data.drawn_profiles(findings, LINE_BUDGET)
    few = profiles.size <= PROFILE_BUDGET
    figure, axes = _head_axes(findings, 1.75)
    for head, title in enumerate(_names(findings)):
        ax = axes[head]
        for when, colour, name in ((0, FAINT, plot_data.WHEN[0]), (1, PALETTE[0], plot_data.WHEN[1])):
            for seed, each in zip(findings.seeds, profiles[:, when, head], strict=True) if few else ():
                ax.plot(offsets, each, color=colour, linewidth=0.5, alpha=0.35, url=f"seed {seed}: {name}")
            median = np.median(profiles[:, when, head], 0)
            ax.plot(offsets, median, color=colour, linewidth=1.6, label=name)
            peak = int(median.argmax())
            if when and median[peak] >= 0.25:
                x = offsets[peak]
                right = x > np.mean(offsets)  # the text goes to the side with more room
                side = {"xytext": (-5 if right else 5, -5), "ha": "right" if right else "left"}
                ax.annotate(f"{x:+d}: {median[peak]:.2f}", (x, median[peak]), textcoords="offset points", **side)
        ax.set_title(title, parse_math=False)
        ax.set_ylim(-0.03, 1.03)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2)
    neighbours = f" (each point: the largest of {step} neighbours)" if step > 1 else ""
    figure.supxlabel(f"key position - query position{neighbours}", fontsize=9)
    figure.supylabel("mean weight", fontsize=9)
    shown = _seeds(findings, EACH) if few else _seeds(findings)
    return titled(figure, findings, f"distances at which each head looks ({shown})")


def statistics_figure(findings: Findings) -> Figure:
    """Every statistic of every head, untrained and trained."""
    matrices = plot_data.statistics_matrices(findings)
    rows, columns = matrices[0].shades.shape
    figure = Figure(figsize=(1.3 * WIDTH, 0.19 * rows + 1.9))
    for ax, matrix in zip(figure.subplots(1, 2), matrices, strict=True):
        image = draw_matrix(ax, matrix, (1.3 * WIDTH - 3.5) / 2 / columns, findings.seeds)
    colour_bar(figure, image, figure.axes)
    scale = "colours: 0 to 1; distance and max logit: their column's range"
    return titled(figure, findings, f"each head in numbers ({_seeds(findings)})\n{scale}")


def ablation_figure(findings: Findings) -> Figure:
    """The accuracy that each place loses without one head, or without all heads of a role."""
    matrices = plot_data.ablation_matrices(findings)
    rows, widest = len(findings.places), max(len(matrix.columns) for matrix in matrices)
    cell = (WIDTH - 2.5) / widest
    above = sum(names_height(matrix.columns, cell) for matrix in matrices)
    figure = Figure(figsize=(WIDTH, len(matrices) * (0.26 * rows + 0.45) + above + 0.4))
    axes = figure.subplots(len(matrices), 1, squeeze=False)[:, 0]
    for ax, matrix in zip(axes, matrices, strict=True):
        image = draw_matrix(ax, matrix, cell, findings.seeds)
        ax.set_xlim(-0.5, widest - 0.5)  # cells of one size
        ax.spines[:].set_visible(False)
    colour_bar(figure, image, axes, "accuracy lost")
    return titled(figure, findings, f"what each head is needed for ({_seeds(findings)})")


def divergence_figure(findings: Findings) -> Figure:
    """How much the heads' patterns differ before and after training, on one scale."""
    matrices = plot_data.divergence_matrices(findings)
    figure = Figure(figsize=(WIDTH, 4.2))
    axes = figure.subplots(1, 2)
    for ax, matrix in zip(axes, matrices, strict=True):
        image = draw_matrix(ax, matrix, 3.5 / len(matrix.rows), square=True)
        ax.set_title(matrix.title.replace(": ", "\n").replace(" · ", "\n"))
    figure.colorbar(image, ax=list(axes), label="Jensen-Shannon divergence / ln 2", shrink=0.9)
    return titled(figure, findings, f"how much the heads differ ({_seeds(findings)})")


def map_figure(findings: Findings) -> Figure:
    """The first seed's heads in the plane, coloured by role, untrained and trained on one scale."""
    maps, reach = plot_data.head_maps(findings)
    colours, names = plot_data.role_colours(findings), plot_data.head_names(findings)
    figure = Figure(figsize=(WIDTH, 5.3), layout="compressed")
    inks = [_ink(colours.get(role, -1))["color"] for role in plot_data.head_roles(findings)]
    for ax, shown in zip(figure.subplots(1, 2), maps, strict=True):
        tooltips = [f"{name}: {x:.4g}, {y:.4g}" for name, (x, y) in zip(names, shown.points, strict=True)]
        ax.scatter(*shown.points.T, s=36, c=inks, linewidths=0, urls=tooltips)
        for code, point, side in zip(plot_data.head_codes(findings), shown.points, shown.sides, strict=True):
            if side is not None:
                place = {"ha": ("center", "left", "right")[side[0]], "va": ("center", "bottom", "top")[side[1]]}
                offset = np.multiply(side, (5, 4))
                ax.annotate(code, point, xytext=offset, textcoords="offset points", fontsize=8, **place)
        ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        ax.set_title(shown.title.replace(": ", "\n").replace(" · ", "\n"))
    dot = {"marker": "o", "linestyle": ""}
    handles = [Line2D([], [], color=_ink(at)["color"], label=role, **dot) for role, at in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(max(len(handles), 1), 6))
    return titled(figure, findings, f"distances between the heads' patterns (seed {findings.seeds[0]})")


def curves_figure(findings: Findings) -> Figure:
    """The curves of the run, one panel each."""
    panels = curve_panels(findings)
    figure = Figure(figsize=(WIDTH, 2.9 * len(panels)))
    for ax, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_lines(ax, panel)  # curves may include controls, which can have other seeds
        ax.set_title(panel.title, parse_math=False)
        ax.set_xlabel(panel.x_label, parse_math=False)
        x = np.unique(np.concatenate([line.x for line in panel.lines]))
        if x[0] > 0 and x[-1] >= WIDE * x[0]:
            ax.set_xscale("log", base=2)
        if len(x) <= MOST_TICKS:
            ax.set_xticks(x)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return titled(figure, findings, f"curves ({_seeds(findings, EACH)})")


def grids_figure(findings: Findings) -> Figure:
    """Numbers from 0 to 1 in named rows and columns."""
    grids = findings.grids.items()
    height = sum(0.3 * len(grid["rows"]) + 0.9 for _, grid in grids)
    figure = Figure(figsize=(WIDTH, height + 0.4))
    axes = figure.subplots(len(grids), 1, squeeze=False)[:, 0]
    for ax, (title, grid) in zip(axes, grids, strict=True):
        values = np.array(grid["values"], float)
        matrix = plot_data.Matrix(title, list(grid["rows"]), list(grid["columns"]), values[None], values)
        image = draw_matrix(ax, matrix, (WIDTH - 2.5) / len(grid["columns"]), findings.seeds)
    colour_bar(figure, image, axes)
    return titled(figure, findings, ", ".join(findings.grids))


def controls_figure(findings: Findings) -> Figure:
    """Results of the controls: a dot per seed, a bar at the median."""
    metrics = plot_data.by_metric(findings.controls)
    figure = Figure(figsize=(WIDTH, 0.42 * len(findings.controls) + 0.9 * len(metrics)))
    axes = figure.subplots(len(metrics), 1, squeeze=False, height_ratios=[len(rows) + 1 for rows in metrics.values()])
    for ax, (metric, rows) in zip(axes[:, 0], metrics.items(), strict=True):
        values = [np.atleast_1d(np.asarray(row["values"], float)) for row in rows]
        for y, dots in enumerate(values):
            tooltips, middle = [f"{plain(rows[y]['name'])}: {dot:.4g}" for dot in dots], np.median(dots)
            ax.scatter(dots, np.full(len(dots), y), s=16, color=PALETTE[0], alpha=0.5, linewidths=0, urls=tooltips)
            ax.plot([middle] * 2, [y - 0.3, y + 0.3], color=INK, linewidth=1.8)
            ax.annotate(f"{middle:.3f}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        ax.set_yticks(range(len(rows)), [plain(row["name"]) for row in rows], parse_math=False)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        if in_unit(np.concatenate(values)):
            ax.set_xlim(-0.02, 1.02)
        ax.set_xlabel(metric)
    return figure
