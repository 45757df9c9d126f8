"""The pods suite: rings of one attention layer compiled for absent pods, and an analysis of their programs.

Nothing is executed, so it measures no speed and no numbers. Shared by all rows: ``environment``, ``shape``. The parts:

- ``rings``: for each ``pod_arithmetic.Program`` on TPUs, what ``pod_compiler.compiled`` finds;
- ``gpus``: the same for eight H100;
- ``stacks``: for each ``pod_stack.Stack``, the same of a training step;
- ``roofline``: per topology, length and passes, a hop as ``pod_arithmetic.hop`` computes it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jattn_experiments.bench.goals import Goal, goal_table, worst
from jattn_experiments.bench.markdown import document, listed, short_number, table
from jattn_experiments.bench.suite import Job, Results, Row, Suite
from tools import chips
from tools.chip_compiler import Compiler
from tools.pod_arithmetic import (
    CASES,
    FLOPS,
    HBM,
    HEAD_DIM,
    KV_HEADS,
    LINK,
    NUM_HEADS,
    PASSES,
    Program,
    hop,
)
from tools.pod_stack import LAYERS, Stack

AXES = tuple(field.name for field in dataclasses.fields(Program))
SHORT, LONG, LONGEST = 131072, 1048576, 8388608
LENGTHS = {
    "v5p:2x2x2": (SHORT, LONG, LONGEST),
    "v5p:2x2x4": (LONG,),
    "v5p:2x4x4": (LONG,),
    "v5p:4x4x4": (SHORT, LONG, LONGEST),
    "v5p:8x8x8": (LONG, LONGEST),
    "v5e:4x4": (SHORT,),
}
OTHERS = (("zigzag", "window"), ("contiguous", "window"), ("zigzag", "alibi"))  # on the smallest topology of both chips
GPUS = "h100:1x1x8"
SHAPE = {"dtype": "bfloat16", "batch": 1, "num_heads": NUM_HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
MIB, GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The forward programs of one run. Each is also compiled with its gradient."""

    rings: tuple[Program, ...] = (
        *(Program(topology, length) for topology, lengths in LENGTHS.items() for length in lengths),
        *(Program(topology, SHORT, *how) for topology in ("v5p:2x2x2", "v5e:4x4") for how in OTHERS),
    )
    gpus: tuple[Program, ...] = (Program(GPUS, SHORT),)
    stacks: tuple[Stack, ...] = (
        Stack("v5p:4x4x4", (2, 2, 16), 2, LONG),
        Stack("v5p:4x4x4", (2, 2, 16), 2, LONG, "nothing"),
        Stack("v5p:4x4x4", (1, 4, 16), 1, LONG),
    )


def about(sizes: Sizes) -> dict[str, Any]:
    """The versions, and the shape of the layer."""
    return {"environment": chips.environment(), "shape": SHAPE}


def jobs(sizes: Sizes) -> Iterator[Job]:
    """A job for each program, and for a hop of each causal ring on v5p."""
    for part, programs in (("rings", sizes.rings), ("gpus", sizes.gpus)):
        for program, passes in itertools.product(programs, PASSES):
            one = dataclasses.replace(program, passes=passes)
            yield Job(part, dataclasses.asdict(one), functools.partial(compiled, one))
    for stack in sizes.stacks:
        key = dataclasses.asdict(stack) | {"mesh": list(stack.mesh)}  # in the form that JSON returns
        yield Job("stacks", key, functools.partial(compiled, stack))
    for program, passes in itertools.product(sizes.rings, PASSES):
        if program.topology.startswith("v5p") and program.case == "causal":
            key = {"topology": program.topology, "length": program.length, "passes": passes}
            yield Job("roofline", key, functools.partial(hop, program.tokens, passes))


def compiled(program: Program | Stack) -> Mapping[str, Any]:
    """The program's outcome, from a fresh process."""
    compiler = Compiler("tools.pod_compiler")
    try:
        return compiler(**dataclasses.asdict(program))
    finally:
        compiler.close()


