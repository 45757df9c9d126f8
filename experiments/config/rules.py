"""Which values of the right type are valid in a config: a rule for each option that can be wrong."""

import dataclasses
import re
from typing import Any

from experiments.config.schema import Config, Kind, Model, Task

_POSITIVE = {
    "task": ("symbols", "length", "shortest", "pairs", "hops"),
    "model": ("num_layers", "num_heads", "model_dim", "head_dim", "rotary_base", "embed_scale"),
    "train": ("seeds", "steps", "batch", "learning_rate", "clip", "log_every", "look_every", "checkpoint_every"),
    "evaluate": ("batch",),
    "mesh": ("data", "heads", "sequence"),
    "language": ("sequences", "period", "group", "matched"),
}
_WHOLE = ("markov", "recall", "histogram")  # kinds whose batches a ring does not split
LARGEST = 3.4028234663852886e38  # of float32, the dtype of all computation
_Rule = tuple[str, Any, bool, str]  # key, value, whether it is valid, what was expected


def check(config: Config) -> None:
    """Raises ``ValueError`` for invalid values of the right type."""
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
    of_task, of_claims = _task_and_model_rules(config.task, config.model), _claim_rules(config)
    for key, value, good, expected in of_task + _train_rules(config) + _mesh_rules(config) + of_claims:
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


def _task_and_model_rules(task: Task, model: Model) -> list[_Rule]:
    kv_heads, value_dim, base, window = model.num_kv_heads, model.value_dim, model.rotary_base, model.window
    return [
        *_of_task(task),
        ("task.length", task.length, task.length % 4 == 0 and task.length >= 12, "a multiple of 4, at least 12"),
        ("task.longest", task.longest, task.longest >= task.shortest, f"at least task.shortest={task.shortest}"),
        ("task.farthest", task.farthest, task.farthest >= task.longest, f"at least task.longest={task.longest}"),
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
            model.position != "relative_keys" or task.kind != "copy_string",
            "other than relative_keys for task.kind=copy_string, whose sequences differ in length",
        ),
        ("model.window", window, window is None or (model.causal and task.kind != "histogram"), "null with all tokens"),
        (
            "model.causal",
            model.causal,
            model.causal == (task.kind != "histogram"),
            "false for task.kind=histogram, which counts later tokens too, and true for others",
        ),
        (
            "model.tied",
            model.tied,
            not model.tied or task.kind in ("induction", "markov", "recall"),
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


def _of_task(task: Task) -> list[_Rule]:
    """Rules of a single kind of task."""
    length, offsets = task.length, task.offsets
    if task.kind == "shift_bank":
        good = bool(offsets) and len(set(offsets)) == len(offsets) and all(0 < one < length for one in offsets)
        return [("task.offsets", offsets, good, f"distinct numbers >= 1 and < task.length={length}")]
    if task.kind == "induction":
        longest = min(length // 2, task.symbols)
        return [
            ("task.longest", task.longest, task.longest <= longest, f"at most {longest}, half of task.length"),
            (
                "task.symbols",
                task.symbols,
                task.symbols >= length - task.longest,
                "at least task.length - task.longest",
            ),
        ]
    if task.kind == "markov":
        good = task.prior == "dirichlet" or task.symbols == 2
        return [("task.symbols", task.symbols, good and task.symbols > 1, "at least 2, and 2 with doubly_stochastic")]
    if task.kind == "recall":
        pairs, most = task.pairs, min(length // 4, (task.symbols - 2) // 2)
        return [("task.pairs", pairs, pairs <= most, f"at most {most}: a quarter of task.length, half of task.symbols")]
    if task.kind == "histogram":
        return [("task.shortest", task.shortest, task.shortest <= length, f"at most task.length={length}")]
    if task.kind == "hop":
        return [("task.symbols", task.symbols, task.symbols > 1, "at least 2: neighbours differ")]
    if task.kind == "skills":
        return [("task.symbols", task.symbols, task.symbols >= length // 2, "at least half of task.length")]
    return []


def _train_rules(config: Config) -> list[_Rule]:
    train, kind = config.train, config.task.kind
    several = {"copy": 4, "skills": 4, "shift_bank": len(config.task.offsets), "hop": config.task.hops + 1}
    places = several.get(kind, 1)
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


def _mesh_rules(config: Config) -> list[_Rule]:
    mesh, model = config.mesh, config.model
    kv_heads = model.num_kv_heads or model.num_heads
    tokens = 2 * config.task.longest + 1 if config.task.kind == "copy_string" else config.task.length
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
            f"2 * mesh.sequence to divide the {tokens} tokens of a sequence of task.kind={config.task.kind}",
        ),
        (
            "mesh.sequence",
            mesh.sequence,
            mesh.sequence == 1 or (config.task.kind not in _WHOLE and model.position != "relative_keys"),
            f"1 with task.kind in {_WHOLE} and model.position=relative_keys, which need whole sequences",
        ),
        *_look_length_rules(config),
    ]


def _look_length_rules(config: Config) -> list[_Rule]:
    """A shorter sequence must pose the same task to the same model."""
    task, position, looked = config.task, config.model.position, config.evaluate.look_length
    if looked is None:
        return []
    key, fixed = "evaluate.look_length", "an option of task.kind=shift_bank only"
    relative = position in ("none", "rotary", "alibi", "relative")
    enough = max(task.offsets, default=0) < looked <= task.length and task.kind == "shift_bank"
    return [
        (key, looked, task.kind == "shift_bank", fixed),
        (key, looked, relative, f"null with model.position={position}, which numbers tokens"),
        (key, looked, enough, f"more than the largest of task.offsets={task.offsets}, at most {task.length}"),
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
