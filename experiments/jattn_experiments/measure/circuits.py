"""The circuits of a language model: whether a few edges carry a behaviour, which edges, and whether at any length.

Edges are chosen on some pairs of texts (EAP-IG) and judged on others. The controls are random edges, and the edges
between the heads and MLPs that matter most. Finished measurements are kept in ``out/parts``, so that a stopped run can
resume. The page of each circuit is ``out/circuit-NAME.html``.
"""

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.progress import Progress

import jattn
from jattn import interop
from jattn.circuits import EdgeScores, Faithfulness, circuit_report, edge_attribution, faithfulness, run_circuit
from jattn_experiments.batches import Rule
from jattn_experiments.config import Config
from jattn_experiments.config.rules import follow
from jattn_experiments.measure import (
    circuit_metrics,
    circuit_tasks,
    evaluate,
    language_metrics,
    language_model,
    saved_model,
    sequences,
)
from jattn_experiments.measure.circuit_metrics import TASKS
from jattn_experiments.measure.circuit_tasks import Pairs, difference
from jattn_experiments.measure.head_groups import one_off
from jattn_experiments.measure.kept_parts import KeptParts, Part
from jattn_experiments.measure.saved_model import Model
from jattn_experiments.model_files import model_file
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.terminal import Terminal

TOKENS = 2048  # of the pairs of one length, at most: two pairs of the longest, so that a run takes less than an hour
PICTURED = 4  # texts whose patterns a circuit's page shows
OFF = 2  # pairs on which single heads are switched off


class Drawn(NamedTuple):
    """Pairs to choose edges on, followed by as many to judge them on, for each task and for copying at each length."""

    tasks: dict[str, Pairs]
    lengths: dict[int, Pairs]


