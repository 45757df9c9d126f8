"""The page of one run: a single self-contained HTML file, made from its findings or from their kept parts.

Text, tables and figures are written here and need no JavaScript; ``jattn.reports`` shows the heads' weights, step by
step, and their scores; ``figures.js`` reads out the marks of figures. ``sections.html`` has ``{{slots}}``.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn.reports._html_page import Page
from jattn_experiments.run_page.explorer import Explorer, explorer
from jattn_experiments.run_page.figures import write_figures
from jattn_experiments.run_page.sections import (
    about_section,
    claims_section,
    controls_table,
    escaped,
    heads_section,
    lead_section,
)
from jattn_experiments.run_page.summary import summary
from jattn_experiments.run_page.svg import inline, shades
from jattn_experiments.runs.findings import Findings, plain
from jattn_experiments.runs.folder import write_atomically

HERE = Path(__file__).parent
PAGE_BUDGET = 4_980_000  # most characters of the page, nearly all of one byte
WEIGHT_BUDGET = 12_000_000  # bytes of attention weights before they are compressed, to a third or less


@dataclasses.dataclass(frozen=True)
class RunPage:
    """The contents of a run's page.

    config, claims, summary: as kept in ``config.json``, ``claims.json`` and ``summary.json``.
    figures: SVG elements by name.
    """

    config: Mapping[str, Any]
    claims: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    figures: Mapping[str, str]
    explorer: Explorer

    def html(self) -> str:
        """The contents of the HTML file."""
        seeds, environment, shown = self.summary["seeds"], self.summary["environment"], self.explorer
        matched = "Heads of other seeds are matched to the first seed's heads by scores and ablations."
        slots = {
            "first_seed": escaped(seeds[0]),
            "matched_note": matched if len(seeds) > 1 else "",
            "controls": controls_table(self.summary["controls"]),
            "about": about_section(environment, self.config),
        }
        slots |= {f"{name}_figure": f"<figure>{svg}</figure>" for name, svg in self.figures.items()}
        sections = _with_figures(_read("sections.html"), self.figures)
        size = [f"{len(seeds)} seed{'s' * (len(seeds) > 1)}", f"{shown.last_step} steps"]
        size += [f"{key} {environment[key]}" for key in ("device", "seconds", "jattn") if key in environment]
        size += [f"commit {commit}"] if (commit := environment.get("commit")) else []
        changed, trained = self.summary.get("changed", []), "training" in self.figures
        followed = " They come from the sequences followed in training; the tables of heads use other, more sequences."
        lead = lead_section(self.summary["name"], self.config["description"], changed, size)
        page = Page(
            plain(self.summary["name"]) + " (changed)" * bool(changed),
            shown.heads,
            shown.columns,
            shown.numbers,
            shown.views,
            note=f"Seed {seeds[0]}. {shown.note()}",
            numbers_note=f"Scores of seed {seeds[0]} at the step shown above." + followed * trained,
            before=lead + claims_section(self.claims) + heads_section(self.summary["heads"], trained),
            # one pass: values may have braces
            after=re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], sections),
            style=f":root {{ {shades()} }}\n" + _read("style.css"),
            script=_read("figures.js"),
        )
        return page.html(PAGE_BUDGET)


def write_page(findings: Findings, out: Path) -> Path:
    """Writes ``out/report.html`` and the figures in ``out/figures``; returns the page's path."""
    figures = write_figures(findings, out / "figures")
    path = out / "report.html"
    write_atomically(path, run_page(findings, figures).html().encode())
    return path


def run_page(findings: Findings, figures: Iterable[Path]) -> RunPage:
    """The page of a run, with the ``figures`` that are SVG."""
    # the page shows the heads themselves at every step
    svgs = (file for file in figures if file.suffix == ".svg" and file.stem != "heads")
    elements = {file.stem: inline(file.read_text(encoding="utf-8"), file.stem) for file in svgs}
    shown = explorer(findings, WEIGHT_BUDGET)
    return RunPage(findings.config, findings.claims, summary(findings), elements, shown)


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _with_figures(page: str, names: Collection[str]) -> str:
    """The template without sections for missing figures, and with new sections for figures that have none."""
    section = re.compile(r'<section id="(\w+)" class="drawn">.*?</section>\n', re.DOTALL)
    more = sorted(set(names) - set(section.findall(page)))
    page = section.sub(lambda match: match[0] if match[1] in names else "", page)
    added = '<section id="{0}" class="drawn"><h2 id="{0}-title">{0}</h2>{{{{{0}_figure}}}}</section>'
    return page.replace("{{more}}", "\n".join(added.format(name) for name in more))
