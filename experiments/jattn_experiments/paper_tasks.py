"""Tasks from published papers, to compare with their numbers; see docs/published.md."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jattn_experiments.batches import Batch, Rule, Task, letter, permutations, predict


@dataclasses.dataclass(frozen=True)
class Markov(Task, kind="markov"):
    """Predict the next symbol of a Markov chain with new transitions in every sequence.

    ``prior``: rows of the transition matrix are uniform over distributions, or the matrix is uniform over doubly
    stochastic matrices of two symbols, in which both symbols are equally frequent. Chains start from the stationary
    distribution. ``levels``: the best predictors from single symbols and from pairs, given the prior over rows, and
    the chain itself.
    Source: Edelman et al., https://arxiv.org/abs/2402.11004, section 2.
    """

    length: int = 100
    symbols: int = 2
    prior: Literal["dirichlet", "doubly_stochastic"] = "dirichlet"

    places = ("next symbol",)
    located = ()
    of_tokens = ()
    roles = ("previous_token", "current_token", "first_token", "duplicate_token", "induction")
    metrics = ("loss", "above/unigram", "above/bigram")
    levels = ("unigram", "bigram", "chain")
    answers_are_tokens = True
    can_split = False

    def rules(self) -> list[Rule]:
        """Two symbols at least, and exactly two with doubly stochastic transitions."""
        good = self.symbols > 1 and (self.prior == "dirichlet" or self.symbols == 2)
        return [("symbols", good, "at least 2, and exactly 2 with task.prior=doubly_stochastic")]

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` chains, with a target at every query."""
        row_key, chain_key = jax.random.split(key)
        transitions = self._transitions(row_key, batch)  # [B,C,C]
        many = transitions
        for _ in range(12):  # 4096 steps from any symbol
            many = many @ many
        steps = jax.random.uniform(chain_key, (self.length + 1, batch))
        first = _drawn(many[:, 0], steps[0])

        def step(symbol: Array, uniform: Array) -> tuple[Array, Array]:
            after = _drawn(jnp.take_along_axis(transitions, symbol[:, None, None], 1)[:, 0], uniform)
            return after, after

        _, rest = jax.lax.scan(step, first, steps[1:])
        chain = jnp.concatenate([first[None], rest]).T  # [B,T+1]
        tokens, after = chain[:, :-1], chain[:, 1:]
        chains = predict(tokens, after, jnp.ones(tokens.shape, bool))
        return chains._replace(levels=self._levels(transitions, tokens, after))

    def _transitions(self, key: Array, batch: int) -> Array:
        if self.prior == "dirichlet":
            return jax.random.dirichlet(key, jnp.ones(self.symbols), (batch, self.symbols))
        stay = jax.random.uniform(key, (batch,))
        return jnp.stack([jnp.stack([stay, 1 - stay], -1), jnp.stack([1 - stay, stay], -1)], 1)

    def _levels(self, transitions: Array, tokens: Array, after: Array) -> dict[str, Array]:
        each, following = jax.nn.one_hot(tokens, self.symbols), jax.nn.one_hot(after, self.symbols)
        seen = jnp.cumsum(each, 1)  # [B,T,C], the current symbol included
        pairs = each[:, :, :, None] * following[:, :, None, :]
        before = jnp.cumsum(pairs, 1) - pairs  # [B,T,C,C], those within the tokens
        counts = {"unigram": seen, "bigram": jnp.einsum("btc,btcd->btd", each, before)}
        probabilities = {name: (count + 1) / (count + 1).sum(-1, keepdims=True) for name, count in counts.items()}
        probabilities["chain"] = jnp.einsum("btc,bcd->btd", each, transitions)
        return {name: -jnp.log(jnp.sum(p * following, -1)) for name, p in probabilities.items()}


