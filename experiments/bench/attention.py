"""The attention benchmark: jattn and its peers on the same problems, in turn, each figure kept as soon as it is known.

What is found is one dict, kept as ``attention.json``:

- ``environment``, ``shape``, ``missing`` (peer: why it is not here);
- ``times``: rows of ``case``, ``length``, ``dtype``, ``passes``, ``medians`` (contestant: microseconds), ``left_out``
  (contestant: why), ``matrix`` (microseconds of a product of two square matrices, timed in the same turns),
  ``matrix_flops`` of it, ``flops`` of the row, ``rounds`` of turns, the ``seconds`` that they were to take;
- ``memory``: ``bytes`` of temporaries that XLA plans for one head, by ``contestant``, ``case``, ``length``, ``passes``;
- ``peak``: ``bytes`` that a fresh process holds at most beyond one that makes the inputs and no more;
- ``compile``: ``seconds``, of three fresh processes.

Where something could not be measured, ``bytes`` or ``seconds`` is null and ``reason`` says why.
"""

import dataclasses
import functools
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.bench import figure, peers, tables, timing
from experiments.bench.cases import DTYPES, PARTS, PASSES, Plan, Problem
from experiments.bench.probe import probe
from experiments.config import differences
from experiments.runs.folder import write_atomically

ROUNDS, SETTLE, MATRIX = 3, 0.01, 2048
PEAK_LENGTH, COMPILED_LENGTHS, COMPILATIONS = 8192, (2048, 32768), 3
PLAIN = ("full", "causal")  # the cases whose memory and compilation are measured


@dataclasses.dataclass(frozen=True)
class Job:
    """One thing to measure: ``run()`` gives the fields that are added to ``key`` in the list ``part``."""

    part: str
    key: dict[str, Any]
    run: Callable[[], dict[str, Any]]


class Refused(ValueError):
    """What the options ask for cannot be done here; one line, which names the option."""


def measure(plan: Plan, resume: bool = False) -> dict[str, Any]:
    """Measures what ``plan`` asks for and keeps it in its folder after every figure; returns all that is there.

    Raises:
        Refused: the folder holds results already and ``resume`` is false, or they are of another environment.
    """
    contestants, missing = peers.contestants(tuple(plan.peers), plan.device)
    found = _begin(plan, [one.name for one in contestants], missing, resume)
    done = {part: [row.items() for row in found[part]] for part in PARTS}
    jobs = [job for job in _jobs(plan, contestants) if not any(job.key.items() <= row for row in done[job.part])]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=" ".join(str(value) for value in (job.part, *job.key.values())))
            found[job.part].append(job.key | job.run())
            write(found, plan.out)
            progress.advance(task)
    write(found, plan.out)
    return found


def write(found: dict[str, Any], out: Path) -> None:
    """Keeps ``found`` in ``out``; whoever stops the program, a whole file is there."""
    write_atomically(out / "attention.json", _text(found).encode())


