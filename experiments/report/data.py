"""The numbers that the page's scripts show: the heads' weights and scores as JSON, sized to fit in a page.

Axes as in ``experiments.runs.findings``.
"""

import base64
from math import isqrt
from typing import Any

import numpy as np

from experiments.report.plot_data import BLOCKS, WHEN, first_look, head_codes, head_titles, pooled
from experiments.runs.findings import Findings, plain


def explorer(findings: Findings) -> dict[str, Any]:
    """Everything but the weights: the first seed's heads and their scores."""
    titles = [title.partition(" · ")[::2] for title in head_titles(findings)]
    # One row per look, score and head, of the first seed.
    scores = [[v[0, look].ravel() for v in findings.scores.values()] for look in range(len(findings.look_steps))]
    return {
        "layers": findings.ablated.shape[1],
        "heads": [{"code": c, "title": t, "role": r} for c, (t, r) in zip(head_codes(findings), titles, strict=True)],
        "scores": {
            "names": [plain(name) for name in findings.scores],
            "steps": findings.look_steps.tolist(),
            "values": _numbers(scores),
        },
    }


def weights(findings: Findings, room: int) -> tuple[dict[str, Any], str]:
    """The attention weights in at most ``room`` bytes, and a note on how they were reduced."""
    steps, examples, layers, heads, size = findings.example_weights.shape[:5]
    side, width = fitting(min(steps, 2) * examples + 2, layers * heads, size, room)
    kept = kept_steps(steps, examples, room // (layers * heads * side**2 * width) - 2)
    mean, names = pooled(findings.mean_weights, side)
    found = [pooled(findings.example_weights[keep, example], side)[0] for example, keep in enumerate(kept)]
    top = float(max(array.max() for array in (*found, mean))) or 1.0
    views = [
        {
            "name": f"example {example + 1}",
            "steps": findings.example_steps[keep].tolist(),
            "first": first_look(findings),
        }
        | _labels([str(token) for token in findings.tokens[example]], names)
        | {"weights": packed(found[example], top, width)}
        for example, keep in enumerate(kept)
    ]
    ends = findings.look_steps[[0, -1]].tolist()
    average = {"name": "mean over a batch", "steps": ends, "first": WHEN[0], "labels": names, "texts": names}
    views.append(average | {"weights": packed(mean, top, width)})
    return {"top": top, "width": width, "views": views}, _fitted_note(kept, steps, size, len(names), width)


def _labels(tokens: list[str], names: list[str]) -> dict[str, list[str]]:
    """Labels for the edge of the picture and the read-out: tokens, or names of blocks and their tokens."""
    if len(names) == len(tokens):
        return {"labels": tokens, "texts": [f"{name}: {token}" for name, token in zip(names, tokens, strict=True)]}
    block = -(-len(tokens) // len(names))
    parts = [" ".join(tokens[i * block : (i + 1) * block]) for i in range(len(names))]
    return {"labels": names, "texts": [_cropped(f"{name}: {part}") for name, part in zip(names, parts, strict=True)]}


def fitting(frames: int, heads: int, size: int, room: int) -> tuple[int, int]:
    """The side of the pictures, in blocks, and the bytes per weight that make all frames fit into ``room`` bytes.

    Two bytes if they fit, else one; if that is still too much, larger blocks.
    """
    side = min(size, BLOCKS)
    width = 2 if frames * heads * side**2 * 2 <= room else 1
    return max(min(side, isqrt(max(room, 0) // (frames * heads * width))), 1), width


def kept_steps(steps: int, examples: int, room: int) -> list[list[int]]:
    """Which steps of each example to keep, at most ``room`` in total: all, or evenly spread.

    The first example gets all but two for each other example. The first and last steps are always kept.
    """
    others = examples - 1
    first = min(max(room - 2 * others, 2), steps)
    rest = min(max((room - first) // max(others, 1), 2), steps)
    return [sorted({round(i) for i in np.linspace(0, steps - 1, count)}) for count in (first, *[rest] * others)]


def packed(weights: np.ndarray, top: float, width: int) -> str:
    """Weights as fractions of ``top`` in base64: two bytes each, correct to four decimals or more, or one."""
    return base64.b64encode(np.rint(weights / top * (256**width - 1)).astype(f"<u{width}").tobytes()).decode()


def _fitted_note(kept: list[list[int]], steps: int, size: int, drawn: int, width: int) -> str:
    notes = []
    if len(kept[-1]) < steps:
        others = f", every other example {len(kept[-1])}" if len(kept) > 1 else ""
        notes.append(f"To keep this page small, example 1 has {len(kept[0])} of {steps} steps{others}.")
    if drawn < size:
        notes.append(
            f"The {size} tokens are drawn in blocks of {-(-size // drawn)}: queries of a block are averaged, its keys "
            "summed, so that a row still sums to 1."
        )
    if width == 1:
        notes.append("Weights are rounded to 1/255 of the largest.")
    return " ".join(notes)


def _cropped(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _numbers(array: Any) -> Any:
    """Nested lists with four significant digits; non-finite values become null."""
    if np.ndim(array):
        return [_numbers(row) for row in array]
    return float(f"{array:.4g}") if np.isfinite(array) else None
