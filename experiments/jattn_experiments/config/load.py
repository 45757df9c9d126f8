"""Reads the config of an experiment from YAML files and the command line."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jattn_experiments.config.controls import variants
from jattn_experiments.config.parser import Parser, Processes, build, scaled_claims
from jattn_experiments.schema import Config, Train

# In the package if jattn was installed from a wheel, otherwise at the top of the checkout.
_IN_WHEEL = Path(__file__).parents[1] / "configs"
CONFIGS = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[3] / "configs"


class Request(NamedTuple):
    """The parsed command line of ``run``."""

    config: Config
    out: Path  # the run folder
    check: bool  # whether a failing claim fails the run
    processes: Processes | None  # None: a single process does the whole run
    replicate: int | None  # number of fresh seeds on which to judge the claims again
    replicate_seed: int | None  # the first fresh seed; None: drawn at random


def load(arguments: Sequence[str]) -> Request:
    """Reads ``NAME [--out DIR] [--check] [--replicate N] [--sweep OPTION=A,B ...] [--train.steps 500]``.

    A NAME is one of ``CONFIGS`` or a YAML file; ``--config NAME`` means the same at any place. Later files and options
    override earlier ones. If they change ``train.seeds``, the passes that claims need change in proportion. An error
    ends the program with one line on stderr and status 2.
    """
    parser = Parser(prog="jattn run", description="Trains an experiment and writes a report on it.")
    parser.usage = "jattn run NAME [options]"
    name = "a name from jattn list, or a YAML file; later ones override earlier ones. The first needs no --config"
    parser.add_argument("--config", action="config", metavar="NAME", help=name)
    parser.add_argument("--out", type=str, default=None, help="folder for the run; default: runs/NAME")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a claim fails")
    fresh = "also train N fresh seeds, in OUT/replication, and judge the claims on them"
    parser.add_argument("--replicate", type=int | None, default=None, metavar="N", help=fresh)
    first = "the first fresh seed; default: drawn at random"
    parser.add_argument("--replicate_seed", type=int | None, default=None, help=first)
    # Not part of the config: other processes may resume the same run.
    parser.add_argument("--distributed", action="store_true", help="this is one of several processes of a run")
    default = "default: detected by JAX (Slurm, MPI, Kubernetes, TPU)"
    parser.add_argument("--coordinator", type=str | None, default=None, help=f"host:port of process 0; {default}")
    parser.add_argument("--num_processes", type=int | None, default=None, help=f"number of processes; {default}")
    parser.add_argument("--process_id", type=int | None, default=None, help=f"from 0 to num_processes - 1; {default}")
    share = "on a CPU: number of devices of this process; default: its share"
    parser.add_argument("--local_devices", type=int | None, default=None, help=share)
    try:
        words = _spell_out_sweeps(_find_configs(arguments))
        config, parsed = build(parser, lambda parser: parser.parse_args(words), _seeds_of_claims(words))
        variants(config)
        processes = _processes(parsed)
        _check_replication(config, parsed["replicate"], parsed["replicate_seed"])
    except ValueError as error:
        parser.error(str(error))
    except RecursionError:
        parser.error("config: expected a few levels of nesting, got thousands; probably a YAML alias contains itself")
    out = Path(parsed["out"] or f"runs/{config.name}")
    return Request(config, out, parsed["check"], processes, parsed["replicate"], parsed["replicate_seed"])


def _check_replication(config: Config, count: int | None, first: int | None) -> None:
    if count is None:
        if first is not None:
            raise ValueError("replicate_seed: expected --replicate as well")
        return
    if count < 1:
        raise ValueError(f"replicate: expected > 0, got {count}")
    if "train.first_seed" in config.sweep:
        raise ValueError("replicate: expected no sweep of train.first_seed, because fresh seeds replace it")
    if first is None:
        return
    counts = {name: changed.get("train.seeds", count) for name, changed in config.controls.items()}
    most = 2**32 - max([count, *counts.values()])
    if not 0 <= first <= most:
        raise ValueError(f"replicate_seed: expected 0 to {most}, got {first}")
    for name, one in {"": config, **variants(config)}.items():
        start, last = one.train.first_seed, one.train.first_seed + one.train.seeds - 1
        if first <= last and start < first + counts.get(name, count):
            owner = f"control {name}" if name else "the run"
            used = f"{owner} uses {start} to {last}"
            raise ValueError(f"replicate_seed: expected seeds that were not used ({used}), got {first}")


def _processes(parsed: Any) -> Processes | None:
    """The requested processes. Raises ``ValueError`` for arguments that are invalid or incomplete."""
    processes = Processes(*(parsed[name] for name in Processes._fields))
    options = [name for name, value in processes._asdict().items() if value is not None]
    if not parsed["distributed"]:
        if options:
            raise ValueError(f"{options[0]}: expected --distributed as well")
        return None
    if missing := [name for name in Processes._fields[:3] if name not in options]:
        if len(missing) < 3:
            expected = "either all of coordinator, num_processes and process_id, or none of them"
            raise ValueError(f"{missing[0]}: missing; expected {expected}")
        return processes
    address, count, number, devices = processes
    for key, good, expected in (
        ("coordinator", re.fullmatch(r"\S+:\d+", address), "HOST:PORT"),
        ("num_processes", count > 0, "> 0"),
        ("process_id", 0 <= number < count, f">= 0 and < num_processes={count}"),
        ("local_devices", devices is None or devices > 0, "> 0"),
    ):
        if not good:
            raise ValueError(f"{key}: expected {expected}, got {getattr(processes, key)!r}")
    return processes


def _seeds_of_claims(words: Sequence[str]) -> int | None:
    """The ``train.seeds`` that the last file with claims, or anything before it, sets.

    None if no file has claims, or if an option gives them: such claims count the seeds that are trained. The parser
    reports invalid files.
    """
    seeds, counted = Train().seeds, None
    for word, value in itertools.pairwise(itertools.chain.from_iterable(word.split("=", 1) for word in [*words, ""])):
        if word.startswith("--claims"):
            return None
        if word == "--train.seeds" and value.isdecimal():
            seeds = int(value)
        if word == "--config":
            with contextlib.suppress(AttributeError, OSError, ValueError, RecursionError, yaml.YAMLError):
                plain = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
                seeds = plain.get("train", {}).get("seeds", seeds)
                counted = seeds if plain.get("claims") else counted
    return counted


def _find_configs(arguments: Sequence[str]) -> list[str]:
    """Turns ``copy --config mine.yaml`` into ``--config FILE --config mine.yaml``, with FILE from ``CONFIGS``."""
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    rest = list(arguments[len(named) :])
    for i, word in enumerate(rest):
        if word.startswith("--config="):
            rest[i] = f"--config={_find_config(word[9:])}"
        elif i and rest[i - 1] == "--config":
            rest[i] = _find_config(word)
    return [*itertools.chain.from_iterable(("--config", _find_config(name)) for name in named), *rest]


def _find_config(name: str) -> str:
    file = CONFIGS / f"{name}.yaml"
    if file.is_file():
        return str(file)
    if "." not in name and not Path(name).exists():  # not meant as a file
        known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
        raise ValueError(f"config: expected a YAML file or one of {', '.join(known)}, got {name!r}")
    return name


def _spell_out_sweeps(arguments: Sequence[str]) -> list[str]:
    """Turns ``--sweep a=1,2 --sweep b=x,y`` into ``--sweep {a: [1,2], b: [x,y]}``, the parser's form."""
    spaced = (("--sweep", word[8:]) if word.startswith("--sweep=") else (word,) for word in arguments)
    rest, swept = list(itertools.chain.from_iterable(spaced)), {}
    while "--sweep" in rest:
        at = rest.index("--sweep")
        key, equals, values = (rest[at + 1] if at + 1 < len(rest) else "").partition("=")
        if not (key and equals and values) or key in swept:
            words = " ".join(rest[at : at + 2])
            raise ValueError(f"sweep: expected --sweep OPTION=VALUE,VALUE, each option once, got {words!r}")
        swept[key] = f"{key}: [{values}]"
        del rest[at : at + 2]
    return [*rest, "--sweep", f"{{{', '.join(swept.values())}}}"] if swept else rest


