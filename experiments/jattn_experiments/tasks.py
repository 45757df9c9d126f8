"""The tasks: pure functions from a key to a batch, with the position that each read-out should attend to.

``batches.Task`` says what a task may define. Tasks of papers: ``paper_tasks``, ``hop_task`` and ``text_task``.
"""

import dataclasses
import inspect
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jattn_experiments.batches import TASKS, Batch, Rule, Task, ask, letter, permutations
from jattn_experiments.hop_task import Hop as Hop
from jattn_experiments.paper_tasks import Histogram as Histogram
from jattn_experiments.paper_tasks import Markov as Markov
from jattn_experiments.paper_tasks import Recall as Recall
from jattn_experiments.schema import Task as Options
from jattn_experiments.text_task import Text as Text


@dataclasses.dataclass(frozen=True)
class CopyFromFourPlaces(Task, kind="copy"):
    """Copy from four places at once.

    A token is a key and a value. The keys are permuted within each half, and the values are random. In the second
    half the read-outs copy the value one position back, five back, at the mirrored position, and at the position
    in the first half with the same key. Queries without four different positions do not count, so
    attention to one position answers one read-out and must guess the other three.
    """

    length: int = 32
    symbols: int = 16

    places = ("one back", "five back", "mirror", "same key")
    of_tokens = ("same key",)
    roles = (*places, "current_token", "first_token", "induction")
    metrics = ("mean_accuracy", "hardened_accuracy")

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Number of different ids in each field of a token."""
        return self.length // 2, self.symbols

    def sample(self, key: Array, batch: int) -> Batch:
        half = self.length // 2
        first_key, second_key, value_key = jax.random.split(key, 3)
        first, second = (permutations(key, batch, half) for key in (first_key, second_key))
        keys = jnp.concatenate([first, second], 1)
        values = jax.random.randint(value_key, (batch, self.length), 0, self.symbols)

        position = jnp.arange(self.length)
        fixed = jnp.stack([position - 1, position - 5, self.length - 1 - position], -1)  # [T,3]
        same_key = jnp.argmax(keys[:, :, None] == first[:, None, :], -1)  # [B,T]
        fixed = jnp.broadcast_to(fixed, (batch, *fixed.shape))
        sources = jnp.concatenate([fixed, same_key[..., None]], -1)  # [B,T,4]

        eligible = (position >= half) & ~_has_twins(fixed[0])
        queries = eligible[None, :] & ~_has_twins(sources)
        real = jnp.broadcast_to(eligible[None, :], keys.shape)
        return ask(jnp.stack([keys, values], -1), values, sources, queries, real)

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """A short label for each token of one sequence ``[T,F]``: key and value, like "c7"."""
        return [f"{letter(key)}{value}" for key, value in tokens]


@dataclasses.dataclass(frozen=True)
class CopyString(Task, kind="copy_string"):
    """Copy a string of random length: next-token prediction of the second ``s`` in ``BOS s SEP s``."""

    symbols: int = 32
    shortest: int = 4
    longest: int = 20
    farthest: int = 40

    places = ("copy source",)
    of_tokens = places
    roles = (*places, "previous_token", "current_token", "first_token", "duplicate_token")
    metrics = ("exact_match", "mean_accuracy")
    same_length = False

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Number of different ids in each field of a token: the symbols, then BOS, SEP and padding."""
        return (self.symbols + 3,)

    @property
    def trained_length(self) -> int:
        """Tokens in a sequence of a batch, which has room for the longest string."""
        return 2 * self.longest + 1

    @property
    def max_length(self) -> int:
        """Longest sequence that the model sees, in the curve over length."""
        return 2 * self.farthest + 1

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences of strings of ``shortest`` to ``longest`` symbols, padded at the end."""
        length_key, symbol_key = jax.random.split(key)
        lengths = jax.random.randint(length_key, (batch,), self.shortest, self.longest + 1)
        return self._strings(symbol_key, lengths, self.trained_length)

    def sample_length(self, key: Array, batch: int, length: Array) -> Batch:
        """``batch`` strings of ``length`` symbols, which may be traced; padded to ``max_length``."""
        return self._strings(key, jnp.full((batch,), length), self.max_length)

    def probe(self, key: Array, batch: int) -> Batch:
        """Sequences of one layout: strings of the middle length, without padding."""
        length = (self.shortest + self.longest) // 2
        return self._strings(key, jnp.full((batch,), length), 2 * length + 1)

    def _strings(self, key: Array, lengths: Array, size: int) -> Batch:
        """Tokens ``0..n`` are BOS s, ``n+1`` is SEP; the target of the query at ``n+1+i`` is the symbol at ``1+i``."""
        bos, sep, pad = self.symbols, self.symbols + 1, self.symbols + 2
        lengths = lengths[:, None]
        position = jnp.arange(size)[None, :]
        symbols = jax.random.randint(key, (lengths.shape[0], size), 0, self.symbols)
        offset = position - lengths - 1  # from SEP
        queries = (offset >= 0) & (offset < lengths)
        original = jnp.where(offset > 0, offset, position)  # the position whose symbol a token repeats
        tokens = jnp.take_along_axis(symbols, original, 1)
        tokens = jnp.where(position == 0, bos, tokens)
        tokens = jnp.where(offset == 0, sep, tokens)
        tokens = jnp.where(offset >= lengths, pad, tokens)
        return ask(tokens[..., None], symbols, (offset + 1)[..., None], queries, offset < lengths)

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        special = {self.symbols: "BOS", self.symbols + 1: "SEP", self.symbols + 2: "·"}
        return [special.get(int(token), letter(token)) for (token,) in tokens]


@dataclasses.dataclass(frozen=True)
class ShiftBank(Task, kind="shift_bank"):
    """Copy from several fixed distances at once: read-out ``i`` copies the symbol ``offsets[i]`` back."""

    length: int = 32
    symbols: int = 16
    offsets: tuple[int, ...] = (1, 2, 4, 7)

    of_tokens = ()
    metrics = ("mean_accuracy", "hardened_accuracy", "distinct_places")
    can_shorten = True

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(f"{offset} back" for offset in self.offsets)

    @property
    def roles(self) -> tuple[str, ...]:
        previous = () if 1 in self.offsets else ("previous_token",)
        return (*self.places, *previous, "current_token", "first_token", "duplicate_token", "induction")

    def rules(self) -> list[Rule]:
        """Offsets that differ and are within a sequence."""
        offsets, length = self.offsets, self.length
        good = bool(offsets) and len(set(offsets)) == len(offsets) and all(0 < one < length for one in offsets)
        return [("offsets", good, f"distinct numbers >= 1 and < task.length={length}")]

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences of random symbols, with targets wherever all sources exist."""
        tokens = jax.random.randint(key, (batch, self.length), 0, self.symbols)
        position = jnp.arange(self.length)
        sources = position[:, None] - jnp.array(self.offsets)[None]
        queries = jnp.broadcast_to(position >= max(self.offsets), tokens.shape)
        return ask(tokens[..., None], tokens, jnp.broadcast_to(sources, (batch, *sources.shape)), queries, queries)


