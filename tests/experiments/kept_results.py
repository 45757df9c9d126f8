"""Results of suites that are kept in the repository."""

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from jattn_experiments.bench.command import Entry
from jattn_experiments.bench.suite import Suite

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def kept(suites: Mapping[str, Entry]) -> list[Path]:
    """The files of results of these suites: ``NAME.json``, or ``NAME-WHICH.json`` where a folder collects several."""
    return [
        file
        for name in suites
        for pattern in (f"*/{name}.json", f"*/{name}-*.json")
        for file in sorted(RESULTS.glob(pattern))
    ]


def suite_of(file: Path) -> str:
    """The name of the suite that wrote a file."""
    return file.stem.partition("-")[0]


def check(suites: Mapping[str, Entry], file: Path, out: Path) -> None:
    """Asserts that a file is read, and that writing its results to the folder ``out`` changes nothing."""
    name = suite_of(file)
    suite: Suite = importlib.import_module(suites[name].module).SUITE
    shutil.copy(file, out / f"{name}.json")
    results = suite.read(out)
    assert results.rows and all(row.values for row in results.rows)
    keys = [(row.part, json.dumps(dict(row.key))) for row in results.rows]
    assert len(set(keys)) == len(keys), "two rows have the same key"
    suite.write(results, out)
    assert json.loads((out / f"{name}.json").read_text()) == json.loads(file.read_text())
    texts = suite.markdown(results), file.with_suffix(".md").read_text()
    written, before = (text.split("\n## Measured on")[0] for text in texts)
    assert written.count("|") == before.count("|")
