"""What ``keep`` writes, and what it leaves alone."""

import json

import numpy as np
import pytest
from PIL import Image

from jattn_experiments.__main__ import main
from jattn_experiments.runs.keep import keep
from tests.experiments.test_report import synthetic


@pytest.fixture
def run(tmp_path):
    """The folder of a finished run, named ``tiny`` as the run is."""
    out = tmp_path / "runs" / "tiny"
    (out / "figures").mkdir(parents=True)
    synthetic(name="tiny").save(out)
    for name in ("claims.json", "config.json", "report.html"):
        (out / name).write_text("[]")
    for name in ("heads", "turns"):
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(out / "figures" / f"{name}.png")
    return out


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
        assert "expected a folder apart from the run's" in refused(run, to, capsys)
    inside = tmp_path / "kept" / "tiny" / "old"  # the target is a folder around the run
    inside.parent.mkdir(parents=True)
    run.rename(inside)
    assert "expected a folder apart from the run's" in refused(inside, tmp_path / "kept", capsys)


@pytest.mark.parametrize("name", ["thesis.txt", "config.json", "summary.json"])
def test_what_keep_did_not_write_is_refused(run, tmp_path, capsys, name):
    notes = tmp_path / "notes" / "tiny"
    notes.mkdir(parents=True)
    (notes / name).write_text('{"name": "tiny"}')
    assert "is not what an earlier keep wrote" in refused(run, notes.parent, capsys)
    assert "is not what an earlier keep wrote" in refused(run, tmp_path / "runs" / ".." / "notes", capsys)
    (tmp_path / "tiny").write_text("a file of the user")
    assert "is not what an earlier keep wrote" in refused(run, tmp_path, capsys)


def test_an_earlier_keep_is_replaced_and_other_files_stay(run, tmp_path):
    kept = keep(run, tmp_path / "kept")
    assert kept == tmp_path / "kept" / "tiny"
    written = {"claims.json", "config.json", "report.html", "summary.json", "heads.png", "turns.png"}
    assert {file.name for file in kept.iterdir()} == written
    (kept / "thesis.txt").write_text("mine")
    (kept / "photo.png").write_text("mine, too")
    (run / "figures" / "turns.png").unlink()
    (run / "claims.json").write_text("[1]")
    keep(run, tmp_path / "kept")
    assert {file.name for file in kept.iterdir()} == written - {"turns.png"} | {"thesis.txt", "photo.png"}
    assert (kept / "claims.json").read_text() == "[1]"
    assert [file.name for file in kept.parent.iterdir()] == ["tiny"]


def test_a_crash_halfway_loses_nothing(run, tmp_path, monkeypatch):
    kept = keep(run, tmp_path / "kept")
    before = contents(kept)
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            keep(run, kept.parent)
    assert contents(kept) == before and keep(run, kept.parent) == kept


def test_results_kept_before_pictures_were_listed_are_replaced(run, tmp_path):
    kept = keep(run, tmp_path)
    summary = json.loads((kept / "summary.json").read_text())
    del summary["pictures"]
    (kept / "summary.json").write_text(json.dumps(summary))
    keep(run, tmp_path)
    assert json.loads((kept / "summary.json").read_text())["pictures"] == ["heads.png", "turns.png"]
