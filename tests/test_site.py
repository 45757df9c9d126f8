"""The site as a reader opens it: from a folder, in Chromium, at any width, by day and night, with its search."""

import html
import json
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from docs.site.public_api import MODULES, public_names
from tests.web_page import browse

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
QUESTIONS = {  # what a stranger types, and a page among the first three results that answers it
    "Segments": "reference/jattn.masks.Segments.html",
    "padding mask": "reference/jattn.masks.Padding.html",
    "decode": "flax.html#decode",
    "which heads copy": "looking-inside.html",
    "out of memory": "long-context.html",
    "custom mask": "masks.html",
    "TPU": "accelerators.html",
    "KV cache": "flax.html",  # and words that docs/site/words.toml brings
    "GQA": "flax.html",
    "attention weights": "reference/jattn.attention_weights.html",
    "visualize attention": "report.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site; a build without warnings, or an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "docs" / "site" / "build.py", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "site"


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "conf.py").write_text("mine")
    command = [sys.executable, ROOT / "docs" / "site" / "build.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "is no site that was built here" in done.stderr, done.stderr
    assert [file.read_text() for file in tmp_path.rglob("*") if file.is_file()] == ["mine"]


def pages(site):
    return sorted(page for page in site.rglob("*.html") if "_modules" not in page.parts)


def links(page):
    text = page.read_text(encoding="utf-8")
    return [html.unescape(link) for link in re.findall(r'(?:href|src)="([^"]*)"', text)]


def test_every_public_name_has_a_page(site):
    names = [name for name in public_names() if name.rpartition(".")[0] in MODULES]
    assert [name for name in names if not (site / "reference" / f"{name}.html").exists()] == []
    texts = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    anchors = set(re.findall(r'<dt class="[^"]*" id="([^"]+)"', texts))
    assert public_names().keys() <= anchors


def test_nothing_points_out_of_the_folder_but_what_a_reader_clicks(site):
    for page in pages(site):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source|link)[^>]*?(?:src|href)="([^"]+)"', text)
        outside = [one for one in loaded if re.match(r"(https?:)?//", one)]
        assert not outside, (page.name, outside)


def test_every_link_arrives(site):
    anchors = {}
    for page in pages(site):
        for link in links(page):
            if re.match(r"[a-z]+:|//", link) or link in ("", "#"):
                continue
            file, _, anchor = urllib.parse.unquote(link).partition("#")
            target = (page.parent / file.partition("?")[0]).resolve() if file else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor and target.suffix == ".html":
                if target not in anchors:
                    anchors[target] = set(re.findall(r'\b(?:id|name)="([^"]+)"', target.read_text(encoding="utf-8")))
                assert anchor in anchors[target], f"{page.name}: {link}"


def test_the_contents_are_short_and_reach_every_page(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    tree = re.search(r'<div class="sidebar-tree">(.*?)</div>\s*</div>', text, re.DOTALL)[1]
    assert 1 <= len(re.findall(r'<li class="toctree-l1', tree)) <= 7
    reached = {urllib.parse.unquote(link.partition("#")[0]) for link in re.findall(r'href="([^"]+)"', tree)}
    special = {"genindex.html", "search.html", "index.html", "py-modindex.html"}
    written = {str(page.relative_to(site)) for page in pages(site)} - special
    assert {page for page in written - reached if not page.startswith("report-")} == set()


def test_no_page_is_large(site):
    """A page with all that it loads; reports are counted alone."""
    for page in pages(site):
        files = (link for link in links(page) if re.search(r"\.(js|css|png|svg)(\?|$)", link))
        local = (link.partition("?")[0] for link in files if not re.match(r"[a-z]+:", link))
        loaded = {page, *((page.parent / link).resolve() for link in local)}
        assert sum(file.stat().st_size for file in loaded if file.exists()) < 5e6, page.name


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_answers_without_a_server(site, tmp_path, question):
    dom, console = browse(site / "search.html", tmp_path, address="?q=" + urllib.parse.quote(question))
    results = re.search(r'id="search-results">(.*)', dom, re.DOTALL)[1]
    first = [html.unescape(link).partition("?")[0] for link in re.findall(r'<li[^>]*><a href="([^"]+)"', results)[:3]]
    assert any(link.startswith(QUESTIONS[question]) for link in first), first
    assert not console


# What a reader sees: nothing wider than the window, text of 14 pixels or more, and the colours of the theme.
LOOK = """<script>addEventListener("load", () => setTimeout(() => {
  const wide = [...document.querySelectorAll("article *")].filter((one) => {
    if (one.closest("pre, table, .math, .highlight, svg") || !one.offsetParent) return false;
    return one.getBoundingClientRect().right > innerWidth + 1;
  });
  const small = [...document.querySelectorAll("article p, article li")].filter((one) =>
    !one.closest("table, figcaption") && parseFloat(getComputedStyle(one).fontSize) < 14);
  const pre = document.createElement("pre");
  pre.id = "verdict";
  pre.textContent = JSON.stringify({ wide: wide.map((one) => one.outerHTML.slice(0, 80)), small: small.length,
    scroll: document.documentElement.scrollWidth <= innerWidth + 1, background: getComputedStyle(document.body).backgroundColor,
    color: getComputedStyle(document.body).color });
  document.body.append(pre);
}, 300));</script>"""


@pytest.mark.parametrize("night", [False, True], ids=["day", "night"])
@pytest.mark.parametrize(
    "name", ["index", "masks", "reference/jattn.dot_product_attention", "benchmarks", "experiments"]
)
@pytest.mark.parametrize("width", [390, 1100])  # of a phone, and of a window just wide enough for the contents
def test_a_page_is_readable_at_any_width(site, tmp_path, width, name, night):
    page = site / f"{name}.html"
    theme = "<script>localStorage.setItem('theme', '%s')</script>" % ("dark" if night else "light")
    copy = page.with_name(f"{page.stem}-{night}-driven.html")
    copy.write_text(page.read_text(encoding="utf-8").replace("<head>", f"<head>{theme}{LOOK}", 1), encoding="utf-8")
    try:
        dom, console = browse(copy, tmp_path, size=(width, 900))
    finally:
        copy.unlink()
    assert not console, console
    seen = json.loads(html.unescape(re.search(r'<pre id="verdict">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert seen["wide"] == [] and seen["small"] == 0 and seen["scroll"], seen
    background, ink = (sum(map(int, re.findall(r"\d+", seen[part])[:3])) for part in ("background", "color"))
    assert (background < ink) == night, seen
