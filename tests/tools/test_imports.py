"""The imports benchmark starts fresh processes and says what one import adds to another."""

import pytest

from jattn_experiments.bench.suite import Failed
from tools import imports


@pytest.mark.slow
def test_the_suite_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "PAIRS", (("json, decimal", "json"),))
    results = imports.SUITE.measure(2, tmp_path)
    (row,) = results.of("rows", imported="json, decimal")
    assert all(seconds > 0 for seconds in (*row["seconds"], *row["cpu_seconds"])) and row["ratio"] > 0
    text = imports.SUITE.write_report(imports.SUITE.read(tmp_path), tmp_path).read_text()
    assert "2 of each" in text and "| `import json, decimal` | `import json` |" in text


def test_an_import_that_fails_is_named():
    with pytest.raises(Failed, match="'import no_such_module' ended with status 1"):
        imports.started("import no_such_module")
