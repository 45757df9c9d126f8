"""``jattn bench``: chooses a suite and its options. ``python -m tools`` chooses among its own suites the same way."""

import dataclasses
import datetime
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn_experiments import config
from jattn_experiments.bench.plan import OPTIONS, Plan, on_command_line
from jattn_experiments.runs.folder import RESULTS
from jattn_experiments.runs.terminal import fail


@dataclasses.dataclass(frozen=True)
class Entry:
    """A suite: the module with its ``SUITE``, the names of the options that it takes, and what it measures.

    ``folder``: maps the options to where results go without ``--out``.
    """

    module: str
    options: str
    help: str
    folder: Callable[[Any], Path | str] = lambda options: "runs/bench"


def dated(name: str) -> Path:
    """The dated folder for complete results. Partial results are not kept there."""
    return RESULTS / f"{name}-{datetime.date.today()}"


SUITES = {
    "attention": Entry(
        "jattn_experiments.bench.attention",
        "peers device lengths batch cases parts seconds out resume redraw",
        "jattn's calls compared with JAX's and PyTorch's",
        lambda options: dated(options.device + (f"-batch{options.batch}" if options.batch > 1 else "")),
    ),
    "chip": Entry(
        "jattn_experiments.bench.chip",
        "kernels minutes out resume redraw",
        "every kernel on this machine's accelerator",
        lambda options: "runs/chip",
    ),
    "language": Entry("jattn_experiments.bench.language", "out seconds", "SmolLM2 compared with transformers"),
    "layers": Entry(
        "jattn_experiments.bench.flax_modules",
        "device out seconds",
        "jattn's modules compared with Flax's and PyTorch's",
    ),
    "looking": Entry("jattn_experiments.bench.looking", "device out seconds", "cost of head statistics"),
    "reports": Entry(
        "jattn_experiments.bench.viewers", "out resume redraw", "report pages compared with other viewers"
    ),
}


def bench_command(arguments: Sequence[str]) -> int:
    """Times jattn and its peers in turn, then writes tables and a figure."""
    parser = config.Parser(prog="jattn bench", description=bench_command.__doc__)
    return _run_suite(parser, "--suite", "attention", SUITES, arguments)


def tools_command(suites: Mapping[str, Entry], description: str, arguments: Sequence[str]) -> int:
    """Runs ``python -m tools SUITE`` and returns the exit status."""
    parser = config.Parser(prog="python -m tools", description=description)
    return _run_suite(parser, "suite", "", suites, arguments)


def _run_suite(
    parser: config.Parser, choice: str, default: str, suites: Mapping[str, Entry], arguments: Sequence[str]
) -> int:
    """Adds the options of the suites to a parser and runs the suite that its argument ``choice`` names."""
    listed = "; ".join(f"{name}: {entry.help}" for name, entry in suites.items())
    may_lack = {} if choice.startswith("-") else {"nargs": "?"}
    parser.add_argument(choice, type=str, default=default, help=listed, **may_lack)
    taken = {name for entry in suites.values() for name in entry.options.split()}
    for option in OPTIONS:
        if option.name in taken:
            parser.add_argument(f"--{option.name}", **on_command_line(option))
    parser.add_argument("--out", type=str, default=None, help="folder for the results; default: the suite's own")
    parser.add_argument("--resume", action="store_true", help="continue the run whose results are in --out")
    parser.add_argument("--redraw", action="store_true", help="only rewrite tables and figure from --out")
    options, defaults = parser.parse_args(arguments), parser.get_defaults()
    if options.suite not in suites:
        return fail(f"{choice}: expected one of {', '.join(suites)}, got {options.suite!r}")
    entry = suites[options.suite]
    for name in defaults.keys():
        if name not in ("suite", *entry.options.split()) and options[name] != defaults[name]:
            others = " and ".join(f"--{name}" for name in entry.options.split())
            return fail(f"--{name}: {choice} {options.suite} takes only {others}")
    try:
        out = Path(options.out or entry.folder(options))
        plan = Plan.read(out, **{option.name: options[option.name] for option in OPTIONS if option.name in taken})
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
    return fail(wrong, status=1) if (wrong := suite.wrong(results)) else 0
