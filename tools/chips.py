"""The chips suite: jattn compiled for absent chips: what compiles, what is refused, and the planned memory.

Nothing is executed, so it measures no speed and no numbers. Shared by all rows: ``environment``, ``shape``. The
``cells`` have ``implementation``, ``chip``, ``head_dim``, ``length``, ``case``, ``passes``, and what
``chip_compiler.compiled`` finds: ``result``, ``reason``, ``seconds``, ``temporaries``, ``kernels``, ``spills``.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jattn.kernels.dispatch import IMPLEMENTATIONS
from jattn_experiments.bench import timing
from jattn_experiments.bench.markdown import document, listed, table
from jattn_experiments.bench.plan import Plan
from jattn_experiments.bench.suite import Job, Refused, Results, Row, Suite
from tools.chip_compiler import CASES, GPUS, NOTHING, NUM_HEADS, TOPOLOGIES, Compiler

# The axes that name a cell. No value is in two lists, so that --cells may mix them.
AXES: dict[str, tuple[Any, ...]] = {
    "implementation": ("splash", "pallas_tpu", "cudnn", "pallas_gpu", "fold", "blockwise"),
    "chip": (*TOPOLOGIES, *GPUS),
    "head_dim": (64, 128, 256),
    "length": (8192, 8191),
    "case": tuple(CASES),
    "passes": ("forward", "gradient"),
}
RESULTS = ("compiled", "refused", "failed")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The values of each axis."""

    axes: Mapping[str, tuple[Any, ...]]

    @classmethod
    def read(cls, cells: str) -> "Sizes":
        """Reads words separated by commas. An axis is restricted to its words; an axis without words is complete.

        Raises:
            Refused: a word is not a value of any axis.
        """
        words = {word.strip() for word in cells.split(",") if word.strip()}
        chosen = {name: tuple(x for x in values if str(x) in words) for name, values in AXES.items()}
        known = [str(x) for values in AXES.values() for x in values]
        if not words <= set(known):
            raise Refused(f"--cells: expected some of {', '.join(known)}, separated by commas, got {cells!r}")
        return cls({name: chosen[name] or values for name, values in AXES.items()})


COMPILERS = {"libtpu": "the TPU's", "jax_cuda13_plugin": "the GPU's"}


def start(plan: Plan, suite: str = "chips") -> None:
    """Looks for the compilers. Raises ``Refused`` without them."""
    for module, whose in COMPILERS.items():
        if importlib.util.find_spec(module) is None:
            raise Refused(
                f"suite {suite}: expected {module}, {whose} compiler, found none. `make test-chips` installs it. Under "
                "Python 3.12 or newer, `pip install 'jattn[experiments,chips]'` does as well"
            )
    timing.use("cpu")  # this process leaves any TPU alone


def about(sizes: Sizes) -> dict[str, Any]:
    """The versions, and the shape of the problems."""
    return {"environment": environment(), "shape": {"dtype": "bfloat16", "batch": 1, "num_heads": NUM_HEADS}}


def environment() -> dict[str, str]:
    """The versions that decide a cell's outcome."""
    facts = timing.environment()
    versions = {name: facts[name] for name in ("python", "jax", "jattn")}
    versions |= {name: importlib.metadata.version(name) for name in COMPILERS}
    return versions | {"jattn_source": timing.source_digest()}


