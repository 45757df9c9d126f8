"""A run's findings in the terminal: its heads, its claims, and how much its heads differ."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from jattn.heads import MIXED, WEAK
from jattn_experiments.run_page.plot_data import divergence_text
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.terminal import Terminal

MANY = 100  # heads; of more, only those with a role are printed


def show(findings: Findings) -> None:
    """Prints the tables of heads and claims."""
    console = Terminal()
    heads = Table("seed", "layer", "head", "role", "score", "null", "p", title="heads", title_justify="left")
    shown = findings.heads
    if len(shown) > MANY:
        shown = [row for row in shown if row["role"] != MIXED and not row["role"].startswith(WEAK)]
        heads.caption = f"{len(findings.heads) - len(shown)} mixed or weak heads are only in the report"
    for row in shown:
        numbers = (f"{row[key]:.3f}" for key in ("score", "null", "p_value"))
        heads.add_row(*(str(row[key]) for key in ("seed", "layer", "head", "role")), *numbers)
    claims = Table("claim", "worst", "threshold", "compared with", "seeds", "", title="claims", title_justify="left")
    for row in findings.claims:
        best = np.max if row["side"] == "at least" else np.min
        reference = f"{best(row['reference']):.4g}" if row["reference"] else "–"
        threshold = f"{row['side']} {row['threshold']:g}"
        claims.add_row(row["name"], _worst(row, row), threshold, reference, _passed(row), _verdict(row))
    again = Table("claim", "worst", "seeds", "", "again", title="claims on fresh seeds", title_justify="left")
    again.caption = "again: the probability that the claim holds on as many other seeds, estimated from the first ones"
    for row in findings.claims:
        if fresh := row.get("replication"):
            sure = "–" if row["again"] is None else f"{row['again']:.0%}"
            again.add_row(row["name"], _worst(row, fresh), _passed(fresh), _verdict(fresh), sure)
    for table in (heads, claims, again):
        if table.rows or table is not again:
            console.print(table)
    for when, name in enumerate(("untrained", "trained")):
        console.print(f"divergence between heads, {name}: {divergence_text(findings, when)}", highlight=False)


def _worst(claim: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    worst = np.min if claim["side"] == "at least" else np.max  # Python's min and max lose NaN
    return f"{worst(row['values']):.4g}"


def _passed(row: Mapping[str, Any]) -> str:
    return f"{len(row['passed'])} of {len(row['values'])}, {row['needed']} needed"


def _verdict(row: Mapping[str, Any]) -> str:
    return "[green]holds[/]" if row["holds"] else "[bold red]fails[/]"
