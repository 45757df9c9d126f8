"""The report of one run: a single self-contained HTML file, and its figures as PNG and SVG.

Text, tables and figures are written here and need no JavaScript; ``jattn.reports`` shows the heads' weights, step by
step, and their scores; ``figures.js`` reads out the marks of figures. ``sections.html`` has ``{{slots}}``.
"""

import html
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jattn.reports._html_page import Page
from jattn_experiments.report.curves import in_unit
from jattn_experiments.report.data import heads, numbers, views
from jattn_experiments.report.figures import write_figures
from jattn_experiments.report.plot_data import control_rows
from jattn_experiments.report.svg import inline, shades
from jattn_experiments.runs.findings import Findings, plain
from jattn_experiments.runs.folder import write_atomically

HERE = Path(__file__).parent
PAGE_BUDGET = 4_980_000  # letters of the page, nearly all of one byte
WEIGHT_BUDGET = 12_000_000  # bytes of attention weights before they are compressed, to a third or less


def write_report(findings: Findings, out: Path) -> Path:
    """Writes ``out/report.html`` and the figures in ``out/figures``; returns the report's path."""
    drawn = {path.stem: path for path in write_figures(findings, out / "figures") if path.suffix == ".svg"}
    drawn.pop("heads", None)  # the page shows them at every step
    matched = "Heads of other seeds are matched to the first seed's by their scores and their ablations."
    slots = {
        "first_seed": _text(findings.seeds[0]),
        "matched_note": matched if len(findings.seeds) > 1 else "",
        "controls": _controls(findings),
        "about": _about(findings),
    }
    for name, path in drawn.items():
        slots[f"{name}_figure"] = f"<figure>{inline(path.read_text(encoding='utf-8'), name)}</figure>"
    sections = _with_figures((HERE / "sections.html").read_text(encoding="utf-8"), drawn)
    after = re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], sections)  # one pass: values may have braces
    lead = f'<p>{_text(findings.description)}</p><p class="soft">{_text(_summary(findings))}</p>'
    shown, note = views(findings, WEIGHT_BUDGET)
    page = Page(
        plain(findings.name),
        heads(findings),
        [plain(name) for name in findings.scores],
        numbers(findings),
        shown,
        note=f"Seed {findings.seeds[0]}. {note}",
        numbers_note=f"Scores of seed {findings.seeds[0]} at the step shown above.",
        before=lead + _claims(findings) + _heads(findings),
        after=after,
        style=f":root {{ {shades()} }}\n" + (HERE / "style.css").read_text(encoding="utf-8"),
        script=(HERE / "figures.js").read_text(encoding="utf-8"),
    )
    path = out / "report.html"
    write_atomically(path, page.html(PAGE_BUDGET).encode())
    return path


def _text(value: object) -> str:
    return html.escape(str(value))


def _figure(value: Any) -> str:
    """A number as text; a list as its median."""
    if value is None or isinstance(value, str) or not np.size(value):
        return _text(value or "–")
    number = float(np.median(np.asarray(value, float)))
    return f"{number:.4g}" if np.isfinite(number) else str(number)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def _summary(findings: Findings) -> str:
    parts = [f"{len(findings.seeds)} seed{'s' * (len(findings.seeds) > 1)}", f"{int(findings.look_steps[-1])} steps"]
    parts += [f"{key} {findings.environment[key]}" for key in ("device", "seconds") if key in findings.environment]
    return " · ".join(parts)


