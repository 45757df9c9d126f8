"""All measurements for the claims and the report, on fresh data: what a model can do and how its heads do it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jattn import heads
from jattn.heads import MIXED, WEAK
from jattn_experiments import head_scores, train
from jattn_experiments.batches import Batch, Patch
from jattn_experiments.model import Transformer, layer_by_layer
from jattn_experiments.runs import devices
from jattn_experiments.tasks import CopyString
from jattn_experiments.train import Setup

LOOK_BATCH = 256  # sequences in the average of weights at the end
NULL_HEADS = 256  # heads of untrained models, which show what a head scores by chance
NULL_BATCH = 32
LEVEL = 0.05  # share of heads without a role that may be given one
CURVE_BATCH = 256  # strings at each length of the curve


class Measured(NamedTuple):
    """One model on fresh data; all leaves have a leading axis of seeds."""

    accuracy: Array  # [R,A]
    exact_match: Array  # [R] share of sequences without mistakes
    loss: Array  # [R] mean cross-entropy
    levels: dict[str, Array]  # name -> [R]: that of the task's reference predictors on the same sequences
    ablated: Array  # [R,L,N,A] accuracy with one head switched off
    hardened: Array  # [R,A] accuracy with all weight of each row on its largest
    scores: dict[str, Array]  # name -> [R,L,N]: places, and statistics of jattn.heads
    offset_profile: Array  # [R,L,N,O]
    mean_weights: Array  # [R,L,N,T,T] over sequences of one layout
    divergence: Array  # [R,L*N,L*N] between those
    noise: Array  # [R,L*N] between those of the two halves of the sequences
    curve: Array  # [R,C] exact match at each of evaluate.lengths
    patched: dict[str, Array]  # name -> [R]: share of the answers that a patch of the task changes as predicted
    in_context: Array  # [R] loss of late queries minus that of early ones; NaN if a task has none


def measure(setup: Setup, *models: Any) -> list[Measured]:
    """Measures each of ``models``, parameters of all seeds with leaves ``[R,...]``; NumPy arrays."""
    answer, look_into = _every_seed(_answers, setup), _every_seed(_looks, setup.looking)
    return [Measured(**answer(one), **look_into(devices.on_one(setup.mesh, one))) for one in models]


def _every_seed(measure: Callable[..., Any], setup: Setup) -> Callable[..., Any]:
    """``measure(setup, params, key, *others)`` over seeds, leaves ``[R,...]``; NumPy arrays on every process."""

    # one seed at a time: the weights of all seeds would not fit into a small machine's memory
    def every_seed(params: Any, *others: Any) -> Any:
        return jax.lax.map(lambda one: measure(setup, *one), (params, setup.keys, *others))

    run = jax.jit(every_seed, out_shardings=devices.whole(setup.mesh))
    return lambda *each: jax.tree.map(np.asarray, run(*each))


def _answers(setup: Setup, params: Any, key: Array) -> dict[str, Array]:
    """What one seed's model can do, with and without its heads."""
    looking, batch = setup.looking, _test_batch(setup, key)

    def answers(**options: Any) -> Array:
        return setup.model.apply(params, batch.tokens, at=batch.at, **options)

    # only the number of heads is read, so short sequences suffice
    tokens = looking.task.sample(jax.random.fold_in(key, train.TEST_DATA), 2).tokens
    _, kept = looking.model.apply(params, tokens, sow_heads=True, mutable=["intermediates"])
    clean = layer_by_layer(kept["intermediates"], "attention_heads")
    logits = answers()
    accuracy, exact_match = train.judge(logits, batch)
    return {
        "accuracy": accuracy,
        "exact_match": exact_match,
        "loss": train.loss_of(logits, batch),
        "levels": {name: level.mean() for name, level in batch.levels.items()},
        "ablated": heads.ablate(
            lambda options: train.judge(answers(per_layer=options), batch)[0], clean, batch_size=len(clean) * 4
        ),
        "hardened": train.judge(answers(harden=True), batch)[0],
    }


