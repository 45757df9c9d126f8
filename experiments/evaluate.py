"""What a model can do and how its heads do it: everything the claims and the report read, on fresh data."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments import look
from experiments.tasks import CopyString
from experiments.train import PROBE_DATA, TEST_DATA, Setup, judge
from jattn import heads

LOOK_BATCH = 256  # sequences that weights are averaged over
ROLE_AT = 0.5  # share of a head's weight from which on a pattern is its role


class Measured(NamedTuple):
    """One model on fresh data; every leaf has a leading axis of seeds."""

    accuracy: Array  # [R,A]
    exact_match: Array  # [R] share of sequences without a mistake
    ablated: Array  # [R,L,N,A] accuracy with one head switched off
    hardened: Array  # [R,A] accuracy with each row of weights replaced by its largest
    scores: dict[str, Array]  # name -> [R,L,N]
    offset_profile: Array  # [R,L,N,O]
    mean_weights: Array  # [R,L,N,T,T] over sequences of one layout
    divergence: Array  # [R,L*N,L*N] between those
    curve: Array  # [R,C] exact match at each of evaluate.lengths


def measure(setup: Setup, *models: Any) -> list[Measured]:
    """Measures each of ``models``, parameters of all seeds with leaves ``[R,...]``; NumPy arrays."""
    # one seed after the other: side by side, their weights would not fit into a small machine's memory
    every_seed = jax.jit(lambda both: jax.lax.map(lambda one: _measure(setup, *one), both))
    return [jax.tree.map(np.asarray, every_seed((params, setup.keys))) for params in models]


def _measure(setup: Setup, params: Any, key: Array) -> Measured:
    """One seed."""
    task, options = setup.task, setup.config.model
    shape = options.num_layers, options.num_heads
    batch = task.sample(jax.random.fold_in(key, TEST_DATA), setup.config.evaluate.batch)

    def answers(head_gates: Array, harden: bool = False) -> tuple[Array, Array]:
        return judge(setup.model.apply(params, batch.tokens, head_gates=head_gates, harden=harden), batch)

    one_off = 1.0 - jnp.eye(shape[0] * shape[1]).reshape(-1, *shape)
    accuracy, exact_match = jax.vmap(answers)(jnp.concatenate([jnp.ones((1, *shape)), one_off]))

    looked_at = jax.tree.map(lambda leaf: leaf[:LOOK_BATCH], batch)
    weights = look.weights_of(setup.model, params, looked_at.tokens)
    probe = task.probe(jax.random.fold_in(key, PROBE_DATA), LOOK_BATCH)
    mean_weights = look.weights_of(setup.model, params, probe.tokens).mean(0)
    return Measured(
        accuracy=accuracy[0],
        exact_match=exact_match[0],
        ablated=accuracy[1:].reshape(*shape, -1),
        hardened=answers(jnp.ones(shape), harden=True)[0],
        scores=look.scores(task, weights, looked_at),
        offset_profile=look.offset_profile(weights, looked_at),
        mean_weights=mean_weights,
        divergence=heads.divergence(mean_weights.reshape(-1, *mean_weights.shape[2:]), probe.real[0]),
        curve=_curve(setup, params, key),
    )


def _curve(setup: Setup, params: Any, key: Array) -> Array:
    """Exact match ``[C]`` at each length; empty where the task has no lengths."""
    task, lengths = setup.task, setup.config.evaluate.lengths
    if not isinstance(task, CopyString) or not lengths:
        return jnp.zeros(0)

    def exact_match(length: Array) -> Array:
        key_here = jax.random.fold_in(jax.random.fold_in(key, TEST_DATA), length)
        batch = task.sample_length(key_here, LOOK_BATCH, length)
        return judge(setup.model.apply(params, batch.tokens), batch)[1]

    return jax.lax.map(exact_match, jnp.array(lengths))


def num_parameters(params: Any) -> int:
    """Parameters of one seed's model."""
    return sum(leaf[0].size for leaf in jax.tree.leaves(params))


def drops(found: Measured) -> np.ndarray:
    """``[R,L,N,A]``: what switching a head off costs each place."""
    return found.accuracy[:, None, None] - found.ablated


def head_rows(setup: Setup, trained: Measured, untrained: Measured) -> list[dict[str, Any]]:
    """Rows ``{seed, layer, head, role, score, null}``: each head's role, its score, and the untrained model's.

    The role is the pattern that holds at least half of the head's weight, "mixed" where none does; then the score is
    the largest of all. Places come first: a head on its place may be an induction head as well.
    """
    patterns = [*setup.task.places, "previous_token", "induction", "sink"]
    rows = []
    for r, layer, head in np.ndindex(trained.scores["sink"].shape):
        scores = {name: float(trained.scores[name][r, layer, head]) for name in patterns}
        role = next((name for name in patterns if scores[name] >= ROLE_AT), None)
        shown = role or max(scores, key=scores.__getitem__)
        null = float(untrained.scores[shown][r, layer, head])
        row = {"seed": setup.seeds[r], "layer": layer, "head": head, "role": role or "mixed"}
        rows.append(row | {"score": scores[shown], "null": null})
    return rows


def example_tokens(setup: Setup) -> list[str]:
    """Labels of the tokens of the example that ``train.look_at`` follows."""
    tokens = jax.jit(lambda key: setup.task.probe(jax.random.fold_in(key, PROBE_DATA), 1).tokens)(setup.keys[0])
    return setup.task.labels(np.asarray(tokens[0]).tolist())