@dataclasses.dataclass(frozen=True)
class Induction(Task, kind="induction"):
    """Predict the token that followed the previous occurrence of the current token.

    Half of the sequences are a random prefix and a segment that repeats with a random period. The others are pairs of
    a key and a value, then the same pairs in another order, with targets at the keys. In the first kind, a blur of the
    preceding tokens also identifies a token; in the second, only the token right before a value identifies its key. No
    token occurs twice within a segment or among the pairs.
    """

    length: int = 64
    symbols: int = 64
    shortest: int = 8
    longest: int = 24

    places = ("next token",)
    of_tokens = places
    roles = ("previous_token", "current_token", "first_token", "duplicate_token", "induction")
    metrics = ("mean_accuracy", "best/previous_token", "best/induction")
    answers_are_tokens = True

    def rules(self) -> list[Rule]:
        """Two periods fit into a sequence, and there are enough symbols."""
        longest = min(self.length // 2, self.symbols)
        return [
            ("longest", self.longest <= longest, f"at most {longest}, half of task.length or task.symbols"),
            ("symbols", self.symbols >= self.length - self.longest, "at least task.length - task.longest"),
        ]

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences, each randomly of one of the two kinds."""
        kind_key, repeated_key, pairs_key = jax.random.split(key, 3)
        is_repeated = jax.random.bernoulli(kind_key, 0.5, (batch,))
        tokens, first, at_keys = _pairs_twice(pairs_key, batch, self.length, self.symbols)
        symbol_key, prefix_key, period_key = jax.random.split(repeated_key, 3)
        prefix = jax.random.randint(prefix_key, (batch, 1), 0, self.length - 2 * self.longest + 1)
        period = jax.random.randint(period_key, (batch, 1), self.shortest, self.longest + 1)
        both = zip(self._repeat(symbol_key, prefix, period), (tokens, first + 1, at_keys), strict=True)
        tokens, sources, queries = (jnp.where(is_repeated[:, None], repeated, pairs) for repeated, pairs in both)
        return ask(tokens[..., None], tokens, sources[..., None], queries, jnp.ones(tokens.shape, bool))

    def probe(self, key: Array, batch: int) -> Batch:
        """Sequences of one layout: no prefix, a period of the middle length."""
        period = jnp.full((batch, 1), (self.shortest + self.longest) // 2)
        tokens, sources, queries = self._repeat(key, jnp.zeros_like(period), period)
        return ask(tokens[..., None], tokens, sources[..., None], queries, jnp.ones(tokens.shape, bool))

    def _repeat(self, key: Array, prefix: Array, period: Array) -> tuple[Array, Array, Array]:
        """``(tokens, sources, queries)``, each ``[B,T]``, of ``prefix`` and ``period [B,1]``."""
        order, position = permutations(key, len(prefix), self.symbols), jnp.arange(self.length)[None]
        first = jnp.where(position < prefix, position, prefix + (position - prefix) % period)
        return jnp.take_along_axis(order, first, 1), position - period + 1, position - prefix >= period


@dataclasses.dataclass(frozen=True)
class Skills(Task, kind="skills"):
    """Four read-outs at once: three, five and seven back, and the value of the current key.

    Pairs of a key and a value, then the same pairs in another order; no token occurs in two pairs. Targets are at the
    keys of the second half where the four answers differ. The first three are a matter of position. The last one takes
    two heads in a row, because only their being neighbours shows that a value belongs to a key.
    """

    length: int = 32
    symbols: int = 32

    places = ("three back", "five back", "seven back", "value")
    of_tokens = ("value",)
    roles = (*places, "previous_token", "current_token", "first_token", "duplicate_token")
    metrics = ("worst_place_accuracy", "clean_heads")

    def rules(self) -> list[Rule]:
        """No token is in two pairs."""
        return [("symbols", self.symbols >= self.length // 2, "at least half of task.length")]

    def sample(self, key: Array, batch: int) -> Batch:
        tokens, first, at_keys = _pairs_twice(key, batch, self.length, self.symbols)
        behind = jnp.arange(self.length)[:, None] - jnp.array([[3, 5, 7]])
        sources = jnp.concatenate([jnp.broadcast_to(behind, (*tokens.shape, 3)), first[..., None] + 1], -1)
        answers = jnp.take_along_axis(tokens[..., None], jnp.maximum(sources, 0), 1)
        queries = at_keys & ~_has_twins(answers)
        return ask(tokens[..., None], tokens, sources, queries, jnp.ones(tokens.shape, bool))


def _pairs_twice(key: Array, batch: int, length: int, symbols: int) -> tuple[Array, Array, Array]:
    """Tokens ``[B,T]`` of pairs, then the same in another order; where each token came first, and the later keys."""
    symbol_key, order_key = jax.random.split(key)
    count, half = length // 4, length // 2
    order = permutations(order_key, batch, count)  # of the pairs, the second time
    again = jnp.stack([2 * order, 2 * order + 1], -1).reshape(batch, half)
    first = jnp.concatenate([jnp.broadcast_to(jnp.arange(half), (batch, half)), again], 1)
    position = jnp.arange(length)
    at_keys = jnp.broadcast_to((position >= half) & (position % 2 == 0), first.shape)
    return jnp.take_along_axis(permutations(symbol_key, batch, symbols), first, 1), first, at_keys


def make(options: Options) -> Task:
    """The task that a config names."""
    task = TASKS[options.kind]
    values = {name: getattr(options, name) for name in inspect.signature(task).parameters}
    # A task does not change: lists become tuples.
    return task(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _has_twins(sources: Array) -> Array:
    """Whether any two entries of the last axis are equal."""
    return jnp.sum(sources[..., :, None] == sources[..., None, :], (-2, -1)) > sources.shape[-1]