def _text(found: dict[str, Any]) -> str:
    """As JSON, a row a line."""
    lines = []
    for name, value in found.items():
        rows = ",\n".join(f"  {json.dumps(row)}" for row in value) if isinstance(value, list) else ""
        lines.append(f' "{name}": ' + (f"[\n{rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(out: Path) -> dict[str, Any]:
    """What ``write`` kept. Raises ``Refused`` where nothing was."""
    file = out / "attention.json"
    try:
        return json.loads(file.read_text())
    except OSError:
        raise Refused(f"--out: expected a folder with attention.json, got {str(out)!r}") from None
    except ValueError as wrong:
        raise Refused(f"--out: {file} is not valid JSON: {wrong}") from None


def write_report(found: dict[str, Any], out: Path) -> None:
    """``attention.md`` and ``attention.png`` beside the JSON: functions of ``found``, whenever they are written."""
    write_atomically(out / "attention.md", tables.markdown(found).encode())
    figure.write_figure(found, out / "attention.png")


def _begin(plan: Plan, names: list[str], missing: dict[str, str], resume: bool) -> dict[str, Any]:
    """What is there already, where it may go on, or nothing yet."""
    about = environment(plan, names)
    file = plan.out / "attention.json"
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise Refused(f"--out: {wrong}") from None
    if not file.exists():
        shape = {key: getattr(Problem("full", 1), key) for key in ("num_heads", "head_dim")} | {"batch": 1}
        found: dict[str, Any] = {"environment": about, "shape": shape, "missing": missing}
        return found | {"times": [], "memory": [], "peak": [], "compile": []}
    if not resume:
        raise Refused(f"--out: {file} holds results already; --resume goes on with them")
    found = read(plan.out)
    changed = differences(found["environment"], about)
    if changed:
        raise Refused(f"--out: {file} holds results of another environment: {'; '.join(changed)}")
    return found


def environment(plan: Plan, names: list[str]) -> dict[str, str]:
    """What the numbers are measured on, and of what: versions, hardware, and a digest of jattn's source."""
    about = timing.environment() | {"contestants": ", ".join(names), "jattn_source": timing.source_digest()}
    about |= {"cpu": timing.cpu_model(), "memory": f"{memory_bytes('cpu') / 2**30:.0f} GiB"}
    return about | peers.versions(tuple(plan.peers)) | {"numpy": np.__version__}


def memory_bytes(device: str) -> float:
    """How much memory the device has; of the machine, what this process may use."""
    if device == "gpu":
        return float(jax.devices()[0].memory_stats()["bytes_limit"])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's
    text = limit.read_text().strip() if limit.exists() else "max"
    return float(total if text == "max" else min(total, int(text)))


def use(device: str) -> None:
    """Makes JAX run on ``device``, before anything else has made it choose.

    Raises:
        Refused: there is no such device.
    """
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers want some of the memory, too
    try:
        jax.devices("gpu")
    except RuntimeError:
        raise Refused("--device: JAX finds no gpu here; pip install '.[gpu]' brings it for NVIDIA's") from None


def _jobs(plan: Plan, contestants: list[peers.Contestant]) -> Iterator[Job]:
    makers = {"times": _times, "memory": _memory, "peak": _peak, "compile": _compile}
    for part in plan.parts:
        yield from makers[part](plan, contestants)


def _times(plan: Plan, contestants: list[peers.Contestant]) -> Iterator[Job]:
    """Short lengths first, so that a run that is stopped has told most."""
    memory = memory_bytes(plan.device) / 3
    for length, dtype, case in itertools.product(plan.lengths, DTYPES[plan.device], plan.cases):
        for passes in PASSES:
            problem = Problem(case, length, dtype)
            key = {"case": case, "length": length, "dtype": dtype, "passes": passes}
            yield Job("times", key, functools.partial(time_row, problem, passes, contestants, memory, plan.seconds))


def time_row(
    problem: Problem, passes: str, contestants: list[peers.Contestant], memory: float, seconds: float
) -> dict[str, Any]:
    """Times all contestants that can do the problem in ``memory`` bytes, and the product of two matrices."""
    calls: dict[str, Callable] = {}
    left_out = {}
    for contestant in contestants:
        reason = peers.why_not(contestant, problem, memory)
        if reason is None:
            try:
                call = contestant.call(problem, passes)
                call()  # compiles
                calls[contestant.name] = call
            except Exception as error:
                if contestant.name == "jattn":
                    raise
                reason = _first_line(error)
        if reason is not None:
            left_out[contestant.name] = reason
    matrix = matrix_product(problem.dtype)
    matrix()
    medians, rounds = timing.in_turn([*calls.values(), matrix], seconds, least=ROUNDS, settle=SETTLE)
    *medians, product = (round(median, 2) for median in medians)
    found = {"medians": dict(zip(calls, medians, strict=True)), "left_out": left_out}
    found |= {"rounds": rounds, "seconds": seconds}
    return found | {"flops": problem.flops(passes), "matrix": product, "matrix_flops": 2.0 * MATRIX**3}


def matrix_product(dtype: str) -> Callable[[], Any]:
    """A call of the product of two square matrices: the rate that this machine reaches at this moment."""
    matrix = jax.random.normal(jax.random.key(0), (MATRIX, MATRIX), dtype)
    product = jax.jit(lambda a, b: a @ b)
    return lambda: jax.block_until_ready(product(matrix, matrix))


def _memory(plan: Plan, contestants: list[peers.Contestant]) -> Iterator[Job]:
    """Temporaries of one head; compiled and not run, so any length will do."""
    for one, case, passes in itertools.product(contestants, _plain(plan), (*PASSES, "hvp")):
        for length in plan.lengths if isinstance(one, peers.InJax) else ():
            problem = Problem(case, length, _dtype(plan, one), num_heads=1)
            key = {"contestant": one.name, "case": case, "passes": passes, "length": length}
            yield Job("memory", key, functools.partial(temporaries, one, problem, passes))


def temporaries(contestant: peers.InJax, problem: Problem, passes: str) -> dict[str, Any]:
    """Bytes that XLA plans beside inputs and outputs."""
    arrays = problem.arrays()
    shapes = [jax.ShapeDtypeStruct(x.shape, problem.dtype if i < 3 else x.dtype) for i, x in enumerate(arrays)]
    try:
        compiled = jax.jit(contestant.function(problem, passes)).lower(*shapes).compile()
    except Exception as error:
        if contestant.name == "jattn":
            raise
        return {"bytes": None, "reason": _first_line(error)}
    return {"bytes": compiled.memory_analysis().temp_size_in_bytes}


def _peak(plan: Plan, contestants: list[peers.Contestant]) -> Iterator[Job]:
    """Forward and backward of all heads at the longest length up to ``PEAK_LENGTH``, where it fits."""
    lengths = [length for length in plan.lengths if length <= PEAK_LENGTH]
    for one, case in itertools.product(contestants, _plain(plan)):
        problem = Problem(case, max(lengths, default=PEAK_LENGTH), _dtype(plan, one))
        if peers.why_not(one, problem, memory_bytes(plan.device) / 3) is None:
            key = {"contestant": one.name, "case": case, "length": problem.length}
            yield Job("peak", key, functools.partial(_peak_bytes, plan, one, problem))


def _peak_bytes(plan: Plan, contestant: peers.Contestant, problem: Problem) -> dict[str, Any]:
    ask = functools.partial(probe, "peak", plan.device, list(plan.peers), contestant.name, problem)
    try:
        return {"bytes": ask("both") - ask("inputs")}
    except RuntimeError as error:
        return {"bytes": None, "reason": str(error)}


def _compile(plan: Plan, contestants: list[peers.Contestant]) -> Iterator[Job]:
    """Of the lengths that are named for it, those that are asked for, or the longest."""
    lengths = [length for length in COMPILED_LENGTHS if length in plan.lengths] or [max(plan.lengths)]
    for one, case, length, passes in itertools.product(contestants, _plain(plan), lengths, PASSES):
        problem = Problem(case, length, _dtype(plan, one))
        if isinstance(one, peers.InJax) and peers.why_not(one, problem, memory_bytes(plan.device) / 3) is None:
            key = {"contestant": one.name, "case": case, "length": length, "passes": passes}
            yield Job("compile", key, functools.partial(_compile_seconds, plan, one, problem, passes))


def _compile_seconds(plan: Plan, contestant: peers.Contestant, problem: Problem, passes: str) -> dict[str, Any]:
    ask = functools.partial(probe, "compile", plan.device, list(plan.peers), contestant.name, problem, passes)
    try:
        return {"seconds": statistics.median(ask() for _ in range(COMPILATIONS))}
    except RuntimeError as error:
        return {"seconds": None, "reason": str(error)}


def _plain(plan: Plan) -> list[str]:
    return [case for case in PLAIN if case in plan.cases]


def _dtype(plan: Plan, contestant: peers.Contestant) -> str:
    return next(dtype for dtype in DTYPES[plan.device] if dtype in contestant.dtypes)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
