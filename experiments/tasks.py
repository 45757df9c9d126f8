"""What is learned: pure functions from a key to a batch, with the place that each read-out should look at."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from experiments import config


class Batch(NamedTuple):
    """Sequences and what is asked of them. ``F`` fields of a token, ``A`` places that are read out."""

    tokens: Array  # [B,T,F] int32; the model adds the embeddings of the fields
    targets: Array  # [B,T,A] int32: the class each read-out should give
    target_weights: Array  # [B,T,A] float32: 1 where an answer is asked, else 0
    sources: Array  # [B,T,A] int32: position that holds the answer, -1 where none is asked
    real: Array  # [B,T] bool: queries the statistics run over: no padding, none that is never asked


@dataclasses.dataclass(frozen=True)
class CopyFromFourPlaces:
    """Copy from four places at once.

    A token is a key and a value. The keys are permuted within each half, the values random. In the second
    half the read-outs copy the value one position back, five back, at the mirrored position, and at the place
    in the first half that has the same key. A query whose four places are not all different is not asked: so
    an attention that looks at one place can answer one read-out and must guess the other three.
    """

    length: int = 32
    symbols: int = 16

    places = ("one back", "five back", "mirror", "same key")

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Number of different ids in each field of a token."""
        return self.length // 2, self.symbols

    @property
    def max_length(self) -> int:
        """Longest sequence that the model will meet."""
        return self.length

    @property
    def chance(self) -> float:
        """Accuracy of a guess."""
        return 1 / self.symbols

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences, different for every key."""
        half = self.length // 2
        first_key, second_key, value_key = jax.random.split(key, 3)
        first = jnp.argsort(jax.random.uniform(first_key, (batch, half)))  # a permutation in each row
        second = jnp.argsort(jax.random.uniform(second_key, (batch, half)))
        keys = jnp.concatenate([first, second], 1)
        values = jax.random.randint(value_key, (batch, self.length), 0, self.symbols)

        position = jnp.arange(self.length)
        fixed = jnp.stack([position - 1, position - 5, self.length - 1 - position], -1)  # [T,3]
        same_key = jnp.argmax(keys[:, :, None] == first[:, None, :], -1)  # [B,T]
        fixed = jnp.broadcast_to(fixed, (batch, *fixed.shape))
        sources = jnp.concatenate([fixed, same_key[..., None]], -1)  # [B,T,4]

        asked_ever = (position >= half) & ~_has_twins(fixed[0])
        asked = asked_ever[None, :] & ~_has_twins(sources)
        sources = jnp.where(asked[..., None], sources, -1)
        targets = jnp.take_along_axis(values[..., None], jnp.maximum(sources, 0), 1)
        return Batch(
            tokens=jnp.stack([keys, values], -1),
            targets=targets,
            target_weights=jnp.broadcast_to(asked[..., None], sources.shape).astype(jnp.float32),
            sources=sources,
            real=jnp.broadcast_to(asked_ever[None, :], keys.shape),
        )

    def probe(self, key: Array, batch: int) -> Batch:
        """Sequences of one layout, for patterns that are averaged over a batch."""
        return self.sample(key, batch)

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """A short label for each token of one sequence ``[T,F]``: key and value, as "c7"."""
        return [f"{_letter(key)}{value}" for key, value in tokens]


@dataclasses.dataclass(frozen=True)
class CopyString:
    """Copy a string of random length: ``BOS s SEP s``, next-token prediction of the second ``s``."""

    symbols: int = 32
    shortest: int = 4
    longest: int = 20
    farthest: int = 40

    places = ("copy source",)

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Number of different ids in each field of a token: the symbols, then BOS, SEP and padding."""
        return (self.symbols + 3,)

    @property
    def max_length(self) -> int:
        """Longest sequence that the model will meet, in the curve over length."""
        return 2 * self.farthest + 1

    @property
    def chance(self) -> float:
        """Accuracy of a guess."""
        return 1 / self.symbols

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences with strings of ``shortest`` to ``longest`` symbols, padded at the end."""
        length_key, symbol_key = jax.random.split(key)
        lengths = jax.random.randint(length_key, (batch,), self.shortest, self.longest + 1)
        return self._strings(symbol_key, lengths, 2 * self.longest + 1)

    def sample_length(self, key: Array, batch: int, length: Array) -> Batch:
        """``batch`` strings of ``length`` symbols, which may be traced; padded to ``max_length``."""
        return self._strings(key, jnp.full((batch,), length), self.max_length)

    def probe(self, key: Array, batch: int) -> Batch:
        """Sequences of one layout: strings of the middle length, without padding."""
        length = (self.shortest + self.longest) // 2
        return self._strings(key, jnp.full((batch,), length), 2 * length + 1)

    def _strings(self, key: Array, lengths: Array, size: int) -> Batch:
        """Tokens ``0..n`` are BOS s, ``n+1`` is SEP; the query at ``n+1+i`` is asked for the symbol at ``1+i``."""
        bos, sep, pad = self.symbols, self.symbols + 1, self.symbols + 2
        lengths = lengths[:, None]
        position = jnp.arange(size)[None, :]
        symbols = jax.random.randint(key, (lengths.shape[0], size), 0, self.symbols)
        offset = position - lengths - 1  # of the query from SEP
        asked = (offset >= 0) & (offset < lengths)
        original = jnp.where(offset > 0, offset, position)  # the position whose symbol a token repeats
        tokens = jnp.take_along_axis(symbols, original, 1)
        tokens = jnp.where(position == 0, bos, tokens)
        tokens = jnp.where(offset == 0, sep, tokens)
        tokens = jnp.where(offset >= lengths, pad, tokens)
        sources = jnp.where(asked, offset + 1, -1)
        targets = jnp.where(asked, jnp.take_along_axis(symbols, jnp.maximum(sources, 0), 1), 0)
        return Batch(
            tokens=tokens[..., None],
            targets=targets[..., None],
            target_weights=asked[..., None].astype(jnp.float32),
            sources=sources[..., None],
            real=offset < lengths,
        )

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """A short label for each token of one sequence ``[T,1]``."""
        special = {self.symbols: "BOS", self.symbols + 1: "SEP", self.symbols + 2: "·"}
        return [special.get(int(token), _letter(token)) for (token,) in tokens]


Task = CopyFromFourPlaces | CopyString


def make(options: config.Task) -> Task:
    """The task that a config names."""
    if options.kind == "copy":
        return CopyFromFourPlaces(options.length, options.symbols)
    return CopyString(options.symbols, options.shortest, options.longest, options.farthest)


def _has_twins(sources: Array) -> Array:
    """Whether any two of the last axis are the same."""
    return jnp.sum(sources[..., :, None] == sources[..., None, :], (-2, -1)) > sources.shape[-1]


def _letter(index: int) -> str:
    """a, b, ..., z, then A, B, ..., then the number itself."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return letters[index] if index < len(letters) else str(index)
