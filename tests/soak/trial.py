"""What a trial is, and what counts as a difference between a result and the reference."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

Expected = dict[str, tuple[Any, Any]]  # name -> (value, tolerance)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A result outside its tolerance, at its worst entry."""

    name: str
    ratio: float = np.inf  # of error to tolerance; infinite for a NaN or a wrong infinity
    at: tuple[int, ...] | None = None
    result: float = np.nan  # without a number, the name says all
    wanted: float = 0.0
    tolerance: float = 0.0

    def __str__(self) -> str:
        numbers = f"{self.result:.9g} instead of {self.wanted:.9g}, tolerance {self.tolerance:.3g}"
        return self.name if self.at is None else f"{self.name}{list(self.at)}: {numbers}"


class Trial:
    """A structure, drawn from a seed and its number. Its cases have numbers, too, and may be drawn alone."""

    stream, eager, label = 0, False, ""

    def __init__(self, seed: int, index: int):
        self.seed, self.index, self.outcomes = seed, index, []

    def rng(self, draw: int) -> np.random.Generator:
        """What a case draws from."""
        return np.random.default_rng([self.seed, self.index, self.stream, draw])

    def covers(self) -> list[str]:
        """What is counted of the last case."""
        return self.outcomes

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """The differences in a case, and the largest ratio of error to tolerance."""
        raise NotImplementedError


def of_error(error: Exception) -> Difference:
    """Any error is a finding."""
    return Difference(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def run_case(trial: Trial, draw: int) -> tuple[list[Difference], float]:
    """The differences in a case, and the largest ratio of error to tolerance."""
    try:
        return trial.case(draw)
    except Exception as error:
        return [of_error(error)], 0.0


def compare(results: dict[str, Any], wanted: Expected, dtypes: dict | None = None) -> tuple[list[Difference], float]:
    """The results outside their tolerance, and the largest ratio of error to tolerance."""
    alone = {name: "the reference" if name in wanted else "the result" for name in results.keys() ^ wanted.keys()}
    wrong, worst = [Difference(f"{name} is in {where} alone") for name, where in sorted(alone.items())], 0.0
    for name in sorted(results.keys() & wanted.keys()):
        x, y, tolerance = map(np.asarray, (results[name], *wanted[name]))
        dtype = (dtypes or {}).get(name, x.dtype)
        if x.shape != y.shape or x.dtype != dtype:
            wrong.append(Difference(f"{name}: {x.dtype}{list(x.shape)} instead of {dtype}{list(y.shape)}"))
        elif x.size:
            ratio = ratios(x, y, tolerance)
            at = np.unravel_index(ratio.argmax(), ratio.shape)
            if ratio[at] > 1:
                numbers = (float(one[at]) for one in (x, y, np.broadcast_to(tolerance, y.shape)))
                wrong.append(Difference(name, float(ratio[at]), tuple(map(int, at)), *numbers))
            worst = max(worst, float(ratio[at]))
    return sorted(wrong, key=lambda one: -one.ratio), worst


def ratios(result: np.ndarray, wanted: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """Error over tolerance of each entry; 0 where the dtype cannot hold the number or the tolerance is infinite."""
    largest, least = np.inf, 0.0
    if result.dtype.kind in "fV":  # XLA flushes subnormal numbers to 0, in intermediate and final results
        info = ml_dtypes.finfo(result.dtype)
        largest, least = float(info.max) / 2, float(info.tiny)
    result, tolerance = result.astype(np.float64), np.broadcast_to(tolerance, wanted.shape) + least
    with np.errstate(all="ignore"):
        ratio = abs(result - wanted) / np.maximum(tolerance, 1e-300)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        ratio = np.where(result == wanted, 0.0, ratio)  # also -inf
        unknown = ~np.isfinite(tolerance) | (abs(wanted) + tolerance > largest) & np.isfinite(wanted)
    return np.where(unknown, 0.0, ratio)
