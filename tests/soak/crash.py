"""Kills, starves, locks out and damages runs. Each gives the results of an uninterrupted run or a one-line error.

``python -m tests.soak.crash --rounds 20 --seed 0`` draws the trials from one seed, in rounds of five on one folder. Three
times the command runs into a fault of ``FAULTS`` and may exit with a signal's status or a one-line error. It then runs
again and must give the results of an undisturbed run. After that, one of its files is damaged, twice, and the command
must give the same results or a one-line error that names a path. ``--only`` repeats one round.
"""

import argparse
import collections
import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from tests.experiments.processes import environment

ROOT = Path(__file__).parents[2]
LOOK, CHECKPOINT, STEPS = 2, 4, 40
CONFIG = f"""
name: tiny
task: {{kind: shift_bank, symbols: 3, length: 12, offsets: [1, 3]}}
model: {{model_dim: 4, num_heads: 2, head_dim: 2}}
train: {{seeds: 2, steps: {STEPS}, warmup: 1, batch: 4, log_every: 1, look_every: {LOOK}, checkpoint_every: {CHECKPOINT}}}
evaluate: {{batch: 8}}
claims: [{{name: right, statement: Right at all., metric: mean_accuracy, at_least: 0.0, needed: 2}}]
"""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
SECONDS = 300.0  # a command that takes longer hangs


class Failure(Exception):
    """A trial failed."""


