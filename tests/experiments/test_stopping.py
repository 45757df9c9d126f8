"""A run that is stopped, runs out of disk space or loses its reader: one line of output, then the same results."""

import contextlib
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from jattn_experiments import __main__
from jattn_experiments.runs import stopping
from tests.experiments import processes
from tests.experiments.processes import ROOT, TINY, finish


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal():
    """A shell's background jobs ignore SIGINT, and child processes inherit that."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_an_exception_and_remembered():
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        with stopping.stoppable():
            assert stopping.last_signal() is None
            stopping.check()
            with pytest.raises(stopping.Stopped):
                signal.raise_signal(number)
            assert stopping.last_signal() == number
            with pytest.raises(stopping.Stopped):  # as if a library had swallowed the first
                stopping.check()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_waits_for_what_is_held_and_a_second_does_not():
    with stopping.stoppable():
        done = False
        with pytest.raises(stopping.Stopped), stopping.held():
            signal.raise_signal(signal.SIGTERM)
            done = True
        assert done and stopping.last_signal() == signal.SIGTERM
    with stopping.stoppable(), pytest.raises(stopping.Stopped), stopping.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second signal waited")


def test_a_command_whose_interruption_jax_converts_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("INTERNAL: KeyboardInterrupt: At: cache_key.py")

    monkeypatch.setattr(__main__, "main", interrupted)
    assert __main__._on_a_terminal(["look"]) == 130
    assert capsys.readouterr().err == "error: stopped\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    (folder / "tiny.yaml").write_text(TINY)
    return folder


def start(folder, out, steps=12, **pipes):
    """Starts the command with light compilation."""
    words = ["run", "--config", folder / "tiny.yaml", "--out", out, "--train.steps", steps]
    variables = processes.environment(folder / "cache", JAX_DISABLE_MOST_OPTIMIZATIONS="1", TERM="xterm")
    return processes.start("-m", "jattn_experiments", *words, variables=variables, **pipes)


@pytest.fixture(scope="module")
def whole(folder):
    finish(start(folder, folder / "whole"))
    return folder / "whole"


def assert_same(out, whole):
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (out / "report.html").exists()
    with np.load(out / "findings.npz") as one, np.load(whole / "findings.npz") as other:
        for name in other:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_so_in_one_line_and_shows_the_cursor(folder, tmp_path, number, status):
    ours, theirs = pty.openpty()
    process, shown = start(folder, tmp_path / "out", 400, stdout=theirs), bytearray()
    os.close(theirs)

    def read():  # otherwise the terminal fills up and the run blocks
        with contextlib.suppress(OSError):  # raised when the other end of the terminal is closed
            while more := os.read(ours, 65536):
                shown.extend(more)

    reader = threading.Thread(target=read)
    reader.start()
    processes.wait_until_logged(process, tmp_path / "out", 6)
    process.send_signal(number)
    error = process.communicate(timeout=120)[1]
    reader.join()
    os.close(ours)
    assert process.returncode == status, error
    assert re.fullmatch(r"error: tiny: stopped at step \d+; rerun to resume\n", error), error
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0


@pytest.mark.slow
@pytest.mark.bits
def test_a_run_on_a_full_disk_says_so_and_goes_on_with_room(folder, whole, tmp_path):
    room = (whole / "config.json").stat().st_size  # which is written first; metrics and checkpoints are larger
    assert room < (whole / "metrics.jsonl").stat().st_size
    process = start(folder, tmp_path / "out")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))  # it is still importing
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1 and error.count("\n") == 1, error
    assert re.search(r"error: --out: .*; rerun to resume from the last checkpoint\n$", error), error
    finish(start(folder, tmp_path / "out"))
    assert_same(tmp_path / "out", whole)


@pytest.mark.slow
def test_a_run_with_no_room_for_its_config_names_the_folder(folder, tmp_path):
    process = start(folder, tmp_path / "out")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 2, error
    assert error == f"error: --out: {tmp_path / 'out'}: [Errno 27] File too large\n"
    finish(start(folder, tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.bits
def test_a_finished_run_with_damaged_files_goes_back_and_on(folder, whole, tmp_path):
    out = tmp_path / "out"
    finish(start(folder, out))
    for file in (file for file in (out / "checkpoints" / "12").rglob("*") if file.parent.name == "d"):
        file.write_bytes(file.read_bytes()[:-9])
    with (out / "metrics.jsonl").open("r+b") as lines:  # still complete up to the older checkpoint
        lines.truncate(len(lines.read()) - 100)
    ((_, error),) = finish(start(folder, out))
    first, second = error.splitlines()
    assert first.startswith("warning: ") and "checkpoints/12: the checkpoint" in first
    assert second == f"warning: {out}: resuming from the older checkpoint of step 8"
    assert_same(out, whole)
    assert [file.name for file in (out / "damaged").iterdir()] == ["12"]

    (out / "metrics.jsonl").write_bytes(b"")
    process = start(folder, out)
    error = process.communicate(timeout=300)[1].splitlines()
    assert process.returncode == 2 and "Traceback" not in error
    assert error[-1].startswith("error: --out: ") and error[-1].endswith(f"remove {out} to start over")
    assert (out / "checkpoints" / "12").exists()


@pytest.mark.slow
def test_who_stops_reading_stops_no_report(whole):
    (whole / "report.html").unlink()
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, "-m", "jattn_experiments", "report", "--run", str(whole)]
    process = subprocess.run(words, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, timeout=200, text=True)
    os.close(writes)
    assert (process.returncode, process.stderr) == (0, "")
    assert (whole / "report.html").exists() and json.loads((whole / "claims.json").read_text()) == []
