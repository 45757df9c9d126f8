"""The folder of a run: one owner, files that are complete, and a one-line error if they are not."""

import contextlib
import json
import resource
import shutil
import signal
import subprocess
import sys

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_experiments import compare
from jattn_experiments.__main__ import main as run_main
from jattn_experiments.bench import attention_figure, chip_report
from jattn_experiments.bench.suite import Results, Row, Suite
from jattn_experiments.run_page import document
from jattn_experiments.run_page.keep import keep
from jattn_experiments.runs.checkpoint import Checkpoints
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Busy, Damaged, owned, write_atomically
from jattn_experiments.runs.history import Clock, History
from tests.experiments.processes import ROOT, TINY
from tests.experiments.test_report import synthetic


def flip(file, at, bit=0):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def state(value=0.0):
    return {"b": {"kernel": jnp.arange(300.0).reshape(20, 15) + value}, "count": jnp.array([1, 2], jnp.int32)}


def always_fits(step, words):
    return ""


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of three steps; only two are kept."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 4, 6):
        checkpoints.save(step, state(step), {"metrics": f"of {step}"})
    return checkpoints


def files_of(checkpoints_folder, step):
    """The files of a checkpoint, including those in subfolders."""
    return sorted(file for file in (checkpoints_folder / f"{step}").rglob("*") if file.is_file())


def test_checkpoints_hold_what_was_saved(saved, tmp_path):
    assert saved.steps == Checkpoints(tmp_path / "checkpoints").steps == [4, 6]
    for step in (4, 6):
        chex.assert_trees_all_equal(saved.load(step, state()), state(step))


def test_a_flipped_bit_in_a_checkpoint_is_seen(saved, tmp_path):
    folder = tmp_path / "checkpoints" / "6"
    for file in files_of(tmp_path / "checkpoints", 6):
        for at in range(0, file.stat().st_size, file.stat().st_size // 6 + 1):
            flip(file, at)
            if file.name == "contents.json":  # besides the digests, the arguments of `restore` decide
                with contextlib.suppress(Damaged):
                    chex.assert_trees_all_equal(saved.load(6, state()), state(6))
            else:
                damaged = f"the checkpoint is damaged: '{file.relative_to(folder)}' is not what was written"
                with pytest.raises(Damaged, match=rf"checkpoints/6: {damaged}$"):
                    saved.load(6, state())
            flip(file, at)


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.with_name("more").touch()])
def test_a_file_too_few_or_too_many_is_seen(saved, tmp_path, change):
    change(files_of(tmp_path / "checkpoints", 6)[0])
    with pytest.raises(Damaged, match=r"checkpoints/6: the checkpoint is damaged: '.*' is not what was written"):
        saved.load(6, state())


def test_the_older_checkpoint_serves_where_the_newer_is_damaged(saved, tmp_path):
    for file in files_of(tmp_path / "checkpoints", 6):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    warnings = []
    step, restored = saved.restore(state(), always_fits, warnings.append)
    assert step == 4 and saved.steps == [4]
    chex.assert_trees_all_equal(restored, state(4))
    saved.save(6, state(6))  # in place of the damaged one
    assert saved.steps == [4, 6]
    assert [folder.name for folder in (tmp_path / "damaged").iterdir()] == ["6"]
    assert len(warnings) == 2 and "checkpoints/6" in warnings[0] and "older checkpoint of step 4" in warnings[1]
    assert all("\n" not in line for line in warnings)


def test_no_checkpoint_that_is_whole_is_one_line_and_removes_nothing(saved, tmp_path):
    for step in (4, 6):
        for file in files_of(tmp_path / "checkpoints", step):
            file.write_bytes(b"")
    with pytest.raises(Damaged, match=r"checkpoints/4/.*remove .* to start over$") as raised:
        saved.restore(state(), always_fits, print)
    assert saved.steps == [4, 6] and "\n" not in str(raised.value)


def test_a_checkpoint_of_another_version_is_one_line(saved, tmp_path):
    (tmp_path / "checkpoints" / "6" / "contents.json").unlink()
    with pytest.raises(
        Damaged, match=r"checkpoints/6: the checkpoint has no contents.json: it is damaged, or from another version"
    ):
        saved.load(6, state())
    with pytest.raises(Damaged, match=r"checkpoints/4: the checkpoint cannot be read: "):
        saved.load(4, {"other": jnp.zeros(3)})


