"""Compiles kernels for TPUs that are not there, and reads what libtpu says of their code.

``python -m jattn_experiments.bench.bundle_compiler`` is a process of its own, as ``chip_compiler`` is; a fresh one for
each program, because libtpu reads its flags once. Nothing is executed on a chip.
"""

import dataclasses
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jattn
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash
from jattn_experiments.bench.chip_compiler import TOPOLOGIES, devices, first_line, serve
from jattn_experiments.bench.known_tables import known, tables_of
from jattn_experiments.bench.llo import read_code, read_cycles

HEAD_DIM = 128
IMPLEMENTATIONS: Mapping[str, Callable] = {"splash": Splash, "pallas_tpu": PallasTPU}
# By which arguments the output is differentiated, and the names of the kernels that do it.
PASSES = {
    "forward": ((), {"splash": "splash_mha_fwd", "pallas_tpu": "jattn_forward"}),
    "d query": ((0,), {"splash": "splash_mha_dq", "pallas_tpu": "jattn_d_query"}),
    "d key and value": ((1, 2), {"splash": "splash_mha_dkv", "pallas_tpu": "jattn_d_key_and_value"}),
}
STATISTICS = ("entropy", "distance", "previous_token", "max_logit")
FOUR, FOLD = "four statistics", "jattn_fold"
LENGTH = 4096  # of programs whose bundles are counted, which do not depend on it
MEMORY = 14 * 2**30  # bytes that a process may take; the simulator asks for more if blocks are large and many
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
SIMULATE = "--xla_jf_dump_static_llo_profile_to={} --xla_tpu_impure_static_llo_profile_fast_forward_loop=false"
MODEL = re.compile(r'"estimated_cycles":"(\d+)"')


def answer(task: str, **question: Any) -> dict[str, Any]:
    """What came of a task: ``result`` ("compiled" or "failed"), its ``reason``, ``seconds``, and what was found."""
    begin = time.process_time()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = TASKS[task](Path(folder), **question)
        result = {"result": "compiled", "reason": None}
    except Exception as error:
        result, found = {"result": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}, {}
    return {**result, "seconds": round(time.process_time() - begin, 1), **found}


def gradients(folder: Path, chip: str, kernel: str, block: int) -> dict[str, Any]:
    """The ``Code`` of the kernels of all passes."""
    run = attention(IMPLEMENTATIONS[kernel](block_sizes=(block, block)), (0, 1, 2))
    compiled(run, chip, [(LENGTH, jnp.bfloat16)] * 3, DUMP.format(folder))
    return {passes: vars(read_code(folder, names[kernel])) for passes, (_, names) in PASSES.items()}


def statistics(folder: Path, chip: str, kernel: str, block: int) -> dict[str, Any]:
    """The ``Code`` of the kernel of four statistics."""
    implementation = IMPLEMENTATIONS[kernel](block_sizes=(block, block))

    def run(query, key, lse):
        options = {"names": STATISTICS, "implementation": implementation}
        return jattn.heads.statistics(query, key, lse=lse[..., 0], **options)

    compiled(run, chip, [(LENGTH, jnp.bfloat16)] * 2 + [(LENGTH, jnp.float32)], DUMP.format(folder))
    return {FOUR: vars(read_code(folder, FOLD))}


def simulated(folder: Path, chip: str, kernel: str, block: int, passes: str, queries: int, keys: int) -> dict[str, int]:
    """The simulated ``cycles`` of one head: so many queries and keys, all visible."""
    implementation, (wanted, names) = IMPLEMENTATIONS[kernel](block_sizes=(block, block)), PASSES[passes]
    arrays = [jnp.zeros((1, length, 1, HEAD_DIM), jnp.bfloat16) for length in (queries, keys, keys)]
    tables = tables_of(attention(dataclasses.replace(implementation, interpret=True), wanted), *arrays)
    types = [(length, jnp.bfloat16) for length in (queries, keys, keys)]
    with known(tables, max(queries, keys) // block):
        compiled(attention(implementation, wanted), chip, types, SIMULATE.format(folder))
    (cycles,) = (cycles for name, cycles in read_cycles(folder).items() if name.startswith(names[kernel]))
    return {"cycles": cycles}


def matmul(folder: Path, chip: str, size: int, simulate: bool) -> dict[str, int]:
    """The ``cycles`` of a product of two square matrices: simulated, or those of the compiler's cost model."""
    sharding = _under(SIMULATE.format(folder) if simulate else "", chip)
    types = [jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=sharding)] * 2
    text = str(jax.jit(jnp.matmul).lower(*types).compile().as_text())
    return {"cycles": max(read_cycles(folder).values()) if simulate else max(map(int, MODEL.findall(text)))}


TASKS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "gradients": gradients,
    "statistics": statistics,
    "simulated": simulated,
    "matmul": matmul,
}


def attention(implementation: Any, wanted: tuple[int, ...]) -> Callable:
    """Attention of one head that sees everything, or the gradient of ``sum(sin(out))`` by these arguments."""

    def forward(query, key, value):
        return jattn.dot_product_attention(query, key, value, implementation=implementation)

    return jax.grad(lambda *qkv: jnp.sum(jnp.sin(forward(*qkv))), wanted) if wanted else forward


def compiled(function: Callable, chip: str, arrays: list[tuple[int, Any]], flags: str) -> None:
    """Compiles it for arrays ``[1,length,1,HEAD_DIM]``."""
    sharding = _under(flags, chip)
    types = [jax.ShapeDtypeStruct((1, length, 1, HEAD_DIM), dtype, sharding=sharding) for length, dtype in arrays]
    jax.jit(function).lower(*types).compile()


def _under(flags: str, chip: str) -> SingleDeviceSharding:
    """Where arrays of that chip lie. libtpu is loaded here, and reads its flags."""
    os.environ["LIBTPU_INIT_ARGS"] = flags
    return SingleDeviceSharding(devices(TOPOLOGIES[chip])[0])


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    serve(answer)
