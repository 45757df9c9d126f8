#!/bin/sh
# One expects: opening a GGUF file maps it and reads its header; a vocabulary costs about what its strings take.
# What happens: the reader makes two array objects, views of the mapped file, for every string. Of a real vocabulary
#   (Gemma 3, 262,144 tokens, 253 MB in all) that is 690 MB, and 19 s on a Xeon at 2.8 GHz, before a single weight is read,
#   and it happens again for whoever opens the file for its weights alone. Here: 20,000 tokens of 9 bytes.
# Version: gguf 0.19.0. Source: gguf/gguf_reader.py, _get_str and _get_field_parts.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q gguf==0.19.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys
import tracemalloc
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

file, tokens = Path(sys.argv[1]) / "tokens.gguf", [f"token{i:04x}" for i in range(20_000)]
writer = GGUFWriter(file, "llama")
writer.add_token_list(tokens)
writer.add_tensor("one", np.zeros(32, np.float32))
for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
    getattr(writer, step)()
tracemalloc.start()
reader = GGUFReader(file)
taken = tracemalloc.get_traced_memory()[0]
print(f"the file: {file.stat().st_size / len(tokens):.0f} bytes a token; the reader: {taken / len(tokens):.0f}")
assert taken > 20 * file.stat().st_size, "this has changed"
PY
