"""The circuits of trained toy models (induction.yaml and hop.yaml): do they consist of the heads that the claims name?

``python -m jattn_experiments.toy_circuits RUN --out RESULTS`` takes the folder of a finished run. It scores
every edge of each seed's model exactly, on one half of the pairs of sequences, runs the circuits on the other half, and
writes ``RESULTS/NAME.json`` and a table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.progress import track

import jattn.nnx
from jattn import score_mods
from jattn.circuits import EdgeScores, edge_attribution, faithfulness, graph_of
from jattn_experiments.load_run import load
from jattn_experiments.measure.circuit_tasks import Pairs, copying, difference
from jattn_experiments.model import RELATIVE_UNIT
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import write_atomically
from jattn_experiments.runs.terminal import Terminal
from jattn_experiments.train import Setup

PAIRS, LENGTH = 16, 30
SIZES = (3, 5, 10, 20)


class ToyLayer(nnx.Module):
    """A layer of a toy: attention, and an MLP if it has one."""

    def __init__(self, setup: Setup, params: Any):
        options, rngs = setup.config.model, nnx.Rngs(0)
        self.attention = jattn.nnx.MultiHeadAttention(
            options.num_heads,
            options.model_dim,
            options.num_heads * options.head_dim,
            score_mod=_score_mod(params),
            rngs=rngs,
        )
        for name in ("query", "key", "value", "out"):
            _fill(getattr(self.attention, name), params["attention"][name])
        self.attention_options = nnx.static({"is_causal": options.causal})
        norm = lambda name: _filled(nnx.LayerNorm(options.model_dim, rngs=rngs), params, name)
        self.attention_norm, self.mlp_norm = norm("attention_norm"), norm("mlp_norm")
        self.mlp_in = _filled(nnx.Linear(options.model_dim, options.mlp_dim or 1, rngs=rngs), params, "mlp_in")
        self.mlp_out = _filled(nnx.Linear(options.mlp_dim or 1, options.model_dim, rngs=rngs), params, "mlp_out")

    def attention_input(self, x: Array) -> Array:
        """The input of the projections."""
        return x if self.attention_norm is None else self.attention_norm(x)

    def mlp_added(self, x: Array) -> Array:
        """The MLP's output; zero without an MLP."""
        if self.mlp_in is None:
            return jnp.zeros_like(x)
        return self.mlp_out(nnx.gelu(self.mlp_in(x if self.mlp_norm is None else self.mlp_norm(x))))


class Toy(nnx.Module):
    """The model of a run as a ``jattn.circuits.CircuitModel``: tokens of one field, answers of one place."""

    def __init__(self, setup: Setup, params: Any, place: int):
        """``params``: one seed's. ``place``: the place that the logits answer."""
        options, params = setup.config.model, params["params"]
        if len(setup.task.vocabulary) > 1 or options.position not in ("learned", "relative") or options.tied:
            raise ValueError(
                "expected a toy with tokens of one field, learned or relative positions, and model.tied=false"
            )
        self.table = nnx.Param(params["embed_0"]["embedding"])
        self.positions = nnx.Param(params["positions"]) if options.position == "learned" else None
        self.layers = nnx.List([ToyLayer(setup, params[f"layer_{i}"]) for i in range(options.num_layers)])
        self.norm = _filled(nnx.LayerNorm(options.model_dim, rngs=nnx.Rngs(0)), params, "norm")
        self.kernel, self.bias = (nnx.Param(params["read_out"][name][..., place, :]) for name in ("kernel", "bias"))

    def embed(self, tokens: Array) -> Array:
        """``[B,T,M]``."""
        x = self.table[...][tokens]
        return x if self.positions is None else x + self.positions[...][None, : tokens.shape[1]]

    def unembed(self, x: Array) -> Array:
        """The logits ``[B,T,classes]`` of the place."""
        x = x if self.norm is None else self.norm(x)
        return x @ self.kernel[...] + self.bias[...][None, None]


def _score_mod(params: Any) -> score_mods.ScoreMod | None:
    if "relative_bias" not in params:
        return None
    return score_mods.RelativeBias(RELATIVE_UNIT * params["relative_bias"], bidirectional=False)


def _filled(module: Any, params: Any, name: str) -> Any:
    """The module with the parameters of this name; None without them."""
    return _fill(module, params[name]) if name in params else None


def _fill(module: Any, params: Any) -> Any:
    for name, value in params.items():
        getattr(module, name)[...] = value
    return module


