"""Every change in docs/extending.md applies to a copy of the repository, and every command in it runs there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


def sections() -> dict[str, str]:
    return {part.partition("\n")[0]: part for part in DOCUMENT.split("\n## ")[1:]}


def test_every_kind_of_thing_is_there():
    shown = {
        "A mask", "A score function", "A statistic of heads", "A column of the survey's table", "A model family",
        "An option of a call", "A kernel", "A task", "A claim", "A figure", "A peer in the benchmark",
    }  # fmt: skip
    assert set(sections()) == shown and len(fenced("check")) == 9 and len(fenced("diff")) == 11


def test_an_option_takes_few_lines():
    (change,) = (part for part in fenced("diff") if "_core/call.py" in part)
    added = [line for line in change.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert change.count("+++ b/") <= 5 and len(added) <= 14


@pytest.fixture
def changed(tmp_path) -> Path:
    """A copy of the repository with all changes applied."""
    for folder in ("jattn", "experiments/jattn_experiments", "configs", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)  # or `git apply` uses a parent's repository
    for change in fenced("diff"):
        done = subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=change, text=True, capture_output=True)
        assert done.returncode == 0, f"docs/extending.md shows a change that no longer applies: {done.stderr}"
    return tmp_path


def test_every_change_applies(changed):
    sources = list(changed.rglob("*.py"))
    assert changed / "jattn" / "kernels" / "plain.py" in sources  # a file that only a change adds
    for source in sources:
        compile(source.read_text(encoding="utf-8"), str(source), "exec")  # raises if it is no Python


@pytest.mark.slow
def test_every_change_works(changed):
    environment = os.environ | {
        "PYTHONPATH": f"{changed}{os.pathsep}{changed / 'experiments'}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for command in fenced("check"):
        done = subprocess.run(["sh", "-c", command], cwd=changed, env=environment, text=True, capture_output=True)
        assert done.returncode == 0 and done.stdout.strip(), (command, done.stdout, done.stderr)
        assert "no tests ran" not in done.stdout
