"""When something happens in training, and in which order over seeds."""

import numpy as np
from scipy.stats import betabinom, binomtest

FEW = 3  # seeds, below which nothing is said about others


def half_way(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``[R]``: the step at which each row of ``values [R,P]`` has risen half its way, from its first to its largest.

    Between two of the ``steps [P]``, by a straight line; the last step for a row that never rises, and NaN for one with
    a NaN.
    """
    level, times = (values[:, 0] + values.max(1)) / 2, []
    for row, half in zip(values, level, strict=True):
        at = int(np.argmax(row >= half))
        if at == 0:
            times.append(float(steps[-1]))
            continue
        share = (half - row[at - 1]) / (row[at] - row[at - 1])
        times.append(float(steps[at - 1] + share * (steps[at] - steps[at - 1])))
    return np.where(np.isnan(values).any(1), np.nan, times)


def half_fall(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``[R]``: the step at which each row of ``values [R,P]`` has fallen half its way from its largest, as above."""
    largest = values.argmax(1)[:, None]
    begun = np.arange(values.shape[1])[None] >= largest
    return half_way(steps, -np.where(begun, values, np.take_along_axis(values, largest, 1)))


def rate(passed: int, of: int) -> list[float] | None:
    """The 95% interval of the share of all seeds that pass; None for few seeds.

    Source: Clopper and Pearson, Biometrika 26, 1934.
    """
    if of < FEW:
        return None
    return [float(bound) for bound in binomtest(passed, of).proportion_ci(0.95, "exact")]


def again(passed: int, of: int, needed: int) -> float | None:
    """The probability that a claim would hold on as many other seeds; None for few seeds.

    By the beta-binomial distribution of their number that pass, with Jeffreys' prior over the share.
    """
    if of < FEW:
        return None
    return float(betabinom.sf(needed - 1, of, passed + 0.5, of - passed + 0.5))