def _test_batch(setup: Setup, key: Array) -> Batch:
    batch = setup.task.held_out(jax.random.fold_in(key, train.TEST_DATA), setup.config.evaluate.batch)
    return devices.split(setup.mesh, batch)


def _looks(setup: Setup, params: Any, key: Array) -> dict[str, Any]:
    """How the heads of one seed's model do it."""
    task, model = setup.task, setup.model
    looked_at = task.look(jax.random.fold_in(key, train.TEST_DATA), setup.config.evaluate.batch)
    looked_at = jax.tree.map(lambda leaf: leaf[:LOOK_BATCH], looked_at)
    scores, weights = head_scores.scores(model, task, params, looked_at, head_scores.ALL)
    probe = task.probe(jax.random.fold_in(key, train.PROBE_DATA), LOOK_BATCH)
    patterns = of_patterns(head_scores.weights_of(model, params, probe.tokens), probe.real[0])
    patches = task.patch(jax.random.fold_in(key, train.TEST_DATA), setup.config.evaluate.batch)
    late = train.held_out(model, task, params, jax.random.fold_in(key, train.TEST_DATA), setup.config.evaluate.batch)
    return {
        "in_context": late.get("in_context", jnp.nan),
        "scores": scores,
        "offset_profile": head_scores.offset_profile(weights, looked_at),
        **patterns,
        "curve": _curve(setup, params, key),
        "patched": {name: changed_by(model, params, one) for name, one in patches.items()},
    }


def changed_by(model: Transformer, params: Any, patch: Patch) -> Array:
    """The share of right answers that ``patch`` changes to the answers it predicts."""
    _, kept = model.apply(params, patch.other, sow_heads=True, mutable=["intermediates"])
    *below, last = layer_by_layer(kept["intermediates"], "attention_heads")
    gate = jnp.where(patch.at[..., None], 0.0, jnp.ones(last["key"].shape[:-1]))  # [B,T,K]

    def answers(**options: Any) -> Array:
        per_layer = [*({} for _ in below), options]
        logits = model.apply(params, patch.tokens, at=patch.query[:, None], per_layer=per_layer)
        return jnp.argmax(logits[:, 0, patch.place], -1)

    right = patch.counts & (answers() == patch.answer)
    changed = answers(patch={name: (gate, last[name]) for name in patch.what}) == patch.predicted
    return jnp.sum(right & changed) / jnp.maximum(jnp.sum(right), 1)


def of_patterns(weights: Array, real: Array) -> dict[str, Array]:
    """The mean of ``weights [B,L,N,T,T]`` of one layout, the divergence between heads, and its noise floor."""
    flat = weights.reshape(len(weights), -1, *weights.shape[3:])
    return {
        "mean_weights": weights.mean(0),
        "divergence": heads.pattern_divergence(flat.mean(0), real),
        "noise": noise_floor(flat[0::2].mean(0), flat[1::2].mean(0), real),
    }


def noise_floor(one: Array, other: Array, real: Array) -> Array:
    """``[N]``: how much each head's mean pattern ``[N,T,S]`` differs between two sets of sequences."""
    return jax.vmap(lambda *both: heads.pattern_divergence(jnp.stack(both), real)[0, 1])(one, other)


def _curve(setup: Setup, params: Any, key: Array) -> Array:
    """Exact match ``[C]`` at each length; empty if the task has no lengths."""
    task, lengths = setup.task, setup.config.evaluate.lengths
    if not isinstance(task, CopyString) or not lengths:
        return jnp.zeros(0)

    def exact_match(length: Array) -> Array:
        key_here = jax.random.fold_in(jax.random.fold_in(key, train.TEST_DATA), length)
        batch = task.sample_length(key_here, CURVE_BATCH, length)
        return train.judge(setup.model.apply(params, batch.tokens), batch)[1]

    return jax.lax.map(exact_match, jnp.array(lengths))