def read(file: Path) -> Config:
    """Reads one YAML file. Raises ``ValueError`` with one line if it is not a valid config."""
    config, _ = build(Parser(exit_on_error=False), lambda parser: parser.parse_path(file))
    variants(config)
    return config


def changed_options(config: Config) -> list[str]:
    """One line for each option that differs from jattn's own config of that name; none if jattn has no such config.

    The mesh and the description do not count, because they change no numbers. Claims may need more or fewer passes for
    another number of seeds.
    """
    file = CONFIGS / f"{config.name}.yaml"
    if not file.is_file():
        return []
    shipped = read(file)
    train = dataclasses.replace(shipped.train, seeds=config.train.seeds)
    claims = scaled_claims(dataclasses.replace(shipped, train=train), shipped.train.seeds)
    before, now = (
        dataclasses.asdict(one) | {"mesh": None, "description": ""}
        for one in (dataclasses.replace(shipped, claims=claims), config)
    )
    return differences(before, now)


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each dotted key in which two configs (nested dicts) differ; claims are matched by their names."""
    lines = []
    for key in sorted(saved.keys() | now.keys()):
        there, here = _by_name(saved.get(key)), _by_name(now.get(key))
        if isinstance(there, dict) and isinstance(here, dict):
            lines += [f"{key}.{line}" for line in differences(there, here)]
        elif isinstance(here, dict) and not there:
            lines.append(f"{key} was added")
        elif isinstance(there, dict) and not here:
            lines.append(f"{key} was removed")
        elif there != here:
            lines.append(f"{key} was {saved.get(key)!r}, now {now.get(key)!r}")
    return lines


def _by_name(value: Any) -> Any:
    """Turns a list of named dicts into a dict by name; returns anything else unchanged."""
    named = isinstance(value, list) and all(isinstance(one, dict) and "name" in one for one in value)
    entries = {one["name"]: one for one in value} if named else {}
    return entries if entries and len(entries) == len(value) else value
