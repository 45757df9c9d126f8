"""``Family``: how one family of models names its configuration and its tensors."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Family:
    """The names in the ``config.json`` and the checkpoints of one family.

    ``modules`` and ``layer`` map each module to its kind and its possible names. A module's path in our model is its
    key; those of ``layer`` are in every layer, under ``layer_prefix`` in the checkpoint.
    """

    name: str
    # layers, heads, model dim, vocabulary, maximum length, norm epsilon and activation, in this order
    config_keys: tuple[str, ...]
    mlp_dim_key: str
    token_types: int  # by default
    decoder: bool
    modules: Mapping[str, tuple[str, tuple[str, ...]]]
    layer_prefix: str
    layer: Mapping[str, tuple[str, ...]]
    inputs_first: bool  # whether weights are usually stored [in,out]
