"""Measurements that need a fresh process: ``python -m jattn_experiments.bench.probe MODULE JSON``.

It calls ``answer`` of that module in this folder with the JSON's named arguments and prints the result. This module's
``answer`` is the peak memory of attention, or its compilation time.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn_experiments.bench.problems import Problem

ON_CPU = {"JAX_PLATFORMS": "cpu"}


def ask(module: str, environment: Mapping[str, str] = ON_CPU, **question: Any) -> Any:
    """The answer of a module, from a fresh process; ``RuntimeError`` with the last line of its stderr if it failed."""
    command = [sys.executable, "-m", "jattn_experiments.bench.probe", module, json.dumps(question)]
    checkout = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=checkout, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"stopped with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def probe(measure: str, device: str, peers: Sequence[str], contestant: str, problem: Problem, passes: str) -> float:
    """Seconds for "compile", bytes for "peak" (of the inputs alone for the passes "inputs"). Raises like ``ask``."""
    question = {"measure": measure, "device": device, "peers": peers, "contestant": contestant, "passes": passes}
    return ask("probe", ON_CPU if device == "cpu" else {}, **question, fields=dataclasses.asdict(problem))


def answer(
    measure: str, device: str, peers: Sequence[str], contestant: str, passes: str, fields: dict[str, Any]
) -> float:
    """The number, measured in this process; ``fields`` are those of the problem."""
    import jax

    from jattn_experiments.bench.peers import contestants

    problem = Problem(**fields)
    one = next(one for one in contestants(peers, device)[0] if one.name == contestant)
    if measure == "compile":
        inputs = one.inputs(problem)
        jax.jit(lambda x: x + 1).lower(inputs[0]).compile()  # JAX's one-time work at the first compilation
        begin = time.perf_counter()
        jax.jit(one.function(problem, passes)).lower(*inputs).compile()
        return time.perf_counter() - begin
    alive = one.inputs(problem) if passes == "inputs" else one.repeated(problem, passes)()  # until the peak is read
    peak = peak_resident() if device == "cpu" else _peak_on_device(contestant)
    del alive
    return peak


def peak_resident() -> float:
    """Peak memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss may be inherited from the parent process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return float(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _peak_on_device(contestant: str) -> float:
    """Peak memory on the accelerator, of the contestant's library, in bytes."""
    if contestant.startswith("torch"):
        import torch

        return float(torch.cuda.max_memory_allocated())
    import jax

    return float(jax.devices()[0].memory_stats()["peak_bytes_in_use"])


if __name__ == "__main__":
    module, question = sys.argv[1:]
    print(json.dumps(importlib.import_module(f"jattn_experiments.bench.{module}").answer(**json.loads(question))))
