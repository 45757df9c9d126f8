"""The looking benchmark: what statistics of heads cost beside the attention itself, and tracking beside training.

What is found is one dict, kept as ``looking.json``: ``environment``, ``sizes``, and

- ``statistics``: ``medians`` (contestant: microseconds) of one head, causal, and ``rounds`` of turns; ``temporaries``
  in bytes that XLA plans for all statistics, ``matrix``, whether the compiled program has a ``[T,S]`` array;
- ``tracking``: for each experiment ``medians`` of ``interval`` steps, with and without a look; ``own`` is its interval.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

import jattn
from experiments import config, train
from experiments.bench import timing
from experiments.bench.tables import Asked, asked_table, ratio
from experiments.runs.folder import write_atomically
from jattn import heads

FORWARD, ALL, ENTROPY = "blockwise forward", "all statistics", "entropy alone"
KNOWN = " (lse known)"
STEPS, LOOKED = "steps", "steps and a look"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one run measures; float32."""

    length: int = 32768
    head_dim: int = 64
    configs: tuple[str, ...] = ("copy", "copy_string", "shift_bank", "induction", "skills")
    seconds: float = 6.0  # a row's calls, all contestants together
    rounds: int = 3  # of turns, at least
    settle: float = 0.01  # seconds of rest before every turn


def measure(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Measures everything and writes ``looking.json`` and ``looking.md`` in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    about = timing.environment() | {"jattn_source": timing.source_digest(), "cpu": timing.cpu_model()}
    found: dict[str, Any] = {"environment": about, "sizes": dataclasses.asdict(sizes), "tracking": []}
    jobs: list[Callable] = [functools.partial(statistics, sizes)]
    jobs += [functools.partial(tracking, sizes, name) for name in sizes.configs]
    for job in track(jobs, "looking"):
        result = job()
        if job is jobs[0]:
            found["statistics"] = result
        else:
            found["tracking"].append(result)
    write_atomically(out / "looking.json", (json.dumps(found, indent=1) + "\n").encode())
    write_atomically(out / "looking.md", markdown(found).encode())
    return found


def statistics(sizes: Sizes) -> dict[str, Any]:
    """Statistics of one causal head, beside its blockwise forward pass."""
    n = sizes.length
    query, key, value = (jax.random.normal(jax.random.key(i), (n, 1, sizes.head_dim)) for i in range(3))
    tokens = jax.random.randint(jax.random.key(3), (n,), 0, n // 4)

    def forward(query, key, value):
        options = {"is_causal": True, "implementation": "blockwise", "return_residual": True}
        return jattn.dot_product_attention(query, key, value, **options)

    def of(names, query, key, lse=None):
        return heads.statistics(query, key, tokens=tokens, names=names, lse=lse, is_causal=True)

    lse = jax.jit(forward)(query, key, value)[1]
    calls = {
        FORWARD: (forward, query, key, value),
        ALL: (functools.partial(of, None), query, key),
        ENTROPY: (functools.partial(of, ["entropy"]), query, key),
        ALL + KNOWN: (functools.partial(of, None), query, key, lse),
        ENTROPY + KNOWN: (functools.partial(of, ["entropy"]), query, key, lse),
    }
    compiled = {name: jax.jit(fn).lower(*inputs).compile() for name, (fn, *inputs) in calls.items()}
    ready = [functools.partial(_finish, compiled[name], inputs) for name, (_, *inputs) in calls.items()]
    return {
        **_timed(sizes, dict(zip(calls, ready, strict=True))),
        "temporaries": compiled[ALL].memory_analysis().temp_size_in_bytes,
        "matrix": f"{n},{n}]" in compiled[ALL].as_text(),
    }


def tracking(sizes: Sizes, name: str) -> dict[str, Any]:
    """Training steps of ``configs/NAME.yaml`` from a look at the heads to the next, with that look and without.

    As many steps as the default interval has; the file's own interval is kept beside.
    """
    setup = train.Setup.of(config.read(Path(__file__).parents[2] / "configs" / f"{name}.yaml"))
    state, interval = setup.init(), config.Train().look_every
    steps = jnp.arange(interval)
    calls = {
        STEPS: functools.partial(_finish, train.updates(setup), (state, steps)),
        LOOKED: functools.partial(_finish, train.chunk(setup), (state, steps)),
    }
    return {"config": name, "interval": interval, "own": setup.config.train.look_every, **_timed(sizes, calls)}


def _timed(sizes: Sizes, calls: dict[str, Callable]) -> dict[str, Any]:
    for call in calls.values():
        call()  # compiles
    medians, rounds = timing.in_turn(list(calls.values()), sizes.seconds, least=sizes.rounds, settle=sizes.settle)
    return {"medians": {name: round(x, 2) for name, x in zip(calls, medians, strict=True)}, "rounds": rounds}


def _finish(call: Callable, inputs: Any) -> None:
    jax.block_until_ready(call(*inputs))


def asked(found: dict[str, Any]) -> list[Asked]:
    """Every number that was asked for, of the default sizes on a CPU, with what was measured."""
    one = found["statistics"]
    share = lambda medians, above, below: ratio(medians.get(above), medians.get(below))
    what = f"one head, n = {found['sizes']['length']}, causal:"
    times = [(f"{what} {name} / {FORWARD}", share(one["medians"], name, FORWARD)) for name in (ALL, ENTROPY)]
    return [
        *(Asked(*line, limit, False) for line, limit in zip(times, (3.0, 1.3), strict=True)),
        Asked(f"{what} temporaries of all statistics", one["temporaries"] / 2**20, 64.0, False, "MiB"),
        Asked(f"{what} [T,S] arrays in the compiled program", float(one["matrix"]), 0.0, False),
        *(
            Asked(f"{row['config']}: time of a look / of {row['interval']} steps", _cost(row["medians"]), 0.1, False)
            for row in found["tracking"]
        ),
    ]


def _cost(medians: dict[str, float]) -> float:
    return medians[LOOKED] / medians[STEPS] - 1.0


def markdown(found: dict[str, Any]) -> str:
    """``looking.md``."""
    rows = ["| | milliseconds |", "|---|---|"]
    rows += [f"| {name} | {median / 1e3:.1f} |" for name, median in found["statistics"]["medians"].items()]
    tracked = [
        f"| experiment | {STEPS} | {LOOKED} | its own interval | cost at that | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["tracking"]:
        times = " | ".join(f"{row['medians'][name] / 1e3:.1f}" for name in (STEPS, LOOKED))
        own = _cost(row["medians"]) * row["interval"] / row["own"]
        tracked.append(f"| {row['config']} | {times} | {row['own']} steps | {own:.3f} | {row['rounds']} |")
    parts = [
        "# Looking, measured",
        "Medians of calls in turn, float32. Written by `python -m experiments bench --suite looking`.",
        *("## What was asked", asked_table(asked(found)), "## Statistics of one head", "\n".join(rows)),
        *("## Tracking, milliseconds", "\n".join(tracked), "## Measured on"),
        "\n".join(f"- {name}: {value}" for name, value in (found["environment"] | found["sizes"]).items()),
    ]
    return "\n\n".join(parts) + "\n"
