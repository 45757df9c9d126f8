"""The looking benchmark: the cost of head statistics relative to attention, and of tracking heads during training.

Shared by all rows: ``environment``, ``sizes``. The parts:

- ``statistics``: ``medians`` (contestant: microseconds) of one head, causal, and ``rounds`` of turns; ``temporaries``
  in bytes that XLA plans for all statistics; ``matrix``: whether the compiled program has a ``[T,S]`` array;
- ``tracking``: per experiment, ``medians`` of ``interval`` steps with and without a look; ``own`` is its interval.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jattn
from jattn import heads
from jattn_experiments import config, train
from jattn_experiments.bench import timing
from jattn_experiments.bench.goals import Goal, goal_table, ratio
from jattn_experiments.bench.markdown import document, listed, table
from jattn_experiments.bench.suite import Job, Results, Suite

FORWARD, ALL, ENTROPY = "blockwise forward", "all statistics", "entropy alone"
KNOWN = " (lse known)"
STEPS, LOOKED = "steps", "steps and a look"


@dataclasses.dataclass(frozen=True)
class Sizes(timing.Turns):
    """Sizes of one run; float32."""

    length: int = 32768
    head_dim: int = 64
    configs: tuple[str, ...] = ("copy", "copy_string", "shift_bank", "induction", "skills")


def jobs(sizes: Sizes) -> Iterator[Job]:
    """The statistics, then tracking in each experiment."""
    yield Job("statistics", {}, functools.partial(statistics, sizes))
    for name in sizes.configs:
        yield Job("tracking", {"config": name}, functools.partial(tracking, sizes, name))


def statistics(sizes: Sizes) -> dict[str, Any]:
    """Statistics of one causal head, and its blockwise forward pass."""
    n = sizes.length
    query, key, value = (jax.random.normal(jax.random.key(i), (n, 1, sizes.head_dim)) for i in range(3))
    tokens = jax.random.randint(jax.random.key(3), (n,), 0, n // 4)

    options = {"is_causal": True, "implementation": "blockwise", "return_residual": True}
    forward = functools.partial(jattn.dot_product_attention, **options)

    def looked(names: list[str] | None, query: jax.Array, key: jax.Array, lse: jax.Array | None = None) -> Any:
        return heads.statistics(query, key, tokens=tokens, names=names, lse=lse, is_causal=True)

    lse = jax.jit(forward)(query, key, value)[1]
    programs = {
        FORWARD: (forward, query, key, value),
        ALL: (functools.partial(looked, None), query, key),
        ENTROPY: (functools.partial(looked, ["entropy"]), query, key),
        ALL + KNOWN: (functools.partial(looked, None), query, key, lse),
        ENTROPY + KNOWN: (functools.partial(looked, ["entropy"]), query, key, lse),
    }
    compiled = {name: jax.jit(fn).lower(*inputs).compile() for name, (fn, *inputs) in programs.items()}
    calls = {name: _finished(compiled[name], *inputs) for name, (_, *inputs) in programs.items()}
    return {
        **sizes.medians(calls),
        "temporaries": compiled[ALL].memory_analysis().temp_size_in_bytes,
        "matrix": f"{n},{n}]" in compiled[ALL].as_text(),
    }


def tracking(sizes: Sizes, name: str) -> dict[str, Any]:
    """Training steps of the config NAME, with and without a look at the heads.

    Runs the default interval of steps; ``own`` is the file's interval.
    """
    setup = train.Setup.of(config.read(config.CONFIGS / f"{name}.yaml"))
    state, interval = setup.init(), config.Train().look_every
    steps = jnp.arange(interval)
    calls = {STEPS: _finished(train.updates(setup), state, steps), LOOKED: _finished(train.chunk(setup), state, steps)}
    return {"interval": interval, "own": setup.config.train.look_every, **sizes.medians(calls)}


def _finished(call: Callable[..., Any], *inputs: Any) -> timing.Call:
    return lambda: jax.block_until_ready(call(*inputs))


def goals(results: Results) -> list[Goal]:
    """Every goal, for the default sizes on a CPU, and its measured number."""
    (one,) = results.of("statistics")
    what, medians = f"one head, n = {results.about['sizes']['length']}, causal:", one["medians"]
    return [
        *(
            Goal(f"{what} {name} / {FORWARD}", ratio(medians.get(name), medians.get(FORWARD)), limit, False)
            for name, limit in ((ALL, 3.0), (ENTROPY, 1.3))
        ),
        Goal(f"{what} temporaries of all statistics", one["temporaries"] / 2**20, 64.0, False, "MiB"),
        Goal(f"{what} [T,S] arrays in the compiled program", float(one["matrix"]), 0.0, False),
        *(
            Goal(f"{row['config']}: time of a look / of {row['interval']} steps", _cost(row["medians"]), 0.1, False)
            for row in results.of("tracking")
        ),
    ]


def _cost(medians: dict[str, float]) -> float:
    return medians[LOOKED] / medians[STEPS] - 1.0


def markdown(results: Results) -> str:
    """``looking.md``."""
    (one,) = results.of("statistics")
    tracked = []
    for row in results.of("tracking"):
        times = [f"{row['medians'][name] / 1e3:.1f}" for name in (STEPS, LOOKED)]
        cost = _cost(row["medians"]) * row["interval"] / row["own"]
        tracked.append([row["config"], *times, f"{row['own']} steps", f"{cost:.3f}", row["rounds"]])
    return document(
        "# Looking, measured",
        "Medians of calls made in turn, float32. Written by `jattn bench --suite looking`.",
        "## Goals",
        goal_table(goals(results)),
        "## Statistics of one head",
        table(["", "milliseconds"], [[name, f"{median / 1e3:.1f}"] for name, median in one["medians"].items()]),
        "## Tracking, milliseconds",
        table(["experiment", STEPS, LOOKED, "configured interval", "cost at that interval", "rounds"], tracked),
        "## Measured on",
        listed(results.about["environment"] | results.about["sizes"]),
    )


SUITE = Suite(
    name="looking",
    parts={"tracking": ("config",), "statistics": ()},
    about=timing.about,
    jobs=jobs,
    markdown=markdown,
    shown=lambda results: goal_table(goals(results)),
    sizes=lambda plan: Sizes(seconds=plan.seconds),
    start=lambda plan: timing.use(plan.device),
)
