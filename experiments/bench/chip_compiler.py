"""Compiles attention for TPUs that are not there: ``python -m experiments.bench.chip_compiler`` in ``ENVIRONMENT``.

It reads cells from stdin, one JSON object a line, and answers each with one line: what came of it. It is a process of
its own because libtpu reads its environment when it is loaded, and a compiler that aborts takes its process along.
Nothing is executed.
"""

import atexit
import functools
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jattn
from experiments.bench.cases import CAP, WINDOW
from jattn.choice import IMPLEMENTATIONS
from jattn.masks import Causal, Segments
from jattn.score_mods import Alibi, SoftCap, alibi_slopes, then

# Without a TPU, libtpu must not ask the cloud which one there is, and another process may have it loaded, too.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1"}  # the smallest that there are
CASES = {
    "full": "every query sees every key",
    "causal": "`is_causal=True`",
    "window": f"`local_window_size=({WINDOW}, 0)`",
    "segments": "packed documents, causal; their ids `[T]` an argument of the compiled function",
    "alibi-softcap": f"ALiBi, then a soft cap of {CAP:g}, as `score_mod`, causal",
    "function": "plain functions as `mask` (every fourth earlier key) and as `score_mod` (with an array of the heads)",
}
NUM_HEADS = 8
LIMIT = 900.0  # seconds for one cell


class Compiler:
    """The process that compiles. It starts at the first cell, again after one that ended it, and ends with this one."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", __name__), limit: float = LIMIT):
        self.command, self.limit = command, limit
        self.process: subprocess.Popen | None = None
        atexit.register(self.close)

    def __call__(self, **cell: Any) -> dict[str, Any]:
        """What came of a cell, as ``compiled`` returns it; failed if the process ended or took too long."""
        if self.process is None:
            self._start()
        process, begin = self.process, time.perf_counter()
        try:
            process.stdin.write(json.dumps(cell).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], self.limit)
            answer = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, answer = True, b""
        if answer:
            return json.loads(answer)
        reason = self._end() if ready else f"took more than {self.limit:g} seconds"
        self.close()
        return _found("failed", reason, seconds=time.perf_counter() - begin)

    def _start(self) -> None:
        self.errors = tempfile.TemporaryFile()
        checkout, environment = Path(__file__).parents[2], os.environ | ENVIRONMENT
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(self.command, cwd=checkout, env=environment, **pipes)

    def _end(self) -> str:
        status = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing on stderr")
        return f"the compiler ended with status {status}: {said[:300]}"

    def kill(self) -> None:
        """Ends the process, from another thread: the cell that it compiles has failed. It would not hear Ctrl-C."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.errors.close()
            self.process = None


def _found(result: str, reason: str | None, seconds: float, **sizes: int) -> dict[str, Any]:
    none = {"temporaries": None, "kernels": None}
    return {"result": result, "reason": reason, "seconds": round(seconds, 1), **none, **sizes}


def compiled(implementation: str, chip: str, head_dim: int, length: int, case: str, passes: str) -> dict[str, Any]:
    """``result``, its ``reason``, ``seconds`` of processor time, and a program's ``temporaries`` and ``kernels``.

    The result is "compiled", "refused" by jattn, or "failed": the compiler raised, as it does where a kernel's blocks
    exceed VMEM, or the program holds an array of T * S elements. Temporaries are in bytes; kernels are calls of Mosaic.
    """
    begin = time.process_time()
    if implementation not in (*IMPLEMENTATIONS, "fold"):
        return _found("refused", "not in this version of jattn", 0.0)
    sharding = SingleDeviceSharding(_device(chip))
    try:
        function, arrays = problem(implementation, head_dim, length, case, passes)
        types = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arrays]
        program = jax.jit(function).lower(*types).compile()
    except jattn.Unsupported as refused:
        return _found("refused", _first_line(refused), time.process_time() - begin)
    except Exception as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        return _found("failed", reason, time.process_time() - begin)
    text = program.as_text()
    dense = dense_arrays(text, length**2)
    sizes = {
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
    }
    reason = f"holds T * S elements: {', '.join(dense[:3])}" if dense else None
    return _found("failed" if dense else "compiled", reason, time.process_time() - begin, **sizes)


def problem(
    implementation: str, head_dim: int, length: int, case: str, passes: str
) -> tuple[Callable, list[tuple[tuple[int, ...], Any]]]:
    """The function to compile, and the shape and dtype of each of its arguments.

    These are query, key and value ``[1,T,8,head_dim]`` in bfloat16, and what the case adds. The gradient is that of
    ``sum(sin(out))`` by the three. "fold" computes every statistic of ``jattn.heads`` from query, key and the
    log-sum-exp; its gradient is that of the entropy, as in a penalty on it, by these three.
    """
    heads = ((1, length, NUM_HEADS, head_dim), jnp.bfloat16)
    arrays = [heads, heads, heads]
    if implementation == "fold":
        arrays[2] = ((1, length, NUM_HEADS), jnp.float32)
    arrays += {"segments": [((length,), jnp.int32)], "function": [((NUM_HEADS,), jnp.float32)]}.get(case, [])

    def attention(query, key, value, *extra):
        return jattn.dot_product_attention(query, key, value, implementation=implementation, **options(case, *extra))

    def fold(query, key, lse, *extra):
        names = None if passes == "forward" else ("entropy",)
        found = jattn.heads.statistics(query, key, lse=lse, names=names, **options(case, *extra))
        return found if passes == "forward" else found["entropy"]

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


# An array's type in the text of a program: f32[8,128], pred[], s32[<=8].
ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,<=]+)\]")


def dense_arrays(text: str, pairs: int) -> list[str]:
    """The arrays in the text of an optimized program that have at least ``pairs`` elements, the largest first.

    Without those of type ``s8[n]``: they are a view of another array's bytes, which XLA copies piece by piece.
    """
    sizes = {}
    for found in ARRAY.finditer(text):
        lengths = [int(one.strip("<=")) for one in found[2].split(",") if one]
        if found[1] != "s8" or len(lengths) > 1:
            sizes[found[0]] = math.prod(lengths)
    return sorted((array for array, size in sizes.items() if size >= pairs), key=lambda array: -sizes[array])


@functools.cache
def _device(chip: str) -> Any:
    return topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices[0]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def answers(questions: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """What came of each cell, one JSON object a line."""
    for line in questions:
        yield compiled(**json.loads(line))


if __name__ == "__main__":
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for answer in answers(sys.stdin):
        print(json.dumps(answer), file=said, flush=True)
