"""One page of a model's heads, written by ``jattn.report``, bertviz or CircuitsVis in a separate process."""

import functools
import importlib
import importlib.metadata
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import interop
from jattn_experiments import config
from jattn_experiments.bench.probe import peak_resident
from jattn_experiments.measure import sentence_encoder
from jattn_experiments.model_files import model_file

MEMORY, SECONDS = 6 * 2**30, 300  # limits for making a page; a page that exceeds one fails


class Text(NamedTuple):
    """What a page shows.

    layers: as of ``interop.look``: ``query``, ``key [B,T,N,H]``, ``lse [B,T,N]`` and the options of each layer.
    words: the tokens of each sequence, without padding.
    """

    layers: list[dict[str, Any]]
    words: list[list[str]]


def minilm() -> Text:
    """The sentences of ``minilm_heads.yaml``, in MiniLM."""
    options = config.read(config.CONFIGS / "minilm_heads.yaml").pretrained
    folder = sentence_encoder.folder_of(options)
    sentences = sentence_encoder.read_sentences(options, folder)
    return Text(interop.look(interop.load(folder), sentences.tokens, valid=sentences.valid), sentences.words)


def smollm2(length: int) -> Text:
    """The first tokens of this repository's license, in SmolLM2."""
    file = model_file("smollm2")
    encoded = interop.tokenizer(file).encode(_license())
    tokens = np.asarray([encoded.ids[:length]])
    if tokens.shape != (1, length):
        raise ValueError(f"the license has {tokens.size} tokens, but the page needs {length}")
    return Text(interop.look(interop.load(file), tokens), [encoded.tokens[:length]])


def _license() -> str:
    """The license of jattn: of the installed package, or of a checkout that is not installed."""
    try:
        kept = importlib.metadata.distribution("jattn").read_text("licenses/LICENSE")
    except importlib.metadata.PackageNotFoundError:
        kept = None
    return kept or (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")


def long(length: int = 4096, num_layers: int = 12, num_heads: int = 12, head_dim: int = 64) -> Text:
    """Random queries and keys of heads that attend to the previous token, equal tokens, near tokens, or nothing."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 500, length)
    angles = np.arange(length)[:, None] / 100 ** np.linspace(0, 2, head_dim // 2)
    near = 2 * np.concatenate([np.cos(angles), np.sin(angles)], 1)
    code, names, nothing = (scale * rng.standard_normal((n, head_dim)) for scale, n in ((2, length), (2, 500), (0, 1)))
    kinds = [
        (np.roll(code, 1, 0), code), (names[tokens], names[tokens]), (near, near),
        (np.broadcast_to(nothing, code.shape), code),
    ]  # fmt: skip
    layers = []
    for layer in range(num_layers):
        of_heads = [kinds[(layer + head) % len(kinds)] for head in range(num_heads)]
        query, key = (
            jnp.asarray(np.stack([head[side] for head in of_heads], 1)[None], jnp.float32)
            + 0.3 * jax.random.normal(jax.random.key(2 * layer + side), (1, length, num_heads, head_dim))
            for side in (0, 1)
        )
        no_value = jnp.zeros((1, length, num_heads, 0))
        _, lse = jattn.dot_product_attention(query, key, no_value, is_causal=True, return_residual=True)
        layers.append({"query": query, "key": key, "lse": lse, "is_causal": True})
    return Text(layers, [[f"t{token}" for token in tokens]])


def by_jattn(text: Text) -> str:
    """All sequences on one page."""
    return jattn.report(text.layers, text.words).html


def by_bertviz(view: str, text: Text) -> str:
    """One view below the other, because bertviz takes a single sequence."""
    torch, show = importlib.import_module("torch"), getattr(importlib.import_module("bertviz"), view)
    views = []
    for words, weights in _sequences(text):
        attention = [torch.from_numpy(layer)[None] for layer in weights]
        views.append(show(attention, words, html_action="return").data)
    return "\n".join(views)


def by_circuitsvis(text: Text) -> str:
    """Like ``by_bertviz``, with all layers' heads in one view, which includes its own code."""
    show = importlib.import_module("circuitsvis.attention").attention_heads
    views = []
    for words, weights in _sequences(text):
        names = [f"L{layer}H{head}" for layer, of_layer in enumerate(weights) for head in range(len(of_layer))]
        views.append(show(np.concatenate(weights), words, names).local_src + "</div>")  # CircuitsVis leaves a file open
    return "\n".join(views)


def _sequences(text: Text) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """The tokens of each sequence, and its weights ``[N,T,T]`` in each layer; ``MemoryError`` above ``MEMORY``."""
    size = 4 * sum(B * T * N * T for B, T, N, _ in (layer["query"].shape for layer in text.layers))
    if size > MEMORY:
        raise MemoryError(f"the weights alone are {size} bytes")
    weights = []
    for layer in text.layers:
        options = {name: x for name, x in layer.items() if name not in ("query", "key", "value", "lse", "z")}
        weights.append(np.asarray(jattn.attention_weights(layer["query"], layer["key"], **options)))
    for b, words in enumerate(text.words):
        yield words, [layer[b, :, : len(words), : len(words)].copy() for layer in weights]


TEXTS: dict[str, Callable[[], Text]] = {
    "MiniLM, 15 sentences": minilm,
    "SmolLM2, 128 tokens": functools.partial(smollm2, 128),
    "SmolLM2, 512 tokens": functools.partial(smollm2, 512),
    "SmolLM2, 2048 tokens": functools.partial(smollm2, 2048),
    "12 x 12 heads, 4096 tokens": long,
}
TOOLS: dict[str, tuple[str, Callable[[Text], str]]] = {
    "jattn.report": ("jattn", by_jattn),
    "bertviz head_view": ("bertviz", functools.partial(by_bertviz, "head_view")),
    "bertviz model_view": ("bertviz", functools.partial(by_bertviz, "model_view")),
    "CircuitsVis attention_heads": ("circuitsvis", by_circuitsvis),
}


def write_page(text: Text, tool: str, file: Path) -> dict[str, float]:
    """Writes the page and returns its cost.

    That is its ``bytes``, the ``seconds`` from queries, keys and log-sum-exps to the file, and the resident memory
    ``before`` that and at its ``peak``, in bytes.
    """
    package, page = TOOLS[tool]
    importlib.import_module(package)  # its time and memory do not count for the page
    jax.block_until_ready(text.layers)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on, without that of the model
    before = float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    begin = time.perf_counter()
    file.write_text(page(text), encoding="utf-8")
    seconds = round(time.perf_counter() - begin, 2)
    return {"bytes": file.stat().st_size, "seconds": seconds, "before": before, "peak": peak_resident()}


def answer(text: str, tool: str, file: str) -> dict[str, float]:
    """Writes the page of one of ``TEXTS`` within ``MEMORY`` and ``SECONDS``; the process keeps these limits."""
    shown = TEXTS[text]()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        return write_page(shown, tool, Path(file))
    except (MemoryError, jax.errors.JaxRuntimeError) as wrong:  # such as RESOURCE_EXHAUSTED
        sys.exit(f"more than {MEMORY // 2**30} GiB ({type(wrong).__name__})")
