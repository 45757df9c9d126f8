"""Defines ``jattn.blockwise``: attention of one head in linear memory."""

from typing import Unpack

from jaxtyping import Array, ArrayLike, Float

from jattn._blocks.backward import accumulate_head, differentiable
from jattn._blocks.online_softmax import forward_head
from jattn._blocks.plan import BlockSizes, plan_head
from jattn._core.arguments import make_head
from jattn._core.call import Call, HeadOptions
from jattn._core.vmap import canonical


def blockwise(
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    v: Float[Array, "S D"],
    *,
    head: ArrayLike | None = None,
    block_sizes: tuple[int, int] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
    """``jattn.attend`` with the same options and results, but without ever holding a ``[T,S]`` array.

    Differentiable in forward and reverse mode, to any order, with respect to ``q, k, v, bias, scale`` and every float
    array captured by ``score_mod``. Memory use stays O(T + S) throughout, under every remat policy. Under ``vmap`` over
    anything that affects the mask, every block is computed; ``jattn.dot_product_attention`` decides outside the vmap
    which blocks to skip.

    Args:
        q, k, v: ``[T,H]``, ``[S,H]`` and ``[S,D]``, floats of one dtype.
        head: the head's index h for ``mask``, ``score_mod`` and dropout; ``over_heads`` passes it.
        block_sizes: queries and keys per block; by default, chosen from T, S and the platform. Results differ only by
            rounding.
        options: the other keywords of ``jattn.attend``: ``mask``, ``bias``, ``score_mod``, ``scale``, ``batch``,
            ``query_positions``, ``kv_positions``, ``dropout``, ``precision``.

    Returns:
        ``(out [T,D], lse [T])``; lse is float32 (float64 for float64 input).

    Raises:
        TypeError, ValueError: an array, or the result of a mask or score function, has the wrong shape or dtype, or
            ``block_sizes`` are not two positive integers.

    Example:
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 8))
        >>> causal = jattn.masks.Causal()
        >>> out, lse = jattn.blockwise(q, k, v, mask=causal, block_sizes=(2, 2))
        >>> np.allclose(out, jattn.attend(q, k, v, mask=causal)[0], atol=1e-4)
        True
    """
    return differentiable(_forward, _accumulate, canonical(make_head(q, k, v, head=head, **options)), block_sizes)


def _forward(platform: str, head: Call, block_sizes: BlockSizes, with_error: bool) -> tuple[Array, ...]:
    return forward_head(platform, head, plan_head(platform, head, block_sizes, forward=True), with_error=with_error)


def _accumulate(platform: str, head: Call, row_max: Array, block_sizes: BlockSizes) -> tuple[Array, Array]:
    return accumulate_head(platform, head, plan_head(platform, head, block_sizes), row_max)
