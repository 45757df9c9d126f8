"""Compiles attention for TPUs and GPUs that this machine does not have.

In ``ENVIRONMENT``, ``python -m tools.chip_compiler`` reads cells from stdin, one JSON object per line, and answers each
with one line: the outcome. It is a separate process because compilers read their environment when they are loaded, and
because a compiler that aborts ends its process. Nothing is executed.
"""

import functools
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jattn
from jattn.kernels.pallas_gpu import PallasGPU
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.masks import Causal, Segments
from jattn.score_mods import Alibi, SoftCap, alibi_slopes, then
from jattn_experiments.bench.problems import CAP, WINDOW
from jattn_experiments.bench.worker import Worker, serve
from tools.hlo import ARRAY, KERNEL

# Without a TPU, libtpu must not ask the cloud for one, and must allow other processes to load it as well.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
# The smallest topologies.
TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# The facts that XLA needs about a GPU. Compute capability 9.0 and 10.0 have the same limits: "Technical Specifications
# per Compute Capability" in the CUDA C++ Programming Guide.
CUDA = 'platform_name: "CUDA"  dnn_version_info { major: 9 minor: 10 }'
OF_ALL_GPUS = """
  device_vendor: "NVIDIA Corporation"
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  fpus_per_core: 128  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  device_address_bits: 64  ecc_enabled: true
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"  dnn_version: "9.10.0"
"""
# An H100 (SXM) and a B200. The B200's numbers come from XLA's own description:
# https://github.com/openxla/xla/blob/main/xla/backends/gpu/target_config/specs/b200.txtpb
GPUS = {
    "h100": """
  name: "NVIDIA H100 80GB HBM3"  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 84942979072  pcie_bandwidth: 34359738368
""",
    "b200": """
  name: "NVIDIA B200"  platform_version: "Compute Capability 10.0a"
  cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }
  core_count: 148  memory_bandwidth: 7672320000000  l2_cache_size: 132644864  clock_rate_ghz: 1.965
  device_memory_size: 191514411008  pcie_bandwidth: 68719476736
""",
}
# jattn's kernels for statistics; other chips use blockwise.
FOLDS = {**dict.fromkeys(TOPOLOGIES, PallasTPU()), "h100": PallasGPU()}
CASES = {
    "full": "every query sees every key",
    "causal": "`is_causal=True`",
    "window": f"`local_window_size=({WINDOW}, 0)`",
    "segments": "packed documents, causal; their ids `[T]` are an argument of the compiled function",
    "alibi-softcap": f"ALiBi, then a soft cap of {CAP:g}, as `score_mod`, causal",
    "function": "plain functions as `mask` (every fourth earlier key) and as `score_mod` (with an array over heads)",
}
NUM_HEADS = 8
LIMIT = 900.0  # seconds for one cell
CHECKOUT = Path(__file__).parents[1]


class Compiler(Worker):
    """The process that compiles, which runs ``module``."""

    def __init__(self, module: str = "tools.chip_compiler"):
        # Workers run in another folder, so they need the path to this package.
        path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__((sys.executable, "-m", module), ENVIRONMENT | {"PYTHONPATH": path}, LIMIT)


# The facts of a cell that was not compiled.
NOTHING = {"temporaries": None, "kernels": None, "spills": None}


def _outcome(result: str, reason: str | None, seconds: float, **sizes: int | None) -> dict[str, Any]:
    return {"result": result, "reason": reason, "seconds": round(seconds, 1), **NOTHING, **sizes}


def compiled(implementation: str, chip: str, head_dim: int, length: int, case: str, passes: str) -> dict[str, Any]:
    """``result``, its ``reason``, ``seconds`` of processor time, a program's ``temporaries``, ``kernels``, ``spills``.

    The result is "compiled", "refused" (by jattn) or "failed". It is "failed" if the compiler raised, for example when
    a kernel's blocks exceed the chip's memory, or if the program holds an array of T * S elements. Temporaries are in
    bytes. Kernels are calls of Mosaic or cuDNN. Spills are the bytes that a thread of a GPU kernel stores for lack of
    registers, the largest number among kernels that this process compiles for the first time.
    """
    begin = time.process_time()
    sharding = SingleDeviceSharding(_device(chip))
    try:
        function, arrays = problem(implementation, head_dim, length, case, passes, FOLDS.get(chip))
        types = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arrays]
        with tempfile.TemporaryDirectory() as notes:
            os.environ |= {"MOSAIC_GPU_DUMP_TO": notes, "MOSAIC_GPU_DUMP_PTXAS": "1"}
            program = jax.jit(function).lower(*types).compile()
            spills = [int(SPILLED.findall(path.read_text())[0]) for path in Path(notes).glob("*.ptxas")]
    except jattn.Unsupported as refused:
        return _outcome("refused", first_line(refused), time.process_time() - begin)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return _outcome("failed", reason, time.process_time() - begin)
    text = program.as_text()
    dense = dense_arrays(text, length**2)
    sizes = {
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "kernels": len(KERNEL.findall(text)),
        "spills": max(spills, default=None),
    }
    reason = f"holds T * S elements: {', '.join(dense[:3])}" if dense else None
    return _outcome("failed" if dense else "compiled", reason, time.process_time() - begin, **sizes)


