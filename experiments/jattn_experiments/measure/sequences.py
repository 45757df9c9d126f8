"""Sequences for examining a language model's heads: random tokens that repeat, and text of the Python docs."""

from pydoc_data import topics
from typing import Any, NamedTuple

import numpy as np

from jattn_experiments.config import LanguageModel

SHORT = 24  # random tokens before they repeat, in the sequences that the report shows
SHOWN = 16  # of these, for the mean of the weights
EXAMPLES = 3  # the first of these, and text
EXAMPLE_ROWS = np.array([0, *range(SHOWN, SHOWN + EXAMPLES - 1)])
PLACES = ("second copy", "repeated bigrams", "other tokens")


class Sequences(NamedTuple):
    """Tokens ``[B,T]`` of four kinds. The short sequences have other sizes."""

    chosen: np.ndarray  # random tokens, twice: the sequences on which heads are chosen
    tested: np.ndarray  # other ones, on which they are tested
    text: np.ndarray
    short: np.ndarray  # random tokens, twice, then EXAMPLES - 1 of text
    words: list[list[str]]  # the tokens of the examples in ``short``
    period: int

    @property
    def judged(self) -> np.ndarray:
        """``tested`` and ``text``, on which the model's answers are measured."""
        return np.concatenate([self.tested, self.text])

    def places(self) -> np.ndarray:
        """``[3,B,T-1]``: for each of ``PLACES``, at which tokens of ``judged`` the next token belongs to it."""
        B, T = self.judged.shape
        random = (np.arange(B) < len(self.tested))[:, None]
        second = np.broadcast_to(np.arange(T - 1) > self.period, (B, T - 1))
        repeated = continue_bigrams(self.judged)
        return np.stack([random & second, ~random & repeated, ~random & ~repeated])


def draw(options: LanguageModel, tokenizer: Any, vocabulary: int) -> Sequences:
    """The sequences of a config; ``ValueError`` if the tokenizer lacks the first token, or there is too little text."""
    first = tokenizer.token_to_id(options.first)
    if first is None:
        raise ValueError(f"language.first: expected a token of the model, got {options.first!r}")
    rng = np.random.default_rng(options.seed)
    count, period, ordinary = options.sequences, options.period, ordinary_tokens(tokenizer, vocabulary)

    def twice(count: int, period: int) -> np.ndarray:
        """A token to start with and ``period`` random ones, twice: ``[count,1+2*period]``."""
        drawn = rng.choice(ordinary, (count, period))
        return np.concatenate([np.full((count, 1), first), drawn, drawn], 1).astype(np.int32)

    chosen, tested, short = twice(count, period), twice(count, period), twice(SHOWN, SHORT)
    encoded = [np.array(tokenizer.encode(topics.topics[name]).ids) for name in sorted(topics.topics)]
    pieces = [ids[at : at + 2 * period] for ids in encoded for at in range(0, len(ids) - 2 * period + 1, 2 * period)]
    if len(pieces) < count or 2 * period < 2 * SHORT:
        raise ValueError(
            f"language.sequences: the Python documentation has {len(pieces)} pieces of {2 * period} tokens, and the "
            f"examples need {2 * SHORT}; got {count} sequences of language.period={period}"
        )
    text = np.stack([pieces[at] for at in rng.permutation(len(pieces))[:count]])
    text = np.concatenate([np.full((count, 1), first), text], 1).astype(np.int32)
    short = np.concatenate([short, text[: EXAMPLES - 1, : 1 + 2 * SHORT]])
    words = [[tokenizer.decode([token], skip_special_tokens=False) for token in row] for row in short[EXAMPLE_ROWS]]
    return Sequences(chosen, tested, text, short, words, period)


def ordinary_tokens(tokenizer: Any, vocabulary: int) -> np.ndarray:
    """All tokens of a model except special ones."""
    special = set(tokenizer.get_added_tokens_decoder())
    return np.array([token for token in range(min(vocabulary, tokenizer.get_vocab_size())) if token not in special])


def continue_bigrams(tokens: np.ndarray) -> np.ndarray:
    """``[B,T-1]``: whether a token and its successor already occurred next to each other in ``tokens [B,T]``."""
    repeats = np.zeros((tokens.shape[0], tokens.shape[1] - 1), bool)
    for row, sequence in enumerate(tokens.tolist()):
        seen = set()
        for at, pair in enumerate(zip(sequence, sequence[1:], strict=False)):
            repeats[row, at] = pair in seen
            seen.add(pair)
    return repeats