def _claims(findings: Findings) -> str:
    if not findings.claims:
        return ""
    held = sum(bool(claim["holds"]) for claim in findings.claims)
    cards = []
    for claim in findings.claims:
        verdict = ("good", "✓ holds") if claim["holds"] else ("bad", "✗ fails")
        facts = {
            "median" if len(claim["values"]) > 1 else "number": _figure(claim["values"]),
            "threshold": f"{_text(claim['side'])} {_figure(claim['threshold'])}",
            **({claim["reference_name"]: _figure(claim["reference"])} if len(claim["reference"]) else {}),
            "seeds passed": f"{len(claim['passed'])} of {len(claim['values'])}, {_text(claim['needed'])} needed",
        }
        if claim["rate"] is not None:
            low, high = claim["rate"]
            facts["share that passes (95%)"] = f"{low:.0%} to {high:.0%}"
            facts["would hold again"] = f"{claim['again']:.0%}"
        fresh = claim.get("replication")
        if fresh:
            said = "holds" if fresh["holds"] else "fails"
            facts["fresh seeds passed"] = f"{len(fresh['passed'])} of {len(fresh['values'])}: {said}"
        rows = "".join(
            f'<div><dt>{_text(name)}</dt><dd class="number">{fact}</dd></div>' for name, fact in facts.items()
        )
        name = f'<span class="verdict {verdict[0]}">{verdict[1]}</span><strong>{_text(plain(claim["name"]))}</strong>'
        cards.append(
            f'<article class="claim{"" if claim["holds"] else " fails"}"><header>{name}</header>'
            f'<p>{_text(claim["statement"])}</p><dl class="facts">{rows}</dl>'
            f"{_claim_strip(claim, fresh or {})}</article>"
        )
    key = "● seed that passed · ✕ seed that failed · ○ untrained models, or other heads · vertical line: threshold"
    if any("replication" in claim for claim in findings.claims):
        key += " · below it the same for fresh seeds"
    title = f"<h2>Claims: {held} of {len(findings.claims)} hold</h2>"
    return f'<section id="claims">{title}<p class="soft">{key}</p>{"".join(cards)}</section>'


def _claim_strip(claim: Mapping[str, Any], fresh: Mapping[str, Any]) -> str:
    """The claim's seeds on a line, and the ``fresh`` ones, if there are any, on another of the same scale."""
    strips = [_claim_marks(row) for row in ((claim, {**claim, **fresh}) if fresh else (claim,))]
    scale = [value for marks in strips for value, _, _ in marks]
    return "".join(_strip(marks, scale=scale) for marks in strips)


def _claim_marks(claim: Mapping[str, Any]) -> list[tuple[float, str, str]]:
    others, name = np.atleast_1d(np.asarray(claim["reference"], float)), claim["reference_name"]
    marks = [(value, "untrained", f"{name}: {value:.4g}") for value in others]
    for seed, value in zip(claim["seeds"], np.asarray(claim["values"], float), strict=True):
        marks.append((value, "seed" if seed in claim["passed"] else "lost", f"seed {seed}: {value:.4g}"))
    marks.append((float(claim["threshold"]), "limit", f"threshold: {claim['threshold']:.4g}"))
    return marks


def _strip(marks: Sequence[tuple[float, str, str]], small: bool = False, scale: Sequence[float] = ()) -> str:
    """Marks ``(value, kind, text)`` on a line as wide as the page allows; a small strip has no numbers.

    ``scale``: values that the line must have room for; those of the marks by default.
    """
    values = np.array(scale or [value for value, _, _ in marks])
    values = values[np.isfinite(values)]
    low, high = (0.0, 1.0) if in_unit(values) else (min(values.min(), 0.0), max(values.max(), 0.0))
    shapes = {
        "seed": '<circle class="seed" r="4.5"/>',
        "lost": '<path class="lost" d="M-4.5 -4.5L4.5 4.5M-4.5 4.5L4.5 -4.5"/>',
        "untrained": '<circle class="untrained" r="4.5"/>',
        "limit": '<path class="limit" d="M0 -10V10"/>',
    }
    drawn = []
    for i, (value, kind, text) in enumerate(marks):
        if np.isfinite(value):
            x = 2 + 96 * (value - low) / (high - low)
            y = 12 + (0 if small or kind not in ("seed", "lost") else (i % 3 - 1) * 4)  # equal seeds stay countable
            drawn.append(
                f'<svg x="{x:.2f}%" y="{y}" overflow="visible">{shapes[kind]}<title>{_text(text)}</title></svg>'
            )
    if not small:
        drawn.append(f'<text x="2%" y="34">{low:g}</text><text x="98%" y="34" text-anchor="end">{high:g}</text>')
    axis = '<line class="axis" x1="2%" x2="98%" y1="12" y2="12"/>'
    return f'<svg class="strip" height="{24 if small else 36}" aria-hidden="true">{axis}{"".join(drawn)}</svg>'


