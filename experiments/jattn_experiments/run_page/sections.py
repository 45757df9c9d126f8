"""The page's tables and claims as HTML, from the JSON that is kept of a run."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jattn.heads import MIXED, WEAK
from jattn.heads._roles import RISE
from jattn_experiments.run_page.curves import in_unit
from jattn_experiments.run_page.plot_data import by_metric
from jattn_experiments.runs.findings import plain

SHAPES = {
    "seed": '<circle class="seed" r="4.5"/>',
    "lost": '<path class="lost" d="M-4.5 -4.5L4.5 4.5M-4.5 4.5L4.5 -4.5"/>',
    "untrained": '<circle class="untrained" r="4.5"/>',
    "limit": '<path class="limit" d="M0 -10V10"/>',
}


def escaped(value: object) -> str:
    """The value as text of the page."""
    return html.escape(str(value))


def _digits(value: Any) -> str:
    """A number as text; a list as its median."""
    if value is None or isinstance(value, str) or not np.size(value):
        return escaped(value or "–")
    number = float(np.median(np.asarray(value, float)))
    return f"{number:.4g}" if np.isfinite(number) else str(number)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def lead_section(name: str, description: str, changed: Sequence[str], facts: Sequence[str]) -> str:
    """The description of the run, how it differs from jattn's config of the same name, and short facts."""
    options = ""
    if changed:
        lines = "".join(f"<li>{escaped(line)}</li>" for line in changed)
        options = (
            f"<p><strong>Options differ</strong> from jattn's own config <code>{escaped(name)}</code>, which the text "
            f"below describes:</p><ul>{lines}</ul>"
        )
    return f'{options}<p>{escaped(description)}</p><p class="soft">{escaped(" · ".join(facts))}</p>'


def claims_section(claims: Sequence[Mapping[str, Any]]) -> str:
    """A card for each row of ``claims.json``; empty without claims."""
    if not claims:
        return ""
    key = "● seed that passed · ✕ seed that failed · ○ untrained models, or other heads · vertical line: threshold"
    if any("replication" in claim for claim in claims):
        key += " · second line: the same for fresh seeds"
    title = f"<h2>Claims: {sum(bool(claim['holds']) for claim in claims)} of {len(claims)} hold</h2>"
    return f'<section id="claims">{title}<p class="soft">{key}</p>{"".join(map(_card, claims))}</section>'


def _card(claim: Mapping[str, Any]) -> str:
    colour, verdict = ("good", "✓ holds") if claim["holds"] else ("bad", "✗ fails")
    rows = "".join(
        f'<div><dt>{escaped(name)}</dt><dd class="number">{fact}</dd></div>' for name, fact in _facts(claim).items()
    )
    name = f'<span class="verdict {colour}">{verdict}</span><strong>{escaped(plain(claim["name"]))}</strong>'
    return (
        f'<article class="claim{"" if claim["holds"] else " fails"}"><header>{name}</header>'
        f'<p>{escaped(claim["statement"])}</p><dl class="facts">{rows}</dl>{_seed_lines(claim)}</article>'
    )


def _facts(claim: Mapping[str, Any]) -> dict[str, str]:
    facts = {
        "median" if len(claim["values"]) > 1 else "number": _digits(claim["values"]),
        "threshold": f"{escaped(claim['side'])} {_digits(claim['threshold'])}",
        **({claim["reference_name"]: _digits(claim["reference"])} if len(claim["reference"]) else {}),
        "seeds passed": f"{len(claim['passed'])} of {len(claim['values'])}, {escaped(claim['needed'])} needed",
    }
    if claim["rate"] is not None:
        low, high = claim["rate"]
        facts["share of seeds that pass (95% interval)"] = f"{low:.0%} to {high:.0%}"
        facts["probability to hold on other seeds"] = f"{claim['again']:.0%}"
    if fresh := claim.get("replication"):
        verdict = "holds" if fresh["holds"] else "fails"
        facts["fresh seeds passed"] = f"{len(fresh['passed'])} of {len(fresh['values'])}: {verdict}"
    return facts


def _seed_lines(claim: Mapping[str, Any]) -> str:
    """The claim's seeds on a line, and the fresh seeds, if any, on a second line with the same scale."""
    fresh = claim.get("replication")
    lines = [_claim_marks(row) for row in ((claim, {**claim, **fresh}) if fresh else (claim,))]
    scale = [value for marks in lines for value, _, _ in marks]
    return "".join(_line(marks, scale=scale) for marks in lines)


def _claim_marks(claim: Mapping[str, Any]) -> list[tuple[float, str, str]]:
    others, name = np.atleast_1d(np.asarray(claim["reference"], float)), claim["reference_name"]
    marks = [(value, "untrained", f"{name}: {value:.4g}") for value in others]
    for seed, value in zip(claim["seeds"], np.asarray(claim["values"], float), strict=True):
        marks.append((value, "seed" if seed in claim["passed"] else "lost", f"seed {seed}: {value:.4g}"))
    return [*marks, (float(claim["threshold"]), "limit", f"threshold: {claim['threshold']:.4g}")]


