"""Replication on fresh seeds, and models at any checkpoint: looked at, compared, and started from."""

import json
import re
import shutil

import numpy as np
import pytest

from jattn_experiments import compare, config, load_run, measure, replicate, run
from jattn_experiments.__main__ import main
from jattn_experiments.run_page import document
from jattn_experiments.runs.findings import Findings
from tests.web_page import embedded, weights_of

CONFIG = """
name: short
task: {kind: shift_bank, symbols: 3, length: 12, offsets: [1, 3]}
model: {model_dim: 4, num_heads: 2, head_dim: 2}
train: {seeds: 2, first_seed: 7, steps: 4, warmup: 1, batch: 4, log_every: 1, look_every: 1, checkpoint_every: 1, keep: 0}
evaluate: {batch: 8}
claims:
- {name: sink, statement: Some head looks first., metric: best/first_token, at_least: 0.0, needed: 2}
- {name: never, statement: Never., metric: loss, at_most: 0.0, needed: 1}
"""

pytestmark = pytest.mark.usefixtures("as_experiments_run", "without_figures")


@pytest.fixture(scope="module")
def without_figures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "write_figures", lambda *_: [])  # test_report.py draws them
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, without_figures):
    """A run with a replication of three seeds."""
    folder = tmp_path_factory.mktemp("short")
    file, out = folder / "short.yaml", folder / "out"
    file.write_text(CONFIG)
    words = ["run", "--config", str(file), "--out", str(out), "--replicate", "3", "--check"]
    assert main([*words, "--replicate_seed", "50"]) == 1  # a claim fails
    return file, out


@pytest.mark.slow
def test_a_replication_is_judged_by_the_same_claims(finished, capsys):
    file, out = finished
    rows = json.loads((out / "claims.json").read_text())
    assert [row["replication"]["seeds"] for row in rows] == [[50, 51, 52]] * 2 and rows[0]["seeds"] == [7, 8]
    assert [row["replication"]["needed"] for row in rows] == [3, 2], "in proportion, rounded up"
    assert [row["replication"]["holds"] for row in rows] == [True, False]
    assert rows[0]["replication"]["rate"] == pytest.approx([0.2924, 1.0], abs=1e-3) and rows[0]["rate"] is None
    assert len(rows[0]["replication"]["values"]) == 3
    # It stays when the run is judged again without it, and is not trained twice.
    seconds = (out / "replication" / "metrics.jsonl").stat().st_mtime_ns
    assert main(["run", "--config", str(file), "--out", str(out)]) == 0
    assert (out / "replication" / "metrics.jsonl").stat().st_mtime_ns == seconds
    assert json.loads((out / "claims.json").read_text()) == rows
    assert "fresh seeds" in capsys.readouterr().out
    assert "fresh seeds passed" in (out / "report.html").read_text()
    # Asked for again, neither is measured: without checkpoints they would be trained from the start.
    checkpoints = [folder / "checkpoints" for folder in (out, out / "replication")]
    for one in checkpoints:
        one.rename(one.with_name("moved"))
    assert main(["run", "--config", str(file), "--out", str(out), "--replicate", "3"]) == 0
    assert json.loads((out / "claims.json").read_text()) == rows
    for one in checkpoints:
        assert not one.exists()
        one.with_name("moved").rename(one)
    words = ["run", "--config", str(file), "--out", str(out), "--replicate", "3", "--replicate_seed", "60"]
    assert main(words) == 2, "the folder holds another replication"
    assert "train.first_seed was 50, now 60" in capsys.readouterr().err


def test_fresh_seeds_are_drawn_once_for_a_folder(tmp_path):
    settings = config.Config("x", train=config.Train(seeds=10, first_seed=100))
    drawn = {replicate._first_seed(tmp_path / "none", settings, 10) for _ in range(4)}
    assert len(drawn) == 4 and all(110 <= seed < 2**32 - 10 for seed in drawn)
    last = config.Config("x", train=config.Train(seeds=10, first_seed=2**32 - 10))
    assert 0 <= replicate._first_seed(tmp_path / "none", last, 10) < 2**32 - 20
    (tmp_path / "config.json").write_text(json.dumps({"train": {"first_seed": 123456}}))
    assert replicate._first_seed(tmp_path, settings, 10) == 123456


