"""jattn: attention you can look inside, at any length, on any device, without changing a bit of its output.

The axes, in every docstring and annotation:

    B batch            T query length     S key/value length
    N query heads      K kv heads         G = N/K query heads share a kv head
    H query/key dim    D value dim        M model dim

Layout is ``[B,T,N,H]``, as in ``jax.nn`` and Flax. ``lse`` is the log-sum-exp of a row of scores.

A call of ``dot_product_attention`` (``api``) passes through these files, in order. ``request`` checks the arguments,
``choice`` picks an implementation in ``kernels``, and ``placement`` runs it on each device's part of sharded arrays.
``batching`` traces plain masks and score functions (``hoist``) and maps one head over heads and sequences
(``lifting``). For each head, the dense kernel (``kernels.xla``) computes ``attention``. The blockwise kernel
(``kernels.blockwise``) is traced when it is lowered (``staged``): it gets the visible ``blocks`` from the ``masks``,
and ``online_softmax`` visits them, ``one_block`` at a time.
"""

import importlib
from typing import Any

from jattn import heads, masks, positions, score_mods, sharding
from jattn.api import attention_weights, dot_product_attention, explain, fold_weights
from jattn.attention import attend
from jattn.blocks import block_mask
from jattn.cache import KVCache, append, init_cache
from jattn.kernels import Unsupported
from jattn.lifting import over_heads
from jattn.mods import pytree_dataclass, static_field
from jattn.multi_head import init_multi_head, multi_head_attention
from jattn.online_softmax import blockwise
from jattn.parts import merge, unmerge

__version__ = "0.1.0"

__all__ = [
    "KVCache",
    "Unsupported",
    "append",
    "attend",
    "attention_weights",
    "block_mask",
    "blockwise",
    "dot_product_attention",
    "explain",
    "fold_weights",
    "heads",
    "init_cache",
    "init_multi_head",
    "masks",
    "merge",
    "multi_head_attention",
    "over_heads",
    "positions",
    "pytree_dataclass",
    "score_mods",
    "sharding",
    "static_field",
    "unmerge",
]

# Imported when they are first used: they need Flax or matplotlib.
_LATER = ("interop", "linen", "nnx", "plots")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
