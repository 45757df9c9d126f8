"""A language model that reads a long text into its cache, a chunk at a time, and then answers from the cache.

Every function is compiled once for a capacity: all chunks have the same length, with padding where tokens are missing.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jattn import KVCache, heads, interop, masks
from jattn_experiments.measure.long_texts import Prompt
from jattn_experiments.measure.saved_model import Model

CHUNK = 256  # tokens read at once
ROWS = 32  # tokens whose weights are kept: a question and its answer


class Answer(NamedTuple):
    """What a model writes after a question, and what its heads look at while it writes."""

    written: np.ndarray  # [G]: the likeliest token after the question, and after each token of the answer but the last
    right: np.ndarray  # bool [G]: whether it is that of the answer
    score: np.ndarray  # [L,N] retrieval score


class Reader:
    """Compiled functions of a model with a cache of ``capacity`` tokens.

    ``gates [L,N]`` are 0 for heads that are off. ``blind``, bool ``[L,N]``, marks the heads that cannot see the tokens
    in ``hidden``, bool ``[T]``.
    """

    def __init__(self, model: Model, length: int):
        self.model, self.length, self.capacity = model, length, length + CHUNK
        self._read, self._answer = jax.jit(self._read_chunk, donate_argnums=1), jax.jit(self._answer_rows)
        self._rows = jax.jit(lambda *arguments: self._looked(*arguments)[2])
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))

    def empty(self) -> KVCache:
        """A cache without tokens."""
        return self.model.whole(self.model.state).init_cache(1, self.capacity)

    def read(self, cache: KVCache, tokens: Sequence[int] | np.ndarray, gates: np.ndarray | None = None) -> KVCache:
        """A new cache with ``tokens`` appended; ``cache`` itself does not change."""
        gates, cache = self._gates(gates), self._copy(cache)
        for at in range(0, len(tokens), CHUNK):
            chunk, valid = _padded(tokens[at : at + CHUNK], CHUNK)
            cache = self._read(self.model.state, cache, chunk, valid, gates)
        return cache

    def answer(
        self,
        cache: KVCache,
        prompt: Prompt,
        gates: np.ndarray | None = None,
        blind: np.ndarray | None = None,
        hidden: np.ndarray | None = None,
    ) -> Answer:
        """What the model writes in place of the answer, given the cache of the prompt up to its question."""
        tokens, answer = prompt.tokens, prompt.answer
        rows = tokens[prompt.question : -1]
        written = np.full(ROWS, -1)
        written[len(rows) - answer : len(rows)] = tokens[-answer:]
        more = self.capacity - len(tokens)
        slots, inside = np.pad(tokens, (0, more), constant_values=-2), np.pad(prompt.needle, (0, more))
        unseen = np.zeros(self.capacity, bool) if hidden is None else np.pad(hidden, (0, self.capacity - len(hidden)))
        chunk, valid = _padded(rows, ROWS)
        blind = np.zeros(self.model.shape, bool) if blind is None else blind
        likeliest, score = self._answer(
            self.model.state, cache, chunk, valid, self._gates(gates), blind, unseen, slots, written, inside
        )
        likeliest = np.asarray(likeliest)[len(rows) - answer : len(rows)]
        return Answer(likeliest, likeliest == tokens[-answer:], np.asarray(score))

    def rows(self, cache: KVCache, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """``[L,N,G,capacity]``: the weights of G tokens after the cache, at most ``ROWS``."""
        chunk, valid = _padded(tokens, ROWS)
        return np.asarray(self._rows(self.model.state, cache, chunk, valid)[:, :, : len(tokens)])

    def rows_at(self, tokens: np.ndarray, spans: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        """The ``rows`` of each span ``(start, stop)`` of a text, in order."""
        cache, at = self.empty(), 0
        for start, stop in spans:
            cache, at = self.read(cache, tokens[at:start]), start
            yield self.rows(cache, tokens[start:stop])

    def _gates(self, gates: np.ndarray | None) -> np.ndarray:
        return np.ones(self.model.shape, np.float32) if gates is None else np.asarray(gates, np.float32)

    def _read_chunk(self, state: nnx.State, cache: KVCache, tokens: Array, valid: Array, gates: Array) -> KVCache:
        per_layer = [{"head_gate": gate} for gate in gates]
        return self.model.whole(state)(tokens, cache=cache, valid=valid, per_layer=per_layer)[1]

    def _looked(
        self, state: nnx.State, cache: KVCache, tokens: Array, valid: Array, **options: Any
    ) -> tuple[interop.Transformer, Array, Array]:
        """The model, its hidden states ``[T,M]``, and the weights ``[L,N,T,C]``."""

        def forward(model: interop.Transformer) -> Any:
            return model(tokens, cache=cache, valid=valid, sow_weights=True, **options)

        model = self.model.whole(state)
        (hidden, _), sown = nnx.capture(forward, nnx.Intermediate)(model)
        return model, hidden[0], jnp.stack(heads.collect(sown, "attention_weights"))[:, 0]

    def _answer_rows(
        self, state: nnx.State, cache: KVCache, tokens: Array, valid: Array, gates: Array, blind: Array, unseen: Array,
        slots: Array, written: Array, needle: Array,
    ) -> tuple[Array, Array]:  # fmt: skip
        pattern = lambda b, h, q_idx, kv_idx: unseen[kv_idx]
        seen = (masks.Causal() & heads.forbid(pattern, of_layer) for of_layer in blind)
        options = [{"head_gate": gate, "mask": mask} for gate, mask in zip(gates, seen, strict=True)]
        model, hidden, weights = self._looked(state, cache, tokens, valid, per_layer=options)
        return model.logits(hidden).argmax(-1), heads.retrieval_score(weights, slots, written, needle)


def _padded(tokens: Sequence[int] | np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens padded with zeros, and which entries are tokens; ``[1,length]`` each."""
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(tokens)] = tokens
    return padded, np.arange(length)[None] < len(tokens)
