"""What tests of separate processes share: a tiny experiment, and an environment in which results are reproducible."""

import os
from pathlib import Path

TINY = """
name: tiny
task: {kind: shift_bank, symbols: 3, length: 12, offsets: [1, 3]}
model: {model_dim: 4, num_heads: 2, head_dim: 2}
train: {seeds: 1, steps: 12, warmup: 1, batch: 4, log_every: 1, look_every: 2, checkpoint_every: 4}
evaluate: {batch: 8}
"""


def environment(cache: Path, **others: str) -> dict[str, str]:
    """The variables of a process that runs on one thread and keeps its compiled programs in ``cache``.

    With several threads, XLA's CPU backend may add in a different order each time.
    """
    return {
        **os.environ,
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **others,
    }
