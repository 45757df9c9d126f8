"""A run's findings in the terminal: its heads, its claims, and how much its heads differ."""

from rich.table import Table

from experiments.report.panels import divergence_text
from experiments.runs.findings import Findings
from experiments.runs.terminal import Terminal
from jattn.heads.labels import MIXED, WEAK

MANY = 100  # heads; of more, only those with a role are printed


def show(findings: Findings) -> None:
    """Prints the tables of heads and claims."""
    console = Terminal()
    heads = Table("seed", "layer", "head", "role", "score", "null", "p", title="heads", title_justify="left")
    shown = findings.heads
    if len(shown) > MANY:
        shown = [row for row in shown if row["role"] != MIXED and not row["role"].startswith(WEAK)]
        heads.caption = f"and {len(findings.heads) - len(shown)} mixed or weak heads, which the report lists"
    for row in shown:
        numbers = (f"{row[key]:.3f}" for key in ("score", "null", "p_value"))
        heads.add_row(*(str(row[key]) for key in ("seed", "layer", "head", "role")), *numbers)
    claims = Table("claim", "worst", "threshold", "compared with", "seeds", "", title="claims", title_justify="left")
    for row in findings.claims:
        least = row["side"] == "at least"
        values = f"{min(row['values']) if least else max(row['values']):.4g}"
        reference = f"{max(row['reference']) if least else min(row['reference']):.4g}" if row["reference"] else "–"
        seeds = f"{len(row['passed'])} of {len(row['values'])}, {row['needed']} needed"
        holds = "[green]holds[/]" if row["holds"] else "[bold red]fails[/]"
        claims.add_row(row["name"], values, f"{row['side']} {row['threshold']:g}", reference, seeds, holds)
    for table in (heads, claims):
        console.print(table)
    for when, name in enumerate(("untrained", "trained")):
        console.print(f"divergence between heads, {name}: {divergence_text(findings, when)}", highlight=False)
