"""Finds circuits: scores the edges between outputs and inputs, and tests whether a few edges suffice."""

from jattn.circuits._attribution import edge_attribution, mean_outputs
from jattn.circuits._edge_scores import EdgeScores
from jattn.circuits._faithfulness import Faithfulness, faithfulness, run_circuit
from jattn.circuits._graph import Graph, graph_of
from jattn.circuits._page import CircuitReport, circuit_report
from jattn.circuits._parts import CircuitModel
from jattn.circuits._runs import Outputs

__all__ = [
    "CircuitModel",
    "CircuitReport",
    "EdgeScores",
    "Faithfulness",
    "Graph",
    "Outputs",
    "circuit_report",
    "edge_attribution",
    "faithfulness",
    "graph_of",
    "mean_outputs",
    "run_circuit",
]
