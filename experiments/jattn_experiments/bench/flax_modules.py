"""The layers suite: jattn's Flax modules compared with Flax's, in a training step and a decoding step.

On a CPU it also times a training step of PyTorch's layers, with the same shapes.

Shared by all rows: ``environment``, ``sizes``. The parts:

- ``times``: ``step``, ``length`` (tokens attended to), ``medians`` (contestant: microseconds), ``rounds`` of turns,
  ``apart`` (how much jattn's results differ, as a share of the largest number);
- ``memory``: ``contestant``, ``length`` of a training step, ``temporaries`` in bytes that XLA plans, and ``peak``
  bytes of a fresh process minus those of one that only builds the model and its inputs.
"""

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn.nnx
from jattn.multi_head import attend_heads
from jattn_experiments.bench import peers, probe, timing
from jattn_experiments.bench.goals import Goal, goal_table, has_native, ratio
from jattn_experiments.bench.markdown import document, listed, table
from jattn_experiments.bench.suite import Failed, Job, Results, Suite

MODULES = {"jattn": jattn.nnx.MultiHeadAttention, "flax": nnx.MultiHeadAttention}
COLUMNS = ("jattn", "flax", "torch", "pallas_gpu", "native", "sum")  # native: from before it was the plain call
TITLES = {"flax": "Flax", "sum": "sum of the cache"}
TRAIN, DECODE, MODULE = "training step", "decode, function", "decode, module"
HALF = ", bfloat16"  # of a step: float32 parameters and norms, computed in bfloat16; a cache in it
RATE = 0.1  # of gradient descent


@dataclasses.dataclass(frozen=True)
class Sizes(timing.Turns):
    """Sizes of one run, batch 1. A CPU uses float32 and bfloat16; other devices use float32, and bfloat16 to decode."""

    layers: int = 6
    width: int = 512
    num_heads: int = 8
    lengths: tuple[int, ...] = (256, 1024, 4096)  # of training; memory is measured at the longest
    num_kv_heads: int = 2  # in decoding; in training num_heads
    slots: int = 65536  # of the cache
    tokens: tuple[int, ...] = (65536, 4096)  # in it, including the decoded one; modules decode with the most
    device: str = "cpu"

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on the CPU."""
        return self.device == "cpu"

    def tolerance(self, step: str) -> float:
        """How much results may differ, as a share of the largest number. Accelerators round the inputs of products."""
        return 1e-4 if self.on_cpu and HALF not in step else 2e-2


@dataclasses.dataclass
class Contestant:
    """A jitted ``step(state, *inputs) -> (output, state)`` that donates its state."""

    step: Callable[..., tuple[Any, Any]]
    state: Any
    inputs: tuple[Any, ...]

    def __call__(self) -> Any:
        """Runs one step; returns its output when done."""
        output, self.state = jax.block_until_ready(self.step(self.state, *self.inputs))
        return output


class Block(nnx.Module):
    """A layer of a causal transformer: ``[1, n, width]`` to the same shape."""

    def __init__(self, attention: Callable[..., nnx.Module], sizes: Sizes, rngs: nnx.Rngs, dtype: Any = None):
        width, of = sizes.width, {"dtype": dtype, "rngs": rngs}
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = attention(num_heads=sizes.num_heads, in_features=width, decode=False, **of)
        self.up, self.down = nnx.Linear(width, 4 * width, **of), nnx.Linear(4 * width, width, **of)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


def about(sizes: Sizes) -> dict[str, Any]:
    """What all rows share."""
    facts = timing.about(sizes)
    facts["environment"] |= peers.versions(("torch",)) if sizes.on_cpu else {}
    return facts


def jobs(sizes: Sizes) -> Iterator[Job]:
    """Training with both modules, its memory, then decoding with the function and with both modules."""

    def times(step: str, length: int, row: Callable[..., dict[str, Any]], *arguments: Any) -> Job:
        return Job("times", {"step": step, "length": length}, functools.partial(row, sizes, *arguments))

    halves = ["", HALF] if sizes.on_cpu else [""]
    for half, length in itertools.product(halves, sizes.lengths):
        yield times(TRAIN + half, length, modules_row, TRAIN + half, length, trainer)
    for name in MODULES if sizes.on_cpu else ():  # a fresh process cannot share an accelerator
        key = {"contestant": name, "length": max(sizes.lengths)}
        yield Job("memory", key, functools.partial(memory_row, sizes, **key))
    for half, tokens in itertools.product(halves, sizes.tokens):
        yield times(DECODE + half, tokens, function_row, DECODE + half, tokens)
    yield times(MODULE, max(sizes.tokens), modules_row, MODULE, max(sizes.tokens), decoder)


def modules_row(sizes: Sizes, step: str, length: int, build: Callable[..., Contestant]) -> dict[str, Any]:
    """Times a step with both modules, which must agree on its output and new state. PyTorch's step need not agree."""
    dtype = jnp.bfloat16 if HALF in step else None
    calls: dict[str, Any] = {name: build(sizes, length, name, dtype) for name in MODULES}
    before = [jax.tree.map(jnp.copy, one.state) for one in calls.values()]
    outputs = [one() for one in calls.values()]
    changes = [jax.tree.map(jnp.subtract, one.state, old) for one, old in zip(calls.values(), before, strict=True)]
    apart = max(agree(f"{step}, n = {length}", *pair, sizes.tolerance(step)) for pair in (outputs, changes))
    if step.startswith(TRAIN) and sizes.on_cpu and importlib.util.find_spec("torch"):
        calls["torch"] = torch_trainer(sizes, length, HALF in step)
    return _timed(sizes, calls, apart)


