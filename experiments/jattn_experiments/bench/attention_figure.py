"""The figure of the attention benchmark: time and memory over length."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from jattn_experiments.bench import attention_tables
from jattn_experiments.bench.suite import Results
from jattn_experiments.run_page.style import DASHES, DPI, FAINT, PALETTE, STYLE, WIDTH
from jattn_experiments.runs.folder import save_figure

MARKERS = "osD^vP"
Units = Sequence[tuple[float, str]]  # the largest first
TIMES: Units = ((1e6, "s"), (1e3, "ms"), (1, "µs"))  # of microseconds
SIZES: Units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def write_figure(results: Results, file: Path) -> None:
    """Writes the figure as a PNG."""
    with matplotlib.rc_context(STYLE):
        save_figure(attention_figure(results), file, dpi=DPI, facecolor="white")


def attention_figure(results: Results) -> Figure:
    """Forward, forward and backward, and the latter's temporaries; causal if that was measured."""
    cases = [row["case"] for row in results.of("times") + results.of("memory")]
    case = "causal" if "causal" in cases else next(iter(cases), "full")
    lengths = attention_tables.lengths_of(results, "memory")
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.subplots(1, 3 if lengths else 2)
    dtype = next((row["dtype"] for row in results.of("times")), "float32")
    for ax, (passes, title) in zip(axes, attention_tables.PASSES.items(), strict=False):
        rows = sorted(results.of("times", case=case, passes=passes, dtype=dtype), key=lambda row: row["length"])
        for name in attention_tables.contestants_of(results):
            _line(ax, results, name, {row["length"]: row["medians"].get(name) for row in rows})
        bound = {row["length"]: row["flops"] / row["matrix_flops"] * row["matrix"] for row in rows}
        ax.plot(list(bound), list(bound.values()), ":", color=FAINT, label="at the rate of a large matrix product")
        _finish(ax, title, list(bound), TIMES)
    if lengths:
        for name in attention_tables.contestants_of(results):
            _line(axes[2], results, name, attention_tables.temporaries(results, name, case, "both"))
        _finish(axes[2], "one head's temporaries, both passes", lengths, SIZES, base=16)
    about = results.about["environment"]
    machine = about["cpu"] + f", {about['cores']} cores" if about["device"].startswith("cpu") else about["device"]
    shape = attention_tables.shape_of(results)
    figure.suptitle(f"{case.capitalize()} attention, {dtype}, {shape}, {machine}", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(len(labels), 1))
    return figure


def _line(ax: Axes, results: Results, name: str, values: dict[int, float | None]) -> None:
    """The contestant's line, in the same style in every panel. Lengths without a value are left out."""
    known = {length: value for length, value in values.items() if value}
    index = attention_tables.contestants_of(results).index(name)
    ink = {"color": PALETTE[index % len(PALETTE)], "dashes": DASHES[index % len(DASHES)]}
    ink |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 4, "zorder": 10 - index}
    ax.plot(list(known), list(known.values()), label=name, linewidth=2.2 if index == 0 else 1.5, **ink)


def _finish(ax: Axes, title: str, lengths: list[int], units: Units, base: int = 10) -> None:
    ax.set_title(title)
    ax.set_xlabel("T = S")
    if not lengths:
        ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes, color=FAINT)
        return
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=base)
    ax.xaxis.set_major_locator(FixedLocator(lengths[:: 2 if len(lengths) > 5 else 1]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _with_unit(value, units)))
    ax.yaxis.set_minor_locator(NullLocator())


def _with_unit(value: float, units: Units) -> str:
    size, name = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{value / size:.3g} {name}"
