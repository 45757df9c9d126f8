"""A run's heads for the explorer of the page: their weights on each example, step by step, and their scores.

Axes as in ``jattn_experiments.runs.findings``.
"""

from collections.abc import Sequence
from math import isqrt

import numpy as np

from jattn.reports._html_page import Head, Numbers, View
from jattn.reports._pack_weights import Frame
from jattn_experiments.report.plot_data import BLOCKS, WHEN, first_look, head_codes, head_titles, pooled
from jattn_experiments.runs.findings import Findings


def heads(findings: Findings) -> list[Head]:
    """The names of the heads, by layer."""
    layers, count = findings.ablated.shape[1:3]
    titles = [title.partition(" · ")[0] for title in head_titles(findings)]
    places = [layer for layer in range(layers) for _ in range(count)]
    return [Head(*entry) for entry in zip(head_codes(findings), titles, places, strict=True)]


def numbers(findings: Findings) -> list[Numbers]:
    """The scores of the first seed's heads, one set a look at the heads."""
    roles = [title.partition(" · ")[2] for title in head_titles(findings)]
    every = [
        [values[0, look].ravel() for values in findings.scores.values()] for look in range(len(findings.look_steps))
    ]
    return [Numbers(np.array(one).reshape(len(one), len(roles)), roles) for one in every]


def views(findings: Findings, room: int) -> tuple[list[View], str]:
    """The weights in about ``room`` bytes before they are compressed, and a note on how they were reduced."""
    steps, examples, layers, heads, size = findings.example_weights.shape[:5]
    side = fitting(min(steps, 2) * examples + 2, layers * heads, size, room)
    kept = kept_steps(steps, examples, room // (2 * layers * heads * side**2) - 2)
    mean, names = pooled(findings.mean_weights, side)
    first = first_look(findings)
    found = []
    for example, keep in enumerate(kept):
        weights, _ = pooled(findings.example_weights[keep, example], side)
        labels, texts = _labels([str(token) for token in findings.tokens[example]], names)
        frames = _frames(findings, weights, findings.example_steps[keep].tolist(), first)
        found.append(View(f"example {example + 1}", labels, labels, frames, texts))
    ends = findings.look_steps[[0, -1]].tolist()
    found.append(View("mean over a batch", names, names, _frames(findings, mean, ends, WHEN[0]), names))
    return found, _fitted_note(kept, steps, size, len(names))


def _frames(findings: Findings, weights: np.ndarray, steps: Sequence[int], first: str) -> list[Frame]:
    """A frame a step of ``weights [X,L,N,T,T]``, with the scores of the nearest look."""
    nearest = [int(abs(findings.look_steps - step).argmin()) for step in steps]
    titles = [f"0 ({first})" if step == 0 and i == 0 else str(step) for i, step in enumerate(steps)]
    flat = weights.reshape(len(steps), -1, *weights.shape[-2:])
    entries = zip(titles, flat, steps, nearest, strict=True)
    return [Frame(title, own, step=step, numbers=look) for title, own, step, look in entries]


def _labels(tokens: list[str], names: list[str]) -> tuple[list[str], list[str]]:
    """Labels for the edge of the picture and the read-out: tokens, or names of blocks and their tokens."""
    if len(names) == len(tokens):
        return tokens, [f"{name}: {token}" for name, token in zip(names, tokens, strict=True)]
    block = -(-len(tokens) // len(names))
    parts = [" ".join(tokens[i * block : (i + 1) * block]) for i in range(len(names))]
    return names, [_cropped(f"{name}: {part}") for name, part in zip(names, parts, strict=True)]


def fitting(frames: int, heads: int, size: int, room: int) -> int:
    """The side of the pictures, in blocks, that makes all frames fit into ``room`` bytes, at two a weight."""
    return max(min(size, BLOCKS, isqrt(max(room, 0) // (2 * frames * heads))), 1)


def kept_steps(steps: int, examples: int, room: int) -> list[list[int]]:
    """Which steps of each example to keep, at most ``room`` in total: all, or evenly spread.

    The first example gets all but two for each other example. The first and last steps are always kept.
    """
    others = examples - 1
    first = min(max(room - 2 * others, 2), steps)
    rest = min(max((room - first) // max(others, 1), 2), steps)
    return [sorted({round(i) for i in np.linspace(0, steps - 1, count)}) for count in (first, *[rest] * others)]


def _fitted_note(kept: list[list[int]], steps: int, size: int, drawn: int) -> str:
    notes = []
    if len(kept[-1]) < steps:
        others = f", every other example {len(kept[-1])}" if len(kept) > 1 else ""
        notes.append(f"To keep this page small, example 1 has {len(kept[0])} of {steps} steps{others}.")
    if drawn < size:
        notes.append(
            f"The {size} tokens are drawn in blocks of {-(-size // drawn)}: queries of a block are averaged, its keys "
            "summed, so that a row still sums to 1."
        )
    return " ".join(notes)


def _cropped(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