def null(setup: Setup, params: Any) -> dict[str, np.ndarray]:
    """Scores, by pattern, of heads that cannot have a role: ``NULL_HEADS`` (or what roles need) of untrained models.

    Patterns of tokens also get about as many scores of the trained heads (``params``, leaves ``[R,...]``), measured
    with the tokens of other sequences.
    """
    params, setup = devices.on_one(setup.mesh, params), setup.looking
    names = [name for name in setup.task.roles if name not in setup.task.places]
    options, needed = setup.config.model, max(NULL_HEADS, math.ceil(len(setup.task.roles) / LEVEL))
    heads_each = options.num_layers * options.num_heads
    shifts = 1 + jnp.arange(min(math.ceil(needed / (heads_each * len(setup.seeds))), NULL_BATCH - 1))

    def untrained(key: Array) -> dict[str, Array]:
        batch, key = _null_batch(setup, key), jax.random.fold_in(key, train.NULL_INIT)
        return head_scores.scores(setup.model, setup.task, setup.model.init(key, batch.tokens[:1]), batch, names)[0]

    def shuffled(both: tuple[Any, Array]) -> dict[str, Array]:
        params, key = both
        batch = _null_batch(setup, key)
        return jax.lax.map(lambda shift: head_scores.of_shuffled(setup.model, setup.task, params, batch, shift), shifts)

    keys = jax.vmap(jax.random.key)(jnp.arange(math.ceil(needed / heads_each)))
    by_chance = jax.jit(lambda keys: jax.lax.map(untrained, keys, batch_size=16))(keys)
    beside = jax.jit(lambda both: jax.lax.map(shuffled, both))((params, setup.keys))
    return {
        name: np.concatenate([np.ravel(one[name]) for one in (by_chance, beside) if name in one])
        for name in setup.task.roles
    }


def _null_batch(setup: Setup, key: Array) -> Batch:
    return setup.task.look(jax.random.fold_in(key, train.NULL_DATA), NULL_BATCH)


def ablate_groups(setup: Setup, params: Any, labels: np.ndarray) -> dict[str, np.ndarray]:
    """``{role: [R,A]}``: accuracy with all heads of a role switched off; ``labels [R,L,N]``."""

    def accuracy(setup: Setup, params: Any, key: Array, gates: Array) -> Array:
        batch = _test_batch(setup, key)
        per_layer = [{"head_gate": gate} for gate in gates]
        return train.judge(setup.model.apply(params, batch.tokens, at=batch.at, per_layer=per_layer), batch)[0]

    every_seed = _every_seed(accuracy, setup)
    return {role: every_seed(params, np.asarray(labels != role, np.float32)) for role in clear_roles(labels)}


def clear_roles(labels: np.ndarray) -> list[str]:
    """The roles among the labels that are neither mixed nor weak."""
    return [str(role) for role in np.unique(labels) if role != MIXED and not str(role).startswith(WEAK)]


def drops(measured: Measured) -> np.ndarray:
    """``[R,L,N,A]``: the accuracy each place loses without a head."""
    return measured.accuracy[:, None, None] - measured.ablated


def find_roles(setup: Setup, trained: Measured, params: Any) -> heads.Roles:
    """The role of every head ``[R,L,N]`` among those of the task, tested against the null."""
    scores = {name: trained.scores[name] for name in setup.task.roles}
    return heads.roles(scores, null(setup, params), level=LEVEL)


def head_rows(seeds: list[int], roles: heads.Roles) -> list[dict[str, Any]]:
    """Rows ``{seed, layer, head, role, score, null, p_value}`` of all heads; ``null`` is the threshold."""
    rows = []
    for at in np.ndindex(roles.label.shape):
        row = {"seed": seeds[at[0]], "layer": at[1], "head": at[2], "role": str(roles.label[at])}
        numbers = {"score": roles.score[at], "null": roles.threshold[at], "p_value": roles.p_value[at]}
        rows.append(row | {name: float(number) for name, number in numbers.items()})
    return rows


def example_tokens(setup: Setup) -> list[list[str]]:
    """Token labels of the examples in ``train.look_at``."""
    setup = setup.looking
    draw = lambda key: setup.task.probe(jax.random.fold_in(key, train.PROBE_DATA), train.EXAMPLES).tokens
    return [setup.task.labels(example) for example in np.asarray(jax.jit(draw)(setup.keys[0])).tolist()]
