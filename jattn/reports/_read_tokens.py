"""The tokens of a report's sequences: labels for people, and numbers by which equal tokens are found."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def read_tokens(
    name: str, tokens: Any, tokenizer: Any, B: int, length: int
) -> tuple[list[list[str]], np.ndarray | None]:
    """The labels of every sequence, and ids ``[B,length]``; positions and None if there are no tokens.

    A list of strings may be shorter than ``length``: what follows is padding and not shown.

    Raises:
        ValueError: tokens of another shape.
    """
    if tokens is None:
        return [[str(i) for i in range(length)]] * B, None
    if isinstance(tokens, np.ndarray) and not np.issubdtype(tokens.dtype, np.number):  # strings
        tokens = tokens.tolist()
    if not hasattr(tokens, "shape"):
        tokens = [one.tolist() if isinstance(one, np.ndarray | jax.Array) else one for one in tokens]
        texts = tokens if tokens and isinstance(tokens[0], list | tuple) else [tokens]
        if all(isinstance(one, str) for text in texts for one in text):
            return _of_strings(name, texts, B, length)
        if len({len(text) for text in texts}) > 1:
            raise ValueError(
                f"{name} must be strings, or ids of one length; got {[len(text) for text in texts]}. Pad the ids, as "
                "the model had them"
            )
    ids = np.asarray(tokens)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.shape != (B, length) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{name} must be strings or ids [B, T] = {[B, length]} of the sequences in heads, got {ids.dtype} of shape "
            f"{list(np.shape(tokens))}"
        )
    if tokenizer is not None and ids.min() < 0:
        raise ValueError(f"{name} has the id {ids.min()}, which no tokenizer knows; pass the ids that the model saw")
    piece = _pieces(tokenizer)
    known = {int(i): piece(int(i)) for i in np.unique(ids)}
    return [[known[int(i)] for i in text] for text in ids], ids


def _of_strings(name: str, texts: Sequence[Sequence[str]], B: int, length: int) -> tuple[list[list[str]], np.ndarray]:
    lengths = [len(text) for text in texts]
    if len(texts) != B or not all(0 < count <= length for count in lengths):
        raise ValueError(
            f"{name} must be {B} list{'s' * (B > 1)} of 1 to {length} strings, a list for each sequence in heads and a "
            f"string for each token; got {len(texts)} of {lengths[0] if len(set(lengths)) == 1 else lengths}"
        )
    numbers: dict[str, int] = {}
    ids = np.full((B, length), -1)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = [numbers.setdefault(token, len(numbers)) for token in text]
    return [[_shown(token) for token in text] for text in texts], ids


def _pieces(tokenizer: Any) -> Callable[[int], str]:
    """The text of one token. Decoding a token alone may drop the space before it, which ``id_to_token`` marks."""
    if tokenizer is None:
        return str
    if not hasattr(tokenizer, "decode"):
        raise TypeError(
            f"tokenizer must have a method decode(ids), as those of tokenizers, got {type(tokenizer).__name__}"
        )
    name = getattr(tokenizer, "id_to_token", None) or getattr(tokenizer, "convert_ids_to_tokens", None)

    def piece(i: int) -> str:
        text = tokenizer.decode([i], skip_special_tokens=False)
        spaced = name is not None and str(name(i)).startswith(("\u0120", "\u2581"))  # of byte-level BPE, SentencePiece
        return _shown(f" {text}" if spaced and not text.startswith(" ") else text)

    return piece


_CONTROL = {i: 0x2400 + i for i in range(0x20)} | {ord("\n"): "↵", ord("\t"): "⇥"}  # Unicode's control pictures


def _shown(text: str) -> str:
    return text.translate(_CONTROL)
