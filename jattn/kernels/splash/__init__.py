"""``"splash"``: JAX's fused kernels for TPUs, which skip blocks emptied by a static mask.

Splash leaves the result of a row without visible keys undefined, and lets NaN in unseen slots through. Such rows are
therefore found by their log-sum-exp and replaced, and unseen keys and values are set to zero. The query is multiplied
by ``scale`` and rounded to its dtype before the kernel runs, because splash has no scale.

Reverse mode runs splash's backward kernels; ``jattn.kernels.blockwise`` computes all other derivatives. Masks are in
``masks.py``, and JAX's kernels in ``jax_splash.py``.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._blocks.backward import of_sums
from jattn._blocks.block import BlockPlan
from jattn._blocks.block_lists import two_sizes
from jattn._blocks.plan import describe_work
from jattn._core.call import Call
from jattn._mods.arrays import cdiv, mod_semantics, pad_end
from jattn.kernels.kernel import Kernel, Results
from jattn.kernels.pallas_tpu.schedule import TILE, block_sizes
from jattn.kernels.splash.masks import SplashPlan, head_masks, ids_of, mask_reason, seen_keys
from jattn.score_mods import SoftCap

LARGEST_BLOCK = 512
# Splash keeps block tables in a core's scalar memory. On v5p, this many entries fit; four times as many do not.
MOST_BLOCKS = 2**18


def default_block_sizes(T: int, S: int, head_dim: int) -> tuple[int, int]:
    """Queries and keys per block: each length is split into the fewest equal parts of at most 512, in whole lanes.

    512 is the default of MaxText, which trains with this kernel (``sa_block_q`` and similar settings in its
    configuration). For a ``head_dim`` (the larger of the query's and value's) above 256, the limit is 256: a block's
    queries, keys, values, results and scores must fit in a core's vector memory.
    """
    largest = LARGEST_BLOCK if head_dim <= 256 else LARGEST_BLOCK // 2
    return block_sizes(T, S, largest)


@dataclasses.dataclass(frozen=True)
class Splash(Kernel):
    """``implementation=``: ``"splash"`` with custom settings.

    ``block_sizes``: queries and keys per block, multiples of 128; ``default_block_sizes`` gives the default.
    ``interpret``: run the kernels in Pallas' interpreter, on any platform: slow, for tests.
    """

    name: ClassVar[str] = "splash"
    platform: ClassVar[str | None] = "tpu"
    dtypes: ClassVar[tuple[DTypeLike, ...]] = (jnp.float32, jnp.bfloat16)
    takes: ClassVar[frozenset[str]] = frozenset(
        {"masks", "slot_masks", "query_seq_lengths", "key_value_seq_lengths", "score_mod"}
    )
    rounds_query: ClassVar[bool] = True
    reads_rounded_output: ClassVar[bool] = True

    block_sizes: tuple[int, int] | None = None
    interpret: bool = False

    def __post_init__(self):
        if self.block_sizes is not None:
            object.__setattr__(self, "block_sizes", two_sizes(self.block_sizes, TILE))

    def unsupported_reason(self, call: Call) -> str | None:
        return super().unsupported_reason(call) or mask_reason(call)

    def refusals(self, call: Call) -> Iterable[tuple[bool, str]]:
        mod = call.score_mod
        return [
            (call.value.shape[-1] == 0, "it takes no empty arrays"),
            (call.has("slot_masks"), "it takes no mask array; masks.Dense(array) is a mask"),
            (mod is not None and type(mod) is not SoftCap, "it takes no score_mod but SoftCap"),
            (type(mod) is SoftCap and _soft_cap(call) is None, "the cap of a SoftCap must be a plain number"),
            (self._count_blocks(call) > MOST_BLOCKS, f"it takes at most {MOST_BLOCKS} blocks; pass larger block_sizes"),
        ]

    def _count_blocks(self, call: Call) -> int:
        T, S = call.query.shape[1], call.key.shape[1]
        rows, columns = _block_sizes(call, self)
        return cdiv(T, rows) * cdiv(S, columns)

    def describe_work(self, platform: str, call: Call) -> str:
        """As for blockwise, averaged over heads. Evaluating plain functions on all pairs would take too long."""
        masks = self._plan(call).masks
        (rows, columns), lengths = masks[0].size, masks[0].lengths
        if any(mask.holds_function for mask in masks):
            return f"computes the blocks of {rows} x {columns} that hold a visible pair"
        computed = np.stack([mask.computed for mask in masks])
        return describe_work(BlockPlan((rows, columns), computed, computed, False), lengths)

    def prepare(self, call: Call) -> "Splash":
        """Adds the plan, because static masks are read while tracing."""
        return _PlannedSplash(self.block_sizes, self.interpret, self._plan(call))

    def _plan(self, call: Call) -> SplashPlan:
        size = _block_sizes(call, self)
        masks, all_keys_seen = head_masks(call, size)
        return SplashPlan(masks, size, _soft_cap(call), self.interpret, all_keys_seen)

    @property
    def _kernel(self) -> ModuleType:
        """Imported on first use: the import takes a fifth of a second."""
        return importlib.import_module("jattn.kernels.splash.jax_splash")

    def forward(self, platform: str, call: Call) -> Results:
        plan = self._plan(call)
        (B, T, N, _), D = call.query.shape, call.value.shape[-1]
        least = jnp.finfo(jnp.float32).min
        if plan.is_empty:  # splash cannot make a kernel without blocks
            rows = jnp.zeros((B, T, N), jnp.float32)
            return jnp.zeros((B, T, N, D), call.value.dtype), rows + least, rows
        with _settings(call.query.dtype):
            q, k, v, ids = _inputs(call, plan, None)
            out, lse = self._kernel.forward(self._kernel.make_kernel(plan, N), q, k, v, ids)
            out, lse = _from_heads(out, T), _from_heads(lse, T)
            seen = ~(lse <= self._kernel.HIDDEN / 2)  # NaN counts as seen
            out = jnp.where(seen[..., None], out, jnp.zeros((), out.dtype))
            return out, jnp.where(seen, lse, least), seen.astype(jnp.float32)

    def backward(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        """Computed by splash, with ``do = d_acc`` and ``di = -d_row_sum`` (``of_sums``)."""
        plan = self._plan(call)
        row_max, (d_acc, d_row_sum) = results[1], of_sums(results, cotangents)
        query, key, value = call.query, call.key, call.value
        T, S = query.shape[1], key.shape[1]
        if plan.is_empty:
            return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
        with _settings(query.dtype):
            seen = ~(row_max <= self._kernel.HIDDEN / 2)
            q, k, v, ids = _inputs(call, plan, seen)
            zero = jnp.zeros((), jnp.float32)
            do, di = (jnp.where(seen[..., None], d_acc, zero).astype(value.dtype), jnp.where(seen, -d_row_sum, zero))
            lse = jnp.where(seen, row_max, zero)
            do, di, lse = (_to_heads(x, plan.masks[0].padded_lengths[0]) for x in (do, di, lse))
            kernel = self._kernel.make_kernel(plan, query.shape[2])
            dq, dk, dv = self._kernel.backward(kernel, q, k, v, ids, lse, do, di)
            dq = _scaled(_from_heads(dq, T), call.score_scale)
            return dq, _from_heads(dk, S), _from_heads(dv, S)


@dataclasses.dataclass(frozen=True)
class _PlannedSplash(Splash):
    """``Splash`` for calls with one plan."""

    plan: SplashPlan | None = None

    def _plan(self, call: Call) -> SplashPlan:
        assert self.plan is not None
        return self.plan


def _block_sizes(call: Call, settings: Splash) -> tuple[int, int]:
    (_, T, _, H), S = call.query.shape, call.key.shape[1]
    return settings.block_sizes or default_block_sizes(T, S, max(H, call.value.shape[-1]))


def _soft_cap(call: Call) -> float | None:
    cap = getattr(call.score_mod, "cap", None)
    return float(cap) if isinstance(cap, int | float | np.generic | np.ndarray) else None


@contextlib.contextmanager
def _settings(dtype: Any) -> Iterator[None]:
    """Splash's index arithmetic uses 32 bits and mixes dtypes, whatever the caller's settings.

    Products of bfloat16 have one precision; Mosaic rejects any other.
    """
    precision = jax.config.jax_default_matmul_precision if dtype == jnp.float32 else "default"
    with jax.enable_x64(False), mod_semantics(), jax.default_matmul_precision(precision):
        yield


def _inputs(call: Call, plan: SplashPlan, seen_queries: jax.Array | None) -> tuple[Any, Any, Any, Any]:
    """Splash's ``q, k, v`` and ids, padded to whole blocks; unseen keys and values, and blind queries, are zero."""
    T, S = plan.masks[0].padded_lengths
    query, key, value = call.query, call.key, call.value
    ids = ids_of(call)
    seen = None if plan.all_keys_seen else seen_keys(call, plan.masks, ids)
    if seen is not None:
        key, value = (jnp.where(seen[..., None], x, jnp.zeros((), x.dtype)) for x in (key, value))
    if seen_queries is not None:
        query = jnp.where(seen_queries[..., None], query, jnp.zeros((), query.dtype))
    padded = _to_heads(_scaled(query, call.score_scale), T), _to_heads(key, S), _to_heads(value, S)
    if ids is not None:  # the static mask hides padded keys
        ids = pad_end(ids[0], (ids[0].shape[0], T)), pad_end(ids[1], (ids[1].shape[0], S))
    return *padded, ids


def _scaled(x: jax.Array, scale: Any) -> jax.Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _to_heads(x: jax.Array, length: int) -> jax.Array:
    """``[B,T,N,...] -> [B,N,length,...]``, padded with zeros."""
    return jnp.swapaxes(pad_end(x, (x.shape[0], length, *x.shape[2:])), 1, 2)


def _from_heads(x: jax.Array, length: int) -> jax.Array:
    """``[B,N,...] -> [B,length,N,...]``."""
    return jnp.swapaxes(x, 1, 2)[:, :length]