def sent(row: Row) -> int | None:
    """The bytes that a chip sends in the whole program, or None if a loop's trips are not known."""
    permutes = row["permutes"]
    unknown = any(one["times"] is None for one in permutes)
    return None if unknown else sum(one["bytes"] * one["times"] for one in permutes)


def journeys(row: Row) -> tuple[int, int]:
    """The number of arrays that a chip sends in the whole program, and of those without work to hide behind."""
    counts = [(one["arrays"] * (one["times"] or 1), bool(one["behind"])) for one in row["permutes"]]
    return sum(count for count, _ in counts), sum(count for count, hidden in counts if not hidden)


def exposed(row: Row) -> float | None:
    """The bytes sent without work to hide behind, as a multiple of a chip's keys and values; None if unknown."""
    if sent(row) is None:
        return None
    alone = sum(one["bytes"] * one["times"] for one in row["permutes"] if not one["behind"])
    return alone / _program(row).keys


def goals(results: Results) -> list[Goal]:
    """Every goal and its measured number."""
    rows = _compiled(results, "rings")
    million = [row for row in rows if row["length"] == LONG and row["case"] == "causal"]
    lines = []
    for passes in PASSES:
        sizes = [row["temporaries"] for row in million if _chips(row) == 64 and row["passes"] == passes]
        most = worst((size / GIB for size in sizes), True)
        lines.append(Goal(f"1,048,576 tokens on 64 chips, {passes}: temporaries per chip", most, 1.0, False, "GiB"))
    for passes in PASSES:
        sizes = sorted((_chips(row), row["temporaries"]) for row in million if row["passes"] == passes)
        falls = [
            (one / other) ** (1 / math.log2(chips / fewer))
            for (fewer, one), (chips, other) in itertools.pairwise(sizes)
            if chips <= 64
        ]
        what = f"1,048,576 tokens, {passes}: smallest factor of temporaries per doubling of chips, from 8 to 64"
        lines.append(Goal(what, worst(falls, False), 1.85, True))
    gathers = worst((float(row["all-gather"]) for row in rows), True)
    lines.append(Goal("all-gathers, the most in a ring", gathers, 0.0, False))
    shares = [(row["case"], _share(row)) for row in rows]
    most = worst((share for _, share in shares), True)
    least = worst((share for case, share in shares if case == "causal"), False)
    lines.append(Goal("bytes that a chip sends, as a share of the formula: the most", most, 1.05, False))
    lines.append(Goal("the same: the least of the causal rings", least, 0.95, True))
    for passes in PASSES:
        alone = worst((exposed(row) for row in rows if row["passes"] == passes), True)
        what = f"sent without work to hide behind, in hops of keys and values, the most in a ring, {passes}"
        lines.append(Goal(what, alone, 1.0, False))
    seconds = worst((row["planning"] for row in million), True)
    lines.append(Goal("1,048,576 tokens: planning time", seconds, 10.0, False, "s"))
    stacks = _compiled(results, "stacks")
    most = worst((_held(row) / 1e9 for row in stacks if row["kept"] == "attention"), True)
    lines.append(
        Goal(f"{LAYERS} layers of a 7B model, 1,048,576 tokens, 64 chips: a chip holds", most, 95.0, False, "GB")
    )
    longest = worst((row["longest_gathered"] / Stack(**row.key).tokens for row in stacks), True)
    lines.append(Goal("the same: the longest gathered axis, as a share of a chip's tokens", longest, 1.0, False))
    peak = worst((row["planning_peak"] / GIB for row in million), True)
    lines.append(Goal("1,048,576 tokens: peak host memory of planning", peak, 2.0, False, "GiB"))
    return lines


def _held(row: Row) -> int:
    """Arguments, outputs and temporaries."""
    return row["arguments"] + row["outputs"] + row["temporaries"]


def _compiled(results: Results, part: str) -> list[Row]:
    return [row for row in results.of(part) if row["result"] == "compiled"]


def _program(row: Row) -> Program:
    return Program(**row.key)


def _chips(row: Row) -> int:
    return _program(row).chips


def _share(row: Row) -> float | None:
    """The bytes sent, as a share of the formula's, or None if unknown."""
    size, formula = sent(row), _program(row).permuted()
    return None if size is None else size / formula if formula else float(size > 0)


