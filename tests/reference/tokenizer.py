"""GPT-2's tokenizer: it splits by Unicode's categories, and merges bytes by rank. On the fields of a GGUF file."""

import itertools
import re
import unicodedata
from typing import Any


def byte_names() -> list[str]:
    """GPT-2's printable name of each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


BYTES = byte_names()


def encoded(fields: dict[str, Any], text: str) -> list[int]:
    """The ids of a text."""
    ids = {token: i for i, token in enumerate(fields["tokens"])}
    special = [token for token, kind in zip(fields["tokens"], fields["token_type"], strict=True) if kind in (3, 4)]
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(fields["merges"])}
    numbers = []
    for piece in re.split(f"({'|'.join(map(re.escape, special))})", text):
        if piece in special:
            numbers.append(ids[piece])
            continue
        for word in itertools.chain(*map(words, digits_apart(piece) if fields["pre"] == "smollm" else [piece])):
            symbols = [BYTES[byte] for byte in word.encode()]
            while pairs := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]:
                best = min(pairs)[1]
                symbols[best : best + 2] = ["".join(symbols[best : best + 2])]
            numbers += [ids[symbol] for symbol in symbols]
    first, last = ([fields[f"{end}_token_id"]] if fields.get(f"add_{end}_token") else [] for end in ("bos", "eos"))
    return [*first, *numbers, *last]


def digits_apart(text: str) -> list[str]:
    """Each number character alone."""
    parts = []
    for number, run in itertools.groupby(text, lambda x: kind_of(x) == "N"):
        characters = list(run)
        parts += characters if number else ["".join(characters)]
    return parts


def kind_of(character: str) -> str:
    """Letter, number, space or other."""
    category = unicodedata.category(character)
    space = character in "\t\n\x0b\x0c\r\x85" or category in ("Zs", "Zl", "Zp")
    return "S" if space else category[0] if category[0] in "LN" else "O"


def words(text: str) -> list[str]:
    """GPT-2's split: ``'s|'t|'re|'ve|'m|'ll|'d| ?letters| ?numbers| ?others|spaces before the last|spaces``."""
    parts, at = [], 0
    while at < len(text):
        short = next((x for x in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(x, at)), None)
        end = at + len(short or "")
        if short is None:
            start = at + (text[at] == " " and at + 1 < len(text) and kind_of(text[at + 1]) != "S")
            kind = kind_of(text[start])
            end = next((i for i in range(start, len(text)) if kind_of(text[i]) != kind), len(text))
            if kind == "S" and end < len(text) and end - at > 1:
                end -= 1  # the last space goes with what follows
        parts.append(text[at:end])
        at = end
    return parts
