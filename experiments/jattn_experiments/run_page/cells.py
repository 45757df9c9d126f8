"""Matrices of numbers drawn as coloured cells."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle

from jattn_experiments.run_page.plot_data import Matrix
from jattn_experiments.run_page.style import INK, RAMP

CELL_BUDGET = 2000  # most cells of a matrix that are drawn as separate shapes


def on_lines(names: Sequence[str], width: float) -> bool:
    """Whether names fit above columns of this width in inches, one word per line. If not, they are rotated."""
    return 0.06 * max(len(word) for name in names for word in name.split()) < width


def names_height(names: Sequence[str], width: float) -> float:
    """Inches that names need above columns."""
    flat = on_lines(names, width)
    return 0.12 * max(len(name.split()) for name in names) if flat else 0.06 * max(map(len, names))


def _draw_cells(ax: Axes, matrix: Matrix, seeds: Sequence[int]) -> ScalarMappable:
    """Draws cells with tooltips. Very many cells become one picture, which takes a hundredth of the bytes."""
    if matrix.shades.size > CELL_BUDGET:
        return ax.imshow(matrix.shades, vmin=0, vmax=1, cmap=RAMP, interpolation="none")
    places = [Rectangle((column - 0.5, row - 0.5), 1, 1) for row, column in np.ndindex(*matrix.shades.shape)]
    cells = PatchCollection(places, cmap=RAMP, linewidth=0, antialiased=False, clip_on=False)
    cells.set(urls=matrix.tooltips(seeds), array=matrix.shades.ravel(), clim=(0, 1))
    ax.add_collection(cells)
    return cells


def draw_matrix(
    ax: Axes, matrix: Matrix, cell: float, seeds: Sequence[int] = (), square: bool = False
) -> ScalarMappable:
    """The matrix in cells about ``cell`` inches wide, with numbers where they are legible."""
    image = _draw_cells(ax, matrix, seeds)
    ax.set(xlim=(-0.5, len(matrix.columns) - 0.5), ylim=(len(matrix.rows) - 0.5, -0.5))
    ax.set_aspect("equal" if square else "auto")
    flat = on_lines(matrix.columns, cell)
    columns = [name.replace(" ", "\n") for name in matrix.columns] if flat else matrix.columns
    for axis, names in ((ax.xaxis, columns), (ax.yaxis, matrix.rows)):
        stride = -(-len(names) // 24) if square else 1
        ticks = range(0, len(names), stride)
        axis.set_ticks(ticks, [names[i] for i in ticks], fontsize=7, parse_math=False)
    above = {"top": True, "labeltop": True, "bottom": False, "labelbottom": False}
    ax.tick_params(axis="x", rotation=0 if flat else 90, length=0, **above)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    for row, column in np.ndindex(*matrix.shades.shape) if cell > 0.26 else ():
        value, ink = matrix.median[row, column], "white" if matrix.shades[row, column] > 0.55 else INK
        text = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
        ax.text(column, row, text.replace("-0.00", "0.00"), ha="center", va="center", fontsize=7, color=ink)
    ax.set_title(matrix.title)
    return image


def colour_bar(
    figure: Figure | SubFigure, cells: ScalarMappable, axes: Iterable[Axes], label: str = "", top: float | None = None
) -> None:
    """Draws the colour bar next to ``axes``: from 0 to 1, or to ``top`` for cells coloured by shares of it."""
    shares = {} if top is None else {"format": lambda share, _: f"{share * top:.2f}"}
    figure.colorbar(cells, ax=list(axes), label=label, aspect=40, pad=0.01, **shares)