class Ahead:
    """``outcome = ahead(index)`` for cells in order, while a process on each core compiles the next ones."""

    def __init__(self, cells: Sequence[Mapping[str, Any]], workers: int):
        self.cells, self.begun = cells, {}
        self.threads = concurrent.futures.ThreadPoolExecutor(workers)
        self.compilers = [Compiler() for _ in range(workers)]
        self.idle: queue.SimpleQueue[Compiler] = queue.SimpleQueue()
        for compiler in self.compilers:
            self.idle.put(compiler)

    def __call__(self, index: int) -> dict[str, Any]:
        """The outcome of that cell."""
        for i in range(index, min(index + 2 * len(self.compilers), len(self.cells))):
            if i not in self.begun:
                self.begun[i] = self.threads.submit(self._compile, self.cells[i])
        try:
            return self.begun.pop(index).result()
        except BaseException:  # such as Ctrl-C
            self.threads.shutdown(wait=False, cancel_futures=True)
            for compiler in self.compilers:
                compiler.kill()
            raise

    def _compile(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        compiler = self.idle.get()
        try:
            return NOTHING | compiler(**cell)
        finally:
            self.idle.put(compiler)


def jobs(sizes: Sizes) -> Iterator[Job]:
    """A job for each cell."""
    cells = [dict(zip(sizes.axes, values, strict=True)) for values in itertools.product(*sizes.axes.values())]
    platforms = {name: kernel.platform for name, kernel in IMPLEMENTATIONS.items()}
    cells = [
        cell
        for cell in cells
        if platforms.get(cell["implementation"]) in (None, "gpu" if cell["chip"] in GPUS else "tpu")
    ]
    ahead = Ahead(cells, timing.cores())
    for index, key in enumerate(cells):
        yield Job("cells", key, functools.partial(ahead, index))


def line(row: Row) -> str:
    """A cell in one line."""
    return " ".join(str(value) for value in row.key.values()) + f": {_outcome(row)} ({row['seconds']:g} s)"


def _outcome(row: Row) -> str:
    if row["result"] != "compiled":
        return f"{row['result']}: {row['reason']}"
    kernels = f", kernels: {row['kernels']}" if row["kernels"] else ""
    spills = f", spills: {row['spills']}" if row.values.get("spills") else ""
    return f"compiled, {_mebibytes(row)} MiB{kernels}{spills}"


def _mebibytes(row: Row) -> str:
    return f"{row['temporaries'] / 2**20:.1f}"


def wrong(results: Results) -> str | None:
    """The number of cells that failed, and the first of them; None if none failed."""
    failed = [row for row in results.of("cells") if row["result"] == "failed"]
    return f"{len(failed)} of {len(results.rows)} cells failed; the first: {line(failed[0])}" if failed else None


def counts(results: Results) -> str:
    """The number of cells with each result, by implementation and chip, as a Markdown table."""
    rows = []
    for name, chip in itertools.product(*(_values(results.of("cells"), axis) for axis in ("implementation", "chip"))):
        cells = results.of("cells", implementation=name, chip=chip)
        if not cells:
            continue
        numbers = [sum(row["result"] == result for row in cells) for result in RESULTS]
        rows.append([name, chip, *numbers, f"{sum(row['seconds'] for row in cells) / len(cells):.1f}"])
    return table(["", "chip", *RESULTS, "seconds a cell"], rows)


def markdown(results: Results) -> str:
    """``chips.md``."""
    parts = [
        "# Compiled for absent chips",
        "Each cell is one jattn call, compiled by the chip's own compiler: libtpu, or XLA's and NVIDIA's for GPUs. "
        "Nothing was executed. The results show what compiles, what fits into VMEM or shared memory, and that no array "
        "has T * S elements. They show neither speed nor numerical results. Written by "
        "`python -m tools chips` (`make test-chips`).",
        counts(results),
        "## The cases",
        listed({name: text for name, text in CASES.items() if name in _values(results.rows, "case")}),
        "`fold` computes all statistics of `jattn.heads.statistics`, with jattn's kernels if the chip has any, and the "
        "gradient of the entropy. The other cases compute `jattn.dot_product_attention` and the gradient of "
        "`sum(sin(out))` with respect to query, key and value.",
    ]
    for name in _values(results.rows, "implementation"):
        rows = results.of("cells", implementation=name)
        parts += [f"## {name}: temporaries, MiB", *_memory(rows), *_reasons(rows), *_spills(rows)]
    return document(*parts, "## Compiled with", listed(results.about["environment"] | results.about["shape"]))


def _memory(rows: list[Row]) -> list[str]:
    """A table of MiB or results: a line per case, head_dim and length, a column per chip and passes."""
    if not any(row["result"] == "compiled" for row in rows):
        return ["No cell was compiled."]
    cells = {tuple(row.key[axis] for axis in (*ACROSS, *DOWN)): row for row in rows}
    across = list(itertools.product(*(_values(rows, axis) for axis in ACROSS)))
    lines = []
    for down in itertools.product(*(_values(rows, axis) for axis in DOWN)):
        lines.append([*down, *(_memory_cell(cells.get((*column, *down))) for column in across)])
    return [table(["case", "head_dim", "T = S", *(" ".join(column) for column in across)], lines)]


def _memory_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return _mebibytes(row) if row["result"] == "compiled" else row["result"]


ACROSS, DOWN = ("chip", "passes"), ("case", "head_dim", "length")


def _reasons(rows: list[Row]) -> list[str]:
    """Each reason with the number of its cells and the first of them; empty without reasons."""
    lines = []
    for result in ("refused", "failed"):
        reasons = [row for row in rows if row["result"] == result]
        for reason in dict.fromkeys(row["reason"] for row in reasons):
            cells = [row for row in reasons if row["reason"] == reason]
            first = " ".join(str(value) for value in list(cells[0].key.values())[1:])
            lines.append([result, len(cells), first, reason.replace("|", "\\|")])
    return [table(["", "cells", "the first", "reason"], lines)] if lines else []


def _spills(rows: list[Row]) -> list[str]:
    """The cells with kernels that spill registers, in bytes per thread; empty if no kernel was examined."""
    known = [row for row in rows if row.values.get("spills") is not None]  # earlier results have no spills
    lines = [[*(row.key[axis] for axis in (*DOWN, "passes")), row["spills"]] for row in known if row["spills"]]
    if not known:
        return []
    text = f"Of {len(known)} cells with new kernels, {len(lines)} spill registers"
    if not lines:
        return [f"{text}."]
    return [f"{text}; the bytes per thread are:", table(["case", "head_dim", "T = S", "passes", "bytes"], lines)]


def _values(rows: list[Row], axis: str) -> list[Any]:
    """The values of an axis that occur, in the axis's order."""
    return [value for value in AXES[axis] if any(row.key[axis] == value for row in rows)]


SUITE = Suite(
    name="chips",
    parts={"cells": tuple(AXES)},
    about=about,
    jobs=jobs,
    markdown=markdown,
    shown=counts,
    sizes=lambda plan: Sizes.read(plan.cells),
    start=start,
    line=line,
    wrong=wrong,
    resumable=True,
)
