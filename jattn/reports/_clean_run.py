"""Runs a model on its clean input, layer by layer, and labels its heads with roles."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn import heads
from jattn.interop import Transformer
from jattn.reports._language_model import Layer, embed, look, parts_of

PATTERNS = ("previous_token", "current_token", "first_token", *heads.OF_TOKENS)
NAMES = ("entropy", "max_weight", "distance", *PATTERNS)
LEVEL = 0.05  # for the roles

Track = Callable[[Iterable, str], Iterator]


class Clean(NamedTuple):
    """The results of one run."""

    streams: list[Array]  # [B,T,M]: the input of each layer, and the output of the last
    seen: list[dict[str, Array]]  # what each layer's attention sows
    statistics: dict[str, np.ndarray]  # [L,N], means over the queries of all sequences


def run_clean(layers: Iterable[Layer], x: Array, tokens: Array) -> Clean:
    """Runs the model on the embedded tokens ``x``, with statistics based on ``tokens``."""
    streams, seen, statistics = [x], [], []
    for layer in layers:
        x, sown, of_layer = look(layer, x, tokens, NAMES)
        streams.append(x)
        seen.append(sown)
        statistics.append(of_layer)
    if len(shapes := {sown["z"].shape for sown in seen}) > 1:
        raise ValueError(f"the layers of the model must have outputs z of one shape, got {sorted(shapes)}")
    return Clean(streams, seen, {name: np.stack([of_layer[name] for of_layer in statistics]) for name in NAMES})


def roles_of(
    model: nnx.Module, clean: Clean, tokens: Array, twins: Callable[[int], nnx.Module] | None, track: Track
) -> tuple[heads.Roles | None, str]:
    """The role of each head and what it was tested against; None if the model has no twins."""
    if twins is None and isinstance(model, Transformer):
        config = model.config
        twins = lambda seed: Transformer(config, rngs=nnx.Rngs(seed))
    if twins is None:
        return None, "no roles: pass twins=, a function of a seed to the model with random parameters"

    def statistics(model: nnx.Module, what: str, by: Array = tokens, of: Array = tokens) -> dict[str, np.ndarray]:
        whole, layers = parts_of(model)
        run = run_clean(track(layers, what), embed(whole, of), by)
        return {name: run.statistics[name] for name in PATTERNS}

    of_heads = clean.statistics["entropy"].size
    count = math.ceil((math.ceil(len(PATTERNS) / LEVEL) - 1) / of_heads)
    each = [statistics(twins(seed), f"twin {seed + 1} of {count}") for seed in range(count)]
    null = {name: np.stack([twin[name] for twin in each]) for name in PATTERNS}
    shuffled = jnp.asarray(np.random.default_rng(0).permuted(np.asarray(tokens), axis=1))
    usual = statistics(model, "shuffled tokens", of=shuffled)
    of_tokens = statistics(model, "judged by shuffled tokens", by=shuffled)
    usual |= {name: of_tokens[name] for name in heads.OF_TOKENS}
    roles = heads.roles({name: clean.statistics[name] for name in PATTERNS}, null, level=LEVEL, baseline=usual)
    return roles, (
        f"role: null, {null[PATTERNS[0]].size} heads of models with random parameters ({count}); baseline, this model "
        f"on shuffled tokens; for {' and '.join(heads.OF_TOKENS)}, its clean run judged by shuffled tokens"
    )
