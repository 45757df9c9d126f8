"""Measurements that need a fresh process: ``python -m jattn_experiments.bench.probe JSON`` prints one number.

The JSON has ``measure`` ("compile": seconds; "peak": bytes), ``device``, ``peers``, ``contestant``, ``passes``
("inputs": only the inputs) and the fields of the ``problem``.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jattn_experiments.bench.cases import Problem

ON_CPU = {"JAX_PLATFORMS": "cpu"}


def ask(file: str, question: dict[str, Any], environment: Mapping[str, str] = ON_CPU) -> Any:
    """The answer of a module of this folder, run in a fresh process; JSON both ways.

    Raises:
        RuntimeError: the process failed; the last line of its stderr.
    """
    command = [sys.executable, "-m", f"{__package__}.{file}", json.dumps(question)]
    checkout = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=checkout, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"stopped with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def probe(measure: str, device: str, peers: list[str], contestant: str, problem: Problem, passes: str) -> float:
    """One number from a fresh process. Raises ``RuntimeError`` like ``ask``."""
    question = {"measure": measure, "device": device, "peers": peers, "contestant": contestant, "passes": passes}
    question |= {"problem": dataclasses.asdict(problem)}
    return float(ask("probe", question, ON_CPU if device == "cpu" else {}))


def answer(question: dict[str, Any]) -> float:
    """The number, measured in this process."""
    from jattn_experiments.bench import peers

    problem = Problem(**question["problem"])
    found, _ = peers.contestants(tuple(question["peers"]), question["device"])
    contestant = next(one for one in found if one.name == question["contestant"])
    if question["measure"] == "compile":
        return _compile_seconds(contestant, problem, question["passes"])
    # the results must stay alive until the peak is read
    kept = (
        contestant.inputs(problem) if question["passes"] == "inputs" else contestant.call(problem, question["passes"])()
    )
    peak = peak_resident() if question["device"] == "cpu" else _peak_on_device(contestant)
    del kept
    return peak


def _compile_seconds(contestant: Any, problem: Problem, passes: str) -> float:
    import jax

    inputs = contestant.inputs(problem)
    jax.jit(lambda x: x + 1).lower(inputs[0]).compile()  # JAX's one-time work at the first compilation
    begin = time.perf_counter()
    jax.jit(contestant.function(problem, passes)).lower(*inputs).compile()
    return time.perf_counter() - begin


def peak_resident() -> float:
    """Peak memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss may be inherited from the parent process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return float(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _peak_on_device(contestant: Any) -> float:
    """Peak memory on the accelerator, of the contestant's library, in bytes."""
    if contestant.name.startswith("torch"):
        import torch

        return float(torch.cuda.max_memory_allocated())
    import jax

    return float(jax.devices()[0].memory_stats()["peak_bytes_in_use"])


if __name__ == "__main__":
    print(answer(json.loads(sys.argv[1])))
