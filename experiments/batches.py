"""Batches: sequences, what is asked about them, and what tasks share in drawing them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Batch(NamedTuple):
    """Sequences and their targets. ``F``: fields of a token; ``A``: places that are read out; ``Q``: T, or fewer."""

    tokens: Array  # [B,T,F] int32; the model adds the embeddings of the fields
    targets: Array  # [B,Q,A] int32: the class each read-out should give
    target_weights: Array  # [B,Q,A] float32: 1 where an answer counts, else 0
    sources: Array  # [B,T,A] int32: position of the answer, or -1 without one
    real: Array  # [B,T] bool: queries in the statistics: not padding, and with targets
    at: Array | None = None  # [B,Q] int32: the queries that are read out; all of them by default
    # Name -> [B,T]: the cross-entropy of predictors that a model is compared with, where targets count.
    levels: dict[str, Array] = {}


class OneSymbol:
    """Base of tasks: tokens are single symbols, in sequences of one length, unless a task says otherwise."""

    length: int
    symbols: int
    places: Any  # names of the read-outs
    padding: int | None = None  # token that no query sees
    levels: tuple[str, ...] = ()  # names of a batch's levels

    @property
    def located(self) -> tuple[str, ...]:
        """The places whose answers are at one position each."""
        return self.places

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Number of different ids in each field of a token."""
        return (self.symbols,)

    @property
    def classes(self) -> int:
        """Number of different answers."""
        return self.symbols

    @property
    def max_length(self) -> int:
        """Longest sequence that the model sees."""
        return self.length

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """A short label for each token of one sequence ``[T,1]``."""
        return [letter(token) for (token,) in tokens]


def ask(tokens: Array, values: Array, sources: Array, asked: Array, real: Array) -> Batch:
    """The batch whose answers at ``asked [B,T]`` are the ``values [B,T]`` at ``sources [B,T,A]``."""
    sources = jnp.where(asked[..., None], sources, -1)
    targets = jnp.take_along_axis(values[..., None], jnp.maximum(sources, 0), 1)
    weights = jnp.broadcast_to(asked[..., None], sources.shape).astype(jnp.float32)
    return Batch(tokens, targets, weights, sources, real)


def permutations(key: Array, batch: int, length: int) -> Array:
    """``[batch,length]``: an independent permutation of ``arange(length)`` in each row."""
    return jnp.argsort(jax.random.uniform(key, (batch, length)))


def letter(index: int) -> str:
    """a, b, ..., z, then A, B, ..., then the number itself."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return letters[index] if index < len(letters) else str(index)
