"""Reads the config of an experiment from YAML files and the command line."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jattn_experiments.config.controls import variants
from jattn_experiments.config.parser import Parser, Processes, build
from jattn_experiments.schema import Config

# In the package where jattn was installed from a wheel, at the top of a checkout.
_IN_WHEEL = Path(__file__).parents[1] / "configs"
CONFIGS = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[3] / "configs"


class Request(NamedTuple):
    """The parsed command line of ``run``."""

    config: Config
    out: Path  # the run folder
    check: bool  # whether a failing claim fails the run
    processes: Processes | None  # None: this process is the whole run
    replicate: int | None  # fresh seeds to judge the claims on as well
    replicate_seed: int | None  # the first of them; None: drawn


def load(arguments: Sequence[str]) -> Request:
    """Reads ``NAME [--out DIR] [--check] [--replicate N] [--sweep OPTION=A,B ...] [--train.steps 500]``.

    A NAME is one of ``CONFIGS`` or a YAML file; ``--config NAME`` is the same, anywhere. Later files and options
    override earlier ones. An error ends the program with one line on stderr and status 2.
    """
    parser = Parser(prog="jattn run", description="Trains an experiment and reports on it.")
    parser.usage = "jattn run NAME [options]"
    name = "one of jattn list, or a YAML file; later ones override earlier ones. As the first word, without --config"
    parser.add_argument("--config", action="config", metavar="NAME", help=name)
    parser.add_argument("--out", type=str, default=None, help="run folder")
    parser.add_argument("--check", action="store_true", help="Exit with status 1 when a claim fails")
    fresh = "judge the claims on N fresh seeds as well, in a folder of the run's"
    parser.add_argument("--replicate", type=int | None, default=None, metavar="N", help=fresh)
    first = "the first of the fresh seeds; drawn by default"
    parser.add_argument("--replicate_seed", type=int | None, default=None, help=first)
    # Not part of the config: other processes may resume the same run.
    parser.add_argument("--distributed", action="store_true", help="This is one of several processes")
    default = "by default detected by JAX (Slurm, MPI, Kubernetes, TPU)"
    parser.add_argument("--coordinator", type=str | None, default=None, help=f"host:port of process 0; {default}")
    parser.add_argument("--num_processes", type=int | None, default=None, help=f"in total; {default}")
    parser.add_argument("--process_id", type=int | None, default=None, help=f"from 0; {default}")
    share = "on CPU, devices of this process; default: its share"
    parser.add_argument("--local_devices", type=int | None, default=None, help=share)
    try:
        words = _spell_out_sweeps(_find_configs(arguments))
        config, parsed = build(parser, lambda parser: parser.parse_args(words))
        variants(config)
        processes = _processes(parsed)
        _check_replication(config, parsed["replicate"], parsed["replicate_seed"])
    except ValueError as error:
        parser.error(str(error))
    except RecursionError:
        parser.error("config: expected a few levels of nesting, got thousands, or an alias that contains itself")
    out = Path(parsed["out"] or f"runs/{config.name}")
    return Request(config, out, parsed["check"], processes, parsed["replicate"], parsed["replicate_seed"])


def _check_replication(config: Config, count: int | None, first: int | None) -> None:
    if count is None:
        if first is not None:
            raise ValueError("replicate_seed: expected --replicate with it")
        return
    if count < 1:
        raise ValueError(f"replicate: expected > 0, got {count}")
    most, start = 2**32 - count, config.train.first_seed
    last = start + config.train.seeds - 1
    if first is not None and not 0 <= first <= most:
        raise ValueError(f"replicate_seed: expected from 0 to {most}, got {first}")
    if first is not None and first <= last and start < first + count:
        raise ValueError(f"replicate_seed: expected other seeds than the run's {start} to {last}, got {first}")


def _processes(parsed: Any) -> Processes | None:
    """The requested processes. Raises ``ValueError`` for arguments that are invalid or incomplete."""
    processes = Processes(*(parsed[name] for name in Processes._fields))
    options = [name for name, value in processes._asdict().items() if value is not None]
    if not parsed["distributed"]:
        if options:
            raise ValueError(f"{options[0]}: expected --distributed with it")
        return None
    if missing := [name for name in Processes._fields[:3] if name not in options]:
        if len(missing) < 3:
            expected = "all of coordinator, num_processes and process_id, or none of them"
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


def _find_configs(arguments: Sequence[str]) -> list[str]:
    """``copy --config mine.yaml`` as ``--config FILE --config mine.yaml``, FILE the one of ``CONFIGS``."""
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
    """``--sweep a=1,2 --sweep b=x,y`` as ``--sweep {a: [1,2], b: [x,y]}``, the parser's form."""
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


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each key in which two configs, given as nested dicts, differ."""
    here, there = _flat(now), _flat(saved)
    return [
        f"{key} was {there.get(key)!r}, now {here.get(key)!r}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]


def _flat(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    flat = {}
    for key, value in plain.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
