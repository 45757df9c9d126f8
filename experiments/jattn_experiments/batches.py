"""The parts that tasks share: their base class and registry, batches, and how batches are drawn."""

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
    real: Array  # [B,T] bool: queries in the statistics, which are not padding and have targets
    at: Array | None = None  # [B,Q] int32: the queries that are read out; all of them by default
    # Name -> [B,T]: the cross-entropy of predictors to compare a model with, where targets count.
    levels: dict[str, Array] = {}


class Patch(NamedTuple):
    """Sequences in which the last layer reads some positions from another sequence, and the expected new answers.

    A task with a hypothesis about its solution predicts these answers. ``measure.evaluate`` counts how many come true.
    """

    tokens: Array  # [B,T,F]
    other: Array  # [B,T,F]: the other sequence
    at: Array  # [B,T] bool: positions that are read in the other sequence
    query: Array  # [B] int32: position of the answer
    answer: Array  # [B] int32: the right one
    predicted: Array  # [B] int32: the predicted one
    counts: Array  # [B] bool: sequences with a prediction
    place: int
    what: tuple[str, ...]  # "key" and "value", or one of them


TASKS: dict[str, type["Task"]] = {}  # kind -> task; ``class NAME(Task, kind=KIND)`` adds it
Rule = tuple[str, bool, str]  # an option, whether its value is valid, what was expected


class Task:
    """Base of tasks. Unless a task says otherwise, tokens are single symbols in sequences of one length.

    A task is a frozen dataclass. Its fields are the options of ``config.Task`` that it takes. Its overrides mean the
    same as here.
    """

    length: int
    symbols: int
    places: Any  # names of the read-outs
    of_tokens: Any  # read-outs whose source depends on the tokens
    roles: Any  # candidate roles of a head: places and statistics of ``jattn.heads``, each pattern under one name
    metrics: tuple[str, ...]  # metrics of ``measure.claims`` to show for controls and sweeps
    padding: int | None = None  # token that no query sees
    levels: tuple[str, ...] = ()  # names of a batch's levels
    patches: Any = ()  # names of what ``patch`` returns
    contexts: Any = None  # slices of the early and late queries, if their losses are compared
    causal = True  # whether answers depend on nothing after the query
    answers_are_tokens = False  # a single answer that is a token, so the read-out may be the embedding
    same_length = True  # whether all sequences have one length, padding included
    can_split = True  # whether a ring may split the tokens of a sequence
    can_shorten = False  # whether a shorter sequence poses the same task

    def __init_subclass__(cls, kind: str) -> None:
        TASKS[kind] = cls

    def rules(self) -> list[Rule]:
        """Rules for this task's options, in addition to the rules of ``config`` for all tasks."""
        return []

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences, different for every key."""
        raise NotImplementedError

    def held_out(self, key: Array, batch: int) -> Batch:
        """Sequences to judge a model on, which training never draws."""
        return self.sample(key, batch)

    def look(self, key: Array, batch: int) -> Batch:
        """Sequences to score heads on."""
        return self.sample(key, batch)

    def probe(self, key: Array, batch: int) -> Batch:
        """Sequences of one layout, so that patterns can be averaged over a batch."""
        return self.sample(key, batch)

    def patch(self, key: Array, batch: int) -> dict[str, Patch]:
        """Interventions on the last layer that test how a model solves the task, on ``batch`` sequences each."""
        return {}

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
    def trained_length(self) -> int:
        """Tokens in a sequence of a batch."""
        return self.length

    @property
    def max_length(self) -> int:
        """Longest sequence that the model sees."""
        return self.length

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """A short label for each token of one sequence ``[T,1]``."""
        return [letter(token) for (token,) in tokens]


def ask(tokens: Array, values: Array, sources: Array, queries: Array, real: Array) -> Batch:
    """The batch whose answers at ``queries [B,T]`` are the ``values [B,T]`` at ``sources [B,T,A]``."""
    sources = jnp.where(queries[..., None], sources, -1)
    targets = jnp.take_along_axis(values[..., None], jnp.maximum(sources, 0), 1)
    weights = jnp.broadcast_to(queries[..., None], sources.shape).astype(jnp.float32)
    return Batch(tokens, targets, weights, sources, real)


def predict(tokens: Array, targets: Array, real: Array) -> Batch:
    """The batch of ``tokens [B,T]`` with answers ``targets [B,T]`` at ``real [B,T]``, which have no source."""
    weights = real[..., None].astype(jnp.float32)
    return Batch(tokens[..., None], targets[..., None], weights, jnp.full(weights.shape, -1), real)


def permutations(key: Array, batch: int, length: int) -> Array:
    """``[batch,length]``: an independent permutation of ``arange(length)`` in each row."""
    return jnp.argsort(jax.random.uniform(key, (batch, length)))


def letter(index: int) -> str:
    """a, b, ..., z, then A, B, ..., then the number itself."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return letters[index] if index < len(letters) else str(index)
