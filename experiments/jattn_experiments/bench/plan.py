"""What one run measures: the options of the command line, each declared here alone. Imports neither JAX nor peers."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jattn_experiments.bench.problems import CASES, DTYPES

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PEERS = ("jax", "torch", "tokamax", "splash", "jattn-xla", "jattn-kernels", "jattn-avx2")
PARTS = ("times", "memory", "peak", "compile")


def _option(default: Any, help: str, known: Collection[str] | None = None) -> Any:
    """``default``: a tuple is a list of words on the command line, separated by commas, of those that are ``known``."""
    return dataclasses.field(default=default, metadata={"help": help, "known": known})


@dataclasses.dataclass(frozen=True)
class Plan:
    """The options of one run, and ``out``, the folder of its results. A suite takes some of them."""

    out: Path
    peers: Sequence[str] = _option(PEERS[:3], f"any of {', '.join(PEERS)}, beside a plain call of jattn", PEERS)
    device: str = _option("cpu", "cpu, gpu or tpu", DTYPES)
    lengths: Sequence[int] = _option(LENGTHS, "T = S, each above 1")
    batch: int = _option(1, "B of the problems")
    cases: Sequence[str] = _option(tuple(CASES), "any of these", CASES)
    parts: Sequence[str] = _option(PARTS, "what to measure: any of these", PARTS)
    cells: str = _option("", "of chips: any of their words, as v5e,128,causal")
    kernels: str = _option(
        "", "of chip: any of jattn's implementations and module:object of one's own; by default the device's"
    )
    minutes: float = _option(8.0, "of chip: how long it may take")
    seconds: float = _option(6.0, "time per row, all contestants together")

    @classmethod
    def read(cls, out: Path, **options: Any) -> "Plan":
        """Reads options of the command line. Raises ``ValueError`` with one line that names an invalid option."""
        for option in OPTIONS:
            if option.name in options:
                options[option.name] = _read(option, options[option.name])
        return cls(out, **options)


OPTIONS = dataclasses.fields(Plan)[1:]


def on_command_line(option: dataclasses.Field) -> dict[str, Any]:
    """The option as arguments of a parser's ``add_argument``."""
    default = option.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return {"type": type(default), "default": default, "help": option.metadata["help"]}


def _read(option: dataclasses.Field, value: Any) -> Any:
    known, expected = option.metadata["known"], None
    if isinstance(option.default, tuple):
        words = {word.strip() for word in value.split(",") if word.strip()}
        if known is None:
            good, expected = all(word.isdecimal() and int(word) > 1 for word in words), "whole numbers above 1"
        else:
            good, expected = words <= set(known), f"some of {', '.join(known)}"
        if not (words and good):
            raise ValueError(f"--{option.name}: expected {expected}, separated by commas, got {value!r}")
        return tuple(sorted(map(int, words)) if known is None else (word for word in known if word in words))
    if known is not None and value not in known:
        expected = f"one of {', '.join(known)}"
    elif isinstance(value, int | float) and not value > 0:
        expected = ">= 1" if isinstance(value, int) else "> 0"
    if expected:
        raise ValueError(f"--{option.name}: expected {expected}, got {value!r}")
    return value
