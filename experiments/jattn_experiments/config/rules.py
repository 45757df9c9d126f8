"""The rules for values in a config: which values of the right type are valid."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

from jattn_experiments.batches import Rule
from jattn_experiments.schema import Config, Kind
from jattn_experiments.tasks import TASKS, Task, make

_POSITIVE = {
    "task": ("symbols", "length", "shortest", "pairs", "hops"),
    "model": ("num_layers", "num_heads", "model_dim", "head_dim", "rotary_base", "embed_scale"),
    "train": (
        "seeds",
        "steps",
        "batch",
        "learning_rate",
        "muon_rate",
        "clip",
        "log_every",
        "look_every",
        "checkpoint_every",
    ),
    "evaluate": ("batch",),
    "mesh": ("data", "heads", "sequence"),
    "language": ("sequences", "period", "group", "matched"),
    "long": ("depths", "chosen", "texts", "ablated", "window", "streamed", "pictured"),
    "circuits": ("steps", "compared"),
}
LARGEST = 3.4028234663852886e38  # of float32, the dtype of all computation


def check(config: Config) -> None:
    """Raises ``ValueError`` for invalid values of the right type."""
    follow(config, _basic_rules(config))
    for key, value in _floats(dataclasses.asdict(config)):
        if not abs(value) <= LARGEST:
            raise ValueError(f"{key}: expected a finite float32 number, got {value!r}")
    task = make(config.task)
    for rules in (_task_rules, _model_rules, _train_rules, _mesh_rules, _look_length_rules, _other_rules):
        follow(config, rules(config, task))
    _check_claims(config)


def follow(config: Config, rules: Iterator[Rule]) -> None:
    """Raises ``ValueError`` for the first broken rule; a rule is (dotted option, is it valid, what was expected)."""
    for key, good, expected in rules:
        if not good:
            value = functools.reduce(getattr, key.split("."), config)
            raise ValueError(f"{key}: expected {expected}, got {value!r}")


def _basic_rules(config: Config) -> Iterator[Rule]:
    """Rules on which the other rules rely."""
    yield "task.kind", config.task.kind in TASKS, f"one of {', '.join(sorted(TASKS))}"
    for section, names in _POSITIVE.items():
        for name in names:
            yield f"{section}.{name}", getattr(getattr(config, section), name) > 0, "> 0"
    groups = config.pretrained.groups
    enough = len(groups) > 1 and all(len(group) > 1 for group in groups)
    if config.kind is Kind.SENTENCE_ENCODER:
        yield "pretrained.groups", enough, "at least 2 groups of at least 2 sentences"


def _floats(plain: Any, key: str = "") -> list[tuple[str, float]]:
    """All floats in nested dicts and lists, with their dotted keys; a claim's key includes its name."""
    if isinstance(plain, float):
        return [(key, plain)]
    if isinstance(plain, dict):
        items = [(f"{key}.{name}" if key else str(name), value) for name, value in plain.items()]
    elif isinstance(plain, list):
        items = [(f"{key}.{one['name']}" if isinstance(one, dict) and "name" in one else key, one) for one in plain]
    else:
        items = []
    return [pair for name, value in items for pair in _floats(value, name)]


def _kinds(name: str, value: bool) -> tuple[str, ...]:
    """The kinds of tasks that have this value for an attribute."""
    return tuple(kind for kind, task in TASKS.items() if getattr(task, name) is value)


def _task_rules(config: Config, task: Task) -> Iterator[Rule]:
    """The task's own rules, then those for the options of all tasks."""
    length, shortest, longest = config.task.length, config.task.shortest, config.task.longest
    for name, good, expected in task.rules():
        yield f"task.{name}", good, expected
    yield "task.length", length % 4 == 0 and length >= 12, "a multiple of 4 that is at least 12"
    yield "task.longest", longest >= shortest, f"at least task.shortest={shortest}"
    yield "task.farthest", config.task.farthest >= longest, f"at least task.longest={longest}"


def _model_rules(config: Config, task: Task) -> Iterator[Rule]:
    model, kind = config.model, config.task.kind
    kv_heads, scale, position = model.num_kv_heads, model.kernel_scale, model.position
    divides = kv_heads is None or (kv_heads > 0 and model.num_heads % kv_heads == 0)
    yield "model.num_kv_heads", divides, f"a divisor of model.num_heads={model.num_heads}"
    yield "model.kernel_scale", scale is None or scale > 0, "> 0"
    yield "model.value_dim", model.value_dim is None or model.value_dim > 0, "> 0"
    yield "model.window", model.window is None or model.window > 0, "> 0"
    fixed = f"anything but relative_keys for task.kind={kind}, because its sequences differ in length"
    yield "model.position", position != "relative_keys" or task.same_length, fixed
    yield "model.window", model.window is None or (model.causal and task.causal), "null for attention to all tokens"
    counting = f"task.kind={', '.join(_kinds('causal', False))}, which also counts later tokens"
    yield "model.causal", model.causal == task.causal, f"false for {counting}, and true for others"
    yield (
        "model.tied",
        not model.tied or task.answers_are_tokens,
        "false, because this task's answers are not single tokens",
    )
    yield "model.mlp_dim", model.mlp_dim >= 0, ">= 0"
    yield "model.head_dim", position != "rotary" or model.head_dim % 2 == 0, "even for rotary positions"
    yield "model.rotary_base", position != "rotary" or model.rotary_base > 1, "more than 1 for rotary positions"
    yield "model.model_dim", position != "sinusoidal" or model.model_dim % 2 == 0, "even for sinusoidal positions"


