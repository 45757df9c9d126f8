"""Gives each head a label, tested against the scores of heads that cannot have the role."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike

#: The label of a head with no pattern.
MIXED = "mixed"
#: The prefix in the label of a head that barely exceeds its null, or does not exceed its baseline.
WEAK = "weak "
USUAL = 0.95  # a label that is not weak exceeds this quantile of the baseline,
RISE = 0.1  # and its threshold by this share of the distance from the threshold to 1, the maximum


class Roles(NamedTuple):
    """The result of :func:`~jattn.heads.roles`, as NumPy arrays of the heads' shape.

    Attributes:
        label: the pattern, ``"weak "`` and the pattern, or ``"mixed"``.
        score: the score of that pattern; if mixed, the score of the pattern nearest its threshold.
        threshold: the score that a head with that pattern must exceed.
        p_value: the probability that a head without the pattern scores as high, times the number of patterns.
        least: the score above which the label is not weak.

    Example:
        >>> null = {"induction": np.linspace(0.0, 0.1, 19)}
        >>> found = jattn.heads.roles({"induction": np.array([0.8, 0.05])}, null)
        >>> [f"{label} {score:.2f}" for label, score in zip(found.label, found.score)]
        ['induction 0.80', 'mixed 0.05']
    """

    label: np.ndarray
    score: np.ndarray
    threshold: np.ndarray
    p_value: np.ndarray
    least: np.ndarray


def roles(
    scores: Mapping[str, ArrayLike],
    null: Mapping[str, ArrayLike],
    *,
    level: float = 0.05,
    baseline: Mapping[str, ArrayLike] | None = None,
) -> Roles:
    """Labels each head with the pattern whose score exceeds its threshold by the most, or ``"mixed"``.

    The p-value is ``min(1, patterns * (1 + #{null >= score}) / (1 + #null))``, with ``patterns`` the number of patterns
    tested for each head (Bonferroni), so it is at least ``patterns / (1 + #null)``. It applies to a single head: among
    many heads, some pass by chance. A score passes if its p-value is at most ``level``, so the threshold is a quantile
    of the null, near ``1 - level / patterns``. If no pattern passes, the label is ``"mixed"``.

    A small p-value shows that a pattern is present, not that the head does nothing else. The score shows how strong the
    pattern is, so print it next to the label. Scores are shares in [0, 1]. If a pattern passes but exceeds its
    threshold by less than a tenth of the distance from the threshold to 1, its label begins with ``"weak "``.
    Heads of an untrained model attend almost evenly, so nearly every head of a large trained model passes. With a
    ``baseline``, a pattern that passes without exceeding the 95% quantile of its baseline is also weak. A pattern that
    is not weak takes precedence.

    Args:
        scores: for each pattern, an array with one entry per head; all of the same shape.
        null: for each pattern, scores, of any shape, of heads that cannot have it: from untrained models and, for token
            patterns, from the trained model on shuffled tokens. Each pattern needs at least ``patterns / level - 1``
            scores: 19 for one pattern at a level of 0.05, 39 for two, 59 for three. An untrained model of L layers with
            N heads provides ``L * N``; for a small model, use several random keys.
        level: the accepted share of heads that get a label without having a role.
        baseline: for each pattern, usual scores, of any shape, from the same model's heads on shuffled tokens. For
            patterns of repeated tokens, use the clean run with the ``tokens`` of another sequence, because shuffled
            sequences still repeat tokens.

    Returns:
        A ``Roles`` of NumPy arrays of the heads' shape: label, score, threshold, p_value, least.

    Raises:
        ValueError: a pattern has no null or no baseline; a null is too small for this level; scores are not finite or
            differ in shape; ``level`` is outside (0, 1).

    Example:
        >>> null = {"first_token": np.linspace(0.1, 0.3, 19)}  # of heads of untrained models
        >>> usual = {"first_token": np.array([0.4, 0.5, 0.6])}  # of the same model on shuffled tokens
        >>> found = jattn.heads.roles({"first_token": np.array([0.2, 0.5, 0.9])}, null, baseline=usual)
        >>> found.label.tolist()
        ['mixed', 'weak first_token', 'first_token']

    Source: Phipson and Smyth, 2010, https://doi.org/10.2202/1544-6115.1585 (why the 1 is added).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    if not scores or not set(scores) <= set(null):
        raise ValueError(f"null must have the patterns of scores, {sorted(scores)}, got {sorted(null)}")
    if baseline is not None and not set(scores) <= set(baseline):
        raise ValueError(f"baseline must have the patterns of scores, {sorted(scores)}, got {sorted(baseline)}")
    names, arrays = list(scores), [np.asarray(x, float) for x in scores.values()]
    if len({x.shape for x in arrays}) != 1:
        raise ValueError(f"scores must have one shape, got { ({name: np.shape(x) for name, x in scores.items()}) }")
    nulls = [np.sort(np.asarray(null[name], float).ravel()) for name in names]
    usual = [np.asarray(baseline[name], float).ravel() for name in names] if baseline is not None else []
    if not all(np.isfinite(x).all() for x in (*arrays, *nulls, *usual)) or not all(map(len, usual)):
        raise ValueError("scores, null and baseline must be finite, and none may be empty")
    needed = int(np.ceil(len(names) / level)) - 1
    if min(map(len, nulls)) < needed:
        raise ValueError(
            f"level={level} with {len(names)} patterns needs at least {needed} scores in the null of each, got "
            f"{dict(zip(names, map(len, nulls), strict=True))}; use more untrained models or fewer patterns"
        )
    # The number of null scores at or above each score.
    reached = np.stack([len(x) - np.searchsorted(x, score, "left") for x, score in zip(nulls, arrays, strict=True)])
    size = np.array([len(x) for x in nulls]).reshape(-1, *(1,) * arrays[0].ndim)
    p = np.minimum(1.0, len(names) * (1 + reached) / (1 + size))
    limits = np.array([_limit(x, len(names), level) for x in nulls])
    excess = np.stack(arrays) - limits.reshape(size.shape)
    least = limits + RISE * (1 - limits)
    if usual:
        least = np.maximum(least, [np.quantile(x, USUAL) for x in usual])
    strong = (excess > 0) & (np.stack(arrays) > least.reshape(size.shape))
    # Among strong patterns, if there are any; otherwise among all.
    best = np.where(strong.any(0), np.where(strong, excess, -np.inf).argmax(0), excess.argmax(0))
    passed = (excess > 0).any(0)

    def take_best(table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, best[None], 0)[0]

    weak = np.array([WEAK + name for name in names])
    label = np.where(passed, np.where(strong.any(0), np.array(names)[best], weak[best]), MIXED)
    return Roles(label, take_best(np.stack(arrays)), limits[best], take_best(p), least[best])


def _limit(null: np.ndarray, patterns: int, level: float) -> float:
    """The score in the sorted ``null`` above which the p-value is at most ``level``."""
    allowed = np.flatnonzero(patterns * (1 + np.arange(len(null))) / (1 + len(null)) <= level)[-1]
    return float(null[len(null) - 1 - allowed])
