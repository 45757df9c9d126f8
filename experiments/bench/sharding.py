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
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from rich.progress import track

from experiments.bench import timing
from experiments.bench.tables import Asked, asked_table
from experiments.runs.folder import write_atomically
from jattn import masks, sharding
from jattn.sharding import ring_blocks
from tests.ring_cases import CASES, mesh_of, numbers

COLLECTIVES = ("collective-permute", "all-gather", "all-to-all", "all-reduce")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one run measures."""

    devices: tuple[int, ...] = (1, 2, 4, 8)
    length: int = 32768
    shapes: tuple[tuple[int, int, int], ...] = ((16, 16, 64), (8, 8, 64), (32, 8, 128))  # N, K, H
    cases: tuple[str, ...] | None = None  # None: all


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
    about = timing.environment() | {"jattn_source": timing.source_digest(), "cpu": timing.cpu_model()}
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
