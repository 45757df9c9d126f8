"""Writes a circuit and the attention of its heads as one offline page (``circuit_report``)."""

import dataclasses
import functools
import html
import re
from pathlib import Path
from typing import Any

import numpy as np

from jattn.circuits._edge_scores import EdgeScores
from jattn.circuits._faithfulness import Faithfulness
from jattn.reports import Report
from jattn.reports._html_page import as_json
from jattn.reports._side_by_side import page_of

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CircuitReport(Report):
    """A page with a circuit above the heads of a report. Notebooks display it; ``save(path)`` writes it.

    Created by :func:`~jattn.circuits.circuit_report`. ``section`` is the HTML of the circuit; the other fields are
    inherited from ``jattn.reports.Report``.

    Example:
        >>> issubclass(jattn.circuits.CircuitReport, jattn.reports.Report)
        True
    """

    section: str = ""

    @functools.cached_property
    def html(self) -> str:
        """The whole file."""
        page = page_of(self, self.others)
        style, script = page.style + _read("circuit.css"), page.script + _read("circuit.js")
        return dataclasses.replace(page, before=self.section + page.before, style=style, script=script).html()


def circuit_report(
    scores: EdgeScores,
    report: Report,
    *,
    kept: Faithfulness | None = None,
    shown: int = 50,
    most: int = 500,
    title: str = "Circuit",
    path: str | Path | None = None,
) -> CircuitReport:
    """Writes an offline page with the circuit of a model; clicking a head opens its attention pattern.

    Layers run upward, and line widths show the scores of edges. A slider sets the number of edges, chosen greedily from
    the logits backwards. The page fetches nothing and can save its picture as SVG.

    Args:
        scores: the result of ``edge_attribution``.
        report: a report on the same model's heads, such as ``jattn.report(jattn.interop.look(model, tokens), tokens)``
            or ``jattn.survey(...).report()``. The circuit shows the roles in the report.
        kept: the result of ``faithfulness``; the page draws its curve next to the circuit.
        shown: the number of edges shown initially.
        most: the largest number of edges on the slider.
        title: the title of the page.
        path: the file to write; None writes no file.

    Raises:
        ValueError: the report and the model have different numbers of heads; ``kept`` is not finite; ``shown`` or
            ``most`` is less than 1.
        OSError: ``path`` is in a folder that does not exist, or cannot be written.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> clean, corrupt = np.array([[3, 1, 4, 1]]), np.array([[3, 2, 4, 1]])
        >>> metric = lambda logits, tokens: logits[-1, 1] - logits[-1, 2]
        >>> scores = jattn.circuits.edge_attribution(model, clean, corrupt, metric, progress=False)
        >>> heads = jattn.report(jattn.interop.look(model, clean), clean)
        >>> jattn.circuits.circuit_report(scores, heads, path="circuit.html")
        CircuitReport('Circuit', 4 heads, 1 sequences)
    """
    graph = scores.graph
    if len(report.heads) != graph.num_layers * graph.num_heads:
        raise ValueError(
            f"report must be of the model's {graph.num_layers} layers of {graph.num_heads} heads, got one of "
            f"{len(report.heads)} heads"
        )
    if kept is not None and not np.isfinite([*kept.kept, *kept.random, *kept.interval.ravel()]).all():
        raise ValueError("kept must be finite, but is not, because the metric is equal on clean and corrupt inputs")
    if shown < 1 or most < 1:
        raise ValueError(f"shown and most must be at least 1, got {shown} and {most}")
    section = _filled("circuit.html", {
        "heading": html.escape(f"{title}: edges by {scores.method}"),
        "summary": html.escape(_summary(scores, kept)),
        "data": as_json(_data(scores, kept, shown, most)),
    })  # fmt: skip
    fields = {field.name: getattr(report, field.name) for field in dataclasses.fields(Report)}
    page = CircuitReport(**{**fields, "title": title}, section=section)
    if path is not None:
        page.save(path)
    return page


def _summary(scores: EdgeScores, kept: Faithfulness | None) -> str:
    text = (
        f"The metric is {scores.clean.mean():.4g} on the clean input and {scores.corrupt.mean():.4g} on the corrupt "
        f"one (means over {len(scores.clean)} examples). A score is the change of the metric if an edge carries the "
        f"corrupt output. Dashed lines have positive scores. {int(scores.scored.sum()):,} edges have scores."
    )
    if kept is None:
        return text
    best = int(np.argmax(kept.kept >= 0.8)) if (kept.kept >= 0.8).any() else len(kept.kept) - 1
    return (
        f"{text} {kept.sizes[best]:,} edges keep {kept.kept[best]:.2f} of the difference, and as many random edges "
        f"{round(float(kept.random[best]), 2) + 0.0:.2f}."
    )


def _data(scores: EdgeScores, kept: Faithfulness | None, shown: int, most: int) -> dict[str, Any]:
    graph = scores.graph
    writers, readers = graph.writers, graph.readers
    edges = scores.greedy_order()[:most]
    data: dict[str, Any] = {
        "layers": graph.num_layers, "heads": graph.num_heads, "kv_heads": graph.num_kv_heads, "shown": shown,
        "total": int(scores.scored.sum()),
        "edges": [[writers[w], readers[r], float(f"{scores.scores[r, w]:.4g}")] for r, w in edges],
        "kept": None,
    }  # fmt: skip
    if kept is not None:
        rounded = lambda values: [float(f"{value:.4g}") for value in values]
        low, high = kept.interval.T
        data["kept"] = {"sizes": kept.sizes.tolist(), "kept": rounded(kept.kept), "random": rounded(kept.random)}
        data["kept"] |= {"low": rounded(low), "high": rounded(high)}
    return data


def _filled(name: str, slots: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], _read(name))


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
