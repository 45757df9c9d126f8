"""What ``keep`` writes, what it leaves alone, and the page made of it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jattn_experiments.__main__ import main
from jattn_experiments.run_page import document, explorer
from jattn_experiments.run_page.keep import KEPT_WEIGHTS, PAGE, finished, kept_page, load
from jattn_experiments.run_page.keep import keep as keep_findings
from tests.experiments.test_report import EXAMPLES, synthetic
from tests.web_page import embedded, weights_of

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
WRITTEN = {"claims.json", "config.json", "summary.json", PAGE}
SVG = '<svg viewBox="0 0 9 9" width="9" height="9"><title>a figure</title></svg>'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a finished run, named ``tiny`` as the run is, with two figures that nothing draws."""
    out = tmp_path / "runs" / "tiny"
    (out / "figures").mkdir(parents=True)
    findings = synthetic(name="tiny")
    findings.save(out)
    (out / "config.json").write_text(json.dumps(findings.config))
    (out / "claims.json").write_text(json.dumps(findings.claims))
    for name in ("ablation", "turns"):
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(out / "figures" / f"{name}.png")
    (out / "figures" / "ablation.svg").write_text(SVG)
    monkeypatch.setattr(document, "write_figures", lambda _, folder: sorted(folder.iterdir()))
    document.write_page(findings, out)
    return out


def keep(run, folder):
    return keep_findings(finished(run), run, folder)


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def refused(run, to, capsys):
    """The one-line error of a refused target, which changed no file."""
    before = contents(run.parents[1])
    assert main(["keep", "--run", str(run), "--to", str(to)]) == 2
    assert contents(run.parents[1]) == before
    error = capsys.readouterr().err
    assert error.startswith("error: --to: ") and error.count("\n") == 1, error
    return error


def test_a_run_is_not_kept_in_itself(run, tmp_path, capsys):
    (tmp_path / "link").symlink_to(run.parent)
    for to in (run.parent, run, run / "figures", tmp_path / "link"):
        assert "expected a folder outside the run's folder" in refused(run, to, capsys)
    inside = tmp_path / "kept" / "tiny" / "old"  # the target is a folder around the run
    inside.parent.mkdir(parents=True)
    run.rename(inside)
    assert "expected a folder outside the run's folder" in refused(inside, tmp_path / "kept", capsys)


@pytest.mark.parametrize("name", ["thesis.txt", "config.json", "summary.json"])
def test_what_keep_did_not_write_is_refused(run, tmp_path, capsys, name):
    notes = tmp_path / "notes" / "tiny"
    notes.mkdir(parents=True)
    (notes / name).write_text('{"name": "tiny"}')
    assert "was not written by jattn keep" in refused(run, notes.parent, capsys)
    assert "was not written by jattn keep" in refused(run, tmp_path / "runs" / ".." / "notes", capsys)
    (tmp_path / "tiny").write_text("a file of the user")
    assert "was not written by jattn keep" in refused(run, tmp_path, capsys)


def test_a_run_without_a_report_is_not_finished(run, tmp_path, capsys):
    (run / "report.html").unlink()
    assert main(["keep", "--run", str(run), "--to", str(tmp_path / "kept")]) == 2
    assert "expected the folder of a finished run" in capsys.readouterr().err


def test_an_earlier_keep_is_replaced_and_other_files_stay(run, tmp_path):
    kept = keep(run, tmp_path / "kept")
    assert kept == tmp_path / "kept" / "tiny"
    assert {file.name for file in kept.iterdir()} == WRITTEN
    (kept / "thesis.txt").write_text("mine")
    (kept / "photo.png").write_text("mine, too")
    (kept / "turns.png").write_text("a picture that a document shows")
    (run / "claims.json").write_text("[1]")
    keep(run, tmp_path / "kept")
    assert {file.name for file in kept.iterdir()} == WRITTEN | {"turns.png", "thesis.txt", "photo.png"}
    assert (kept / "claims.json").read_text() == "[1]" and (kept / "photo.png").read_text() == "mine, too"
    with Image.open(kept / "turns.png") as picture:
        assert picture.size == (4, 4)
    assert [file.name for file in kept.parent.iterdir()] == ["tiny"]


def test_the_results_of_another_config_are_replaced_only_if_that_is_wanted(run, tmp_path, capsys):
    config = {"name": "tiny", "train": {"steps": 200}, "mesh": {"data": 1}}
    (run / "config.json").write_text(json.dumps(config))
    kept = keep(run, tmp_path / "kept")
    (run / "config.json").write_text(json.dumps(config | {"mesh": {"data": 2}}))
    keep(run, kept.parent)  # the same config on other devices
    (kept / "config.json").write_text(json.dumps(config | {"task": {"prior": "dirichlet"}}))
    keep(run, kept.parent)  # with an option that one of them is too old to have, at its default
    (run / "config.json").write_text(json.dumps(config | {"train": {"steps": 100}}))
    error = refused(run, kept.parent, capsys)
    assert "another config (add --replace to replace them): train.steps was 200, now 100" in error
    assert main(["keep", "--run", str(run), "--to", str(kept.parent), "--replace"]) == 0
    assert json.loads((kept / "config.json").read_text())["train"] == {"steps": 100}
    (kept / "notes.txt").write_text("mine")
    (kept / "summary.json").unlink()
    assert main(["keep", "--run", str(run), "--to", str(kept.parent), "--replace"]) == 2
    assert "was not written by jattn keep" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux's folder in which nobody can make another")
