"""``python -m tests.soak``: draws calls, models and files and holds them to references, for a time or number of cases.

``--mode``: attention (``local``, ``native``, ``sharded``), what looks inside a model (``looking``), models of every family
(``models``), GGUF files, tokenizers and checkpoints (``files``), runs, sweeps, replications and examinations of long
texts that are killed, starved and damaged (``crash``), commands on a full disk, stopped or called twice at once
(``disk``); by default ``all`` in turn, except the last two and ``sharded``.
"""

import argparse
import collections
import functools
import gc
import importlib.util
import json
import platform
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jattn
from tests.soak.attention import EAGER, CallTrial
from tests.soak.crash import CrashTrial, DiskTrial
from tests.soak.draw import MODES
from tests.soak.files import FileTrial
from tests.soak.looking import LookTrial
from tests.soak.models import ModelTrial
from tests.soak.trial import Trial, run_case

console = Console(stderr=True, soft_wrap=True)
TURN = ("local", "native", "looking", "models", "local", "files")
TRIALS: dict[str, Callable[[int, int], Trial]] = {mode: functools.partial(CallTrial, mode=mode) for mode in MODES}
TRIALS |= {"looking": LookTrial, "models": ModelTrial, "files": FileTrial, "crash": CrashTrial, "disk": DiskTrial}


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a case failed, otherwise 0."""
    options = parse(arguments)
    if options.mode == "sharded":
        jax.config.update("jax_num_cpu_devices", 8)
    # compiling a structure takes far longer than running its cases
    jax.config.update("jax_disable_most_optimizations", not options.optimised)
    if options.replay is not None:
        return replay(options.replay, options.mode)
    report = soak(options)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    title = f"{report['cases']} cases, {report['failed']} failed, seed {report['seed']}"
    table = Table("covered", "cases", title=title)
    for name, count in report["covered"].items():
        table.add_row(name, str(count))
    console.print(table)
    return 1 if report["failures"] else 0


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Runs structures and their cases, one after another."""
    began, counts, failures, worst = time.monotonic(), collections.Counter(), [], collections.defaultdict(float)
    cases, index, modes = 0, options.first, [options.mode]
    if options.mode == "all":
        has_native = importlib.util.find_spec("jattn_native") is not None
        modes = [mode for mode in TURN if mode != "native" or has_native]
        console.print("" if has_native else "jattn-native is not installed: none of its calls", end="")
    console.print(f"seed {options.seed}, {options.mode}")

    def progressed() -> float:
        by_time = (time.monotonic() - began) / (60 * options.minutes) if options.minutes is not None else 0.0
        return max(by_time, cases / options.cases if options.cases is not None else 0.0)

    with console.status("") as status:
        while progressed() < 1:
            mode, number = modes[index % len(modes)], index // len(modes)
            trial = TRIALS[mode](options.seed, number)
            for draw in range(options.draws):
                if progressed() >= 1:
                    break
                wrong, ratio = run_case(trial, draw)
                cases += 1
                counts.update(trial.covers())
                worst[trial.label] = max(worst[trial.label], ratio if ratio < float("inf") else 0.0)
                if wrong:
                    again = f"python -m tests.soak --mode {mode} --replay {options.seed}:{number}:{draw}"
                    again += " --optimised" * options.optimised
                    failures.append({"case": again, "differences": [str(x) for x in wrong]})
                    console.print(f"FAILED {trial.label}: {wrong[0]}; {again}", markup=False)
                structures = index - options.first + 1
                status.update(f"{progressed():.0%}: {cases} cases of {structures} structures, {len(failures)} failed")
            index += 1
            if index % 10 == 0:  # compiled programs take memory
                jax.clear_caches()
                gc.collect()
    return {
        "mode": options.mode, "seed": options.seed, "cases": cases, "structures": index - options.first,
        "failed": len(failures), "failures": failures, "seconds": round(time.monotonic() - began, 1),
        "largest_error_over_tolerance": {key: round(worst[key], 3) for key in sorted(worst)},
        "covered": {key: counts[key] for key in sorted(counts)}, "optimised": options.optimised,
        "environment": {"jattn": jattn.__version__, "jax": jax.__version__, "python": platform.python_version(), "system": platform.platform()},
    }  # fmt: skip


def replay(case: str, mode: str) -> int:
    """Runs one case again and shows every difference."""
    seed, index, draw = map(int, case.split(":"))
    trial = TRIALS[mode](seed, index)
    print(getattr(trial, "structure", trial.label))
    for before in range(min(draw, EAGER) if trial.eager else 0):  # an eager call may have used their programs
        trial.case(before)
    wrong, ratio = run_case(trial, draw)
    print(*trial.covers(), sep="; ")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{len(wrong)} results differ" if wrong else f"nothing differs; largest error over tolerance {ratio:.3g}")
    return 1 if wrong else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long at most; 10 where --cases is not given, either")
    parser.add_argument("--cases", type=int, help="how many cases at most")
    parser.add_argument("--seed", type=int, help="of everything that is drawn; by default another one each time")
    parser.add_argument("--first", type=int, default=0, help="the number of the first structure")
    parser.add_argument("--draws", type=int, default=80, help="cases of each structure")
    parser.add_argument("--mode", choices=["all", *TRIALS], default="all", help="sharded: on eight virtual devices")
    parser.add_argument("--replay", metavar="SEED:STRUCTURE:DRAW", help="run this case alone, and print what differs")
    parser.add_argument("--optimised", action="store_true", help="compile as users do, which takes longer")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write what was found")
    options = parser.parse_args(arguments)
    if options.replay is not None and options.mode == "all":
        parser.error("--replay needs the --mode that the failure named")
    if options.minutes is None and options.cases is None:
        options.minutes = 10.0
    if options.seed is None:
        options.seed = secrets.randbelow(2**31)
    return options


if __name__ == "__main__":
    sys.exit(main())
