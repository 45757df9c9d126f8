"""JAX's splash attention for TPUs, as ``jattn.kernels.splash`` calls it: the only file that depends on its insides.

Splash is flash attention (https://arxiv.org/abs/2205.14135) that skips the blocks that a mask empties. Source:
``jax/experimental/pallas/ops/tpu/splash_attention/`` of JAX, the same functions in 0.10 and 0.12. Imported when first
used, because it takes a fifth of a second.
"""

from typing import Any

import jax
import numpy as np
from jax._src import config
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as mask_lib,
)

# The score of a hidden pair. No real score comes near it, so an lse below half of it means: this row sees nothing.
HIDDEN = splash.DEFAULT_MASK_VALUE


class BlocksOnly(mask_lib.Mask):
    """A ``splash_masks.HeadMask`` for splash: its partial blocks are stored and read.

    Splash asks for one block at a time, and of most only whether ``any`` or ``all`` of it is visible. A single pair
    answers that for a block that is empty or full: at 32768 tokens, whole ones take half a minute of tracing.
    """

    def __init__(self, mask: Any):
        self.mask = mask

    @property
    def shape(self) -> tuple[int, int]:
        return self.mask.padded_lengths

    def __getitem__(self, idx: Any) -> np.ndarray:
        (first_row, first_column) = (part.start or 0 for part in idx)
        return self.mask.block(first_row // self.mask.size[0], first_column // self.mask.size[1])

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and self.mask == other.mask

    def __hash__(self) -> int:
        return hash(self.mask)


class Computed(BlocksOnly):
    """A mask that the kernel computes from the indices of a block's rows and columns: no block of it is stored."""

    def __init__(self, mask: Any):
        super().__init__(mask)
        self.mask_function = mask  # what splash looks for, as in its _ComputableMask
        self.q_sequence = np.arange(self.shape[0], dtype=np.int32)


def make_kernel(plan: Any, num_heads: int) -> Any:
    """Splash's kernel for all heads of one sequence; ``plan`` is a ``splash.Plan``."""
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


def forward(kernel: Any, q: Any, k: Any, v: Any, ids: Any) -> tuple[jax.Array, jax.Array]:
    """``out [B,N,T,D]`` and ``lse [B,N,T]``, for ``q [B,N,T,H]``, ``k [B,K,S,H]``, ``v [B,K,S,D]``.

    ``ids``: ``[B,T]`` and ``[B,S]``, of which only equal ones see each other; or None.
    """

    def one_sequence(q: Any, k: Any, v: Any, ids: Any) -> Any:
        out, (lse,) = kernel(q, k, v, None if ids is None else splash.SegmentIds(*ids))
        return out, lse

    with _plain_types():
        return jax.vmap(one_sequence)(q, k, v, ids)


def backward(kernel: Any, q: Any, k: Any, v: Any, ids: Any, lse: Any, do: Any, di: Any) -> tuple[Any, Any, Any]:
    """The cotangents of ``q, k, v``, for ``do [B,N,T,D]`` and ``di [B,N,T]``.

    With ``p = exp(score - lse)``, ``d score = p * (do v^T - di)`` and ``dv = p^T do``.
    """
    # Splash's public derivative fixes di = sum(out * do), which leaves out the lse's cotangent, and runs the forward
    # kernel again. Its two backward kernels take lse, do and di as they are, and are called here and nowhere else.
    info = kernel.kwargs
    sizes = info["block_sizes"]
    common = {
        name: info[name] for name in ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
    }
    common |= {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}

    def one_sequence(q: Any, k: Any, v: Any, ids: Any, *rest: Any) -> Any:
        arguments = (q, k, v, None if ids is None else splash.SegmentIds(*ids), None, *rest)
        _, dk, dv = splash._splash_attention_bwd_dkv(
            *arguments,
            bq=sizes.block_q_dkv,
            bkv=sizes.block_kv_dkv,
            bkv_compute=sizes.block_kv_dkv_compute,
            mask_info=kernel.dkv_mask_info,
            use_fused_bwd_kernel=False,
            **common,
        )
        dq = splash._splash_attention_bwd_dq(
            *arguments, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=kernel.dq_mask_info, **common
        )
        return dq, dk, dv

    with _plain_types():
        return jax.vmap(one_sequence)(q, k, v, ids, lse, do, di)


def _plain_types() -> Any:
    """Inside ``jax.shard_map`` a kernel's results must say over which mesh axes they vary, which splash's do not.

    They need not: what is lowered has plain types (``jattn.staged``). Pallas turns the check off like this, too, and
    there is no public way.
    """
    return config._check_vma(False)
