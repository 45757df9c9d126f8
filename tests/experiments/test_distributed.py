"""Two processes of two devices each: one is lost, slow or silent; the results, once resumed, equal one process's."""

import glob
import json
import re
import shutil
import signal
import socket
import subprocess
import time

import chex
import numpy as np
import pytest

from jattn_experiments import config, run, train
from jattn_experiments.runs.checkpoint import Checkpoints
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.history import History
from tests.experiments import processes
from tests.experiments.processes import assert_close, finish, logged

TINY = """
name: tiny
task: {kind: shift_bank, symbols: 3, length: 12, offsets: [1]}
model: {model_dim: 4, num_heads: 2, head_dim: 2}
train: {seeds: 1, steps: 16, warmup: 2, batch: 4, log_every: 2, look_every: 4, checkpoint_every: 8}
evaluate: {batch: 4}
mesh: {heads: 2, sequence: 2}
"""
LAST = 16

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_experiments_run")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    file = tmp_path_factory.mktemp("distributed") / "tiny.yaml"
    file.write_text(TINY)
    return file


def start(file, out, *words):
    command = ["-m", "jattn_experiments", "run", "--config", file, "--out", out, *words]
    variables = processes.environment(file.parent / "cache", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    return processes.start(*command, variables=variables, stdout=subprocess.PIPE)


def start_two(file, out):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    words = ["--distributed", "--coordinator", coordinator, "--num_processes", "2", "--process_id"]
    return [start(file, out, *words, str(number)) for number in range(2)]


@pytest.fixture(scope="module")
def whole(tiny):
    """The folder of a run in one process with four devices, into which the command divides the CPU."""
    finish(start(tiny, tiny.parent / "whole"))
    return tiny.parent / "whole"


def lose(victim, survivor, when, number=signal.SIGKILL):
    """Sends one of two processes a signal as soon as ``when()``; the other must end within a minute with one line."""
    try:
        while not when():
            assert victim.poll() is survivor.poll() is None, "ended too soon"
            time.sleep(0.001)
        victim.send_signal(number)
        _, error = survivor.communicate(timeout=60)
    finally:
        victim.kill()
        survivor.kill()
    line = "error: stopped: .*; restart all processes to resume from the last checkpoint\n"
    assert survivor.returncode == 1 and re.fullmatch(line, error), error
    return victim.communicate()


@pytest.fixture(scope="module")
def killed(tiny):
    """A folder in which the second of two processes was killed, and the first has stopped."""
    out = tiny.parent / "killed"
    first, second = start_two(tiny, out)
    lose(second, first, lambda: logged(out, 10))
    return out


@pytest.fixture(scope="module")
def half_saved(tiny):
    """A folder in which the first of two processes, their coordinator, was killed while it wrote a checkpoint."""
    out = tiny.parent / "half_saved"
    arrays = str(out / "checkpoints" / f"{LAST}.tmp" / "**" / "d" / "*")
    first, second = start_two(tiny, out)
    lose(first, second, lambda: glob.glob(arrays, recursive=True))
    assert {file.name for file in (out / "checkpoints").iterdir()} == {"8", f"{LAST}.tmp"}
    return out


def test_two_processes_leave_behind_what_one_does(tiny, whole, killed, tmp_path):
    out = shutil.copytree(killed, tmp_path / "out")
    (first, _), (second, _) = finish(*start_two(tiny, out))
    for shown in ("report: ", "noise floor", "loss"):  # the path, the table of heads, the progress
        assert shown in first and shown not in second
    assert_same(tiny, out, whole)


def test_neither_a_crash_within_a_checkpoint_nor_a_slow_process_changes_a_number(tiny, whole, half_saved, tmp_path):
    out = shutil.copytree(half_saved, tmp_path / "out")
    saved = out / "checkpoints" / f"{LAST}"
    first, second = start_two(tiny, out)
    while saved.with_suffix(".tmp").exists() and first.poll() is None:  # until the run resumes, which removes it
        time.sleep(0.01)
    while not saved.exists() and first.poll() is second.poll() is None:  # a tenth of the second's time
        second.send_signal(signal.SIGSTOP)
        time.sleep(0.09)
        second.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    finish(first, second)
    assert_same(tiny, out, whole)


def assert_same(tiny, out, whole):
    """All that a run leaves behind, to the bit."""
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()  # only one process wrote them
    for step in range(0, LAST + 1, 4):
        one, other = History(whole).look(step), History(out).look(step)
        chex.assert_trees_all_equal(one, other)
    assert {file.name for file in out.iterdir()} == {file.name for file in whole.iterdir()}
    assert json.loads((out / "claims.json").read_text()) == []
    one, other = Findings.load(whole), Findings.load(out)
    assert one.environment["device"] == other.environment["device"] == "4 x cpu"
    for name in ("accuracy", "ablated", "divergence", "noise"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    chex.assert_trees_all_equal(*(state_of(tiny, folder) for folder in (whole, out)))


def state_of(file, out):
    setup = train.Setup.of(config.load(["--config", str(file), "--mesh.sequence", "1"]).config)
    checkpoints = Checkpoints(out / "checkpoints")
    assert checkpoints.steps[-1] == LAST
    return checkpoints.load(LAST, setup.init())


def test_one_process_goes_on_with_another_number_of_devices(tiny, whole, killed, tmp_path):
    out = shutil.copytree(killed, tmp_path / "out")
    settings = config.load(["--config", str(tiny), "--mesh.data", "4", "--mesh.heads", "1"]).config
    with run.prepared(settings, out):
        trained = train.train(settings, out)
    assert trained.setup.mesh.size == 8
    assert_close(trained.history.metrics(), History(whole).metrics())


def test_what_two_processes_began_one_ends_on_fewer_devices(tiny, whole, half_saved, tmp_path):
    out = shutil.copytree(half_saved, tmp_path / "out")
    finish(start(tiny, out, "--mesh.heads", "1"))
    one, other = Findings.load(whole), Findings.load(out)
    assert other.environment["device"] == "2 x cpu"
    assert_close(History(out).metrics(), History(whole).metrics())
    for name in ("accuracy", "ablated", "divergence", "noise"):
        np.testing.assert_allclose(getattr(other, name), getattr(one, name), rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_process_that_falls_silent_is_given_up(tiny):
    out = tiny.parent / "silent"
    first, second = start_two(tiny, out)
    lose(second, first, lambda: logged(out, 2), signal.SIGSTOP)  # its connections stay open


def test_sigterm_stops_one_process_and_the_loss_the_other(tiny):
    out = tiny.parent / "stopped"
    first, second = start_two(tiny, out)
    _, error = lose(first, second, lambda: logged(out, 2), signal.SIGTERM)
    line = r"error: tiny: stopped at step \d+; rerun to resume\n"
    assert first.returncode == 143 and re.fullmatch(line, error), error


def test_what_is_not_there_is_said_before_training(tiny, tmp_path):
    process = start(tiny, tmp_path / "out", "--distributed")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2 and error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert error.startswith("error: --distributed: ")
    assert "try --coordinator, --num_processes and --process_id" in error
