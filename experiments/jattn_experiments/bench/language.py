"""The language benchmark: the time that a language model on jattn's modules takes to load, to write and to examine.

Shared by all rows: ``environment``, ``sizes``, ``missing`` (contestant: why). The parts:

- ``writing``: ``medians`` (contestant: microseconds a token, one sequence, greedily, the prompt of four tokens
  included), and ``rounds`` of turns; ``sum`` adds up as many float32 numbers as the model has parameters, once;
- ``prefill``: rows of ``length``, ``medians`` (contestant: microseconds from a prompt of that length to the logits
  of its last one and a filled cache, in float32), and ``rounds``;
- ``once``: seconds to ``load``, to ``load converted`` to safetensors, for the ``tokenizer``, of the first tokens less
  that of later ones (``compilation`` of a chunk and a step), and of ``statistics`` of all heads with compilation.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn import heads, interop
from jattn.interop._gguf import read_gguf
from jattn_experiments.bench import timing
from jattn_experiments.bench.goals import Goal, goal_table, ratio
from jattn_experiments.bench.markdown import document, listed, table
from jattn_experiments.bench.plan import Plan
from jattn_experiments.bench.suite import Job, Refused, Results, Suite
from jattn_experiments.model_files import model_file

DTYPES, PEER, READ = ("float32", "bfloat16"), "transformers", "sum"


@dataclasses.dataclass(frozen=True)
class Sizes(timing.Turns):
    """Sizes of one run."""

    model: str = "smollm2"  # the default prompt of ``jattn generate``
    tokens: int = 64  # written in a turn
    prompts: tuple[int, ...] = (2048, 8192)  # tokens of the prompts to prefill
    text: int = 8192  # tokens of a long text
    shape: tuple[int, int] = (8, 257)  # of the batch whose heads are looked at


def start(plan: Plan) -> None:
    """Uses the CPU. Raises ``Refused`` if the model, or a package that reads or converts it, is missing."""
    timing.use("cpu")
    try:
        model_file(Sizes.model)
    except ValueError as wrong:
        raise Refused(f"--suite language: {wrong}") from None
    if missing := [name for name in ("gguf", "safetensors", "tokenizers") if importlib.util.find_spec(name) is None]:
        raise Refused(f"--suite language: {', '.join(missing)} not installed; pip install 'jattn[gguf,hf]'")


def about(sizes: Sizes) -> dict[str, Any]:
    """What all rows share."""
    missing = {} if _has_peer() else {PEER: "not installed, or PyTorch or gguf is not"}
    facts = timing.about(sizes) | {"missing": missing}
    if not missing:
        facts["environment"] |= {name: importlib.metadata.version(name) for name in ("torch", PEER)}
    return facts


def jobs(sizes: Sizes) -> Iterator[Job]:
    """The parts in order: what happens once, writing, the prompts, the long text."""
    yield Job("once", {}, functools.partial(once, sizes))
    yield Job("writing", {}, functools.partial(writing, sizes))
    for length in sizes.prompts:
        yield Job("prefill", {"length": length}, functools.partial(prefill, sizes, length))
    yield Job("long", {"length": sizes.text}, functools.partial(long_text, sizes))


def once(sizes: Sizes) -> dict[str, float]:
    """The waiting time before the first token, and the statistics of all heads."""
    file = model_file(sizes.model)
    model, load = _once(lambda: interop.load(file))
    with tempfile.TemporaryDirectory() as folder:
        _convert(file, Path(folder))
        _, converted = _once(lambda: interop.load(folder))
    _, tokenizer = _once(lambda: interop.tokenizer(file))
    prompt = _prompt(model)
    first, later = (_once(lambda: interop.generate(model, [prompt], 2))[1] for _ in range(2))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocabulary, sizes.shape))
    look = nnx.capture(lambda model: model(tokens, sow_statistics={"tokens": tokens}), nnx.Intermediate)
    _, statistics = _once(lambda: heads.collect(nnx.jit(look)(model)[1], "attention_statistics"))
    before = {"load": load, "load converted": converted, "tokenizer": tokenizer, "compilation": first - later}
    return before | {"statistics": statistics}


def _convert(file: Path, folder: Path) -> None:
    """Writes a GGUF file's model as the folder of a saved model, in float32."""
    from safetensors.numpy import save_file

    tensors, config = read_gguf(file)
    save_file({name: np.ascontiguousarray(x[:]) for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def writing(sizes: Sizes) -> dict[str, Any]:
    """Tokens by each contestant, in turn."""
    file = model_file(sizes.model)
    models = {dtype: interop.load(file, dtype=dtype) for dtype in DTYPES}
    prompt = _prompt(models["float32"])
    calls: dict[str, timing.Call] = {
        name: functools.partial(interop.generate, model, [prompt], sizes.tokens) for name, model in models.items()
    }
    if _has_peer():
        options = {"max_new_tokens": sizes.tokens, "min_new_tokens": sizes.tokens, "do_sample": False}
        peer, tokens = _peer(file, prompt)
        calls[PEER] = functools.partial(peer.generate, tokens, **options)
    calls[READ] = _sum_of(nnx.state(models["float32"]))
    return _per_token(sizes, sizes.medians(calls), *models, PEER)


def prefill(sizes: Sizes, length: int) -> dict[str, Any]:
    """A random prompt, read in one pass by each contestant in turn."""
    file = model_file(sizes.model)
    model = interop.load(file)
    prompt = np.random.default_rng(0).integers(0, model.config.vocabulary, length).tolist()
    graph, state = nnx.split(model)

    @jax.jit
    def forward(state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, state)
        hidden, cache = model(tokens, cache=model.init_cache(1, length))
        return model.logits(hidden[:, -1]), cache

    calls: dict[str, timing.Call] = {"jattn": lambda: jax.block_until_ready(forward(state, jnp.asarray([prompt])))}
    if _has_peer():
        calls[PEER] = functools.partial(*_peer(file, prompt), use_cache=True, logits_to_keep=1)
    return sizes.medians(calls)


def long_text(sizes: Sizes) -> dict[str, Any]:
    """Tokens written after a long text, and statistics of all heads compared with a forward pass."""
    model = interop.load(model_file(sizes.model))
    graph, state = nnx.split(model)
    rng, length = np.random.default_rng(0), sizes.text
    tokens = jnp.asarray(rng.integers(0, model.config.vocabulary, (1, length)))

    def statistics(state: Any, tokens: jax.Array) -> Any:
        look = nnx.capture(lambda model: model(tokens, sow_statistics={"tokens": tokens}), nnx.Intermediate)
        return heads.collect(look(nnx.merge(graph, state))[1], "attention_statistics")

    seconds, gib = {}, {}
    passes = {"forward": lambda state, tokens: nnx.merge(graph, state)(tokens), "statistics": statistics}
    for name, function in passes.items():
        compiled = jax.jit(function).lower(state, tokens).compile()
        seconds[name] = round(_once(functools.partial(compiled, state, tokens))[1], 2)
        memory = compiled.memory_analysis()
        planned = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        gib[name] = round(planned / 2**30, 2)

    @functools.partial(jax.jit, donate_argnums=2)
    def write(state: Any, token: jax.Array, cache: Any) -> Any:
        model = nnx.merge(graph, state)

        def step(carry: Any, _: Any) -> tuple[Any, jax.Array]:
            hidden, cache = model(carry[0], cache=carry[1])
            token = model.logits(hidden).argmax(-1)
            return (token, cache), token

        (_, last), written = jax.lax.scan(step, (token, cache), length=sizes.tokens)
        return written, dataclasses.replace(last, length=cache.length)  # the next call writes over these tokens

    empty = model.init_cache(1, length + sizes.tokens)
    key, value = (jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in (empty.key, empty.value))
    cache = dataclasses.replace(empty, key=key, value=value, length=empty.length + length)

    def one_turn() -> None:
        nonlocal cache
        _, cache = jax.block_until_ready(write(state, tokens[:, :1], cache))

    row = sizes.medians({"token": one_turn, READ: _sum_of((state, empty))})
    return {"seconds": seconds, "gib": gib} | _per_token(sizes, row, "token")


def _sum_of(arrays: Any) -> timing.Call:
    """Adds up as many float32 numbers as a tree of arrays holds."""
    numbers, total = jnp.ones(sum(x.size for x in jax.tree.leaves(arrays))), jax.jit(jnp.sum)
    return lambda: jax.block_until_ready(total(numbers))


def _per_token(sizes: Sizes, row: dict[str, Any], *writers: str) -> dict[str, Any]:
    """A row whose medians are per token rather than per turn."""
    medians = {name: round(x / sizes.tokens, 2) if name in writers else x for name, x in row["medians"].items()}
    return row | {"medians": medians}


def _peer(file: Path, prompt: list[int]) -> tuple[Any, Any]:
    """The model in transformers, and a prompt in its format."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(timing.cores())
    torch.set_grad_enabled(False)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options), torch.tensor([prompt])


def _has_peer() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", PEER, "accelerate"))


def _prompt(model: interop.Transformer) -> list[int]:
    return [1 + i % (model.config.vocabulary - 1) for i in (6402, 1979, 252, 654)]  # Once upon a time


def _once(call: timing.Call) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    begin = time.perf_counter()
    result = jax.block_until_ready(call())
    return result, time.perf_counter() - begin


def goals(results: Results) -> list[Goal]:
    """Every goal, for the default sizes on a CPU, and its measured number."""
    medians, seconds = results.values("writing").get("medians", {}), results.values("once")
    ours, half = (medians.get(dtype) for dtype in DTYPES)
    prompts = []
    for length in Sizes.prompts:
        times = results.values("prefill", length=length).get("medians", {})
        question = f"prompt of {length} tokens: time of transformers / time of jattn"
        prompts.append(Goal(question, ratio(times.get(PEER), times.get("jattn")), 1.0, True))
    long = results.values("long", length=Sizes.text)
    turns, of_text, gib = (long.get(name, {}) for name in ("medians", "seconds", "gib"))
    sums = f"cache of {Sizes.text} tokens: tokens per second / sums of all that a token reads per second"
    return [
        Goal("float32: tokens per second, jattn / transformers (aim: 2)", ratio(medians.get(PEER), ours), 1.0, True),
        Goal("tokens per second, bfloat16 / float32", ratio(ours, half), 0.9, True),
        *prompts,
        Goal("loading a GGUF file", seconds.get("load"), 15.0, False, "s"),
        Goal("loading the same model as safetensors", seconds.get("load converted"), 6.0, False, "s"),
        Goal("compiling a chunk and a step", seconds.get("compilation"), 3.0, False, "s"),
        Goal("statistics of all heads, 8 x 257 tokens, with compilation", seconds.get("statistics"), 20.0, False, "s"),
        Goal(sums, ratio(turns.get(READ), turns.get("token")), 0.5, True),
        Goal(f"all statistics of all heads, {Sizes.text} tokens", of_text.get("statistics"), 240.0, False, "s"),
        Goal("the same statistics: memory that XLA plans", gib.get("statistics"), 3.0, False, "GiB"),
    ]


def markdown(results: Results) -> str:
    """``language.md``."""
    speeds = [[name, f"{1e6 / time:.1f}"] for name, time in results.values("writing")["medians"].items()]
    once = [[name, f"{seconds:.1f}"] for name, seconds in results.values("once").items()]
    return document(
        "# A language model, measured",
        "SmolLM2-135M-Instruct from its GGUF file. Medians of turns; one sequence, greedy decoding. `sum` adds up as "
        "many float32 numbers as the model has parameters. Written by `jattn bench --suite language`.",
        "## Goals",
        goal_table(goals(results)),
        "## Tokens and sums per second",
        table(["", "per second"], speeds),
        *_prefill_table(results),
        *_long_table(results),
        "## Seconds that are spent once",
        table(["", "seconds"], once),
        "## Measured on",
        listed(results.about["environment"] | results.about["sizes"] | results.about["missing"]),
    )


def _prefill_table(results: Results) -> list[str]:
    rows = results.of("prefill")
    names = list(dict.fromkeys(name for row in rows for name in row["medians"]))
    cells = [[row["length"], *(f"{row['medians'][name] / 1e6:.2f}" for name in names), row["rounds"]] for row in rows]
    return ["## Seconds for a prompt", table(["tokens", *names, "rounds"], cells)] if rows else []


def _long_table(results: Results) -> list[str]:
    rows = []
    for row in results.of("long"):
        token, total = (row["medians"][name] for name in ("token", READ))
        rows.append([f"tokens per second, after {row['length']} tokens", f"{1e6 / token:.1f}"])
        rows.append(["sums of parameters and cache per second", f"{1e6 / total:.1f}"])
        rows += [[f"{name}: seconds", f"{seconds:.1f}"] for name, seconds in row["seconds"].items()]
        rows += [[f"{name}: GiB that XLA plans", f"{gib:.2f}"] for name, gib in row["gib"].items()]
    return ["## A long text", table(["", ""], rows)] if rows else []


SUITE = Suite(
    name="language",
    parts={"once": (), "writing": (), "prefill": ("length",), "long": ("length",)},
    about=about,
    jobs=jobs,
    markdown=markdown,
    shown=lambda results: goal_table(goals(results)),
    sizes=lambda plan: Sizes(seconds=5 * plan.seconds),  # a turn takes one or two
    start=start,
)
