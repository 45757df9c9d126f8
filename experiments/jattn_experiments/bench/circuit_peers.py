"""Scores of all edges of a model: jattn, TransformerLens and circuitkit, timed in turn, and their memory by length.

``python -m jattn_experiments.bench.circuit_peers --out FOLDER`` writes ``circuit_peers.json`` and ``circuit_peers.md``.
Each tool runs in its own processes, with the Python that ``--python TOOL=PATH`` names, or else this one: circuitkit 0.2
needs TransformerLens 3.8. If a tool is not installed for its Python, its row says so. The models are random and have
the sizes of SmolLM2-135M, so nothing is downloaded. The second has a key for each head, because TransformerLens 4.3
scores no edges of a model whose heads share keys. All tools read the same files, in float32.

Scores are computed by ``"eap"`` on one example. The metric is a difference of two logits at the last token. ``first``
is the first call, including compilation and other work done once; ``median`` is that of ``--rounds`` further calls, all
tools in turn. Neither includes loading the model. The peak memory is that of a fresh process that loads the model and
makes one call. A process that exceeds ``LIMIT`` is ended.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jattn_experiments.bench.markdown import document, listed, short_number, table
from jattn_experiments.bench.worker import Worker, first_line, serve

VOCABULARY, RIGHT, OTHER = 49152, 3, 7
SIZES = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
MODELS = {"3 keys for 9 heads": 3, "9 keys for 9 heads": 9}
PACKAGES = {"jattn": ("jattn",), "transformer_lens": ("transformer-lens",), "circuitkit": ("circuitkit",)}
# TransformerLens has an edge for each token.
LENGTHS, LONGEST = (8, 128), 8192
LIMIT, PATIENCE = 8 * 2**30, 900.0  # bytes; seconds for one answer
OVER = f"more than {LIMIT / 2**30:g} GiB"

Score = Callable[[np.ndarray, np.ndarray], Any]  # (clean [T], corrupt [T]) -> returns when all edges have a score


def write_model(folder: Path, num_keys: int, sizes: Mapping[str, Any] = SIZES) -> None:
    """A random Llama as Hugging Face stores it, with a tokenizer whose words are numbers."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    rng, size, inner = np.random.default_rng(0), sizes["hidden_size"], sizes["intermediate_size"]
    keys = size // sizes["num_attention_heads"] * num_keys
    projections = {"q": (size, size), "k": (keys, size), "v": (keys, size), "o": (size, size)}
    shapes = {f"self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
    shapes |= {f"mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (size, inner)
    draw = lambda shape: rng.normal(scale=shape[-1] ** -0.5, size=shape).astype(np.float32)
    tensors = {"model.embed_tokens.weight": draw((sizes["vocab_size"], size)), "model.norm.weight": np.ones(size, "f4")}
    for i in range(sizes["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{name}": draw(shape) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"model.layers.{i}.{name}.weight": np.ones(size, "f4") for name in norms}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 1e4}
    kind |= {"num_key_value_heads": num_keys, "tie_word_embeddings": True, "dtype": "float32"}
    last = sizes["vocab_size"] - 1
    (folder / "config.json").write_text(json.dumps({**sizes, **kind, "bos_token_id": last, "eos_token_id": last}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(sizes["vocab_size"])}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": str(last), "eos_token": str(last)}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def by_jattn(folder: str) -> Score:
    """``jattn.circuits``."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jattn import circuits, interop

    model = interop.load(folder, progress=False)
    metric = lambda logits, tokens: logits[-1, RIGHT] - logits[-1, OTHER]
    return lambda clean, corrupt: circuits.edge_attribution(model, clean[None], corrupt[None], metric, progress=False)


def by_transformer_lens(folder: str) -> Score:
    """``transformer_lens.tools.analysis`` of TransformerLens 4."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch

    model = TransformerBridge.boot_transformers(folder, device="cpu")
    model.eval()
    metric = lambda logits: logits[0, -1, RIGHT] - logits[0, -1, OTHER]
    config = EdgeAttributionConfig(granularity="edge")
    return lambda *tokens: attribution_patch(model, *(torch.from_numpy(x[None]) for x in tokens), metric, config)


def by_circuitkit(folder: str) -> Score:
    """``circuitkit.backends.eap``, the layer that takes any model and examples."""
    import circuitkit
    from circuitkit.backends.eap.attribute import attribute
    from circuitkit.backends.eap.graph import Graph

    class Examples(list):
        templated = True  # no token is put before the text

    model = circuitkit.load_model(folder, dtype="float32", device="cpu", algorithm="eap")
    graph = Graph.from_model(model)
    text = lambda tokens: [" ".join(map(str, tokens))]

    def metric(logits: Any, clean_logits: Any, lengths: Any, labels: Any) -> Any:
        return (logits[:, -1, RIGHT] - logits[:, -1, OTHER]).sum()

    def score(clean: np.ndarray, corrupt: np.ndarray) -> None:
        attribute(model, graph, Examples([(text(clean), text(corrupt), None)]), metric, "EAP", quiet=True)

    return score


TOOLS: dict[str, Callable[[str], Score]] = {
    "jattn": by_jattn,
    "transformer_lens": by_transformer_lens,
    "circuitkit": by_circuitkit,
}


@functools.cache
def scorer(tool: str, folder: str) -> Score:
    """A tool with its model, kept for all further questions."""
    return TOOLS[tool](folder)


def answer(tool: str, folder: str, length: int) -> dict[str, Any]:
    """In a worker: the seconds of one call, of all its threads, and this process's peak memory so far."""
    try:
        score = scorer(tool, folder)
        clean = np.random.default_rng(length).integers(0, 1000, length)
        corrupt = clean.copy()
        corrupt[: length // 2] += 1000  # the last half is alike, as in most questions
        begin, used = time.perf_counter(), time.process_time()
        score(clean, corrupt)
        times = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - used}
        return {name: round(x, 3) for name, x in times.items()} | {"peak": _memory("self", "VmHWM")}
    except Exception as error:
        return {"result": "failed", "reason": first_line(error, 300)}


def ask(worker: Worker, **question: Any) -> dict[str, Any]:
    """A worker's answer. A worker that exceeds ``LIMIT`` is ended, and the answer says so."""
    done, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            process = worker.process
            if process is not None and _memory(str(process.pid), "VmRSS") > LIMIT:
                over.set()
                worker.kill()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found = worker(**question)
    finally:
        done.set()
        watcher.join()
    if over.is_set() or found.get("peak", 0) > LIMIT:
        return {"result": "failed", "reason": OVER}
    return found


def _memory(process: str, field: str) -> int:
    """Bytes, from Linux; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def timed(pythons: Mapping[str, str], folder: str, length: int, rounds: int) -> dict[str, dict[str, Any]]:
    """For each tool: seconds of the first call and of the calls in turn, or why there are none."""
    workers = {tool: _worker(python) for tool, python in pythons.items()}
    found: dict[str, dict[str, Any]] = {}
    try:
        for i in range(1 + rounds):
            order = list(workers) if i % 2 else list(workers)[::-1]
            for tool in order:
                result = found.setdefault(tool, {"seconds": [], "cpu": []})
                if "failed" in result:
                    continue
                one = ask(workers[tool], tool=tool, folder=folder, length=length)
                if one.get("result") == "failed":
                    result["failed"] = one["reason"]
                    workers[tool].close()
                elif i == 0:
                    result["first"] = one["seconds"]
                else:
                    result["seconds"].append(one["seconds"])
                    result["cpu"].append(one["cpu"])
    finally:
        for worker in workers.values():
            worker.close()
    for result in found.values():
        result["median"] = statistics.median(result["seconds"]) if result["seconds"] else None
    return found


def peaks(python: str, tool: str, folder: str, longest: int) -> list[dict[str, Any]]:
    """The peak memory by length, each in a fresh process. The length doubles while it fits, and halves if not."""
    rows: dict[int, dict[str, Any]] = {}
    length = LENGTHS[-1]
    while 1 <= length <= longest and length not in rows:
        worker = _worker(python)
        try:
            rows[length] = {"tool": tool, "length": length, **ask(worker, tool=tool, folder=folder, length=length)}
        finally:
            worker.close()
        fits = "reason" not in rows[length]
        if not fits and rows[length]["reason"] != OVER:
            break
        length = length * 2 if fits else length // 2
    return [rows[length] for length in sorted(rows)]


def _worker(python: str) -> Worker:
    command = [python, "-m", "jattn_experiments.bench.circuit_peers", "--serve"]
    return Worker(command, {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}, PATIENCE)


def versions(python: str, tool: str) -> str:
    """The versions of a tool and of the packages that it computes with, as its Python has them installed."""
    import subprocess

    names = ["jattn", "jattn-native", "jax"] if tool == "jattn" else [tool, "transformer-lens", "torch"]
    code = "import importlib.metadata as m, json, sys\n" + (
        "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}))"
    )
    found = json.loads(subprocess.check_output([python, "-c", code], text=True))
    named = dict.fromkeys(name.replace("_", "-") for name in names)
    return ", ".join(f"{name} {found.get(name, 'not installed')}" for name in named)


def markdown(contents: Mapping[str, Any]) -> str:
    """The two tables."""
    times = []
    for row in contents["times"]:
        for tool, result in row["tools"].items():
            ours = row["tools"].get("jattn", {}).get("median")
            ratio = f"{result['median'] / ours:.2f}" if ours and result["median"] else "-"
            numbers = [_shown(result.get(name)) for name in ("first", "median")]
            each = [", ".join(map(_shown, result[name])) or "-" for name in ("seconds", "cpu")]
            times.append([row["model"], row["length"], tool, *numbers, ratio, *each, result.get("failed", "")])
    memory = []
    for row in contents["peaks"]:
        numbers = _shown(row.get("peak"), 2**30), _shown(row.get("seconds"))
        memory.append([row["model"], row["tool"], row["length"], *numbers, row.get("reason", "")])
    return document(
        "# Scores of all edges, by tool",
        listed(contents["environment"]),
        table(
            ["model", "tokens", "tool", "first, s", "median, s", "x jattn's", "each, s", "CPU time, s", "failed"],
            times,
        ),
        table(["model", "tool", "tokens", "peak, GiB", "time of a call, s", "failed"], memory),
    )


def _shown(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else short_number(value / unit)


def write(contents: Mapping[str, Any], out: Path) -> None:
    """Writes both files, each atomically."""
    texts = {"circuit_peers.json": json.dumps(contents, indent=1) + "\n", "circuit_peers.md": markdown(contents)}
    with tempfile.TemporaryDirectory(dir=out) as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
            (Path(folder) / name).replace(out / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and writes the results so far after every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="TOOL=PATH",
        help=f"Python of a tool ({', '.join(TOOLS)}); default: this one",
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of timed calls of each tool")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="numbers of tokens of timed calls")
    parser.add_argument("--longest", type=int, default=LONGEST, help="largest number of tokens of memory rows")
    options = parser.parse_args(arguments)
    pythons = dict.fromkeys(TOOLS, sys.executable) | dict(one.split("=", 1) for one in options.python)
    if unknown := pythons.keys() - TOOLS.keys():
        parser.error(f"--python: expected one of {', '.join(TOOLS)} as TOOL, got {', '.join(sorted(unknown))}")
    from jattn_experiments.bench import timing  # not in a worker, whose Python may have neither JAX nor jattn

    options.out.mkdir(parents=True, exist_ok=True)
    environment = timing.machine() | {tool: versions(python, tool) for tool, python in pythons.items()}
    contents: dict[str, Any] = {"environment": environment, "limit": LIMIT, "times": [], "peaks": []}
    with tempfile.TemporaryDirectory() as place:
        for model, num_keys in MODELS.items():
            folder = Path(place) / str(num_keys)
            folder.mkdir()
            write_model(folder, num_keys)
            for length in options.lengths:
                load = os.getloadavg()[0]
                tools = timed(pythons, str(folder), length, options.rounds)
                contents["times"].append({"model": model, "length": length, "load": load, "tools": tools})
                write(contents, options.out)
                print(markdown(contents), flush=True)
            for tool, python in pythons.items():
                found = peaks(python, tool, str(folder), options.longest)
                contents["peaks"] += [{"model": model, **row} for row in found]
                write(contents, options.out)
    print(markdown(contents))


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve(answer)
    else:
        main()
