"""The search of the site: what it knows of every section, written as ``_static/sections.js`` for ``static/search.js``.

Sphinx's own search finds pages that hold every word of a query, so a question finds nothing. This one ranks sections by
how many of the words they hold and where: in the heading, in the title of the page, in ``words.toml``, in the text.
"""

import json
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

WORDS = Path(__file__).with_name("words.toml")


def write_sections(app: Sphinx, problem: Exception | None) -> None:
    """Called at the end of a build: writes the sections of all pages but those with ``nosearch``."""
    if problem or app.builder.name != "html":
        return
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    sections = []
    for page in sorted(app.env.found_docs - {name for name, about in app.env.metadata.items() if "nosearch" in about}):
        title = app.env.titles[page].astext()
        for section in app.env.get_doctree(page).findall(nodes.section):
            top = isinstance(section.parent, nodes.document)
            anchors = [""] if top else [*section["ids"], section.get("slug", "")]
            places = [page] if top else [f"{page}#{anchor}" for anchor in anchors]
            sections.append(
                {
                    "at": f"{page}.html" + (f"#{anchors[0]}" if anchors[0] else ""),
                    "heading": section[section.first_child_matching_class(nodes.title)].astext(),
                    "page": "" if top else title,
                    "words": [word for place in places for word in words["places"].pop(place, [])],
                    "text": " ".join(_texts(section)),
                }
            )
    for place in words["places"]:
        logging.getLogger(__name__).warning("words.toml: no such page or heading: %s", place)
    data = json.dumps({"synonyms": words["synonyms"], "sections": sections}, ensure_ascii=False, separators=(",", ":"))
    (Path(app.outdir) / "_static" / "sections.js").write_text(f"const SITE = {data};\n", encoding="utf-8")


def _texts(section: nodes.section) -> list[str]:
    """The text of a section without its heading and the sections below it."""
    parts = [part for part in section.children if not isinstance(part, (nodes.section, nodes.title))]
    return [" ".join(part.astext().split()) for part in parts]
