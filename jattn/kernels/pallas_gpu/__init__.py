"""``"pallas_gpu"``: our own GPU kernels, for any mask and score function made of elementwise operations.

This file defines what the kernels reject. The kernels are in ``passes.py`` and ``row_sums.py``, on top of
``pipeline.py`` (the loop over blocks), ``tile.py`` (the scores of a tile) and ``schedule.py`` (the lists of blocks).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jattn._core import deferred
from jattn._core.call import Call
from jattn._mods.arrays import cdiv
from jattn.kernels.pallas_gpu.schedule import ROWS
from jattn.kernels.pallas_tiles import PallasKernel

OLDEST = (0, 11, 2)  # JAX version: the kernel language changes with each
ENTRIES = 2**24  # blocks in the lists: 64 MiB


@dataclasses.dataclass(frozen=True)
class PallasGPU(PallasKernel):
    """``implementation=``: ``"pallas_gpu"`` with custom settings. Untested on hardware: chosen only by name.

    ``interpret``: a ``jax.experimental.pallas.mosaic_gpu.InterpretGPUParams``, for tests that call ``forward``,
    ``backward`` and ``reduce`` directly: Pallas' interpreter calls Python, which a deferred operation cannot do.
    """

    name: ClassVar[str] = "pallas_gpu"
    platform: ClassVar[str | None] = "gpu"
    never_run: ClassVar[bool] = True
    wide_query: ClassVar[bool] = True
    dtypes: ClassVar[tuple[DTypeLike, ...]] = (jnp.float16, jnp.bfloat16)

    interpret: Any = None

    def refusals(self, call: Call) -> Iterator[tuple[bool, str]]:
        oldest = ".".join(map(str, OLDEST))
        yield jax.__version_info__ < OLDEST, f"it needs JAX {oldest} or newer, not {jax.__version__}"
        yield from super().refusals(call)
        T, S = call.query.shape[1], call.key.shape[1]
        rows, columns = cdiv(T, ROWS), cdiv(S, ROWS)
        yield rows * columns > ENTRIES, f"{rows} by {columns} blocks are too many"

    def lowering_reason(self, platform: str) -> str | None:
        """Also rejects GPUs other than Hopper. For an unknown GPU, as in an export, JAX compiles for Hopper."""
        devices = (deferred.device(), jax.devices()[0])
        chip = next((x.compute_capability for x in devices if hasattr(x, "compute_capability")), "9.0")
        needs = "it needs an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200)"
        return super().lowering_reason(platform) or (None if chip == "9.0" else f"{needs}, not {chip}")