def pairs_of(setup: Setup, rng: np.random.Generator) -> tuple[Pairs, int]:
    """Pairs of sequences whose answers differ, and the place that answers.

    induction: random tokens that repeat, with two of them swapped. hop: another symbol follows the last earlier
    occurrence of the last symbol, one hop away.
    """
    if setup.config.task.kind == "induction":
        tokens = np.arange(1, setup.config.task.symbols)
        return copying(tokens, 0, LENGTH, 2 * PAIRS, rng), 0
    if setup.config.task.kind != "hop":
        raise ValueError(f"task.kind: expected 'induction' or 'hop', got {setup.config.task.kind!r}")
    symbols, clean, corrupt, answers = setup.config.task.symbols, [], [], []
    while len(clean) < 2 * PAIRS:
        steps = rng.integers(1, symbols, setup.config.task.length - 1)  # neighbours differ
        text = np.cumsum(steps) % symbols
        before = np.flatnonzero(text[:-1] == text[-1])
        if not len(before) or before[-1] + 3 >= len(text):
            continue
        at = before[-1] + 1
        others = sorted(set(range(symbols)) - {*text[at - 1 : at + 2].tolist()})
        changed = text.copy()
        changed[at] = rng.choice(others)
        clean.append(np.append(symbols + 1, text))
        corrupt.append(np.append(symbols + 1, changed))
        answers.append((text[at], changed[at]))
    answer, other = np.array(answers, np.int32).T
    return Pairs(np.array(clean, np.int32), np.array(corrupt, np.int32), answer, other), 1


def circuit_of(model: Toy, pairs: Pairs, roles: dict[str, str]) -> dict[str, Any]:
    """Exact scores of all edges on half of the pairs, and what circuits of several sizes keep on the other half.

    ``roles``: each head's role, by the head's name.
    """
    chosen, judged = pairs.part(slice(PAIRS)), pairs.part(slice(PAIRS, None))
    graph = graph_of(model)
    exact = {"method": "exact", "edges": graph.edges, "progress": False}
    scores = edge_attribution(model, chosen.clean, chosen.corrupt, difference, labels=chosen.labels, **exact)
    kept = faithfulness(
        model, judged.clean, judged.corrupt, difference, scores, sizes=SIZES, labels=judged.labels, progress=False
    )
    return {
        "edges": [
            f"{_with_role(writer, roles)} -> {_with_role(reader, roles)}"
            for writer, reader in first_edges(scores, max(SIZES))
        ],
        "sizes": kept.sizes.tolist(),
        "kept": kept.kept.tolist(),
        "random": kept.random.tolist(),
        "gap": float((kept.clean - kept.corrupt).mean()),
    }


def first_edges(scores: EdgeScores, count: int) -> list[tuple[str, str]]:
    """Writer and reader of the first ``count`` edges, chosen greedily from the logits backwards."""
    writers, readers = scores.graph.writers, scores.graph.readers
    return [(writers[w], readers[r]) for r, w in scores.greedy_order()[:count]]


def _with_role(name: str, roles: dict[str, str]) -> str:
    """``head 0.3``, or a reader of it, with the head's role."""
    _, _, where = name.partition(" ")
    return f"{name} ({roles[where]})" if where in roles else name


def main() -> None:
    """Finds the circuits of one run and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a finished run of induction or hop")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    options = parser.parse_args()
    saved = load(options.run)
    pairs, place = pairs_of(saved.setup, np.random.default_rng(0))
    seeds: dict[int, Any] = {}
    rows = Findings.load(Path(options.run)).heads
    for i, seed in enumerate(track(saved.setup.seeds, "seeds", console=Terminal())):
        roles = {f"{row['layer']}.{row['head']}": str(row["role"]) for row in rows if row["seed"] == seed}
        model = Toy(saved.setup, jax.tree.map(lambda leaf, i=i: leaf[i], saved.params), place)
        seeds[seed] = circuit_of(model, pairs, roles)
    options.out.mkdir(parents=True, exist_ok=True)
    name = saved.setup.config.name
    write_atomically(options.out / f"{name}.json", (json.dumps(seeds, indent=1) + "\n").encode())
    for seed, one in seeds.items():
        kept = ", ".join(f"{n}: {x:.2f}" for n, x in zip(one["sizes"], one["kept"], strict=True))
        print(f"seed {seed}: share kept by number of edges: {kept}; {'; '.join(one['edges'][:8])}")


if __name__ == "__main__":
    main()
