"""Runs each command on a finished run with a full disk, limited file sizes or a read-only folder.

``python -m tests.soak.disk --trials 20 --seed 0``. Each must do its work or end in one line, and the run must keep its
results; then the command must work without the fault. A failure prints the command that draws its trial again.
"""

import argparse
import collections
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console

from tests.experiments.processes import environment
from tests.soak.crash import ROOT, Commands, Failure, difference, machine, read_only_prefix, small_disk

COMMANDS = ("report", "look", "compare", "keep", "replicate")
FAULTS = ("full output", "limited files", "small disk", "read-only")


def words(command: str, commands: Commands, out: Path, beside: Path) -> list[str]:
    """The arguments of a command on the run ``out``; what it writes elsewhere goes into ``beside``."""
    match command:
        case "compare":
            return ["compare", "--run", str(out), "--run", str(commands.whole), "--out", str(beside / "heads.png")]
        case "keep":
            return ["keep", "--run", str(out), "--to", str(beside)]
        case "replicate":
            return ["run", "--config", str(commands.folder / "tiny.yaml"), "--out", str(out), "--replicate", "1"]
    return [command, "--run", str(out)]


def play(commands: Commands, seed: int, number: int) -> str:
    """One trial; returns the command, the fault and what came of it."""
    rng, folder = np.random.default_rng([seed, number]), commands.folder / f"trial-{number}"
    command, fault = COMMANDS[rng.integers(len(COMMANDS))], FAULTS[rng.integers(len(FAULTS))]
    out, beside = folder / "tiny", folder / "beside"
    beside.mkdir(parents=True)
    shutil.copytree(commands.whole, out)
    arguments = words(command, commands, out, beside)
    written = beside if command in ("compare", "keep") else out
    limit, size = None, int(np.exp(rng.uniform(np.log(1), np.log(300_000))))
    if fault == "limited files":
        limit = size
    if fault == "small disk":
        taken = sum(file.stat().st_size + 8192 for file in written.rglob("*")) // 1024 + 8
        with small_disk(written, taken + size // 1024) as mounted:
            came = run(commands, arguments) if mounted else "no disk can be mounted here"
    elif fault == "read-only":
        before = read_only_prefix()
        written.chmod(0o555)
        came = "root may write everything here" if before is None else run(commands, arguments, before=before)
        written.chmod(0o755)
    else:
        came = run(commands, arguments, full=fault == "full output", limit=limit)
    found = difference(out, commands.whole)
    if command == "replicate" and found in ("claims.json", "findings.json"):  # which it adds to, before the report
        found = (
            "metrics.jsonl"
            if (out / "metrics.jsonl").read_bytes() != (commands.whole / "metrics.jsonl").read_bytes()
            else ""
        )
    if found:
        raise Failure(f"{command}, {fault}: {came}; the run has another {found}")
    again = run(commands, arguments)
    if again != "done":
        raise Failure(f"{command}, after {fault} ({came}): {again}")
    shutil.rmtree(folder)
    return f"{command}, {fault}: {came.partition(':')[0]}"


def run(
    commands: Commands,
    arguments: list[str],
    *,
    before: tuple[str, ...] = (),
    full: bool = False,
    limit: int | None = None,
) -> str:
    """``"done"``, or the line in which the command ended; any other end is a failure."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    # A limit would also cut the files of JAX's cache of compiled programs, which it says in warnings.
    variables = {"JAX_ENABLE_COMPILATION_CACHE": "false"} if limit is not None else {}
    variables |= environment(commands.folder / "cache", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    with Path("/dev/full" if full else os.devnull).open("wb") as output:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "jattn_experiments", *arguments],
            cwd=ROOT, env=variables, text=True, stdout=output, stderr=subprocess.PIPE, preexec_fn=limited,
        )  # fmt: skip
        status, said = commands.ended(process)
    if status == 0 and not said:
        return "done"
    if status not in (1, 2) or not said.startswith("error: ") or said.count("\n") != 1:
        raise Failure(f"{' '.join(arguments)}: expected one line, got status {status}: {said}")
    return f"one line: {said.strip()}"


def main(arguments: list[str] | None = None) -> int:
    """Plays the trials; returns 1 if one fails, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.disk", description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the one trial of this number")
    parser.add_argument("--out", type=Path, help="a JSON file for what came")
    asked = parser.parse_args(arguments)
    console, counts, failures = Console(stderr=True, soft_wrap=True), collections.Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="jattn-disk-") as folder:
        commands = Commands(Path(folder))
        for number in range(asked.trials) if asked.only is None else [asked.only]:
            try:
                came = play(commands, asked.seed, number)
                counts[came] += 1
                console.print(f"trial {number}: {came}", markup=False)
            except Failure as failure:
                again = f"python -m tests.soak.disk --seed {asked.seed} --only {number}"
                failures.append({"case": again, "wrong": str(failure)})
                console.print(f"FAILED {again}: {failure}", markup=False)
            found = {"seed": asked.seed, "trials": sum(counts.values()) + len(failures), "failures": failures}
            found |= {"came": dict(sorted(counts.items())), "machine": machine()}
            if asked.out is not None:
                asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"{sum(counts.values()) + len(failures)} trials, {len(failures)} failures, seed {asked.seed}")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
