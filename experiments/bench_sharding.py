"""The sharding benchmark: a ring of devices beside one device: numbers, memory, traffic and balance.

On virtual CPU devices, so no speed: what they share are two cores. What is found is one dict, kept as
``sharding.json``: ``environment``, ``sizes``, and

- ``numbers``: for each case, devices and layout the largest differences to the unsharded call in float32, of ``values``
  (output and log-sum-exp) and ``gradients``, each over the largest number that it should be;
- ``memory``: for each shape, devices and layout the ``temporaries`` in bytes that XLA plans on each device for values
  and gradients, and how many collectives of each kind the compiled program holds;
- ``balance``: for each devices and layout the blocks that each device computes, causal.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.progress import track

import jattn
from experiments import bench
from experiments.bench_tables import Asked, asked_table
from experiments.folder import write_atomically
from jattn import masks, score_mods, sharding
from jattn.sharding import Ring, from_zigzag, ring_blocks, to_zigzag

B, T, S, N, K, H, D = 2, 32, 32, 4, 2, 6, 5
RNG = np.random.default_rng(0)
COLLECTIVES = ("collective-permute", "all-gather", "all-to-all", "all-reduce")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one run measures."""

    devices: tuple[int, ...] = (1, 2, 4, 8)
    length: int = 32768
    shapes: tuple[tuple[int, int, int], ...] = ((16, 16, 64), (8, 8, 64), (32, 8, 128))  # N, K, H
    cases: tuple[str, ...] | None = None  # None: all


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: options as they are, and arrays that are differentiated, beside query, key and value."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)  # bias, sinks; params of the mod
    mod: Callable[[Any], Any] | None = None  # params -> score_mod
    shape: tuple[int, int, int, int] = (T, S, N, K)
    amplify: float = 1.0  # of the queries
    against: str = "xla"  # the implementation of the unsharded call


def _floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


_EVEN = lambda b, h, q, kv: (q + kv + h + b) % 2 == 0
_IDS = np.sort(RNG.integers(0, 5, (B, T)), axis=1)
_SLOPES = np.array([0.5, 0.25, 0.125, 0.06], np.float32)