def test_a_folder_that_cannot_be_made_is_the_fault_of_to(run, capsys):
    assert "/proc/x" in refused(run, Path("/proc/x"), capsys)  # which says that /proc/x is missing


def test_a_crash_halfway_loses_nothing(run, tmp_path, monkeypatch):
    kept = keep(run, tmp_path / "kept")
    (kept / "turns.png").write_text("a picture")
    before = contents(kept)
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            keep(run, kept.parent)
    assert contents(kept) == before and keep(run, kept.parent) == kept


def test_the_same_run_is_kept_in_the_same_bytes(run, tmp_path):
    once, again = (contents(keep(run, tmp_path / name)) for name in ("once", "again"))
    assert once == again


def without_weights(page):
    """The page without its weights and what it says of them."""
    data = embedded(page) | {"top": None}
    for view in data["views"]:
        view["frames"] = [(frame["title"], frame["step"], frame["numbers"]) for frame in view["frames"]]
    rest = re.sub(r'<script id="(data|blob-\d+)".*?</script>', "", page, flags=re.DOTALL)
    return rest.replace("Weights are rounded to 1/255 of the largest.", ""), data


def test_the_kept_page_is_the_run_s_with_rounded_weights(run, tmp_path):
    page, kept = (run / "report.html").read_text(), kept_page(keep(run, tmp_path / "kept")).html()
    assert "Weights are rounded to 1/255 of the largest." in kept and "a figure" in kept
    assert without_weights(kept) == without_weights(page)
    for view in range(EXAMPLES + 1):
        for frame in range(4 if view < EXAMPLES else 2):
            weights = weights_of(page, view, frame)
            np.testing.assert_allclose(weights_of(kept, view, frame), weights, atol=0.51 / 255 * embedded(page)["top"])


def test_what_is_not_finite_is_kept(run, tmp_path):
    findings = synthetic(name="tiny")
    findings.scores["mirror"][0, 1] = np.nan
    findings.example_weights[0, 0, 0, 0, 0] = np.nan
    findings.save(run)
    shown, _ = load(keep(run, tmp_path / "kept") / PAGE)
    assert np.isnan(shown.numbers[1].values[1]).all() and not shown.views[0].frames[0].weights[0, 0].any()


def test_a_thinned_explorer_keeps_every_view_s_ends():
    whole = explorer.explorer(synthetic(), 10**9)
    frame = whole.views[0].frames[0].weights.size
    thin = whole.thinned(7 * frame)
    assert [[frame.step for frame in view.frames] for view in thin.views] == [[0, 10, 20], [0, 20], [0, 20]]
    assert thin.note() == "To keep this page small, example 1 has 3 of 4 steps, and every other example has 2."
    assert whole.thinned(10 * frame) == whole and whole.note() == ""


@pytest.mark.parametrize("folder", sorted(RESULTS.glob(f"*/{PAGE}")), ids=lambda page: page.parent.name)
def test_the_page_of_a_kept_run_can_be_written(folder):
    folder = folder.parent
    page = kept_page(folder)
    shown = page.explorer
    assert page.summary["name"] == page.config["name"] == folder.name and page.claims
    assert {"offsets", "ablation", "divergence", "map"} <= set(page.figures)
    frame = shown.views[0].frames[0].weights.size
    assert sum(len(view.frames) * frame for view in shown.views) <= max(KEPT_WEIGHTS, 2 * len(shown.views) * frame)
    text = page.html()
    assert f"of {len(page.claims)} hold" in text and "{{" not in text.partition("<script")[0]
    drawn = re.findall(r'<section id="(\w+)" class="drawn">', text)
    assert set(page.figures) == set(drawn) and len(embedded(text)["views"]) == len(shown.views)


def test_every_experiment_with_claims_has_a_page():
    kept = {file.parent.name for file in RESULTS.glob("*/claims.json")}
    assert kept == {file.parent.name for file in RESULTS.glob(f"*/{PAGE}")} and len(kept) >= 17


def test_a_document_shows_every_kept_picture():
    root = RESULTS.parents[1]
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *RESULTS.parent.glob("*.md"), *RESULTS.glob("*/*.md")]
    shown = set()
    for page in pages:
        targets = re.findall(r"!\[[^\]]*\]\(([^)\s]+\.png)\)", page.read_text(encoding="utf-8"))
        shown |= {(page.parent / target).resolve() for target in targets}
    assert [str(picture) for picture in RESULTS.glob("*/*.png") if picture.resolve() not in shown] == []
