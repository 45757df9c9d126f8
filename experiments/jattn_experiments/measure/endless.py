"""Writing without end: the loss of a long text that is read through caches of one size. This has no config.

``python -m jattn_experiments.measure.endless smollm2 --out RESULTS`` takes 25 to 35 minutes on two cores and writes
``RESULTS/smollm2.json`` and a table. For each text, the loss of each next token is measured in three blocks, with

- *all tokens*: every earlier token is visible;
- *window*: a rolling cache keeps the last ``SIZE`` tokens;
- *in the text*: the first four tokens and the last ``SIZE - 4`` are visible, with their positions in the text (a mask);
- *in the cache*: the same tokens, with positions within the cache (``init_cache(first_tokens=4)``), as StreamingLLM
  counts them (https://arxiv.org/abs/2309.17453, section 3.2);
- *read afresh*: a new text that begins ``SIZE`` tokens before the last of its ``FRESH`` tokens, so that the model
  sees only the remaining context.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.progress import Progress

from jattn import KVCache, interop, masks
from jattn_experiments.measure.long_losses import losses
from jattn_experiments.measure.long_texts import piece
from jattn_experiments.measure.saved_model import Model
from jattn_experiments.model_files import PACKAGES, model_file
from jattn_experiments.runs.terminal import Terminal

FIRST, FIRST_TOKEN = 4, {"smollm2": "<|im_start|>", "gemma3": "<bos>"}
SIZES = {"smollm2": 512, "gemma3": 516}  # slots; a cache of Gemma 3 holds its window of 512 and the first tokens
BLOCKS = ((1024, 4096), (8192, 12288), (20480, 24576))
FRESH = 4  # a context has this many parts, and the last one is measured
TEXTS = (("source", 0), ("source", 1))


def losses_of(model: Model, tokens: np.ndarray, size: int, tell: Callable[[], Any]) -> dict[str, np.ndarray]:
    """The losses, ``[T-1]`` each. ``read afresh`` is NaN where nothing is measured."""

    @jax.jit
    def masked(state: nnx.State, mask: masks.Mask) -> Array:
        whole = model.whole(state)
        return losses(whole, whole(tokens[None], mask=mask)[0], jnp.asarray(tokens))

    def rolled(first_tokens: int) -> Array:
        @jax.jit
        def loss(state: nnx.State) -> Array:
            whole = model.whole(state)
            chunks = jnp.asarray(np.pad(tokens, (0, -len(tokens) % size)).reshape(-1, 1, size))

            def chunk(cache: KVCache, tokens: Array) -> tuple[KVCache, Array]:
                hidden, cache = whole(tokens, cache=cache)
                return cache, hidden[0]

            cache = whole.init_cache(1, size, rolling=True, first_tokens=first_tokens)
            _, hidden = jax.lax.scan(chunk, cache, chunks)
            return losses(whole, hidden.reshape(-1, hidden.shape[-1])[: len(tokens)], jnp.asarray(tokens))

        return loss(model.state)

    def afresh() -> np.ndarray:
        step, result = size // FRESH, np.full(len(tokens) - 1, np.nan, np.float32)

        @jax.jit
        def loss(state: nnx.State, tokens: Array) -> Array:
            whole = model.whole(state)
            return losses(whole, whole(tokens[None])[0], tokens)

        for start, stop in BLOCKS:
            for end in range(start + step, min(stop, len(tokens)) + 1, step):
                context = np.append(tokens[:1], tokens[end - size + 1 : end])
                result[end - step - 1 : end - 1] = loss(model.state, context)[-step:]
        return result

    in_the_text = masks.Causal() & (masks.SlidingWindow(size - FIRST - 1) | masks.Prefix(FIRST))
    measured = {
        "all tokens": lambda: masked(model.state, masks.Causal()),
        "window": lambda: rolled(0),
        "in the text": lambda: masked(model.state, in_the_text),
        "in the cache": lambda: rolled(FIRST),
        "read afresh": afresh,
    }
    result = {}
    for name, measure in measured.items():
        result[name] = np.asarray(measure())
        tell()
    return result


def in_blocks(each: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """The mean loss of each block, over the tokens that all methods measure."""
    known = np.isfinite(each["read afresh"])
    blocks = [np.arange(len(known)) for _ in BLOCKS]
    inside = [(at >= start) & (at < stop) & known for at, (start, stop) in zip(blocks, BLOCKS, strict=True)]
    return {name: [float(loss[at].mean()) for at in inside] for name, loss in each.items()}


def table(found: dict[str, list[float]]) -> str:
    """A Markdown table with a row for each block, and each cache's loss relative to reading the rest of the context."""
    lines = [f"| tokens | {' | '.join(found)} |", "|---" * (1 + len(found)) + "|"]
    for (start, stop), values in zip(BLOCKS, zip(*found.values(), strict=True), strict=True):
        lines.append(f"| {start:,} to {stop:,} | {' | '.join(f'{value:.3f}' for value in values)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures one model and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=PACKAGES, help="the model that reads the texts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    options = parser.parse_args()
    source, longest = model_file(options.model), max(stop for _, stop in BLOCKS)
    model, tokenizer = Model.of(interop.load(source)), interop.tokenizer(source)
    first, every = tokenizer.token_to_id(FIRST_TOKEN[options.model]), []
    with Progress(console=Terminal()) as progress:
        task = progress.add_task("texts", total=5 * len(TEXTS))
        for kind, number in TEXTS:
            tokens = np.append(np.int32(first), piece(kind, number, longest - 1, tokenizer).astype(np.int32))
            found = losses_of(model, tokens, SIZES[options.model], lambda: progress.advance(task))
            every.append(in_blocks(found))
    mean = {name: np.mean([one[name] for one in every], 0).tolist() for name in every[0]}
    result = {"model": options.model, "slots": SIZES[options.model], "blocks": BLOCKS, "mean": mean, "texts": every}
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        (Path(folder) / "new").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (Path(folder) / "new").replace(options.out / f"{options.model}.json")
    print(table(mean))


if __name__ == "__main__":
    main()
