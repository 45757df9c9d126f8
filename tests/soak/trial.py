"""One structure, its program and its cases: run, compare, report differences."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tests.soak.draw import DTYPES, Arrays, Structure, draw_structure, draw_values
from tests.soak.program import constants_of, make_program
from tests.soak.reference import Expected, expected, visible_pairs

EAGER = 3  # number of draws of an eager structure that also run without jit; all but the first reuse compiled programs


@dataclasses.dataclass(frozen=True)
class Difference:
    """A result outside its tolerance, at its worst entry."""

    name: str
    ratio: float  # of error to tolerance; infinite for a NaN or a wrong infinity
    at: tuple[int, ...] = ()
    found: Any = None
    wanted: Any = None
    off: Any = None

    def __str__(self) -> str:
        if self.found is None:
            return self.name
        return (
            f"{self.name}{list(self.at)}: {self.found:.9g} instead of {self.wanted:.9g} "
            f"(off {abs(self.found - self.wanted):.3g}, tolerance {self.off:.3g})"
        )


def ratios(found: np.ndarray, wanted: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """Error over tolerance of each entry; 0 where the dtype cannot hold the number or the tolerance is infinite."""
    largest = float(ml_dtypes.finfo(found.dtype).max) / 2 if found.dtype.kind in "fV" else np.inf
    # XLA flushes subnormal numbers to 0, in intermediate and final results
    least = float(ml_dtypes.finfo(found.dtype).tiny) if found.dtype.kind in "fV" else 0.0
    found, tolerance = found.astype(np.float64), np.broadcast_to(tolerance, wanted.shape) + least
    with np.errstate(all="ignore"):
        ratio = abs(found - wanted) / np.maximum(tolerance, 1e-300)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        ratio = np.where(found == wanted, 0.0, ratio)  # also -inf
        unknown = ~np.isfinite(tolerance) | (abs(wanted) + tolerance > largest) & np.isfinite(wanted)
    return np.where(unknown, 0.0, ratio)


def differences(structure: Structure, found: dict[str, Any], wanted: Expected) -> tuple[list[Difference], float]:
    """The results outside their tolerance, and the largest ratio of error to tolerance."""
    wrong, worst = [], 0.0
    for name in sorted(found.keys() ^ wanted.keys()):
        wrong.append(Difference(f"{name} is in {'the reference' if name in wanted else 'the result'} alone", np.inf))
    for name in wanted.keys() & found.keys():
        x, (y, tolerance) = np.asarray(found[name]), wanted[name]
        y = np.asarray(y)
        dtype = _dtype_of(structure, name)
        if x.shape != y.shape or (dtype is not None and x.dtype != dtype):
            wrong.append(Difference(f"{name}: {x.dtype}{list(x.shape)} instead of {dtype}{list(y.shape)}", np.inf))
        else:
            more, ratio = _compared(name, x, y, np.asarray(tolerance))
            wrong, worst = wrong + more, max(worst, ratio)
    return sorted(wrong, key=lambda one: -one.ratio), worst


def _dtype_of(structure: Structure, name: str) -> Any:
    if name == "out":
        return np.dtype(DTYPES[structure.dtype])
    if name.startswith("d "):
        return np.dtype(structure.recipes[name[2:]].dtype)
    return None if name.startswith("of support") else np.dtype(structure.softmax_dtype)


def compare(found: dict[str, np.ndarray], wanted: Expected) -> tuple[list[Difference], float]:
    """As ``differences``, of results of any float dtype."""
    wrong, worst = [], 0.0
    for name in sorted(found.keys() ^ wanted.keys()):
        wrong.append(Difference(f"{name} is in {'the reference' if name in wanted else 'the result'} alone", np.inf))
    for name in sorted(wanted.keys() & found.keys()):
        difference, ratio = _compared(name, found[name], *map(np.asarray, wanted[name]))
        wrong, worst = wrong + difference, max(worst, ratio)
    return sorted(wrong, key=lambda one: -one.ratio), worst


def _compared(name: str, x: np.ndarray, y: np.ndarray, tolerance: np.ndarray) -> tuple[list[Difference], float]:
    if x.shape != y.shape:
        return [Difference(f"{name}: shape {list(x.shape)} instead of {list(y.shape)}", np.inf)], 0.0
    if not x.size:
        return [], 0.0
    ratio = ratios(x, y, tolerance)
    at = np.unravel_index(ratio.argmax(), ratio.shape)
    numbers = (float(one[at]) for one in (x, y, np.broadcast_to(tolerance, y.shape)))
    wrong = [Difference(name, float(ratio[at]), tuple(map(int, at)), *numbers)] if ratio[at] > 1 else []
    return wrong, float(ratio[at])


class Trial:
    """A structure and its program, which is compiled when the first case runs."""

    def __init__(self, seed: int, index: int, mode: str):
        self.seed, self.structure = seed, draw_structure(seed, index, mode)
        self.label, self.eager = f"{self.structure.dtype}, {self.structure.implementation}", self.structure.eager
        self._program: Callable | None = None
        self._jitted: Callable | None = None

    def covers(self) -> list[str]:
        """What is counted."""
        return ["kind attention", *self.structure.covers()]

    def values(self, draw: int) -> Arrays:
        """Draws the arrays of a case."""
        return draw_values(self.structure, self.seed, draw, visible_pairs)

    def run(self, arrays: Arrays, eagerly: bool = False) -> dict[str, Any]:
        """Computes the results with jattn."""
        constants = constants_of(self.structure, arrays)
        if self._program is None or self._jitted is None:
            self._program = make_program(self.structure, constants)  # the constants are the same in every draw
            self._jitted = jax.jit(self._program)
        given = {name: x for name, x in arrays.items() if name not in constants}
        with jax.enable_x64(self.structure.x64):
            results = (self._program if eagerly else self._jitted)(given)
            return {name: np.asarray(x) for name, x in results.items()}

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """The differences in a case, and the largest ratio of error to tolerance."""
        arrays = self.values(draw)
        wanted = expected(self.structure, arrays)
        wrong, worst = [], 0.0
        for eagerly in (False, True) if self.structure.eager and draw < EAGER else (False,):
            try:
                more, ratio = differences(self.structure, self.run(arrays, eagerly), wanted)
            except Exception as error:  # any error is a finding, and the soak continues
                text = " ".join(str(error).split())
                more, ratio = [Difference(f"{type(error).__name__}: {text[:300]}", np.inf)], 0.0
            how = "eagerly, " if eagerly else ""
            wrong += [dataclasses.replace(one, name=how + one.name) for one in more]
            worst = max(worst, ratio)
        return wrong, worst
