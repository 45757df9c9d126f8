"""What the kernels of ``pallas_gpu`` share: the lists of blocks, the arrays that they read, and their tiles."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import staged
from jattn.blocks import all_seen
from jattn.kernels import Unsupported, tiles
from jattn.kernels.blockwise import block_table, mask_arguments
from jattn.kernels.gpu_functions import run
from jattn.request import Request
from jattn.separate import QUERY
from jattn.tables import namespace, pad_end

ROWS = 64  # of a warpgroup: a wgmma computes so many
LOG2E = math.log2(math.e)


def block_lists(any_visible: Any, all_visible: Any, by_key: bool, parts: int = 1) -> tuple[Any, Any]:
    """The blocks of each row, int32 ``[B|1, rows, most]``, full ones first, and their number ``[B|1, rows]``.

    An entry is twice the block's column, plus 1 unless the block is full. A row without blocks gets one that is not.
    ``parts``: deals out each row's list to as many rows, at most one for each column.
    """
    xp = namespace(any_visible, all_visible)
    if by_key:
        any_visible, all_visible = any_visible.swapaxes(1, 2), all_visible.swapaxes(1, 2)
    rank = xp.where(all_visible, 0, xp.where(any_visible, 1, 2))
    found, columns = (rank < 2).sum(2), rank.shape[2]
    most = max(int(found.max()), parts) if xp is np else columns
    order = xp.argsort(rank, axis=2, stable=True)[..., :most]
    entries = 2 * order + (xp.take_along_axis(rank, order, 2) > 0).astype(order.dtype)
    if parts > 1:
        entries = pad_end(entries, (*entries.shape[:2], -(-most // parts) * parts))
        entries = entries.reshape(*entries.shape[:2], -1, parts).swapaxes(2, 3)
        entries = entries.reshape(entries.shape[0], -1, entries.shape[3])
        found = ((found[..., None] + np.arange(parts)[None, None, ::-1]) // parts).reshape(entries.shape[:2])
    counts = xp.maximum(found, 1)
    return entries.astype(np.int32), counts.astype(np.int32)


class Operands:
    """The arrays that a kernel reads besides its rows and columns, from global memory."""

    def __init__(self, padded: tuple[int, int], by_key: bool):
        self.padded, self.by_key = padded, by_key
        self.arrays: list[jax.Array] = []

    def scalars(self, array: jax.Array) -> int:
        """Adds ``[B|1,N|1]``."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def vector(self, over: str, array: jax.Array) -> int:
        """Adds ``[B|1,N|1,T]`` or ``[B|1,N|1,S]``."""
        return self.scalars(pad_end(array, (*array.shape[:2], self.padded[over != QUERY])))

    def pairs(self, array: jax.Array) -> int:
        """Adds ``[B|1,N|1,T,S]``."""
        array = pad_end(array, (*array.shape[:2], *self.padded))
        return self.scalars(array.swapaxes(2, 3) if self.by_key else array)


class Tile(tiles.Tile):
    """64 rows and a block of columns: ``[queries, keys]``, or ``[keys, queries]`` of a kernel by key."""

    def __init__(self, at: "Place", masked: bool, product: jax.Array | None):
        super().__init__(at.scores, masked)
        self.at, self.given, self.block = at, product, at.plan.size
        self.shape = ROWS, at.plan.inner

    def compute(self, fn: Callable, *arrays: Any) -> Any:
        """``fn(*arrays)``, by the operations that Mosaic's GPU compiler has."""
        return run(fn, *arrays)

    def product(self) -> jax.Array:
        """``q·k``, which the kernel has computed."""
        assert self.given is not None
        return self.given

    def log2_scores(self) -> jax.Array:
        """The scores over ln 2, for exponentials to the base 2."""
        if self.source.bias is not None or self.source.score_mod is not None:
            return self.scores() * LOG2E
        s = self.product() * (self.scalar(self.source.scale) * LOG2E)
        return s if self.visible is None else jnp.where(self.visible, s, -jnp.inf)

    def only_visible(self, x: jax.Array) -> jax.Array:
        """``x``, 0 where masked, whatever it is there."""
        return x if self.visible is None else jnp.where(self.visible, x, 0.0)

    def slots(self) -> tuple[jax.Array, jax.Array]:
        """The slots of the queries and of the keys, int32, of ``shape``."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def slots(axis: int) -> jax.Array:
            iota = plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=plgpu.Layout.WGMMA)
            return iota + self.at.starts[axis]

        return slots(self.axis(True)), slots(self.axis(False))

    def axis(self, of_queries: bool) -> int:
        """The axis of the queries or of the keys."""
        return int(of_queries == self.at.plan.by_key)

    def scalar(self, added: int) -> jax.Array:
        """The head's entry of an array of ``Operands.scalars``."""
        return self.at.ins[added][self._of_head(added)]

    def vector(self, over: str, added: int) -> jax.Array:
        """The tile's part of an array of ``Operands.vector``, of ``shape``."""
        axis = self.axis(over == QUERY)
        return jax.lax.broadcast_in_dim(self.line(added, axis), self.shape, [axis])

    def line(self, added: int, axis: int) -> jax.Array:
        """The tile's part of an array of ``Operands.vector`` over ``axis``, ``[rows]`` or ``[columns]``."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        at = pl.ds(self.at.starts[axis], self.shape[axis])
        ref = self.at.ins[added].at[(*self._of_head(added), at)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def pairs(self, added: int) -> jax.Array:
        """The tile's part of an array of ``Operands.pairs``."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        at = (pl.ds(start, size) for start, size in zip(self.at.starts, self.shape, strict=True))
        ref = self.at.ins[added].at[(*self._of_head(added), *at)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)

    def _of_head(self, added: int) -> tuple[Any, Any]:
        shape = self.at.plan.operands.arrays[added].shape
        b, n = self.at.head
        return 0 if shape[0] == 1 else b, 0 if shape[1] == 1 else n


