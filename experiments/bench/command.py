"""``python -m experiments bench``: which suite, and which of its options."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import config
from experiments.bench.cases import CASES, LENGTHS, PARTS, PEERS, Plan
from experiments.runs.terminal import fail


def bench_command(arguments: Sequence[str]) -> int:
    """Times jattn and its peers in turn, and writes tables and a picture."""
    options = _bench_parser().parse_args(arguments)
    suites = ("attention", "dispatch", "layers", "looking", "sharding")
    if options.suite not in suites:
        return fail(f"--suite: expected one of {', '.join(suites)}, got {options.suite!r}")
    if options.suite == "dispatch":
        return _bench_dispatch(options)
    if options.suite in ("layers", "looking"):
        return _bench_in_turn(options)
    if options.suite == "sharding":
        return _bench_sharding(options)
    today = Path(__file__).parents[1] / "results" / f"{options.device}-{datetime.date.today()}"
    lists = {name: options[name] for name in ("peers", "lengths", "cases", "parts")}
    try:
        plan = Plan.read(Path(options.out or today), options.device, options.seconds, **lists)
    except ValueError as wrong:
        return fail(str(wrong))
    # JAX takes seconds to import, which a wrong option need not wait for
    from experiments.bench import attention, tables

    try:
        if options.redraw:
            found = attention.read(plan.out)
        else:
            attention.use(plan.device)
            found = attention.measure(plan, resume=options.resume)
    except attention.Refused as refused:
        return fail(str(refused))
    attention.write_report(found, plan.out)
    for line in found["missing"].values():
        print(line)
    answered = [one for one in tables.asked(found) if one.measured is not None]
    if answered:
        print(tables.asked_table(answered))
    print(f"report: {plan.out / 'attention.md'}")
    return 0


def _bench_parser() -> config.Parser:
    parser = config.Parser(prog="python -m experiments bench", description=bench_command.__doc__)
    parser.add_argument(
        "--suite",
        type=str,
        default="attention",
        help="attention; dispatch: short calls; layers: Flax's modules; looking: statistics; sharding: rings",
    )
    parser.add_argument("--peers", type=str, default=",".join(PEERS[:3]), help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--device", type=str, default="cpu", help="cpu or gpu")
    parser.add_argument("--lengths", type=str, default=",".join(map(str, LENGTHS)), help="T = S, numbers above 1")
    parser.add_argument("--cases", type=str, default=",".join(CASES), help="some of these")
    parser.add_argument("--parts", type=str, default=",".join(PARTS), help="what to measure, some of these")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each row, all contestants together")
    parser.add_argument("--out", type=str, default=None, help="folder; default experiments/results/DEVICE-DATE")
    parser.add_argument("--resume", action="store_true", help="go on with the results in --out")
    parser.add_argument("--redraw", action="store_true", help="tables and picture of the results in --out anew")
    return parser


def _bench_dispatch(options: Any) -> int:
    """Short calls against jax.nn's; ``--out`` is its only option."""
    if not _takes(options, "out"):
        return 2
    from experiments.bench import timing

    rows = timing.dispatch()
    timing.write(rows, Path(options.out or "runs/bench"))
    print(timing.table(rows), end="")
    return 0


def _bench_in_turn(options: Any) -> int:
    """jattn's modules against Flax's, or looking against attention; ``--out`` and ``--seconds`` are the options."""
    if not _takes(options, "out", "seconds"):
        return 2
    if not options.seconds > 0:
        return fail(f"--seconds: expected > 0, got {options.seconds}")
    from experiments.bench import attention, layers, looking, tables

    attention.use("cpu")
    out = Path(options.out or "runs/bench")
    suite = {"layers": layers, "looking": looking}[options.suite]
    try:
        found = suite.measure(suite.Sizes(seconds=options.seconds), out)
    except layers.Failed as failed:
        return fail(str(failed), status=1)
    except OSError as wrong:
        return fail(f"--out: {wrong}")
    print(tables.asked_table(suite.asked(found)))
    print(f"report: {out / options.suite}.md")
    return 0


def _bench_sharding(options: Any) -> int:
    """Rings of virtual CPU devices beside one device; ``--out`` is its only option."""
    if not _takes(options, "out"):
        return 2
    import jax

    jax.config.update("jax_num_cpu_devices", 8)  # before anything runs
    from experiments.bench import attention, sharding, tables

    attention.use("cpu")
    out = Path(options.out or "runs/bench")
    try:
        found = sharding.measure(sharding.Sizes(), out)
    except OSError as wrong:
        return fail(f"--out: {wrong}")
    print(tables.asked_table(sharding.asked(found)))
    print(f"report: {out / 'sharding.md'}")
    return 0


def _takes(options: Any, *names: str) -> bool:
    """Whether all other options are left as they are; says which is not."""
    defaults = _bench_parser().get_defaults()
    for name in defaults.keys():
        if name not in ("suite", *names) and options[name] != defaults[name]:
            others = " and ".join(f"--{name}" for name in names)
            fail(f"--{name}: --suite {options.suite} takes no other option than {others}")
            return False
    return True
