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

    The threshold of a pattern is no number of anybody's choice but a quantile of its null, ``1 - level / patterns``,
    where ``patterns`` is how many are tried for each head (Bonferroni). The p-value is
    ``min(1, patterns * (1 + #{null >= score}) / (1 + #null))``, so it is never below ``patterns / (1 + #null)``; it is
    that of one head, and among many heads some pass by chance. Where no score passes, the label is ``"mixed"``.
    A small p-value says that a pattern is there, not that it is all a head does: read it beside the score.
    Source: Phipson and Smyth, 2010, https://doi.org/10.2202/1544-6115.1585 (why the 1 is added).

    Args:
        scores: of each pattern, arrays of one shape, an entry for each head.
        null: of each pattern, scores of heads that cannot have it, of any shape: those of untrained models; for
            patterns of tokens also those of the trained model beside shuffled tokens.
        level: the share of heads without any role that may get one.

    Raises:
        ValueError: a pattern without null; a null too small to be passed at this level; a score that is NaN; shapes
            that differ.
    """
    if not scores or not set(scores) <= set(null):
        raise ValueError(f"null must have the patterns of scores, {sorted(scores)}, got {sorted(null)}")
    names, arrays = list(scores), [np.asarray(x, float) for x in scores.values()]
    if len({x.shape for x in arrays}) != 1:
        raise ValueError(f"scores must have one shape, got { ({name: np.shape(x) for name, x in scores.items()}) }")
    nulls = [np.sort(np.asarray(null[name], float).ravel()) for name in names]
    if any(np.isnan(x).any() for x in (*arrays, *nulls)):
        raise ValueError("scores and null must not be NaN")
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
    limits = np.array([np.quantile(x, 1 - level / len(names), method="higher") for x in nulls])
    excess = np.stack(arrays) - limits.reshape(size.shape)
    passed = p <= level
    best = np.where(passed.any(0), np.where(passed, excess, -np.inf).argmax(0), excess.argmax(0))

    def of_best(table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, best[None], 0)[0]

    label = np.where(passed.any(0), np.array(names)[best], MIXED)
    return Roles(label, of_best(np.stack(arrays)), limits[best], of_best(p))
