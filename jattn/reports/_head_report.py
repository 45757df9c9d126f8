"""Writes an offline page that shows what every head of a model does (``report``)."""

import collections
import dataclasses
import errno
import functools
import html
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import ArrayLike

from jattn.heads import Roles
from jattn.reports._head_summaries import Looked, look
from jattn.reports._html_page import Head
from jattn.reports._kept_weights import PAGE_LETTERS
from jattn.reports._read_heads import Layer, as_array, read_layers
from jattn.reports._read_tokens import read_tokens
from jattn.reports._role_labels import label
from jattn.reports._side_by_side import page_of


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """A page of heads. Notebooks display it in a frame isolated from the notebook.

    Created by :func:`~jattn.report`. ``numbers`` holds the statistics and the additional columns, ``{name: [h]}`` with
    h over the heads of all layers; ``roles`` the heads' labels; and ``others`` the reports to compare with. The other
    fields are what the page shows, before packing.

    Example:
        >>> weights = np.tile(np.eye(3)[[0, 0, 1]], (2, 1, 1))  # [N,T,S]: two previous-token heads
        >>> page = jattn.report(weights, ["Le chat noir".split()])
        >>> page.numbers["previous_token"].tolist()
        [1.0, 1.0]
        >>> page.save("heads.html").stat().st_size > 10_000
        True
    """

    title: str
    heads: Sequence[Head]
    queries: Sequence[Sequence[str]]
    keys: Sequence[Sequence[str]]
    cross: bool
    looked: Looked
    numbers: Mapping[str, np.ndarray]
    roles: Sequence[str]
    note: str
    others: Sequence["Report"] = ()

    @functools.cached_property
    def html(self) -> str:
        """The whole file. Warns if it exceeds 6 MB."""
        page = page_of(self, self.others).html()
        if len(page) > PAGE_LETTERS:
            warnings.warn(
                f"the page has {len(page) / 1e6:.1f} MB, more than the 6 MB of a report, because its labels and lists "
                "leave no room for weights; show fewer sequences, or shorter tokens",
                stacklevel=2,
            )
        return page

    def save(self, path: str | Path) -> Path:
        """Writes the file and returns its path. The old file stays until the new one is complete.

        Raises:
            OSError: the folder does not exist, or the disk is full.
        """
        path = Path(path)
        _check_place(path)
        _write(path.resolve(), self.html)
        return path

    def _repr_html_(self) -> str:
        inside = html.escape(self.html, quote=True)
        name = html.escape(self.title, quote=True)
        return (
            f'<iframe title="{name}" sandbox="allow-scripts allow-downloads" style="width:100%;height:900px;border:0" '
            f'srcdoc="{inside}"></iframe>'
        )

    def __repr__(self) -> str:
        beside = "".join(f", compared with {other.title!r}" for other in self.others)
        return f"{type(self).__name__}({self.title!r}, {len(self.heads)} heads, {len(self.queries)} sequences{beside})"


