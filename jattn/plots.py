"""Plots attention weights: one head, or all heads of a model on one color scale.

Axes: ``T`` queries, ``S`` keys, ``N`` heads, ``L`` layers.

The figures do not use pyplot: there is no global registry, nothing to close, and no need for a display. In a notebook,
run ``%matplotlib inline`` once and end a cell with the figure (``ax.figure`` for one head).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import ArrayLike

__all__ = ["attention_heatmap", "head_grid"]

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
except ImportError as missing:
    raise ImportError("jattn.plots needs matplotlib: pip install jattn[plots]") from missing


class _Figure(Figure):
    """A figure whose PDF and PostScript files embed TrueType fonts: many venues reject Type 3, matplotlib's default."""

    def savefig(self, *args: Any, **options: Any) -> None:
        with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}):
            super().savefig(*args, **options)


QUERIES, KEYS = "Queries (Target)", "Keys (Source)"
COLOURS = "Blues"  # white means no weight; prints well, and its lightness order survives color blindness
_LABEL_LENGTH = 16  # longer tokens are cut and end in an ellipsis
_SMALLEST, _LARGEST = 5.5, 9.0  # font size of token labels, in points


def attention_heatmap(
    weights: Any,
    tokens: Sequence[object] | ArrayLike | None = None,
    *,
    key_tokens: Sequence[object] | ArrayLike | None = None,
    tokenizer: Any = None,
    ax: Axes | None = None,
    vmax: float | None = None,
    cmap: str = COLOURS,
    colorbar: bool = True,
    title: str | None = None,
) -> Axes:
    """Draws one head's weights as a heatmap: a row for each query, a column for each key.

    Args:
        weights: ``[T, S]``, any array that NumPy can read.
        tokens: labels of the ``T`` queries, and of the keys if ``T == S``; with a tokenizer, ids.
        key_tokens: labels of the ``S`` keys, if they differ (cross-attention).
        tokenizer: a ``tokenizers`` or ``transformers`` tokenizer, which turns ids, or its own strings such as
            ``"Ġcat"``, into text. Matplotlib's default font has no Chinese or Japanese characters; choose another in
            ``rcParams["font.family"]``.
        ax: the axes to draw on; by default, new axes in a figure large enough for readable labels.
        vmax: the weight at the dark end of the scale; by default, the largest weight. To compare plots, use the same
            value for all.
        cmap: a matplotlib colormap.
        colorbar: whether to draw the color bar.
        title: text above the plot.

    Returns:
        The axes; save them with ``ax.figure.savefig("heads.png")``, or ``"heads.pdf"`` for a paper (TrueType
            fonts; with your own ``ax``, set ``rcParams["pdf.fonttype"] = 42``).

    Raises:
        ValueError: ``weights`` has the wrong rank or is empty; the number of labels is not T or S; an id is negative.

    Example:
        >>> weights = np.eye(3)[[0, 0, 1]]  # a previous-token head
        >>> ax = jattn.plots.attention_heatmap(weights, ["Le", "chat", "noir"])
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('Keys (Source)', 'Queries (Target)')

    Source: the heatmap with tokens on both axes is figure 3 of Bahdanau et al. (2015), https://arxiv.org/abs/1409.0473.
    """
    weights = _checked(weights, (2,), "[T, S]; draw one head (weights[n]), or all with head_grid")
    rows, columns = _labels(weights.shape, tokens, key_tokens, tokenizer)
    if ax is None:
        cell = min(max(0.19, 2.6 / max(weights.shape)), 11.0 / max(weights.shape))  # inches
        height, width = (max(cell * size, 0.8) for size in weights.shape)
        ax = _Figure(figsize=(width + 1.7, height + 1.2), layout="compressed").subplots()
    image = _draw(ax, weights, rows, columns, _top(weights, vmax), cmap)
    ax.set_xlabel(KEYS)
    ax.set_ylabel(QUERIES)
    if title is not None:
        ax.set_title(title, parse_math=False)
    if colorbar:
        _colour_bar(ax.figure, image, ax)
    return ax