def problem(
    implementation: str, head_dim: int, length: int, case: str, passes: str, folds: Any = None
) -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]:
    """The function to compile, and the shape and dtype of each of its arguments.

    The arguments are query, key and value ``[1,T,8,head_dim]`` in bfloat16, and the case's own arrays. The gradient is
    that of ``sum(sin(out))`` with respect to the first three. "fold" computes every statistic of ``jattn.heads`` from
    query, key and the log-sum-exp. Its gradient is that of the entropy, as in an entropy penalty, by these three.

    ``folds``: the ``implementation=`` of statistics.
    """
    heads = ((1, length, NUM_HEADS, head_dim), jnp.bfloat16)
    arrays = [heads, heads, heads]
    if implementation == "fold":
        arrays[2] = ((1, length, NUM_HEADS), jnp.float32)
    arrays += {"segments": [((length,), jnp.int32)], "function": [((NUM_HEADS,), jnp.float32)]}.get(case, [])

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, *extra: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(query, key, value, implementation=implementation, **options(case, *extra))

    def fold(query: jax.Array, key: jax.Array, lse: jax.Array, *extra: jax.Array) -> Any:
        names = None if passes == "forward" else ("entropy",)
        how = {"lse": lse, "names": names, "implementation": folds}
        statistics = jattn.heads.statistics(query, key, **how, **options(case, *extra))
        return statistics if passes == "forward" else statistics["entropy"]

    forward = fold if implementation == "fold" else attention
    if passes == "forward":
        return forward, arrays
    return jax.grad(lambda *arrays: jnp.sum(jnp.sin(forward(*arrays))), (0, 1, 2)), arrays


def options(case: str, *extra: jax.Array) -> dict[str, Any]:
    """The case as arguments of ``jattn.dot_product_attention``."""
    match case:
        case "causal":
            return {"is_causal": True}
        case "window":
            return {"local_window_size": (WINDOW, 0)}
        case "segments":
            return {"mask": Segments(extra[0]) & Causal()}
        case "alibi-softcap":
            return {"is_causal": True, "score_mod": then(Alibi(alibi_slopes(NUM_HEADS)), SoftCap(CAP))}
        case "function":
            strength = extra[0]
            return {
                "mask": lambda b, h, q, kv: ((q - kv) % 4 == 0) & (kv <= q),
                "score_mod": lambda score, b, h, q, kv: score - strength[h] * jnp.log1p(abs(q - kv)),
            }
    return {}


SPILLED = re.compile(r"(\d+) bytes spill stores")


def dense_arrays(text: str, pairs: int) -> list[str]:
    """The arrays in the text of an optimized program that have at least ``pairs`` elements, the largest first.

    Arrays of type ``s8[n]`` are left out: they are views of another array's bytes, which XLA copies piece by piece.
    """
    sizes = {}
    for array in ARRAY.finditer(text):
        lengths = [int(one.strip("<=")) for one in array[2].split(",") if one]
        if array[1] != "s8" or len(lengths) > 1:
            sizes[array[0]] = math.prod(lengths)
    return sorted((array for array, size in sizes.items() if size >= pairs), key=lambda array: -sizes[array])


def _device(chip: str) -> Any:
    return devices(TOPOLOGIES.get(chip, f"{chip}:1x1x1"))[0]


@functools.cache
def devices(topology: str) -> Sequence[Any]:
    """The chips of a topology such as ``"v5p:2x2x2"``; a GPU's sizes are slices, hosts per slice, GPUs per host."""
    chip, _, sizes = topology.partition(":")
    if chip in GPUS:
        config = f"{CUDA} gpu_device_info {{ {OF_ALL_GPUS} {GPUS[chip]} }}"
        return topologies.get_topology_desc(chip, platform="cuda", target_config=config, topology=sizes).devices
    return topologies.get_topology_desc(topology, platform="tpu").devices


def first_line(error: Exception) -> str:
    """The first line of the exception's message, at most 300 characters."""
    return next(iter(str(error).strip().splitlines()), "")[:300]


if __name__ == "__main__":
    serve(compiled)