def test_a_control_of_its_own_number_of_seeds_keeps_it_and_all_seeds_are_fresh():
    controls = {"few": {"train.seeds": 3}, "same": {"train.seeds": 10}, "later": {"train.first_seed": 40}}
    metrics = {"loss": 9, "few:loss": 2, "same:loss": 8, "later:loss": 9}
    claims = [config.Claim(metric, "", metric, needed, at_most=1.0) for metric, needed in metrics.items()]
    sweep = {"model.num_heads": [{"model.num_heads": 2, "train.first_seed": 60}]}
    settings = config.Config("x", train=config.Train(seeds=10), controls=controls, sweep=sweep, claims=claims)
    again = replicate.fresh(settings, 5, 77)
    assert [claim.needed for claim in again.claims] == [5, 2, 8, 5]
    seeds = [(one.train.first_seed, one.train.seeds) for one in (again, *config.variants(again).values())]
    assert seeds == [(77, 5), (77, 3), (77, 10), (77, 5), (77, 5)]
    measure.claims.check(again)


MINUS = "- {name: less, statement: Less., metric: loss, minus: 'same:loss', at_most: 9.0, needed: 2}\n"


@pytest.mark.parametrize("claim, seeds, error", [
    (MINUS, None, "--replicate: claims.less.minus: expected a metric on the same seeds as 'loss', got 'same:loss'"),
    ("", 2, "replication holds a run of another config: train.seeds was 2, now 3"),
])  # fmt: skip
def test_a_replication_is_refused_before_anything_trains(tmp_path, capsys, claim, seeds, error):
    file, out = tmp_path / "short.yaml", tmp_path / "out"
    file.write_text(CONFIG + claim + "controls: {same: {train.seeds: 2}}\n")
    if seeds:  # another replication is there
        settings = config.load([str(file)]).config
        with run.prepared(replicate.fresh(settings, seeds, 50), out / "replication"):
            pass
    assert main(["run", str(file), "--out", str(out), "--replicate", "3"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert error in errors[-1] and all(line.startswith("error: ") and "{" not in line for line in errors), errors
    assert not list(out.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_a_look_shows_every_head_at_its_step(finished, capsys):
    _, out = finished
    assert main(["look", "--run", str(out), "--step", "2"]) == 0
    shown = capsys.readouterr().out
    page = (out / "heads.html").read_text(encoding="utf-8")
    assert f"page: {out / 'heads.html'}" in shown and "<title>out, step 2</title>" in page
    views = embedded(page)["views"]
    assert len(views) == 4 and len(views[0]["queries"]) == 12
    assert weights_of(page, 0, 0).sum(-1) == pytest.approx(1, abs=1e-3)
    assert "step 2" in shown and len(re.findall(r"^ *[78] +0 +[01] +0\.\d\d ", shown, re.MULTILINE)) == 4
    assert main(["look", "--run", str(out), "--step", "9"]) == 2
    assert "expected the step of a look, 0 to 4, such as 4, got 9" in capsys.readouterr().err
    assert main(["look", "--run", str(out.parent)]) == 2
    assert "expected the folder of a training run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_differs_from_itself_by_nothing_and_heads_are_matched(finished):
    _, out = finished
    last, first = load_run.load(str(out)), load_run.load(f"{out}@1")
    assert (last.step, first.step) == (4, 1)
    same = compare.compare(last, last)
    assert same.match.tolist() == [[[0, 1]]] * 2
    np.testing.assert_allclose(same.distance, 0, atol=1e-6)
    swapped = dict(last.params["params"]["layer_0"]["attention"])
    for name in ("query", "key", "value"):
        swapped[name] = {part: np.flip(leaf, -2) for part, leaf in swapped[name].items()}
    swapped["out"] = swapped["out"] | {"kernel": np.flip(swapped["out"]["kernel"], -3)}
    layer = last.params["params"]["layer_0"] | {"attention": swapped}
    other = last._replace(params={"params": last.params["params"] | {"layer_0": layer}})
    comparison = compare.compare(last, other)
    assert comparison.match.tolist() == [[[1, 0]]] * 2
    np.testing.assert_allclose(comparison.distance, 0, atol=1e-6)
    np.testing.assert_allclose(comparison.scores["entropy"][:, 0], comparison.scores["entropy"][:, 1], atol=1e-5)
    assert (compare.compare(last, first).distance > 0).any()


@pytest.mark.slow
def test_two_runs_are_compared_in_words_and_in_a_picture(finished, capsys, tmp_path):
    _, out = finished
    picture = tmp_path / "both.png"
    assert main(["compare", "--run", f"{out}@1", "--run", str(out), "--out", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "of 4 heads differ by more than the noise floor" in shown
    assert re.findall(r"^│ (\d+) +│ 0 +│ [01] +│", shown, re.MULTILINE) == ["7", "7", "8", "8"]
    assert picture.stat().st_size > 1000
    assert main(["compare", "--run", f"{out}@1", "--run", str(out), "--out", str(tmp_path / "both.html")]) == 0
    frames = embedded((tmp_path / "both.html").read_text(encoding="utf-8"))["views"][0]["frames"]
    assert [frame["title"] for frame in frames] == [f"{out}@1", str(out)]


@pytest.mark.parametrize("runs, message", [
    (["{out}"], "expected two runs (pass --run twice), got 1"),
    (["{out}", "{out}@9"], r"expected one of its checkpoints, [1, 2, 3, 4], got 9"),
    (["{out}", "nowhere"], "expected the folder of a training run, got 'nowhere'"),
])  # fmt: skip
@pytest.mark.slow
def test_what_cannot_be_compared_is_said(finished, capsys, runs, message):
    words = [word for run in runs for word in ("--run", run.format(out=finished[1]))]
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_training_starts_from_a_checkpoint(finished, tmp_path, capsys):
    file, out = finished
    words = ["run", "--config", str(file), "--out", str(tmp_path / "more"), "--claims", "[]"]
    assert main([*words, "--train.start", f"{out}@2"]) == 0
    lines = lambda folder: [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before = next(line["scores"] for line in lines(out) if line["step"] == 2 and "scores" in line)
    after = next(line["scores"] for line in lines(tmp_path / "more") if line["step"] == 0)
    for name, scores in before.items():
        np.testing.assert_allclose(after[name], scores, atol=1e-5, err_msg=name)
    words[4] = str(tmp_path / "other")
    assert main([*words, "--train.start", str(out), "--model.head_dim", "3"]) == 2
    assert (
        "train.start: expected a run with this config's model, tokens, answers and seeds, got"
        in capsys.readouterr().err
    )
    assert main([*words, "--train.start", "nowhere"]) == 2
    assert "train.start: expected the folder of a training run, got 'nowhere'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_started_run_goes_on_without_its_start(finished, tmp_path):
    """Finished or stopped, also as a point of its sweep; what it calls untrained has random parameters."""
    file, out = finished
    gone, more = tmp_path / "gone", tmp_path / "more"
    shutil.copytree(out, gone)
    words = ["run", "--config", str(file), "--out", str(more), "--claims", "[]", "--sweep", "model.num_heads=2"]
    assert main([*words, "--train.start", f"{gone}@2"]) == 0
    findings = Findings.load(more)
    for name, values in Findings.load(out).statistics.items():
        np.testing.assert_allclose(findings.statistics[name][:, 0], values[:, 0], atol=1e-5, err_msg=name)
        assert np.abs(findings.statistics[name][:, 1] - values[:, 1]).max() > 1e-4, "both are trained, differently"
    shutil.rmtree(gone)
    shutil.rmtree(more / "checkpoints" / "4")
    for _ in ("stopped at step 3", "finished"):
        assert main([*words, "--train.start", f"{gone}@2"]) == 0
        again = Findings.load(more)
        np.testing.assert_array_equal(again.accuracy, findings.accuracy)
        np.testing.assert_array_equal(again.scores["entropy"], findings.scores["entropy"])
    shutil.rmtree(more / "checkpoints")
    assert main([*words, "--train.start", f"{gone}@2"]) == 2, "nothing to resume from"
