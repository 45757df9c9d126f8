"""The looking benchmark: its table on made-up numbers, and a whole run on tiny sizes."""

import dataclasses
import json

import pytest

from jattn_experiments import config
from jattn_experiments.__main__ import main as run_main
from jattn_experiments.bench import looking
from jattn_experiments.bench.looking import ALL, ENTROPY, FORWARD, LOOKED, STEPS, SUITE, Sizes

pytestmark = pytest.mark.usefixtures("as_experiments_run")


def made_up(**changed):
    one = {"medians": {FORWARD: 100.0, ALL: 300.0, ENTROPY: 130.0}, "rounds": 3, "temporaries": 64 * 2**20}
    tracked = {"config": "copy", "interval": 50, "own": 20, "medians": {STEPS: 1000.0, LOOKED: 1099.0}, "rounds": 3}
    statistics = one | {"matrix": False} | changed
    return {"environment": {}, "sizes": {"length": 32768}, "statistics": statistics, "tracking": [tracked]}


def test_numbers_at_their_thresholds_are_met():
    goals = looking.goals(SUITE.parse(made_up()))
    assert [one.answer for one in goals] == ["met"] * 5
    assert [round(one.measured, 6) for one in goals] == [3.0, 1.3, 64.0, 0.0, 0.099]


def test_numbers_beyond_their_thresholds_are_not_met():
    worse = made_up(medians={FORWARD: 99.0, ALL: 300.0, ENTROPY: 130.0}, temporaries=65 * 2**20, matrix=True)
    worse["tracking"][0]["medians"][LOOKED] = 1101.0
    assert not any(one.answer == "met" for one in looking.goals(SUITE.parse(worse)))


@pytest.mark.slow
def test_the_suite_writes_what_it_measured(monkeypatch, tmp_path, capsys):
    tiny = Sizes(length=300, head_dim=4, configs=("shift_bank",), seconds=1e-3, rounds=1, settle=0.0)
    monkeypatch.setattr(looking, "Sizes", lambda seconds: tiny)
    read = config.read

    def read_small(file):
        whole = read(file)
        return dataclasses.replace(whole, train=dataclasses.replace(whole.train, seeds=1, batch=2), claims=[])

    monkeypatch.setattr(config, "read", read_small)
    assert run_main(["bench", "--suite", "looking", "--out", str(tmp_path)]) == 0
    contents = json.loads((tmp_path / "looking.json").read_text())
    assert contents["statistics"]["temporaries"] > 0
    assert all(median > 0 for median in contents["statistics"]["medians"].values())
    assert (contents["tracking"][0]["interval"], contents["tracking"][0]["own"]) == (50, 20)
    assert "| shift_bank | " in (tmp_path / "looking.md").read_text()
    assert "time of a look" in capsys.readouterr().out
