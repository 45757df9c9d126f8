"""``"pallas_tpu"``: our own TPU kernels, for any mask and score function made of elementwise operations.

This file defines what the kernels reject. The kernels are in ``passes.py`` and ``block_sums.py``, on top of
``pipeline.py`` (the loops over blocks), ``tile.py`` (the scores of a tile), ``in_place.py`` (arrays read in place) and
``schedule.py`` (the list of blocks).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jattn._blocks.block_lists import two_sizes
from jattn._blocks.reduction import Reduction
from jattn._core.call import Call
from jattn._mods.arrays import cdiv
from jattn.kernels.pallas_tiles import PallasKernel
from jattn.kernels.pallas_tpu.schedule import MOST, SMALL, TILE

ENTRIES = 2**17  # blocks in scalar memory: half a mebibyte
OLDEST = (0, 12)  # JAX version in which ``in_place`` is tested; 0.10's interpreter cannot reshape bitcast references
LONGEST = 2**18  # T + S for sums by key and by offset, which stay in vector memory


@dataclasses.dataclass(frozen=True)
class PallasTPU(PallasKernel):
    """``implementation=``: ``"pallas_tpu"`` with custom settings. Untested on hardware: chosen only by name.

    ``block_sizes``: queries and keys per block, multiples of 128; ``pipeline.make_plan`` sets the default.
    ``interpret``: run on any platform in Pallas' interpreter, for tests: True or a ``pltpu.InterpretParams``.
    ``in_place``: read and write ``[B,T,N,H]`` without temporaries. This pays off if the axes have this order in memory,
    as in a program's arguments and results. Between a model's layers, the compiler chooses another order, which the
    kernels read by default; reading in place would require copies. Requires bfloat16, an H of 128 and 2, 4 or a
    multiple of 8 heads.
    """

    name: ClassVar[str] = "pallas_tpu"
    platform: ClassVar[str | None] = "tpu"
    never_run: ClassVar[bool] = True
    wide_query: ClassVar[bool] = True
    dtypes: ClassVar[tuple[DTypeLike, ...]] = (jnp.float32, jnp.bfloat16)

    block_sizes: tuple[int, int] | None = None
    interpret: Any = False
    in_place: bool = False

    def __post_init__(self):
        if self.block_sizes is not None:
            object.__setattr__(self, "block_sizes", two_sizes(self.block_sizes, TILE))

    def refusals(self, call: Call) -> Iterator[tuple[bool, str]]:
        yield from super().refusals(call)
        oldest = ".".join(map(str, OLDEST))
        old = self.in_place and jax.__version_info__ < OLDEST
        yield old, f"in_place needs JAX {oldest} or newer, not {jax.__version__}"
        T, S = call.query.shape[1], call.key.shape[1]
        sizes = self.block_sizes or (SMALL, SMALL)
        rows, columns = (cdiv(length, size) for length, size in zip((T, S), sizes, strict=True))
        too_many = max(rows, columns) > MOST or rows * columns > ENTRIES
        yield too_many, f"{rows} by {columns} blocks are too many for scalar memory"

    def reduction_reason(self, call: Call, reduction: Reduction) -> str | None:
        length = call.query.shape[1] + call.key.shape[1]
        reason = super().reduction_reason(call, reduction)
        if reason is None and length > LONGEST and reduction.named("column_sum", "diagonal_sum"):
            return f"sums by key or by offset take T + S up to {LONGEST}, got {length}"
        return reason
