"""A task with real text: Python's own documentation, encoded anew in every sequence."""

import dataclasses
import functools
import re
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jattn_experiments.batches import Batch, Rule, Task, permutations, predict

BLOCK = 1024  # consecutive words that are held out or trained on together
HELD_OUT = 8  # one block out of this many is held out


@dataclasses.dataclass(frozen=True)
class Text(Task, kind="text"):
    """Predict the next word of a text in which symbols, drawn anew for every sequence, replace the words.

    Words keep the frequencies, distances and neighbours that they have in the text, but only the sequence itself tells
    which symbol follows which. Heads are scored on random symbols that repeat with a random period, at all queries
    after the first period. The in-context learning score compares the second and the last sixteenth of a sequence. The
    50th and the 500th of the 512 tokens in the paper are near their middles.
    Source: Olsson et al., https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads
    """

    length: int = 128
    symbols: int = 132

    places = ("next word",)
    located = ()
    of_tokens = ()
    roles = ("induction", "previous_token", "current_token", "first_token", "duplicate_token")
    metrics = ("loss", "in_context")
    answers_are_tokens = True

    def rules(self) -> list[Rule]:
        """A sixteenth is a whole number, a block holds a sequence and its last answer, and all words may differ."""
        whole = self.length % 16 == 0 and self.length < BLOCK
        return [
            ("length", whole, f"a multiple of 16, less than {BLOCK}"),
            (
                "symbols",
                self.symbols > self.length,
                f"more than task.length={self.length}, because all words may differ",
            ),
        ]

    @property
    def contexts(self) -> tuple[slice, slice]:
        """The early and the late queries, whose losses the in-context learning score compares."""
        part = self.length // 16
        return slice(part, 2 * part), slice(self.length - part, self.length)

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences of the text for training."""
        return self._cut(key, batch, corpus()[0])

    def held_out(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences of the text that training never draws."""
        return self._cut(key, batch, corpus()[1])

    def look(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences of random symbols that repeat, each with its own period."""
        symbol_key, period_key = jax.random.split(key)
        periods = jax.random.randint(period_key, (batch, 1), self.length // 4, self.length // 2 + 1)
        return self._repeating(symbol_key, periods)

    def probe(self, key: Array, batch: int) -> Batch:
        """Sequences of one layout: the longest period."""
        return self._repeating(key, jnp.full((batch, 1), self.length // 2))

    def _repeating(self, key: Array, periods: Array) -> Batch:
        symbols, where = permutations(key, len(periods), self.symbols), jnp.arange(self.length + 1)[None]
        return _next(jnp.take_along_axis(symbols, where % periods, 1), where[:, :-1] >= periods)

    def _cut(self, key: Array, batch: int, blocks: np.ndarray) -> Batch:
        block_key, start_key, code_key = jax.random.split(key, 3)
        block = jax.random.randint(block_key, (batch, 1), 0, len(blocks))
        start = jax.random.randint(start_key, (batch, 1), 0, BLOCK - self.length)
        where = jnp.arange(self.length + 1)
        words = jnp.asarray(blocks)[block, start + where[None]]
        first = jnp.argmax(words[:, :, None] == words[:, None, :], -1)  # where each word came first
        code = permutations(code_key, batch, self.symbols)
        return _next(jnp.take_along_axis(code, first, 1), jnp.ones((batch, self.length), bool))


def _next(tokens: Array, real: Array) -> Batch:
    """The batch of ``tokens [B,T+1]`` in which each token is predicted from the earlier ones, at ``real`` queries."""
    return predict(tokens[:, :-1], tokens[:, 1:], real)


@functools.cache
def corpus() -> tuple[np.ndarray, np.ndarray]:
    """The words of ``pydoc``'s topics as numbers, each paragraph once: blocks ``[.,BLOCK]`` to train on and held out.

    Other versions of Python have other text.
    """
    paragraphs = (part.split() for _, topic in sorted(topics.topics.items()) for part in topic.split("\n\n"))
    words = re.findall(r"\w+|[^\w ]", " ".join(dict.fromkeys(" ".join(part) for part in paragraphs)))
    text = np.unique(words, return_inverse=True)[1].astype(np.int32)
    blocks = text[: len(text) // BLOCK * BLOCK].reshape(-1, BLOCK)
    held_out = np.arange(len(blocks)) % HELD_OUT == HELD_OUT - 1
    return blocks[~held_out], blocks[held_out]
