"""Draws the figures of these pages: ``python docs/pictures.py``, with ``jattn[plots]`` installed."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import jattn
from jattn import masks
from jattn.plots import attention_heatmap

HERE = Path(__file__).parent


def why_scale() -> None:
    """The largest of 64 weights of random queries and keys, by head dim, with and without 1 / sqrt(H)."""
    dims = 2 ** np.arange(1, 11)

    def largest(dim: int, scale: float) -> float:
        q, k = (jax.random.normal(jax.random.key(i), (64, 8, int(dim))) for i in range(2))
        return float(jattn.attention_weights(q, k, scale=scale).max(-1).mean())

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(dims, [largest(dim, 1.0) for dim in dims], "o-", label="scale 1")
    axes.plot(dims, [largest(dim, dim**-0.5) for dim in dims], "s-", label="scale 1 / sqrt(H)")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="head dim H", ylabel="largest of 64 weights, mean", ylim=(0, 1.02))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(HERE / "why-scale.png", dpi=150)


def head_0() -> None:
    """The first head of the French sentence, as at the end of step-by-step.md."""
    golden = json.loads((HERE.parent / "tests" / "french_sentence.json").read_text())
    heads = jnp.asarray(golden["embeddings"]) @ jnp.asarray(golden["W_Q"])
    weights = jattn.attention_weights(heads[:, :, None], heads[:, :, None])
    axes = attention_heatmap(weights[0], golden["tokens"], title="head 0")
    axes.figure.savefig(HERE / "head-0.png", dpi=150)


def block_tables() -> None:
    """Empty, partial and full blocks of four masks, for long-context.md."""
    length, size = 8192, 512
    ids = np.repeat(np.arange(5), [1400, 2600, 800, 2000, 1392])
    shown = {
        "Causal()": masks.Causal(),
        "SlidingWindow(1500)": masks.SlidingWindow(1500),
        "Segments(ids) & Causal()": masks.Segments(ids) & masks.Causal(),
        "Causal() | Prefix(2048)": masks.Causal() | masks.Prefix(2048),
    }
    kinds = {"empty: skipped": "white", "partial: computed, masked": "tab:orange", "full: computed": "tab:blue"}
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    all_axes = figure.subplots(1, len(shown), sharey=True)
    for axes, (title, mask) in zip(all_axes, shown.items(), strict=True):
        known = jattn.block_mask(mask, length, length, block_sizes=(size, size))
        kind = known.any_visible[0, 0].astype(int) + known.all_visible[0, 0]
        edges = np.arange(0, length + 1, size)
        axes.pcolormesh(edges, edges, kind, cmap=ListedColormap(list(kinds.values())), vmin=0, vmax=2,
                        edgecolors="lightgray", linewidth=0.5)  # fmt: skip
        axes.set(title=f"{title}\n{kind.astype(bool).mean():.0%} not empty", xlabel="key", aspect="equal")
        axes.set(xticks=[0, 4096, 8192], yticks=[0, 4096, 8192])
        axes.title.set_fontsize(9)
    all_axes[0].set(ylabel="query")
    all_axes[0].invert_yaxis()  # shared by all
    patches = [Patch(facecolor=color, edgecolor="gray", label=label) for label, color in kinds.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(HERE / "block-tables.png", dpi=150)


def _blocks(document: str) -> dict:
    """The names that the Python blocks of a page leave behind."""
    namespace: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (HERE / document).read_text(), re.MULTILINE | re.DOTALL):
        exec(block, namespace)
    return namespace


def mods() -> None:
    """Every mask and score function of masks.md, made by the blocks of that page."""
    page = _blocks("masks.md")
    q, kv = np.arange(16)[:, None], np.arange(16)
    figure = Figure(figsize=(9, 7.4), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(3, 4).flat, page["masks"].items(), strict=True):
        _matrix(axes, np.broadcast_to(mask(0, 0, q, kv), (16, 16)), title, vmin=0, vmax=1.4)
    figure.savefig(HERE / "masks.png", dpi=110)
    drawn = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    for axes, (title, score_mod) in zip(figure.subplots(2, 3).flat, page["scores"].items(), strict=True):
        scores = drawn if score_mod is None else np.asarray(score_mod(jnp.asarray(drawn), 0, 0, q, kv))
        image = _matrix(axes, scores, title, cmap="RdBu_r", vmin=-4, vmax=4)
    figure.colorbar(image, ax=figure.axes, shrink=0.6, label="score")
    figure.savefig(HERE / "score-mods.png", dpi=110)


def _matrix(axes, values, title, cmap="Blues", **scale):
    image = axes.pcolormesh(values, cmap=cmap, edgecolors="lightgray", linewidth=0.3, **scale)
    axes.set_title(title, fontsize=8)
    axes.set(aspect="equal", xticks=[], yticks=[])
    axes.invert_yaxis()
    return image


if __name__ == "__main__":
    mods()
    why_scale()
    head_0()
    block_tables()
