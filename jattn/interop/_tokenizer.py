"""Loads tokenizers of published checkpoints, formats conversations, and labels tokens in pictures."""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn.interop._gguf_tokenizer import gguf_tokenizer


def tokenizer(source: str | Path) -> Any:
    """Loads the ``tokenizers.Tokenizer`` in a folder (``tokenizer.json``) or a GGUF file.

    Like llama.cpp, the tokenizer of a GGUF file adds a first and a last token to a text if the file says so
    (``add_bos_token``, ``add_eos_token``), and drops bytes that have no token in the vocabulary.
    ``encode(text, add_special_tokens=False)`` omits the added tokens.

    The names of control tokens in a text, such as ``<|im_end|>``, become these tokens. For untrusted text, which must
    not end a turn, set ``tokenizer.encode_special_tokens = True``: the names are then split like other text.

    Args:
        source: the folder or ``*.gguf`` file, as for ``jattn.interop.load``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or its kind of vocabulary or splitting is unknown.
        ImportError: tokenizers, or gguf for a GGUF file, is not installed.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"what": 0, "heads": 1, "see": 2}, unk_token="what"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> words.save("tokenizer.json")  # published models come with one
        >>> jattn.interop.tokenizer(".").encode("see what heads see").ids
        [2, 0, 1, 2]
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as missing:
        raise ImportError("a tokenizer needs the package tokenizers: pip install 'jattn[hf]'") from missing
    source = Path(source)
    if source.suffix.lower() == ".gguf":
        return gguf_tokenizer(source)
    file = source / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer.json in {str(source)!r}; expected the folder of a saved model")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{file} is damaged or not a tokenizer: {error}") from error


def chatml(messages: Sequence[Any]) -> str:
    """Formats a conversation as ChatML, up to the beginning of the assistant's answer, for SmolLM2 and Qwen2.

    Args:
        messages: a list of ``{"role": role, "content": text}``, as in transformers, or of pairs ``(role, text)``. Roles
            are ``"system"``, ``"user"`` and ``"assistant"``. Models are trained with a system message first.

    Raises:
        ValueError: a message has neither form.

    Example:
        >>> text = jattn.interop.chatml([("system", "You are a helpful assistant."), ("user", "Hello!")])
        >>> print(text, end="")  # a model continues it with its answer
        <|im_start|>system
        You are a helpful assistant.<|im_end|>
        <|im_start|>user
        Hello!<|im_end|>
        <|im_start|>assistant
    """
    if isinstance(messages, str | Mapping):
        raise ValueError(f"messages must be a list of messages, got one {type(messages).__name__}: {messages!r}")
    turns = "".join("<|im_start|>{}\n{}<|im_end|>\n".format(*_role_and_text(message)) for message in messages)
    return f"{turns}<|im_start|>assistant\n"


def _role_and_text(message: Any) -> Sequence[str]:
    parts = message
    if isinstance(message, Mapping) and message.keys() == {"role", "content"}:
        parts = message["role"], message["content"]
    if not isinstance(parts, tuple | list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        raise ValueError(
            f"a message must be {{'role': role, 'content': text}} or (role, text), both strings, got {message!r}"
        )
    return parts


_PRINTABLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
# GPT-2's letter for each byte, used in the names of byte-level tokens: " cat" is "Ġcat".
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)}
_CONTROL_PICTURES = {i: 0x2400 + i for i in range(0x20)} | {ord("\n"): "↵", ord("\t"): "⇥"}


def token_labels(argument: str, tokens: Sequence[Any], tokenizer: Any) -> list[list[str]]:
    """The label of each token in a picture: its text.

    Tokens of a byte-level tokenizer may be parts of a character. Such a token is labelled with the whole character and
    the numbers of the token's bytes, such as "猫₁₂" and "猫₃" for two tokens. Bytes that form no character in this text
    get labels like "<0xE7>".

    Args:
        argument: the name of ``tokens`` in error messages.
        tokens: for each sequence, ids or the tokenizer's own strings. Other strings stay as they are.
        tokenizer: from ``tokenizers`` or ``transformers``; None labels ids by their numbers.

    Raises:
        TypeError: the tokenizer has no ``decode``.
        ValueError: an id is negative.
    """
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise TypeError(
            f"tokenizer must have a method decode(ids), like those of tokenizers, got {type(tokenizer).__name__}"
        )
    name_of = getattr(tokenizer, "id_to_token", None) or getattr(tokenizer, "convert_ids_to_tokens", None)
    id_of = getattr(tokenizer, "token_to_id", None) or getattr(tokenizer, "convert_tokens_to_ids", None)

    @functools.cache
    def content(token: int | str) -> bytes:
        if tokenizer is None:
            return str(token).encode()
        if isinstance(token, int):
            i = token
        else:
            i = id_of(token) if id_of and name_of else None
            # transformers has an id for unknown strings.
            if i is None or name_of is None or name_of(i) != token:
                return token.encode()
        if i < 0:
            raise ValueError(f"{argument} has the id {i}, which no tokenizer knows; pass the ids that the model saw")
        return _content(i, tokenizer.decode([i], skip_special_tokens=False), name_of and name_of(i))

    rows = [[content(token if isinstance(token, str) else int(token)) for token in row] for row in tokens]
    return [[label.translate(_CONTROL_PICTURES) for label in _with_parts(row)] for row in rows]


def _content(i: int, text: str, name: str | None) -> bytes:
    """The bytes of a token, from its text alone and its name, which keeps what decoding it alone loses."""
    if "\ufffd" in text and "\ufffd" not in (name or ""):  # not whole characters
        if name and (byte := re.fullmatch("<0x([0-9A-F]{2})>", name)):  # SentencePiece's
            return bytes.fromhex(byte[1])
        if name and all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        return re.sub("\ufffd+", f"<token {i}>", text).encode()
    spaced = name is not None and name.startswith(("\u0120", "\u2581"))  # byte-level pairs, SentencePiece
    return (f" {text}" if spaced and not text.startswith(" ") else text).encode()


def _with_parts(tokens: Sequence[bytes]) -> list[str]:
    """Consecutive tokens as text; a character spread over several tokens appears in each of them."""
    try:
        return [token.decode() for token in tokens]
    except UnicodeDecodeError:
        pass
    labels = [""] * len(tokens)
    of_bytes = [i for i, token in enumerate(tokens) for _ in token]
    end = 0
    for character in b"".join(tokens).decode(errors="surrogateescape"):
        encoded = character.encode(errors="surrogateescape")
        start, end = end, end + len(encoded)
        numbered = itertools.groupby(range(start, end), key=of_bytes.__getitem__)
        parts = {i: "".join("₁₂₃₄"[byte - start] for byte in group) for i, group in numbered}
        for i, numbers in parts.items():
            if "\udc80" <= character <= "\udcff":
                labels[i] += f"<0x{encoded.hex().upper()}>"
            else:
                labels[i] += character + (numbers if len(parts) > 1 else "")
    return labels
