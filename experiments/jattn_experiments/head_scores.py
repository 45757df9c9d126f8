"""Scores of a model's heads on a batch: those tracked during training, and those at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jattn import heads
from jattn_experiments.batches import Batch
from jattn_experiments.model import Transformer, attention_weights, layer_by_layer
from jattn_experiments.tasks import Task

# All in [0, 1], so that they share one scale.
TRACKED = (
    "previous_token", "current_token", "first_token", "duplicate_token", "induction", "max_weight", "entropy",
)  # fmt: skip
ALL = (*TRACKED, "distance", "max_logit")


def with_weights(model: Transformer, params: Any, tokens: Array, **options: Any) -> tuple[Array, Array]:
    """Logits ``[B,T,A,classes]`` and attention weights ``[B,L,N,T,T]`` of all layers and heads."""
    logits, kept = model.apply(params, tokens, sow_weights=True, mutable=["intermediates"], **options)
    return logits, attention_weights(kept["intermediates"])


def weights_of(model: Transformer, params: Any, tokens: Array) -> Array:
    """Attention weights ``[B,L,N,T,T]`` of all layers and heads."""
    return with_weights(model, params, tokens)[1]


def with_entropy(model: Transformer, params: Any, batch: Batch) -> tuple[Array, Array]:
    """Logits and the ``entropy [L,N]`` below, from the modules' statistics; needs linear memory and works in a ring."""
    logits, statistics, _ = _with_statistics(model, params, batch, ["entropy"], at=batch.at)
    return logits, statistics["entropy"]


def _with_statistics(
    model: Transformer, params: Any, batch: Batch, names: Sequence[str], tokens: Array | None = None, **options: Any
) -> tuple[Array, dict[str, Array], dict[str, Any]]:
    """Logits, the statistics ``names [L,N]`` with patterns of ``tokens [B,T]``, and everything that the model sows."""
    patterns = {} if tokens is None else {"tokens": tokens}
    request = {"names": list(names), **patterns, "eligible": batch.real}
    logits, kept = model.apply(params, batch.tokens, sow_statistics=request, mutable=["intermediates"], **options)
    layers = layer_by_layer(kept["intermediates"], "attention_statistics")
    return logits, of_layers(layers, names), kept["intermediates"]


def of_layers(layers: Sequence[Mapping[str, Array]], names: Sequence[str]) -> dict[str, Array]:
    """The statistics ``[L,N]`` that the layers' attention has sown, averaged over a batch."""
    return {name: jnp.stack([layer[name].mean(0) for layer in layers]) for name in names}


def entropy(weights: Array, batch: Batch) -> Array:
    """Entropy ``[L,N]`` of the rows of ``weights [B,L,N,T,T]``, each divided by its maximum."""
    visible = jnp.tril(jnp.ones(weights.shape[-2:], bool))
    return _over_heads_and_batch(lambda w, b: heads.entropy(w, visible, b.real), weights, batch)


def scores(
    model: Transformer, task: Task, params: Any, batch: Batch, names: Sequence[str] = TRACKED
) -> tuple[dict[str, Array], Array]:
    """Scores ``[L,N]``, averaged over the batch, and the weights ``[B,L,N,T,T]``.

    For each place, it is the weight on its source at queries with a target. The statistics ``names`` of
    ``jattn.heads`` follow, over all real queries.
    """
    tokens = batch.tokens[..., 0]
    _, statistics, sown = _with_statistics(model, params, batch, names, tokens, sow_weights=True)
    weights = attention_weights(sown)
    return of_places(task, weights, batch.sources) | statistics, weights


def of_places(task: Task, weights: Array, sources: Array) -> dict[str, Array]:
    """The mean weight ``[L,N]`` of ``weights [B,L,N,T,T]`` on each located place's ``sources [B,T,A]``."""

    def of_one_head(weights: Array, sources: Array) -> dict[str, Array]:
        return {place: heads.target_weight(weights, sources[:, task.places.index(place)]) for place in task.located}

    return _over_heads_and_batch(of_one_head, weights, sources)


def offset_profile(weights: Array, batch: Batch) -> Array:
    """Mean weight ``[L,N,O]`` at each offset from ``-(T-1)`` to 0, over the real queries of the batch."""
    length = weights.shape[-1]
    return _over_heads_and_batch(lambda w, b: heads.offset_profile(w, b.real)[:length], weights, batch)


def of_shuffled(model: Transformer, task: Task, params: Any, batch: Batch, shift: ArrayLike = 1) -> dict[str, Array]:
    """Scores ``[L,N]`` of patterns of tokens, each sequence scored against another's tokens and sources.

    The other sequence is ``shift`` places before it in the batch. This is a head's score by chance, which is a part of
    its roles' null.
    """
    tokens, sources = (jnp.roll(x, shift, 0) for x in (batch.tokens[..., 0], batch.sources))
    _, statistics, sown = _with_statistics(model, params, batch, heads.OF_TOKENS, tokens, sow_weights=True)
    places = of_places(task, attention_weights(sown), sources)
    return statistics | {place: score for place, score in places.items() if place in task.of_tokens}


def _over_heads_and_batch(statistic: Any, weights: Array, of_sequence: Any) -> Any:
    for _ in range(2):
        statistic = jax.vmap(statistic, (0, None))
    each = jax.vmap(statistic)(weights, of_sequence)
    return jax.tree.map(lambda values: values.mean(0), each)
