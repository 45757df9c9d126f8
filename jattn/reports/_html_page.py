"""Assembles the page of a report: one offline HTML file that fetches nothing."""

import dataclasses
import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jattn.reports._kept_weights import FRAME_LETTERS, PAGE_LETTERS
from jattn.reports._pack_weights import Frame, pack

HERE = Path(__file__).parent
SCRIPTS = ("data.js", "picture.js", "explorer.js", "reading.js")  # concatenated in this order


@dataclasses.dataclass(frozen=True)
class Head:
    """A head's names: "L0H1", "layer 0 head 1", and the number of its layer."""

    code: str
    title: str
    layer: int


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The heads' numbers ``[columns,h]``, NaN for missing ones, and their roles, "" for none."""

    values: np.ndarray
    roles: Sequence[str]


@dataclasses.dataclass(frozen=True)
class View:
    """One sequence: the labels of its queries and keys, and the frames that show it.

    texts: what the read-out says about each key, and each query if they are the same; by default its place and label.
    cross: whether queries and keys come from different texts.
    """

    name: str
    queries: Sequence[str]
    keys: Sequence[str]
    frames: Sequence[Frame]
    texts: Sequence[str] | None = None
    cross: bool = False


@dataclasses.dataclass(frozen=True)
class Page:
    """What a page shows. ``before`` and ``after``: HTML around the explorer; ``style`` and ``script`` are added."""

    title: str
    heads: Sequence[Head]
    columns: Sequence[str]
    numbers: Sequence[Numbers]
    views: Sequence[View]
    note: str = ""
    numbers_note: str = ""
    before: str = ""
    after: str = ""
    style: str = ""
    script: str = ""

    def html(self, most: int = PAGE_LETTERS) -> str:
        """The file. The weights get whatever the rest of the page leaves of ``most`` characters."""
        slots = {
            "title": html.escape(self.title),
            "style": _read("style.css") + self.style,
            "before": self.before,
            "note": html.escape(self.note),
            "numbers_note": html.escape(self.numbers_note),
            "after": self.after,
            "script": "".join(map(_read, SCRIPTS)) + self.script,
        }
        data: dict[str, Any] = {
            "heads": [dataclasses.asdict(head) for head in self.heads],
            "columns": list(self.columns),
            "numbers": [{"values": _rounded(one.values), "roles": list(one.roles)} for one in self.numbers],
            "views": [
                {"name": view.name, "queries": list(view.queries), "keys": list(view.keys), "cross": view.cross}
                | ({} if view.texts is None else {"texts": list(view.texts)})
                for view in self.views
            ],
        }
        frames = [frame for view in self.views for frame in view.frames]
        room = most - len(as_json(data)) - sum(map(len, slots.values())) - FRAME_LETTERS * len(frames)
        entries, blobs, data["top"] = pack(frames, room)
        rest = iter(entries)
        for entry, view in zip(data["views"], self.views, strict=True):
            entry["frames"] = [next(rest) for _ in view.frames]
        elements = (f'<script id="blob-{i}" type="text/plain">{blob}</script>' for i, blob in enumerate(blobs))
        slots |= {"data": as_json(data), "blobs": "\n".join(elements)}
        # One pass: values may contain braces.
        return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], _read("page.html"))


def as_json(data: Any) -> str:
    """JSON without "<", with which a token could end the script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _rounded(array: Any) -> Any:
    """Nested lists with four significant digits; non-finite values become null."""
    if np.ndim(array):
        return [_rounded(row) for row in array]
    return float(f"{array:.4g}") if math.isfinite(array) else None
