"""When quantities change in training, and in which order over seeds."""

import numpy as np
from scipy.stats import betabinom, binomtest

FEW = 3  # least number of seeds for statements about other seeds


def half_way(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``[R]``: the step at which each row of ``values [R,P]`` is halfway from its first to its largest value.

    It is interpolated linearly between two of the ``steps [P]``. A row that never rises gets the last step, and a row
    with a NaN gets NaN.
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
    """``[R]``: the step at which each row of ``values [R,P]`` has made half of its fall from its largest value."""
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

    The number of seeds that pass has a beta-binomial distribution, with Jeffreys' prior over the share.
    """
    if of < FEW:
        return None
    return float(betabinom.sf(needed - 1, of, passed + 0.5, of - passed + 0.5))
