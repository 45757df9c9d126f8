"""Compiles rings for pods that this machine does not have.

``python -m tools.pod_compiler`` is a separate process, like ``chip_compiler``. Each program gets a fresh one, which
shows the memory that compilation takes.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
from jattn.sharding import Ring
from jattn_experiments.bench.probe import peak_resident
from tools import pod_stack
from tools.chip_compiler import devices, first_line, serve
from tools.hlo import KERNEL, collectives, longest_gathered, permutes
from tools.pod_arithmetic import HEAD_DIM, KV_HEADS, NUM_HEADS, WINDOW, Program
from tools.pod_stack import Stack


def compiled(**cell: Any) -> dict[str, Any]:
    """The outcome of ``Program(**cell)`` or ``Stack(**cell)``: ``result``, ``reason``, ``seconds`` and measurements.

    The result is "compiled", "too large" for the chip's memory, or "failed". ``seconds`` of processor time and ``peak``
    host memory are those of this process: ``planning`` is tracing and lowering, ``peak`` everything. Bytes are those of
    one chip.
    """
    begin, planning = time.process_time(), {}
    try:
        function, types = pod_stack.problem(Stack(**cell)) if "mesh" in cell else problem(Program(**cell))
        begin = time.process_time()  # without loading the compiler
        lowered = jax.jit(function).lower(*types)
        planning = {"planning": time.process_time() - begin, "planning_peak": peak_resident()}
        program = lowered.compile()
    except Exception as error:
        result = "too large" if "RESOURCE_EXHAUSTED" in str(error) else "failed"
        reason = f"{type(error).__name__}: {first_line(error)}"
        return {"result": result, "reason": reason, "seconds": time.process_time() - begin, **planning}
    memory: Any = program.memory_analysis()
    text: Any = program.as_text()
    return {
        "result": "compiled",
        "reason": None,
        "seconds": time.process_time() - begin,
        **planning,
        "peak": peak_resident(),
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "kernels": len(KERNEL.findall(text)),
        **collectives(text),
        "longest_gathered": longest_gathered(text),
        "permutes": [vars(one) for one in permutes(text)],
    }


def problem(program: Program) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The function to compile and its arguments: query, key and value, and the slopes of ALiBi."""
    chips = devices(program.topology)
    mesh = jax.make_mesh((len(chips),), ("sequence",), (AxisType.Auto,), devices=chips)
    ring = Ring(mesh, "sequence", layout=program.layout)
    lies = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    shapes = [(1, program.length, heads, HEAD_DIM) for heads in (NUM_HEADS, KV_HEADS, KV_HEADS)]
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=lies) for shape in shapes]
    if program.case == "alibi":
        types.append(jax.ShapeDtypeStruct((NUM_HEADS,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())))

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, *slopes: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"is_causal": True}
        if program.case == "window":
            options = {"local_window_size": (WINDOW, 0)}
        elif slopes:
            options["score_mod"] = jattn.score_mods.Alibi(*slopes)
        return jattn.dot_product_attention(query, key, value, implementation=ring, **options)

    if program.passes == "forward":
        return forward, types

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(forward(*arrays).astype(jnp.float32)))

    return jax.grad(loss, tuple(range(len(types)))), types


if __name__ == "__main__":
    serve(compiled)