def line(row: Row) -> str:
    """A row in one line."""
    return " ".join(str(value) for value in row.key.values()) + f": {_outcome(row)}"


def _outcome(row: Row) -> str:
    if row.part == "roofline":
        return f"hidden from {row['hidden_from']:,} tokens per chip"
    if row.part == "stacks" and row["result"] == "compiled":
        return f"holds {_mib(_held(row))} MiB, {_hidden(row)} ({row['seconds']:.1f} s)"
    seconds = f"({row['seconds']:.1f} s)"
    if row["result"] != "compiled":
        return f"{row['result']}: {row['reason']} {seconds}"
    return f"{_mib(row['temporaries'])} MiB, sends {_mib(sent(row))} MiB, {_hidden(row)} {seconds}"


def _mib(size: float | None) -> str:
    return "?" if size is None else f"{size / MIB:,.0f}"


def _hidden(row: Row) -> str:
    """The number of arrays that travel behind each kind of work."""
    everything, alone = journeys(row)
    kinds = sorted({kind for one in row["permutes"] for kind in one["behind"]})
    return f"{everything - alone} of {everything} hidden" + (f" ({', '.join(kinds)})" if kinds else "")


def wrong(results: Results) -> str | None:
    """The number of programs that failed, and the first of them; None if none failed."""
    rows = [row for part in ("rings", "gpus", "stacks") for row in results.of(part)]
    failed = [row for row in rows if row["result"] == "failed"]
    return f"{len(failed)} of {len(rows)} programs failed; the first: {line(failed[0])}" if failed else None


def markdown(results: Results) -> str:
    """``pods.md``."""
    heads = "{num_heads} query and {num_kv_heads} key heads of {head_dim}".format(**results.about["shape"])
    gpus = results.of("gpus")
    return document(
        "# Rings on pods, compiled but never run",
        f"One layer's attention, {heads}, bfloat16, one sequence, over all chips of a topology. Nothing was executed, "
        "so there are no times and no numerical results. Each program was compiled in a fresh process. Written by "
        "`python -m tools pods`.",
        "## Goals",
        goal_table(goals(results)),
        "## Memory and time",
        "For one chip: arguments, outputs and temporaries. For the host, in a fresh process: seconds of processor time "
        "and peak memory until the program is planned (traced and lowered) and until it is compiled. The gradient is "
        "that of the sum of squares. Cases: " + "; ".join(f"{name}: {what}" for name, what in CASES.items()) + ".",
        _memory(results.of("rings")),
        *_reasons(results.of("rings")),
        "## Traffic",
        "What a chip sends in the whole program, compared with the formula: keys and values to every other chip that "
        "needs them, in each pass, and gradients in float32 after each visit to another chip. A permute is hidden if "
        "a loop, branch, kernel or product that computes attention is between its start and its end in the schedule.",
        _traffic(results.of("rings")),
        "## Eight H100",
        "From the CUDA compiler, without a GPU. It shows memory and the order in which work is issued. It cannot show "
        "which links NCCL uses, whether its kernels find room next to those that compute, or what autotuning picks.",
        *([_memory(gpus), *_reasons(gpus), _traffic(gpus)] if gpus else []),
        "## Four layers of a model, trained",
        "Sequences are divided over `data`, heads and features over `heads`, tokens over `sequence`, and parameters "
        "over all three. The backward pass recomputes each layer except what is kept. Outputs are the loss and the "
        "gradient of every parameter, in bfloat16, without an optimizer. Only parameters are gathered: no gathered "
        "axis is as long as a chip's tokens.",
        _stacks(results.of("stacks")),
        "## A hop at the published rates of v5p",
        f"{FLOPS / 1e12:.0f} TFLOP/s in bfloat16, {HBM / 1e9:.0f} GB/s of HBM, {LINK / 1e9:.0f} GB/s over one link one "
        "way (Google: 1200 GB/s both ways over a chip's six links in a 3D torus). This is arithmetic, not measured: "
        "causal, balanced, each array read once. `hidden from` is the number of tokens per chip at which computing "
        "takes as long as sending.",
        _roofline(results.of("roofline")),
        "## Compiled with",
        listed(results.about["environment"]),
    )


