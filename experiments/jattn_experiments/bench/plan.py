"""What one run measures: the only place that declares the command line's options. Imports neither JAX nor peers."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jattn_experiments.bench.problems import CASES, DTYPES

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PEERS = ("jax", "torch", "tokamax", "splash", "jattn-xla", "jattn-kernels", "jattn-avx2")
PARTS = ("times", "memory", "peak", "compile")


def _option(default: Any, help: str, known: Collection[str] | None = None) -> Any:
    """An option. A tuple as ``default`` is a comma-separated list on the command line, with words from ``known``."""
    return dataclasses.field(default=default, metadata={"help": help, "known": known})


@dataclasses.dataclass(frozen=True)
class Plan:
    """The options of one run, and ``out``, the folder for its results. A suite takes some of the options."""

    out: Path
    peers: Sequence[str] = _option(
        PEERS[:3], f"peers to compare a plain jattn call with: any of {', '.join(PEERS)}", PEERS
    )
    device: str = _option("cpu", "device to measure on: cpu, gpu or tpu", DTYPES)
    lengths: Sequence[int] = _option(LENGTHS, "sequence lengths (T = S), each at least 2")
    batch: int = _option(1, "batch size")
    cases: Sequence[str] = _option(tuple(CASES), "cases to measure: any of the default ones", CASES)
    parts: Sequence[str] = _option(PARTS, "what to measure: any of the default parts", PARTS)
    cells: str = _option("", "chips suite: words that select cells, such as v5e,128,causal")
    kernels: str = _option(
        "", "chip suite: kernels to check, by jattn's name or as module:object; default: the device's own"
    )
    minutes: float = _option(8.0, "chip suite: time limit in minutes")
    seconds: float = _option(6.0, "seconds to spend on each row, all contestants together")

    @classmethod
    def read(cls, out: Path, **options: Any) -> "Plan":
        """Reads the command line's options. Raises ``ValueError`` with one line that names an invalid option."""
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
            good, expected = all(word.isdecimal() and int(word) > 1 for word in words), "whole numbers of at least 2"
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