class Commands:
    """Runs the experiment's commands in separate processes, and holds the folder of an undisturbed run."""

    def __init__(self, folder: Path):
        self.folder, self.whole = folder, folder / "whole"
        (folder / "tiny.yaml").write_text(CONFIG)
        self.finish(self.start(self.whole))  # compiles
        began = time.monotonic()
        self.finish(self.start(folder / "again"))
        self.seconds = time.monotonic() - began
        if found := difference(folder / "again", self.whole):
            raise Failure(f"two runs that nobody touched differ: {found}")

    def start(self, out: Path, command: str = "run", before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Starts a command on ``out``."""
        variables = environment(self.folder / "cache", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
        words = ["--run", str(out)]
        if command == "run":
            words = ["--config", str(self.folder / "tiny.yaml"), "--out", str(out)]
        return subprocess.Popen(
            [*before, sys.executable, "-m", "jattn_experiments", command, *words],
            cwd=ROOT, env=variables, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=_signals_as_in_a_terminal,
        )  # fmt: skip

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """The exit status of a process, and its stderr."""
        try:
            said = process.communicate(timeout=SECONDS)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise Failure(f"no end after {SECONDS:.0f} s") from None
        return process.returncode, said

    def finish(self, process: subprocess.Popen[str]) -> None:
        """Waits for a process; it must succeed and print nothing to stderr."""
        status, said = self.ended(process)
        if status or said:
            raise Failure(f"expected a silent run, got status {status}: {said}")

    def refused(self, process: subprocess.Popen[str], *status: int) -> str:
        """The one-line error of a process that must exit with one of ``status``."""
        found, said = self.ended(process)
        if found not in status or not said.startswith("error: ") or said.count("\n") != 1:
            raise Failure(f"expected one line and status {' or '.join(map(str, status))}, got {found}: {said}")
        return said

    def goes_on(self, out: Path) -> None:
        """Runs the command again and compares the results with the undisturbed run's."""
        self.finish(self.start(out))
        if found := difference(out, self.whole):
            raise Failure(found)


def _signals_as_in_a_terminal() -> None:
    """A shell's background jobs ignore SIGINT, and child processes would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def difference(out: Path, whole: Path) -> str:
    """The first file in which two runs differ in their results; "" if they are equal.

    Timings are not compared. The report and the figures, which are drawn from the other files, only have to exist.
    """

    def looks(folder: Path) -> list[Path]:
        return sorted(file.relative_to(folder) for file in (folder / "looks").glob("*.npz"))

    def plain(folder: Path) -> dict[str, Any]:
        found = json.loads((folder / "findings.json").read_text())
        return {name: value for name, value in found.items() if name not in ("environment", "sha256")}

    for name in ("metrics.jsonl", "claims.json"):
        if (out / name).read_bytes() != (whole / name).read_bytes():
            return name
    if looks(out) != looks(whole):
        return "looks"
    for file in (*looks(whole), Path("findings.npz")):
        with np.load(out / file) as one, np.load(whole / file) as other:
            if set(one) != set(other) or not all(np.array_equal(one[x], other[x], equal_nan=True) for x in other):
                return str(file)
    if plain(out) != plain(whole):
        return "findings.json"
    return "" if (out / "report.html").stat().st_size > 10_000 else "report.html"


# --- faults: each gets the folder of an unfinished run and returns a short description of the outcome ----------------


def signal_at_random(commands: Commands, rng: np.random.Generator, out: Path) -> str:
    """Sends SIGKILL, SIGTERM or SIGINT at a random time."""
    number, seconds = SIGNALS[rng.integers(3)], rng.uniform(0, commands.seconds)
    began, process = time.time_ns(), commands.start(out)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    lock = out / "lock"
    importing = not lock.exists() or lock.stat().st_mtime_ns < began
    return _stopped(commands, process, number, importing)


def signal_at_an_instant(commands: Commands, rng: np.random.Generator, out: Path) -> str:
    """Sends a signal as soon as a certain file is written: a look, a checkpoint, the findings or the report."""
    number = SIGNALS[rng.integers(3)]
    step = _checkpoint(out) + int(rng.integers(1, 4)) * CHECKPOINT
    folder = out / "checkpoints"
    events = [
        [out / "looks" / f"{step:08d}.tmp", out / "looks" / f"{step:08d}.npz"],  # the second if the first is missed
        [folder / f"{step}.tmp", folder / f"{step}"],
        [folder / f"{step}.tmp" / "arrays", folder / f"{step}"],
        [folder / f"{step}"],
    ]
    if step > STEPS or rng.random() < 0.3:
        names = ("findings.npz.tmp", "findings.npz", "findings.json", "report.html.tmp", "report.html")
        events = [[out / name] for name in names]
    files = events[rng.integers(len(events))]
    began, process = time.time_ns(), commands.start(out)
    while process.poll() is None and not any(_written(file, began) for file in files):
        time.sleep(0.0005)
    return f"{_stopped(commands, process, number)}, at {'/'.join(files[0].relative_to(out).parts[:1])}"


def _checkpoint(out: Path) -> int:
    """The step of the newest checkpoint, or 0."""
    return max((int(file.name) for file in (out / "checkpoints").glob("*") if file.name.isdecimal()), default=0)


def _written(file: Path, since: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime_ns >= since
    return False


def _stopped(
    commands: Commands, process: subprocess.Popen[str], number: signal.Signals, importing: bool = False
) -> str:
    process.send_signal(number)
    status, said = commands.ended(process)
    if status == 0:
        return "ended before the signal came"
    came = f"{number.name} {'before it began' if importing else 'while it worked'}"
    if importing and status in (-number, 1, 128 + number):  # Python's own exit, while modules load
        return came
    if number == signal.SIGKILL and (status, said) == (-number, ""):
        return came
    if number == signal.SIGKILL or status != 128 + number or said.count("\n") != 1 or "; rerun" not in said:
        raise Failure(f"{number.name}: expected its status and one line, got {status}: {said}")
    return came


def full_disk(commands: Commands, rng: np.random.Generator, out: Path) -> str:
    """Limits the size of files or, where mounting is allowed, runs on a disk that is nearly full."""
    limited = rng.random() < 0.5
    if limited:
        process, size = commands.start(out), int(np.exp(rng.uniform(np.log(100), np.log(300_000))))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return _refused_or_done(commands, process, "files limited")
    taken = sum(file.stat().st_size + 8192 for file in out.rglob("*")) // 1024 + 64
    with small_disk(out, taken + int(rng.integers(8, 600))) as mounted:
        if not mounted:
            return "no disk can be mounted here"
        return _refused_or_done(commands, commands.start(out), "a small disk")


def _refused_or_done(commands: Commands, process: subprocess.Popen[str], what: str) -> str:
    status, said = commands.ended(process)
    if status == 0 and not said:
        return f"{what}: enough"
    if status not in (1, 2) or not said.startswith("error: ") or said.count("\n") != 1:
        raise Failure(f"{what}: expected one line, got status {status}: {said}")
    return f"{what}: one line"


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[bool]:
    """Mounts a small disk over ``folder`` with a copy of its files, and copies them back at the end."""
    folder.mkdir(exist_ok=True)
    disk = folder.with_name("disk")
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        disk.rmdir()
        yield False
        return
    shutil.copytree(folder, disk, dirs_exist_ok=True)
    subprocess.run(["mount", "--bind", str(disk), str(folder)], check=True)
    try:
        yield True
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        shutil.rmtree(folder)
        shutil.copytree(disk, folder)
        subprocess.run(["umount", str(disk)], check=True)
        disk.rmdir()


def two_owners(commands: Commands, rng: np.random.Generator, out: Path) -> str:
    """Starts a second run, which must be refused, then kills the first."""
    began, first = time.time_ns(), commands.start(out)
    while first.poll() is None and not _written(out / "lock", began):
        time.sleep(0.001)
    with contextlib.suppress(subprocess.TimeoutExpired):
        first.wait(rng.uniform(0, commands.seconds / 3))
    if first.poll() is not None:
        return "the first had ended"
    first.send_signal(signal.SIGSTOP)  # otherwise it may end before the second starts
    said = commands.refused(commands.start(out), 2)
    first.kill()
    first.send_signal(signal.SIGCONT)
    commands.ended(first)
    if f"of process {first.pid}" not in said:
        raise Failure(f"expected the owner's number, got {said}")
    return "the second is refused"


def read_only(commands: Commands, rng: np.random.Generator, out: Path) -> str:
    """Makes a folder read-only."""
    out.mkdir(exist_ok=True)
    folders = [folder for folder in (out, out / "looks", out / "checkpoints") if folder.exists()]
    folder = folders[rng.integers(len(folders))]
    before = read_only_prefix()
    if before is None:
        return "root may write everything here"
    folder.chmod(0o555)
    try:
        return _refused_or_done(commands, commands.start(out, before=before), f"{folder.name} read-only")
    finally:
        folder.chmod(0o755)


def read_only_prefix() -> tuple[str, ...] | None:
    """The words before a command that take root's right to write everything; None where nothing can."""
    if os.geteuid() != 0:
        return ()
    return ("setpriv", "--inh-caps=-all", "--bounding-set=-all") if shutil.which("setpriv") else None


def damaged_file(commands: Commands, rng: np.random.Generator, out: Path) -> str:
    """Damages a file of a finished run; the command must repair it or report it."""
    files = sorted(file for file in out.rglob("*") if file.is_file() and file.name not in ("lock", "seconds.json"))
    rooms = sorted({_room(file, out) for file in files})  # otherwise nearly all draws would be checkpoints
    room = rooms[rng.integers(len(rooms))]
    files = [file for file in files if _room(file, out) == room]
    file = files[rng.integers(len(files))]
    how = ("flipped", "cut", "emptied", "removed", "doubled")[rng.integers(5)]
    _damage(file, how, rng)
    name = f"{room} {how}"
    if room == "findings":  # the report is drawn from these
        said = commands.refused(commands.start(out, "report"), 2)
        if str(out) not in said:
            raise Failure(f"{name}: expected a path, got {said}")
    status, said = commands.ended(commands.start(out))
    *warnings, last = said.splitlines() or [""]
    if status == 0:
        warnings += [last] * bool(last)
    elif status != 2 or not last.startswith("error: ") or str(out) not in last:
        raise Failure(f"{name}: {file.relative_to(out)}: expected one line, got status {status}: {said}")
    if not all(line.startswith("warning: ") for line in warnings):
        raise Failure(f"{name}: {file.relative_to(out)}: expected warnings alone, got {said}")
    if status:
        shutil.rmtree(out)
        shutil.copytree(commands.whole, out)
        return f"{name}: refused"
    if found := difference(out, commands.whole):
        raise Failure(f"{name}: {file.relative_to(out)}: {found} differs; said: {said}")
    return f"{name}: the same numbers{', and said' * bool(said)}"


def _room(file: Path, out: Path) -> str:
    return file.relative_to(out).parts[0].partition(".")[0]


def _damage(file: Path, how: str, rng: np.random.Generator) -> None:
    content = bytearray(file.read_bytes())
    if how == "removed":
        return file.unlink()
    if how == "flipped" and content:
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    elif how == "cut" and content:
        content = content[: rng.integers(len(content))]
    elif how == "emptied":
        content.clear()
    elif how == "doubled":
        content *= 2
    file.write_bytes(content)


FAULTS: list[Callable[[Commands, np.random.Generator, Path], str]] = [
    *(signal_at_random, signal_at_random, signal_at_an_instant, signal_at_an_instant, signal_at_an_instant),
    *(full_disk, two_owners, read_only),
]


def play(commands: Commands, seed: int, number: int) -> Iterator[tuple[str, str]]:
    """Plays the five trials of a round; yields the name and the outcome of each."""
    rng, folder = np.random.default_rng([seed, number]), commands.folder / f"round-{number}"
    folder.mkdir()
    for index in rng.integers(len(FAULTS), size=3):
        yield FAULTS[index].__name__, FAULTS[index](commands, rng, folder / "out")
    commands.goes_on(folder / "out")
    for _ in range(2):
        yield "damaged_file", damaged_file(commands, rng, folder / "out")
    shutil.rmtree(folder)


def main(arguments: list[str] | None = None) -> int:
    """Plays the rounds; returns 1 if one fails, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="five trials each; a minute or two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the one round of this number")
    parser.add_argument("--out", type=Path, help="a JSON file for what came")
    asked = parser.parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures = []
    with tempfile.TemporaryDirectory(prefix="jattn-crash-") as folder:
        commands = Commands(Path(folder))
        for number in track(range(asked.rounds) if asked.only is None else [asked.only], "rounds", console=console):
            try:
                for fault, came in play(commands, asked.seed, number):
                    counts[fault][came] += 1
                    if asked.only is not None:
                        console.print(f"{fault}: {came}", markup=False)
            except Failure as failure:
                failures.append({"round": number, "wrong": str(failure)})
                console.print(f"seed {asked.seed} round {number}: {failure}", markup=False)
            trials = sum(sum(kinds.values()) for kinds in counts.values())
            found = {"seed": asked.seed, "trials": trials, "failures": failures, "came": counts, "machine": machine()}
            if asked.out is not None:
                asked.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for fault, kinds in sorted(counts.items()):
        console.print(
            f"{fault}: " + "; ".join(f"{count} {came}" for came, count in sorted(kinds.items())), markup=False
        )
    console.print(f"{trials} trials, {len(failures)} failures, seed {asked.seed}")
    return int(bool(failures))


def machine() -> dict[str, str]:
    """The versions and the system."""
    return {"python": platform.python_version(), "jax": metadata.version("jax"), "system": platform.platform()}


if __name__ == "__main__":
    raise SystemExit(main())
