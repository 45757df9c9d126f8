"""Groups of heads to switch off together: the strongest heads, and random groups that match them."""

import numpy as np

Heads = list[tuple[int, int]]  # (layer, head)


def strongest(scores: np.ndarray, count: int) -> Heads:
    """The heads with the largest scores ``[L,N]``, the largest first."""
    order = np.argsort(-scores, axis=None, kind="stable")[:count]
    return [(int(at) // scores.shape[1], int(at) % scores.shape[1]) for at in order]


def matched_groups(
    group: Heads, count: int, norms: np.ndarray, besides: Heads, rng: np.random.Generator
) -> list[Heads]:
    """``count`` random groups like ``group``: for each of its heads, one of the four with the nearest output norm.

    They are in the same layer, or in the next ones if it has too few, and in neither ``group`` nor ``besides``.
    ``norms [L,N]``.
    """
    groups = []
    for _ in range(count):
        taken = {*group, *besides}
        for layer, head in group:
            free = [at for at in np.ndindex(*norms.shape) if at not in taken]
            if not free:
                fewer = "a smaller group, so that enough other heads remain for random groups"
                raise ValueError(f"language.group: expected {fewer}, got {len(group)} of {norms.size} heads")
            free.sort(key=lambda at: (abs(at[0] - layer), abs(np.log(norms[at] / norms[layer, head]))))
            near = [at for at in free[:4] if at[0] == free[0][0]]
            taken.add(near[rng.integers(len(near))])
        groups.append(sorted(taken - {*group, *besides}))
    return groups


def among(group: Heads, shape: tuple[int, ...]) -> np.ndarray:
    """bool ``[L,N]``: which heads are in the group."""
    inside = np.zeros(shape, bool)
    for at in group:
        inside[at] = True
    return inside


def one_off(shape: tuple[int, ...]) -> np.ndarray:
    """``[L*N,L,N]``: gates with one head off, for each head."""
    return 1.0 - np.eye(int(np.prod(shape))).reshape(-1, *shape)
