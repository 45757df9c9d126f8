"""The sharding benchmark writes what it measured and says which targets were met."""

import pytest

from tools import sharding
from tools.__main__ import main
from tools.sharding import SUITE


@pytest.mark.slow
def test_the_suite_writes_what_it_measured(tmp_path):
    sizes = sharding.Sizes(devices=(1, 2), length=64, shapes=((2, 1, 4),), cases=("plain",))
    results = SUITE.measure(sizes, tmp_path)
    assert SUITE.read(tmp_path).of("numbers") == results.of("numbers")
    assert len(results.of("numbers")) == len(results.of("memory")) == len(results.of("balance")) == 4
    answers = {one.question: one.answer for one in sharding.goals(results)}
    assert [answers[one] for one in answers if "one device" in one or "all-gathers" in one] == ["met"] * 3
    text = SUITE.write_report(results, tmp_path).read_text()
    assert all(f"| {one} |" in text for one in answers) and "| N=2 K=1 H=4 | zigzag | 2 |" in text


def test_a_number_that_is_not_met_says_so():
    row = {"case": "plain", "devices": 2, "layout": "zigzag", "values": 2e-5, "gradients": 2e-5}
    memory = {"heads": [2, 1, 4], "layout": "zigzag", "collective-permute": 2, "all-gather": 1}
    contents = {
        "numbers": [row],
        "memory": [{**memory, "devices": n, "temporaries": size} for n, size in ((1, 100), (2, 90))],
        "balance": [{"devices": 2, "layout": "zigzag", "blocks": [3, 1]}],
    }
    answers = [(one.measured, one.answer) for one in sharding.goals(SUITE.parse(contents)) if one.measured is not None]
    assert [answer for _, answer in answers] == ["not met", "met", "not met", "not met", "met", "not met"]
    assert answers[2][0] == pytest.approx(100 / 90) and answers[-1][0] == 1.5


def test_bad_options_are_named_in_one_line(capsys):
    assert main(["sharding", "--resume"]) == 2
    assert capsys.readouterr().err == "error: --resume: suite sharding takes only --out\n"
