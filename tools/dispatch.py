"""The dispatch benchmark: the cost of short jitted calls compared with ``jax.nn``'s, forward and with gradients.

Shared by all rows: ``environment``, ``shape``, ``dtype``. The ``rows`` have ``length``, ``mask``, ``passes``, the
medians ``jattn`` and ``jax_nn`` in microseconds, ``rounds`` of turns, and the ``ratio``. Above 1, jattn is slower.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jattn
from jattn_experiments.bench import timing
from jattn_experiments.bench.markdown import document, table
from jattn_experiments.bench.plan import Plan
from jattn_experiments.bench.problems import PASSES
from jattn_experiments.bench.suite import Job, Results, Suite

LENGTHS = (64, 512)
SECONDS = 4.0  # per row, all contestants together
SHAPE = {"batch": 1, "num_heads": 8, "head_dim": 64}


def about(plan: Plan) -> dict[str, Any]:
    """The environment, and the shape and dtype of the problems."""
    return {"environment": timing.environment(), "shape": SHAPE, "dtype": "float32"}


def jobs(plan: Plan) -> Iterator[Job]:
    """A row per length, mask and passes."""
    for length, mask, passes in itertools.product(LENGTHS, ("full", "causal"), PASSES):
        key = {"length": length, "mask": mask, "passes": passes}
        yield Job("rows", key, functools.partial(row, **key))


def row(length: int, mask: str, passes: str) -> dict[str, Any]:
    """Times both contestants."""
    shape = (SHAPE["batch"], length, SHAPE["num_heads"], SHAPE["head_dim"])
    arrays = [jax.random.normal(jax.random.key(i), shape) for i in range(3)]
    functions = (jattn.dot_product_attention, jax.nn.dot_product_attention)
    calls = [_call(function, arrays, mask == "causal", passes) for function in functions]
    for call in calls:
        call()
    (ours, theirs), rounds = timing.in_turn(calls, SECONDS, least=10)
    return {"jattn": ours, "jax_nn": theirs, "rounds": rounds, "ratio": ours / theirs}


def _call(
    attention: Callable[..., jax.Array], arrays: Sequence[jax.Array], is_causal: bool, passes: str
) -> timing.Call:
    forward = functools.partial(attention, is_causal=is_causal)
    gradient = jax.grad(lambda *arrays: jnp.sum(jnp.sin(forward(*arrays))), (0, 1, 2))
    compiled = jax.jit(forward if passes == "forward" else gradient)
    return lambda: jax.block_until_ready(compiled(*arrays))


def shown(results: Results) -> str:
    """The rows as a Markdown table."""
    lines = [
        [
            row["length"],
            row["mask"],
            row["passes"],
            f"{row['jattn']:.0f}",
            f"{row['jax_nn']:.0f}",
            f"{row['ratio']:.3f}",
        ]
        for row in results.of("rows")
    ]
    return table(["T = S", "mask", "passes", "jattn µs", "jax.nn µs", "ratio"], lines)


def markdown(results: Results) -> str:
    """``dispatch.md``."""
    return document(
        "Jitted `dot_product_attention` compared with `jax.nn`'s: medians of calls in turn, B=1 N=8 H=64, float32.",
        shown(results),
        ", ".join(f"{name} {value}" for name, value in results.about["environment"].items()),
    )


SUITE = Suite(
    name="dispatch",
    parts={"rows": ("length", "mask", "passes")},
    about=about,
    jobs=jobs,
    shown=shown,
    markdown=markdown,
)
