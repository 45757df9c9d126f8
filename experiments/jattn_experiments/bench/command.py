"""``jattn bench``: chooses the suite and its options."""

import datetime
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jattn_experiments import config
from jattn_experiments.bench.cases import CASES, LENGTHS, PARTS, PEERS, Plan
from jattn_experiments.runs.folder import RESULTS
from jattn_experiments.runs.terminal import fail

# The suites, one file each, and the options that they take.
SUITES = {
    "attention": ("peers", "device", "lengths", "batch", "cases", "parts", "seconds", "out", "resume", "redraw"),
    "chip": ("kernels", "minutes", "out", "resume", "redraw"),
    "chips": ("cells", "out", "resume", "redraw"),
    "dispatch": ("out",),
    "imports": ("out",),
    "language": ("out", "seconds"),
    "layers": ("device", "out", "seconds"),
    "looking": ("device", "out", "seconds"),
    "pods": ("out", "resume", "redraw"),
    "reports": ("out", "resume", "redraw"),
    "sharding": ("out",),
}


def bench_command(arguments: Sequence[str]) -> int:
    """Times jattn and its peers in turn; writes tables and a figure."""
    options = _parser().parse_args(arguments)
    if options.suite not in SUITES:
        return fail(f"--suite: expected one of {', '.join(SUITES)}, got {options.suite!r}")
    if not _takes(options, *SUITES[options.suite]):
        return 2
    out = Path(options.out or _folder(options))
    lists = {name: options[name] for name in ("peers", "lengths", "cases", "parts")}
    try:
        plan = Plan.read(
            out,
            options.device,
            options.seconds,
            options.cells,
            options.batch,
            options.kernels,
            options.minutes,
            **lists,
        )
    except ValueError as wrong:
        return fail(str(wrong))
    return _run(options.suite, plan, options.redraw, options.resume)


def _folder(options: Any) -> Path | str:
    """Where whole results are kept, under the date; a part of them is not."""
    attention = options.device + (f"-batch{options.batch}" if options.batch > 1 else "")
    if options.suite == "chip":
        return "runs/chip"
    kept = {
        "attention": attention,
        "chips": "" if options.cells else "chips",
        "pods": "pods",
    }.get(options.suite)
    return RESULTS / f"{kept}-{datetime.date.today()}" if kept else "runs/bench"


def _run(name: str, plan: Plan, redraw: bool, resume: bool) -> int:
    # slow to import: a wrong option need not wait for JAX
    from jattn_experiments.bench.suite import Failed, Refused, Suite

    suite: Suite = importlib.import_module(f"jattn_experiments.bench.{name}").SUITE
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


def _parser() -> config.Parser:
    parser = config.Parser(prog="jattn bench", description=bench_command.__doc__)
    parser.add_argument(
        "--suite",
        type=str,
        default="attention",
        help="attention; chip: all on the accelerator here; chips: compiled for TPUs and "
        "GPUs; dispatch: short calls; imports: beside JAX and Flax; language: SmolLM2 beside transformers; layers: "
        "Flax's modules and torch's; looking: statistics; pods: rings compiled for TPUs; reports: pages of heads; "
        "sharding: rings",
    )
    known = f"any of {', '.join(PEERS)}, beside a plain call of jattn"
    parser.add_argument("--peers", type=str, default=",".join(PEERS[:3]), help=known)
    parser.add_argument("--device", type=str, default="cpu", help="cpu, gpu or tpu")
    parser.add_argument("--lengths", type=str, default=",".join(map(str, LENGTHS)), help="T = S, each above 1")
    parser.add_argument("--batch", type=int, default=1, help="B of the problems")
    parser.add_argument("--cases", type=str, default=",".join(CASES), help="any of these")
    parser.add_argument("--parts", type=str, default=",".join(PARTS), help="what to measure: any of these")
    parser.add_argument("--cells", type=str, default="", help="of chips: any of their words, as v5e,128,causal")
    known = "of chip: any of jattn's implementations and module:object of one's own; by default the device's"
    parser.add_argument("--kernels", type=str, default="", help=known)
    parser.add_argument("--minutes", type=float, default=8.0, help="of chip: how long it may take")
    parser.add_argument("--seconds", type=float, default=6.0, help="time per row, all contestants together")
    parser.add_argument("--out", type=str, default=None, help="folder; by default one where results are kept")
    parser.add_argument("--resume", action="store_true", help="continue the results in --out")
    parser.add_argument("--redraw", action="store_true", help="redraw tables and figure from --out")
    return parser


def _takes(options: Any, *names: str) -> bool:
    """Whether all options except ``names`` have their defaults; prints one that does not."""
    defaults = _parser().get_defaults()
    for name in defaults.keys():
        if name not in ("suite", *names) and options[name] != defaults[name]:
            others = " and ".join(f"--{name}" for name in names)
            fail(f"--{name}: --suite {options.suite} takes only {others}")
            return False
    return True
