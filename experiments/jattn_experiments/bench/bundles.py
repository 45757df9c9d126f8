"""The bundles suite: what libtpu says of the code of attention kernels, for TPUs that are not there.

Nothing is executed, so it measures no speed and no numbers. Shared by all rows: ``environment``, ``shape``. The parts:

- ``code``: for each ``chip``, ``kernel``, ``block`` (its queries, and its keys) and ``passes``, a ``llo.Code``;
- ``simulated``: for each of these and a ``length``, the ``cycles`` in libtpu's simulator of a part of a head that is
  there so many ``times``: up to ``WHOLE`` tokens all of it, and beyond one row of blocks, which is all keys of a block
  of queries, or for the gradients of key and value, all queries of a block of keys;
- ``checks``: the simulator beside what is known: ``cycles`` of what it simulates, and ``expected``.

All rows have a ``result``, its ``reason``, and ``seconds`` of processor time.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jattn_experiments.bench import chips
from jattn_experiments.bench.bundle_compiler import FOUR, HEAD_DIM, PASSES, STATISTICS
from jattn_experiments.bench.chip_compiler import NUM_HEADS, Compiler
from jattn_experiments.bench.suite import Job, Results, Row, Suite
from jattn_experiments.bench.tables import listed, report, table

LIMIT = 600.0  # seconds for one program
CODE, SIMULATED = ("chip", "kernel", "block", "passes"), ("chip", "kernel", "block", "passes", "length")
PRODUCTS = {"forward": 2, "d query": 3, "d key and value": 4}  # of a block, of which the first is its scores
MATMUL = 4096  # rows and columns of the matrices multiplied
WHOLE = 4096  # tokens of a head that is simulated as a whole
HEAD = f"splash forward, a head of {WHOLE} tokens"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one run compiles.

    ``simulated``: kernel, block and length, on chips of both sizes of the matrix unit; large blocks take minutes each.
    """

    chips: tuple[str, ...] = ("v5e", "v5p", "v6e", "tpu7x")
    kernels: tuple[str, ...] = ("splash", "pallas_tpu")
    blocks: tuple[int, ...] = (512, 1024)
    simulators: tuple[str, ...] = ("v5e", "v6e")  # that of tpu7x ends the compiler
    simulated: tuple[tuple[str, int, int], ...] = (
        ("splash", 512, 4096),
        ("pallas_tpu", 512, 4096),
        ("splash", 512, 32768),
        ("pallas_tpu", 512, 32768),
        ("splash", 1024, 4096),
        ("splash", 1024, 32768),
        ("pallas_tpu", 1024, 32768),
        ("pallas_tpu", 1024, 4096),
    )


def jobs(sizes: Sizes) -> Iterator[Job]:
    """The rows, the quickest parts first."""
    for chip, kernel, block in itertools.product(sizes.chips, sizes.kernels, sizes.blocks):
        for passes in PASSES:
            key = dict(zip(CODE, (chip, kernel, block, passes), strict=True))
            yield Job("code", key, functools.partial(code, "gradients", chip, kernel, block, passes))
    for chip in sizes.chips:
        key = dict(zip(CODE, (chip, "pallas_tpu", sizes.blocks[0], FOUR), strict=True))
        yield Job("code", key, functools.partial(code, "statistics", *key.values()))
    for chip in sizes.simulators:
        yield Job("checks", {"chip": chip, "what": "matmul"}, functools.partial(matmul, chip))
        yield Job("checks", {"chip": chip, "what": HEAD}, functools.partial(whole_head, chip))
    for (kernel, block, length), chip, passes in itertools.product(sizes.simulated, sizes.simulators, PASSES):
        if (kernel, block, passes) == ("pallas_tpu", 1024, "d key and value") and length > WHOLE:
            continue  # 16 such blocks take minutes and 12 GB, 32 of them more than there is
        key = dict(zip(SIMULATED, (chip, kernel, block, passes, length), strict=True))
        yield Job("simulated", key, functools.partial(simulated, **key))


@functools.lru_cache(1)
def ask(task: str, **question: Any) -> Mapping[str, Any]:
    """What came of a program, in a fresh process."""
    compiler = Compiler("jattn_experiments.bench.bundle_compiler", LIMIT)
    try:
        return compiler(task=task, **question)
    finally:
        compiler.close()