def _heads(findings: Findings) -> str:
    if not findings.heads:
        return ""
    rows = []
    for row in findings.heads:
        score, null = row["score"], row["null"]
        marks = [(null, "untrained", f"null: {_figure(null)}")] if _is_number(null) else []
        marks += [(score, "seed", f"score: {_figure(score)}")] if _is_number(score) else []
        bar = _strip(marks, small=True) if marks else ""
        cells = "".join(f'<td class="number">{_text(row[key])}</td>' for key in ("seed", "layer", "head"))
        cells += f"<td>{_text(plain(row['role']))}</td>"
        cells += "".join(f'<td class="number">{_score(value)}</td>' for value in (score, null))
        p_value = row["p_value"]
        cells += f'<td class="number">{f"{p_value:.3g}" if _is_number(p_value) else _figure(p_value)}</td>'
        rows.append(f'<tr>{cells}<td class="meter">{bar}</td></tr>')
    names = "".join(f'<th class="number">{name}</th>' for name in ("seed", "layer", "head"))
    names += "<th>role</th>" + "".join(f'<th class="number">{name}</th>' for name in ("score", "null", "p-value"))
    names += '<th class="meter">○ null · ● score</th>'
    note = (
        '<p class="soft">A head has a role if its score exceeds the null, the score heads without it may reach; a weak '
        "one is not above what is usual in its model. A click on a column's name sorts by it.</p>"
    )
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<section id="heads-table"><h2>Heads</h2>{note}<div class="scroll" tabindex="0">{table}</div></section>'


def _score(value: Any) -> str:
    return f"{value:.3f}" if _is_number(value) else _figure(value)


def _with_figures(page: str, names: Collection[str]) -> str:
    """The template without the sections of figures that are missing, and with sections for those without one."""
    section = re.compile(r'<section id="(\w+)" class="drawn">.*?</section>\n', re.DOTALL)
    more = sorted(set(names) - set(section.findall(page)))
    page = section.sub(lambda found: found[0] if found[1] in names else "", page)
    added = '<section id="{0}" class="drawn"><h2 id="{0}-title">{0}</h2>{{{{{0}_figure}}}}</section>'
    return page.replace("{{more}}", "\n".join(added.format(name) for name in more))


def _controls(findings: Findings) -> str:
    rows = []
    for metric, controls in control_rows(findings).items():
        for row in controls:
            cells = f'<td>{_text(plain(row["name"]))}</td><td class="number">{_text(row.get("parameters", ""))}</td>'
            rows.append(f'<tr>{cells}<td>{_text(metric)}</td><td class="number">{_figure(row["values"])}</td></tr>')
    names = '<th>control</th><th class="number">parameters</th><th>metric</th><th class="number">median</th>'
    return f'<div class="scroll" tabindex="0"><table><tr>{names}</tr>{"".join(rows)}</table></div>'


def _about(findings: Findings) -> str:
    def table(rows: Mapping[str, object]) -> str:
        return (
            "<table>"
            + "".join(f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in rows.items())
            + "</table>"
        )

    environment = f"<h2>Environment</h2>{table(findings.environment)}"
    return f'<section id="about">{environment}<h2>Config</h2>{table(_flat(findings.config))}</section>'


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """The config with dotted keys, as on the command line."""
    rows: dict[str, object] = {}
    for key, value in config.items():
        rows |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return rows