def report(
    heads: Any,
    tokens: Any = None,
    path: str | Path | None = None,
    *,
    key_tokens: Any = None,
    tokenizer: Any = None,
    columns: Mapping[str, ArrayLike] | None = None,
    roles: Roles | None = None,
    null: Report | Sequence[Report] | None = None,
    compare: Report | Sequence[Report] | None = None,
    title: str = "Attention heads",
    **options: Any,
) -> Report:
    """Writes an offline HTML file that shows what every head of a model does: pictures, text, statistics and roles.

    Everything is computed from ``(query, key, lse)`` in pieces. Short sequences keep all weights; long sequences keep a
    coarse picture and each query's largest weights. The file stays under 6 MB and says what it leaves out; if the
    labels alone need more, a warning is issued.

    Args:
        heads: what a model has sown under ``sow_heads`` or ``sow_weights``; a list of layers, from ``heads.collect``
            or ``interop.look``; or ``{name: layer}``. A layer is ``(query, key)``, ``(query, key, lse)``, a dict of
            these and its own options, or weights ``[B,N,T,S]``, such as the ``attentions`` of transformers.
            Shapes are ``query [B,T,N,H]``, ``key [B,S,K,H]``, ``lse [B,T,N]``, all with B or all without.
            Arrays may be tensors from PyTorch and other libraries.
        tokens: the tokens of the queries and, in self-attention, of the keys: ids ``[B,T]`` or ``[T]``, or a list of
            strings for each sequence, which may be shorter than T if padding follows.
        path: the file to write; None writes no file.
        key_tokens: the tokens of the keys, if they come from another text (cross-attention).
        tokenizer: from ``tokenizers`` or ``transformers``; turns ids, or its own strings, into text. A token that is
            part of a character is labelled with the character and the numbers of its bytes, "猫₁₂".
        columns: additional numbers of each head for the table, ``{name: [L,N]}``.
        roles: the result of ``heads.roles``, with labels ``[L,N]``.
        null: reports on heads that cannot have a role, from models with random parameters on the same tokens.
            ``heads.roles`` then labels each head by comparing its statistics with theirs. Five patterns need 99 heads.
        compare: one or more other reports to show next to this one, under their titles. If the models have the same
            number of heads in each layer and the same tokens, each head is shown next to its match within the layer, by
            assignment on statistics and patterns.
        title: the title of the page, and the name of this model in comparisons.
        options: keywords of ``jattn.attention_weights`` that apply to all layers, such as ``is_causal``, ``mask`` and
            ``score_mod``.

    Returns:
        A :class:`~jattn.reports.Report`. Notebooks display it; ``html`` is its text, and ``save(path)`` writes it.

    Raises:
        ValueError: heads, tokens or columns have the wrong form or shape; weights with the given lse sum to more than
            1; two layers have the same name.
        TypeError: an option is unknown.
        OSError: ``path`` is in a folder that does not exist, or cannot be written.

    Example:
        >>> query, key = jax.random.normal(jax.random.key(0), (2, 1, 3, 2, 4))  # [B,T,N,H]
        >>> layers = {"layer 0": (query, key)}  # or what a model has sown
        >>> jattn.report(layers, ["Le chat noir".split()], "heads.html", is_causal=True)
        Report('Attention heads', 2 heads, 1 sequences)
    """
    if path is not None:
        _check_place(Path(path))  # before all the work
    layers = read_layers(heads, options)
    B, _, T, S = layers[0].shape
    cross = key_tokens is not None or T != S
    queries, ids = read_tokens("tokens", tokens, tokenizer, B, T)
    keys = queries if not cross else read_tokens("key_tokens", key_tokens, tokenizer, B, S)[0]
    lengths = [len(text) for text in queries]
    looked = look(layers, None if cross else ids, lengths, not cross)
    numbers = dict(looked.numbers)
    names = _heads(layers)
    counts = [layer.shape[1] for layer in layers]
    labels = [""] * len(names) if roles is None else _flat("roles", roles.label, counts).tolist()
    if nulls := _reports("null", null):
        if roles is not None:
            raise ValueError("pass either roles or null, not both: null computes the roles")
        labels = label(numbers, [one.looked.numbers for one in nulls])
    for name, values in (columns or {}).items():
        if name in numbers:
            raise ValueError(f"columns has {name!r}, which is already a statistic of the page; rename the column")
        numbers[str(name)] = _flat(f"columns[{name!r}]", values, counts).astype(np.float64)
    drawn = len(next(array for array in (looked.weights, looked.top) if array is not None))
    notes = [f"Only the first {drawn} of {B} sequences are drawn; the numbers cover all {B}."] if drawn < B else []
    judged = "Roles are tested against heads that cannot have them (jattn.heads.roles)." if nulls else ""
    others = _reports("compare", compare)
    note = " ".join([*notes, judged]).strip()
    page = Report(title, names, queries[:drawn], keys[:drawn], cross, looked, numbers, labels, note, others)
    if path is not None:
        page.save(path)
    return page


def _check_place(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "path is in a folder that does not exist", str(path.parent))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "path must be a file, but is a folder", str(path))


def _write(path: Path, text: str) -> None:
    """Writes a file alongside, then replaces the old one, which stays unchanged if the disk is full."""
    if path.exists() and not path.is_file():  # a device, which must not be replaced
        path.write_text(text, encoding="utf-8")
        return
    unfinished = path.with_name(f".{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _reports(name: str, argument: Any) -> tuple[Report, ...]:
    several = () if argument is None else (argument,) if isinstance(argument, Report) else argument
    if not (isinstance(several, list | tuple) and all(isinstance(one, Report) for one in several)):
        raise TypeError(
            f"{name} must be a Report, as jattn.report returns, or a list of them; got {type(argument).__name__}"
        )
    return tuple(several)


def _heads(layers: Sequence[Layer]) -> list[Head]:
    heads: list[Head] = []
    for number, layer in enumerate(layers):
        short = f"L{number}" if layer.name == f"layer {number}" else layer.name
        heads += [Head(f"{short}H{n}", f"{layer.name} head {n}", number) for n in range(layer.shape[1])]
    names = collections.Counter(name for head in heads for name in (head.code, head.title))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"heads has two heads with the name {twice[0]!r}; give every layer a different name")
    return heads


def _flat(name: str, values: Any, counts: Sequence[int]) -> np.ndarray:
    """``[L,N]``, or a list with an array for each layer, as ``[h]``."""
    rows = [np.asarray(as_array(row)) for row in values] if np.iterable(values) else []
    if [row.shape for row in rows] != [(count,) for count in counts]:
        shapes = sorted({f"[{count}]" for count in counts})
        raise ValueError(
            f"{name} must have a number for each head, {len(counts)} layers of {' or '.join(shapes)}, got "
            f"{[list(row.shape) for row in rows]}"
        )
    return np.concatenate(rows)
