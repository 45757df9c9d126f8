"""The chip suite, for an accelerator: which kernels are right there, how fast they are, and what to change.

A separate process, ``chip_worker``, answers the questions of every step. It is ended at its time limit and started
again after a crash, so a fault costs one question. Without an accelerator the suite is a rehearsal: it runs the CPU's
kernels, and those of chips in an interpreter, at small sizes. All rows share ``environment``, ``shape`` and ``now``
(clocks at the start). Each row has ``answers``, one for every question, and ``seconds``. The parts, the most useful
first:

- ``right``: per kernel and ``share`` of a table of cases, each compared with float64 on the host;
- ``bits``: per kernel, whether looking at heads changes a bit, and whether equal calls agree;
- ``fast``: per case, length and passes, all contestants in turn; ``decode``, ``statistics``, ``ring``;
- ``tuned``: per kernel, head_dim and length, block sizes in turn.
"""

import collections
import dataclasses
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn.testing import AT_SIZE, CASES
from jattn_experiments.bench import chip_report
from jattn_experiments.bench.plan import Plan
from jattn_experiments.bench.suite import Job, Refused, Results, Row, Suite
from jattn_experiments.bench.worker import Worker

# Kernels that have never run on a chip come first.
KERNELS = {
    "tpu": ("pallas_tpu", "splash", "blockwise", "decode", "xla"),
    "gpu": ("pallas_gpu", "cudnn", "blockwise", "decode", "xla"),
    "cpu": (
        "pallas_tpu (interpreted)", "pallas_gpu (interpreted)", "splash (interpreted)",
        "native", "blockwise", "decode", "xla",
    ),
}  # fmt: skip
SHARES = {"at size": 1, "small": 4, "unseen": 1}  # the number of steps into which each table is divided
# The cases of the small table that a rehearsal has time for.
IN_SHORT = ("grouped queries", "causal, top-left", "sinks, and rows that see nothing", "bfloat16, causal")
BLOCKS = ((256, 512), (512, 512), (512, 1024), (1024, 512), (1024, 1024), (1024, 2048), (2048, 1024))
COMMAND = (sys.executable, "-m", "jattn_experiments.bench.chip_worker")
# Two virtual devices, so that a CPU can run a ring.
REHEARSED = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
ON_CHIP = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # leaves memory for the peers
PATIENCE = 2  # processes that a kernel may crash before it is given up


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One run.

    ``facts``: what the device reports about itself. ``now``: what it reports about its clocks. ``kernels``: what to
    check. ``minutes``: the time limit of the whole run. ``limit``: seconds for one question. ``lengths``: sequence
    lengths (T = S) to time. ``parts``: parts of the suite to run. ``command``: the program that answers.
    """

    facts: Mapping[str, Any]
    now: Mapping[str, Any]
    kernels: tuple[str, ...]
    minutes: float = 8.0
    limit: float = 90.0
    lengths: tuple[int, ...] = (4096, 16384)
    head_dims: tuple[int, ...] = (128, 64)
    num_heads: int = 16
    seconds: float = 2.0
    parts: tuple[str, ...] = ("right", "bits", "fast", "decode", "statistics", "ring", "tuned")
    command: tuple[str, ...] = COMMAND
    begun: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def rehearsal(self) -> bool:
        """Whether the machine has no accelerator."""
        return self.facts["platform"] == "cpu"

    @property
    def devices(self) -> int:
        """The number of devices; a rehearsal has two."""
        return 2 if self.rehearsal else self.facts["devices"]

    @classmethod
    def read(cls, plan: Plan) -> "Sizes":
        """Asks which device this is. Raises ``Refused`` if none answers, or for an unknown kernel."""
        begun, worker = time.monotonic(), Worker(COMMAND, ON_CHIP | _own_modules(), 180.0)
        try:
            device = worker(ask="device")
            if device["result"] != "measured":
                raise Refused(f"--suite chip: JAX found no device that answers: {device['reason']}")
            facts, on_cpu = device["facts"], device["facts"]["platform"] == "cpu"
            if on_cpu and os.environ.get("JAX_PLATFORMS") != "cpu" and (unseen := _unseen()):
                raise Refused(
                    f"--suite chip: this machine has {unseen}, but JAX sees only the CPU. Run pip install "
                    "'jattn[gpu]' or 'jattn[tpu]', or set JAX_PLATFORMS=cpu to rehearse on the CPU"
                )
            rehearsal = ": no accelerator, so this is a rehearsal" * on_cpu
            print(f"On {facts['devices']} x {facts['device']}, JAX {facts['jax']}{rehearsal}")
            named = tuple(word.strip() for word in plan.kernels.split(",") if word.strip())
            kernels = named or KERNELS.get(facts["platform"], ("blockwise", "decode", "xla"))
            for kernel in kernels:
                known = worker(ask="known", kernel=kernel)
                if known["result"] != "measured":
                    raise Refused(f"--kernels: {known['reason'].removeprefix('ValueError: ')}")
        finally:
            worker.close()
        small = {"lengths": (256,), "head_dims": (64,), "num_heads": 2, "seconds": 0.5} if on_cpu else {}
        return cls(facts, device["now"], kernels, minutes=plan.minutes, begun=begun, **small)


def _own_modules() -> dict[str, str]:
    """The environment in which the worker processes can import a user's modules from the current folder."""
    return {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _unseen() -> str | None:
    """An accelerator that the operating system shows, or None."""
    if any(Path("/dev").glob("accel[0-9]*")):
        return "a TPU"
    return "an NVIDIA GPU" if Path("/dev/nvidia0").exists() else None


def about(sizes: Sizes) -> dict[str, Any]:
    """The device, its versions, and the shape of what is timed."""
    shape = {"lengths": list(sizes.lengths), "head_dims": list(sizes.head_dims), "num_heads": sizes.num_heads}
    return {"environment": dict(sizes.facts), "now": dict(sizes.now), "shape": shape}


class Asking:
    """Asks questions in processes that may crash, until the run's time is over."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.last = sizes.begun + 60 * sizes.minutes
        environment = REHEARSED if sizes.rehearsal else ON_CHIP
        self.worker = Worker(sizes.command, environment | _own_modules(), sizes.limit)
        self.ended: collections.Counter[str] = collections.Counter()  # processes that a kernel crashed or held too long

    def __call__(self, questions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """``answers`` and ``seconds`` of one step, from a fresh process; None if the time is too short for all."""
        begin, answers = time.monotonic(), []
        for question in questions:
            among = next((name for name in ("kernels", "sizes") if name in question), None)
            kernel = question.get("kernel", "")
            answer = self._of(kernel, question) if among is None else self._among(among, question)
            if answer is None:
                break
            answers.append({"asked": dict(question), **answer})
        self.worker.close()
        done = len(answers) == len(questions)
        return {"answers": answers, "seconds": round(time.monotonic() - begin, 1)} if done else None

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer; None if it was ended by the run's time limit rather than the question's."""
        left = self.last - time.monotonic()
        if left <= 0:
            return None
        self.worker.limit = min(self.sizes.limit, left)
        answer = self.worker(**question)
        answer["ended"] = self.worker.process is None
        if answer["result"] == "failed":
            self.worker.close()  # an error on a device may outlive its question
        cut = answer["ended"] and left < self.sizes.limit and answer["reason"].startswith("took more than")
        return None if cut else answer

    def _of(self, kernel: str, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer about one kernel. A kernel that has crashed several processes is skipped."""
        if self.ended[kernel] >= PATIENCE:
            return {"result": "failed", "reason": f"skipped: {PATIENCE} earlier processes crashed or took too long"}
        answer = self._ask(question)
        if answer is not None:
            self.ended[kernel] += answer.pop("ended")
        return answer

    def _among(self, name: str, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """Answers for several kernels or sizes in turn; if one crashes the process, each gets its own process."""
        several = [one for one in question[name] if name == "sizes" or self.ended[one] < PATIENCE]
        together = self._ask(question | {name: several})
        if together is None or not together.pop("ended"):
            return together
        merged: dict[str, Any] = {"apart": True, "medians": {}, "left_out": {}}
        for one in several:
            kernel, label = (question["kernel"], "x".join(map(str, one))) if name == "sizes" else (one, f"jattn {one}")
            answer = self._of(kernel, question | {name: [one]})
            if answer is None:
                return None
            if answer["result"] == "failed":
                merged["left_out"][label] = answer["reason"]
            else:
                merged = answer | {key: merged[key] | answer[key] for key in ("medians", "left_out")} | {"apart": True}
        return merged if merged["medians"] else together


def jobs(sizes: Sizes) -> Iterator[Job]:
    """The steps, the most useful first."""
    ask = Asking(sizes)
    for part, key, questions in _steps(sizes):
        if part in sizes.parts:
            yield Job(part, key, functools.partial(ask, questions))


Step = tuple[str, dict[str, Any], list[dict[str, Any]]]


def _steps(sizes: Sizes) -> Iterator[Step]:
    """The first two kernels come first: the one that never ran on a chip, and the default next to it."""
    first, *longer = sizes.lengths
    ours, others = sizes.kernels[:2], sizes.kernels[2:]
    cases = ("causal",) if sizes.rehearsal else ("causal", "full")
    for kernel in ours:
        yield from _is_right(sizes, kernel)
    yield from _contests(sizes, cases, [first])
    yield from _others_timed(sizes, first)
    tuned = list(itertools.product(sizes.head_dims, sizes.lengths))
    yield from _tuned(sizes, ours, tuned[:1])
    for kernel in others:
        yield from _is_right(sizes, kernel)
    yield from _tuned(sizes, others, tuned[:1])
    if not sizes.rehearsal:
        yield from _tuned(sizes, sizes.kernels, tuned[1:])
        yield from _contests(sizes, cases, longer)
        yield from _contests(sizes, ("window", "segments", "alibi", "softcap"), [first])
        for kernel in sizes.kernels:
            yield from _right(kernel, "small", [name for name, case in CASES.items() if not case.poisoned])


def _is_right(sizes: Sizes, kernel: str) -> Iterator[Step]:
    yield from _right(kernel, *(("small", IN_SHORT) if sizes.rehearsal else ("at size", list(AT_SIZE))))
    length, num_heads, times = (64, 2, 2) if sizes.rehearsal else (2048, 8, 20)
    question = {"ask": "bits", "kernel": kernel, "head_dim": sizes.head_dims[0]}
    question |= {"length": length, "num_heads": num_heads, "times": times}
    checks = ("looking", "looking, gradient", "twice", "twice, gradient")
    yield "bits", {"kernel": kernel}, [question | {"check": check} for check in checks]
    yield from _right(kernel, "unseen", [name for name, case in CASES.items() if case.poisoned])


def _right(kernel: str, table: str, names: Sequence[str]) -> Iterator[Step]:
    """The cases of a table in several steps, so that a run that ends early loses little."""
    size = math.ceil(len(names) / (SHARES[table] if len(names) > len(IN_SHORT) else 1))
    for part in range(math.ceil(len(names) / size)):
        key = {"kernel": kernel, "table": table, "share": part}
        question = {"ask": "right", "kernel": kernel, "table": table}
        yield "right", key, [question | {"case": case} for case in names[part * size : (part + 1) * size]]


def _shape(sizes: Sizes) -> dict[str, Any]:
    return {"num_heads": sizes.num_heads, "head_dim": sizes.head_dims[0], "seconds": sizes.seconds}


def _contests(sizes: Sizes, cases: Sequence[str], lengths: Sequence[int]) -> Iterator[Step]:
    for length, case, passes in itertools.product(lengths, cases, ("forward", "both")):
        key = {"case": case, "length": length, "passes": passes}
        yield "fast", key, [{"ask": "fast", "kernels": sizes.kernels, **_shape(sizes), **key}]


def _others_timed(sizes: Sizes, length: int) -> Iterator[Step]:
    key, timed = {"length": 8 * length}, {"kernels": sizes.kernels, "seconds": sizes.seconds}
    yield "decode", key, [{"ask": "decode", "batch": 1 if sizes.rehearsal else 8, **key, **timed}]
    key = {"length": length}
    yield "statistics", key, [{"ask": "statistics", "kernels": sizes.kernels, **key, **_shape(sizes)}]
    if sizes.devices > 1:
        key = {"length": length * sizes.devices}
        yield "ring", key, [{"ask": "ring", **key, **_shape(sizes)}]


def _tuned(sizes: Sizes, kernels: Sequence[str], places: Sequence[tuple[int, int]]) -> Iterator[Step]:
    for (head_dim, length), kernel in itertools.product(places, kernels):
        if kernel.partition(" ")[0] in chip_report.TUNABLE:
            pairs = [pair for pair in BLOCKS if max(pair) <= length] or [(128, 128), (128, 256)]  # a rehearsal's
            key = {"kernel": kernel, "head_dim": head_dim, "length": length}
            question = {"ask": "tune", "num_heads": sizes.num_heads, "seconds": sizes.seconds, "sizes": pairs}
            yield "tuned", key, [question | key]


def line(row: Row) -> str:
    """A step in one line."""
    return f"{' '.join(map(str, (row.part, *row.key.values())))}: {chip_report.outcome(row)} ({row['seconds']:g} s)"


def wrong(results: Results) -> str | None:
    """The kernels that gave wrong results, or None."""
    bad = [one.kernel for one in chip_report.verdicts(results) if one.wrong]
    return f"wrong on this device: {', '.join(bad)}" if bad else None


SUITE = Suite(
    name="chip",
    parts={
        "right": ("kernel", "table", "share"),
        "bits": ("kernel",),
        "fast": ("case", "length", "passes"),
        "decode": ("length",),
        "statistics": ("length",),
        "ring": ("length",),
        "tuned": ("kernel", "head_dim", "length"),
    },
    about=about,
    jobs=jobs,
    markdown=chip_report.markdown,
    shown=chip_report.shown,
    draw=chip_report.write_figure,
    sizes=Sizes.read,
    line=line,
    wrong=wrong,
    resumable=True,
)
