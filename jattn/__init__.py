"""Multi-head attention for JAX, with access to every head that leaves the output bit-identical.

Docstrings and annotations use these letters for axes::

    B batch            T query length     S key/value length
    N query heads      K kv heads         G = N/K query heads share a kv head
    H query/key dim    D value dim        M model dim

The layout is ``[B,T,N,H]``, as in ``jax.nn`` and Flax. ``lse`` is the log-sum-exp of a row of scores. Examples assume
``import jax``, ``import jax.numpy as jnp``, ``import numpy as np`` and ``import jattn``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jattn import masks, score_mods
from jattn._blocks.block_mask import block_mask
from jattn._blocks.blockwise import blockwise
from jattn._core.attention import attend
from jattn._core.merge import merge, unmerge
from jattn._core.vmap import over_heads
from jattn._mods.pytree import pytree_dataclass, static_field
from jattn.api import attention_weights, dot_product_attention, explain, fold_weights
from jattn.cache import KVCache, append, init_cache
from jattn.kernels import Unsupported

if TYPE_CHECKING:
    from jattn import circuits as circuits
    from jattn import heads, positions, sharding
    from jattn import interop as interop
    from jattn import linen as linen
    from jattn import nnx as nnx
    from jattn import plots as plots
    from jattn import reports as reports
    from jattn import testing as testing
    from jattn.multi_head import init_multi_head, multi_head_attention
    from jattn.reports import report, survey

__version__ = "0.3.0"

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
    "report",
    "score_mods",
    "sharding",
    "static_field",
    "survey",
    "unmerge",
]

# Imported on first use, so that `import jattn` takes little longer than `import jax`: Flax's modules and matplotlib are
# slow to import.
_LATER = ("circuits", "heads", "interop", "linen", "nnx", "plots", "positions", "reports", "sharding", "testing")
_LATER_FROM = {
    "init_multi_head": "multi_head",
    "multi_head_attention": "multi_head",
    "report": "reports",
    "survey": "reports",
}
# Where users of other libraries first look for these names. Masks and score functions are found by name, without a
# table.
_ELSEWHERE = {
    "MultiHeadAttention": ["jattn.nnx.MultiHeadAttention", "jattn.linen.MultiHeadAttention"],
    "MultiHeadDotProductAttention": ["jattn.linen.MultiHeadDotProductAttention"],
    "SelfAttention": ["jattn.linen.SelfAttention"],
    "Ring": ["jattn.sharding.Ring"],
    "Rotary": ["jattn.positions.Rotary"],
    "statistics": ["jattn.heads.statistics"],
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER_FROM:
        return getattr(importlib.import_module(f"{__name__}.{_LATER_FROM[name]}"), name)
    places = [f"{of.__name__}" for of in (masks, score_mods) if name in of.__all__]
    meant = _ELSEWHERE.get(name, [f"{place}.{name}" for place in places])
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATER})