def trainer(sizes: Sizes, length: int, name: str, dtype: Any = None) -> Contestant:
    """Gradient descent on a transformer's mean squared error. Both modules get the same parameters, in float32."""
    rngs = nnx.Rngs(0)
    graph, params = nnx.split(nnx.Sequential(*(Block(MODULES[name], sizes, rngs, dtype) for _ in range(sizes.layers))))
    x, target = (jax.random.normal(jax.random.key(i), (1, length, sizes.width)) for i in range(2))
    loss = lambda params, x, target: jnp.mean((nnx.merge(graph, params)(x) - target) ** 2)

    def step(params: nnx.State, x: jax.Array, target: jax.Array) -> tuple[jax.Array, nnx.State]:
        value, gradients = jax.value_and_grad(loss)(params, x, target)
        return value, jax.tree.map(lambda param, gradient: param - RATE * gradient, params, gradients)

    return Contestant(jax.jit(step, donate_argnums=0), params, (x, target))


def torch_trainer(sizes: Sizes, length: int, half: bool = False) -> Callable[[], float]:
    """A step of ``trainer`` with PyTorch's layers, parameters and inputs; returns the loss.

    ``half``: in bfloat16, by PyTorch's automatic casts.
    """
    import torch
    from torch import nn

    torch.set_num_threads(timing.cores())
    torch.manual_seed(0)
    shape = {"d_model": sizes.width, "nhead": sizes.num_heads, "dim_feedforward": 4 * sizes.width}
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    layers = nn.ModuleList(nn.TransformerEncoderLayer(**shape, **options) for _ in range(sizes.layers))
    x, target = (torch.randn(1, length, sizes.width) for _ in range(2))
    mask = nn.Transformer.generate_square_subsequent_mask(length)  # required, but `is_causal` replaces it
    descent = torch.optim.SGD(layers.parameters(), RATE)

    def step() -> float:
        descent.zero_grad()
        y = x
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            for layer in layers:
                y = layer(y, mask, is_causal=True)
        loss = nn.functional.mse_loss(y.float(), target)
        loss.backward()
        descent.step()
        return loss.item()

    return step


