"""``"blockwise"``: the O(T + S) formula of ``jattn._blocks``, head by head. Supports every call."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
from jaxtyping import Array, PyTree

from jattn._blocks import backward, online_softmax
from jattn._blocks.plan import BlockSizes, describe_work, plan_call
from jattn._blocks.reduction import Reduction, fold_blocks, reduce_weights
from jattn._core import deferred
from jattn._core.call import Call, softmax_dtype
from jattn._core.vmap import canonical
from jattn.kernels.kernel import MIN_PAIRS, MIN_SCORES, ReducingKernel, Results


@dataclasses.dataclass(frozen=True)
class Blockwise(ReducingKernel):
    """``implementation=``: ``"blockwise"`` with custom block sizes.

    ``block_sizes``: queries and keys per block; by default, chosen from T, S and the platform
    (``jattn._blocks.block_lists.choose_blocks``). Results differ only by rounding.
    """

    name: ClassVar[str] = "blockwise"
    pays_when: ClassVar[str] = f"faster if T * S >= {MIN_PAIRS}, saves memory if B * N * T * S >= {MIN_SCORES}"
    backward_is_for_qkv_alone: ClassVar[bool] = True
    returns_error: ClassVar[bool] = True
    wide_query: ClassVar[bool] = True

    block_sizes: tuple[int, int] | None = None

    def forward(self, platform: str, call: Call) -> Results:
        return online_softmax.forward(platform, call, self.block_sizes)

    def forward_with_error(self, platform: str, call: Call) -> Results:
        return online_softmax.forward(platform, call, self.block_sizes, with_error=True)

    def describe_work(self, platform: str, call: Call) -> str:
        """Based on its block tables."""
        blocks = plan_call(platform, call, self.block_sizes, forward=True).blocks
        return describe_work(blocks, (call.query.shape[1], call.key.shape[1]))

    @property
    def _block_sizes(self) -> BlockSizes:
        return self.block_sizes

    def sums(self, call: Call, row_max: Array) -> tuple[Array, Array]:
        """``acc [B,T,N,D] = sum exp(score - row_max) value`` and ``row_sum [B,T,N]``, for ``row_max [B,T,N]``."""
        dtype = softmax_dtype(call.query)
        rows = jax.ShapeDtypeStruct(call.query.shape[:3], dtype)
        out = jax.ShapeDtypeStruct((*rows.shape, call.value.shape[3]), dtype), rows
        return deferred.call(backward.accumulate, canonical(call), row_max, self.block_sizes, out=out)

    def fold(self, call: Call, reduction: Reduction) -> dict[str, jax.Array]:
        return reduce_weights(call, reduction, self.block_sizes)

    def fold_weights(self, call: Call, step: Callable[..., PyTree], init: PyTree, lse: Array | None) -> PyTree[Array]:
        """``jattn._blocks.reduction.fold_blocks``; ``lse [B,T,N]`` is computed if it is None."""
        if lse is None:
            lse = self._run(dataclasses.replace(call, value=call.key[..., :0]))[1]
        return fold_blocks(call, step, init, lse, self.block_sizes)
