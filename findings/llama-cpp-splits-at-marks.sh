#!/bin/sh
# One expects: llama.cpp splits text for GPT-4o's tokenizer as that tokenizer does, or differs in rare symbols alone.
# What happens: it splits a word before every combining mark, so every word of Hindi, Bengali or Thai with vowel signs has
#   other tokens than the model was trained on. (Its form of the expression knows letters and no marks; Mistral's "tekken" has
#   the same.) Other scripts agree.
# Version: cyllama 0.2.18 (llama.cpp), tokenizers 0.23.1. Source: src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_GPT4O, which quotes
#   the original expression above its own.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q cyllama==0.2.18 gguf==0.19.0 numpy==2.4.6 tokenizers==0.23.1
"$folder/venv/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys
from pathlib import Path

import numpy as np
from cyllama.llama import llama_cpp
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

TEXTS = {"Hindi": "नमस्ते दुनिया", "English": "Hello worlds", "Russian": "Привет миры", "Japanese": "猫のテキスト"}
small, large = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
before, after = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
words = rf"{before}[{large}]*[{small}]+{after}|{before}[{large}]+[{small}]*{after}"
expression = rf"{words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
pieces = dict.fromkeys(["<bos>", "<eos>", *letters])
merges = []
for text in TEXTS.values():  # whatever stands together may be joined, up to four bytes
    as_bytes = "".join(piece for piece, _ in to_letters.pre_tokenize_str(text))
    for size in (2, 3, 4):
        for at in range(len(as_bytes) - size + 1):
            piece = as_bytes[at : at + size]
            if piece not in pieces:
                pieces[piece] = None
                merges.append((piece[:-1], piece[-1]))
tokens = list(pieces)

theirs = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
split = pre_tokenizers.Split(Regex(expression), "isolated")
theirs.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])

file = str(Path(sys.argv[1]) / "tokens.gguf")
writer = GGUFWriter(file, "llama")
for name, value in {
    "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32, "head_count": 2,
    "head_count_kv": 2, "rope_dimension_count": 16, "layer_norm_rms_eps": 1e-5, "vocab_size": len(tokens),
    "tokenizer_model": "gpt2", "tokenizer_pre": "gpt-4o", "token_list": tokens, "token_types": [3, 3] + [1] * (len(tokens) - 2),
    "token_merges": [" ".join(merge) for merge in merges], "bos_token_id": 0, "eos_token_id": 1,
}.items():
    getattr(writer, f"add_{name}")(value)
writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
    writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), np.float32))
for name in ("attn_norm", "ffn_norm"):
    writer.add_tensor(f"blk.0.{name}.weight", np.zeros(32, np.float32))
for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
    getattr(writer, step)()
model = llama_cpp.LlamaModel(file, llama_cpp.LlamaModelParams())  # the vocabulary does not keep it alive
vocabulary = model.get_vocab()

same = {}
for name, text in TEXTS.items():
    one, other = theirs.encode(text).ids, vocabulary.tokenize(text, False, False)
    same[name] = one == other
    print(f"{name}: {len(one)} tokens as published, {len(other)} by llama.cpp; the same: {same[name]}")
assert same == {name: name != "Hindi" for name in TEXTS}, "this has changed"
PY