def function_row(sizes: Sizes, name: str, tokens: int) -> dict[str, Any]:
    """One token against a cache, compared with a sum over all its slots, which takes about the time to read them."""
    cache, chunk = decode_inputs(sizes, tokens, jnp.bfloat16 if HALF in name else None)
    query, key, value = chunk
    held = [jnp.concatenate([old[:, : tokens - 1], x], 1) for old, x in ((cache.key, key), (cache.value, value))]
    expected = jax.nn.dot_product_attention(query, *held)

    def step(implementation: str | None, cache: jattn.KVCache, *chunk: jax.Array) -> tuple[jax.Array, jattn.KVCache]:
        z, after = attend_heads(*chunk, cache=cache, implementation=implementation)
        return z, dataclasses.replace(after, length=cache.length)  # so that the next call does the same work

    implementations = {"jattn": None} | ({"pallas_gpu": "pallas_gpu"} if sizes.device == "gpu" else {})
    calls = {}
    for kind, implementation in implementations.items():
        jitted = jax.jit(functools.partial(step, implementation), donate_argnums=0)
        calls[kind] = Contestant(jitted, jax.tree.map(jnp.copy, cache), chunk)  # a copy, which the step donates
    apart = max(agree(f"{name}, {tokens} tokens", one(), expected, sizes.tolerance(name)) for one in calls.values())
    sums = jax.jit(lambda key, value: (key.sum(), value.sum()))
    read = lambda: jax.block_until_ready(sums(calls["jattn"].state.key, calls["jattn"].state.value))
    return _timed(sizes, calls | {"sum": read}, apart)


def decode_inputs(sizes: Sizes, tokens: int, dtype: Any = None) -> tuple[jattn.KVCache, tuple[jax.Array, ...]]:
    """A random cache without the last of ``tokens``, and that token's query, key and value."""
    head_dim, few = sizes.width // sizes.num_heads, sizes.num_kv_heads
    shapes = ((sizes.slots, few), (sizes.slots, few), (1, sizes.num_heads), (1, few), (1, few))
    dtype = dtype or (jnp.float32 if sizes.on_cpu else jnp.bfloat16)
    key, value, *chunk = (jax.random.normal(jax.random.key(i), (1, *x, head_dim), dtype) for i, x in enumerate(shapes))
    return jattn.KVCache(key, value, jnp.full(1, tokens - 1, jnp.int32)), tuple(chunk)