def test_a_save_that_was_cut_short_leaves_nothing_and_one_under_way_is_not_disturbed(saved, tmp_path):
    """A reader, as ``compare``, may open the folder while its run saves; the run itself starts by restoring."""
    unfinished = tmp_path / "checkpoints" / "8.tmp"
    (unfinished / "arrays").mkdir(parents=True)
    again = Checkpoints(tmp_path / "checkpoints")
    assert again.steps == [4, 6] and unfinished.exists()
    assert again.restore(state(), always_fits, lambda line: None)[0] == 6 and not unfinished.exists()


SAVES = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from jattn_experiments.runs.checkpoint import Checkpoints
checkpoints, state = Checkpoints(Path(sys.argv[1])), {f"{i}": jnp.arange(300.0) for i in range(60)}
for size in (500, 900, 1500, 2500, 4000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        checkpoints.save(size, state)
    except OSError as error:
        print(error, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_save_that_fails_says_one_line(tmp_path):
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    errors = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=True).stderr.splitlines()
    assert len(errors) == 5 and all("could not be written" in line for line in errors), errors


def test_a_checkpoint_that_does_not_fit_the_history_does_not_serve(saved):
    step, _ = saved.restore(state(), lambda step, words: "no" * (words["metrics"] != "of 4"), lambda line: None)
    assert step == 4


@pytest.fixture
def history(tmp_path):
    """A history of two looks and four lines up to step 4, and its digests at steps 0, 2 and 4."""
    history = History(tmp_path)
    look = {"scores": {"sink": np.full((1, 1, 2), 0.1)}, "offset_profile": np.arange(3.0), "examples": np.zeros(2)}
    digests = {0: history.digests()}
    for begin in (0, 2):
        history.add_metrics(begin, {"loss": np.arange(2.0)[:, None] + begin / 3}, 1)
        history.add_look(begin + 2, look)
        digests[begin + 2] = history.digests()
    return history, digests


def test_digests_of_a_history_are_those_of_its_files(history, tmp_path):
    written, digests = history
    for step in (0, 2, 4):
        assert written.check(step, digests[step]) == "" and History(tmp_path).check(step, digests[step]) == ""
    written.rewind(2)
    assert written.digests() == digests[2]


@pytest.mark.parametrize("change", [
    lambda lines, looks: lines.write_bytes(b""),
    lambda lines, looks: lines.unlink(),
    lambda lines, looks: lines.write_bytes(lines.read_bytes() * 2),
    lambda lines, looks: lines.write_bytes(lines.read_bytes()[:-3]),
    lambda lines, looks: lines.write_bytes(lines.read_bytes().split(b"\n", 1)[1]),
    lambda lines, looks: lines.write_bytes(lines.read_bytes().replace(b"0.6666667", b"0.6666668")),
    lambda lines, looks: lines.write_bytes(b"garbage\n" + lines.read_bytes()),
    lambda lines, looks: lines.write_bytes(b"\xff\n" + lines.read_bytes()),
    lambda lines, looks: lines.write_bytes(b"[]\n" + lines.read_bytes()),
    lambda lines, looks: (looks / "00000004.npz").unlink(),
    lambda lines, looks: flip(looks / "00000004.npz", 60),
])  # fmt: skip
def test_a_history_that_is_not_what_was_written_is_seen(history, tmp_path, change):
    written, digests = history
    change(tmp_path / "metrics.jsonl", tmp_path / "looks")
    reason = written.check(4, digests[4])
    assert reason.startswith(str(tmp_path)) and "expected" in reason and "got" in reason and "\n" not in reason


def test_files_of_others_stay(history, tmp_path):
    written, _ = history
    for name in ("notes.txt", "best.npz", "1.npz", "00000002.png"):
        (tmp_path / "looks" / name).write_text("mine")
    (tmp_path / "looks" / "figures").mkdir()
    (tmp_path / "looks" / "00000009.tmp").touch()
    written.rewind(0)
    left = {file.name for file in (tmp_path / "looks").iterdir()}
    assert left == {"notes.txt", "best.npz", "1.npz", "00000002.png", "figures"}


def test_a_folder_has_one_owner(tmp_path):
    with owned(tmp_path / "run"):
        with pytest.raises(
            Busy, match=r"expected a folder that no other run uses, got .*run', which process \d+ uses$"
        ):
            with owned(tmp_path / "run"):
                pass
    with owned(tmp_path / "run"):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = f"from pathlib import Path; from jattn_experiments.runs.folder import owned\nwith owned(Path({str(tmp_path)!r})): print('in', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"in\n"
    with pytest.raises(Busy, match=f"which process {process.pid} uses$"), owned(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with owned(tmp_path):
        pass


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return file


def error_of(capsys, *words):
    """The one-line error of a rejected command."""
    assert run_main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def test_a_folder_that_another_run_works_in_is_refused(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    with owned(out):
        error = error_of(capsys, "run", "--config", tiny, "--out", out)
    assert error.startswith("error: --out: expected a folder that no other run uses")
    assert {file.name for file in out.iterdir()} == {"lock"}


@pytest.mark.parametrize("content", [b"[]", b"", b"{", b"\xff", b"3", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "findings.json"])
def test_json_that_is_not_ours_is_one_line(tiny, tmp_path, capsys, name, content):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(content)
    if name == "config.json":
        error = error_of(capsys, "run", "--config", tiny, "--out", out)
    else:
        error = error_of(capsys, "report", "--run", out)
        error_of(capsys, "keep", "--run", out, "--to", tmp_path / "kept")
    assert f"{out / name}: expected the" in error
    assert (out / name).read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04garbage", b"garbage", b"\x93NUMPY"])
def test_arrays_that_are_not_ours_are_one_line(tmp_path, capsys, content):
    (tmp_path / "findings.json").write_text("{}")
    (tmp_path / "findings.npz").write_bytes(content)
    assert "findings.json: the findings are damaged" in error_of(capsys, "report", "--run", tmp_path)
    with pytest.raises(Damaged):
        Findings.load(tmp_path)


@contextlib.contextmanager
def room_for(size):
    """Within it, no file gets larger than so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


SHAPE = {"batch": 1, "num_heads": 1, "head_dim": 64}


def write_suite(out, steps):
    values = {"medians": {"jattn": 2e3}, "length": 512, "case": "full", "passes": "forward", "flops": steps}
    row = Row("fast", values, {"answers": [values]})
    for draw, name in ((attention_figure.write_figure, "attention"), (chip_report.write_figure, "chip")):
        markdown = lambda results: f"{steps} steps" * steps
        suite = Suite(name, {"fast": ("length",)}, None, None, markdown, None, draw)
        results = Results(
            {"environment": {"device": f"a chip of {steps}", "contestants": "jattn"}, "shape": SHAPE}, [row]
        )
        suite.write(results, out)
        suite.write_report(results, out)


def write_comparison(out, steps):
    patterns = np.random.default_rng(steps).random((2, 1, 1, 4, 4))
    compare._draw(
        compare.Comparison(np.zeros((1, 1, 1), int), np.ones((1, 1, 1)), None, {}, patterns), out / "a.png", "a", "b"
    )


def write_kept(out, steps):
    findings = synthetic(name="tiny", look_steps=np.array([0, 1, steps]))
    for name in ("claims", "config"):
        write_atomically(out / f"{name}.json", b" " * steps + b"{}")
    keep(findings, out, out.with_name("kept"), replace=True)


WRITERS = {
    "findings": lambda out, steps: synthetic(
        claims=[{"steps": steps}] * steps, accuracy=np.full((3, 2), 1 / steps)
    ).save(out),
    "page": lambda out, steps: document.write_page(synthetic(name=f"{steps} steps"), out),
    "comparison": write_comparison,
    "suite": write_suite,
    "kept": write_kept,
}


@pytest.mark.slow_except("findings", "page", "comparison", "kept")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_every_file_whole(writer, tmp_path, monkeypatch):
    """Whatever file has no room, each is the old one or the new one, and nothing is left beside them."""
    monkeypatch.setattr(document, "write_figures", lambda *_: [])
    contents = lambda at: {file.relative_to(at): file.read_bytes() for file in at.rglob("*") if file.is_file()}
    states = {}
    for name, steps in (("old", 40), ("new", 50)):
        (tmp_path / name / "run").mkdir(parents=True)
        WRITERS[writer](tmp_path / name / "run", steps)
        states[name] = contents(tmp_path / name)
    old, new = states.values()
    assert old.keys() == new.keys() and old != new
    for size in sorted({0, *(len(content) - 1 for content in new.values())}):
        shutil.rmtree(tmp_path / "new")
        shutil.copytree(tmp_path / "old", tmp_path / "new")
        with pytest.raises(OSError), room_for(size):
            WRITERS[writer](tmp_path / "new" / "run", 50)
        after = contents(tmp_path / "new")
        assert after.keys() == old.keys(), size
        assert all(after[name] in (old[name], new[name]) for name in after), size
        if writer == "findings":
            assert after == old, "parts of one run"


def test_seconds_that_are_no_number_are_one_line(tmp_path):
    assert Clock(tmp_path).stop() < Clock(tmp_path).stop() < 60
    (tmp_path / "seconds.json").write_text(json.dumps([1]))
    with pytest.raises(Damaged, match="expected a number of seconds, got a list"):
        Clock(tmp_path)
