"""Loads damaged and hostile checkpoints: any bytes must give a model or an error that names the file.

``python -m tests.soak.loading --files 10000 --seed 0`` draws them from one seed and counts the outcomes. Any other
outcome is a failure, and so is a file that takes too long or too much memory; it is printed with the number that draws
it again (``--only``).
"""

import argparse
import collections
import json
import resource
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.progress import track

from jattn import interop

CONFIG = {
    "model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 7,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu",
}  # fmt: skip
EXPECTED = (ValueError, FileNotFoundError)
SECONDS, MEMORY = 5.0, 64 * 2**20  # per file; bytes beyond what was in use before


def tensors() -> dict[str, np.ndarray]:
    """All tensors of the model above."""
    shapes = {
        "wte.weight": (11, 8), "wpe.weight": (7, 8), "ln_f.weight": (8,), "ln_f.bias": (8,),
        "h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_attn.bias": (24,), "h.0.attn.c_proj.weight": (8, 8),
        "h.0.attn.c_proj.bias": (8,), "h.0.mlp.c_fc.weight": (8, 32), "h.0.mlp.c_fc.bias": (32,),
        "h.0.mlp.c_proj.weight": (32, 8), "h.0.mlp.c_proj.bias": (8,), "h.0.ln_1.weight": (8,), "h.0.ln_1.bias": (8,),
        "h.0.ln_2.weight": (8,), "h.0.ln_2.bias": (8,),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def whole() -> tuple[dict, bytes]:
    """The header and the data of a valid safetensors file."""
    header, data = {}, b""
    for name, x in tensors().items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    return header, data


def packed(header: object, data: bytes, length: int | None = None) -> bytes:
    """A file in the format: the length of the header in eight bytes, the header as JSON, the data."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def drawn(rng: np.random.Generator) -> tuple[bytes, bytes]:
    """A mutated safetensors file and the ``config.json`` beside it."""
    header, data = whole()
    config: object = dict(CONFIG)
    name = str(rng.choice(list(header)))
    huge = int(rng.choice([2**31, 2**32, 2**53, 2**60, 2**63 - 1]))
    kind = int(rng.integers(12))
    if kind == 0:  # an enormous header length
        return packed(header, data, huge), json.dumps(config).encode()
    if kind == 1:  # tensors that overlap, lie past the end, or have reversed offsets
        a, b = (int(x) for x in rng.integers(-9, len(data) + 99, 2))
        header[name]["data_offsets"] = [a, b]
    elif kind == 2:
        header[name]["shape"] = [huge, *header[name]["shape"][1:]]
    elif kind == 3:
        header[name]["shape"] = [[0], [], [-1, 8], [huge, huge], "8", None, [1.5], [[8]]][int(rng.integers(8))]
    elif kind == 4:
        header[name]["dtype"] = ["I64", "BOOL", "F64", "BF16", "F8_E4M3", "X", 3, None][int(rng.integers(8))]
    elif kind == 5:
        del header[name]
    elif kind == 6:
        header[str(rng.choice(["__metadata__", "../x", "", "h.0.attn.bias", "\\u0000"]))] = header[name]
    elif kind == 7:  # damage the config instead
        key = str(rng.choice(list(CONFIG)))
        config = [CONFIG | {key: v} for v in (huge, -1, 0, None, "x", 1.5, [], {}, True)][int(rng.integers(9))]
    elif kind == 8:
        config = [[], 3, None, "x", {}, {"model_type": "bert"}][int(rng.integers(6))]
    file, text = packed(header, data), json.dumps(config).encode()
    if kind == 9:
        file = file[: int(rng.integers(len(file)))]
    elif kind == 10:
        file = _flipped(rng, file)
    elif kind == 11:
        text = [_flipped(rng, text), text[: int(rng.integers(len(text)))], b"[" * 100_000][int(rng.integers(3))]
    return file, text


def _flipped(rng: np.random.Generator, content: bytes) -> bytes:
    """Changes a few bytes, half of the time among the first 200, which matter most."""
    found = bytearray(content)
    for _ in range(int(rng.integers(1, 9))):
        found[int(rng.integers(min(len(found), 200 if rng.random() < 0.5 else len(found))))] = int(rng.integers(256))
    return bytes(found)


def load(folder: Path, seed: int, number: int) -> tuple[str, str | None]:
    """The outcome of loading one drawn file, and what is wrong with it, if anything."""
    file, config = drawn(np.random.default_rng([seed, number]))
    (folder / "model.safetensors").write_bytes(file)
    (folder / "config.json").write_bytes(config)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wrong = None
    try:
        interop.load(folder)
        came = "loaded"
    except EXPECTED as error:
        came = type(error).__name__
        wrong = None if str(error) else "an error without a message"
    except Exception as error:
        came = type(error).__name__
        wrong = f"{came}: {str(error)[:200]}"
    seconds, taken = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if seconds > SECONDS:
        wrong = f"{seconds:.1f} s"
    if taken * 1024 > MEMORY + len(file):
        wrong = f"{taken // 1024} MiB of memory for a file of {len(file)} bytes"
    return came, wrong


def main() -> int:
    """Loads the requested files; returns 1 if one fails, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.loading", description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the one file of this number")
    asked = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(asked.files) if asked.only is None else [asked.only]
        for number in track(numbers, "loading"):
            came, wrong = load(Path(folder), asked.seed, number)
            counts[came] += 1
            if wrong is not None:
                failures += 1
                print(f"seed {asked.seed} file {number}: {wrong}")
    print(f"{sum(counts.values())} files, {failures} failures; {dict(counts)}")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
