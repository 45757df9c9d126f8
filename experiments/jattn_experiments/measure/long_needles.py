"""Needles in long texts: whether a model finds them, with all heads, with heads off, or with a place hidden."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jattn import KVCache
from jattn_experiments.config import Config
from jattn_experiments.measure import long_texts
from jattn_experiments.measure.head_groups import Heads, among, one_off
from jattn_experiments.measure.kept_parts import KeptParts, Part
from jattn_experiments.measure.long_reader import Reader
from jattn_experiments.measure.long_texts import Prompt, Texts
from jattn_experiments.measure.saved_model import Model


class Study(KeptParts):
    """A model, the texts of a config, and the finished parts."""

    def __init__(self, config: Config, model: Model, texts: Texts, folder: Path, tell: Callable[..., None]):
        super().__init__(folder, tell)
        self.config, self.options, self.texts = config, config.long, texts
        self.depths = long_texts.depths_of(self.options.depths)
        self.use(model)
        needles = (np.array(part) for each in texts.needles for one in each for part in one)
        self.check_texts([*texts.chosen, *texts.judged, *needles])

    def use(self, model: Model) -> None:
        """Switches to this model for all further measurements."""
        self.model, self._reader = model, Reader(model, self.options.ablated)

    def parts(self, name: str, numbers: Sequence[int], measure: Callable[..., Part], *arguments: Any) -> list[Part]:
        """The parts ``measure(study, number, *arguments)``, one for each number."""
        return [self.part(f"{name} {number}", measure, self, number, *arguments) for number in numbers]

    def reader(self, length: int) -> Reader:
        """The reader for prompts of this length. Only the last length's compiled functions are kept."""
        if self._reader.length != length:
            self._reader = Reader(self.model, length)
        return self._reader

    def text(self, number: int) -> np.ndarray:
        """The tokens of a text. The judged texts are numbered after the chosen ones."""
        return [*self.texts.chosen, *self.texts.judged][number]

    def beginning(self, text: np.ndarray, length: int) -> np.ndarray:
        """The first token of every sequence, then the start of a text, ``length`` tokens in all."""
        return np.concatenate([[self.texts.first], text[: length - 1]]).astype(np.int32)

    def prompts(self, number: int, length: int) -> list[Prompt]:
        """The prompts of a text, one for each depth."""
        text, each = self.text(number), zip(self.texts.needles[number], self.depths, strict=True)
        return [long_texts.prompt(text, needle, depth, length, self.texts.first) for needle, depth in each]

    def read(self, number: int, length: int, gates: np.ndarray | None = None) -> Iterator[tuple[Prompt, KVCache]]:
        """Each prompt of a text, and the cache with everything before the question. Shared beginnings are read once."""
        reader, at = self.reader(length), 0
        shared = reader.empty()
        for prompt in self.prompts(number, length):
            if prompt.start < at:
                raise ValueError(f"long.depths: {length} tokens have no room for {self.options.depths} depths")
            shared, at = reader.read(shared, prompt.tokens[at : prompt.start], gates), prompt.start
            yield prompt, reader.read(shared, prompt.tokens[prompt.start : prompt.question], gates)


def needles(study: Study, number: int, length: int, gates: np.ndarray | None = None) -> Part:
    """``found [D]``, ``right [D]`` (the share of the answer's tokens) and ``score [D,L,N]`` at each depth."""
    reader = study.reader(length)
    answers = [reader.answer(cache, prompt, gates) for prompt, cache in study.read(number, length, gates)]
    return {
        "found": np.array([answer.right.all() for answer in answers]),
        "right": np.array([answer.right.mean() for answer in answers]),
        "score": np.stack([answer.score for answer in answers]),
    }


def hidden(study: Study, number: int, groups: list[Heads]) -> Part:
    """The needles found when heads cannot see some places while they read the question and answer.

    ``group [G,D]``: the needle is hidden from each of the groups. ``elsewhere [D]``: as many tokens right before or
    after the needle are hidden from the first group.
    """
    length, of_groups, elsewhere = study.options.ablated, [], []
    for prompt, cache in study.read(number, length):

        def finds(group: Heads, places: np.ndarray, prompt: Prompt = prompt, cache: KVCache = cache) -> np.bool_:
            blind = among(group, study.model.shape)
            return study.reader(length).answer(cache, prompt, blind=blind, hidden=places).right.all()

        at, size = np.arange(length), prompt.stop - prompt.start
        needle = (at >= prompt.start) & (at < prompt.stop)
        of_groups.append([finds(group, needle) for group in groups])
        elsewhere.append(finds(groups[0], np.roll(needle, -size if prompt.start > size else size)))
    return {"group": np.array(of_groups).T, "elsewhere": np.array(elsewhere)}


def each_off(study: Study, number: int) -> Part:
    """``whole [1]`` and ``each [L,N,1]``: the share of the answers' tokens that are right with one head off.

    It uses one needle in a text of the shortest length. The head is off while the question is read and answered.
    """
    length, shape = min(study.options.lengths), study.model.shape
    prompt, cache = list(study.read(number, length))[study.options.depths // 2]

    def accuracy(gates: np.ndarray) -> list[float]:
        return [float(study.reader(length).answer(cache, prompt, gates).right.mean())]

    each = [accuracy(gates) for gates in one_off(shape)]
    return {"whole": np.array(accuracy(np.ones(shape))), "each": np.array(each).reshape(*shape, 1)}
