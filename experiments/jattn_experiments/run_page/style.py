"""The style of all figures: colours, dashes, sizes and matplotlib options."""

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from jattn_experiments.runs.findings import Findings

# Okabe and Ito's colours (2008), ordered so that neighbours also differ in lightness; dashes separate them in print.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A6A00", "#555555")
DASHES = ((), (5, 1.5), (1.5, 1.5), (5, 1.5, 1.5, 1.5))
INK, FAINT = "#222222", "#999999"
STOPS = ("#f7fbff", "#c6dbef", "#6baed6", "#2171b5", "#08306b")  # Brewer's "Blues", as in the page
# Few enough levels that each has a name in the page and that Matplotlib draws the colour bar as shapes (below 50).
RAMP = LinearSegmentedColormap.from_list("ramp", STOPS, N=33)
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
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jattn",  # the same run gives the same file
}
DPI = 200
WIDTH = 9.0  # inches: at a README's 900 pixels the smallest text is 11 pixels high


def titled(figure: Figure, findings: Findings, title: str) -> Figure:
    """The figure, with the run's name and the title above it."""
    figure.suptitle(f"{findings.title}: {title}", fontsize=10)
    return figure
