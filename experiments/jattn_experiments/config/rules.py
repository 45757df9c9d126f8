"""Which values of the right type are valid in a config: a rule for each option that can be wrong."""

import dataclasses
import re
from typing import Any

from jattn_experiments.schema import Config, Kind
from jattn_experiments.tasks import TASKS, Task, make

_POSITIVE = {
    "task": ("symbols", "length", "shortest", "pairs", "hops"),
    "model": ("num_layers", "num_heads", "model_dim", "head_dim", "rotary_base", "embed_scale"),
    "train": ("seeds", "steps", "batch", "learning_rate", "clip", "log_every", "look_every", "checkpoint_every"),
    "evaluate": ("batch",),
    "mesh": ("data", "heads", "sequence"),
    "language": ("sequences", "period", "group", "matched"),
    "long": ("depths", "chosen", "texts", "ablated", "window", "streamed", "pictured"),
}
LARGEST = 3.4028234663852886e38  # of float32, the dtype of all computation
_Rule = tuple[str, Any, bool, str]  # key, value, whether it is valid, what was expected


def check(config: Config) -> None:
    """Raises ``ValueError`` for invalid values of the right type."""
    if config.task.kind not in TASKS:
        raise ValueError(f"task.kind: expected one of {', '.join(sorted(TASKS))}, got {config.task.kind!r}")
    for section, keys in _POSITIVE.items():
        for key in keys:
            value = getattr(getattr(config, section), key)
            if not value > 0:
                raise ValueError(f"{section}.{key}: expected > 0, got {value!r}")
    for key, value in _floats(dataclasses.asdict(config)):
        if not abs(value) <= LARGEST:
            raise ValueError(f"{key}: expected a finite float32 number, got {value!r}")
    groups = config.pretrained.groups
    few = len(groups) < 2 or any(len(group) < 2 for group in groups)
    if config.kind is Kind.SENTENCE_ENCODER and few:
        raise ValueError(f"pretrained.groups: expected at least 2 groups of at least 2 sentences, got {groups!r}")
    task = make(config.task)
    of_task, of_model, of_train = _task_rules(config, task), _model_rules(config, task), _train_rules(config, task)
    for key, value, good, expected in of_task + of_model + of_train + _mesh_rules(config, task) + _claim_rules(config):
        if not good:
            raise ValueError(f"{key}: expected {expected}, got {value!r}")


def _floats(plain: Any, key: str = "") -> list[tuple[str, float]]:
    """All floats in nested dicts and lists, with their dotted keys; a claim's key has its name."""
    if isinstance(plain, float):
        return [(key, plain)]
    if isinstance(plain, dict):
        items = [(f"{key}.{name}" if key else str(name), value) for name, value in plain.items()]
    elif isinstance(plain, list):
        items = [(f"{key}.{one['name']}" if isinstance(one, dict) and "name" in one else key, one) for one in plain]
    else:
        items = []
    return [found for name, value in items for found in _floats(value, name)]


def _kinds(name: str, value: bool) -> tuple[str, ...]:
    """The kinds of tasks of which something is so."""
    return tuple(kind for kind, task in TASKS.items() if getattr(task, name) is value)


def _task_rules(config: Config, task: Task) -> list[_Rule]:
    """Those of the task itself, then those that hold for the options of all."""
    options = config.task
    length, shortest, longest, farthest = options.length, options.shortest, options.longest, options.farthest
    return [
        *((f"task.{name}", getattr(options, name), good, expected) for name, good, expected in task.rules()),
        ("task.length", length, length % 4 == 0 and length >= 12, "a multiple of 4, at least 12"),
        ("task.longest", longest, longest >= shortest, f"at least task.shortest={shortest}"),
        ("task.farthest", farthest, farthest >= longest, f"at least task.longest={longest}"),
    ]


def _model_rules(config: Config, task: Task) -> list[_Rule]:
    model, kind = config.model, config.task.kind
    kv_heads, value_dim, base, window = model.num_kv_heads, model.value_dim, model.rotary_base, model.window
    return [
        (
            "model.num_kv_heads",
            kv_heads,
            kv_heads is None or (kv_heads > 0 and model.num_heads % kv_heads == 0),
            f"a divisor of model.num_heads={model.num_heads}",
        ),
        (
            "model.kernel_scale",
            model.kernel_scale,
            model.kernel_scale is None or model.kernel_scale > 0,
            "> 0",
        ),
        ("model.value_dim", value_dim, value_dim is None or value_dim > 0, "> 0"),
        ("model.window", window, window is None or window > 0, "> 0"),
        (
            "model.position",
            model.position,
            model.position != "relative_keys" or task.same_length,
            f"other than relative_keys for task.kind={kind}, whose sequences differ in length",
        ),
        ("model.window", window, window is None or (model.causal and task.causal), "null with all tokens"),
        (
            "model.causal",
            model.causal,
            model.causal == task.causal,
            f"false for task.kind={', '.join(_kinds('causal', False))}, which counts later tokens too, and true for "
            "others",
        ),
        (
            "model.tied",
            model.tied,
            not model.tied or task.answers_are_tokens,
            "false where answers are not tokens, or several",
        ),
        ("model.mlp_dim", model.mlp_dim, model.mlp_dim >= 0, ">= 0"),
        ("model.head_dim", model.head_dim, model.position != "rotary" or model.head_dim % 2 == 0, "even for rotary"),
        ("model.rotary_base", base, model.position != "rotary" or base > 1, "more than 1 for rotary"),
        (
            "model.model_dim",
            model.model_dim,
            model.position != "sinusoidal" or model.model_dim % 2 == 0,
            "even for sinusoidal",
        ),
    ]