def decoder(sizes: Sizes, tokens: int, name: str, dtype: Any = None) -> Contestant:
    """One token through a module with ``decode=True``; its state is its cache, from ``decode_inputs``."""
    cache, (query, _, _) = decode_inputs(sizes, tokens, dtype)
    options = {"num_kv_heads": sizes.num_kv_heads, "dtype": query.dtype, "decode": True}
    module = MODULES[name](sizes.num_heads, sizes.width, **options, rngs=nnx.Rngs(0))
    module.init_cache((1, sizes.slots, sizes.width), query.dtype)
    module.cached_key[...], module.cached_value[...], module.cache_index[...] = cache.key, cache.value, cache.length[0]
    graph, state, params = nnx.split(module, nnx.Cache, ...)

    def step(state: nnx.State, params: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        module = nnx.merge(graph, state, params)
        index = module.cache_index[...]
        y = module(x)
        module.cache_index[...] = index  # so that the next call does the same work
        return y, nnx.state(module, nnx.Cache)

    return Contestant(jax.jit(step, donate_argnums=0), state, (params, query.reshape(1, 1, sizes.width)))


def agree(what: str, ours: Any, theirs: Any, tolerance: float = 1e-4) -> float:
    """The largest difference, as a share of the largest number in ``theirs``; ``Failed`` above ``tolerance``."""
    # NumPy's maximum keeps NaN; JAX's on a CPU drops it for 4096 or more entries
    both = [np.concatenate([np.ravel(x).astype(np.float32) for x in jax.tree.leaves(x)]) for x in (ours, theirs)]
    apart = float(np.abs(both[0] - both[1]).max() / np.abs(both[1]).max())
    if not apart <= tolerance:  # or NaN
        raise Failed(f"{what}: results differ by {apart:.1e} of the largest number, expected at most {tolerance:g}")
    return apart


def _timed(sizes: Sizes, calls: dict[str, timing.Call], apart: float) -> dict[str, Any]:
    return sizes.medians(calls) | {"apart": apart}


def memory_row(sizes: Sizes, contestant: str, length: int) -> dict[str, Any]:
    """Memory of one training step, from two fresh processes."""
    question = {"contestant": contestant, "length": length, "sizes": dataclasses.asdict(sizes)}
    try:
        at_rest, stepping = (probe.ask("flax_modules", **question, step=step) for step in (False, True))
    except RuntimeError as error:
        raise Failed(f"memory of {contestant}: {error}") from None
    return {"temporaries": stepping[1], "peak": stepping[0] - at_rest[0]}


def answer(contestant: str, length: int, sizes: dict[str, Any], step: bool) -> tuple[float, float]:
    """Peak bytes of this process, which builds the model and, with ``step``, runs one; the step's temporaries."""
    one, temporaries = trainer(Sizes(**sizes), length, contestant), 0
    if step:
        one.step = one.step.lower(one.state, *one.inputs).compile()
        temporaries = one.step.memory_analysis().temp_size_in_bytes
        one()
    return probe.peak_resident(), temporaries


def goals(results: Results) -> list[Goal]:
    """Every goal, for the default sizes on a CPU, and its measured number."""
    known = {(row["step"], row["length"], name): x for row in results.of("times") for name, x in row["medians"].items()}
    known |= {("peak", row["length"], row["contestant"]): row["peak"] for row in results.of("memory")}
    share = lambda above, below, *what: ratio(known.get((*what, above)), known.get((*what, below)))
    train, token = f"{TRAIN}, n =", "one token, 65536 in the cache:"
    most = 1.3 if has_native(results.about["environment"]) else 1.5
    return [
        Goal(f"{train} 256: time of jattn / time of Flax", share("jattn", "flax", TRAIN, 256), 1.0, False),
        Goal(f"{train} 1024: time of jattn / time of Flax", share("jattn", "flax", TRAIN, 1024), 0.5, False),
        Goal(f"{train} 4096: time of Flax / time of jattn", share("flax", "jattn", TRAIN, 4096), 2.5, True),
        Goal(f"{train} 4096: peak resident memory, jattn / Flax", share("jattn", "flax", "peak", 4096), 0.2, False),
        Goal(f"{token} function / sum of the cache (aim: 1.1)", share("jattn", "sum", DECODE, 65536), most, False),
        Goal(f"{token} time of jattn's module / of Flax's", share("jattn", "flax", MODULE, 65536), 1.0, False),
    ]


def markdown(results: Results) -> str:
    """``layers.md``."""
    times, columns = [], [name for name in COLUMNS if any(name in r["medians"] for r in results.of("times"))]
    for r in results.of("times"):
        cells = [f"{r['medians'][name] / 1e3:.2f}" if name in r["medians"] else "-" for name in columns]
        times.append([r["step"], r["length"], *cells, r["rounds"], f"{r['apart']:.0e}"])
    memory = []
    for r in results.of("memory"):
        sizes = (f"{r[kind] / 2**20:.0f}" for kind in ("temporaries", "peak"))
        memory.append([TITLES.get(r["contestant"], r["contestant"]), r["length"], *sizes])
    of_torch = " PyTorch uses `nn.TransformerEncoderLayer` with its own parameters." if "torch" in columns else ""
    return document(
        "# Layers, measured",
        "Medians of calls made in turn, batch 1, float32 unless a step says bfloat16. Training is a step of gradient "
        f"descent on a causal transformer.{of_torch} Decoding computes the n-th token, in bfloat16 except on a CPU; "
        "for comparison, the sum of all the cache's slots. `apart` is how much results differ, as a share of the "
        "largest number. Written by `jattn bench --suite layers`.",
        "## Goals",
        goal_table(goals(results)),
        "## Milliseconds",
        table(["step", "n", *(TITLES.get(name, name) for name in columns), "rounds", "apart"], times),
        "## Memory of a training step, MiB",
        "The peak is the resident memory of a fresh process that compiles and runs one step, minus that of one that "
        "only builds the model and its inputs. The goal is a fifth of Flax's.",
        table(["", "n", "XLA's temporaries", "peak"], memory),
        "## Measured on",
        listed(results.about["environment"] | results.about["sizes"]),
    )


SUITE = Suite(
    name="layers",
    parts={"times": ("step", "length"), "memory": ("contestant", "length")},
    about=about,
    jobs=jobs,
    markdown=markdown,
    shown=lambda results: goal_table(goals(results)),
    sizes=lambda plan: Sizes(seconds=plan.seconds, device=plan.device),
    start=lambda plan: timing.use(plan.device),
)