def halves(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """The pairs on which edges are chosen, and those on which they are judged."""
    half = len(pairs.answer) // 2
    return pairs.part(slice(half)), pairs.part(slice(half, None))


def check(config: Config) -> None:
    """Raises ``ValueError`` for options that do not apply to circuits, or if the model is missing."""
    sections = ("pretrained", "task", "model", "train", "evaluate", "long", "controls", "sweep", "mesh")
    saved_model.refuse(config, sections, "does not apply to circuits, where nothing is trained")
    follow(config, _rules(config))
    known = circuit_metrics.names(config)
    for claim in config.claims:
        saved_model.check_claim(claim, known)
    tokenizer = interop.tokenizer(language_model.check_file(config, "circuits"))
    if tokenizer.token_to_id(config.language.first) is None:
        raise ValueError(f"language.first: expected a token of the model, got {config.language.first!r}")
    draw(config, tokenizer, tokenizer.get_vocab_size())


def _rules(config: Config) -> Iterator[Rule]:
    options = config.circuits
    yield "circuits.pairs", options.pairs >= 2, "at least 2, so that each text has another one to compare with"
    distinct = len(set(options.sizes)) == len(options.sizes) > 0 and min(options.sizes) > 0
    yield "circuits.sizes", distinct, "distinct numbers of at least 1"
    yield "circuits.compared", options.compared in options.sizes, f"one of circuits.sizes={options.sizes}"
    enough = bool(options.lengths) and min(options.lengths) >= 16
    yield (
        "circuits.lengths",
        enough and sorted(set(options.lengths)) == options.lengths,
        "increasing numbers of at least 16",
    )


def draw(config: Config, tokenizer: Any, vocabulary: int) -> Drawn:
    """The pairs of a config. Raises ``ValueError`` if there are too few countries or tokens."""
    options, rng = config.circuits, np.random.default_rng(config.language.seed)
    first, tokens = tokenizer.token_to_id(config.language.first), sequences.ordinary_tokens(tokenizer, vocabulary)
    if options.lengths[-1] > len(tokens):
        most = f"at most {len(tokens)}, the size of the model's vocabulary"
        raise ValueError(f"circuits.lengths: expected {most}, got {options.lengths}")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    lengths = {
        length: circuit_tasks.copying(tokens, first, length, 2 * pairs_of(options.pairs, length), rng)
        for length in options.lengths
    }
    tasks = {
        "copying": lengths[options.lengths[0]],
        "names": circuit_tasks.names(encode, first, 2 * options.pairs, rng),
        "capitals": circuit_tasks.capitals(encode, first, 2 * options.pairs, rng),
    }
    return Drawn(tasks, lengths)


def pairs_of(pairs: int, length: int) -> int:
    """The number of pairs of this length on which edges are chosen."""
    return max(2, min(pairs, TOKENS // length))


def run(config: Config, out: Path) -> Findings:
    """Scores all edges of each task, runs circuits of all sizes, and compares circuits across lengths."""
    started, source = time.monotonic(), model_file(config.language.model)
    tokenizer, whole = interop.tokenizer(source), interop.load(source)
    model = Model.of(whole)
    pairs = draw(config, tokenizer, model.config.vocabulary)
    data = sequences.draw(config.language, tokenizer, model.config.vocabulary)
    twins = [language_model.look_at(Model.of(twin), data) for twin in saved_model.twins(model.config)]
    looked = language_model.look_at(model, data)
    count = 1 + 3 * len(config.circuits.lengths) + 3 * len(TASKS)
    with Progress(console=Terminal()) as progress:
        tell = functools.partial(progress.update, progress.add_task("circuits", total=count))
        parts = KeptParts(out / "parts", tell)
        arrays = (one for drawn in pairs for each in drawn.values() for one in each)
        parts.check_texts(arrays)
        measured = _measured(config, whole, pairs, parts)
        measured["off"] = parts.part("each head off", _each_off, model, pairs)
    _write_pages(config, whole, tokenizer, pairs, measured, out)
    metrics = circuit_metrics.metrics_of(config, measured, looked)
    return saved_model.findings(
        config,
        time.monotonic() - started,
        seeds=[config.language.seed],
        places=list(TASKS),
        **language_model.of_heads(twins[0], looked, data),
        accuracy=measured["off"]["whole"][None],
        ablated=measured["off"]["each"][None],
        heads=evaluate.head_rows([config.language.seed], language_model.roles_of(looked, twins)),
        curves=circuit_metrics.curves(config, measured),
        grids=circuit_metrics.grids(config, measured),
        controls=language_metrics.controls(config, metrics),
        claims=[language_metrics.verdict(claim, config, metrics) for claim in config.claims],
    )


def _measured(config: Config, model: interop.Transformer, pairs: Drawn, parts: KeptParts) -> dict[str, Any]:
    options = config.circuits
    shortest, measured = options.lengths[0], {"tasks": {}, "lengths": {}, "carried": {}}
    for length, every in reversed(pairs.lengths.items()):  # a run that does not fit into memory fails early
        chosen, judged = halves(every)
        measured["lengths"][length] = [
            parts.part(f"scores copying {length} {name}", _scores, model, half, options.steps)
            for name, half in (("chosen", chosen), ("judged", judged))
        ]
    for task, every in pairs.tasks.items():
        chosen, judged = halves(every)
        if task == "copying":
            part = measured["lengths"][shortest][0]
        else:
            part = parts.part(f"scores {task}", _scores, model, chosen, options.steps)
        scores = scores_of(model, part)
        kept = parts.part(f"kept {task}", _kept, model, judged, scores, options.sizes)
        nodes = parts.part(f"nodes {task}", _nodes, model, judged, scores, options.sizes)
        measured["tasks"][task] = {"scores": part, "kept": kept, "nodes": nodes}
    for length, every in pairs.lengths.items():
        circuits = [scores_of(model, measured["lengths"][one][0]).greedy(options.compared) for one in options.lengths]
        measured["carried"][length] = parts.part(f"carried {length}", _carried, model, halves(every)[1], circuits)
    return measured


def _scores(model: interop.Transformer, pairs: Pairs, steps: int) -> Part:
    options = {"labels": pairs.labels, "method": "eap-ig", "steps": steps, "progress": False}
    found = edge_attribution(model, pairs.clean, pairs.corrupt, difference, **options)
    return {"scores": found.scores, "clean": found.clean, "corrupt": found.corrupt}


def scores_of(model: interop.Transformer, part: Part) -> EdgeScores:
    """The scores of a finished part."""
    graph = jattn.circuits.graph_of(model)
    return EdgeScores(graph, part["scores"], graph.edges, part["clean"], part["corrupt"], "eap-ig")


def _kept(model: interop.Transformer, pairs: Pairs, scores: EdgeScores, sizes: list[int]) -> Part:
    options = {"labels": pairs.labels, "sizes": sizes, "progress": False}
    kept = faithfulness(model, pairs.clean, pairs.corrupt, difference, scores, **options)
    return {name: getattr(kept, name) for name in ("sizes", "kept", "interval", "random", "left", "clean", "corrupt")}


def _nodes(model: interop.Transformer, pairs: Pairs, scores: EdgeScores, sizes: list[int]) -> Part:
    sets = np.stack([between_nodes(scores, size) for size in sorted(sizes)])
    return {"edges": sets.sum((1, 2)), "kept": _share_kept(model, pairs, sets)}


def _carried(model: interop.Transformer, pairs: Pairs, circuits: list[np.ndarray]) -> Part:
    """What circuits chosen at other lengths keep at this one."""
    return {"kept": _share_kept(model, pairs, np.stack(circuits))}


def _share_kept(model: interop.Transformer, pairs: Pairs, sets: np.ndarray) -> np.ndarray:
    """``[S]``: the share of the clean-corrupt difference that each of the sets ``[S,R,W]`` keeps."""
    every, none = jattn.circuits.graph_of(model).edges, np.zeros_like(sets[0])
    sets = np.concatenate([sets, [every, none]])
    values = run_circuit(model, pairs.clean, pairs.corrupt, sets, difference, labels=pairs.labels)
    *kept, clean, corrupt = np.asarray(values).mean(-1)
    return np.array([(one - corrupt) / (clean - corrupt) for one in kept])


def between_nodes(scores: EdgeScores, size: int) -> np.ndarray:
    """bool ``[R,W]``: the edges among the embedding, the logits, and the heads and MLPs that matter most.

    As many heads and MLPs are taken as ``size`` edges allow. A writer matters by the sum of its edges' scores, which is
    the derivative by its output times its change (Nanda's attribution patching).
    """
    graph, worth = scores.graph, np.abs(scores.scores.sum(0))
    edges, inside = np.zeros_like(graph.edges), np.zeros(len(worth), bool)
    inside[0] = True
    for writer in 1 + np.argsort(-worth[1:], kind="stable"):
        inside[writer] = True
        reads = np.array([not len(at) or bool(inside[at].any()) for at in map(graph.heads_of, range(len(edges)))])
        more = graph.edges & reads[:, None] & inside
        if more.sum() > size:
            return edges
        edges = more
    return edges


def _each_off(model: Model, pairs: Drawn) -> Part:
    """``whole [A]``, ``each [L,N,A]``: the share of right answers to each task, with no head and with each head off."""

    @jax.jit
    def right(state: nnx.State, pairs: Pairs, gates: Array) -> Array:
        whole = model.whole(state)
        per_layer = [{"head_gate": gate} for gate in gates]
        logits = whole.logits(whole(pairs.clean, per_layer=per_layer)[:, -1])
        answer, other = (jnp.take_along_axis(logits, one[:, None], 1) for one in (pairs.answer, pairs.other))
        return (answer > other).mean()

    few = [jax.tree.map(jnp.asarray, halves(one)[1].part(slice(OFF))) for one in pairs.tasks.values()]
    of = lambda gates: [float(right(model.state, one, jnp.asarray(gates, jnp.float32))) for one in few]
    each = np.array([of(gates) for gates in one_off(model.shape)])
    return {"whole": np.array(of(np.ones(model.shape))), "each": each.reshape(*model.shape, len(few))}


def _write_pages(
    config: Config, model: interop.Transformer, tokenizer: Any, pairs: Drawn, measured: dict[str, Any], out: Path
) -> None:
    """Writes the page of each task's circuit, with the attention patterns of its first texts."""
    options = config.circuits
    for task, every in pairs.tasks.items():
        one, tokens = measured["tasks"][task], halves(every)[1].clean[:PICTURED]
        scores = scores_of(model, one["scores"])
        kept = one["kept"]
        curve = Faithfulness(
            **{name: kept[name] for name in ("sizes", "kept", "interval", "random", "left", "clean", "corrupt")},
            edges=np.stack([scores.greedy(int(size)) for size in kept["sizes"]]),
            values={},
            area=float("nan"),
        )
        report = jattn.report(interop.look(model, tokens), tokens, tokenizer=tokenizer)
        path = out / f"circuit-{task}.html"
        circuit_report(scores, report, kept=curve, most=options.compared, title=f"{task}: {config.name}", path=path)
