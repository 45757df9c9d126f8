"""Builds the site: ``make docs``, or ``python docs/site/build.py [FOLDER]`` with ``jattn[docs]`` installed.

The pages are those of docs/, with what only a site has from docs/site/pages; one page for every public name; the tables
of every kept benchmark; and the reports of the kept runs, written from what is kept of each. They are arranged in
FOLDER/site-source, from which Sphinx builds FOLDER/site; FOLDER is build. A warning, a broken link or a public name
without a page fails the build. No example is executed.
"""

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
OUT = Path(sys.argv[1] if len(sys.argv) > 1 and __name__ == "__main__" else ROOT / "build")
SOURCE, SITE = OUT / "site-source", OUT / "site"
sys.path[:0] = [str(ROOT), str(ROOT / "experiments"), str(HERE)]

import yaml
from reference import list_modules, write_reference

from docs.site.public_api import MODULES, public_names
from jattn_experiments.run_page.keep import PAGE, kept_page

# The entries at the top of the contents, and the pages below each.
SHORT = {"looking-inside": "Look inside", "experiments": "Experiments"}
CONTENTS = {
    "start": [],
    "guides": [
        "what-to-call",
        "how-to",
        "coming-from",
        "step-by-step",
        "masks",
        "flax",
        "long-context",
        "language-model",
        "your-own-model",
        "scale",
        "accelerators",
    ],
    "looking-inside": ["report", "survey", "circuits"],
    "recipes/index": ["recipes/*", "answers", "ground"],
    "experiments": ["running", "published", "reports", "published_log", "log"],
    "benchmarks": ["results/*/*"],
    "reference": [*(f"reference/{module}" for module in MODULES), "architecture", "extending", "project/*"],
}
# Languages of blocks that only our own tests know.
LANGUAGES = {"check": "bash", "layers": "text", "experiments": "text", "tools": "text", "output": "text"}
IMAGES = {".png", ".svg"}
LINK = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?P<target>[^)\s]+)(?P<after>\))")
FENCE = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Builds the site; returns the exit status."""
    if SITE.exists() and not (SITE / "objects.inv").exists():  # docs/site, for one
        print(f"error: {SITE} is no site that was built here; remove it or choose another folder", file=sys.stderr)
        return 2
    shutil.rmtree(SOURCE, ignore_errors=True)
    (SOURCE / "extra").mkdir(parents=True)
    problems = stage()
    write_reference(SOURCE / "reference")
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    from sphinx.cmd.build import build_main

    shutil.rmtree(SITE, ignore_errors=True)
    options = ["-D", f"html_extra_path={SOURCE / 'extra'}", "-c", str(HERE)]
    return build_main(["-q", "-W", "--keep-going", "-j", "auto", *options, str(SOURCE), str(SITE)])


def project_urls() -> dict[str, str]:
    """The project's addresses, which pyproject.toml states once."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]


