"""The sharding benchmark: numbers, memory, traffic and balance of a ring of devices, compared with one device.

It uses virtual CPU devices that share two cores, so it does not measure speed. All rows share ``environment`` and
``sizes``. The parts:

- ``numbers``: per case, devices and layout, the largest differences from the unsharded call in float32, of ``values``
  (output and log-sum-exp) and ``gradients``, each divided by the largest expected number;
- ``memory``: per shape, devices and layout, the ``temporaries`` in bytes that XLA plans on each device for values and
  gradients, and the number of collectives of each kind in the compiled program;
- ``balance``: per devices and layout, the blocks that each device computes, causal.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jattn import masks, sharding
from jattn.sharding import LAYOUTS, ring_blocks
from jattn_experiments.bench import timing
from jattn_experiments.bench.goals import Goal, goal_table
from jattn_experiments.bench.markdown import document, listed, table
from jattn_experiments.bench.plan import Plan
from jattn_experiments.bench.suite import Job, Refused, Results, Suite
from tests.ring_cases import CASES, mesh_of, numbers
from tools.hlo import collectives


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one run."""

    devices: tuple[int, ...] = (1, 2, 4, 8)
    length: int = 32768
    shapes: tuple[tuple[int, int, int], ...] = ((16, 16, 64), (8, 8, 64), (32, 8, 128))  # N, K, H
    cases: tuple[str, ...] | None = None  # None: all


def memory(length: int, shape: tuple[int, int, int], devices: int, layout: str) -> dict[str, Any]:
    """The memory that XLA plans for values and gradients of one causal call."""
    mesh, (N, K, H) = mesh_of(devices), shape
    lies = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    arrays = [jax.ShapeDtypeStruct((1, length, heads, H), jnp.float32, sharding=lies) for heads in (N, K, K)]

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        how = {"mesh": mesh, "axis_name": "sequence", "layout": layout}
        return jnp.sum(sharding.ring_attention(query, key, value, is_causal=True, **how) ** 2)

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile()
    return {"temporaries": compiled.memory_analysis().temp_size_in_bytes, **collectives(compiled.as_text())}


def balance(length: int, devices: int, layout: str) -> dict[str, Any]:
    """The blocks that each device computes, causal."""
    blocks = ring_blocks(masks.Causal(), length, length, devices=devices, layout=layout)
    return {"blocks": blocks.sum(1).tolist(), "steps": blocks.T.tolist()}


def jobs(sizes: Sizes) -> Iterator[Job]:
    """Jobs for every case, every shape and the balance, for every number of devices and layout.

    Raises:
        Refused: there are too few devices.
    """
    if len(jax.devices()) < max(sizes.devices):
        raise Refused(f"the sharding suite needs {max(sizes.devices)} devices, got {len(jax.devices())}")
    rings = list(itertools.product(sizes.devices, LAYOUTS))
    for name, (devices, layout) in itertools.product(sizes.cases or CASES, rings):
        key = {"case": name, "devices": devices, "layout": layout}
        yield Job("numbers", key, functools.partial(numbers, name, devices, layout))
    for shape, (devices, layout) in itertools.product(sizes.shapes, rings):
        key = {"heads": shape, "devices": devices, "layout": layout}
        yield Job("memory", key, functools.partial(memory, sizes.length, shape, devices, layout))
    for devices, layout in rings:
        key = {"devices": devices, "layout": layout}
        yield Job("balance", key, functools.partial(balance, sizes.length, devices, layout))


def start(plan: Plan) -> None:
    """Makes JAX provide eight CPU devices, before it initializes."""
    jax.config.update("jax_num_cpu_devices", 8)
    timing.use("cpu")


def goals(results: Results) -> list[Goal]:
    """Every goal and its measured number."""
    rows, compared = results.of("memory"), results.of("numbers")
    ring = [row for row in rows if row["devices"] > 1]
    lines = [
        Goal(f"worst {what} of {len(compared)} rings, millionths of one device's largest number",
              max(row[what] for row in compared) * 1e6, limit, False)
        for what, limit in (("values", 10.0), ("gradients", 100.0))
    ]  # fmt: skip
    for layout in LAYOUTS:
        for shape in dict.fromkeys(tuple(row["heads"]) for row in rows):
            sizes = [row["temporaries"] for row in rows if row["layout"] == layout and tuple(row["heads"]) == shape]
            least = min((one / other for one, other in zip(sizes, sizes[1:], strict=False)), default=None)
            what = f"{layout}, {_heads(shape)}: smallest factor by which temporaries fall per doubling of devices"
            lines.append(Goal(what, least, 1.8, True))
    lines.append(Goal("all-gathers in compiled rings", float(sum(row["all-gather"] for row in rows)), 0.0, False))
    permutes = min((row["collective-permute"] for row in ring), default=None)
    lines.append(Goal("collective-permutes in compiled rings, the fewest", permutes, 1.0, True))
    for row in results.of("balance"):
        if row["layout"] == "zigzag" and row["devices"] > 1:
            what = f"zigzag, causal, {row['devices']} devices: blocks of the busiest device / mean"
            lines.append(Goal(what, _busiest(row["blocks"]), 1.1, False))
    return lines


def _busiest(blocks: list[int]) -> float:
    return max(blocks) / (sum(blocks) / len(blocks))


def _heads(shape: Sequence[int]) -> str:
    return "N={} K={} H={}".format(*shape)


def markdown(results: Results) -> str:
    """``sharding.md``."""
    memory = []
    for row in results.of("memory"):
        counts = row["collective-permute"], row["all-gather"]
        size = f"{row['temporaries'] / 2**20:.1f}"
        memory.append([_heads(row["heads"]), row["layout"], row["devices"], size, *counts])
    balance = []
    for row in results.of("balance"):
        blocks = row["blocks"]
        balance.append([row["layout"], row["devices"], " ".join(map(str, blocks)), f"{_busiest(blocks):.2f}"])
    numbers = []
    for name in dict.fromkeys(row["case"] for row in results.of("numbers")):
        rows = results.of("numbers", case=name)
        numbers.append([name, *(f"{max(row[what] for row in rows):.1e}" for what in ("values", "gradients"))])
    length = results.about["sizes"]["length"]
    return document(
        "# Many devices, measured",
        "On virtual CPU devices, which show memory and numbers but no speed. Written by `python -m tools sharding`.",
        "## Goals",
        goal_table(goals(results)),
        f"## Memory of each device: values and gradients of one causal call at n = {length}",
        table(["heads", "layout", "devices", "temporaries, MiB", "collective-permutes", "all-gathers"], memory),
        f"## Work of each device: blocks of a causal call at n = {length}",
        table(["layout", "devices", "blocks of each device", "busiest / mean"], balance),
        "## Numbers: worst difference over all rings, relative to the largest number of the unsharded call",
        table(["case", "values", "gradients"], numbers),
        "## Measured on",
        listed(results.about["environment"] | results.about["sizes"]),
    )


SUITE = Suite(
    name="sharding",
    parts={
        "numbers": ("case", "devices", "layout"),
        "memory": ("heads", "devices", "layout"),
        "balance": ("devices", "layout"),
    },
    about=timing.about,
    jobs=jobs,
    markdown=markdown,
    shown=lambda results: goal_table(goals(results)),
    sizes=lambda plan: Sizes(),
    start=start,
)
