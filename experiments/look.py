"""What the heads of a model do on a batch: the scores that are tracked while it trains."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.model import Transformer, attention_weights
from experiments.tasks import Batch, Task
from jattn import heads


def weights_of(model: Transformer, params: Any, tokens: Array) -> Array:
    """Attention weights ``[B,L,N,T,T]`` of all layers and heads."""
    _, kept = model.apply(params, tokens, sow_weights=True, mutable=["intermediates"])
    return attention_weights(kept["intermediates"])


def scores(task: Task, weights: Array, batch: Batch) -> dict[str, Array]:
    """Scores ``[L,N]`` in [0, 1] of ``weights [B,L,N,T,T]``, averaged over the batch.

    A place has the weight on its source; that ``induction`` runs over the queries that are asked, the
    others over all real ones.
    """

    def of_one_head(weights: Array, batch: Batch) -> dict[str, Array]:  # [T,T], a batch of one without its axis
        asked = jnp.any(batch.target_weights > 0, -1)
        visible = jnp.tril(jnp.ones(weights.shape, bool))
        places = {
            place: heads.target_weight(weights, batch.sources[:, index]) for index, place in enumerate(task.places)
        }
        return places | {
            "previous_token": heads.previous_token(weights, batch.real),
            "induction": heads.induction(weights, batch.tokens[:, 0], asked),
            "sink": heads.sink(weights, batch.real),
            "entropy": heads.entropy(weights, visible, batch.real),
        }

    return _over_heads_and_batch(of_one_head, weights, batch)


def offset_profile(weights: Array, batch: Batch) -> Array:
    """Mean weight ``[L,N,O]`` at each offset from ``-(T-1)`` to 0, over the real queries of the batch."""
    length = weights.shape[-1]
    return _over_heads_and_batch(lambda w, b: heads.offset_profile(w, b.real)[:length], weights, batch)


def _over_heads_and_batch(statistic: Any, weights: Array, batch: Batch) -> Any:
    for _ in range(2):
        statistic = jax.vmap(statistic, (0, None))
    found = jax.vmap(statistic)(weights, batch)
    return jax.tree.map(lambda values: values.mean(0), found)