def code(task: str, chip: str, kernel: str, block: int, passes: str) -> dict[str, Any]:
    """The kernels of all passes come of one program."""
    found = dict(ask(task, chip=chip, kernel=kernel, block=block))
    own = found.pop(passes, {})
    return {**{name: found[name] for name in ("result", "reason", "seconds")}, **own}


def simulated(chip: str, kernel: str, block: int, passes: str, length: int) -> dict[str, Any]:
    """``cycles`` of a part of a head, and how many ``times`` it is there."""
    if length <= WHOLE:
        return {"times": 1, **_cycles(chip, kernel, block, passes, length, length)}
    queries, keys = (length, block) if passes == "d key and value" else (block, length)
    return {"times": length // block, **_cycles(chip, kernel, block, passes, queries, keys)}


def _cycles(chip: str, kernel: str, block: int, passes: str, queries: int, keys: int) -> dict[str, Any]:
    question = {"kernel": kernel, "block": block, "passes": passes, "queries": queries, "keys": keys}
    return {"cycles": None, **ask("simulated", chip=chip, **question)}


def matmul(chip: str) -> dict[str, Any]:
    """A product of two matrices, beside libtpu's cost model."""
    expected = ask("matmul", chip=chip, size=MATMUL, simulate=False)
    return {"cycles": None, "expected": expected.get("cycles"), **ask("matmul", chip=chip, size=MATMUL, simulate=True)}


def whole_head(chip: str) -> dict[str, Any]:
    """All rows of blocks of a head, beside one row times their number."""
    block = 512
    one = _cycles(chip, "splash", block, "forward", block, WHOLE)["cycles"]
    expected = one * (WHOLE // block) if one else None
    return {"expected": expected, **_cycles(chip, "splash", block, "forward", WHOLE, WHOLE)}


def line(row: Row) -> str:
    """A row in one line."""
    return " ".join(map(str, row.key.values())) + f": {_said(row)} ({row['seconds']:g} s)"


def _said(row: Row) -> str:
    if row["result"] != "compiled":
        return f"{row['result']}: {row['reason']}"
    if row.part == "code":
        shares = f"matrix unit {row['matrix']:.0%}, spill stores {row['spills']:.0%}"
        return f"{row['bundles']} bundles a block, {shares}; {row['step']} in all"
    return f"{row['cycles']:,} cycles" + (f", expected {row['expected']:,}" if row.part == "checks" else "")


def wrong(results: Results) -> str | None:
    """How many kernels were not compiled, and the first of them; a simulator's failure is an answer."""
    failed = [row for row in results.of("code") if row["result"] == "failed"]
    count = len(results.of("code"))
    return f"{len(failed)} of {count} kernels failed; the first: {line(failed[0])}" if failed else None


def shown(results: Results) -> str:
    """Both tables."""
    return f"{_code(results)}\n\n{_simulated(results)}"


def markdown(results: Results) -> str:
    """``bundles.md``."""
    return report(
        "# Bundles and simulated cycles",
        "What libtpu, the TPUs' compiler, says of the code of attention kernels, without a chip. Nothing was executed: "
        "no time was measured. Every pair visible, bfloat16, "
        f"head_dim {HEAD_DIM}. Written by `jattn bench --suite bundles`.",
        "## Bundles",
        "Of one block of queries by as many keys: the instruction words (bundles) of the basic blocks that use the "
        "matrix unit, the share of its slots that they use, and the share of them that stores a register for want of "
        "one; *step*: with all that begins and ends a row of blocks. Loops within are counted as often as they run. "
        f"The four statistics are {', '.join(STATISTICS)}. Bundles are not time: they do not count stalls.",
        _code(results),
        "## Simulated cycles",
        "**Of libtpu's simulator of its own code; nothing was measured.** Millions of cycles of one core for "
        f"{NUM_HEADS} heads: of one head, times the heads; beyond {WHOLE} tokens, of one row of blocks, times the "
        "rows. The kernels compute their tables of blocks instead of reading them, since the simulator knows no data "
        "and would skip every block; hence no causal mask. *Rate*: "
        f"the multiplications a cycle, beside those of a product of two {MATMUL} by {MATMUL} matrices in the same "
        "simulator; the forward pass has 2 products a block, the gradient of query 3, those of key and value 4. "
        "A dash: not simulated, since a long row of large blocks takes more memory than there is.",
        _simulated(results),
        *_reasons(results),
        "## The simulator, checked",
        "The product beside the estimate of the compiler's cost model. The head beside one row of blocks times the "
        "rows, which counts the beginning and the end of a kernel in every row: of 8 blocks here, of up to 64 above.",
        _checks(results),
        "## Compiled with",
        listed(results.about["environment"] | results.about["shape"]),
    )


def _code(results: Results) -> str:
    head = ["chip", "block", "passes", *(f"{name}: {what}" for name in Sizes.kernels for what in COLUMNS), "ratio"]
    lines = []
    keys = {(row["chip"], row["block"], row["passes"]) for row in results.of("code")}
    for chip, block, passes in sorted(keys, key=_order):
        rows = [results.of("code", chip=chip, kernel=name, block=block, passes=passes) for name in Sizes.kernels]
        found = [one[0] if one and one[0]["result"] == "compiled" else None for one in rows]
        cells = [cell for one in found for cell in _cells(one)]
        splash, own = found
        ratio = f"{own['bundles'] / splash['bundles']:.2f}" if splash and own else "-"
        lines.append([chip, block, passes, *cells, ratio])
    return table(head, lines)


def _order(key: tuple[Any, ...]) -> list[int]:
    """Rows may have been found in any order."""
    words = (*Sizes.chips, *Sizes.kernels, *PASSES, FOUR)
    return [words.index(one) if isinstance(one, str) else one for one in key]


COLUMNS = ("bundles", "matrix unit", "spills", "step")


def _cells(row: Row | None) -> list[str]:
    return [str(row["bundles"]), f"{row['matrix']:.0%}", f"{row['spills']:.0%}", str(row["step"])] if row else ["-"] * 4


def _simulated(results: Results) -> str:
    rows = results.of("simulated")
    kernels = sorted({(row["kernel"], row["block"]) for row in rows}, key=_order)
    head = ["chip", "T = S", "passes", *(f"{name} {block}{what}" for name, block in kernels for what in ("", ": rate"))]
    lines = []
    keys = {(row["chip"], row["length"], row["passes"]) for row in rows}
    for chip, length, passes in sorted(keys, key=_order):
        cells = []
        for kernel, block in kernels:
            key = {"chip": chip, "length": length, "passes": passes, "kernel": kernel, "block": block}
            found = results.of("simulated", **key)
            cells += _millions(found[0], results) if found else ["-", "-"]
        lines.append([chip, f"{length:,}", passes, *cells])
    return table(head, lines)


def _millions(row: Row, results: Results) -> list[str]:
    """Millions of cycles of all heads, and the rate beside a plain product's."""
    if row["cycles"] is None:
        return ["failed", "-"]
    cycles = row["cycles"] * row["times"]
    (plain,) = results.of("checks", chip=row["chip"], what="matmul")
    rate = PRODUCTS[row["passes"]] * row["length"] ** 2 * HEAD_DIM / cycles
    share = f"{rate / (MATMUL**3 / plain['cycles']):.0%}" if plain["cycles"] else "-"
    return [f"{cycles * NUM_HEADS / 1e6:.2f}", share]


def _reasons(results: Results) -> list[str]:
    rows = [row for part in ("code", "simulated", "checks") for row in results.of(part) if row["result"] != "compiled"]
    lines = [[" ".join(map(str, row.key.values())), row["reason"].replace("|", "\\|")] for row in rows]
    return [table(["failed", "reason"], lines)] if lines else []


def _checks(results: Results) -> str:
    lines = []
    for row in results.of("checks"):
        known = row["cycles"] and row["expected"]
        ratio = f"{row['cycles'] / row['expected']:.3f}" if known else "-"
        lines.append([*row.key.values(), row["cycles"], row["expected"], ratio])
    return table(["chip", "what", "simulated cycles", "expected", "ratio"], lines)


SUITE = Suite(
    name="bundles",
    parts={"code": CODE, "simulated": SIMULATED, "checks": ("chip", "what")},
    about=lambda sizes: {
        "environment": chips.environment(),
        "shape": {"dtype": "bfloat16", "batch": 1, "num_heads": NUM_HEADS, "head_dim": HEAD_DIM},
    },
    jobs=jobs,
    markdown=markdown,
    shown=shown,
    sizes=lambda plan: Sizes(),
    start=lambda plan: chips.start(plan, "bundles"),
    line=line,
    wrong=wrong,
    resumable=True,
)