CASES = {
    "plain": Case(),
    "causal": Case({"is_causal": True}),
    "as many key heads as queries": Case({"is_causal": True}, shape=(T, S, 4, 4)),
    "one key head": Case({"is_causal": True}, shape=(T, S, 3, 1)),
    "cross, causal, bottom-right by positions": Case(
        {"is_causal": True, "query_positions": np.arange(16, 32)}, shape=(16, 32, N, K)
    ),
    "positions that differ by sequence, keys backwards": Case(
        {
            "is_causal": True,
            "query_positions": np.stack([np.arange(T), np.arange(T) // 2]),
            "kv_positions": np.arange(S)[::-1].copy(),
        }
    ),
    "window": Case({"local_window_size": (5, 2)}),
    "causal window": Case({"is_causal": True, "local_window_size": (4, 0)}),
    "window far away: a ring with gaps": Case({"mask": lambda b, h, q, kv: abs(q - kv) == 17}),
    "nobody sees anything": Case({"mask": masks.Prefix(0)}),
    "prefix": Case({"mask": masks.Causal() | masks.Prefix(9)}),
    "segments": Case({"mask": masks.Segments(_IDS) & masks.Causal()}),
    "padding, one sequence empty": Case({"mask": masks.Padding(np.array([19, 0]))}),
    "not a window": Case({"mask": ~masks.SlidingWindow(3, 3)}),
    "table": Case({"mask": masks.Dense(RNG.random((B, N, T, S)) < 0.3)}),
    "block mask of a function": Case({"mask": jattn.block_mask(lambda b, h, q, kv: (q * kv) % 7 == 1, T, S)}),
    "function of sequence and head, causal": Case({"mask": masks.Causal() & _EVEN}),
    "mask array": Case({"mask": RNG.random((1, N, T, S)) < 0.5}),
    "mask array by key": Case({"mask": RNG.random((B, 1, 1, S)) < 0.5}),
    "lengths, one of them 0": Case(
        {"query_seq_lengths": np.array([30, 11]), "key_value_seq_lengths": np.array([17, 0]), "is_causal": True}
    ),
    "bias": Case({"is_causal": True}, {"bias": _floats(1, N, T, S)}),
    "bias by head alone": Case({}, {"bias": _floats(B, N, 1, 1)}),
    "scale": Case({"is_causal": True, "scale": 0.7}),
    "sinks": Case({"is_causal": True, "key_value_seq_lengths": np.array([32, 0])}, {"sinks": _floats(N)}),
    "alibi": Case({"is_causal": True}, {"params": _SLOPES}, score_mods.Alibi),
    "T5 bias": Case(
        {}, {"params": _floats(8, N)}, lambda table: score_mods.RelativeBias(table, bidirectional=True, max_distance=16)
    ),
    "soft cap, learned": Case({}, {"params": np.array(1.5, np.float32)}, score_mods.SoftCap, amplify=4.0),
    "alibi, then a soft cap": Case(
        {"is_causal": True},
        {"params": _SLOPES},
        lambda slopes: score_mods.then(score_mods.Alibi(slopes), score_mods.SoftCap(2.0)),
    ),
    "function that captures a table": Case(
        {"is_causal": True},
        {"params": _SLOPES},
        lambda table: lambda s, b, h, q, kv: s * 0.5 + (kv - q) * table[h] * (1 + b),
    ),
    "dropout": Case({"is_causal": True, "dropout_rate": 0.3, "dropout_rng": jax.random.key(3)}),
    "dropout, the same for all heads": Case(
        {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3), "broadcast_dropout": True}
    ),
    # "xla" scales the product and not the query, and at such logits that alone changes weights by 3e-4
    "logits of +-1e4": Case(amplify=3e3, against="blockwise"),
}


def inputs(case: Case) -> dict[str, Any]:
    """Everything that is differentiated."""
    (T, S, N, K), rng = case.shape, np.random.default_rng(1)
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, D)}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {"query": found["query"] * case.amplify} | case.arrays


def call(case: Case, given: dict[str, Any], implementation: Any, options: dict[str, Any] | None = None) -> Any:
    """``(out, lse)`` of one case."""
    given = dict(given)
    params = given.pop("params", None)
    if case.mod is not None:
        given["score_mod"] = case.mod(params)
    options = case.options if options is None else options
    return jattn.dot_product_attention(**given, **options, implementation=implementation, return_residual=True)


def with_gradients(fn: Callable, given: dict[str, Any]) -> Any:
    """``(out, lse)`` of ``fn(given)``, and gradients of both together, each entry weighed differently."""

    def both(given: dict[str, Any]) -> Any:
        out, lse = fn(given)
        weigh = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        seen = lse != -jnp.inf
        return jnp.sum(out * weigh) + jnp.sum(jnp.where(seen, lse * weigh[..., 0], 0.0)), (out, lse)

    (_, results), gradients = jax.value_and_grad(both, has_aux=True)(given)
    return results, gradients


def values_alone(fn: Callable, given: dict[str, Any]) -> Any:
    """``with_gradients`` without any."""
    return fn(given), {}


@functools.cache
def expected(name: str, differentiate: Callable = with_gradients) -> Any:
    """Results and gradients of the unsharded call, by the dense formula where nothing else is said."""
    case = CASES[name]
    compiled = jax.jit(lambda given: differentiate(lambda x: call(case, x, case.against), given))
    return jax.tree.map(np.asarray, compiled(inputs(case)))


