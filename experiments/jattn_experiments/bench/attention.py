"""The attention benchmark: jattn and its peers in turn on the same problems, each number saved once measured.

Shared by all rows: ``environment``, ``shape``, ``missing`` (peer: why it is unavailable). The parts:

- ``times``: rows of ``case``, ``length``, ``dtype``, ``passes``, ``medians`` (contestant: microseconds), ``left_out``
  (contestant: why), ``matrix`` (microseconds of a product of two square matrices, timed in the same turns), its
  ``matrix_flops``, the row's ``flops``, ``rounds`` of turns, and the ``seconds`` allotted; ``plain`` (contestant of
  jattn: microseconds of the case that ``PLAIN`` names, in the same turns);
- ``memory``: ``bytes`` of temporaries that XLA plans for one head, by ``contestant``, ``case``, ``length``, ``passes``;
- ``peak``: peak ``bytes`` of a fresh process, minus those of one that only makes the inputs;
- ``compile``: median ``seconds`` of three fresh processes.

If something could not be measured, ``bytes`` or ``seconds`` is null and ``reason`` says why.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn_experiments.bench import attention_figure, attention_tables, peers, timing
from jattn_experiments.bench.plan import Plan
from jattn_experiments.bench.probe import probe
from jattn_experiments.bench.problems import DTYPES, PASSES, PLAIN, Problem
from jattn_experiments.bench.suite import Job, Suite
from jattn_experiments.bench.worker import first_line
from jattn_experiments.runs.folder import RESULTS

ROUNDS, SETTLE, MATRIX = 3, 0.01, 2048
PEAK_LENGTH, COMPILED_LENGTHS, COMPILATIONS = 8192, (2048, 32768), 3
MEASURED = ("full", "causal")  # the cases measured for memory and compilation


def about(plan: Plan) -> dict[str, Any]:
    """The environment, the shape of the problems, and which peers are missing."""
    contestants, missing = peers.contestants(plan.peers, plan.device)
    shape = {"num_heads": Problem.num_heads, "head_dim": Problem.head_dim, "batch": plan.batch}
    memory = f"{timing.memory_bytes('cpu') / 2**30:.0f} GiB"
    here = timing.machine() | {"contestants": ", ".join(one.name for one in contestants), "memory": memory}
    here |= peers.versions(plan.peers) | {"numpy": np.__version__}
    return {"environment": here, "shape": shape, "missing": missing, "before": last_kept(here, shape, plan.out)}


def last_kept(here: Mapping[str, str], shape: Mapping[str, int], out: Path) -> dict[str, Any]:
    """The newest kept results of this kind of machine and shape outside ``out``: ``folder`` and jattn's ``shares``."""
    kind = ("device", "cpu", "vectors", "cores")
    for folder in sorted(RESULTS.glob(f"*/{SUITE.name}.json"), reverse=True):
        if folder.parent.resolve() != out.resolve():
            kept = SUITE.read(folder.parent)
            same = all(kept.about["environment"].get(name) == here[name] for name in kind)
            if same and kept.about["shape"] == shape:
                return {"folder": folder.parent.name, "shares": attention_tables.shares(kept)}
    return {"folder": "", "shares": {}}


def jobs(plan: Plan) -> Iterator[Job]:
    """All jobs of the plan, part by part."""
    contestants = peers.contestants(plan.peers, plan.device)[0]
    memory = timing.memory_bytes(plan.device) / 3  # what the scores of a peer may take
    jobs_of = {"times": _times, "memory": _memory, "peak": _peak, "compile": _compile}
    for part in plan.parts:
        for key, measure in jobs_of[part](plan, contestants, memory):
            yield Job(part, key, measure)


Measurements = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]  # key, what to call


def _times(plan: Plan, contestants: list[peers.Contestant], memory: float) -> Measurements:
    """Short lengths first, so that a stopped run has most rows."""
    for length, dtype, case, passes in itertools.product(plan.lengths, DTYPES[plan.device], plan.cases, PASSES):
        problem = Problem(case, length, dtype, batch=plan.batch)
        key = {"case": case, "length": length, "dtype": dtype, "passes": passes}
        yield key, functools.partial(time_row, problem, passes, contestants, memory, plan.seconds)


