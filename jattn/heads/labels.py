"""One label per head, held against what heads score that cannot have the role."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike

MIXED = "mixed"


class Roles(NamedTuple):
    """What ``roles`` found; NumPy arrays of the heads' shape."""

    label: np.ndarray  # the pattern, or "mixed"
    score: np.ndarray  # of that pattern; of the one nearest to its threshold where mixed
    threshold: np.ndarray  # what the score of that pattern had to pass
    p_value: np.ndarray  # how likely a head without the pattern scores as high, times the number of patterns


def roles(scores: Mapping[str, ArrayLike], null: Mapping[str, ArrayLike], *, level: float = 0.05) -> Roles:
    """One label per head: the pattern whose score passes what heads reach that cannot have it, by the most.

    The p-value is ``min(1, patterns * (1 + #{null >= score}) / (1 + #null))``, where ``patterns`` is how many are tried
    for each head (Bonferroni); so it is never below ``patterns / (1 + #null)``. It is that of one head, and among many
    heads some pass by chance. A score passes where its p-value is at most ``level``: where it is above a threshold that
    is nobody's choice but a quantile of the null, near ``1 - level / patterns``. Where none passes, the label is
    ``"mixed"``.
    A small p-value says that a pattern is there, not that it is all a head does: read it beside the score.
    Source: Phipson and Smyth, 2010, https://doi.org/10.2202/1544-6115.1585 (why the 1 is added).

    Args:
        scores: of each pattern, arrays of one shape, an entry for each head.
        null: of each pattern, scores of heads that cannot have it, of any shape: those of untrained models; for
            patterns of tokens also those of the trained model beside shuffled tokens.
        level: the share of heads without any role that may get one.

    Raises:
        ValueError: a pattern without null; a null too small to be passed at this level; scores that are not finite;
            shapes that differ; a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    if not scores or not set(scores) <= set(null):
        raise ValueError(f"null must have the patterns of scores, {sorted(scores)}, got {sorted(null)}")
    names, arrays = list(scores), [np.asarray(x, float) for x in scores.values()]
    if len({x.shape for x in arrays}) != 1:
        raise ValueError(f"scores must have one shape, got { ({name: np.shape(x) for name, x in scores.items()}) }")
    nulls = [np.sort(np.asarray(null[name], float).ravel()) for name in names]
    if not all(np.isfinite(x).all() for x in (*arrays, *nulls)):
        raise ValueError("scores and null must be finite")
    needed = int(np.ceil(len(names) / level)) - 1
    if min(map(len, nulls)) < needed:
        raise ValueError(
            f"level={level} with {len(names)} patterns needs at least {needed} scores in the null of each, got "
            f"{dict(zip(names, map(len, nulls), strict=True))}; take more untrained models, or fewer patterns"
        )
    # how many of the null reach the score, for each pattern and head
    reached = np.stack([len(x) - np.searchsorted(x, score, "left") for x, score in zip(nulls, arrays, strict=True)])
    size = np.array([len(x) for x in nulls]).reshape(-1, *(1,) * arrays[0].ndim)
    p = np.minimum(1.0, len(names) * (1 + reached) / (1 + size))
    limits = np.array([_limit(x, len(names), level) for x in nulls])
    excess = np.stack(arrays) - limits.reshape(size.shape)
    best, passed = excess.argmax(0), (excess > 0).any(0)

    def of_best(table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, best[None], 0)[0]

    label = np.where(passed, np.array(names)[best], MIXED)
    return Roles(label, of_best(np.stack(arrays)), limits[best], of_best(p))


def _limit(null: np.ndarray, patterns: int, level: float) -> float:
    """The score of the sorted ``null`` above which the p-value is at most ``level``."""
    allowed = np.flatnonzero(patterns * (1 + np.arange(len(null))) / (1 + len(null)) <= level)[-1]
    return float(null[len(null) - 1 - allowed])