def in_a_ring(name: str, how: Ring, differentiate: Callable = with_gradients) -> Any:
    """The same in a ring, with everything by slot in the order of its layout and the results in their own order.

    ``differentiate``: ``with_gradients``, or ``values_alone``.
    """
    case, devices = CASES[name], how.mesh.shape[how.axis_name]
    zigzag = how.layout == "zigzag"

    def order(turn: Callable, name: str, x: Any) -> Any:
        axes = {"query": (1,), "key": (1,), "value": (1,), "query_positions": (-1,), "kv_positions": (-1,)}
        turned = (-2, -1) if name in ("bias", "mask") and hasattr(x, "ndim") else axes.get(name, ())
        for axis in turned if zigzag else ():
            x = x if x.shape[axis] == 1 else turn(x, devices, axis)
        return x

    options = {name: order(to_zigzag, name, x) for name, x in case.options.items()}

    def natural(given: dict[str, Any]) -> Any:
        given = {name: order(to_zigzag, name, x) for name, x in given.items()}
        return tuple(order(from_zigzag, "query", x) for x in call(case, given, how, options))

    return jax.jit(lambda given: differentiate(natural, given))(inputs(case))


def off(got: Any, wanted: Any) -> float:
    """The largest difference, over the largest finite number wanted; infinite where one is NaN or wrongly infinite."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        finite = np.isfinite(other)
        if not (one[~finite] == other[~finite]).all() or not np.isfinite(one[finite]).all():
            return np.inf
        scale = np.abs(other[finite]).max(initial=1e-3)
        worst = max(worst, np.abs(one[finite] - other[finite]).max(initial=0.0) / scale)
    return float(worst)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """The first devices in a row, named ``sequence``."""
    return jax.make_mesh((devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices])


def numbers(name: str, devices: int, layout: str, block_sizes: tuple[int, int] | None = None) -> dict[str, Any]:
    """One case in one ring."""
    how = Ring(mesh_of(devices), "sequence", layout=layout, block_sizes=block_sizes)
    results, gradients = in_a_ring(name, how)
    wanted_results, wanted_gradients = expected(name)
    each = [off(gradients[key], wanted_gradients[key]) for key in gradients]
    return {"case": name, "devices": devices, "layout": layout, "values": off(results, wanted_results),
            "gradients": max(each)}  # fmt: skip


def memory(length: int, shape: tuple[int, int, int], devices: int, layout: str) -> dict[str, Any]:
    """What XLA plans for values and gradients of one causal call."""
    mesh, (N, K, H) = mesh_of(devices), shape
    lies = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    arrays = [jax.ShapeDtypeStruct((1, length, heads, H), jnp.float32, sharding=lies) for heads in (N, K, K)]

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        how = {"mesh": mesh, "axis_name": "sequence", "layout": layout}
        return jnp.sum(sharding.ring_attention(query, key, value, is_causal=True, **how) ** 2)

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile()
    text = compiled.as_text()
    return {
        "heads": shape,
        "devices": devices,
        "layout": layout,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        **{kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in COLLECTIVES},
    }


def balance(length: int, devices: int, layout: str) -> dict[str, Any]:
    """Blocks that each device computes, causal."""
    blocks = ring_blocks(masks.Causal(), length, length, devices=devices, layout=layout)
    return {"devices": devices, "layout": layout, "blocks": blocks.sum(1).tolist(), "steps": blocks.T.tolist()}


def measure(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Measures everything and writes ``sharding.json`` and ``sharding.md`` in ``out``.

    Raises:
        ValueError: there are fewer devices than asked for.
    """
    if len(jax.devices()) < max(sizes.devices):
        raise ValueError(f"the sharding suite needs {max(sizes.devices)} devices, there are {len(jax.devices())}")
    out.mkdir(parents=True, exist_ok=True)
    about = bench.environment() | {"jattn_source": bench.source_digest(), "cpu": bench.cpu_model()}
    found: dict[str, Any] = {"environment": about, "sizes": dataclasses.asdict(sizes)}
    rings = [(devices, layout) for devices in sizes.devices for layout in sharding.LAYOUTS]
    jobs = {
        "numbers": [functools.partial(numbers, name, *ring) for name in sizes.cases or CASES for ring in rings],
        "memory": [functools.partial(memory, sizes.length, shape, *ring) for shape in sizes.shapes for ring in rings],
        "balance": [functools.partial(balance, sizes.length, *ring) for ring in rings],
    }
    for part, todo in jobs.items():
        found[part] = [job() for job in track(todo, part)]
    write_atomically(out / "sharding.json", (json.dumps(found, indent=1) + "\n").encode())
    write_atomically(out / "sharding.md", markdown(found).encode())
    return found