@dataclasses.dataclass
class Plan:
    """One kernel's call: its blocks and what it reads."""

    request: Request
    interpret: Any
    by_key: bool
    size: tuple[int, int]  # queries and keys of a block
    lists: tuple[Any, Any]
    operands: Operands
    parts: int = 1  # programs that share a row of blocks

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
        """Whether there may be full blocks, and others."""
        entries, counts = self.lists
        if not isinstance(entries, np.ndarray):
            return True, True
        kinds = (entries & 1)[np.arange(entries.shape[2]) < counts[..., None]]
        return bool((kinds == 0).any()), bool((kinds == 1).any())

    def scores(self) -> tiles.Scores:
        """The scores, with their arrays among the operands."""
        return tiles.Scores.of(self.request, self.operands, is_all_seen(self.request))


def is_all_seen(request: Request) -> bool:
    """Whether each query sees a key, and each key is seen."""
    return all_seen(*mask_arguments(request))


def make_plan(
    platform: str, request: Request, by_key: bool, shape: tuple[int, int], interpret: Any, parts: int = 1
) -> Plan:
    """The plan of a kernel whose rows are queries, or keys ``by_key``; ``shape``: a block's rows and columns.

    ``parts``: how many programs share a row of blocks, each with results of its own.

    Raises:
        Unsupported: the platform is no Hopper GPU, or XLA divides the program over several.
    """
    require_hopper(platform, interpret)
    size = (shape[1], shape[0]) if by_key else shape
    tables = block_table(request, size)
    T, S = (count * one for count, one in zip(tables[0].shape[1:], size, strict=True))
    lists = block_lists(*tables, by_key, parts)
    return Plan(request, interpret, by_key, size, lists, Operands((T, S), by_key), parts)


def require_hopper(platform: str, interpret: Any) -> None:
    """Raises ``Unsupported`` where a kernel cannot be lowered."""
    if interpret:
        return
    # A process without a GPU compiles for another's: for a Hopper, as JAX does.
    chip = getattr(jax.devices()[0], "compute_capability", "9.0")
    if platform != "cuda":
        needs = f"it needs an NVIDIA GPU, not {platform}"
    elif chip != "9.0":
        needs = f"it needs an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200), not {chip}"
    elif staged.is_partitioned():
        needs = tiles.SEVERAL_DEVICES
    else:
        return
    raise Unsupported(f"implementation='pallas_gpu' cannot do this: {needs}")


@dataclasses.dataclass
class Place:
    """Where a warpgroup's tile lies, and what it is computed from."""

    plan: Plan
    scores: tiles.Scores
    ins: Sequence[Any]
    head: tuple[Any, Any]  # sequence and head of the queries
    starts: tuple[Any, Any]  # the first slots of rows and columns

    @property
    def scale(self) -> jax.Array:
        """The factor on ``q·k``."""
        return self.tile().scalar(self.scores.scale)

    def tile(self, masked: bool = False, product: jax.Array | None = None) -> Tile:
        """The scores here; ``product``: ``q·k``."""
        return Tile(self, masked, product)
