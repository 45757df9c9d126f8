"""What an experiment is, as data: frozen dataclasses, read from YAML files and the command line."""

import argparse
import dataclasses
import difflib
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import jsonargparse

from experiments import config_rules


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        kind: Which task: "copy" (from four places at once), "copy_string" (BOS s SEP s), "shift_bank" (from fixed
            distances), "induction" (what followed the last time) or "skills" (fixed distances and induction).
        symbols: How many different values there are to copy.
        length: Tokens in a sequence (copy: half of it is the number of keys); copy_string has lengths of its own.
        shortest: Shortest string of copy_string in training; shortest period of induction and skills.
        longest: Longest string of copy_string in training; longest period of induction and skills.
        farthest: copy_string: longest string in the curve over length.
        offsets: shift_bank: the distances back that are read out.
    """

    kind: Literal["copy", "copy_string", "shift_bank", "induction", "skills"] = "copy"
    symbols: int = 16
    length: int = 32
    shortest: int = 4
    longest: int = 20
    farthest: int = 40
    offsets: list[int] = dataclasses.field(default_factory=lambda: [1, 2, 4, 7])


@dataclasses.dataclass(frozen=True)
class Model:
    """The transformer.

    Attributes:
        num_layers: Layers, one attention in each.
        num_heads: Query heads in each layer.
        num_kv_heads: Key/value heads; null is as many as query heads.
        model_dim: Width of the residual stream.
        head_dim: Dimension of a query/key head.
        value_dim: Dimension of a value head; null is head_dim.
        mlp_dim: Hidden width of the MLP after each attention; 0 leaves it out.
        norm: Whether layer norms stand before attention, MLP and read-out.
        position: How the model knows positions.
        rotary_base: rotary: base of the wavelengths.
        embed_scale: Standard deviation of the embeddings at the start.
    """

    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int | None = None
    model_dim: int = 64
    head_dim: int = 16
    value_dim: int | None = None
    mlp_dim: int = 0
    norm: bool = True
    position: Literal["none", "sinusoidal", "learned", "rotary", "alibi", "relative"] = "learned"
    rotary_base: float = 10000.0
    embed_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Train:
    """How it is trained: AdamW with warm-up, cosine decay and clipping.

    Attributes:
        seeds: How many seeds to train at once.
        first_seed: The first seed; the others follow it.
        steps: Updates.
        batch: Sequences in an update.
        learning_rate: Peak learning rate.
        final_rate: Learning rate at the end, as a fraction of the peak.
        warmup: Steps of linear warm-up.
        b2: Decay of Adam's second moment.
        weight_decay: AdamW's weight decay.
        clip: Largest global norm of a gradient.
        entropy_penalty: Weight in the loss of the heads' mean entropy (0 to 1), which makes them choose.
        place_weights: Weight in the loss of each place that is read out; null is 1 each.
        log_every: Steps over which a line of metrics is averaged.
        look_every: Steps between two looks at the heads.
        checkpoint_every: Steps between two checkpoints, a multiple of look_every.
    """

    seeds: int = 5
    first_seed: int = 0
    steps: int = 800
    batch: int = 32
    learning_rate: float = 3e-3
    final_rate: float = 0.1
    warmup: int = 50
    b2: float = 0.99
    weight_decay: float = 1e-4
    clip: float = 1.0
    entropy_penalty: float = 0.0
    place_weights: list[float] | None = None
    log_every: int = 10
    look_every: int = 50
    checkpoint_every: int = 200


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """How it is judged.

    Attributes:
        batch: Fresh sequences for each seed.
        lengths: copy_string: lengths in the curve over length.
    """

    batch: int = 1024
    lengths: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A sentence encoder that is looked at instead of trained.

    Attributes:
        folder: Folder of a saved model of the BERT family, with config.json, *.safetensors and tokenizer.json.
        package: Installed package that the folder lies in; empty for a folder of its own.
        groups: Groups of sentences that mean the same.
    """

    folder: str = ""
    package: str = ""
    groups: list[list[str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim: a metric, its threshold, and how many seeds must pass it.

    Attributes:
        name: Short name.
        statement: The claim in words.
        metric: A metric of the run, or CONTROL:METRIC for that of a control, or of a point of the sweep as
            OPTION=VALUE:METRIC.
        needed: How many seeds must pass.
        at_least: The metric must reach this; give this or at_most.
        at_most: The metric must not pass this.
    """

    name: str
    statement: str
    metric: str
    needed: int
    at_least: float | None = None
    at_most: float | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment.

    Attributes:
        name: Name of the experiment; the run folder is runs/NAME unless --out says otherwise.
        description: One or two sentences for the top of the report.
        task: What is learned.
        model: The transformer.
        train: How it is trained.
        evaluate: How it is judged.
        pretrained: A model to look at; task, model, train and evaluate then have nothing to say.
        controls: Variants for comparison, trained by the same loop: name -> dotted overrides.
        sweep: Option -> values; every combination is one more control, and where the first option has numbers, curves
            are drawn over them.
        claims: What the run is expected to show.
    """

    name: str
    description: str = ""
    task: Task = dataclasses.field(default_factory=Task)
    model: Model = dataclasses.field(default_factory=Model)
    train: Train = dataclasses.field(default_factory=Train)
    evaluate: Evaluate = dataclasses.field(default_factory=Evaluate)
    pretrained: Pretrained = dataclasses.field(default_factory=Pretrained)
    controls: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    sweep: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    claims: list[Claim] = dataclasses.field(default_factory=list)

    def variants(self) -> dict[str, "Config"]:
        """The configs of all controls by their names, then those of the sweep as "OPTION=VALUE,OPTION=VALUE".

        Each is this one with its overrides and without claims. The point of a sweep that this config is itself stays.
        """
        for option, values in self.sweep.items():
            words = [str(value) for value in values]
            good = words and len(set(words)) == len(words) and all(re.fullmatch(r"[\w.+-]+", word) for word in words)
            if not good or option == "train.seeds":
                raise ValueError(
                    f"sweep.{option}: expected different numbers or words (not of train.seeds), got {values}"
                )
        for name in self.controls:
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(f"controls: expected names of letters, digits, '_' and '-', got {name!r}")
        points = [dict(zip(self.sweep, values, strict=True)) for values in itertools.product(*self.sweep.values())]
        swept = {",".join(f"{key}={value}" for key, value in point.items()): point for point in points if point}
        found = {name: self._vary(f"controls.{name}", name, changed) for name, changed in self.controls.items()}
        return found | {name: self._vary("sweep", name, changed) for name, changed in swept.items()}

    def _vary(self, key: str, name: str, changed: dict[str, Any]) -> "Config":
        plain = dataclasses.asdict(self) | {"controls": {}, "sweep": {}, "claims": []}
        for option, value in changed.items():
            section, *rest = option.split(".")
            if len(rest) != 1 or section not in _SECTIONS:
                raise ValueError(f"{key}: {option!r} is no option; expected SECTION.OPTION")
            plain[section] = plain[section] | {rest[0]: value}
        try:
            config = _build(Parser(exit_on_error=False), lambda parser: parser.parse_object(plain))
        except (argparse.ArgumentError, ValueError) as error:
            raise ValueError(f"{key}: {_one_line(str(error))}") from None
        return dataclasses.replace(config, name=f"{self.name}/{name}")


_SECTIONS = {"task": Task, "model": Model, "train": Train, "evaluate": Evaluate, "pretrained": Pretrained}
_OPTIONS = ["config", "out", "check", *(field.name for field in dataclasses.fields(Config))] + [
    f"{section}.{field.name}" for section, kind in _SECTIONS.items() for field in dataclasses.fields(kind)
]


class Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit status 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends with one line that names the key and what was expected."""
        if not self.exit_on_error:
            raise ValueError(_one_line(message))
        sys.stderr.write(f"error: {_one_line(message)}\n")
        raise SystemExit(2)


class Asked(NamedTuple):
    """What the command line of ``run`` asks for."""

    config: Config
    out: Path  # the run folder
    check: bool  # whether a claim that fails fails the run


def load(arguments: Sequence[str]) -> Asked:
    """Reads ``--config FILE ... [--out DIR] [--check] [--sweep OPTION=A,B ...] [--train.steps 500 ...]``.

    Later files and options override earlier ones. Whatever is wrong ends the program with one line on stderr
    and status 2.
    """
    parser = Parser(prog="python -m experiments run", description="Trains an experiment and reports on it.")
    parser.add_argument("--config", action="config", help="YAML file; several layer, the last one wins")
    parser.add_argument("--out", type=str, default=None, help="run folder")
    parser.add_argument("--check", action="store_true", help="Exit with status 1 when a claim fails")
    try:
        config, parsed = _build_and_parse(parser, lambda parser: parser.parse_args(_spell_out_sweeps(arguments)))
        config.variants()
    except ValueError as error:
        parser.error(str(error))
    return Asked(config, Path(parsed["out"] or f"runs/{config.name}"), parsed["check"])


def _spell_out_sweeps(arguments: Sequence[str]) -> list[str]:
    """``--sweep a=1,2 --sweep b=x,y`` as the one ``--sweep {a: [1,2], b: [x,y]}`` that the parser takes."""
    spaced = (("--sweep", word[8:]) if word.startswith("--sweep=") else (word,) for word in arguments)
    rest, swept = list(itertools.chain.from_iterable(spaced)), {}
    while "--sweep" in rest:
        at = rest.index("--sweep")
        key, equals, values = (rest[at + 1] if at + 1 < len(rest) else "").partition("=")
        if not (key and equals and values) or key in swept:
            raise ValueError(
                f"sweep: expected --sweep OPTION=VALUE,VALUE, each option once, got {' '.join(rest[at : at + 2])!r}"
            )
        swept[key] = f"{key}: [{values}]"
        del rest[at : at + 2]
    return [*rest, "--sweep", f"{{{', '.join(swept.values())}}}"] if swept else rest


def read(file: Path) -> Config:
    """Reads one YAML file. Raises ``ValueError`` with one line when it is no valid config."""
    config = _build(Parser(exit_on_error=False), lambda parser: parser.parse_path(file))
    config.variants()
    return config


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each key at which two configs differ, both as nested dicts."""
    here, there = _flat(now), _flat(saved)
    return [
        f"{key} was {there.get(key)!r}, now {here.get(key)!r}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]


def _build(parser: Parser, parse: Callable[[Parser], jsonargparse.Namespace]) -> Config:
    return _build_and_parse(parser, parse)[0]


def _build_and_parse(parser: Parser, parse: Callable[[Parser], jsonargparse.Namespace]) -> tuple[Config, Any]:
    parser.add_class_arguments(Config, None)
    parsed = parse(parser)
    for section in _SECTIONS:
        if not isinstance(parsed[section], jsonargparse.Namespace):
            raise ValueError(f"{section}: expected options, got {parsed[section]!r}")
    found = parser.instantiate(parsed)
    config = Config(**{field.name: found[field.name] for field in dataclasses.fields(Config)})
    config_rules.check(config)
    return config, found


def _flat(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    flat = {}
    for key, value in plain.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _one_line(message: str) -> str:
    """The parser's message on one line, in our words: the key, what was expected, what came."""
    message = " ".join(message.split())
    if wrong := re.fullmatch(r'Parser key "([\w.]+)": Expected an? (.+?)\. Got value: (.*)', message):
        expected = re.sub(r"<class '(\w+)'>|typing\.", r"\1", wrong[2])
        return f"{wrong[1]}: expected {expected}, got {wrong[3]}"
    if unknown := re.search(r"(?:Group '(\w+)' does not accept option|[Oo]ption) '([\w.]+)'", message):
        message = f"unrecognized arguments: --{unknown[1] + '.' if unknown[1] else ''}{unknown[2]}"
    if unknown := re.search(r"unrecognized arguments: --([\w.]+)", message):
        key = unknown[1]
        near = difflib.get_close_matches(key, _OPTIONS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else "--help lists what is"
        return f"{key}: no such option; {hint}"
    if missing := re.search(r"the following arguments are required: (.+)|Key \"(\w+)\" is required", message):
        return f"{missing[1] or missing[2]}: missing; give --config FILE"
    return message
