"""Shared by the kernels of ``pallas_gpu``: the arrays that they read, and the scores of a tile."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn._blocks.plan import block_table, visibility
from jattn._core.call import Call
from jattn._mods.arrays import pad_end
from jattn._mods.tile_function import QUERY
from jattn.kernels import pallas_tiles
from jattn.kernels.pallas_gpu import mosaic_ops
from jattn.kernels.pallas_gpu.schedule import ROWS, Lists, row_lists
from jattn.kernels.pallas_tiles import Ref

Interpret = plgpu.InterpretGPUParams | None
LOG2E = math.log2(math.e)


class Operands:
    """The arrays that a kernel reads from global memory in addition to its rows and columns."""

    def __init__(self, padded: tuple[int, int], by_key: bool):
        self.padded, self.by_key = padded, by_key
        self.arrays: list[jax.Array] = []

    def scalars(self, array: jax.Array) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def vector(self, over: str, array: jax.Array) -> int:
        return self.scalars(pad_end(array, (*array.shape[:2], self.padded[over != QUERY])))

    def pairs(self, array: jax.Array) -> int:
        array = pad_end(array, (*array.shape[:2], *self.padded))
        return self.scalars(array.swapaxes(2, 3) if self.by_key else array)


class Tile(pallas_tiles.Tile):
    """64 rows and all or part of a block of columns: ``[queries, keys]``, or ``[keys, queries]`` by key."""

    def __init__(self, at: "Place", masked: bool, product: jax.Array | None):
        super().__init__(at.scores, masked)
        self.at, self.raw = at, product
        # Queries past the end need no mask if they are rows: their results, computed from zeros, are not written.
        self.block = at.plan.size if at.plan.by_key else (1, at.plan.size[1])
        self.shape = ROWS, at.plan.inner if product is None else product.shape[1]

    def compute(self, fn: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        return mosaic_ops.run(fn, *arrays)[0]

    def product(self) -> jax.Array:
        """``q·k``, already computed by the kernel."""
        assert self.raw is not None
        return self.raw

    def _on_scores(self) -> Callable[[jax.Array], jax.Array]:
        """Includes masked pairs, so that ``visible``, which takes a register per pair, is used only once, at the end.

        ``through_score_mod``, which relies on a stand-in for masked pairs, therefore does not work for these tiles.
        """
        assert self.source.score_mod is not None
        evaluate = self._evaluated(self.source.score_mod)
        return lambda s: jnp.broadcast_to(evaluate(s), s.shape).astype(s.dtype)

    def log2_scores(self) -> jax.Array:
        """The scores divided by ln 2, for base-2 exponentials."""
        if self.source.bias is not None or self.source.score_mod is not None:
            return self.scores() * LOG2E
        s = self.product() * (self.scalar(self.source.scale) * LOG2E)
        return s if self.visible is None else jnp.where(self.visible, s, -jnp.inf)

    def weights_and_slope(self, row_max: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``exp2(log2_scores - row_max)``, and its product with the score function's derivative; 0 where masked."""
        slope = None
        if self.source.score_mod is None:
            log2_p = self.log2_scores()
        else:
            modified = self._on_scores()
            # Elementwise, so the derivative along 1 gives every pair's derivative.
            s, slope = mosaic_ops.run(lambda s: jax.jvp(modified, (s,), (jnp.ones_like(s),)), self._biased())
            log2_p = (s if self.visible is None else jnp.where(self.visible, s, -jnp.inf)) * LOG2E
        p = jnp.exp2(log2_p - row_max)
        if self.visible is not None:
            p = jnp.where(log2_p == -jnp.inf, 0.0, p)  # even in a row that sees NaN
        if slope is None:
            return p, p
        return p, slope * p if self.visible is None else jnp.where(p != 0.0, slope * p, 0.0)

    def slots(self) -> tuple[jax.Array, jax.Array]:
        def slots(axis: int) -> jax.Array:
            iota = plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=plgpu.Layout.WGMMA)
            return iota + self.at.starts[axis]

        return slots(self.axis(True)), slots(self.axis(False))

    def axis(self, of_queries: bool) -> int:
        """The axis of the queries or keys."""
        return int(of_queries == self.at.plan.by_key)

    def scalar(self, added: int) -> jax.Array:
        return self.at.ins[added][self._of_head(added)]

    def vector(self, over: str, added: int) -> jax.Array:
        axis = self.axis(over == QUERY)
        return jax.lax.broadcast_in_dim(self.line(added, axis), self.shape, [axis])

    def line(self, added: int, axis: int) -> jax.Array:
        """The tile's part of an array of ``Operands.vector`` over ``axis``, ``[rows]`` or ``[columns]``."""
        at = pl.ds(self.at.starts[axis], self.shape[axis])
        ref = self.at.ins[added].at[(*self._of_head(added), at)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def pairs(self, added: int) -> jax.Array:
        at = (pl.ds(start, size) for start, size in zip(self.at.starts, self.shape, strict=True))
        ref = self.at.ins[added].at[(*self._of_head(added), *at)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)

    def _of_head(self, added: int) -> tuple[jax.Array | int, jax.Array | int]:
        shape = self.at.plan.operands.arrays[added].shape
        b, n = self.at.head
        return 0 if shape[0] == 1 else b, 0 if shape[1] == 1 else n


@dataclasses.dataclass
class GPUPlan:
    """One kernel call: its blocks and inputs."""

    call: Call
    interpret: Interpret
    by_key: bool
    size: tuple[int, int]  # queries and keys of a block
    lists: Lists
    operands: Operands
    num_splits: int = 1  # number of programs that share a row of blocks

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.size[self.by_key]

    @property
    def inner(self) -> int:
        """Columns of a block."""
        return self.size[not self.by_key]

    @property
    def kinds(self) -> tuple[bool, bool]:
        """Whether there may be full blocks, and whether there may be others."""
        entries, counts = self.lists
        if not isinstance(entries, np.ndarray):
            return True, True
        kinds = (entries & 1)[np.arange(entries.shape[2]) < counts[..., None]]
        return bool((kinds == 0).any()), bool((kinds == 1).any())

    def scores(self) -> pallas_tiles.Scores:
        """The scores, with their arrays among the operands."""
        return pallas_tiles.Scores.of(self.call, self.operands, visibility(self.call).all_seen())


def make_plan(call: Call, by_key: bool, shape: tuple[int, int], interpret: Interpret, num_splits: int = 1) -> GPUPlan:
    """The plan of a kernel whose rows are queries, or keys if ``by_key``; ``shape``: a block's rows and columns.

    ``num_splits``: the number of programs that share a row of blocks, each with its own results.
    """
    size = (shape[1], shape[0]) if by_key else shape
    tables = block_table(call, size)
    T, S = (count * one for count, one in zip(tables[0].shape[1:], size, strict=True))
    lists = row_lists(*tables, by_key, num_splits)
    return GPUPlan(call, interpret, by_key, size, lists, Operands((T, S), by_key), num_splits)


@dataclasses.dataclass
class Place:
    """The location of a warpgroup's tile, and its inputs."""

    plan: GPUPlan
    scores: pallas_tiles.Scores
    ins: Sequence[Ref]
    head: tuple[jax.Array, jax.Array]  # sequence and head of the queries
    starts: tuple[Any, Any]  # the first slots of rows and columns; None before the first block

    @property
    def scale(self) -> jax.Array:
        """The factor that multiplies ``q·k``."""
        return self.tile().scalar(self.scores.scale)

    def tile(self, masked: bool = False, product: jax.Array | None = None) -> Tile:
        """The scores at this location; ``product``: ``q·k``."""
        return Tile(self, masked, product)
