"""The controls of an experiment and the points of its sweep: its config with some options changed."""

import argparse
import dataclasses
import itertools
import re
from typing import Any

from jattn_experiments.config.parser import of_plain, one_line
from jattn_experiments.schema import SECTIONS, Config


def variants(config: Config) -> dict[str, Config]:
    """The configs of all controls by name, then those of the sweep as "OPTION=VALUE,OPTION=VALUE".

    Each is ``config`` with overrides and without claims. A sweep keeps the point that equals ``config``. The other
    options that a value sets are not part of the name.
    """
    for kind, named in (("controls", config.controls), ("sweep", config.sweep)):
        _check_names(kind, named)
    swept = {option: points_of(config, option) for option in config.sweep}
    for name, changed in config.controls.items():
        _check_names(f"controls.{name}", changed)
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"controls: expected names of letters, digits, '_' and '-', got {name!r}")
    configs = {name: _vary(config, f"controls.{name}", name, changed) for name, changed in config.controls.items()}
    for point in itertools.product(*swept.values()) if swept else ():
        name = ",".join(f"{option}={value}" for option, (value, _) in zip(swept, point, strict=True))
        changed: dict[str, Any] = {}
        for option, (_, more) in zip(swept, point, strict=True):
            if twice := sorted(changed.keys() & more.keys()):
                raise ValueError(f"sweep.{option}: two values of the same point set {twice[0]}")
            changed |= more
        configs[name] = _vary(config, "sweep", name, changed)
    return configs


def points_of(config: Config, option: str) -> list[tuple[Any, dict[str, Any]]]:
    """The values of one option of the sweep, each with everything that it changes: the option and any others.

    Raises ``ValueError`` if values are equal, are neither numbers nor words, or are mappings without the option.
    """
    key, points = f"sweep.{option}", []
    for value in config.sweep[option]:
        changed = value if isinstance(value, dict) else {option: value}
        _check_names(key, changed)
        points.append((changed.get(option, ""), changed))
    words = [str(value) for value, _ in points]
    good = words and len(set(words)) == len(words) and all(re.fullmatch(r"[\w.+-]+", word) for word in words)
    if not good or any("train.seeds" in changed for _, changed in points):
        raise ValueError(
            f"{key}: expected distinct numbers or words (and no train.seeds), or {{{option}: VALUE, OPTION: VALUE}} "
            f"to change other options along with a value, got {config.sweep[option]}"
        )
    return points


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
    """Raises ``ValueError`` for a name that YAML does not read as text, such as a number, a boolean or null."""
    for name in named:
        if not isinstance(name, str):
            raise ValueError(f"{key}: expected names that are text (quote them in YAML), got {name!r}")