def links_outward(text: str, file: Path) -> str:
    """Links of ``file`` as they are read from elsewhere: to the site's pages, or to the repository."""
    pages, urls = page_files(), project_urls()

    def new(link: re.Match) -> str:
        target, hash_, anchor = link["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return link[0]
        path = (file.parent / target).resolve()
        where = f"{urls['Documentation']}/{pages[path]}.html" if path in pages else _in_repository(path)
        return f"{link['before']}{where}{hash_}{anchor}{link['after']}"

    return LINK.sub(new, text)


def _in_repository(path: Path) -> str:
    return f"{project_urls()['Repository']}/blob/main/{path.relative_to(ROOT)}"


def page_files() -> dict[Path, str]:
    """Every Markdown file that becomes a page, with the page's name."""
    pages = {ROOT / "README.md": "index"} | {file: file.stem for file in (HERE / "pages").glob("*.md")}
    pages |= {file: str(file.relative_to(ROOT / "docs").with_suffix("")) for file in (ROOT / "docs").glob("*.md")}
    pages |= {file: f"recipes/{file.stem}" for file in (ROOT / "docs" / "recipes").glob("*.md")}
    results = ROOT / "experiments" / "results"
    pages |= {file: f"results/{file.parent.name}/{file.stem}" for file in results.glob("*/*.md")}
    pages[ROOT / "experiments" / "published_log.md"] = "published_log"
    pages[ROOT / "experiments" / "log.md"] = "log"
    return pages | {
        ROOT / f"{name}.md": f"project/{name.lower()}" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")
    }


def stage() -> list[str]:
    """Writes every page to ``SOURCE`` with its links put right; returns what is broken."""
    pages, problems, reports = page_files(), [], _write_reports()
    for file, page in pages.items():
        text = file.read_text(encoding="utf-8")
        if file.parent.parent.name == "results":  # whose folder's name has machine and date
            title, rest = re.fullmatch(r"(?:# ([^\n]*)\n)?(.*)", text, re.DOTALL).groups()
            where = f"{file.parent.name}/{file.stem}" if "-" in file.stem else file.parent.name
            text = f"# {title or file.stem.capitalize()}: {where}\n\n{rest}"
        text = _outside_code(
            text, lambda part, file=file: _link_names(_relink(part, file, pages, problems), file, pages)
        )
        text = _with_reports(text)
        if below := list(CONTENTS) if page == "index" else CONTENTS.get(page):
            text += contents(below, set(pages.values()))
        if page.startswith(("project/", "results/")) or page.endswith("log"):  # they hold any word that one looks for
            text = f"---\nnosearch: true\n---\n\n{text}"
        if opened := _notebook(page):
            title, _, rest = text.partition("\n")
            text = f"{title}\n\n{opened}\n{rest}"
        text = text.replace("\nREPORTS\n", reports).replace("\nMODULES\n", list_modules())
        target = SOURCE / f"{page}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    if not kept_runs():
        problems.append(f"no kept run has a {PAGE}: the page of live reports would be empty")
    return problems


def _with_reports(text: str) -> str:
    """``text`` with a link to its live report below the heading of an experiment."""
    kept = {run.name for run in kept_runs()}

    def link(heading: re.Match) -> str:
        name = heading[1]
        return f'{heading[0]}\n\n<a href="report-{name}.html">Live report</a>' if name in kept else heading[0]

    return re.sub(r"^## .*\(`jattn run (\w+)`.*$", link, text, flags=re.MULTILINE)


def _notebook(page: str) -> str:
    """Links to the notebook of a page, if it has one."""
    file = ROOT / "docs" / "notebooks" / f"{page}.ipynb"
    if not file.exists():
        return ""
    shown = _in_repository(file)
    opened = shown.replace("https://github.com/", "https://colab.research.google.com/github/")
    return f"[Open in Colab]({opened}) | [the notebook]({shown})"


def kept_runs() -> list[Path]:
    """The folders of the runs whose pages can be written again."""
    return sorted(page.parent for page in (ROOT / "experiments" / "results").glob(f"*/{PAGE}"))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """``text`` with ``change`` applied to all but its fenced blocks; these get languages that Pygments knows."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        block = re.sub(r"\A( *[`~]+)(\w+)", lambda start: start[1] + LANGUAGES.get(start[2], start[2]), fence[0])
        parts += [change(text[end : fence.start()]), block]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _relink(text: str, file: Path, pages: dict[Path, str], problems: list[str]) -> str:
    """Links between files as links between pages; to a file without a page, where the repository shows it."""

    def new(link: re.Match) -> str:
        target, hash_, anchor = link["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return link[0]
        path = (file.parent / target).resolve()
        if not path.exists():
            problems.append(f"{file.relative_to(ROOT)}: no such file: {target}")
            return link[0]
        if path in pages:
            return f"{link['before']}{_relative(pages[path], file, pages)}.md{hash_}{anchor}{link['after']}"
        if path.suffix in IMAGES:
            name = _image(path)
            return f"{link['before']}{_relative(name, file, pages)}{link['after']}"
        return f"{link['before']}{_in_repository(path)}{hash_}{anchor}{link['after']}"

    return LINK.sub(new, text)


# Links, to leave them alone, or inline code.
CODE = re.compile(r"\[[^\]\n]*\]\([^)\n]*\)|(?<!`)`(?P<code>[^`\n]+)`(?!`)")
CALL = re.compile(r"(?:jattn\.)?(?P<name>[\w.]+)(?:\(.*\))?")


def _link_names(text: str, file: Path, pages: dict[Path, str]) -> str:
    """Links ``jattn.masks.Causal`` or ``heads.statistics(query, key)``, where they stand as code, to their pages."""
    names = public_names()

    def new(code: re.Match) -> str:
        call = CALL.fullmatch(code["code"] or "")
        for module in ("jattn", "jattn.masks", "jattn.score_mods"):  # the last two stand alone in most pages
            name = call and f"{module}.{call['name']}"
            if name in names and name.rpartition(".")[0] in MODULES:
                break
        else:
            return code[0]
        return f"[{code[0]}]({_relative(f'reference/{name}', file, pages)}.rst)"

    return "\n".join(line if line.startswith("#") else CODE.sub(new, line) for line in text.split("\n"))


def _relative(target: str, file: Path, pages: dict[Path, str]) -> str:
    return os.path.relpath(target, Path(pages[file]).parent)


def _image(path: Path) -> str:
    """Copies an image; returns its place in the source."""
    if path.is_relative_to(ROOT / "docs"):
        name = str(path.relative_to(ROOT / "docs"))
    else:
        name = f"results/{path.parent.name}/{path.name}"
    (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, SOURCE / name)
    return name


def _write_reports() -> str:
    """Writes the page of every kept run; returns their list."""
    rows = []
    for run in kept_runs():
        page, report = kept_page(run), SOURCE / "extra" / f"report-{run.name}.html"
        page.config["description"] = yaml.safe_load((ROOT / "configs" / f"{run.name}.yaml").read_text())[
            "description"
        ]  # today's words
        report.write_text(page.html(), encoding="utf-8")
        about = re.split(r"(?<!al)[.:?] ", page.config["description"])[0].rstrip(".")
        size = report.stat().st_size / 1e6
        rows.append(f'| <a href="{report.name}">{run.name}</a> | {about}. | {size:.1f} MB |\n')
    return "\n| run | | |\n|---|---|---|\n" + "".join(rows) + "\n"


def _newest_first(page: str) -> tuple[float, str]:
    date = re.search(r"(\d{4})-(\d\d)-(\d\d)", page)
    return -int("".join(date.groups())) if date else 0, page


def contents(patterns: list[str], pages: set[str]) -> str:
    """The pages below an entry, for Sphinx."""
    lines = []
    for pattern in patterns:
        if "*" not in pattern:
            lines.append(f"{SHORT[pattern]} </{pattern}>" if pattern in SHORT else f"/{pattern}")
            continue
        named = {page for several in CONTENTS.values() for page in several} | CONTENTS.keys()
        matches = [page for page in pages - named if Path(page).match(pattern)]
        lines += [f"/{page}" for page in sorted(matches, key=_newest_first)]
    return "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(lines) + "\n```\n" if lines else ""


if __name__ == "__main__":
    sys.exit(main())
