"""Reads the tokens of a report's sequences: labels for readers, and ids to find equal tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.interop._tokenizer import token_labels
from jattn.reports._read_heads import as_array


def read_tokens(
    name: str, tokens: Any, tokenizer: Any, B: int, length: int
) -> tuple[list[list[str]], np.ndarray | None]:
    """The labels of every sequence, and ids ``[B,length]``; positions and None if there are no tokens.

    A list of strings may be shorter than ``length``: the rest is padding and not shown.

    Raises:
        ValueError: the tokens have the wrong shape.
    """
    if tokens is None:
        return [[str(i) for i in range(length)]] * B, None
    tokens = as_array(tokens)
    if isinstance(tokens, np.ndarray) and not np.issubdtype(tokens.dtype, np.number):  # strings
        tokens = tokens.tolist()
    if not hasattr(tokens, "shape"):
        tokens = [one.tolist() if hasattr(one, "tolist") else one for one in tokens]
        texts = tokens if tokens and isinstance(tokens[0], list | tuple) else [tokens]
        if all(isinstance(one, str) for text in texts for one in text):
            return token_labels(name, texts, tokenizer), _ids_of_strings(name, texts, B, length)
        if len({len(text) for text in texts}) > 1:
            raise ValueError(
                f"{name} must be strings, or ids of one length; got lengths {[len(text) for text in texts]}. Pad the "
                "ids as in the call of the model"
            )
    ids = np.asarray(tokens)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.shape != (B, length) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{name} must be strings or ids [B, T] = {[B, length]} of the sequences in heads, got {ids.dtype} of shape "
            f"{list(np.shape(tokens))}"
        )
    return token_labels(name, ids.tolist(), tokenizer), ids


def _ids_of_strings(name: str, texts: Sequence[Sequence[str]], B: int, length: int) -> np.ndarray:
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
    return ids
