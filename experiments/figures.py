"""Pictures of one run, as PNG: every one from a ``Findings``, all in one style.

Several seeds are always shown as they are: one thin line or dot per seed, and the median over them drawn strong.
"""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.findings import Findings
from experiments.panels import (
    Panel,
    control_rows,
    curve_panels,
    divergence_text,
    head_codes,
    head_titles,
    in_unit,
    matched_ablation,
    matched_divergence,
    matched_profiles,
    plain,
    time_panels,
)
from jattn.plots import COLOURS, head_grid

# Okabe and Ito's colours (2008), ordered so that neighbours differ in lightness too; dashes tell them apart in print.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A6A00", "#555555")
DASHES = ((), (5, 1.5), (1.5, 1.5), (5, 1.5, 1.5, 1.5))
INK, FAINT = "#222222", "#999999"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
DPI = 200
WIDTH = 9.0  # inches: at a README's 900 pixels the smallest text is 11 pixels high
MANY = 6  # heads in a layer, from where on their names are short and pictures wider


def write_figures(findings: Findings, folder: Path) -> list[Path]:
    """Writes every picture that the findings have data for into ``folder``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "heads": heads_figure,
        "offsets": offsets_figure,
        "ablation": ablation_figure,
        "divergence": divergence_figure,
    }
    if time_panels(findings):
        drawn["training"] = training_figure
    if findings.curves:
        drawn["curves"] = curves_figure
    if findings.controls:
        drawn["controls"] = controls_figure
    files = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawn.items():
            files.append(folder / f"{name}.png")
            draw(findings).savefig(files[-1], dpi=DPI)
    return files


def _ink(colour: int) -> dict[str, Any]:
    if colour < 0:
        return {"color": INK}
    return {"color": PALETTE[colour % len(PALETTE)], "dashes": DASHES[colour % len(DASHES)]}


def _draw_lines(ax: Axes, panel: Panel) -> None:
    for line in panel.lines:
        ink = _ink(line.colour)
        for seed in line.seeds:
            ax.plot(line.x, seed, color=ink["color"], linewidth=0.6, alpha=0.35)
    for line in panel.lines:  # medians above every thin line
        ax.plot(line.x, np.median(line.seeds, 0), linewidth=1.9, label=line.label, **_ink(line.colour))
    if panel.log:
        ax.set_yscale("log")
    elif panel.unit:
        ax.set_ylim(-0.03, 1.03)


def training_figure(findings: Findings) -> Figure:
    """Loss, accuracy and head scores over steps, on one axis of time."""
    panels = time_panels(findings)
    figure = Figure(figsize=(WIDTH, 1.75 * len(panels) + 0.6))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        _draw_lines(ax, panel)
        ax.set_ylabel(panel.title)
        ax.margins(x=0.01)
        if len(panel.lines) > 1 or panel.lines[0].label != panel.title:
            ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[-1].set_xlabel("training step")
    figure.align_ylabels(axes)
    figure.suptitle(f"{plain(findings.name)}: training ({_seeds(findings)})", fontsize=10)
    return figure


def _seeds(findings: Findings) -> str:
    count = len(findings.seeds)
    return f"thin: each of {count} seeds, strong: median" if count > 1 else f"seed {findings.seeds[0]}"


def _names(findings: Findings) -> list[str]:
    """What stands above each head of the first seed: its place and, on the next line, its role."""
    titles = head_titles(findings)
    if findings.example_weights.shape[2] > MANY:
        roles = (title.partition(" · ")[1:] for title in titles)
        titles = ["".join((code, *role)) for code, role in zip(head_codes(findings), roles, strict=True)]
    return [title.replace(" · ", "\n") for title in titles]


def _width(heads: int) -> float:
    """Inches for a row of so many heads."""
    return max(WIDTH, 1.5 + 1.05 * heads)


def heads_figure(findings: Findings) -> Figure:
    """Every head of the first seed on one example, untrained above trained."""
    first, last = findings.example_weights[0], findings.example_weights[-1]
    rows = np.stack([first, last], 1).reshape(-1, *first.shape[1:])  # [2L,N,T,T]
    heads = first.shape[1]
    titles = []
    for layer in range(first.shape[0]):
        names = _names(findings)[layer * heads : (layer + 1) * heads]
        titles += [name.partition("\n")[0] + "\nuntrained" for name in names] + names
    panel = (_width(heads) - 1.5) / heads - 0.15
    with matplotlib.rc_context({"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        top = float(findings.example_weights.max())
        title = f"{plain(findings.name)}: one example, seed {findings.seeds[0]}"
        return head_grid(rows, findings.tokens, vmax=top, titles=titles, title=title, panel_size=panel)


def _head_axes(findings: Findings, height: float) -> tuple[Figure, list[Axes]]:
    layers, heads = findings.example_weights.shape[1:3]
    columns = min(heads, 4 if heads <= MANY else MANY)
    rows = layers * -(-heads // columns)
    figure = Figure(figsize=(WIDTH if columns <= 4 else 1.5 * WIDTH, height * rows + 0.7))
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for ax in axes[layers * heads :]:
        ax.set_axis_off()
    return figure, axes


def offsets_figure(findings: Findings) -> Figure:
    """Mean weight at each offset from the query: one picture per head, untrained and trained."""
    profiles = matched_profiles(findings)
    figure, axes = _head_axes(findings, 1.75)
    for head, title in enumerate(_names(findings)):
        ax = axes[head]
        for when, colour, name in ((0, FAINT, "untrained"), (1, PALETTE[0], "trained")):
            for seed in profiles[:, when, head]:
                ax.plot(findings.offsets, seed, color=colour, linewidth=0.5, alpha=0.35)
            median = np.median(profiles[:, when, head], 0)
            ax.plot(findings.offsets, median, color=colour, linewidth=1.6, label=name)
            peak = int(median.argmax())
            if when and median[peak] >= 0.25:
                x = findings.offsets[peak]
                right = x > np.mean(findings.offsets)  # the text goes to the side with more room
                side = {"xytext": (-5 if right else 5, -5), "ha": "right" if right else "left"}
                ax.annotate(f"{x:+d}: {median[peak]:.2f}", (x, median[peak]), textcoords="offset points", **side)
        ax.set_title(title, parse_math=False)
        ax.set_ylim(-0.03, 1.03)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    figure.supxlabel("key position - query position", fontsize=9)
    figure.supylabel("mean weight", fontsize=9)
    return figure


def ablation_figure(findings: Findings) -> Figure:
    """Accuracy of every place when one head is switched off, beside the whole model's."""
    ablated = np.concatenate([findings.accuracy[:, None], matched_ablation(findings)], 1)  # [R,1+L*N,A]
    layers, heads = findings.example_weights.shape[1:3]
    names = ["nothing off", *_names(findings)]
    rows = [[0, *range(1 + layer * heads, 1 + (layer + 1) * heads)] for layer in range(layers)]
    figure = Figure(figsize=(_width(heads), 2.3 * layers + 0.6))
    axes = figure.subplots(layers, 1, sharey=True, squeeze=False)[:, 0]
    count = len(findings.places)
    width = 0.8 / count
    for ax, row in zip(axes, rows, strict=True):
        for place, name in enumerate(findings.places):
            x = np.arange(len(row)) + width * (place - (count - 1) / 2)
            values = ablated[:, row, place]
            ax.bar(
                x, np.median(values, 0), 0.9 * width, color=PALETTE[place % len(PALETTE)], alpha=0.75, label=plain(name)
            )
            spread = np.linspace(-0.3, 0.3, len(values))[:, None] * width
            ax.plot((x + spread).ravel(), values.ravel(), "o", color=INK, markersize=1.8, markeredgewidth=0, alpha=0.7)
        ax.set_xticks(range(len(row)), [names[i] for i in row], parse_math=False)
        ax.set_ylim(0, 1.04)
        ax.grid(axis="x", visible=False)
        ax.set_ylabel("accuracy")
    axes[0].legend(ncols=min(count, 5), loc="lower left", bbox_to_anchor=(0, 1.0))
    figure.supxlabel("head switched off", fontsize=9)
    return figure