def asked(found: dict[str, Any]) -> list[Asked]:
    """Every number that was asked for, with what was measured."""
    rows = found["memory"]
    ring = [row for row in rows if row["devices"] > 1]
    lines = [
        Asked(f"worst {what} of {len(found['numbers'])} rings against one device, relative to the largest, millionths",
              max(row[what] for row in found["numbers"]) * 1e6, limit, False)
        for what, limit in (("values", 10.0), ("gradients", 100.0))
    ]  # fmt: skip
    for layout in sharding.LAYOUTS:
        for shape in dict.fromkeys(tuple(row["heads"]) for row in rows):
            sizes = [row["temporaries"] for row in rows if row["layout"] == layout and tuple(row["heads"]) == shape]
            least = min((one / other for one, other in zip(sizes, sizes[1:], strict=False)), default=None)
            heads = "N={} K={} H={}".format(*shape)
            lines.append(
                Asked(f"{layout}, {heads}: temporaries, least fall by a doubling of devices", least, 1.8, True)
            )
    lines.append(Asked("all-gathers in compiled rings", float(sum(row["all-gather"] for row in rows)), 0.0, False))
    permutes = min((row["collective-permute"] for row in ring), default=None)
    lines.append(Asked("collective-permutes in compiled rings, fewest", permutes, 1.0, True))
    for row in found["balance"]:
        if row["layout"] == "zigzag" and row["devices"] > 1:
            what = f"zigzag, causal, {row['devices']} devices: blocks of the busiest / mean"
            lines.append(Asked(what, _busiest(row["blocks"]), 1.1, False))
    return lines


def _busiest(blocks: list[int]) -> float:
    return max(blocks) / (sum(blocks) / len(blocks))


def markdown(found: dict[str, Any]) -> str:
    """``sharding.md``."""
    memory = [
        "| heads | layout | devices | temporaries, MiB | collective-permutes | all-gathers |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["memory"]:
        heads = "N={} K={} H={}".format(*row["heads"])
        counts = f"{row['collective-permute']} | {row['all-gather']}"
        memory.append(f"| {heads} | {row['layout']} | {row['devices']} | {row['temporaries'] / 2**20:.1f} | {counts} |")
    balance = ["| layout | devices | blocks of each device | busiest / mean |", "|---|---|---|---|"]
    for row in found["balance"]:
        blocks = " ".join(map(str, row["blocks"]))
        balance.append(f"| {row['layout']} | {row['devices']} | {blocks} | {_busiest(row['blocks']):.2f} |")
    numbers = ["| case | values | gradients |", "|---|---|---|"]
    for name in dict.fromkeys(row["case"] for row in found["numbers"]):
        rows = [row for row in found["numbers"] if row["case"] == name]
        worst = " | ".join(f"{max(row[what] for row in rows):.1e}" for what in ("values", "gradients"))
        numbers.append(f"| {name} | {worst} |")
    length = found["sizes"]["length"]
    parts = [
        "# Many devices, measured",
        "On virtual CPU devices, so memory and numbers, no speed. Written by `python -m experiments bench --suite "
        "sharding`.",
        *("## What was asked", asked_table(asked(found))),
        *(f"## Memory of each device: values and gradients of one causal call at n = {length}", "\n".join(memory)),
        *(f"## Work of each device: blocks of a causal call at n = {length}", "\n".join(balance)),
        "## Numbers: worst difference over all rings, relative to the largest number of the unsharded call",
        *("\n".join(numbers), "## Measured on"),
        "\n".join(f"- {name}: {value}" for name, value in (found["environment"] | found["sizes"]).items()),
    ]
    return "\n\n".join(parts) + "\n"