@dataclasses.dataclass(frozen=True)
class Recall(Task, kind="recall"):
    """Multi-query associative recall: pairs of a key and a value, then each key again among blanks.

    Small distances to the second occurrences are more frequent, by a power law. Only these occurrences have answers.
    Source: Arora et al., https://arxiv.org/abs/2312.04927, section 3, and its published code.
    """

    length: int = 64
    symbols: int = 8192  # half of them keys; 0 is the blank
    pairs: int = 4

    places = ("value",)
    of_tokens = places
    roles = ("value", "previous_token", "current_token", "first_token", "duplicate_token")
    metrics = ("mean_accuracy",)
    power = 0.01  # of the distances' distribution
    answers_are_tokens = True
    can_split = False

    def rules(self) -> list[Rule]:
        """The pairs fit into the sequence twice, and their tokens are distinct."""
        most = min(self.length // 4, (self.symbols - 2) // 2)
        return [("pairs", self.pairs <= most, f"at most {most} (a quarter of task.length, half of task.symbols)")]

    def sample(self, key: Array, batch: int) -> Batch:
        key_key, value_key, gap_key = jax.random.split(key, 3)
        half, context = self.symbols // 2, 2 * self.pairs
        keys, values = self._distinct(key_key, batch, 1, half), self._distinct(value_key, batch, half, self.symbols)
        space = (self.length - context) // 2
        likely = jnp.log(jnp.arange(1, space + 1)) * (self.power - 1)
        _, gaps = jax.lax.top_k(likely[None] + jax.random.gumbel(gap_key, (batch, space)), self.pairs)
        at, rows = context + 2 * gaps, jnp.arange(batch)[:, None]
        where = 2 * jnp.arange(self.pairs)
        tokens = jnp.zeros((batch, self.length), jnp.int32)
        tokens = tokens.at[:, where].set(keys).at[:, where + 1].set(values).at[rows, at].set(keys)
        return Batch(
            tokens=tokens[..., None],
            targets=values[..., None],
            target_weights=jnp.ones((*values.shape, 1)),
            sources=jnp.full(tokens.shape, -1).at[rows, at].set(where[None] + 1)[..., None],
            real=jnp.ones(tokens.shape, bool),
            at=at,
        )

    def _distinct(self, key: Array, batch: int, low: int, high: int) -> Array:
        """``[batch,pairs]``: distinct ids in ``[low, high)``, one from each part of that range, in random order."""
        part_key, order_key = jax.random.split(key)
        part = (high - low) // self.pairs
        ids = low + part * jnp.arange(self.pairs)[None] + jax.random.randint(part_key, (batch, self.pairs), 0, part)
        return jnp.take_along_axis(ids, permutations(order_key, batch, self.pairs), 1)

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return ["·" if token == 0 else str(token) for (token,) in tokens]


@dataclasses.dataclass(frozen=True)
class Histogram(Task, kind="histogram"):
    """Count how often each token occurs in the whole sequence. Lengths are random, with padding at the end.

    Source: Weiss et al., https://arxiv.org/abs/2106.06981, section 5 (histograms without a first token).
    """

    length: int = 32
    symbols: int = 8
    shortest: int = 4

    places = ("count",)
    located = ()
    of_tokens = ()
    roles = ("current_token", "first_token", "duplicate_token", "previous_token", "induction")
    metrics = ("mean_accuracy",)
    causal = False
    can_split = False

    def rules(self) -> list[Rule]:
        """The shortest sequence is at most as long as the longest one."""
        return [("shortest", self.shortest <= self.length, f"at most task.length={self.length}")]

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Number of different ids in each field of a token: the symbols, then padding."""
        return (self.symbols + 1,)

    @property
    def classes(self) -> int:
        """Number of different answers: 1 to ``length``."""
        return self.length

    @property
    def padding(self) -> int:
        """The token that no query sees."""
        return self.symbols

    def sample(self, key: Array, batch: int) -> Batch:
        """``batch`` sequences of random symbols."""
        length_key, symbol_key = jax.random.split(key)
        lengths = jax.random.randint(length_key, (batch, 1), self.shortest, self.length + 1)
        return self._of_lengths(symbol_key, lengths)

    def probe(self, key: Array, batch: int) -> Batch:
        """Sequences of one layout, all of the longest length."""
        return self._of_lengths(key, jnp.full((batch, 1), self.length))

    def _of_lengths(self, key: Array, lengths: Array) -> Batch:
        symbols = jax.random.randint(key, (len(lengths), self.length), 0, self.symbols)
        real = jnp.arange(self.length)[None] < lengths
        tokens = jnp.where(real, symbols, self.padding)
        counts = jnp.sum(tokens[:, :, None] == tokens[:, None, :], -1)
        return predict(tokens, jnp.where(real, counts - 1, 0), real)

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return ["·" if token == self.padding else letter(token) for (token,) in tokens]


def _drawn(probabilities: Array, uniform: Array) -> Array:
    """An index per row of ``probabilities [B,C]``, from ``uniform [B]``."""
    below = jnp.cumsum(probabilities, -1)[:, :-1] <= uniform[:, None]
    return jnp.sum(below, -1).astype(jnp.int32)
