"""Draws the pictures of these pages: ``python docs/pictures.py``, with ``jattn[plots]`` installed."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jattn
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


if __name__ == "__main__":
    why_scale()
    head_0()
