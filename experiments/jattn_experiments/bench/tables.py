"""Markdown tables and reports of the suites, and jattn's goals."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

NOT_INSTALLED = "not installed"


@dataclasses.dataclass(frozen=True)
class Asked:
    """One goal for jattn and the measured number, or None if there is none."""

    question: str
    measured: float | None
    threshold: float
    at_least: bool
    unit: str = ""

    @property
    def answer(self) -> str:
        """Whether the goal is met."""
        if self.measured is None:
            return "not measured"
        met = self.measured >= self.threshold if self.at_least else self.measured <= self.threshold
        return "met" if met else "not met"


def has_native(environment: Mapping[str, str]) -> bool:
    """Whether a plain call could take the kernels of jattn-native."""
    return environment.get("jattn-native", NOT_INSTALLED) != NOT_INSTALLED


def ratio(above: float | None, below: float | None) -> float | None:
    """``above / below``, or None."""
    return above / below if above is not None and below else None


def worst(values: Iterable[float | None], highest: bool) -> float | None:
    """The highest or lowest known value, or None."""
    known = [value for value in values if value is not None]
    return (max if highest else min)(known) if known else None


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows of cells as a Markdown table."""
    bar: Callable[[Sequence[Any]], str] = lambda cells: f"| {' | '.join(map(str, cells))} |"
    return "\n".join([bar(head), "|" + "---|" * len(head), *map(bar, rows)])


def asked_table(lines: Sequence[Asked]) -> str:
    """The goals as a Markdown table."""
    rows = []
    for one in lines:
        bound = f"{'>=' if one.at_least else '<='} {one.threshold:.3g} {one.unit}".strip()
        measured = "-" if one.measured is None else f"{short_number(one.measured)} {one.unit}".strip()
        rows.append([one.question, measured, bound, one.answer])
    return table(["what", "measured", "asked", ""], rows)


def short_number(value: float) -> str:
    """About three significant digits, without exponents."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(digits, 0), 4)}f}"


def listed(facts: Mapping[str, Any]) -> str:
    """Names and values, one per line."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def report(*parts: str) -> str:
    """Headings, paragraphs and tables as one document."""
    return "\n\n".join(parts) + "\n"