def _train_rules(config: Config, task: Task) -> Iterator[Rule]:
    train, places, below = config.train, len(task.places), config.train.entropy_below
    weights, most = train.place_weights, 2**32 - train.seeds  # a key is made of 32 bits
    seeds = f"0 to {most} (2**32 - train.seeds={train.seeds})"
    yield "train.first_seed", 0 <= train.first_seed <= most, seeds
    yield "train.keep", train.keep >= 0, ">= 0"
    # A warm-up is never shortened silently: training follows the config.
    shorter = f"(fewer steps need a shorter warm-up, such as {train.steps // 10})"
    yield "train.warmup", 0 <= train.warmup < train.steps, f">= 0 and < train.steps={train.steps} {shorter}"
    yield "train.entropy_after", 0 <= train.entropy_after <= 1, "0 to 1"
    yield "train.entropy_below", below is None or below > 0, "a loss in nats > 0, or null for any loss"
    yield "train.final_rate", 0 <= train.final_rate <= 1, "0 to 1"
    yield "train.b2", 0 < train.b2 < 1, "a number between 0 and 1"
    yield "train.weight_decay", train.weight_decay >= 0, ">= 0"
    yield "train.entropy_penalty", train.entropy_penalty >= 0, ">= 0"
    positive = weights is None or (len(weights) == places and min(weights) > 0)
    yield "train.place_weights", positive, f"{places} numbers > 0, one for each place"
    for name, of in (("look_every", "log_every"), ("checkpoint_every", "look_every")):
        steps = getattr(train, of)
        yield f"train.{name}", getattr(train, name) % steps == 0, f"a multiple of train.{of}={steps}"


def _mesh_rules(config: Config, task: Task) -> Iterator[Rule]:
    mesh, model, tokens, kind = config.mesh, config.model, task.trained_length, config.task.kind
    kv_heads = model.num_kv_heads or model.num_heads
    for key, batch in (("train.batch", config.train.batch), ("evaluate.batch", config.evaluate.batch)):
        yield "mesh.data", batch % mesh.data == 0, f"a divisor of {key}={batch}"
    yield "mesh.heads", model.num_heads % mesh.heads == 0, f"a divisor of model.num_heads={model.num_heads}"
    even = kv_heads % mesh.heads == 0 or mesh.heads % kv_heads == 0
    yield "mesh.heads", even, f"a divisor or a multiple of model.num_kv_heads={kv_heads}"
    halves = f"2 * mesh.sequence to be a divisor of {tokens}, the tokens of a sequence of task.kind={kind}"
    yield "mesh.sequence", mesh.sequence == 1 or tokens % (2 * mesh.sequence) == 0, halves
    kinds = f"task.kind in {_kinds('can_split', False)} and model.position=relative_keys"
    splits = mesh.sequence == 1 or (task.can_split and model.position != "relative_keys")
    yield "mesh.sequence", splits, f"1 with {kinds}, because they need whole sequences"


def _look_length_rules(config: Config, task: Task) -> Iterator[Rule]:
    """A shorter sequence must pose the same task to the same model."""
    options, position, length = config.task, config.model.position, config.evaluate.look_length
    if length is None:
        return
    key = "evaluate.look_length"
    yield key, task.can_shorten, f"null, because only task.kind={', '.join(_kinds('can_shorten', True))} takes it"
    relative = position in ("none", "rotary", "alibi", "relative")
    yield key, relative, f"null with model.position={position}, which encodes absolute positions"
    enough = max(options.offsets, default=0) < length <= options.length
    yield key, enough, f"more than the largest of task.offsets={options.offsets} and at most {options.length}"


def _other_rules(config: Config, task: Task) -> Iterator[Rule]:
    farthest = config.task.farthest
    yield "name", bool(re.fullmatch(r"[\w-]+", config.name)), "only letters, digits, '_' and '-'"
    inside = all(0 < length <= farthest for length in config.evaluate.lengths)
    yield "evaluate.lengths", inside, f"numbers from 1 to task.farthest={farthest}"


def _check_claims(config: Config) -> None:
    seeds, trains = config.train.seeds, config.kind is Kind.TRAINING
    for claim in config.claims:
        key, bounds = f"claims.{claim.name}", [claim.at_least, claim.at_most]
        if bounds.count(None) != 1:
            raise ValueError(f"{key}: expected either at_least or at_most, got {bounds!r}")
        if claim.minus is not None and not trains:
            raise ValueError(f"{key}.minus: expected null, because nothing is trained, got {claim.minus!r}")
        others = "train.seeds" in config.controls.get(claim.metric.rpartition(":")[0], {})  # checked with the metrics
        if claim.needed <= 0 or (claim.needed > seeds and not others):
            hint = "change it in the config's claims, or drop all claims with --claims '[]'"
            raise ValueError(f"{key}.needed: expected 1 to train.seeds={seeds}, got {claim.needed!r}; {hint}")
