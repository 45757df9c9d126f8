"""Reads the text of an optimized program: its collectives, and what the chip computes while arrays travel.

The text is XLA's (``compiled.as_text()``), which lists instructions in the order in which they run, and every
computation before those that call it.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

COLLECTIVES = ("collective-permute", "all-gather", "all-to-all", "all-reduce", "reduce-scatter")
# An array's type: f32[8,128], pred[], s32[<=8].
ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,<=]*)\]")
KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu|__cudnn)')

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LIBRARY = re.compile(r'custom_call_target="__(?:cublas|gpu\$xla\.gpu\.triton)')  # products on a GPU


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``name = type opcode(arguments) rest``; ``root``: whether its computation returns it."""

    name: str
    type: str
    opcode: str
    arguments: str
    rest: str
    root: bool = False

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it reads."""
        return _NAME.findall(self.arguments)

    @property
    def called(self) -> list[str]:
        """The names of the computations that it calls."""
        branches = _BRANCHES.search(self.rest)
        return _CALLED.findall(self.rest) + (_NAME.findall(branches[1]) if branches else [])

    def attribute(self, name: str) -> str:
        """The name that ``name=%...`` gives, or an empty one."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""


Computations = dict[str, list[Instruction]]


@dataclasses.dataclass(frozen=True)
class Permute:
    """A collective-permute: what each device sends, how often, and what it computes meanwhile.

    Attributes:
        arrays: The number of arrays sent together.
        bytes: Their size.
        times: How often it runs in one run of the program; None if a loop's number of trips is not known.
        behind: The kinds of work between its start and its end, as ``work`` names them; empty if there is none.
    """

    arrays: int
    bytes: int
    times: int | None
    behind: tuple[str, ...] = ()


def collectives(text: str) -> dict[str, int]:
    """How often each kind of collective occurs in a program's text; a start and its end count once."""
    return {kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in COLLECTIVES}


def longest_gathered(text: str) -> int:
    """The longest axis of any array that an all-gather makes; 0 if there is none."""
    types = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) all-gather(?:-done)?\(", text, re.MULTILINE)
    lengths = (one.strip("<=") for kind in types for _, shape in ARRAY.findall(kind) for one in shape.split(",") if one)
    return max(map(int, lengths), default=0)


def permutes(text: str) -> list[Permute]:
    """All collective-permutes of a program."""
    program = computations(text)
    times, busy = executions(program), working(program)
    every = []
    for name, instructions in program.items():
        lines = {one.name: line for line, one in enumerate(instructions)}
        for line, one in enumerate(instructions):
            if one.opcode not in ("collective-permute", "collective-permute-done"):
                continue
            start = lines.get(one.operands[0], line) if one.opcode.endswith("-done") else line
            kinds = [work(between, busy) for between in instructions[start + 1 : line]]
            behind = tuple(sorted({kind for kind in kinds if kind}))
            every.append(Permute(*size(one.type), times[name], behind))
    return every


def computations(text: str) -> Computations:
    """The instructions of each computation, in the order of the text; that of the entry comes last."""
    program: Computations = {}
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            instructions = program.setdefault(header[2], [])
        elif parts := _INSTRUCTION.match(line):
            root, name, kind, opcode, arguments, rest = parts.groups()
            instructions.append(Instruction(name, kind, opcode, arguments, rest, bool(root)))
    return program


def size(kind: str) -> tuple[int, int]:
    """The number of arrays in a type, and their bytes."""
    arrays = ARRAY.findall(kind)
    bits = [8 if name == "pred" else int(re.findall(r"\d+", name)[0]) for name, _ in arrays]
    numbers = [math.prod(int(one.strip("<=")) for one in lengths.split(",") if one) for _, lengths in arrays]
    return len(arrays), sum(number * width // 8 for number, width in zip(numbers, bits, strict=True))


def working(program: Computations) -> set[str]:
    """The computations that multiply matrices or run a kernel, themselves or in what they call."""
    busy: set[str] = set()
    for name, instructions in program.items():
        if any(work(one, busy) for one in instructions):
            busy.add(name)
    return busy


def work(one: Instruction, busy: Iterable[str]) -> str | None:
    """``"loop"``, ``"branch"``, ``"kernel"`` or ``"product"`` if an instruction computes in earnest, or None.

    Sums, masks and copies do not count, because they are short compared with a hop.
    """
    if one.opcode in ("dot", "convolution"):
        return "product"
    if one.opcode == "custom-call":
        return "kernel" if KERNEL.search(one.rest) else "product" if _LIBRARY.search(one.rest) else None
    if not any(name in busy for name in one.called):
        return None
    return {"while": "loop", "conditional": "branch"}.get(one.opcode, "product")


def executions(program: Computations) -> dict[str, int | None]:
    """How often each computation runs in one run of the program; a branch counts as if it were always taken.

    None means a loop with an unknown number of trips. Computations that nothing calls, except the entry, run 0 times.
    """
    entry = next(reversed(program), "")
    times: dict[str, int | None] = {name: int(name == entry) for name in program}
    for name in reversed(program):
        for one in program[name]:
            for called in one.called:
                if called in times:
                    trips = trip_count(one, program[name], program) if one.opcode == "while" else 1
                    times[called] = _plus(times[called], _by(times[name], trips))
    return times


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _by(one: int | None, other: int | None) -> int | None:
    return 0 if one == 0 else None if one is None or other is None else one * other


def trip_count(loop: Instruction, around: Sequence[Instruction], program: Computations) -> int | None:
    """The trips of a ``while`` among the instructions ``around`` it, or None.

    XLA writes the number on some platforms. Otherwise it is read from a condition ``index < constant``, because JAX's
    loops count up by one.
    """
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    condition = program.get(loop.attribute("condition"), ())
    compare = next((one for one in condition if one.root), None)
    if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.rest:
        return None
    start = next((one for one in around if one.name in loop.operands and one.opcode == "tuple"), None)
    ends = []
    for operand in compare.operands:
        value, index = _scalar(operand, condition)
        if index is not None and start is not None:
            value, _ = _scalar(start.operands[index], around)
        ends.append(value)
    first, last = ends
    return None if first is None or last is None else max(last - first, 0)


def _scalar(name: str, instructions: Sequence[Instruction]) -> tuple[int | None, int | None]:
    """The value of an instruction that is a constant whole number, or else its index in the loop's state.

    Copies are followed to their source.
    """
    one = next((one for one in instructions if one.name == name), None)
    if one is not None and one.opcode in ("copy", "bitcast", "convert"):
        return _scalar(one.operands[0], instructions)
    if one is not None and one.opcode == "constant" and one.arguments.lstrip("-").isdecimal():
        return int(one.arguments), None
    if one is not None and one.opcode == "get-tuple-element":
        return None, int(re.findall(r"\bindex=(\d+)", one.rest)[0])
    return None, None
