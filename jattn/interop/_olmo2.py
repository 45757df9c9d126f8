"""The OLMo 2 family: norms of what attention and MLP add, and norms over the queries and keys of all heads together.

Source: https://arxiv.org/abs/2501.00656 (architecture); names as in published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.interop._config import Config
from jattn.interop.family import refuse, refuse_others
from jattn.interop.llama import LLAMA, QK_NORMS, READ, UNCHANGED, llama, refuse_windows


def olmo2(options: Mapping[str, Any]) -> Config:
    """The sizes in an OLMo 2 config."""
    refuse(options, sliding_window=None, mlp_bias=False)
    refuse_windows(options)
    refuse_others(options, *READ, *UNCHANGED)
    return dataclasses.replace(llama(options), norm_first=False, norm_outputs=True, qk_norm="all")


_LAYER = {path: names for path, names in LLAMA.layer.items() if path not in ("attention_norm", "mlp_norm")}
_NORMS = {
    "attention_out_norm": ("layers.{}.post_attention_layernorm",),
    "mlp_out_norm": ("layers.{}.post_feedforward_layernorm",),
}
OLMO2 = dataclasses.replace(LLAMA, name="olmo2", config=olmo2, layer={**_LAYER, **_NORMS, **QK_NORMS})
