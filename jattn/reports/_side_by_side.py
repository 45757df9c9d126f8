"""Builds the page of a report and those compared with it: which frames show the same text and which heads match."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.reports._html_page import Numbers, Page, View
from jattn.reports._matching import matched
from jattn.reports._pack_weights import Frame

# A note about the labels from token_labels.
IN_PARTS = "A token that is a part of a character shows the numbers of its bytes: é₁ is the first byte of é."


@dataclasses.dataclass(frozen=True)
class _Side:
    """One report of a page. ``match [h]``: its head for each head of the page, -1 for none; None: its own."""

    report: Any
    number: int
    match: np.ndarray | None

    def text(self, i: int) -> tuple | None:
        """The displayed part of sequence i, if it exists."""
        one = self.report
        return (list(one.queries[i]), list(one.keys[i]), one.cross) if i < len(one.queries) else None

    def name(self, i: int) -> str:
        """The beginning of the text, by which a reader recognises it."""
        tokens = self.report.queries[i][:40]
        spaced = any(token.startswith(" ") for token in tokens)
        text = " ".join(("" if spaced else " ").join(tokens).replace(" ##", "").split())
        text = re.sub(r"(.)₁[₂₃₄]*(?: ?\1[₂₃₄]+)+", r"\1", text)  # split characters
        return f"{i + 1}: {text[:48]}{'…' * (len(text) > 48)}"

    def in_order(self, array: np.ndarray, none: Any) -> np.ndarray:
        """``[h,...]`` of the report as ``[h,...]`` of the page."""
        if self.match is None:
            return array
        there = (self.match >= 0).reshape(-1, *[1] * (array.ndim - 1))
        return np.where(there, array[np.maximum(self.match, 0)], none)

    def frame(self, i: int) -> Frame:
        one, looked = self.report, self.report.looked
        T, S = len(one.queries[i]), len(one.keys[i])
        codes = None
        if self.match is not None:
            codes = [one.heads[m].code if m >= 0 else "–" for m in self.match]
        common: dict[str, Any] = {"title": one.title, "numbers": self.number, "heads": codes}
        if looked.weights is not None:
            return Frame(weights=self.in_order(looked.weights[i], 0)[:, :T, :S], **common)
        top, keys, coarse = (self.in_order(array[i], 0) for array in (looked.top, looked.keys, looked.coarse))
        # Of the blocks seen with padding, only those that the sequence reaches.
        span = (looked.top.shape[2] / coarse.shape[1], looked.length / coarse.shape[2])
        coarse = coarse[:, : math.ceil(T / span[0]), : math.ceil(S / span[1])]
        keys = np.maximum(keys[:, :T], 0)
        return Frame(weights=None, top=top[:, :T], keys=keys, coarse=coarse, span=span, **common)

    def numbers(self, columns: Sequence[str]) -> Numbers:
        one = self.report
        none = np.full(len(one.heads), np.nan)
        values = [self.in_order(np.asarray(one.numbers.get(name, none)), np.nan) for name in columns]
        roles = self.in_order(np.array([role.replace("_", " ") for role in one.roles], object), "").tolist()
        return Numbers(np.array(values).reshape(len(columns), len(roles)), roles)


def page_of(report: Any, others: Sequence[Any]) -> Page:
    """The page. A text shown by several reports is one view, with a frame from each."""
    first = _Side(report, 0, None)
    sides = [first, *(_Side(other, n, matched(report, other)) for n, other in enumerate(others, 1))]
    views = []
    for i in range(len(report.queries)):
        frames = [side.frame(i) for side in sides if side.text(i) == first.text(i)]
        views.append(View(first.name(i), report.queries[i], report.keys[i], frames, cross=report.cross))
    for side in sides[1:]:
        for i in range(len(side.report.queries)):
            if side.text(i) != first.text(i):
                queries, keys, cross = side.report.queries[i], side.report.keys[i], side.report.cross
                name = f"{side.report.title}: {side.name(i)}"
                views.append(View(name, queries, keys, [side.frame(i)], cross=cross))
    columns = list(dict.fromkeys(name for side in sides for name in side.report.numbers))
    notes = ["Means over all queries for which a statistic is defined.", *(side.report.note for side in sides)]
    in_parts = any("₁" in token for view in views for text in (view.queries, view.keys) for token in text)
    return Page(
        report.title,
        report.heads,
        [name.replace("_", " ") for name in columns],
        [side.numbers(columns) for side in sides],
        views,
        note=IN_PARTS if in_parts else "",
        numbers_note=" ".join(dict.fromkeys(note for note in notes if note)),
    )
