"""Kills, starves, locks out and damages runs. Each gives the results of an uninterrupted run or a one-line error.

A case of ``crash`` is a round of five trials on one folder. Three times the command runs into a fault of ``FAULTS`` and may exit with
a signal's status or a one-line error. It then runs again and must give the results of an undisturbed run. After that,
one of its files is damaged, twice, and the command must give the same results or a one-line error that names a path.
A case of ``disk`` is another command on a finished run that cannot write what it should.
"""

import atexit
import collections
import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.experiments.processes import environment
from tests.soak.trial import Difference, Trial
from tests.soak.vocabulary import Random

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
STARVING = ("full output", "limited files", "small disk", "read-only")
DAMAGES = ("flipped", "cut", "emptied", "removed", "doubled")
Process = subprocess.Popen[str]
SECONDS = 300.0  # a command that takes longer hangs


class Failure(Exception):
    """A trial failed."""


class Commands:
    """Runs the experiment's commands in separate processes, and holds the folder of an undisturbed run."""

    def __init__(self, folder: Path):
        self.folder, self.whole = folder, folder / "whole"
        (folder / "tiny.yaml").write_text(CONFIG)
        self.ending(self.run(self.whole))  # compiles
        began = time.monotonic()
        self.ending(self.run(folder / "again"))
        self.seconds = time.monotonic() - began
        if name := difference(folder / "again", self.whole):
            raise Failure(f"two runs that nobody touched differ: {name}")

    def start(self, *arguments: str, before: Sequence[str] = (), output: str = os.devnull, limit: int = 0) -> Process:
        """Starts a command, after the words ``before``, with a limit to the size of files unless that is 0."""

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and their children
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        # a limit would also cut the files of JAX's cache of compiled programs, which it says in warnings
        cache = {"JAX_ENABLE_COMPILATION_CACHE": str(not limit).lower(), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        variables = environment(self.folder / "cache", **cache)
        with Path(output).open("wb") as stdout:
            return subprocess.Popen(
                [*before, sys.executable, "-m", "jattn_experiments", *arguments],
                cwd=ROOT, env=variables, text=True, stdout=stdout, stderr=subprocess.PIPE, preexec_fn=prepare,
            )  # fmt: skip

    def words(self, out: Path) -> list[str]:
        """The command that starts or continues the run in ``out``."""
        return ["run", "--config", str(self.folder / "tiny.yaml"), "--out", str(out)]

    def run(self, out: Path) -> Process:
        return self.start(*self.words(out))

    def ended(self, process: Process) -> tuple[int, str]:
        """The exit status of a process, and its stderr."""
        try:
            message = process.communicate(timeout=SECONDS)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failure(f"no end after {SECONDS:.0f} s: {process.communicate()[1]}") from None
        return process.returncode, message

    def ending(self, process: Process, *statuses: int, holds: str = "", trial: str = "") -> str:
        """The one-line error of a process, which ``holds`` a text; without one, nothing if it succeeds in silence."""
        status, message = self.ended(process)
        one_line = status in statuses and message.startswith("error: ") and message.count("\n") == 1
        if (status or message or holds) and not (one_line and holds in message):
            wanted = f"one line with {holds!r}, status {statuses}" if statuses else "a silent run"
            raise Failure(f"{trial}expected {wanted}, got status {status}: {message}")
        return message


@functools.cache
def commands() -> Commands:
    """Prepared when the first case runs; its folder is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="jattn-soak-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Commands(Path(folder))


def difference(out: Path, whole: Path, added: Sequence[str] = ()) -> str:
    """The first file in which two runs differ in their results; "" if they are equal.

    Timings are not compared. The report and the figures, which are drawn from the other files, only have to exist.
    Those ``added`` to may differ.
    """
    looks = [sorted(file.relative_to(x) for file in (x / "looks").glob("*.npz")) for x in (out, whole)]
    if looks[0] != looks[1]:
        return "looks"
    for name in ("metrics.jsonl", "claims.json"):
        if name not in added and (out / name).read_bytes() != (whole / name).read_bytes():
            return name
    for file in (*looks[1], Path("findings.npz")):
        with np.load(out / file) as x, np.load(whole / file) as y:
            if set(x) != set(y) or not all(np.array_equal(x[name], y[name], equal_nan=True) for name in y):
                return str(file)
    findings = [json.loads((x / "findings.json").read_text()) | {"environment": 0, "sha256": 0} for x in (out, whole)]
    if findings[0] != findings[1] and "findings.json" not in added:
        return "findings.json"
    return "" if (out / "report.html").stat().st_size > 10_000 else "report.html"


def signal_at_random(rng: Random, out: Path) -> str:
    """Sends SIGKILL, SIGTERM or SIGINT at a random time."""
    number, seconds = SIGNALS[rng.integers(3)], rng.uniform(0, commands().seconds)
    began, process = time.time_ns(), commands().run(out)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return stopped(process, number, importing=not written(out / "lock", began))


def signal_at_an_instant(rng: Random, out: Path) -> str:
    """Sends a signal as soon as a certain file is written: a look, a checkpoint, the findings or the report."""
    number, folder = SIGNALS[rng.integers(3)], out / "checkpoints"
    newest = max((int(file.name) for file in folder.glob("*") if file.name.isdecimal()), default=0)
    step = newest + int(rng.integers(1, 4)) * CHECKPOINT
    events = [
        [out / "looks" / f"{step:08d}.tmp", out / "looks" / f"{step:08d}.npz"],  # the second if the first is missed
        [folder / f"{step}.tmp", folder / f"{step}"],
        [folder / f"{step}.tmp" / "arrays", folder / f"{step}"],
        [folder / f"{step}"],
    ]
    if step > STEPS or rng.random() < 0.3:
        last = ("findings.npz.tmp", "findings.npz", "findings.json", "report.html.tmp", "report.html")
        events = [[out / name] for name in last]
    files = events[rng.integers(len(events))]
    began, process = time.time_ns(), commands().run(out)
    while process.poll() is None and not any(written(file, began) for file in files):
        time.sleep(0.0005)
    return f"{stopped(process, number)}, at {files[0].relative_to(out).parts[0]}"


def written(file: Path, since: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime_ns >= since
    return False


def stopped(process: Process, number: signal.Signals, importing: bool = False) -> str:
    process.send_signal(number)
    status, message = commands().ended(process)
    if status == 0:
        return "ended before the signal came"
    line = status == 128 + number and message.count("\n") == 1 and "; rerun" in message
    right = (status, message) == (-number, "") if number == signal.SIGKILL else line
    if not right and not (importing and status in (-number, 1, 128 + number)):  # the exit is Python's
        raise Failure(f"{number.name}: expected its status and one line, got {status}: {message}")
    return f"{number.name} {'before it began' if importing else 'while it worked'}"


def starved(rng: Random, arguments: list[str], folders: list[Path]) -> str:
    """A command that can write too little, in one of its folders: it does its work, or ends in one line."""
    size, options, fault = int(np.exp(rng.uniform(0, np.log(300_000)))), {}, STARVING[rng.integers(4)]
    with contextlib.ExitStack() as stack:
        if fault == "full output":
            options["output"] = "/dev/full"
        elif fault == "limited files":
            options["limit"] = size
        elif fault == "small disk" and not stack.enter_context(small_disk(folders[0], size // 1024)):
            return f"{fault}, which cannot be mounted here"
        elif fault == "read-only":
            root, folder = os.geteuid() == 0, folders[rng.integers(len(folders))]
            if root and not shutil.which("setpriv"):
                return f"{fault}, where root may write everything"
            options["before"] = ("setpriv", "--inh-caps=-all", "--bounding-set=-all") if root else ()
            folder.chmod(0o555)
            stack.callback(folder.chmod, 0o755)
        line = commands().ending(commands().start(*arguments, **options), 1, 2, trial=f"{arguments}, {fault}: ")
        return f"{fault}, {'one line' if line else 'done'}"


def starved_run(rng: Random, out: Path) -> str:
    """An unfinished run that can write too little."""
    out.mkdir(exist_ok=True)
    return starved(rng, commands().words(out), [x for x in (out, out / "looks", out / "checkpoints") if x.exists()])


@contextlib.contextmanager
def small_disk(folder: Path, free: int) -> Iterator[bool]:
    """Mounts a disk with so many free kilobytes over ``folder``, with its files; keeps these at the end."""
    folder.mkdir(exist_ok=True)
    copy, taken = folder.with_name("copy"), sum(file.stat().st_size + 8192 for file in folder.rglob("*"))
    shutil.copytree(folder, copy)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={free + taken // 1024 + 8}k", "tmpfs", str(folder)]
    possible = shutil.which("mount") is not None and not subprocess.run(mount, capture_output=True).returncode
    if possible:
        shutil.copytree(copy, folder, dirs_exist_ok=True)
    try:
        yield possible
    finally:
        shutil.rmtree(copy)
        if possible:
            shutil.copytree(folder, copy)
            subprocess.run(["umount", str(folder)], check=True)
            shutil.rmtree(folder)
            copy.rename(folder)


def two_owners(rng: Random, out: Path) -> str:
    """Starts a second run, which must be refused, then kills the first."""
    began, first = time.time_ns(), commands().run(out)
    while first.poll() is None and not written(out / "lock", began):
        time.sleep(0.001)
    with contextlib.suppress(subprocess.TimeoutExpired):
        first.wait(rng.uniform(0, commands().seconds / 3))
        return "the first had ended"
    first.send_signal(signal.SIGSTOP)  # otherwise it may end before the second starts
    try:
        commands().ending(commands().run(out), 2, holds=f"of process {first.pid}")
    finally:
        first.kill()
        first.communicate()
    return "the second is refused"


FAULTS = [signal_at_random] * 2 + [signal_at_an_instant] * 3 + [starved_run] * 2 + [two_owners]


def damaged_file(rng: Random, out: Path) -> str:
    """Damages a file of a finished run; the command must repair it or report it."""
    groups = collections.defaultdict(list)  # otherwise nearly all draws would be checkpoints
    for file in sorted(out.rglob("*")):
        if file.is_file() and file.name not in ("lock", "seconds.json"):
            groups[file.relative_to(out).parts[0].partition(".")[0]].append(file)
    group, damage = sorted(groups)[rng.integers(len(groups))], DAMAGES[rng.integers(len(DAMAGES))]
    file, whole = groups[group][rng.integers(len(groups[group]))], commands().whole
    harm(file, damage, rng)
    trial = f"{group} {damage}: {file.relative_to(out)}: "
    if group == "findings":  # from which the report is drawn
        commands().ending(commands().start("report", "--run", str(out)), 2, holds=str(out))
    status, message = commands().ended(commands().run(out))
    *warnings, last = message.splitlines() + [""] * (not status or not message)
    refused = status == 2 and last.startswith("error: ") and str(out) in last
    if bool(status) != refused or not all(line.startswith("warning: ") for line in warnings):
        raise Failure(f"{trial}expected warnings alone or one line, got status {status}: {message}")
    if changed := "" if refused else difference(out, whole):
        raise Failure(f"{trial}{changed} differs; message: {message}")
    if refused:
        shutil.rmtree(out)
        shutil.copytree(whole, out)
    return f"{group} {damage}: {'refused' if refused else 'the same numbers' + ', with a warning' * bool(message)}"


def harm(file: Path, damage: str, rng: Random) -> None:
    content = file.read_bytes()
    at, bit = int(rng.integers(max(len(content), 1))), 1 << int(rng.integers(8))
    flipped = bytes(byte ^ bit if i == at else byte for i, byte in enumerate(content))
    file.write_bytes({"flipped": flipped, "cut": content[:at], "doubled": content * 2}.get(damage, b""))
    if damage == "removed":
        file.unlink()


class CrashTrial(Trial):
    """Each case is a round of its own, in an empty folder."""

    stream, label = 7, "crash"

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """Plays a round; raises a ``Failure``."""
        folder, self.outcomes = Path(tempfile.mkdtemp(dir=commands().folder)), [f"kind {self.label}"]
        try:
            self.play(self.rng(draw), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return [], 0.0

    def play(self, rng: Random, folder: Path) -> None:
        """Three faults, the end of the run, two damaged files."""
        out = folder / "out"
        for fault in (FAULTS[i] for i in rng.integers(len(FAULTS), size=3)):
            self.outcomes.append(f"{fault.__name__}: {fault(rng, out)}")
        commands().ending(commands().run(out))
        if changed := difference(out, commands().whole):
            raise Failure(f"after {self.outcomes}: {changed} differs")
        for _ in range(2):
            self.outcomes.append(f"damaged_file: {damaged_file(rng, out)}")


class DiskTrial(CrashTrial):
    """Each case is a command on a finished run and a fault. The run keeps its results, and then the command works."""

    stream, label = 8, "disk"

    def play(self, rng: Random, folder: Path) -> None:
        """What a command writes elsewhere than in the run goes into a folder beside it."""
        out, beside, whole = folder / "tiny", folder / "beside", commands().whole
        beside.mkdir()
        shutil.copytree(whole, out)
        of_run = ["--run", str(out)]
        arguments, written = [
            (["report", *of_run], out),
            (["look", *of_run], out),
            (["compare", *of_run, "--run", str(whole), "--out", str(beside / "heads.png")], beside),
            (["keep", *of_run, "--to", str(beside)], beside),
            ([*commands().words(out), "--replicate", "1"], out),
        ][rng.integers(5)]
        outcome = f"{arguments[0]}, {starved(rng, arguments, [written])}"
        added = ("claims.json", "findings.json") if arguments[0] == "run" else ()  # which fresh seeds add to
        if changed := difference(out, whole, added):
            raise Failure(f"{outcome}; the run has another {changed}")
        commands().ending(commands().start(*arguments), trial=f"{outcome}, then ")
        self.outcomes.append(outcome)
