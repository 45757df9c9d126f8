"""Parses the command line and YAML into a ``Config``, with one-line errors."""

import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jsonargparse
import yaml

from jattn_experiments.schema import SECTIONS, Claim, Config, Kind


class Processes(NamedTuple):
    """How the processes of a run find each other: arguments of ``jax.distributed.initialize``. JAX detects any None."""

    coordinator: str | None  # host:port of the first process
    num_processes: int | None
    process_id: int | None
    local_devices: int | None  # on CPU: devices of this process


_OPTIONS = [
    *("config", "out", "check", "replicate", "replicate_seed", "distributed", *Processes._fields),
    *(field.name for field in dataclasses.fields(Config)),
    *(f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)),
]


class Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit status 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends with one line that names the key and what was expected."""
        if not self.exit_on_error:
            raise ValueError(one_line(message))
        sys.stderr.write(f"error: {one_line(message)}\n")
        raise SystemExit(2)


_load_yaml = jsonargparse.get_loader("yaml")


def _load_yaml_once(text: str) -> Any:
    """Parses ``text``. Raises ``yaml.YAMLError`` for a duplicate key; YAML would silently take the last."""
    waiting, walked = [yaml.compose(text, Loader=yaml.SafeLoader)], set()
    while waiting:
        node = waiting.pop()
        if id(node) in walked:  # an alias, perhaps of a parent
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
                    lines = f"in lines {seen[name]} and {key.start_mark.line + 1}"
                    raise yaml.YAMLError(f"{name}: given twice in one YAML file, {lines}")
                seen[name] = key.start_mark.line + 1
    return _load_yaml(text)


jsonargparse.set_loader("yaml", _load_yaml_once, exceptions=(yaml.YAMLError,))


def scaled_claims(config: Config, seeds: int) -> list[Claim]:
    """The claims of ``config``, with the passes needed of ``seeds`` seeds scaled to ``train.seeds`` and rounded up.

    A claim about a saved model, or about a control that sets ``train.seeds``, keeps its count.
    """
    fixed = {name for name, changed in config.controls.items() if "train.seeds" in changed}
    fixed |= set() if config.kind is Kind.TRAINING else {""}

    def scaled(claim: Claim) -> Claim:
        if claim.metric.rpartition(":")[0] in fixed:
            return claim
        return dataclasses.replace(claim, needed=math.ceil(claim.needed * config.train.seeds / seeds))

    return [scaled(claim) for claim in config.claims]


def of_plain(plain: dict[str, Any]) -> Config:
    """The config of nested dicts. Raises ``ValueError`` or ``argparse.ArgumentError`` if it is not valid."""
    return build(Parser(exit_on_error=False), lambda parser: parser.parse_object(plain))[0]


def build(
    parser: Parser, parse: Callable[[Parser], jsonargparse.Namespace], seeds: int | None = None
) -> tuple[Config, Any]:
    """The config that ``parse`` reads, and everything it reads. ``seeds``: how many seeds the claims count, if others.

    Raises ``ValueError`` or ``argparse.ArgumentError`` if it is not valid.
    """
    parser.add_class_arguments(Config, None)
    parsed = parse(parser)
    for section in SECTIONS:
        if not isinstance(parsed[section], jsonargparse.Namespace):
            raise ValueError(f"{section}: expected options, got {parsed[section]!r}")
    values = parser.instantiate(parsed)
    config = Config(**{field.name: values[field.name] for field in dataclasses.fields(Config)})
    if seeds:
        config = dataclasses.replace(config, claims=scaled_claims(config, seeds))
    from jattn_experiments.config import rules  # slow to import: a parse error should not wait for JAX

    rules.check(config)
    return config, values


def one_line(message: str) -> str:
    """Rewrites the parser's message as one line: the key, what was expected, what was given."""
    message = " ".join(message.split())
    if wrong := re.fullmatch(r'Parser key "([\w.]+)": Expected an? (.+?)\. Got value: (.*)', message):
        expected = re.sub(r"<class '(\w+)'>|typing\.", r"\1", wrong[2])
        return f"{wrong[1]}: expected {expected}, got {wrong[3]}"
    if unknown := re.search(r'Parser key "claims": (\w+\.[\w.]+): no such option', message):
        return f"claims.{unknown[1]}: no such option; pass the whole list of claims, such as --claims '[]' for none"
    if unknown := re.search(r"(?:Group '(\w+)' does not accept option|[Oo]ption) '([\w.]+)'", message):
        message = f"unrecognized arguments: --{unknown[1] + '.' if unknown[1] else ''}{unknown[2]}"
    if unknown := re.search(r"unrecognized arguments: --([\w.]+)", message):
        key = unknown[1]
        near = difflib.get_close_matches(key, _OPTIONS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        return f"{key}: no such option; {hint}"
    if twice := re.search(r"\S+: given twice in one YAML file.*", message):
        return twice[0]
    if missing := re.search(r"the following arguments are required: (.+)|Key \"(\w+)\" is required", message):
        return f"{missing[1] or missing[2]}: missing; expected a NAME from jattn list, or a YAML file"
    return message
