"""Calls JAX's splash attention for TPUs, for ``jattn.kernels.splash``; the only file that depends on its internals.

Splash is flash attention (https://arxiv.org/abs/2205.14135) that skips blocks emptied by a mask. Source:
``jax/experimental/pallas/ops/tpu/splash_attention/`` in JAX, with the same functions in 0.10 and 0.12. Imported on
first use.
"""

import contextlib
from typing import Any

import jax
import numpy as np
from jax import Array
from jax._src import config
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as mask_lib,
)
from jaxtyping import Float, Int

from jattn.kernels.splash.masks import HeadMask, SplashPlan

Ids = tuple[Int[Array, "B T"], Int[Array, "B S"]]
# The score of a hidden pair. No real score comes near it, so an lse below half of it means that the row sees nothing.
HIDDEN = splash.DEFAULT_MASK_VALUE


class BlocksOnly(mask_lib.Mask):
    """A ``HeadMask`` for splash, which stores and reads its partial blocks.

    Splash asks for one block at a time, and for most blocks only whether ``any`` or ``all`` pairs are visible. A single
    pair answers this for an empty or full block: at 32768 tokens, whole blocks take half a minute to trace.
    """

    def __init__(self, mask: HeadMask):
        self.mask = mask

    @property
    def shape(self) -> tuple[int, int]:
        return self.mask.padded_lengths

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        (first_row, first_column) = (part.start or 0 for part in idx)
        return self.mask.block(first_row // self.mask.size[0], first_column // self.mask.size[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlocksOnly) and type(self) is type(other) and self.mask == other.mask

    def __hash__(self) -> int:
        return hash(self.mask)


class Computed(BlocksOnly):
    """A mask that the kernel computes from the row and column indices of a block, without storing blocks."""

    def __init__(self, mask: HeadMask):
        super().__init__(mask)
        self.mask_function = mask  # the attribute splash looks for, as in its _ComputableMask
        self.q_sequence = np.arange(self.shape[0], dtype=np.int32)


def make_kernel(plan: SplashPlan, num_heads: int) -> splash.SplashAttentionKernel:
    """Splash's kernel for all heads of one sequence."""
    masks = [Computed(mask) if mask.in_kernel else BlocksOnly(mask) for mask in plan.masks]
    rows, columns = plan.size
    sizes = splash.BlockSizes(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows, block_kv_dq=columns
    )
    return splash.make_splash_mha(
        mask=mask_lib.MultiHeadMask(masks * (num_heads // len(masks))),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        attn_logits_soft_cap=plan.soft_cap,
        interpret=plan.interpret,
    )


def forward(
    kernel: splash.SplashAttentionKernel, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"],
    v: Float[Array, "B K S D"], ids: Ids | None,
) -> tuple[Float[Array, "B N T D"], Float[Array, "B N T"]]:  # fmt: skip
    """``out`` and ``lse``. Only queries and keys with equal ``ids`` see each other."""

    def one_sequence(q: Array, k: Array, v: Array, ids: Any) -> tuple[Array, Array]:
        out, (lse,) = kernel(q, k, v, None if ids is None else splash.SegmentIds(*ids))
        return out, lse

    with _plain_types():
        return jax.vmap(one_sequence)(q, k, v, ids)


def backward(
    kernel: splash.SplashAttentionKernel, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"],
    v: Float[Array, "B K S D"], ids: Ids | None, lse: Float[Array, "B N T"], do: Float[Array, "B N T D"],
    di: Float[Array, "B N T"],
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The cotangents of ``q, k, v``.

    With ``p = exp(score - lse)``, ``d score = p * (do v^T - di)`` and ``dv = p^T do``.
    """
    # Splash's public derivative fixes di = sum(out * do), which omits the lse's cotangent, and reruns the forward
    # kernel. Its two backward kernels take lse, do and di as given, and are called only here.
    info = kernel.kwargs
    sizes = info["block_sizes"]
    common = {
        name: info[name] for name in ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
    }
    common |= {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    dq_mask, dkv_mask = kernel.dq_mask_info, kernel.dkv_mask_info
    assert dq_mask is not None and dkv_mask is not None  # splash creates them unless told to run only forward

    def one_sequence(q: Array, k: Array, v: Array, ids: Any, *rest: Array) -> tuple[Array, Array, Array]:
        arguments = (q, k, v, None if ids is None else splash.SegmentIds(*ids), None, *rest)
        _, dk, dv = splash._splash_attention_bwd_dkv(
            *arguments,
            bq=sizes.block_q_dkv,
            bkv=sizes.block_kv_dkv,
            bkv_compute=sizes.block_kv_dkv_compute,
            mask_info=dkv_mask,
            use_fused_bwd_kernel=False,
            **common,
        )
        dq = splash._splash_attention_bwd_dq(
            *arguments, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=dq_mask, **common
        )
        return dq, dk, dv

    with _plain_types():
        return jax.vmap(one_sequence)(q, k, v, ids, lse, do, di)


def _plain_types() -> contextlib.AbstractContextManager:
    """Inside ``jax.shard_map``, a kernel's results must declare the mesh axes over which they vary; splash's do not.

    Here they need not, because the types are plain at lowering (``jattn._core.deferred``). Pallas turns the check off
    in the same way; there is no public switch.
    """
    return config._check_vma(False)