KEY = ["topology", "T", "layout", "case", "passes"]


def _key(row: Row) -> list[str]:
    return [row["topology"], f"{row['length']:,}", row["layout"], row["case"], row["passes"]]


def _memory(rows: list[Row]) -> str:
    head = [*KEY, "arguments, MiB", "outputs", "temporaries", "planned, s", "MiB", "compiled, s", "MiB"]
    lines = []
    for row in rows:
        if row["result"] == "compiled":
            chip = [_mib(row[name]) for name in ("arguments", "outputs", "temporaries")]
            host = [f"{row['planning']:.1f}", _mib(row["planning_peak"]), f"{row['seconds']:.0f}", _mib(row["peak"])]
            lines.append([*_key(row), *chip, *host])
        else:
            lines.append([*_key(row), row["result"], *"------"])
    return table(head, lines)


def _reasons(rows: list[Row]) -> list[str]:
    lines = [[*_key(row), row["reason"].replace("|", "\\|")] for row in rows if row["result"] != "compiled"]
    return [table([*KEY, "the compiler's message"], lines)] if lines else []


def _traffic(rows: list[Row]) -> str:
    head = [*KEY, "sends, MiB", "formula", "share", "arrays sent", "permutes", "all-gathers", "all-reduces", "kernels"]
    lines = []
    for row in rows:
        if row["result"] == "compiled":
            share = _share(row)
            sizes = [_mib(sent(row)), _mib(_program(row).permuted()), "?" if share is None else f"{share:.3f}"]
            counts = [row[name] for name in ("collective-permute", "all-gather", "all-reduce", "kernels")]
            lines.append([*_key(row), *sizes, _hidden(row), *counts])
    return table(head, lines)


def _stacks(rows: list[Row]) -> str:
    head = ["topology", "data x heads x sequence", "sequences", "T", "kept", "arguments, MiB", "outputs", "temporaries"]
    head += ["GB in all", "permuted arrays", "all-gathers", "longest axis", "all-reduces", "kernels", "compiled, s"]
    lines = []
    for row in rows:
        key = [row["topology"], " x ".join(map(str, row["mesh"])), row["sequences"], f"{row['length']:,}", row["kept"]]
        if row["result"] != "compiled":
            lines.append([*key, row["result"], *"---------"])
            continue
        chip = [_mib(row[name]) for name in ("arguments", "outputs", "temporaries")]
        gathers = [row["all-gather"], f"{row['longest_gathered']:,}", row["all-reduce"], row["kernels"]]
        lines.append([*key, *chip, f"{_held(row) / 1e9:.1f}", _hidden(row), *gathers, f"{row['seconds']:.0f}"])
    return table(head, lines)


def _roofline(rows: list[Row]) -> str:
    head = ["topology", "T", "tokens per chip", "passes", "GFLOP", "HBM, MiB", "link, MiB"]
    head += ["computes, ms", "HBM, ms", "link, ms", "computes / link", "hidden from, tokens per chip"]
    lines = []
    for row in rows:
        times = [row["seconds"][name] for name in ("compute", "memory", "link")]
        lines.append([
            row["topology"], f"{row['length']:,}", f"{Program(row['topology'], row['length']).tokens:,}", row["passes"],
            f"{row['flops'] / 1e9:,.0f}", _mib(row["hbm"]), _mib(row["link"]),
            *(short_number(1e3 * time) for time in times), f"{times[0] / times[2]:.1f}", f"{row['hidden_from']:,}",
        ])  # fmt: skip
    return table(head, lines)


SUITE = Suite(
    name="pods",
    parts={
        "rings": AXES,
        "gpus": AXES,
        "stacks": tuple(field.name for field in dataclasses.fields(Stack)),
        "roofline": ("topology", "length", "passes"),
    },
    about=about,
    jobs=jobs,
    markdown=markdown,
    shown=lambda results: goal_table(goals(results)),
    sizes=lambda plan: Sizes(),
    start=lambda plan: chips.start(plan, "pods"),
    line=line,
    wrong=wrong,
    resumable=True,
)