def time_row(
    problem: Problem, passes: str, contestants: list[peers.Contestant], memory: float, seconds: float
) -> dict[str, Any]:
    """Times all contestants that can do the problem in ``memory`` bytes, and the product of two matrices."""
    calls: dict[str, timing.Call] = {}
    left_out = {}
    for contestant in contestants:
        if reason := peers.unsupported_reason(contestant, problem, memory):
            left_out[contestant.name] = reason
            continue
        try:
            call = contestant.repeated(problem, passes)
            call()  # compiles
            calls[contestant.name] = call
        except Exception as error:
            if contestant.name == "jattn":
                raise
            left_out[contestant.name] = first_line(error)
    plain: dict[str, timing.Call] = {}
    for contestant in contestants if problem.case in PLAIN else ():
        if contestant.name in calls and contestant.name.startswith("jattn"):
            beside = dataclasses.replace(problem, case=PLAIN[problem.case])
            if peers.unsupported_reason(contestant, beside, memory) is None:
                plain[contestant.name] = contestant.repeated(beside, passes)
                plain[contestant.name]()
    # The product of two square matrices: the machine's current rate.
    square, multiply = jax.random.normal(jax.random.key(0), (MATRIX, MATRIX), problem.dtype), jax.jit(jnp.matmul)
    matrix = lambda: jax.block_until_ready(multiply(square, square))
    matrix()
    every = [*calls.values(), *plain.values(), matrix]
    medians, rounds = timing.in_turn(every, seconds, least=ROUNDS, settle=SETTLE)
    *medians, product = (round(median, 2) for median in medians)
    return {
        "medians": dict(zip(calls, medians, strict=False)),
        "left_out": left_out,
        "plain": dict(zip(plain, medians[len(calls) :], strict=True)),
        "rounds": rounds,
        "seconds": seconds,
        "flops": problem.flops(passes),
        "matrix": product,
        "matrix_flops": 2.0 * MATRIX**3,
    }


def _memory(plan: Plan, contestants: list[peers.Contestant], memory: float) -> Measurements:
    """Temporaries of one head. The call is compiled but never run, so any length works."""
    for one, case, passes in itertools.product(contestants, _measured(plan), (*PASSES, "hvp")):
        for length in plan.lengths if isinstance(one, peers.InJax) else ():
            problem = Problem(case, length, _dtype(plan, one), num_heads=1)
            key = {"contestant": one.name, "case": case, "passes": passes, "length": length}
            yield key, functools.partial(temporaries, one, problem, passes)


def temporaries(contestant: peers.InJax, problem: Problem, passes: str) -> dict[str, Any]:
    """Bytes that XLA plans in addition to inputs and outputs."""
    arrays = problem.arrays()
    shapes = [jax.ShapeDtypeStruct(x.shape, problem.dtype if i < 3 else x.dtype) for i, x in enumerate(arrays)]
    try:
        compiled = jax.jit(contestant.function(problem, passes)).lower(*shapes).compile()
    except Exception as error:
        if contestant.name == "jattn":
            raise
        return {"bytes": None, "reason": first_line(error)}
    return {"bytes": compiled.memory_analysis().temp_size_in_bytes}


def _peak(plan: Plan, contestants: list[peers.Contestant], memory: float) -> Measurements:
    """Forward and backward of all heads at the longest length up to ``PEAK_LENGTH``, if it fits."""
    longest = max((length for length in plan.lengths if length <= PEAK_LENGTH), default=PEAK_LENGTH)
    for one, case in itertools.product(contestants, _measured(plan)):
        problem = Problem(case, longest, _dtype(plan, one), batch=plan.batch)
        if peers.unsupported_reason(one, problem, memory) is None:
            ask = functools.partial(probe, "peak", plan.device, plan.peers, one.name, problem)
            bytes_beyond_inputs = lambda ask=ask: ask("both") - ask("inputs")
            key = {"contestant": one.name, "case": case, "length": longest}
            yield key, functools.partial(_or_reason, "bytes", bytes_beyond_inputs)


def _compile(plan: Plan, contestants: list[peers.Contestant], memory: float) -> Measurements:
    """Uses the plan's lengths that are in ``COMPILED_LENGTHS``, or else the plan's longest."""
    lengths = [length for length in COMPILED_LENGTHS if length in plan.lengths] or [max(plan.lengths)]
    for one, case, length, passes in itertools.product(contestants, _measured(plan), lengths, PASSES):
        problem = Problem(case, length, _dtype(plan, one), batch=plan.batch)
        if isinstance(one, peers.InJax) and peers.unsupported_reason(one, problem, memory) is None:
            ask = functools.partial(probe, "compile", plan.device, plan.peers, one.name, problem, passes)
            seconds = lambda ask=ask: statistics.median(ask() for _ in range(COMPILATIONS))
            key = {"contestant": one.name, "case": case, "length": length, "passes": passes}
            yield key, functools.partial(_or_reason, "seconds", seconds)


def _or_reason(name: str, measure: Callable[[], float]) -> dict[str, Any]:
    """What fresh processes measure, or why one of them failed."""
    try:
        return {name: measure()}
    except RuntimeError as error:
        return {name: None, "reason": str(error)}


def _measured(plan: Plan) -> list[str]:
    return [case for case in MEASURED if case in plan.cases]


def _dtype(plan: Plan, contestant: peers.Contestant) -> str:
    return next(dtype for dtype in DTYPES[plan.device] if dtype in contestant.dtypes)


SUITE = Suite(
    name="attention",
    parts={
        "times": ("case", "length", "dtype", "passes"),
        "memory": ("contestant", "case", "passes", "length"),
        "peak": ("contestant", "case", "length"),
        "compile": ("contestant", "case", "length", "passes"),
    },
    about=about,
    jobs=jobs,
    markdown=attention_tables.markdown,
    shown=attention_tables.shown,
    draw=attention_figure.write_figure,
    start=lambda plan: timing.use(plan.device),
    resumable=True,
)
