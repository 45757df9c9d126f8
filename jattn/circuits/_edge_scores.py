"""Holds edge scores and selects circuits by them (``EdgeScores``)."""

import dataclasses
import heapq
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jattn.circuits._graph import Graph


@dataclasses.dataclass(frozen=True)
class EdgeScores:
    """The result of :func:`~jattn.circuits.edge_attribution`, as NumPy arrays.

    Attributes:
        graph: the names and the order of the readers R and writers W.
        scores: ``[R,W]``, the change in the metric when the edge carries the corrupt output, averaged over examples; 0
            for pairs that are not edges or were not scored.
        scored: bool ``[R,W]``: which edges were scored.
        clean, corrupt: ``[B]``, the metric of each example with all edges and with none.
        method: how the scores were computed.
        per_example: ``[B,R,W]``, the scores of each example, or None.

    Example:
        >>> graph = jattn.circuits.Graph(1, 1, 1)
        >>> scores = np.where(graph.edges, [[3.0, 0, 0], [0, 0, 0], [-1, 0, 0], [0, -2, 0], [0.5, -4, 0.1]], 0)
        >>> found = jattn.circuits.EdgeScores(graph, scores, graph.edges, np.ones(1), np.zeros(1), "eap")
        >>> graph.readers[0], [graph.readers[r] for r, w in np.argwhere(found.top(2))]
        ('query 0.0', ['query 0.0', 'logits'])
        >>> [graph.readers[r] for r, w in np.argwhere(found.greedy(2))]
        ['query 0.0', 'logits']
    """

    graph: Graph
    scores: np.ndarray
    scored: np.ndarray
    clean: np.ndarray
    corrupt: np.ndarray
    method: str
    per_example: np.ndarray | None = None

    def top(self, count: int) -> np.ndarray:
        """Bool ``[R,W]``: the ``count`` edges with the largest absolute scores."""
        return self._mask(self._ranked()[: self._checked(count)])

    def greedy(self, count: int) -> np.ndarray:
        """Bool ``[R,W]``: the first ``count`` edges of ``greedy_order``, or fewer if no more are connected."""
        return self._mask(self.greedy_order()[: self._checked(count)])

    def greedy_order(self) -> np.ndarray:
        """Integers ``[E,2]``: the reader and writer of each edge, from the logits backwards.

        Each step adds the edge with the largest absolute score among those into readers already in the circuit, so that
        every edge lies on a path to the logits. Source: Hanna et al., https://arxiv.org/abs/2403.17806, section 3.
        """
        readers_of = self._readers_by_writer()
        strength, chosen, reached = np.abs(self.scores), [], set()
        heap: list[tuple[float, int, int]] = []

        def reach(reader: int) -> None:
            if reader not in reached:
                reached.add(reader)
                for writer in np.flatnonzero(self.scored[reader]):
                    heapq.heappush(heap, (-float(strength[reader, writer]), reader, int(writer)))

        reach(len(self.scores) - 1)
        while heap:
            _, reader, writer = heapq.heappop(heap)
            chosen.append((reader, writer))
            for other in readers_of.get(writer, ()):
                reach(other)
        return np.array(chosen, int).reshape(-1, 2)

    def to_json(self, count: int) -> str:
        """The graph and the first ``count`` edges of ``greedy_order``, as ``{"writer", "reader", "score"}``."""
        sizes = {name: getattr(self.graph, name) for name in ("num_layers", "num_heads", "num_kv_heads", "parallel")}
        edges = [{"writer": w, "reader": r, "score": score} for w, r, score in self._named(count)]
        metric = {"clean": float(self.clean.mean()), "corrupt": float(self.corrupt.mean())}
        return json.dumps({**sizes, "method": self.method, "metric": metric, "edges": edges}, indent=1)

    def to_graphviz(self, count: int) -> str:
        """The first ``count`` edges of ``greedy_order`` in Graphviz's DOT language, for ``dot -Tpdf``.

        An edge into a query, key or value leads to its head, or to a point shared by its heads.
        """
        edges = self._named(count)
        largest = max((abs(score) for *_, score in edges), default=1.0) or 1.0
        lines = ["digraph circuit {", "  rankdir=BT; node [shape=box, style=rounded, fontname=Helvetica];"]
        shared = self.graph.num_heads // self.graph.num_kv_heads
        for writer, reader, score in edges:
            kind, _, where = reader.partition(" ")
            node = f"head {where}" if kind == "query" or (kind in ("key", "value") and shared == 1) else reader
            if kind in ("key", "value") and shared > 1:
                layer, at = (int(part) for part in where.split("."))
                for head in range(at * shared, (at + 1) * shared):
                    lines.append(f'  "{reader}" -> "head {layer}.{head}" [style=dotted];')
            width = 0.3 + 4 * abs(score) / largest
            label = f"{kind} {score:+.3g}" if kind in ("query", "key", "value") else f"{score:+.3g}"
            lines.append(f'  "{writer}" -> "{node}" [penwidth={width:.2f}, label="{label}"];')
        return "\n".join([*dict.fromkeys(lines), "}"])

    def columns(self) -> dict[str, np.ndarray]:
        """The ``writer``, ``reader`` and ``score`` of every scored edge, largest absolute score first."""
        ranked = self._ranked()
        writers, readers = (np.array(names, object) for names in (self.graph.writers, self.graph.readers))
        return {
            "writer": writers[ranked[:, 1]],
            "reader": readers[ranked[:, 0]],
            "score": self.scores[ranked[:, 0], ranked[:, 1]],
        }

    def table(self, rows: int = 20) -> str:
        """The ``rows`` edges with the largest absolute scores as text, one per line."""
        gap = f"metric: clean {self.clean.mean():.4g}, corrupt {self.corrupt.mean():.4g}; {self.method}"
        columns = self.columns()
        first = zip(*(columns[name][:rows] for name in ("writer", "reader", "score")), strict=True)
        lines = [f"{writer:>12} -> {reader:12} {score:+.4g}" for writer, reader, score in first]
        left = len(columns["score"]) - rows
        return "\n".join([gap, *lines, *([f"and {left} more"] if left > 0 else [])])

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with one row per edge.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install jattn[pandas]; or use columns()") from None

        return pandas.DataFrame(self.columns())

    def _named(self, count: int) -> list[tuple[str, str, float]]:
        """The writer, reader and score of the first ``count`` edges of ``greedy_order``."""
        writers, readers = self.graph.writers, self.graph.readers
        order = self.greedy_order()[: self._checked(count)]
        return [(writers[w], readers[r], float(self.scores[r, w])) for r, w in order]

    def _ranked(self) -> np.ndarray:
        """``[E,2]``: the reader and writer of each scored edge, largest first; ties keep their order."""
        edges = np.argwhere(self.scored)
        return edges[np.argsort(-np.abs(self.scores[self.scored]), kind="stable")]

    def _mask(self, pairs: np.ndarray) -> np.ndarray:
        mask = np.zeros_like(self.scored)
        mask[pairs[:, 0], pairs[:, 1]] = True
        return mask

    def _checked(self, count: int) -> int:
        if not 0 <= count <= self.scored.sum():
            raise ValueError(f"count must be from 0 to {self.scored.sum()}, the number of scored edges, got {count}")
        return count

    def _readers_by_writer(self) -> Mapping[int, list[int]]:
        readers: dict[int, list[int]] = {}
        for reader in range(len(self.scores)):
            for writer in self.graph.heads_of(reader):
                readers.setdefault(int(writer), []).append(reader)
        return readers