def head_grid(
    weights: Any,
    tokens: Sequence[object] | ArrayLike | None = None,
    *,
    key_tokens: Sequence[object] | ArrayLike | None = None,
    tokenizer: Any = None,
    vmax: float | None = None,
    cmap: str = COLOURS,
    columns: int | None = None,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    panel_size: float | None = None,
) -> Figure:
    """Draws every head's weights as heatmaps on one color scale.

    Args:
        weights: ``[L, N, T, S]`` (a row of panels per layer) or ``[N, T, S]``, the heads of one layer. Stack layers
            with ``np.stack``; if you concatenate them, the titles number their heads consecutively.
        tokens: labels of the ``T`` queries, and of the keys if ``T == S``; with a tokenizer, ids.
        key_tokens: labels of the ``S`` keys, if they differ (cross-attention).
        tokenizer: from ``tokenizers`` or ``transformers``; turns ids, or its own strings such as ``"Ġcat"``, into text.
        vmax: the weight at the dark end of the scale; by default, the largest weight of any head.
        cmap: a matplotlib colormap.
        columns: panels per row; by default, the heads of a layer, or at most four for ``[N, T, S]``.
        titles: one for each head, layer by layer; by default, "layer l head n", or "head n" for ``[N, T, S]``.
        title: text above the figure.
        panel_size: length of a panel's longer side, in inches; by default, it grows with the number of tokens.

    Returns:
        The figure; save it with ``figure.savefig("heads.png")``.

    Raises:
        ValueError: ``weights`` has the wrong rank or is empty; the number of labels is not T or S; the number of titles
            differs from the number of heads; an id is negative.

    Example:
        >>> figure = jattn.plots.head_grid(np.full((2, 4, 3, 3), 1 / 3), ["Le", "chat", "noir"])
        >>> [ax.get_title() for ax in figure.axes][5]
        'layer 1 head 1'

    Source: the all-heads view of Vig (2019), https://arxiv.org/abs/1906.05714; here, on one scale.
    """
    weights = _checked(weights, (3, 4), "[N, T, S] or [L, N, T, S]")
    layered = weights.ndim == 4
    heads = weights.reshape(-1, *weights.shape[-2:])
    if titles is None and layered:
        titles = [f"layer {layer} head {head}" for layer, head in np.ndindex(*weights.shape[:2])]
    elif titles is None:
        titles = [f"head {head}" for head in range(len(heads))]
    elif len(titles) != len(heads):
        raise ValueError(f"titles has {len(titles)} entries, expected {len(heads)}: one per head")
    across = columns or (weights.shape[1] if layered else min(len(heads), 4))
    rows = math.ceil(len(heads) / across)
    query_labels, key_labels = _labels(heads.shape[1:], tokens, key_tokens, tokenizer)

    longer = max(heads.shape[1:])
    size = panel_size or (1.5 if across > 6 else min(max(0.085 * longer, 1.7), 3.2))
    width, height = (size * max(side / longer, 0.25) for side in heads.shape[:0:-1])
    figure = _Figure(figsize=(across * (width + 0.15) + 1.5, rows * (height + 0.35) + 0.8), layout="compressed")
    axes: list[Axes] = list(figure.subplots(rows, across, squeeze=False).flat)
    images = []
    for i, ax in enumerate(axes):
        if i >= len(heads):
            ax.set_axis_off()
            continue
        # Token labels appear only at the left and lower edges; all panels share them.
        left, lowest = i % across == 0, i + across >= len(heads)
        images.append(_draw(ax, heads[i], query_labels, key_labels, _top(heads, vmax), cmap, size * 72))
        ax.tick_params(labelleft=left, labelbottom=lowest)
        ax.set_title(titles[i], fontsize=9, parse_math=False)
    figure.supxlabel(KEYS, fontsize=10)
    figure.supylabel(QUERIES, fontsize=10)
    if title is not None:
        figure.suptitle(title, parse_math=False)
    _colour_bar(figure, images[0], axes)
    return figure


def _checked(weights: Any, ranks: tuple[int, ...], expected: str) -> np.ndarray:
    array = np.asarray(weights)
    if array.ndim not in ranks or 0 in array.shape:
        raise ValueError(f"weights has shape {array.shape}, expected {expected}")
    return array.astype(np.float32)  # NumPy has no bfloat16


def _labels(
    shape: Sequence[int], tokens: Any, key_tokens: Any, tokenizer: Any
) -> tuple[list[str] | None, list[str] | None]:
    """The labels of queries and keys; None if not given (positions are shown instead)."""
    if key_tokens is None and shape[0] == shape[1]:
        key_tokens = tokens
    labels: list[list[str] | None] = []
    for name, words, axis, size in (("tokens", tokens, "T", shape[0]), ("key_tokens", key_tokens, "S", shape[1])):
        if words is not None and len(words) != size:
            raise ValueError(f"{name} has {len(words)} entries, expected {axis}={size} for weights of shape {shape}")
        if words is not None and tokenizer is not None:
            from jattn.interop._tokenizer import token_labels  # imports Flax

            words = token_labels(name, [words], tokenizer)[0]
        labels.append(None if words is None else [_shown(word) for word in words])
    return labels[0], labels[1]


def _shown(token: object) -> str:
    text = str(token).replace("\n", "↵").replace("\t", "⇥")
    if not text.strip():
        text = "␣" * len(text)
    return text if len(text) <= _LABEL_LENGTH else text[: _LABEL_LENGTH - 1] + "…"


def _top(weights: np.ndarray, vmax: float | None) -> float:
    if vmax is not None:
        return float(vmax)
    finite = weights[np.isfinite(weights)]
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def _draw(ax: Axes, weights: np.ndarray, rows: Any, columns: Any, vmax: float, cmap: str, points: float = 0.0) -> Any:
    """Draws the weights and token labels; ``points``: the length of the longer side, if known."""
    height, width = weights.shape
    # With square cells, a single query over many keys would be only a hairline.
    aspect = "equal" if max(weights.shape) <= 8 * min(weights.shape) else "auto"
    image = ax.imshow(weights, vmin=0.0, vmax=vmax, cmap=cmap, aspect=aspect, interpolation="nearest")
    if not points:
        box = ax.get_window_extent()
        points = 72 / ax.figure.dpi * float(min(box.width, box.height))
    cell = points / max(height, width)
    long = columns is not None and 0.62 * _LARGEST * max(map(len, columns)) > cell
    _label(ax.xaxis, columns, width, cell, rotation=90 if long else 0)
    _label(ax.yaxis, rows, height, cell)
    ax.tick_params(length=2, width=0.5, color="0.5")
    ax.spines[:].set(linewidth=0.5, color="0.5")
    return image


def _label(axis: Axis, labels: list[str] | None, size: int, cell: float, rotation: int = 0) -> None:
    """Labels every cell, or every second, third, ..., so that the labels stay readable."""
    font = min(max(0.85 * cell, _SMALLEST), _LARGEST)
    stride = math.ceil(1.1 * font / cell) if labels else math.ceil(2.2 * font / cell)
    ticks = range(0, size, max(stride, 1))
    shown = [labels[i] if labels else str(i) for i in ticks]
    axis.set_ticks(ticks, shown, fontsize=font, rotation=rotation, parse_math=False)


def _colour_bar(figure: Any, image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8, aspect=30, pad=0.02)
    bar.outline.set(linewidth=0.5, edgecolor="0.5")
    bar.ax.tick_params(labelsize=8, width=0.5)
