"""The site as a reader opens it: from a folder, in Chromium, at any width, by day and night, with its search."""

import html
import json
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.parse
from pathlib import Path

import pytest

from docs.site.public_api import MODULES, public_names
from tests.web_page import browse

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
QUESTIONS = {  # what a stranger types, and the first results that answer it
    "how do I mask padding": ["masks.html#padding-mask"],
    "bfloat16 gradients": ["long-context.html#how-exact-are-gradients-in-bfloat16"],
    "attention sinks": ["recipes/softmax-off-by-one.html"],
    "get attention weights from a fused kernel": ["answers.html#attention-weights-with-fused-attention"],
    "cross attention cache": ["flax.html#cross-attention-with-a-cache"],
    "out of memory": ["long-context.html#out-of-memory"],
    "left padding": ["flax.html#decode", "how-to.html#measure-a-left-padded-batch"],
    "sliding window mistral": ["masks.html#window-sizes", "reference/jattn.masks.SlidingWindow.html"],
    "which head copies": ["looking-inside.html#which-heads-copy"],
    "packed sequences": ["recipes/packed-documents.html"],
    "convert pytorch multiheadattention": ["how-to.html#convert-a-pytorch-multiheadattention"],
    "grouped query": ["flax.html#additional-options"],
    "flash attention flax": ["answers.html#flash-attention-in-flax"],
    "logit lens": ["how-to.html#logit-lens"],
    "edge attribution": ["circuits.html", "reference/jattn.circuits.edge_attribution.html"],
    "gguf gemma": ["flax.html#gguf-files"],
    "muon": ["recipes/muon.html"],
    "nan": ["answers.html#no-nan-from-fully-masked-rows"],
    "explicit sharding": ["how-to.html#train-on-several-devices-with-explicit-data-parallelism", "scale.html"],
    "cite": ["running.html#cite-a-run"],
}
MORE_QUESTIONS = {  # others, whose answer is among the first three results
    "Segments": ["reference/jattn.masks.Segments.html"],
    "padding mask": ["reference/jattn.masks.Padding.html"],
    "decode": ["flax.html#decode"],
    "custom mask": ["masks.html"],
    "TPU": ["accelerators.html"],
    "KV cache": ["flax.html"],
    "GQA": ["flax.html"],
    "attention weights": ["reference/jattn.attention_weights.html"],
    "visualize attention": ["report.html"],
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


ASK = """<script>addEventListener("load", () => {
  const pre = document.createElement("pre");
  pre.id = "verdict";
  pre.textContent = JSON.stringify(%s.map((query) => {
    show(query);
    return [...document.querySelectorAll("#search-results a")].slice(0, 3).map((link) => link.getAttribute("href"));
  }));
  document.body.append(pre);
});</script>"""


@pytest.fixture(scope="module")
def answers(site, tmp_path_factory):
    """The first three results of every query, as the page of the search ranks them."""
    queries = [*QUESTIONS, *MORE_QUESTIONS]
    page = site / "search-driven.html"
    text = (site / "search.html").read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", ASK % json.dumps(queries) + "</body>"), encoding="utf-8")
    try:
        dom, console = browse(page, tmp_path_factory.mktemp("search"))
    finally:
        page.unlink()
    assert not console, console
    found = json.loads(html.unescape(re.search(r'<pre id="verdict">(.*?)</pre>', dom, re.DOTALL)[1]))
    return dict(zip(queries, found, strict=True))


def test_the_search_puts_the_answer_first(answers):
    missed = {
        question: answers[question]
        for question, right in QUESTIONS.items()
        if not answers[question][0].startswith(tuple(right))
    }
    assert len(missed) <= 2, missed


def test_no_question_is_answered_by_its_own_entry():
    words = tomllib.loads((ROOT / "docs" / "site" / "words.toml").read_text(encoding="utf-8"))
    phrases = {phrase.lower() for phrases in words["places"].values() for phrase in phrases}
    assert not phrases & QUESTIONS.keys()
    scripts = "".join(
        (ROOT / "docs" / "site" / name).read_text(encoding="utf-8") for name in ("search.py", "static/search.js")
    )
    assert not [question for question in QUESTIONS if " " in question and question in scripts.lower()]


@pytest.mark.parametrize("question", MORE_QUESTIONS)
def test_the_search_has_the_answer_among_the_first_three(answers, question):
    right = tuple(MORE_QUESTIONS[question])
    assert any(link.startswith(right) for link in answers[question]), answers[question]


def test_the_search_answers_without_a_server(site, tmp_path):
    """With the query in the address, as the box on every page asks."""
    dom, console = browse(site / "search.html", tmp_path, address="?q=padding%20mask")
    assert not console, console
    (results,) = re.findall(r'<ol id="search-results">(.*?)</ol>', dom, re.DOTALL)
    assert "masks.html#padding-mask" in results and "<mark>" in results
    assert 'value="padding mask"' in dom or "sections, the best first" in dom


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


AXE = """<script>addEventListener("load", () => setTimeout(async () => {
  const seen = await axe.run(document, { resultTypes: ["violations"], preload: false });
  const pre = document.createElement("pre");
  pre.id = "verdict";
  pre.textContent = JSON.stringify(seen.violations.filter((one) => ["serious", "critical"].includes(one.impact)).map(
    (one) => [one.id, ...one.nodes.map((node) => node.html.slice(0, 120))]));
  document.body.append(pre);
}, 500));</script>"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """axe-core, which finds what hinders a reader with a screen reader or without a mouse."""
    if shutil.which("npm") is None:
        pytest.skip("no npm: axe-core cannot be installed")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--silent", "axe-core@4.14.1"]
    try:
        subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as reason:
        pytest.skip(f"axe-core cannot be installed: {reason}")
    return (
        (folder / "node_modules" / "axe-core" / "axe.min.js")
        .read_text(encoding="utf-8")
        .replace("</script", "<\\/script")
    )


@pytest.mark.parametrize("night", [False, True], ids=["day", "night"])
@pytest.mark.parametrize(
    "name",
    [
        "index", "start", "masks", "flax", "long-context", "what-to-call", "experiments", "search", "recipes/index",
        "reference/jattn.dot_product_attention", "report-copy", "report-smollm2",
    ],
)  # fmt: skip
def test_axe_finds_nothing_serious(site, tmp_path, axe, name, night):
    page = site / f"{name}.html"
    theme = "<script>localStorage.setItem('theme', '%s')</script>" % ("dark" if night else "light")
    copy = page.with_name(f"{page.stem}-{night}-axe.html")
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("<head>", f"<head>{theme}<script>{axe}</script>{AXE}", 1), encoding="utf-8")
    try:
        dom, _ = browse(copy, tmp_path, size=(1200, 900))
    finally:
        copy.unlink()
    assert json.loads(html.unescape(re.search(r'<pre id="verdict">(.*?)</pre>', dom, re.DOTALL)[1])) == []
