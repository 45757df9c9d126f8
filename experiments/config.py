"""What an experiment is, as data: frozen dataclasses, read from YAML files and the command line."""

import argparse
import dataclasses
import difflib
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jsonargparse
import yaml

from experiments import config_rules
from experiments.sections import Claim, Evaluate, Mesh, Model, Pretrained, Task, Train


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
        mesh: The devices that train together; a run may be resumed on another mesh.
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
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    pretrained: Pretrained = dataclasses.field(default_factory=Pretrained)
    controls: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    sweep: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    claims: list[Claim] = dataclasses.field(default_factory=list)

    def variants(self) -> dict[str, "Config"]:
        """The configs of all controls by their names, then those of the sweep as "OPTION=VALUE,OPTION=VALUE".

        Each is this one with its overrides and without claims. The point of a sweep that this config is itself stays.
        """
        for kind, named in (("controls", self.controls), ("sweep", self.sweep)):
            _check_names(kind, named)
        for option, values in self.sweep.items():
            words = [str(value) for value in values]
            good = words and len(set(words)) == len(words) and all(re.fullmatch(r"[\w.+-]+", word) for word in words)
            if not good or option == "train.seeds":
                raise ValueError(
                    f"sweep.{option}: expected different numbers or words (not of train.seeds), got {values}"
                )
        for name, changed in self.controls.items():
            _check_names(f"controls.{name}", changed)
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


def _check_names(key: str, named: dict[Any, Any]) -> None:
    """Raises ``ValueError`` for a name that YAML reads as something else: a number, a truth value, nothing."""
    for name in named:
        if not isinstance(name, str):
            raise ValueError(f"{key}: expected names that are text, in quotes where they are not, got {name!r}")


class Processes(NamedTuple):
    """How this process finds the others of a run: arguments of ``jax.distributed.initialize``; None is found by JAX."""

    coordinator: str | None  # host:port of the first process
    num_processes: int | None
    process_id: int | None
    local_devices: int | None  # on CPU: how many devices this process makes


_SECTIONS = {
    "task": Task,
    "model": Model,
    "train": Train,
    "evaluate": Evaluate,
    "mesh": Mesh,
    "pretrained": Pretrained,
}
_OPTIONS = [
    "config",
    "out",
    "check",
    "distributed",
    *Processes._fields,
    *(field.name for field in dataclasses.fields(Config)),
] + [f"{section}.{field.name}" for section, kind in _SECTIONS.items() for field in dataclasses.fields(kind)]


class Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit status 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends with one line that names the key and what was expected."""
        if not self.exit_on_error:
            raise ValueError(_one_line(message))
        sys.stderr.write(f"error: {_one_line(message)}\n")
        raise SystemExit(2)


_load_yaml = jsonargparse.get_loader("yaml")


def _load_yaml_once(text: str) -> Any:
    """What ``text`` says. Raises ``yaml.YAMLError`` for a key given twice, whose last YAML takes in silence."""
    waiting, walked = [yaml.compose(text, Loader=yaml.SafeLoader)], set()
    while waiting:
        node = waiting.pop()
        if id(node) in walked:  # an alias, which may even hold itself
            continue
        walked.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            seen = {}
            for key, value in node.value:
                waiting.append(value)
                name = str(key.value)
                if name in seen:
                    said = f"{name}: given twice in one YAML file, in lines {seen[name]} and {key.start_mark.line + 1}"
                    raise yaml.YAMLError(said)
                seen[name] = key.start_mark.line + 1
    return _load_yaml(text)


jsonargparse.set_loader("yaml", _load_yaml_once, exceptions=(yaml.YAMLError,))


class Asked(NamedTuple):
    """What the command line of ``run`` asks for."""

    config: Config
    out: Path  # the run folder
    check: bool  # whether a claim that fails fails the run
    processes: Processes | None  # None: this process is the whole run


def load(arguments: Sequence[str]) -> Asked:
    """Reads ``--config FILE ... [--out DIR] [--check] [--sweep OPTION=A,B ...] [--train.steps 500 ...]``.

    Later files and options override earlier ones. Whatever is wrong ends the program with one line on stderr
    and status 2.
    """
    parser = Parser(prog="python -m experiments run", description="Trains an experiment and reports on it.")
    parser.add_argument("--config", action="config", help="YAML file; several layer, the last one wins")
    parser.add_argument("--out", type=str, default=None, help="run folder")
    parser.add_argument("--check", action="store_true", help="Exit with status 1 when a claim fails")
    _add_processes(parser)
    try:
        config, parsed = _build_and_parse(parser, lambda parser: parser.parse_args(_spell_out_sweeps(arguments)))
        config.variants()
        processes = _processes(parsed)
    except ValueError as error:
        parser.error(str(error))
    except RecursionError:
        parser.error("config: expected a few levels of nesting, got thousands, or an alias that holds itself")
    return Asked(config, Path(parsed["out"] or f"runs/{config.name}"), parsed["check"], processes)


def _add_processes(parser: Parser) -> None:
    """How a run is started is no part of the config: the same run may be resumed by other processes."""
    parser.add_argument("--distributed", action="store_true", help="This is one of the processes of a run")
    said = "what JAX finds out about its cluster (Slurm, MPI, Kubernetes, TPU)"
    parser.add_argument("--coordinator", type=str | None, default=None, help=f"host:port of process 0; {said}")
    parser.add_argument("--num_processes", type=int | None, default=None, help=f"all of them; {said}")
    parser.add_argument("--process_id", type=int | None, default=None, help=f"from 0; {said}")
    parser.add_argument(
        "--local_devices", type=int | None, default=None, help="on CPU, devices of this process; its share of the mesh"
    )


def _processes(parsed: Any) -> Processes | None:
    """The processes that are asked for. Raises ``ValueError`` where an argument lacks another, or makes no sense."""
    found = Processes(*(parsed[name] for name in Processes._fields))
    given = [name for name, value in found._asdict().items() if value is not None]
    if not parsed["distributed"]:
        if given:
            raise ValueError(f"{given[0]}: expected --distributed beside it")
        return None
    if missing := [name for name in Processes._fields[:3] if name not in given]:
        if len(missing) < 3:
            raise ValueError(
                f"{missing[0]}: missing; expected all of coordinator, num_processes and process_id, or none of them"
            )
        return found
    _, count, number, _ = found
    rules = [
        ("coordinator", found.coordinator, re.fullmatch(r"\S+:\d+", found.coordinator), "HOST:PORT"),
        ("num_processes", count, count > 0, "> 0"),
        ("process_id", number, 0 <= number < count, f"0 to under num_processes={count}"),
        ("local_devices", found.local_devices, found.local_devices is None or found.local_devices > 0, "> 0"),
    ]
    for key, value, good, expected in rules:
        if not good:
            raise ValueError(f"{key}: expected {expected}, got {value!r}")
    return found


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
    if twice := re.search(r"\S+: given twice in one YAML file.*", message):
        return twice[0]
    if missing := re.search(r"the following arguments are required: (.+)|Key \"(\w+)\" is required", message):
        return f"{missing[1] or missing[2]}: missing; give --config FILE"
    return message
