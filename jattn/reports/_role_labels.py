"""Labels a report's heads with roles: compares their statistics with heads that cannot have a role."""

from collections.abc import Mapping, Sequence

import numpy as np

from jattn.heads import OF_TOKENS, roles

PATTERNS = ("previous_token", "current_token", "first_token", *OF_TOKENS)


def label(numbers: Mapping[str, np.ndarray], nulls: Sequence[Mapping[str, np.ndarray]]) -> list[str]:
    """The label of every head, from the patterns that are defined here and in all ``nulls``.

    Raises:
        ValueError: there are no such patterns; the nulls have too few heads.
    """
    every = (numbers, *nulls)
    patterns = [name for name in PATTERNS if all(name in one and np.isfinite(one[name]).all() for one in every)]
    if not patterns:
        raise ValueError(
            "null gives roles only to heads of self-attention, and needs reports with the same kind of tokens"
        )
    scores = {name: numbers[name] for name in patterns}
    return roles(scores, {name: np.concatenate([one[name] for one in nulls]) for name in patterns}).label.tolist()
