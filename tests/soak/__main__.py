"""``python -m tests.soak``: compares random calls of jattn with float64 NumPy, for a given time or number of cases.

``--mode``: attention (``local``, ``native``, ``sharded``), what looks inside a model (``looking``), models of every family
(``models``), GGUF files and tokenizers (``files``); by default ``all`` in turn, except ``sharded``.
"""

import argparse
import collections
import gc
import importlib.util
import json
import platform
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jattn
from tests.soak.draw import MODES
from tests.soak.files import FileTrial
from tests.soak.looking import LookTrial
from tests.soak.models import ModelTrial
from tests.soak.trial import EAGER, Difference, Trial

console = Console(stderr=True, soft_wrap=True)
TURN = ("local", "native", "looking", "models", "local", "files")
OTHERS = {"looking": LookTrial, "models": ModelTrial, "files": FileTrial}


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a case failed, otherwise 0."""
    asked = _asked(arguments)
    if asked.mode == "sharded":
        jax.config.update("jax_num_cpu_devices", 8)
    # compiling a structure takes far longer than running its cases
    jax.config.update("jax_disable_most_optimizations", not asked.optimised)
    if asked.replay is not None:
        return replay(asked.replay, asked.mode)
    found = soak(asked)
    found["environment"] = environment(asked)
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found)
    return 1 if found["failures"] else 0


def soak(asked: argparse.Namespace) -> dict[str, Any]:
    """Runs structures and their cases, one after another."""
    began, counts, failures = time.monotonic(), collections.Counter(), []
    worst: dict[str, float] = collections.defaultdict(float)
    seconds = None if asked.minutes is None else 60 * asked.minutes
    total, cases, index = asked.cases, 0, asked.first
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn()
    console.print(f"seed {asked.seed}, {asked.mode}")
    has_native = importlib.util.find_spec("jattn_native") is not None
    if asked.mode == "all" and not has_native:
        console.print("jattn-native is not installed: none of its calls")
    turn = [mode for mode in TURN if mode != "native" or has_native] if asked.mode == "all" else [asked.mode]

    def over() -> bool:
        return (total is not None and cases >= total) or (seconds is not None and time.monotonic() - began >= seconds)

    with Progress(*columns, console=console) as progress:
        task = progress.add_task("soak", total=1.0, state="")
        while not over():
            mode, number = turn[index % len(turn)], index // len(turn)
            trial = make_trial(asked.seed, number, mode)
            for draw in range(asked.draws):
                if over():
                    break
                wrong, ratio = run_case(trial, draw)
                cases += 1
                counts.update(trial.covers())
                worst[trial.label] = max(worst[trial.label], ratio if ratio < float("inf") else 0.0)
                if wrong:
                    again = f"python -m tests.soak --mode {mode} --replay {asked.seed}:{number}:{draw}"
                    again += " --optimised" * asked.optimised
                    failures.append({"case": again, "differences": [str(one) for one in wrong]})
                    progress.console.print(f"FAILED {trial.label}: {wrong[0]}; {again}", markup=False)
                done = max(
                    cases / total if total is not None else 0.0,
                    (time.monotonic() - began) / seconds if seconds is not None else 0.0,
                )
                state = f"{cases} cases of {index - asked.first + 1} structures, {len(failures)} failed"
                progress.update(task, completed=done, state=state)
            index += 1
            if index % 10 == 0:  # compiled programs take memory
                jax.clear_caches()
                gc.collect()
    return {
        "mode": asked.mode, "seed": asked.seed, "cases": cases, "structures": index - asked.first,
        "failed": len(failures), "failures": failures, "seconds": round(time.monotonic() - began, 1),
        "largest_error_over_tolerance": {key: round(worst[key], 3) for key in sorted(worst)},
        "covered": {key: counts[key] for key in sorted(counts)},
    }  # fmt: skip


def make_trial(seed: int, index: int, mode: str) -> Trial | LookTrial | ModelTrial | FileTrial:
    """What is drawn as number ``index`` of a mode."""
    return OTHERS[mode](seed, index) if mode in OTHERS else Trial(seed, index, mode)


def run_case(trial: Trial | LookTrial | ModelTrial | FileTrial, draw: int) -> tuple[list[Difference], float]:
    """The differences in a case, and the largest ratio of error to tolerance. Any error is a finding."""
    try:
        return trial.case(draw)
    except Exception as error:
        text = " ".join(str(error).split())
        return [Difference(f"{type(error).__name__}: {text[:300]}", float("inf"))], 0.0


def replay(case: str, mode: str) -> int:
    """Runs one case again and shows every difference."""
    seed, index, draw = map(int, case.split(":"))
    trial = make_trial(seed, index, mode)
    print(getattr(trial, "structure", trial.label))
    for before in range(min(draw, EAGER) if trial.eager else 0):  # an eager call may have used their programs
        trial.case(before)
    wrong, ratio = run_case(trial, draw)
    for one in wrong:
        print(one)
    print(f"{len(wrong)} results differ" if wrong else f"nothing differs; largest error over tolerance {ratio:.3g}")
    return 1 if wrong else 0


def show(found: dict[str, Any]) -> None:
    """Prints a summary."""
    table = Table("covered", "cases", title=f"{found['cases']} cases, {found['failed']} failed, seed {found['seed']}")
    for name, count in found["covered"].items():
        table.add_row(name, str(count))
    console.print(table)


def environment(asked: argparse.Namespace) -> dict[str, Any]:
    """The versions and the machine."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "jattn": getattr(jattn, "__version__", None), "jax": jax.__version__, "python": platform.python_version(),
        "cpu": cpu, "optimised": asked.optimised,
    }  # fmt: skip


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long at most; 10 where --cases is not given, either")
    parser.add_argument("--cases", type=int, help="how many cases at most")
    parser.add_argument("--seed", type=int, help="of everything that is drawn; by default another one each time")
    parser.add_argument("--first", type=int, default=0, help="the number of the first structure")
    parser.add_argument("--draws", type=int, default=80, help="cases of each structure")
    parser.add_argument(
        "--mode", choices=["all", *sorted(MODES), *OTHERS], default="all", help="sharded: on eight virtual devices"
    )
    parser.add_argument("--replay", metavar="SEED:STRUCTURE:DRAW", help="run this case alone, and print what differs")
    parser.add_argument("--optimised", action="store_true", help="compile as users do, which takes longer")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write what was found")
    asked = parser.parse_args(arguments)
    if asked.replay is not None and asked.mode == "all":
        parser.error("--replay needs the --mode that the failure named")
    if asked.minutes is None and asked.cases is None:
        asked.minutes = 10.0
    if asked.seed is None:
        asked.seed = secrets.randbelow(2**31)
    return asked


if __name__ == "__main__":
    sys.exit(main())
