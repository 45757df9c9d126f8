"""What tests of separate processes share: a tiny experiment, and processes whose results are reproducible."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]

TINY = """
name: tiny
task: {kind: shift_bank, symbols: 3, length: 12, offsets: [1, 3]}
model: {model_dim: 4, num_heads: 2, head_dim: 2}
train: {seeds: 1, steps: 12, warmup: 1, batch: 4, log_every: 1, look_every: 2, checkpoint_every: 4}
evaluate: {batch: 8}
"""


def environment(cache: Path, **others: str) -> dict[str, str]:
    """The variables of a process that runs on one thread and keeps its compiled programs in ``cache``.

    With several threads, XLA's CPU backend may add in a different order each time.
    """
    return {
        **os.environ,
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **others,
    }


def start(*words: object, variables: dict[str, str], **pipes) -> subprocess.Popen:
    """Python with these words and variables; its errors can be read."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True} | pipes
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, env=variables, **pipes)


def finish(*processes: subprocess.Popen) -> list[tuple[str, str]]:
    """What they print, once all have ended without an error."""
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def logged(out: Path, step: int) -> bool:
    """Whether the metrics of a step are written."""
    lines = out / "metrics.jsonl"
    return lines.exists() and f'"step": {step},' in lines.read_text()


def wait_until_logged(process: subprocess.Popen, out: Path, step: int) -> None:
    """Returns once the metrics of a step are written, or the process has ended."""
    while process.poll() is None and not logged(out, step):
        time.sleep(0.001)


def assert_close(measured: tuple, expected: tuple) -> None:
    """Of two histories' metrics or scores: the same steps and names, and numbers as close as other devices give."""
    (steps, values), (expected_steps, expected_values) = measured, expected
    assert steps.tolist() == expected_steps.tolist() and set(values) == set(expected_values)
    for name in values:
        np.testing.assert_allclose(values[name], expected_values[name], rtol=1e-5, atol=1e-6, err_msg=name)