def divergence_figure(findings: Findings) -> Figure:
    """How much the heads' patterns differ, before and after training, on one scale."""
    matrices = matched_divergence(findings)
    titles, heads = head_codes(findings), findings.example_weights.shape[2]
    ticks = range(len(titles))
    if len(titles) > 24:  # a name for each layer
        ticks = range(0, len(titles), heads)
        titles = [titles[at].partition("H")[0] for at in ticks]
    figure = Figure(figsize=(WIDTH, 3.9))
    axes = figure.subplots(1, 2)
    for when, (ax, name) in enumerate(zip(axes, ("untrained", "trained"), strict=True)):
        median = np.median(matrices[:, when], 0)
        image = ax.imshow(median, vmin=0, vmax=1, cmap=COLOURS)
        ax.grid(visible=False)
        ax.set_xticks(ticks, titles)
        ax.set_yticks(ticks, titles)
        for row, column in np.ndindex(*median.shape) if len(median) <= 12 else ():
            dark = median[row, column] > 0.55
            text = f"{median[row, column]:.2f}"
            ax.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else INK)
        ax.set_title(f"{name}: {divergence_text(findings, when)}")
    figure.colorbar(image, ax=list(axes), label="Jensen-Shannon divergence / ln 2", shrink=0.9)
    return figure


def curves_figure(findings: Findings) -> Figure:
    """The run's own curves, one picture each."""
    panels = curve_panels(findings)
    figure = Figure(figsize=(WIDTH, 2.9 * len(panels)))
    for ax, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_lines(ax, panel)
        ax.set_title(panel.title, parse_math=False)
        ax.set_xlabel(panel.x_label, parse_math=False)
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def controls_figure(findings: Findings) -> Figure:
    """What the controls reached: a dot per seed, a bar at the median."""
    metrics = control_rows(findings)
    figure = Figure(figsize=(WIDTH, 0.42 * len(findings.controls) + 0.9 * len(metrics)))
    axes = figure.subplots(len(metrics), 1, squeeze=False, height_ratios=[len(rows) + 1 for rows in metrics.values()])
    for ax, (metric, rows) in zip(axes[:, 0], metrics.items(), strict=True):
        values = [np.atleast_1d(np.asarray(row["values"], float)) for row in rows]
        for y, dots in enumerate(values):
            ax.plot(dots, np.full(len(dots), y), "o", color=PALETTE[0], markersize=4, alpha=0.5, markeredgewidth=0)
            ax.plot([np.median(dots)] * 2, [y - 0.3, y + 0.3], color=INK, linewidth=1.8)
            ax.annotate(
                f"{np.median(dots):.3f}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
        ax.set_yticks(range(len(rows)), [plain(row["name"]) for row in rows], parse_math=False)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        if in_unit(np.concatenate(values)):
            ax.set_xlim(-0.02, 1.02)
        ax.set_xlabel(metric)
    return figure
