"""Defines the types of user-written functions: what masks and score functions take and return."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class MaskFunction(Protocol):
    """The type of a mask: ``(b, h, q_idx, kv_idx) -> bool``, elementwise on arrays that broadcast.

    Any function of four arguments qualifies, as does a ``jattn.masks.Mask``. ``isinstance`` checks only that it is
    callable.

    Example:
        >>> def near(b, h, q_idx, kv_idx):
        ...     return abs(q_idx - kv_idx) < 2
        >>> mask: jattn.masks.MaskFunction = near
        >>> jattn.masks.and_masks(mask, jattn.masks.Causal())(0, 0, 2, np.arange(4)).tolist()
        [False, True, True, False]
    """

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, /) -> Any: ...


@runtime_checkable
class ScoreMod(Protocol):
    """The type of a score function: ``(score, b, h, q_idx, kv_idx) -> score``, elementwise on arrays that broadcast.

    Any function of five arguments qualifies. ``isinstance`` checks only that it is callable.

    Example:
        >>> def near(score, b, h, q_idx, kv_idx):
        ...     return score - abs(q_idx - kv_idx)
        >>> mod: jattn.score_mods.ScoreMod = near
        >>> mod(jnp.zeros(3), 0, 0, 1, np.arange(3)).tolist()
        [-1.0, 0.0, -1.0]
    """

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, /) -> Any: ...
