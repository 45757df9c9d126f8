"""The dispatch benchmark on tiny problems."""

import json

import pytest

from jattn_experiments.runs.folder import RESULTS
from tools import dispatch
from tools.__main__ import main


@pytest.mark.slow
def test_the_suite_keeps_its_format(tmp_path, monkeypatch, capsys, as_experiments_run):
    monkeypatch.setattr(dispatch, "LENGTHS", (8,))
    monkeypatch.setattr(dispatch, "SECONDS", 1e-3)
    assert main(["dispatch", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("| 8 |") == 4
    committed = next(RESULTS.glob("cpu-*/dispatch.json"))
    measured, before = (json.loads(file.read_text()) for file in (tmp_path / "dispatch.json", committed))
    assert measured.keys() == before.keys() and measured["rows"][0].keys() == before["rows"][0].keys()
    assert measured["environment"].keys() == before["environment"].keys()
