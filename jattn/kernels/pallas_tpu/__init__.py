"""``"pallas_tpu"``: our own TPU kernels, for any mask and score function of elementwise operations.

This file is what the kernels refuse; they are in ``kernel.py`` and ``reduction.py``, on top of ``pipeline.py`` (the
loops over blocks), ``tile.py`` (the scores of a tile) and ``schedule.py`` (the list of blocks).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from jattn.blocks.block_lists import two_sizes
from jattn.core.arguments import AttentionArgs
from jattn.kernels import Reduction
from jattn.kernels.pallas_tiles import PallasKernel
from jattn.kernels.pallas_tpu.schedule import MOST, SMALL, TILE
from jattn.mods.arrays import cdiv

ENTRIES = 2**17  # blocks in scalar memory: half a mebibyte
LONGEST = 2**18  # T + S of sums by key and by offset, which stay in vector memory


@dataclasses.dataclass(frozen=True)
class PallasTPU(PallasKernel):
    """``implementation=``: ``"pallas_tpu"`` with your own settings. Never run on hardware: taken by name only.

    ``block_sizes``: queries and keys per block, multiples of 128; ``pipeline.make_plan`` sets the default.
    ``interpret``: run on any platform in Pallas' interpreter, for tests; True, or a ``pltpu.InterpretParams``.
    """

    name: ClassVar[str] = "pallas_tpu"
    platform: ClassVar[str | None] = "tpu"
    never_run: ClassVar[bool] = True
    dtypes: ClassVar[tuple[DTypeLike, ...]] = (jnp.float32, jnp.bfloat16)

    block_sizes: tuple[int, int] | None = None
    interpret: Any = False

    def __post_init__(self):
        if self.block_sizes is not None:
            object.__setattr__(self, "block_sizes", two_sizes(self.block_sizes, TILE))

    def refusals(self, args: AttentionArgs) -> Iterator[tuple[bool, str]]:
        yield from super().refusals(args)
        T, S = args.query.shape[1], args.key.shape[1]
        sizes = self.block_sizes or (SMALL, SMALL)
        rows, columns = (cdiv(length, size) for length, size in zip((T, S), sizes, strict=True))
        too_many = max(rows, columns) > MOST or rows * columns > ENTRIES
        yield too_many, f"{rows} by {columns} blocks are too many for scalar memory"

    def reduction_reason(self, args: AttentionArgs, reduction: Reduction) -> str | None:
        length = args.query.shape[1] + args.key.shape[1]
        reason = super().reduction_reason(args, reduction)
        if reason is None and length > LONGEST and reduction.named("column_sum", "diagonal_sum"):
            return f"sums by key or by offset take T + S up to {LONGEST}, got {length}"
        return reason
