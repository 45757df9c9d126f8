"""The imports benchmark: what ``import jattn`` adds to ``import jax``, and ``import jattn.nnx`` to Flax's modules.

Each import runs in a fresh Python, in turn with the other, and each goes first equally often. Bytecode is cached.
Shared by all rows: ``environment``, ``rounds``. The ``rows`` have ``imported``, ``beside``, the medians ``seconds`` of
wall time and ``cpu_seconds`` of both, and the ratios of the medians: ``ratio`` and ``cpu_ratio``, which other programs
on the machine disturb less than the medians.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from jattn_experiments.bench import timing
from jattn_experiments.bench.markdown import document, table
from jattn_experiments.bench.suite import Failed, Job, Results, Suite

ROUNDS = 20
PAIRS = (("jax, jattn", "jax"), ("flax.nnx, jattn.nnx", "flax.nnx"), ("flax.linen, jattn.linen", "flax.linen"))


def about(rounds: int) -> dict[str, Any]:
    """The environment, and how often each program was started."""
    return {"environment": timing.environment(), "rounds": rounds}


def jobs(rounds: int) -> Iterator[Job]:
    """A row per pair of imports."""
    for imported, beside in PAIRS:
        yield Job("rows", {"imported": imported, "beside": beside}, functools.partial(row, imported, beside, rounds))


def row(imported: str, beside: str, rounds: int) -> dict[str, Any]:
    """Starts both programs in turn."""
    programs = [f"import {imported}", f"import {beside}"]
    for program in programs:
        started(program)
    took: dict[str, list[tuple[float, float]]] = {program: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            took[program].append(started(program))
        programs.reverse()
    (seconds, cpu), (seconds_beside, cpu_beside) = (
        [median(times) for times in zip(*took[f"import {names}"], strict=True)] for names in (imported, beside)
    )
    return {
        "seconds": [seconds, seconds_beside],
        "cpu_seconds": [cpu, cpu_beside],
        "ratio": seconds / seconds_beside,
        "cpu_ratio": cpu / cpu_beside,
    }


def started(program: str) -> tuple[float, float]:
    """Seconds of wall time and of processor time of a fresh Python. Raises ``Failed`` if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[1], env=environment)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Failed(f"{program!r} ended with status {process.returncode}")
    return seconds, used.ru_utime + used.ru_stime


def shown(results: Results) -> str:
    """The rows as a Markdown table."""
    lines = [
        [
            f"`import {row['imported']}`",
            f"`import {row['beside']}`",
            *(f"{seconds:.2f}" for seconds in row["seconds"]),
            f"{row['ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
        ]
        for row in results.of("rows")
    ]
    return table(["import", "beside", "s", "s, beside", "ratio", "ratio of processor time"], lines)


def markdown(results: Results) -> str:
    """``imports.md``."""
    return document(
        f"Imports in fresh processes, {results.about['rounds']} of each, in turn: medians of wall time.",
        shown(results),
        ", ".join(f"{name} {value}" for name, value in results.about["environment"].items()),
    )


SUITE = Suite(
    name="imports",
    parts={"rows": ("imported", "beside")},
    about=about,
    jobs=jobs,
    shown=shown,
    markdown=markdown,
    sizes=lambda plan: ROUNDS,
)
