"""Implementations of attention: what they are asked (``Request``) and what they are (``Implementation``).

One file each. Adding one is adding a file here and a row to ``jattn.api.IMPLEMENTATIONS``; the conformance table of the
tests then runs it on every case.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax

from jattn.masks import MaskFunction
from jattn.score_mods import ScoreMod


class Unsupported(NotImplementedError):
    """The named implementation cannot do what was asked; the message says why."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One checked call of ``jattn.dot_product_attention``, batched: all heads of all sequences.

    ``bias`` and ``slot_mask`` are ``[B|1, N|1, T|1, S|1]`` and go by slot, as do the lengths ``[B]``; ``masks`` and
    ``score_mod`` see positions, ``[B|1, T]`` and ``[B|1, S]``, which are None where they are the slots themselves.
    Sinks are not part of it: they are merged into any implementation's result.
    """

    query: jax.Array  # [B,T,N,H]
    key: jax.Array  # [B,S,K,H]
    value: jax.Array | None  # [B,S,K,D]; None when only weights are asked for
    scale: Any
    bias: jax.Array | None
    slot_mask: jax.Array | None
    masks: tuple[MaskFunction, ...]  # all must hold
    query_lengths: jax.Array | None
    kv_lengths: jax.Array | None
    score_mod: ScoreMod | None
    query_positions: jax.Array | None
    kv_positions: jax.Array | None
    dropout: tuple[float, jax.Array] | None  # (rate, key)
    precision: Any


@runtime_checkable
class Implementation(Protocol):
    """What a module in this package defines."""

    @staticmethod
    def why_not(request: Request) -> str | None:
        """None where ``run`` can take the request, otherwise the reason, in one phrase."""
        ...

    @staticmethod
    def run(request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]`` in the value's dtype and ``lse [B,T,N]``, both differentiable."""
        ...