def _train_rules(config: Config, task: Task) -> list[_Rule]:
    train, places = config.train, len(task.places)
    weights, most = train.place_weights, 2**32 - train.seeds  # a key is made of 32 bits
    # A warm-up is never shortened silently: training follows the config.
    warmup = f">= 0 and < train.steps={train.steps} (fewer steps need a shorter warm-up, such as {train.steps // 10})"
    return [
        (
            "train.first_seed",
            train.first_seed,
            0 <= train.first_seed <= most,
            f"from 0 to {most}, 2**32 - train.seeds={train.seeds}",
        ),
        ("train.keep", train.keep, train.keep >= 0, ">= 0"),
        ("train.warmup", train.warmup, 0 <= train.warmup < train.steps, warmup),
        ("train.entropy_after", train.entropy_after, 0 <= train.entropy_after <= 1, "from 0 to 1"),
        (
            "train.entropy_below",
            train.entropy_below,
            train.entropy_below is None or train.entropy_below > 0,
            "> 0 nats, or null for any loss",
        ),
        ("train.final_rate", train.final_rate, 0 <= train.final_rate <= 1, "from 0 to 1"),
        ("train.b2", train.b2, 0 < train.b2 < 1, "between 0 and 1"),
        ("train.weight_decay", train.weight_decay, train.weight_decay >= 0, ">= 0"),
        ("train.entropy_penalty", train.entropy_penalty, train.entropy_penalty >= 0, ">= 0"),
        (
            "train.place_weights",
            weights,
            weights is None or (len(weights) == places and min(weights) > 0),
            f"{places} numbers > 0, one for each place",
        ),
        (
            "train.look_every",
            train.look_every,
            train.look_every % train.log_every == 0,
            f"a multiple of train.log_every={train.log_every}",
        ),
        (
            "train.checkpoint_every",
            train.checkpoint_every,
            train.checkpoint_every % train.look_every == 0,
            f"a multiple of train.look_every={train.look_every}",
        ),
    ]


def _mesh_rules(config: Config, task: Task) -> list[_Rule]:
    mesh, model, tokens, kind = config.mesh, config.model, task.trained_length, config.task.kind
    kv_heads = model.num_kv_heads or model.num_heads
    batches = [("train.batch", config.train.batch), ("evaluate.batch", config.evaluate.batch)]
    return [
        *(("mesh.data", mesh.data, batch % mesh.data == 0, f"a divisor of {key}={batch}") for key, batch in batches),
        (
            "mesh.heads",
            mesh.heads,
            model.num_heads % mesh.heads == 0,
            f"a divisor of model.num_heads={model.num_heads}",
        ),
        (
            "mesh.heads",
            mesh.heads,
            kv_heads % mesh.heads == 0 or mesh.heads % kv_heads == 0,
            f"a divisor or a multiple of model.num_kv_heads={kv_heads}",
        ),
        (
            "mesh.sequence",
            mesh.sequence,
            mesh.sequence == 1 or tokens % (2 * mesh.sequence) == 0,
            f"2 * mesh.sequence to divide the {tokens} tokens of a sequence of task.kind={kind}",
        ),
        (
            "mesh.sequence",
            mesh.sequence,
            mesh.sequence == 1 or (task.can_split and model.position != "relative_keys"),
            f"1 with task.kind in {_kinds('can_split', False)} and model.position=relative_keys, which need whole "
            "sequences",
        ),
        *_look_length_rules(config, task),
    ]


def _look_length_rules(config: Config, task: Task) -> list[_Rule]:
    """A shorter sequence must pose the same task to the same model."""
    options, position, looked = config.task, config.model.position, config.evaluate.look_length
    if looked is None:
        return []
    key, fixed = "evaluate.look_length", f"an option of task.kind={', '.join(_kinds('can_shorten', True))} only"
    relative = position in ("none", "rotary", "alibi", "relative")
    enough = max(options.offsets, default=0) < looked <= options.length and task.can_shorten
    return [
        (key, looked, task.can_shorten, fixed),
        (key, looked, relative, f"null with model.position={position}, which numbers tokens"),
        (key, looked, enough, f"more than the largest of task.offsets={options.offsets}, at most {options.length}"),
    ]


def _claim_rules(config: Config) -> list[_Rule]:
    lengths, farthest = config.evaluate.lengths, config.task.farthest
    rules: list[_Rule] = [
        ("name", config.name, bool(re.fullmatch(r"[\w-]+", config.name)), "letters, digits, '_' and '-'"),
        ("evaluate.lengths", lengths, all(0 < n <= farthest for n in lengths), f"1 to task.farthest={farthest}"),
    ]
    for claim in config.claims:
        key, seeds = f"claims.{claim.name}", config.train.seeds
        one = (claim.at_least is None) != (claim.at_most is None)
        rules.append((key, [claim.at_least, claim.at_most], one, "one of at_least and at_most"))
        trains = config.kind is Kind.TRAINING
        rules.append((f"{key}.minus", claim.minus, claim.minus is None or trains, "null where nothing is trained"))
        rules.append((f"{key}.needed", claim.needed, 0 < claim.needed <= seeds, f"1 to train.seeds={seeds}"))
    return rules
