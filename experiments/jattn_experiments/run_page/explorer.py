"""The heads of a run for the page's explorer: their weights on each example, step by step, and their scores.

Axes as in ``jattn_experiments.runs.findings``.
"""

import dataclasses
from collections.abc import Sequence
from math import isqrt

import numpy as np

from jattn.reports._html_page import Head, Numbers, View
from jattn.reports._pack_weights import Frame
from jattn_experiments.run_page.plot_data import BLOCKS, WHEN, first_look, head_codes, head_places, head_roles, pooled
from jattn_experiments.runs.findings import Findings, plain


@dataclasses.dataclass(frozen=True)
class Explorer:
    """What the explorer shows: a view for each example, and one for the mean over a batch.

    steps: of the examples' weights in the run. tokens: of an example. levels: of the weights, if they are rounded.
    """

    heads: list[Head]
    columns: list[str]
    numbers: list[Numbers]
    views: list[View]
    steps: int
    tokens: int
    levels: int | None = None

    @property
    def last_step(self) -> int:
        """The last training step."""
        return self.views[-1].frames[-1].step or 0

    def note(self) -> str:
        """A note that says how the run's weights were reduced."""
        notes, (*examples, mean) = [], self.views
        drawn, first, other = len(mean.keys), len(examples[0].frames), len(examples[-1].frames)
        if other < self.steps:
            others = f", and every other example has {other}" if len(examples) > 1 else ""
            notes.append(f"To keep this page small, example 1 has {first} of {self.steps} steps{others}.")
        if drawn < self.tokens:
            notes.append(
                f"The {self.tokens} tokens are drawn in blocks of {-(-self.tokens // drawn)}. Queries of a block are "
                "averaged and keys are summed, so that each row still sums to 1."
            )
        if self.levels:
            notes.append(f"Weights are rounded to 1/{self.levels} of the largest.")
        return " ".join(notes)

    def thinned(self, weights: int) -> "Explorer":
        """A copy with fewer steps, about ``weights`` weights in all. Each view keeps its first and last step."""
        *examples, mean = self.views
        steps = [len(view.frames) for view in examples]
        kept = kept_steps(steps, weights // np.size(mean.frames[0].weights) - 2)
        frames = ([view.frames[at] for at in indices] for view, indices in zip(examples, kept, strict=True))
        views = [dataclasses.replace(view, frames=some) for view, some in zip(examples, frames, strict=True)]
        return dataclasses.replace(self, views=[*views, mean])


def explorer(findings: Findings, room: int) -> Explorer:
    """The explorer of a run, with weights in about ``room`` bytes before they are compressed."""
    heads = [
        Head(code, f"layer {layer} head {head}", layer)
        for code, (layer, head) in zip(head_codes(findings), head_places(findings), strict=True)
    ]
    columns = [plain(name) for name in findings.scores]
    steps, _, _, _, tokens = findings.example_weights.shape[:5]
    return Explorer(heads, columns, numbers(findings), views(findings, room), steps, tokens)


def numbers(findings: Findings) -> list[Numbers]:
    """The scores of the first seed's heads, one set for each look at the heads."""
    roles = head_roles(findings)
    looks = range(len(findings.look_steps))
    scores = [[values[0, look].ravel() for values in findings.scores.values()] for look in looks]
    return [Numbers(np.array(values).reshape(len(values), len(roles)), roles) for values in scores]


def views(findings: Findings, room: int) -> list[View]:
    """The weights on each example, and their mean over a batch."""
    steps, examples, layers, heads, size = findings.example_weights.shape[:5]
    side = fitting(min(steps, 2) * examples + 2, layers * heads, size, room)
    kept = kept_steps([steps] * examples, room // (2 * layers * heads * side**2) - 2)
    mean, names = pooled(findings.mean_weights, side)
    first = first_look(findings)
    shown = []
    for example, indices in enumerate(kept):
        weights, _ = pooled(findings.example_weights[indices, example], side)
        labels, texts = _labels([str(token) for token in findings.tokens[example]], names)
        frames = _frames(findings, weights, findings.example_steps[indices].tolist(), first)
        shown.append(View(f"example {example + 1}", labels, labels, frames, texts))
    ends = findings.look_steps[[0, -1]].tolist()
    return [*shown, View("mean over a batch", names, names, _frames(findings, mean, ends, WHEN[0]), names)]


def _frames(findings: Findings, weights: np.ndarray, steps: Sequence[int], first: str) -> list[Frame]:
    """One frame for each step of ``weights [X,L,N,T,T]``, with the scores of the nearest look."""
    nearest = [int(abs(findings.look_steps - step).argmin()) for step in steps]
    titles = [f"0 ({first})" if step == 0 and i == 0 else str(step) for i, step in enumerate(steps)]
    heads = weights.reshape(len(steps), -1, *weights.shape[-2:])
    entries = zip(titles, heads, steps, nearest, strict=True)
    return [Frame(title, frame, step=step, numbers=look) for title, frame, step, look in entries]


def _labels(tokens: list[str], names: list[str]) -> tuple[list[str], list[str]]:
    """Labels for the picture's edges and the read-out: tokens, or names of blocks with their tokens."""
    if len(names) == len(tokens):
        return tokens, [f"{name}: {token}" for name, token in zip(names, tokens, strict=True)]
    block = -(-len(tokens) // len(names))
    parts = [" ".join(tokens[i * block : (i + 1) * block]) for i in range(len(names))]
    return names, [_cropped(f"{name}: {part}") for name, part in zip(names, parts, strict=True)]


def fitting(frames: int, heads: int, size: int, room: int) -> int:
    """The side of the pictures in blocks so that all frames fit into ``room`` bytes, at two bytes per weight."""
    return max(min(size, BLOCKS, isqrt(max(room, 0) // (2 * frames * heads))), 1)


def kept_steps(steps: Sequence[int], room: int) -> list[list[int]]:
    """Which of each example's ``steps`` to keep, at most ``room`` in total: all, or evenly spread.

    The first example gets all but two steps for each other example. The first and last steps are always kept.
    """
    others = len(steps) - 1
    first = min(max(room - 2 * others, 2), steps[0])
    rest = max((room - first) // max(others, 1), 2)
    counts = (first, *(min(rest, count) for count in steps[1:]))
    return [
        sorted({round(i) for i in np.linspace(0, count - 1, kept)}) for count, kept in zip(steps, counts, strict=True)
    ]


def _cropped(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
