"""What libtpu writes down about a kernel that it compiles: its instruction words (bundles), and its simulated cycles.

LLO is libtpu's last intermediate language. For every kernel and fusion there is, with ``--xla_jf_dump_llo_text``, a
file of the final bundles, and one that says how many slots of each unit every bundle uses; and, with
``--xla_jf_dump_static_llo_profile_to``, the cycles that its simulator counts.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})?: (>*) *\{(.*)$")  # number, label, depth of loops, instructions
EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %(\S+), (\d+) /\* loop exit test")
COUNT = re.compile(r"%(\S+) = sadd\.s32 (\d+), ")
ESTIMATE = re.compile(r'hlo_op_name: "(.+?)(?:\.\d+)?"\s+estimated_cycles: (\d+)')


@dataclasses.dataclass(frozen=True)
class Code:
    """The bundles that one step of a kernel's grid runs; loops within it are counted as often as they run.

    Attributes:
        step: The bundles of it all, with those that begin and end a row of blocks.
        bundles: Those of the basic blocks that use the matrix unit: what is repeated for every block.
        products: The matrix unit's slots that are used.
        matrix: Their share of its slots, in ``bundles``.
        spills: The share of ``bundles`` that stores a register for want of one.
    """

    step: int
    bundles: int
    products: int
    matrix: float
    spills: float


def read_code(folder: Path, name: str) -> Code:
    """The code of the only kernel whose name begins with ``name``, from the dumps in ``folder``."""
    (slots,) = folder.glob(f"*-{name}*-final_hlo-static-per-bundle-utilization.txt")
    (text,) = (file for file in folder.glob(f"*-{name}*-final_bundles.txt") if "analysis" not in file.name)
    return code(text.read_text(), slots.read_text())


class Bundle(NamedTuple):
    """A line of the final bundles; ``depth``: the number of loops around it, of which the first is the grid's."""

    label: str
    depth: int
    instructions: str


def code(text: str, slots: str) -> Code:
    """From the final bundles, and the table of the slots that each of them uses."""
    lines = [found for found in map(LINE.match, text.splitlines()) if found]
    bundles = [Bundle(found[1] or "", len(found[2]), found[3]) for found in lines]
    _, names, capacity, _, *used = slots.splitlines()
    columns = [name.strip() for name in names.split(",")]
    matrix, spill = columns.index("MXU"), columns.index("VSTORE:SPILL")
    rows = [[int(word) for word in line.split()] for line in used]
    times = _times(bundles)
    block, products, spills = 0, 0, 0
    for part in _basic_blocks(bundles):
        if any(rows[i][matrix] for i in part):
            block += sum(times[i] for i in part)
            products += sum(times[i] * rows[i][matrix] for i in part)
            spills += sum(times[i] for i in part if rows[i][spill])
    available = block * int(capacity.split()[matrix])
    return Code(sum(times), block, products, products / available, spills / block)


def _times(bundles: Sequence[Bundle]) -> list[int]:
    """How often each bundle runs in a step of the grid. Loops count up from 0."""
    times = [1] * len(bundles)
    for begin, first in enumerate(bundles):
        if first.label == "LB" and first.depth > 1:
            end = next(
                i
                for i, one in enumerate([*bundles[begin + 1 :], Bundle("", 0, "")], begin + 1)
                if one.depth < first.depth or (one.label, one.depth) == ("LB", first.depth)
            )
            own = "\n".join(one.instructions for one in bundles[begin:end] if one.depth == first.depth)
            (counter, bound), steps = EXIT.findall(own)[0], dict(COUNT.findall(own))
            trips = -(-int(bound) // int(steps[counter]))
            times[begin:end] = [trips * count for count in times[begin:end]]
    return times


def _basic_blocks(bundles: Sequence[Bundle]) -> Iterator[list[int]]:
    """The numbers of the bundles between labels and branches."""
    part: list[int] = []
    for i, one in enumerate(bundles):
        if one.label and part:
            yield part
            part = []
        part.append(i)
        if "sbr.rel" in one.instructions:
            yield part
            part = []
    yield part


def read_cycles(folder: Path) -> dict[str, int]:
    """The simulated cycles of every kernel and fusion of a program, from the profiles in ``folder``."""
    found = (ESTIMATE.search(file.read_text()) for file in sorted(folder.glob("*_static_llo_profile.textproto")))
    return {one[1]: int(one[2]) for one in found if one}