def _line(marks: Sequence[tuple[float, str, str]], small: bool = False, scale: Sequence[float] = ()) -> str:
    """Marks ``(value, shape, text)`` on a line as wide as the page allows; a small line has no numbers.

    ``scale``: values that the line must have room for; those of the marks by default.
    """
    values = np.array(scale or [value for value, _, _ in marks])
    values = values[np.isfinite(values)]
    low, high = (0.0, 1.0) if in_unit(values) else (min(values.min(), 0.0), max(values.max(), 0.0))
    parts = ['<line class="axis" x1="2%" x2="98%" y1="12" y2="12"/>']
    for i, (value, shape, text) in enumerate(marks):
        if np.isfinite(value):
            x = 2 + 96 * (value - low) / (high - low)
            y = 12 + (0 if small or shape not in ("seed", "lost") else (i % 3 - 1) * 4)  # equal seeds stay countable
            title = f"<title>{escaped(text)}</title>"
            parts.append(f'<svg x="{x:.2f}%" y="{y}" overflow="visible">{SHAPES[shape]}{title}</svg>')
    if not small:
        parts.append(f'<text x="2%" y="34">{low:g}</text><text x="98%" y="34" text-anchor="end">{high:g}</text>')
    return f'<svg class="strip" height="{24 if small else 36}" aria-hidden="true">{"".join(parts)}</svg>'


def heads_section(heads: Sequence[Mapping[str, Any]], trained: bool) -> str:
    """The table of heads; empty without them. ``trained``: whether their scores were followed in training."""
    if not heads:
        return ""
    names = "".join(f'<th class="number">{name}</th>' for name in ("seed", "layer", "head"))
    names += "<th>role</th>" + "".join(f'<th class="number">{name}</th>' for name in ("score", "null", "p-value"))
    names += '<th class="meter">○ null · ● score</th>'
    others = " They come from other, more sequences than the scores followed in training." if trained else ""
    note = (
        f'<p class="soft">Scores are shares from 0 to 1.{others} A head has a role if its score exceeds the null, the '
        "score that heads without the role can reach. A weak role (grey) exceeds the null by less than a tenth "
        "of the distance from the null to 1, or is not unusual in its model. Click a column name to sort.</p>"
    )
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(map(_head_row, heads))}</tbody></table>"
    return f'<section id="heads-table"><h2>Heads</h2>{note}<div class="scroll" tabindex="0">{table}</div></section>'


def _head_row(row: Mapping[str, Any]) -> str:
    score, null, p_value = row["score"], row["null"], row["p_value"]
    marks = [(null, "untrained", f"null: {_digits(null)}")] if _is_number(null) else []
    marks += [(score, "seed", f"score: {_digits(score)}")] if _is_number(score) else []
    cells = "".join(f'<td class="number">{escaped(row[key])}</td>' for key in ("seed", "layer", "head"))
    clear = not (row["role"] == MIXED or row["role"].startswith(WEAK))
    small = (
        _is_number(score) and _is_number(null) and score < null + RISE * (1 - null)
    )  # older runs may have such heads without the label
    style = "" if clear and not small else ' class="soft"'
    cells += f"<td{style}>{escaped(plain(row['role']))}</td>"
    for value, places in ((score, ".3f"), (null, ".3f"), (p_value, ".3g")):
        cells += f'<td class="number">{format(value, places) if _is_number(value) else _digits(value)}</td>'
    return f'<tr>{cells}<td class="meter">{_line(marks, small=True) if marks else ""}</td></tr>'


def controls_table(controls: Sequence[Mapping[str, Any]]) -> str:
    """The controls' medians, by metric."""
    rows = []
    for metric, same in by_metric(controls).items():
        for row in same:
            name, parameters = escaped(plain(row["name"])), escaped(row.get("parameters", ""))
            cells = f'<td>{name}</td><td class="number">{parameters}</td><td>{escaped(metric)}</td>'
            rows.append(f'<tr>{cells}<td class="number">{_digits(row["values"])}</td></tr>')
    names = '<th>control</th><th class="number">parameters</th><th>metric</th><th class="number">median</th>'
    return f'<div class="scroll" tabindex="0"><table><tr>{names}</tr>{"".join(rows)}</table></div>'


def about_section(environment: Mapping[str, object], config: Mapping[str, Any]) -> str:
    """The versions and the config."""
    versions = {name: "–" if value is None else value for name, value in environment.items()}
    tables = f"<h2>Environment</h2>{_pairs(versions)}<h2>Config</h2>{_pairs(_flat(config))}"
    return f'<section id="about">{tables}</section>'


def _pairs(rows: Mapping[str, object]) -> str:
    cells = (f"<tr><td>{escaped(name)}</td><td>{escaped(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """The config with dotted keys, as on the command line."""
    rows: dict[str, object] = {}
    for key, value in config.items():
        rows |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return rows
