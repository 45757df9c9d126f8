"""Matches heads that do the same thing in two models."""

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

FAR = 1e6  # between heads in different layers of models of the same shape, and for values that are not finite


def matched(one: Any, other: Any) -> np.ndarray:
    """``[h]``: for each head of the report ``one``, the index of its match in ``other``, or -1.

    If both show the same text, heads are matched by assignment, which minimises the sum of the distances between their
    statistics and between their patterns. Models with the same heads in every layer are matched within layers. If the
    texts differ, heads keep their places.
    """
    layers, theirs = (np.array([head.layer for head in report.heads]) for report in (one, other))
    alike = np.array_equal(layers, theirs)
    if (one.queries, one.keys) != (other.queries, other.keys):
        return np.where(np.arange(len(layers)) < len(theirs), np.arange(len(layers)), -1)
    distance = np.zeros((len(layers), len(theirs)))
    for name in one.looked.numbers.keys() & other.looked.numbers.keys() - {"distance"}:
        distance += abs(one.looked.numbers[name][:, None] - other.looked.numbers[name][None])
    for i in range(len(one.queries)):
        mine, yours = (_pattern(report.looked, i) for report in (one, other))
        if mine.shape[1:] == yours.shape[1:]:
            most = 2 * mine.shape[1] * len(one.queries)
            distance += np.stack([abs(head - yours).sum((1, 2)) for head in mine]) / most
    if alike:
        distance += FAR * (layers[:, None] != theirs[None])
    matches = np.full(len(layers), -1)
    rows, columns = linear_sum_assignment(np.nan_to_num(distance, nan=FAR))
    matches[rows] = columns
    return matches


def _pattern(looked: Any, i: int) -> np.ndarray:
    return looked.coarse[i] if looked.weights is None else looked.weights[i]
