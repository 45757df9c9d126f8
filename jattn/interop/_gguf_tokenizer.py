"""Builds from a GGUF file a ``tokenizers.Tokenizer`` equivalent to llama.cpp's and the model's own tokenizer.

Where these two differ (combining marks under GPT-4o's and Mistral NeMo's splitting), it follows the model's own.

Source: ``src/llama-vocab.cpp`` of llama.cpp, August 2026. llama.cpp has two kinds of vocabulary: byte-level pairs
("gpt2"), which split text before merging, and SentencePiece ("llama"), which merges in order of score.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jattn.interop._gguf import read_vocabulary

_UNKNOWN, _CONTROL, _WHOLE = 2, 3, 4  # types of tokens that text never contains, and of tokens never split

# How ``tokenizer.ggml.pre`` splits text before merging.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words_and(digits: str, letters: str = r"\p{L}") -> str:
    """GPT-4's splitting, with this pattern for digits."""
    others = rf"\s{letters}\p{{N}}"
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^{others}]+[\r\n]*|{_SPACES}"


def _cased_words_and(digits: str, contractions: str) -> str:
    """GPT-4o's splitting: an uppercase letter after a lowercase one begins a new word."""
    small, capital = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}[{capital}]*[{small}]+{contractions}|{before}[{capital}]+[{small}]*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_SPLITS = {
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_words_and(r"\p{N}{1,3}"),),
    "dbrx": (_words_and(r"\p{N}{1,3}"),),
    "smaug-bpe": (_words_and(r"\p{N}{1,3}"),),
    "qwen2": (_words_and(r"\p{N}"),),
    "deepseek-r1-qwen": (_words_and(r"\p{N}"),),
    "qwen35": (_words_and(r"\p{N}", r"\p{L}\p{M}"),),
    "gpt-4o": (_cased_words_and(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),),
    "tekken": (_cased_words_and(r"\p{N}", ""),),
}
_SPLITS |= dict.fromkeys(("llama3", "llama-v3"), _SPLITS["llama-bpe"])
# Vocabularies that look up a word before merging its bytes, and that begin a text unless a field says otherwise.
_LIKE_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "tekken")


def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer of a GGUF file; raises the same errors as ``tokenizer``."""
    fields = read_vocabulary(file)
    kind, split = fields.get("ggml.model"), fields.get("ggml.pre")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and (not isinstance(split, str) or split not in _SPLITS)):
        raise ValueError(
            f"{file} has a tokenizer of kind {kind!r}, split as {split!r}, expected 'llama', or 'gpt2' split as "
            f"{', '.join(map(repr, _SPLITS))}"
        )
    if kind == "gpt2" and fields.get("ggml.add_space_prefix", False):
        raise ValueError(f"{file} has add_space_prefix, which a tokenizer of kind 'gpt2' does not support here")
    try:
        return _byte_level(fields) if kind == "gpt2" else _sentencepiece(fields)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{file} has a damaged vocabulary: {error!r}") from error


def _byte_level(fields: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = fields["ggml.pre"]
    merges = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    model = models.BPE(vocab=_ids(fields), merges=merges, ignore_merges=split in _LIKE_LLAMA_3)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[split]]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return _with_tokens_of_the_file(tokenizer, fields, begins=split in _LIKE_LLAMA_3)


def _sentencepiece(fields: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids, scores = _ids(fields), fields["ggml.scores"]
    tokens = fields["ggml.tokens"]
    # What SentencePiece merges first has the highest score, whatever its two parts.
    by_score = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = [
        (token[:at], token[at:])
        for token in (tokens[i] for i in by_score)
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    unknown = tokens[fields.get("ggml.unknown_token_id", 0)]
    model = models.BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    tokenizer = Tokenizer(model)
    begins = fields.get("ggml.add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if begins else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if begins else steps)
    return _with_tokens_of_the_file(tokenizer, {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, **fields}, begins=True)


def _ids(fields: Mapping[str, Any]) -> dict[str, int]:
    tokens = fields["ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise ValueError(f"of {len(tokens)} tokens, only {len(ids)} differ")
    return ids


def _with_tokens_of_the_file(tokenizer: Any, fields: Mapping[str, Any], begins: bool) -> Any:
    """Adds the tokens matched whole and those around a text; ``begins``: whether a first token is added by default."""
    from tokenizers import AddedToken, processors

    tokens = fields["ggml.tokens"]
    kinds = list(zip(tokens, fields.get("ggml.token_type", [1] * len(tokens)), strict=True))
    # Phi-3's tokens include the space after them, which only the model's name reveals.
    is_phi_3 = any(name in str(fields.get("general.name", "")).lower() for name in ("phi-3", "phi3"))

    def whole(token: str, special: bool) -> Any:
        strips = is_phi_3 and token not in ("<unk>", "<s>", "<|endoftext|>")
        return AddedToken(token, special=special, normalized=False, rstrip=strips)

    tokenizer.add_special_tokens([whole(token, True) for token, kind in kinds if kind in (_UNKNOWN, _CONTROL)])
    tokenizer.add_tokens([whole(token, False) for token, kind in kinds if kind == _WHOLE])
    defaults = {"bos": begins, "eos": False}
    ends = {
        end: _token_at(end, fields) for end, default in defaults.items() if fields.get(f"ggml.add_{end}_token", default)
    }
    if ends:
        one, other = ([end for end in ("bos", text, "eos") if end == text or end in ends] for text in ("$A", "$B"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=one,
            pair=one + other,
            special_tokens=[{"id": end, "ids": [i], "tokens": [tokens[i]]} for end, i in ends.items()],
        )
    return tokenizer


def _token_at(end: str, fields: Mapping[str, Any]) -> int:
    """The id of the token at this end of a text."""
    name = f"ggml.{end}_token_id"
    if name not in fields:
        raise ValueError(f"add_{end}_token is true, but there is no {end}_token_id")
    if not 0 <= fields[name] < len(fields["ggml.tokens"]):
        raise ValueError(f"{end}_token_id is {fields[name]}, of {len(fields['ggml.tokens'])} tokens")
    return fields[name]
