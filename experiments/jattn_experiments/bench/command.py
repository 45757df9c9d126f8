"""``jattn bench``: chooses the suite and its options. ``tools`` has suites of its own, chosen in the same way."""

import dataclasses
import datetime
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn_experiments import config
from jattn_experiments.bench.cases import CASES, LENGTHS, PARTS, PEERS, Plan
from jattn_experiments.runs.folder import RESULTS
from jattn_experiments.runs.terminal import fail


@dataclasses.dataclass(frozen=True)
class Entry:
    """A suite of a command.

    Attributes:
        module: The module with its ``SUITE``; imported once the options are known to be right.
        options: The names of the options that it takes.
        help: What it measures.
        folder: Maps the options to where results go without ``--out``.
    """

    module: str
    options: tuple[str, ...]
    help: str
    folder: Callable[[Any], Path | str] = lambda options: "runs/bench"


def dated(name: str) -> Path:
    """Where whole results are kept, under the date; a part of them is not."""
    return RESULTS / f"{name}-{datetime.date.today()}"


def _attention_folder(options: Any) -> Path:
    return dated(options.device + (f"-batch{options.batch}" if options.batch > 1 else ""))


_ATTENTION = ("peers", "device", "lengths", "batch", "cases", "parts", "seconds", "out", "resume", "redraw")
_CHIP = ("kernels", "minutes", "out", "resume", "redraw")
SUITES = {
    "attention": Entry("jattn_experiments.bench.attention", _ATTENTION, "calls beside their peers", _attention_folder),
    "chip": Entry("jattn_experiments.bench.chip", _CHIP, "all on the accelerator here", lambda options: "runs/chip"),
    "language": Entry("jattn_experiments.bench.language", ("out", "seconds"), "SmolLM2 beside transformers"),
    "layers": Entry("jattn_experiments.bench.layers", ("device", "out", "seconds"), "Flax's modules and torch's"),
    "looking": Entry("jattn_experiments.bench.looking", ("device", "out", "seconds"), "statistics"),
    "reports": Entry("jattn_experiments.bench.reports", ("out", "resume", "redraw"), "pages of heads"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "peers": {
        "type": str,
        "default": ",".join(PEERS[:3]),
        "help": f"any of {', '.join(PEERS)}, beside a plain call of jattn",
    },
    "device": {"type": str, "default": "cpu", "help": "cpu, gpu or tpu"},
    "lengths": {"type": str, "default": ",".join(map(str, LENGTHS)), "help": "T = S, each above 1"},
    "batch": {"type": int, "default": 1, "help": "B of the problems"},
    "cases": {"type": str, "default": ",".join(CASES), "help": "any of these"},
    "parts": {"type": str, "default": ",".join(PARTS), "help": "what to measure: any of these"},
    "cells": {"type": str, "default": "", "help": "of chips: any of their words, as v5e,128,causal"},
    "kernels": {
        "type": str,
        "default": "",
        "help": "of chip: any of jattn's implementations and module:object of one's own; by default the device's",
    },
    "minutes": {"type": float, "default": 8.0, "help": "of chip: how long it may take"},
    "seconds": {"type": float, "default": 6.0, "help": "time per row, all contestants together"},
    "out": {"type": str, "default": None, "help": "folder; by default one where results are kept"},
    "resume": {"action": "store_true", "default": False, "help": "continue the results in --out"},
    "redraw": {"action": "store_true", "default": False, "help": "redraw tables and figure from --out"},
}


def bench_command(arguments: Sequence[str]) -> int:
    """Times jattn and its peers in turn; writes tables and a figure."""
    parser = config.Parser(prog="jattn bench", description=bench_command.__doc__)
    parser.add_argument("--suite", type=str, default="attention", help=_listed(SUITES))
    return _run_suite(parser, "--suite", SUITES, arguments)


def tools_command(suites: Mapping[str, Entry], description: str, arguments: Sequence[str]) -> int:
    """``python -m tools SUITE``, of other suites; returns the exit status."""
    parser = config.Parser(prog="python -m tools", description=description)
    parser.add_argument("suite", type=str, nargs="?", default="", help=_listed(suites))
    return _run_suite(parser, "suite", suites, arguments)


def _listed(suites: Mapping[str, Entry]) -> str:
    return "; ".join(f"{name}: {entry.help}" for name, entry in suites.items())


def _run_suite(parser: config.Parser, choice: str, suites: Mapping[str, Entry], arguments: Sequence[str]) -> int:
    """Adds the options of the suites to a parser and runs the suite that its argument ``choice`` names."""
    taken = {name for entry in suites.values() for name in entry.options}
    for name, option in OPTIONS.items():
        if name in taken:
            parser.add_argument(f"--{name}", **option)
    options = parser.parse_args(arguments)
    if options.suite not in suites:
        return fail(f"{choice}: expected one of {', '.join(suites)}, got {options.suite!r}")
    entry = suites[options.suite]
    for name in (name for name in OPTIONS if name in taken and name not in entry.options):
        if options[name] != OPTIONS[name]["default"]:
            others = " and ".join(f"--{name}" for name in entry.options)
            return fail(f"--{name}: {choice} {options.suite} takes only {others}")
    fields = {field.name for field in dataclasses.fields(Plan)}
    try:
        plan = Plan.read(
            Path(options.out or entry.folder(options)), **{name: options[name] for name in taken & fields - {"out"}}
        )
    except ValueError as wrong:
        return fail(str(wrong))
    return _run(entry.module, plan, options.redraw, options.resume)


def _run(module: str, plan: Plan, redraw: bool, resume: bool) -> int:
    # slow to import: a wrong option need not wait for JAX
    from jattn_experiments.bench.suite import Failed, Refused, Suite

    suite: Suite = importlib.import_module(module).SUITE
    try:
        if redraw:
            results = suite.read(plan.out)
        else:
            sizes = suite.sizes(plan)
            suite.start(plan)
            results = suite.measure(sizes, plan.out, resume=resume)
        report = suite.write_report(results, plan.out)
    except Refused as refused:
        return fail(str(refused))
    except Failed as failed:
        return fail(str(failed), status=1)
    except OSError as wrong:
        return fail(f"--out: {wrong}")
    if text := suite.shown(results):
        print(text)
    print(f"report: {report}")
    wrong = suite.wrong(results)
    return fail(wrong, status=1) if wrong else 0
