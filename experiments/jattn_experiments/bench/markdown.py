"""Markdown tables and documents of the suites."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows of cells as a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def short_number(value: float) -> str:
    """The number with about three significant digits and no exponent."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(digits, 0), 4)}f}"


def listed(facts: Mapping[str, Any]) -> str:
    """Names and values, one per line."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def document(*parts: str) -> str:
    """Headings, paragraphs and tables as one text."""
    return "\n\n".join(parts) + "\n"
