"""Long texts with a needle: a sentence hidden in unrelated text, and a question about it at the end."""

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import numpy as np

from jattn_experiments.config import Config

# Text that every installation of Python and these packages has. Other versions have slightly different text.
KINDS = ("documentation", "source", "licences")
CHOSEN = ("documentation", "source", "documentation")  # sources of the texts on which heads are chosen
JUDGED = ("documentation", "source", "licences", "source")  # sources of the texts on which claims are judged
_LONG = 40  # least characters of a repeated line to drop: the documentation repeats whole sections
_LICENSED = ("jaxlib", "matplotlib", "pillow", "scipy")  # packages with long licences

WORDS = (
    "marmalade walrus lantern thunder pickle saddle violin glacier compass harbor candle pepper feather anchor blanket "
    "tulip hammer mirror ribbon pumpkin falcon cactus trumpet velvet"
).split()
PLACES = (
    "garden castle kitchen library forest river station museum island village market tower bridge valley school temple "
    "hotel theater stadium palace chapel factory airport cellar"
).split()

#: The start of a sentence and the word that follows, which a model of this size knows without any text. All seeds use
#: the same ones.
FACTS = {
    "The capital of France is": "Paris", "The capital of Japan is": "Tokyo", "The capital of Italy is": "Rome",
    "The capital of Germany is": "Berlin", "The capital of Spain is": "Madrid", "The capital of Russia is": "Moscow",
    "The capital of Egypt is": "Cairo", "The capital of England is": "London", "The opposite of hot is": "cold",
    "The opposite of up is": "down", "The opposite of black is": "white", "The first month of the year is": "January",
    "The day after Monday is": "Tuesday", "The sun rises in the": "east", "The sun sets in the": "west",
    "The currency of Japan is the": "yen", "The chemical formula of water is": "H",
    "The largest planet in the solar system is": "Jupiter", "The Earth revolves around the": "Sun",
    "The language spoken in Brazil is": "Portuguese",
}  # fmt: skip


class Needle(NamedTuple):
    """The hidden sentence, the question and the answer, as tokens."""

    sentence: list[int]
    question: list[int]
    answer: list[int]


class Prompt(NamedTuple):
    """A text of ``T`` tokens with its needle, which begins at ``start``. The question and answer come last."""

    tokens: np.ndarray  # [T]
    start: int
    stop: int
    question: int  # where it begins
    needle: np.ndarray  # bool [T]: the answer's tokens within the needle
    answer: int  # tokens of the answer


class Texts(NamedTuple):
    """Tokens of texts, each as long as the longest prompt, and a needle for each text and depth."""

    chosen: list[np.ndarray]
    judged: list[np.ndarray]
    needles: list[list[Needle]]  # the texts for choosing heads, then the judged ones
    facts: list[tuple[list[int], int]]  # tokens, and the one that follows
    first: int


def draw(config: Config, tokenizer: Any) -> Texts:
    """The texts of a config, encoded by the model's tokenizer. No two seeds share a piece of text.

    Raises ``ValueError`` if the tokenizer does not have the first token, there is no text left for this seed, or a
    needle does not fit into the shortest text.
    """
    options, language = config.long, config.language
    first = tokenizer.token_to_id(language.first)
    if first is None:
        raise ValueError(f"language.first: expected a token of the model, got {language.first!r}")
    longest, seed = max(options.lengths), language.seed
    every = [*CHOSEN[: options.chosen], *JUDGED[: options.texts]]
    texts: list[np.ndarray] = []
    for i, kind in enumerate(every):
        before, each = every[:i].count(kind), every.count(kind)
        texts.append(piece(kind, seed * each + before, longest, tokenizer))
    rng = np.random.default_rng(seed)
    needles = []
    for _ in every:
        drawn = (rng.permutation(words)[: options.depths] for words in (PLACES, WORDS))
        numbers = rng.integers(10, 100, options.depths)
        needles.append([_needle(*one, tokenizer) for one in zip(*drawn, numbers, strict=True)])
    for needle in (one for each in needles for one in each):
        prompt(texts[0], needle, 1.0, min(options.lengths), first)
    facts = [(_encode(start, tokenizer), _encode(f" {word}", tokenizer)[0]) for start, word in FACTS.items()]
    return Texts(texts[: options.chosen], texts[options.chosen :], needles, facts, first)


def _needle(place: str, word: str, number: int, tokenizer: Any) -> Needle:
    start, answer = f"\nThe secret password of the {place} is", f" {word}{number}"
    return Needle(*(_encode(text, tokenizer) for text in (f"{start}{answer}.\n", start, answer)))


def _encode(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a piece of text. The token that starts every sequence is added later, to the whole prompt."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def piece(kind: str, number: int, length: int, tokenizer: Any) -> np.ndarray:
    """The piece with this number of ``length`` tokens, from all text of a kind in a fixed order."""
    tokens: list[int] = []
    for text in _texts(kind):
        tokens += _encode(text, tokenizer)
        if len(tokens) >= (number + 1) * length:
            return np.array(tokens[number * length : (number + 1) * length])
    raise ValueError(
        f"language.seed: expected a smaller one, because the {kind} here has {len(tokens)} tokens, and piece {number} "
        f"of {length} lies past its end"
    )


def _texts(kind: str) -> Iterator[str]:
    match kind:
        case "documentation":
            seen: set[str] = set()
            for name in sorted(topics.topics):
                lines = topics.topics[name].splitlines(keepends=True)
                yield "".join(line for line in lines if line not in seen)
                seen |= {line for line in lines if len(line) > _LONG}
        case "source":
            files = (file for file in sorted(Path(os.__file__).parent.glob("*.py")) if file.stat().st_size > 30_000)
            yield from (file.read_text(encoding="utf-8") for file in files)
        case "licences":
            for package in _LICENSED:
                for file in importlib.metadata.files(package) or ():
                    if file.name.startswith("LICENSE") and file.suffix in ("", ".txt"):
                        yield file.read_text(encoding="utf-8")


def depths_of(count: int) -> np.ndarray:
    """``count`` depths from 0 to 1; a single one is the middle."""
    return np.linspace(0, 1, count) if count > 1 else np.array([0.5])


def prompt(text: np.ndarray, needle: Needle, depth: float, length: int, first: int) -> Prompt:
    """``text`` cut to ``length`` tokens in all, with ``needle`` at ``depth``, from 0 (its start) to 1 (its end).

    Raises ``ValueError`` if the needle, its question and answer do not fit.
    """
    sentence, question, answer = needle
    room = length - 1 - sum(map(len, needle))
    if room < 1:
        raise ValueError(
            f"long.lengths: expected more than {length - room} tokens (a needle with its question and answer), "
            f"got {length}"
        )
    cut = round(depth * room)
    parts: Sequence[Sequence[int]] = [first], text[:cut].tolist(), sentence, text[cut:room].tolist(), question, answer
    tokens = np.concatenate([np.array(part, np.int32) for part in parts])
    start, stop = 1 + cut, 1 + cut + len(sentence)
    inside = (np.arange(length) >= start) & (np.arange(length) < stop) & np.isin(tokens, answer)
    return Prompt(tokens, start, stop, length - len(question) - len(answer), inside, len(answer))
