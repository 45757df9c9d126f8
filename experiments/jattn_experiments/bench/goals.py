"""Goals for jattn, with the measured numbers."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jattn_experiments.bench.markdown import short_number, table

NOT_INSTALLED = "not installed"


@dataclasses.dataclass(frozen=True)
class Goal:
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


def goal_table(goals: Sequence[Goal]) -> str:
    """The goals as a Markdown table."""
    rows = []
    for goal in goals:
        bound = f"{'>=' if goal.at_least else '<='} {goal.threshold:.3g} {goal.unit}".strip()
        measured = "-" if goal.measured is None else f"{short_number(goal.measured)} {goal.unit}".strip()
        rows.append([goal.question, measured, bound, goal.answer])
    return table(["what", "measured", "asked", ""], rows)


def has_native(environment: Mapping[str, str]) -> bool:
    """Whether a plain call could use the kernels of jattn-native."""
    return environment.get("jattn-native", NOT_INSTALLED) != NOT_INSTALLED


def ratio(above: float | None, below: float | None) -> float | None:
    """``above / below``, or None."""
    return above / below if above is not None and below else None


def worst(values: Iterable[float | None], highest: bool) -> float | None:
    """The highest or lowest known value, or None."""
    known = [value for value in values if value is not None]
    return (max if highest else min)(known) if known else None
