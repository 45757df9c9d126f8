"""Shards attention over the devices of a mesh: by heads (``head_parallel_attention``) or by sequence.

With a sharded sequence, either keys and values rotate (``ring_attention``), or devices exchange the sequence for heads
(``ulysses_attention``), or both.

Under a causal mask, the last device of a ``"contiguous"`` layout has the most work and the first hardly any. The
``"zigzag"`` layout splits the sequence into two chunks per device and gives device p the p-th chunk from the front and
the p-th from the back, so that all devices have equal work in every step. Source: Llama 3,
https://arxiv.org/abs/2407.21783, section 3.3.2.
"""

from jattn.sharding._head_parallel import HeadParallel, head_parallel_attention
from jattn.sharding._ring import Ring, from_zigzag, ring_attention, ring_blocks, to_zigzag
from jattn.sharding._rotation import LAYOUTS
from jattn.sharding._split_keys import SplitKeys
from jattn.sharding._ulysses import Ulysses, ulysses_attention

__all__ = [
    "LAYOUTS",
    "HeadParallel",
    "Ring",
    "SplitKeys",
    "Ulysses",
    "from_zigzag",
    "head_parallel_attention",
    "ring_attention",
    "ring_blocks",
    "to_zigzag",
    "ulysses_attention",
]
