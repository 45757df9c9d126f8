"""The controls of an experiment and the points of its sweep: its config with some options changed."""

import argparse
import dataclasses
import itertools
import re
from typing import Any

from jattn_experiments.config.parser import of_plain, one_line
from jattn_experiments.config.schema import SECTIONS, Config


def variants(config: Config) -> dict[str, Config]:
    """The configs of all controls by name, then those of the sweep as "OPTION=VALUE,OPTION=VALUE".

    Each is ``config`` with overrides and without claims. A sweep keeps the point that equals ``config``.
    """
    for kind, named in (("controls", config.controls), ("sweep", config.sweep)):
        _check_names(kind, named)
    for option, values in config.sweep.items():
        words = [str(value) for value in values]
        good = words and len(set(words)) == len(words) and all(re.fullmatch(r"[\w.+-]+", word) for word in words)
        if not good or option == "train.seeds":
            raise ValueError(f"sweep.{option}: expected distinct numbers or words (not of train.seeds), got {values}")
    for name, changed in config.controls.items():
        _check_names(f"controls.{name}", changed)
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"controls: expected names of letters, digits, '_' and '-', got {name!r}")
    points = [dict(zip(config.sweep, values, strict=True)) for values in itertools.product(*config.sweep.values())]
    swept = {",".join(f"{key}={value}" for key, value in point.items()): point for point in points if point}
    found = {name: _vary(config, f"controls.{name}", name, changed) for name, changed in config.controls.items()}
    return found | {name: _vary(config, "sweep", name, changed) for name, changed in swept.items()}


def _vary(config: Config, key: str, name: str, changed: dict[str, Any]) -> Config:
    plain = dataclasses.asdict(config) | {"controls": {}, "sweep": {}, "claims": []}
    for option, value in changed.items():
        section, *rest = option.split(".")
        if len(rest) != 1 or section not in SECTIONS:
            raise ValueError(f"{key}: {option!r} is not an option; expected SECTION.OPTION")
        plain[section] = plain[section] | {rest[0]: value}
    try:
        varied = of_plain(plain)
    except (argparse.ArgumentError, ValueError) as error:
        raise ValueError(f"{key}: {one_line(str(error))}") from None
    return dataclasses.replace(varied, name=f"{config.name}/{name}")


def _check_names(key: str, named: dict[Any, Any]) -> None:
    """Raises ``ValueError`` for a name that YAML does not read as text: a number, a boolean, null."""
    for name in named:
        if not isinstance(name, str):
            raise ValueError(f"{key}: expected names as text, quoted where YAML needs it, got {name!r}")
