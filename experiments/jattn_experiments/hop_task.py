"""The task of k-hop induction, with patches that test one way to solve it; see docs/published.md."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jattn_experiments.batches import Batch, Patch, Rule, Task, letter


@dataclasses.dataclass(frozen=True)
class Hop(Task, kind="hop"):
    """k-hop induction: go from a symbol to what followed its last earlier occurrence, k times, and name that symbol.

    The first token gives k, from 0 to ``hops``. Read-out k counts if it is k. Neighbours differ. If a step has nowhere
    to go, the answer is an extra class.
    Source: Sanford, Hsu and Telgarsky, https://arxiv.org/abs/2402.09268, section 4, and its published code.
    """

    length: int = 100
    symbols: int = 4
    hops: int = 2

    metrics = ("mean_accuracy",)

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(f"{k} hops" for k in range(self.hops + 1))

    @property
    def of_tokens(self) -> tuple[str, ...]:
        """All places except the query itself."""
        return self.places[1:]

    @property
    def patches(self) -> tuple[str, ...]:
        return ("near the end", "elsewhere", "leads here") if self.hops > 1 else ()

    @property
    def roles(self) -> tuple[str, ...]:
        """Patterns that a head may have. One hop is the pattern of an induction head."""
        return (*self.places[1:], "previous_token", "current_token", "first_token", "duplicate_token")

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Number of different ids in each field of a token: the symbols, then the numbers of hops."""
        return (self.symbols + self.hops + 1,)

    @property
    def classes(self) -> int:
        """Number of different answers: the symbols, and "nowhere"."""
        return self.symbols + 1

    def rules(self) -> list[Rule]:
        """Neighbours differ."""
        return [("symbols", self.symbols > 1, "at least 2, because neighbours differ")]

    def sample(self, key: Array, batch: int) -> Batch:
        hop_key, symbol_key = jax.random.split(key)
        return self._of_hops(symbol_key, jax.random.randint(hop_key, (batch,), 0, self.hops + 1))

    def probe(self, key: Array, batch: int) -> Batch:
        """Sequences of one layout: those with the most hops."""
        return self._of_hops(key, jnp.full((batch,), self.hops))

    def _of_hops(self, key: Array, hops: Array) -> Batch:
        chars = self._chars(key, len(hops))
        position = jnp.arange(self.length - 1)[None]
        last = self._one_hop(chars)
        at = [jnp.broadcast_to(position, chars.shape)]
        for _ in range(self.hops):
            at.append(jnp.where(at[-1] < 0, -1, jnp.take_along_axis(last, jnp.maximum(at[-1], 0), 1)))
        where = jnp.stack(at, -1)  # [B,T-1,A]
        symbols = jnp.take_along_axis(chars[..., None], jnp.maximum(where, 0), 1)
        targets = jnp.where(where < 0, self.symbols, symbols)
        counts = jnp.broadcast_to(jnp.arange(self.hops + 1)[None, None] == hops[:, None, None], where.shape)
        sources = jnp.where(counts & (where >= 0), where + 1, -1)  # the first token is before all symbols
        first = lambda x, value: jnp.pad(x, ((0, 0), (1, 0), (0, 0)), constant_values=value)
        tokens = jnp.concatenate([self.symbols + hops[:, None], chars], 1)
        return Batch(
            tokens=tokens[..., None],
            targets=first(targets, 0),
            target_weights=first(counts.astype(jnp.float32), 0),
            sources=first(sources, -1),
            real=jnp.broadcast_to(jnp.arange(self.length)[None] > 0, tokens.shape),
        )

    def patch(self, key: Array, batch: int) -> dict[str, Patch]:
        """Tests of one way to go two hops: each position holds its last three symbols, and the last MLP chooses.

        All tests use queries whose first hop ends at least three symbols after the second hop's end.

        - "near the end": the second hop's end and the two positions after it are read from a sequence that shares only
          the five symbols there, except for another symbol at that end. The other symbol becomes the answer.
        - "elsewhere": all other positions are read from a sequence that differs in that symbol. The answer stays.
        - "leads here": the value at the first hop's end is read from a sequence with another symbol there, which shares
          only the two symbols before it. The answer is where that symbol leads in this sequence, not in the other one.
        """
        if self.hops < 2:
            return {}
        chars_key, query_key, *keys = jax.random.split(key, 6)
        many = 8 * batch  # keep the queries that can be changed in this way
        chars, rows = self._chars(chars_key, many), jnp.arange(many)
        firsts = self._one_hop(chars)
        ends = jnp.where(firsts < 0, -1, jnp.take_along_axis(firsts, jnp.maximum(firsts, 0), 1))
        far = (ends >= 0) & (firsts - ends > 2)
        query = jnp.argmax(far * jax.random.uniform(query_key, far.shape), 1)
        far, first, end = (x[rows, query] for x in (far, firsts, ends))
        answer = chars[rows, end]

        def exchanged(key: Array, at: Array) -> tuple[Array, Array]:
            """``chars`` with another symbol ``at [B]``, and whether there is one that differs from its neighbours."""
            taken = jnp.stack([chars[rows, at + step] for step in (-1, 0, 1)], 1)
            free = jnp.all(jax.nn.one_hot(taken, self.symbols) == 0, 1)
            other = jnp.argmax(free * jax.random.uniform(key, free.shape), 1)
            return chars.at[rows, at].set(other), far & free.any(1)

        def patch(other: Array, at: Array, predicted: Array, counts: Array, *what: str) -> Patch:
            best = jax.lax.top_k(counts.astype(jnp.float32), batch)[1]
            tokens = lambda x: jnp.pad(x[best], ((0, 0), (1, 0)), constant_values=self.symbols + 2)[..., None]
            at = jnp.pad(at[best], ((0, 0), (1, 0)))
            each = (x[best] for x in (query + 1, answer, predicted, counts))
            return Patch(tokens(chars), tokens(other), at, *each, place=2, what=what)

        position = jnp.arange(self.length - 1)[None]
        near = (position >= end[:, None]) & (position <= end[:, None] + 2)
        changed, can_change = exchanged(keys[0], end)
        around = self._anew(keys[1], changed, end - 2, end + 2)
        diversion, can_divert = exchanged(keys[2], first)
        apart = self._anew(keys[3], diversion, first - 2, first)
        leads = jnp.stack([self._behind(x)[rows, first, diversion[rows, first]] for x in (chars, apart)])
        here, there = (x[rows, at] for x, at in zip((chars, apart), leads, strict=True))
        differ = can_divert & jnp.all((leads >= 0) & (first[None] - leads > 2), 0)
        differ &= (here != there) & (here != answer) & (there != answer)
        return {
            "near the end": patch(around, near, changed[rows, end], can_change, "key", "value"),
            "elsewhere": patch(changed, ~near, changed[rows, end], can_change, "key", "value"),
            "leads here": patch(apart, position == first[:, None], here, differ, "value"),
        }

    def _anew(self, key: Array, chars: Array, start: Array, stop: Array) -> Array:
        """``chars [B,T-1]`` from ``start [B]`` to ``stop [B]``, with new symbols before and after."""
        steps = jnp.cumsum(jax.random.randint(key, chars.shape, 1, self.symbols), 1)
        near = jnp.clip(jnp.arange(chars.shape[1])[None], start[:, None], stop[:, None])
        kept, begun = (jnp.take_along_axis(x, near, 1) for x in (chars, steps))
        return (kept + steps - begun) % self.symbols

    def _chars(self, key: Array, batch: int) -> Array:
        """``[B,T-1]``: random symbols, each different from the one before."""
        steps = jax.random.randint(key, (batch, self.length - 1), 1, self.symbols).at[:, 0].add(-1)
        return jnp.cumsum(steps, 1) % self.symbols

    def _behind(self, chars: Array) -> Array:
        """``[B,T-1,C]``: the position after the last occurrence of each symbol before each position, or -1."""
        each = jax.nn.one_hot(chars, self.symbols) > 0
        seen = jax.lax.cummax(jnp.where(each, jnp.arange(chars.shape[1])[None, :, None], -2), 1)
        return jnp.pad(seen[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=-2) + 1

    def _one_hop(self, chars: Array) -> Array:
        """``[B,T-1]``: where one hop from each position ends, or -1 for nowhere."""
        return jnp.take_along_axis(self._behind(chars), chars[..., None], -1)[..., 0]

    def labels(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return [letter(token) if token < self.symbols else f"{token - self.symbols}x" for (token,) in tokens]
