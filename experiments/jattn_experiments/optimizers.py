"""Optimizers: AdamW, or Muon for kernels, which treats attention's kernels in one of three ways."""

import functools
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jattn_experiments.config import Config

_READ_INPUTS = ("query", "key", "value")
OUT = "out"


def make(config: Config) -> optax.GradientTransformation:
    """Clips gradients, then applies AdamW or Muon at rates that warm up and decay."""
    train = config.train

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, train.warmup, train.steps, peak * train.final_rate)

    if train.optimizer == "adamw":
        update = optax.adamw(schedule(train.learning_rate), b2=train.b2, weight_decay=train.weight_decay)
    else:
        update = optax.contrib.muon(
            schedule(train.muon_rate),
            weight_decay=train.weight_decay,
            adam_b2=train.b2,
            adam_weight_decay=train.weight_decay,
            adam_learning_rate=schedule(train.learning_rate),
            # None means every array of two axes: biases [N,H] and tables, but no kernel [M,N,H].
            muon_weight_dimension_numbers={
                "muon": None,
                "muon_joint": functools.partial(kernels, per_head=False),
                "muon_per_head": functools.partial(kernels, per_head=True),
            }[train.optimizer],
        )
    return optax.chain(optax.clip_by_global_norm(train.clip), update)


def kernels(params: Any, per_head: bool) -> Any:
    """The axes of each kernel that Muon orthogonalises; None for biases, embeddings and the read-out (Adam).

    Kernels of query, key and value are ``[M,N,H]``, and kernels of the output ``[N,H,M]``. They are one matrix per
    head, or with all heads side by side the matrices ``[M,N*H]`` and ``[N*H,M]``.
    """

    def numbers(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        *_, module, name = (str(getattr(key, "key", key)) for key in path)
        if name != "kernel" or (leaf.ndim != 2 and module not in (*_READ_INPUTS, OUT)):
            return None
        if module in _READ_INPUTS:
            return MuonDimensionNumbers(0, 2 if per_head else (1, 2))
        if module == OUT and leaf.ndim == 3:
            return MuonDimensionNumbers(1 if per_head else (0, 1), 2)
        return MuonDimensionNumbers(0, 1)

    return jax.tree_util.tree_map_with_path(numbers, params)
