"""Timing of calls, and facts about the machine.

Contestants are timed in turn within one run, so that a busy machine slows all of them.
"""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

import jattn
from jattn_experiments.bench.goals import NOT_INSTALLED
from jattn_experiments.bench.suite import Refused

Call = Callable[[], Any]  # returns when its work is done


def in_turn(calls: Sequence[Call], seconds: float, least: int, settle: float = 0.0) -> tuple[list[float], int]:
    """The median time of each call, in microseconds, and the number of rounds; the order reverses every round.

    Args:
        calls: what to time; each has run before.
        seconds: no round begins after this time.
        least: the minimum number of rounds, however long they take.
        settle: seconds of rest before every turn, in which the previous call's threads go to sleep; a turn repeats a
            short call for about as long. An extra call before the turn is not timed.
    """
    times: list[list[float]] = [[] for _ in calls]
    repeats = [1] * len(calls)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < least:
        order = range(len(calls))
        for index in order if len(times[0]) % 2 else reversed(order):
            if settle:
                time.sleep(settle)
            calls[index]()  # untimed: restores the memory and caches that others have used
            begin = time.perf_counter()
            for _ in range(repeats[index]):
                calls[index]()
            times[index].append((time.perf_counter() - begin) / repeats[index])
            repeats[index] = max(1, round(settle / times[index][-1]))
    return [float(np.median(one)) * 1e6 for one in times], len(times[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """How long the contestants of a row are timed. Some suites' sizes extend it."""

    seconds: float = 6.0  # per row, all contestants together
    rounds: int = 3  # at least
    settle: float = 0.01  # seconds of rest before every turn

    def medians(self, calls: Mapping[str, Call]) -> dict[str, Any]:
        """The fields ``medians``, microseconds by name of the call, and ``rounds``, from ``in_turn``."""
        for call in calls.values():
            call()  # compiles
        times, count = in_turn(list(calls.values()), self.seconds, least=self.rounds, settle=self.settle)
        return {"medians": {name: round(time, 2) for name, time in zip(calls, times, strict=True)}, "rounds": count}


def environment() -> dict[str, str]:
    """The versions and hardware measured."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "machine": platform.machine(),
        "cores": str(cores()),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "jattn": jattn.__version__,
    }


def machine() -> dict[str, str]:
    """``environment``, the state of jattn's source, its compiled kernels, and the processor."""
    source = {"jattn_source": source_digest(), "jattn-native": native_version()}
    return environment() | source | {"cpu": cpu_model(), "vectors": vectors()}


def about(sizes: Any) -> dict[str, Any]:
    """What all rows of a run of these ``sizes``, a dataclass, share."""
    return {"environment": machine(), "sizes": dataclasses.asdict(sizes)}


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name, from Linux, or elsewhere from Python."""
    name = re.search(r"^model name\s*:(.*)", _cpu_info(), re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def vectors() -> str:
    """The processor's widest vector instructions, from Linux: its name alone does not identify the kind of machine."""
    return next((name for name in ("avx512f", "avx2", "avx", "sve", "asimd") if name in _cpu_info().split()), "unknown")


def _cpu_info() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""


def native_version() -> str:
    """The version of jattn-native, whose kernels a plain call uses on a CPU, or "not installed"."""
    here = importlib.util.find_spec("jattn_native") is not None
    return importlib.metadata.version("jattn-native") if here else NOT_INSTALLED


def source_digest() -> str:
    """A short digest of jattn's source files, which distinguishes states of the same version."""
    folder = Path(jattn.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def memory_bytes(device: str) -> float:
    """The device's memory; for a CPU, the memory that this process may use."""
    if device != "cpu":
        return float(jax.devices()[0].memory_stats()["bytes_limit"])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # the container's limit
    text = limit.read_text().strip() if limit.exists() else "max"
    return float(total if text == "max" else min(total, int(text)))


def use(device: str) -> None:
    """Makes JAX run on ``device``; call it before JAX chooses one. Raises ``Refused`` if JAX finds none."""
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for the peers
    try:
        jax.devices(device)
    except RuntimeError:
        raise Refused(f"--device: JAX finds no {device} here; pip install 'jattn[{device}]' adds its JAX") from None
