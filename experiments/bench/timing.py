"""Timing as ratios: jattn and its peers in turn, in one run, so that a busy machine is busy for all of them."""

import dataclasses
import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import jattn
from experiments.runs.folder import write_atomically

LENGTHS = (64, 512)
SECONDS = 4.0  # a row's calls, all contestants together
SHAPE = {"batch": 1, "num_heads": 8, "head_dim": 64}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: medians in microseconds."""

    length: int
    mask: str
    passes: str
    jattn: float
    jax_nn: float
    rounds: int

    @property
    def ratio(self) -> float:
        """Above 1: jattn is slower."""
        return self.jattn / self.jax_nn


def dispatch() -> list[Row]:
    """Jitted ``jattn.dot_product_attention`` against ``jax.nn``'s, float32, forward and with gradients."""
    cases = [
        (length, mask, passes) for length in LENGTHS for mask in ("full", "causal") for passes in ("forward", "both")
    ]
    rows = []
    for length, mask, passes in track(cases, "dispatch"):
        shape = (SHAPE["batch"], length, SHAPE["num_heads"], SHAPE["head_dim"])
        arrays = [jax.random.normal(jax.random.key(i), shape) for i in range(3)]
        contestants = [
            _call(fn, mask == "causal", passes) for fn in (jattn.dot_product_attention, jax.nn.dot_product_attention)
        ]
        calls = [functools.partial(_finish, contestant, arrays) for contestant in contestants]
        for call in calls:
            call()
        medians, rounds = in_turn(calls, SECONDS, least=10)
        rows.append(Row(length, mask, passes, *medians, rounds))
    return rows


def _call(attention: Callable, is_causal: bool, passes: str) -> Callable:
    def forward(query, key, value):
        return attention(query, key, value, is_causal=is_causal)

    if passes == "forward":
        return jax.jit(forward)
    return jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(forward(*arrays))), (0, 1, 2)))


def _finish(call: Callable, arrays: Sequence[jax.Array]) -> None:
    jax.block_until_ready(call(*arrays))


def in_turn(calls: Sequence[Callable], seconds: float, least: int, settle: float = 0.0) -> tuple[list[float], int]:
    """The median time of each call, in microseconds, and the number of rounds; the order turns round with every round.

    Args:
        calls: what to time; each returns when its work is done, and has run before.
        seconds: when no further round begins.
        least: so many rounds, however long they take.
        settle: seconds of rest before every turn, in which the threads of the one before go to sleep; a turn then
            repeats a short call for about as long. One more call before it is not timed.
    """
    times: list[list[float]] = [[] for _ in calls]
    repeats = [1] * len(calls)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < least:
        order = range(len(calls))
        for index in order if len(times[0]) % 2 else reversed(order):
            if settle:
                time.sleep(settle)
            calls[index]()  # untimed: it brings back the memory and the caches that others have used meanwhile
            begin = time.perf_counter()
            for _ in range(repeats[index]):
                calls[index]()
            times[index].append((time.perf_counter() - begin) / repeats[index])
            repeats[index] = max(1, round(settle / times[index][-1]))
    return [float(np.median(one)) * 1e6 for one in times], len(times[0])


def environment() -> dict[str, str]:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "machine": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "jattn": jattn.__version__,
    }


def cpu_model() -> str:
    """The processor's name, as Linux knows it; elsewhere as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def source_digest() -> str:
    """A short digest of jattn's source files, which tells apart two states of one version."""
    folder = Path(jattn.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| T = S | mask | passes | jattn µs | jax.nn µs | ratio |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.length} | {row.mask} | {row.passes} | {row.jattn:.0f} | {row.jax_nn:.0f} | {row.ratio:.3f} |"
        )
    return "\n".join(lines) + "\n"


def write(rows: Sequence[Row], out: Path) -> None:
    """``dispatch.json`` and ``dispatch.md`` in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"environment": environment(), "shape": SHAPE, "dtype": "float32"}
    found["rows"] = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]
    write_atomically(out / "dispatch.json", (json.dumps(found, indent=1) + "\n").encode())
    about = ", ".join(f"{name} {value}" for name, value in environment().items())
    head = "Jitted `dot_product_attention` against `jax.nn`'s: medians of calls in turn, B=1 N=8 H=64, float32."
    write_atomically(out / "dispatch.md", f"{head}\n\n{table(rows)}\n{about}\n".encode())
