"""Pairs of texts with different answers, clean and corrupt, on which a language model's circuits are found."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax import Array

COPIED = 0.6  # share of a sequence that is its first copy
NAMES = (
    "Mary John Tom James Sarah Alice Bob David Emma Anna Paul Mark Peter Jack Kate Lucy Henry George Laura Susan "
    "Robert Michael William Charles Daniel Richard Thomas Martin Simon Helen"
).split()
PLACES, THINGS = "store park school beach house".split(), "drink book ring letter box".split()
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo",
    "Norway": "Oslo", "Cuba": "Havana", "Austria": "Vienna", "Greece": "Athens", "Ireland": "Dublin",
    "Russia": "Moscow", "Sweden": "Stockholm", "Poland": "Warsaw", "Portugal": "Lisbon", "England": "London",
    "China": "Beijing", "Iraq": "Baghdad", "Iran": "Tehran", "Turkey": "Ankara", "Canada": "Ottawa",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Hungary": "Budapest",
}  # fmt: skip


class Pairs(NamedTuple):
    """Clean and corrupt tokens ``[B,T]``, and the answer ``[B]`` to each."""

    clean: np.ndarray
    corrupt: np.ndarray
    answer: np.ndarray
    other: np.ndarray

    @property
    def labels(self) -> dict[str, np.ndarray]:
        """The arguments that ``difference`` needs for each pair."""
        return {"answer": self.answer, "other": self.other}

    def part(self, at: slice) -> "Pairs":
        """Some of the pairs."""
        return Pairs(*(x[at] for x in self))


def difference(logits: Array, tokens: Array, labels: dict[str, Array]) -> Array:
    """The log probability (nats) of the clean text's answer minus the corrupt text's answer, after the last token."""
    return logits[-1, labels["answer"]] - logits[-1, labels["other"]]


def copying(tokens: np.ndarray, first: int, length: int, count: int, rng: np.random.Generator) -> Pairs:
    """Random ``tokens`` and the beginning of a second copy. Corrupt: two tokens of the first copy are swapped.

    One of the two equals the sequence's last token, so a different token follows it in the first copy. Both sequences
    hold the same tokens; only a model that knows which token precedes each can tell them apart.
    """
    period = round(COPIED * length)
    last = length - 2 - period  # where the last token stands in the first copy
    clean, corrupt, answers = [], [], []
    for _ in range(count):
        copy = rng.permutation(tokens)[:period]
        swapped, elsewhere = copy.copy(), int(rng.integers(last + 2, period - 1))
        swapped[[last, elsewhere]] = copy[[elsewhere, last]]
        clean.append(np.concatenate([[first], copy, copy[: last + 1]]))
        corrupt.append(np.concatenate([[first], swapped, copy[: last + 1]]))
        answers.append((copy[last + 1], copy[elsewhere + 1]))
    return _pairs(clean, corrupt, answers)


def names(encode: Callable[[str], list[int]], first: int, count: int, rng: np.random.Generator) -> Pairs:
    """Indirect objects: which of two people receives something. Corrupt: the other one gives it.

    Source: Wang et al., https://arxiv.org/abs/2211.00593, section 3.
    """
    single = [name for name in NAMES if len(encode(f" {name}")) == 1]
    if len(single) < 2:
        raise ValueError(
            "language.model: expected a model whose tokenizer has at least two of the names as single tokens"
        )
    clean, corrupt, answers = [], [], []
    for _ in range(count):
        (one, two), place, thing = rng.permutation(single)[:2], rng.choice(PLACES), rng.choice(THINGS)
        giver, taker = (one, two) if rng.random() < 0.5 else (two, one)
        text = f"Then, {one} and {two} went to the {place}. {{}} gave a {thing} to".format
        clean.append([first, *encode(text(giver))])
        corrupt.append([first, *encode(text(taker))])
        answers.append((encode(f" {taker}")[0], encode(f" {giver}")[0]))
    return _pairs(clean, corrupt, answers)


def capitals(encode: Callable[[str], list[int]], first: int, count: int, rng: np.random.Generator) -> Pairs:
    """The capital of a country. Corrupt: the capital of another country."""
    every = list(_of_one_length(encode))
    if len(every) < count:
        most = f"at most {len(every) // 2}, because {len(every)} countries have single-token names and capitals"
        raise ValueError(f"circuits.pairs: expected {most}, got {count // 2}")
    drawn = [every[at] for at in rng.permutation(len(every))[:count]]
    half = count // 2  # no country appears in both halves
    beside = [*drawn[1:half], drawn[0], *drawn[half + 1 :], drawn[half]]
    pairs = list(zip(drawn, beside, strict=True))
    clean, corrupt = ([[first, *pair[side][0]] for pair in pairs] for side in (0, 1))
    return _pairs(clean, corrupt, [(one[1], other[1]) for one, other in pairs])


def _of_one_length(encode: Callable[[str], list[int]]) -> Iterator[tuple[list[int], int]]:
    """Prompts and answers for countries whose names and capitals are each a single token."""
    for country, capital in CAPITALS.items():
        if len(encode(f" {country}")) == len(encode(f" {capital}")) == 1:
            yield encode(f"The capital of {country} is"), encode(f" {capital}")[0]


def _pairs(clean: list[Any], corrupt: list[Any], answers: list[Any]) -> Pairs:
    answer, other = np.array(answers, np.int32).T
    return Pairs(np.array(clean, np.int32), np.array(corrupt, np.int32), answer, other)
