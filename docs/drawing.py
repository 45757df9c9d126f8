"""Draws ``architecture.svg`` from ``architecture.md``: ``python docs/drawing.py``. A test holds the two together."""

import re
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.quiet { fill: #59636e; font-size: 12px }
.name { font-family: ui-monospace, monospace; font-size: 12px }
.layer { fill: #f6f8fa; stroke: #d1d9e0 }
.module { fill: #ffffff; stroke: #818b98 }
.step { fill: #ddf4ff; stroke: #54aeff }
.arrow { stroke: #59636e; stroke-width: 1.5; fill: none; marker-end: url(#head) }
#head path { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .quiet { fill: #9198a1 }
  .layer { fill: #151b23; stroke: #3d444d }
  .module { fill: #0d1117; stroke: #656c76 }
  .step { fill: #0c2d6b; stroke: #4493f8 }
  .arrow { stroke: #9198a1 }
  #head path { fill: #9198a1 }
}
"""
LAYERS = [
    "masks and score functions",
    "one head, and the checked call",
    "blockwise attention",
    "implementations",
    "calls, caches, devices, heads",
    "modules, models, pictures",
]
CHARACTER, BOX, GAP, ARROW, WIDTH = 7.4, 26, 6, 10, 560


def block(document: str, language: str) -> list[str]:
    """The lines of the fenced block of a language in a Markdown text."""
    fence = re.search(rf"^```{language}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert fence, f"no block of {language}"
    return fence[1].splitlines()


def layers(document: str, language: str = "layers") -> list[list[str]]:
    """The layers of jattn, or of "experiments", the lowest first, each a list of rows: modules side by side."""
    return [line.split(maxsplit=1)[1].split(" < ") for line in block(document, language)]


def allowed_imports(document: str, language: str) -> dict[str, str]:
    """What each package may import."""
    return dict(line.partition(":")[::2] for line in block(document, language))


def steps(document: str) -> list[tuple[str, str]]:
    """The files that a call walks through, in order, each with what happens there."""
    section = document.partition("## One call")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`:? ([^\n.;]+)", section, re.MULTILINE)


def draw(document: str) -> str:
    """The layers of jattn and one call, as SVG for light and dark pages."""
    shapes, y = [_text(0, 16, "jattn: imports point down", "title")], 34.0
    for number, rows in reversed(list(enumerate(layers(document)))):
        inner, height = _layer(rows, y + 26)
        shapes += [
            f'<rect class="layer" x="0" y="{y:g}" width="{WIDTH}" height="{height + 34:g}" rx="8"/>',
            _text(12, y + 18, f"{number}  {LAYERS[number]}", "quiet"),
            *inner,
        ]
        y += height + 34 + 8
    calls, top, left = steps(document), 34.0, WIDTH + 40
    bottom, y = max(y, top + len(calls) * (BOX + ARROW)), top
    shapes.append(_text(left, 16, "one call of dot_product_attention", "title"))
    pitch = (bottom - y - 8 - BOX) / max(len(calls) - 1, 1)
    for index, (file, what) in enumerate(calls):
        if index:
            shapes.append(f'<path class="arrow" d="M{left + 20} {y - pitch + BOX:g} V{y - 2:g}"/>')
        shapes += [
            f'<rect class="step" x="{left}" y="{y:g}" width="520" height="{BOX}" rx="6"/>',
            _text(left + 10, y + 17, file, "name"),
            _text(left + 215, y + 17, what, "quiet"),
        ]
        y += pitch
    marker = '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {left + 536} {bottom + 8:g}" width="{left + 536}">'
    title = "<title>The layers of jattn, and the files one call walks through</title>"
    defs = f'<defs>{marker}<path d="M0 0 8 4 0 8z"/></marker></defs>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", defs, *shapes, "</svg>", ""])


def _layer(rows: list[str], y: float) -> tuple[list[str], float]:
    """Boxes for the modules of a layer, the lowest row first, and the height they take."""
    shapes, x, top = [], 12.0, y
    for index, row in enumerate(rows):
        names = row.split()
        width = sum(len(name) * CHARACTER + 16 + GAP for name in names)
        if x + width + 14 > WIDTH:
            x, y = 12.0, y + BOX + GAP
        if index:
            shapes.append(_text(x + 1, y + 18, "<", "quiet"))
            x += 14
        for name in names:
            box = len(name) * CHARACTER + 16
            shapes.append(f'<rect class="module" x="{x:g}" y="{y:g}" width="{box:g}" height="{BOX}" rx="4"/>')
            shapes.append(_text(x + 8, y + 17, name, "name"))
            x += box + GAP
    return shapes, y + BOX - top


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(
        draw((HERE / "architecture.md").read_text(encoding="utf-8")), encoding="utf-8"
    )
