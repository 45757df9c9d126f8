"""Kills, starves, locks out and damages runs. Each gives the results of an uninterrupted run or a one-line error.

A case of ``crash`` is a round of five trials on one folder, in turn of each kind of run in ``RUNS``. Three times the
command runs into a fault of ``FAULTS``, in any of its phases, and may exit with a signal's status or a one-line error.
It then runs again and must give the results of an undisturbed run. After that, one of its files is damaged, twice, and
the command must give the same results or a one-line error that names a path. A case of ``disk`` is another command on
a finished run, that cannot write what it should, is stopped, or runs twice at once.
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
from tests.jattn.test_language_models import write_gguf
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
LONG = """
name: tiny
language: {{model: {model}, first: "<|endoftext|>", seed: 1, sequences: 2, period: 24, matched: 1}}
long:
  {{lengths: [300], depths: 2, chosen: 1, texts: 2, ablated: 300, sizes: [1], distances: [16], window: 64, streamed: 256,
   pictured: 256}}
claims: [{{name: back, statement: Some look back., metric: induction/16, at_least: 0.0, needed: 1}}]
"""
# Each kind of run: its config, and its further options.
RUNS = {
    "trained": (CONFIG, ()),
    "swept": (CONFIG + "controls: {one_head: {model.num_heads: 1}}\n", ("--sweep", "train.learning_rate=0.001,0.01")),
    "replicated": (CONFIG, ("--replicate", "2", "--replicate_seed", "5000")),
    "long": (LONG, ()),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STARVING = ("full output", "limited files", "small disk", "read-only")
DAMAGES = ("flipped", "cut", "emptied", "removed", "doubled")
Process = subprocess.Popen[str]
SECONDS = 300.0  # a command that takes longer hangs


class Failure(Exception):
    """A trial failed."""


class Commands:
    """Runs the experiment's commands in separate processes, and holds the folder of an undisturbed run."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.whole, (config, self.options) = folder, folder / "whole", RUNS[kind]
        if kind == "long":
            write_gguf(folder / "tiny.gguf")
            config = config.format(model=folder / "tiny.gguf")
        (folder / "tiny.yaml").write_text(config)
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
        return ["run", "--config", str(self.folder / "tiny.yaml"), "--out", str(out), *self.options]

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
def commands_of(kind: str) -> Commands:
    """Prepared when the first case of this kind runs; its folder is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="jattn-soak-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Commands(Path(folder), kind)


def results(out: Path, added: Sequence[str]) -> list[Path]:
    """The files of a run that hold numbers, except those ``added``; timings and checkpoints are not compared."""
    files = (file.relative_to(out) for file in out.rglob("*") if file.is_file())
    numbers = (
        file for file in files if file.suffix in (".jsonl", ".npz") or file.name in ("claims.json", "findings.json")
    )
    return sorted(file for file in numbers if file.parts[0] not in (*added, "damaged"))


def difference(out: Path, whole: Path, added: Sequence[str] = ()) -> str:
    """The first file in which two runs differ in their results; "" if they are equal.

    The report and the figures, which are drawn from the other files, only have to exist. Files and folders ``added``
    may differ.
    """
    files, others = results(whole, added), results(out, added)
    if files != others:
        return str(min(set(files) ^ set(others)))
    for file in files:
        if file.suffix == ".npz":
            with np.load(out / file) as x, np.load(whole / file) as y:
                same = set(x) == set(y) and all(np.array_equal(x[name], y[name], equal_nan=True) for name in y)
        elif file.name == "findings.json":
            x, y = (json.loads((of / file).read_text()) | {"environment": 0, "sha256": 0} for of in (out, whole))
            same = x == y
        else:
            same = (out / file).read_bytes() == (whole / file).read_bytes()
        if not same:
            return str(file)
    return "" if (out / "report.html").stat().st_size > 10_000 else "report.html"


def signal_at_random(commands: Commands, rng: Random, out: Path) -> str:
    """Sends SIGKILL, SIGTERM or SIGINT at a random time."""
    number, seconds = SIGNALS[rng.integers(3)], rng.uniform(0, commands.seconds)
    began, process = time.time_ns(), commands.run(out)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return stopped(commands, process, number, importing=not written(out / "lock", began))


def signal_at_an_instant(commands: Commands, rng: Random, out: Path) -> str:
    """Sends a signal as soon as a certain file, of any phase of the run, is written or written beside."""
    number, file = SIGNALS[rng.integers(3)], drawn_file(commands.whole, rng)
    files = [out / file, out / f"{file}.tmp", (out / file).with_suffix(".tmp")]  # the first if the others are missed
    began, process = time.time_ns(), commands.run(out)
    while process.poll() is None and not any(written(one, began) for one in files):
        time.sleep(0.0005)
    return f"{stopped(commands, process, number)}, at {phase(file)}"


def drawn_file(whole: Path, rng: Random) -> Path:
    """A file or checkpoint that the run in ``whole`` wrote, relative to it: each phase is as likely."""
    phases = collections.defaultdict(list)
    for file in sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file()):
        if file.name not in ("lock", "seconds.json") and "arrays" not in file.parts:
            phases[phase(file)].append(file)
    files = phases[sorted(phases)[rng.integers(len(phases))]]
    file = files[rng.integers(len(files))]
    if file.name != "contents.json":
        return file
    step = CHECKPOINT * int(rng.integers(1, STEPS // CHECKPOINT + 1))  # also of those that are gone
    return file.parents[1] / (f"{step}", f"{step}.tmp/arrays", f"{step}.tmp/contents.json")[rng.integers(3)]


def phase(file: Path) -> str:
    """What a run does when it writes a file: its folders but for numbers, or the file's own name."""
    folders = [name for name in file.parts[:-1] if not name.partition(".")[0].isdecimal() and name != "arrays"]
    return "/".join(folders) or file.name.partition(".")[0]


def written(file: Path, since: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime_ns >= since
    return False


def stopped(commands: Commands, process: Process, number: signal.Signals, importing: bool = False) -> str:
    process.send_signal(number)
    status, message = commands.ended(process)
    if status == 0:
        return "ended before the signal came"
    line = status == 128 + number and message.count("\n") == 1 and "; rerun" in message
    right = (status, message) == (-number, "") if number == signal.SIGKILL else line
    if not right and not (importing and status in (-number, 1, 128 + number)):  # the exit is Python's
        raise Failure(f"{number.name}: expected its status and one line, got {status}: {message}")
    return f"{number.name} {'before it began' if importing else 'while it worked'}"


def starved(commands: Commands, rng: Random, arguments: list[str], folders: list[Path]) -> str:
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
        line = commands.ending(commands.start(*arguments, **options), 1, 2, trial=f"{arguments}, {fault}: ")
        return f"{fault}, {'one line' if line else 'done'}"


def starved_run(commands: Commands, rng: Random, out: Path) -> str:
    """An unfinished run that can write too little."""
    out.mkdir(exist_ok=True)
    inner = (folder for folder in sorted(out.rglob("*")) if folder.is_dir() and "checkpoints" not in folder.parts[:-1])
    return starved(commands, rng, commands.words(out), [out, *inner])


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


def two_owners(commands: Commands, rng: Random, out: Path) -> str:
    """Starts a second run, which must be refused, then kills the first."""
    began, first = time.time_ns(), commands.run(out)
    while first.poll() is None and not written(out / "lock", began):
        time.sleep(0.001)
    with contextlib.suppress(subprocess.TimeoutExpired):
        first.wait(rng.uniform(0, commands.seconds / 3))
        return "the first had ended"
    first.send_signal(signal.SIGSTOP)  # otherwise it may end before the second starts
    try:
        commands.ending(commands.run(out), 2, holds=f"of process {first.pid}")
    finally:
        first.kill()
        first.communicate()
    return "the second is refused"


FAULTS = [signal_at_random] * 2 + [signal_at_an_instant] * 3 + [starved_run] * 2 + [two_owners]


def damaged_file(commands: Commands, rng: Random, out: Path) -> str:
    """Damages a file of a finished run; the command must repair it or report it."""
    groups = collections.defaultdict(list)  # otherwise nearly all draws would be checkpoints
    for file in sorted(out.rglob("*")):
        if file.is_file() and file.name not in ("lock", "seconds.json"):
            groups[phase(file.relative_to(out))].append(file)
    group, damage = sorted(groups)[rng.integers(len(groups))], DAMAGES[rng.integers(len(DAMAGES))]
    file, whole = groups[group][rng.integers(len(groups[group]))], commands.whole
    at = file.relative_to(out)
    harm(file, damage, rng)
    trial = f"{group} {damage}: {at}: "
    if group == "findings":  # from which the report is drawn
        commands.ending(commands.start("report", "--run", str(out)), 2, holds=str(out))
    status, message = commands.ended(commands.run(out))
    *warnings, last = message.splitlines() + [""] * (not status or not message)
    refused = status == 2 and last.startswith("error: ") and str(out) in last
    if bool(status) != refused or not all(line.startswith("warning: ") for line in warnings):
        raise Failure(f"{trial}expected warnings alone or one line, got status {status}: {message}")
    if "--replicate" in commands.options and at in results(whole, ["findings.json", "findings.npz"]):
        shutil.copy(whole / at, file)  # of what has finished, only the findings are read again
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
        commands = commands_of(list(RUNS)[draw % len(RUNS)] if self.label == "crash" else "trained")
        folder, self.outcomes = Path(tempfile.mkdtemp(dir=commands.folder)), [f"kind {self.label}"]
        try:
            self.play(commands, self.rng(draw), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return [], 0.0

    def play(self, commands: Commands, rng: Random, folder: Path) -> None:
        """Three faults, the end of the run, two damaged files."""
        out = folder / "out"
        for fault in (FAULTS[i] for i in rng.integers(len(FAULTS), size=3)):
            self.outcomes.append(f"{fault.__name__}: {fault(commands, rng, out)}")
        commands.ending(commands.run(out), trial=f"after {self.outcomes}: ")
        if changed := difference(out, commands.whole):
            raise Failure(f"after {self.outcomes}: {changed} differs")
        for _ in range(2):
            self.outcomes.append(f"damaged_file: {damaged_file(commands, rng, out)}")


class DiskTrial(CrashTrial):
    """Each case is a command on a finished run and a fault. The run keeps its results, and then the command works."""

    stream, label = 8, "disk"

    def play(self, commands: Commands, rng: Random, folder: Path) -> None:
        """What a command writes elsewhere than in the run goes into a folder beside it."""
        out, beside, whole = folder / "tiny", folder / "beside", commands.whole
        beside.mkdir()
        shutil.copytree(whole, out)
        of_run = ["--run", str(out)]
        arguments, written = [
            (["report", *of_run], out),
            (["look", *of_run], out),
            (["compare", *of_run, "--run", str(whole), "--out", str(beside / "heads.png")], beside),
            (["keep", *of_run, "--to", str(beside)], beside),
            ([*commands.words(out), "--replicate", "1"], out),
        ][rng.integers(5)]
        fault = ("starved", "starved", "stopped", "twice")[rng.integers(4)]
        if fault == "starved":
            fault = starved(commands, rng, arguments, [written])
        elif fault == "stopped":
            fault = interrupted(commands, rng, arguments)
        else:
            statuses = [commands.ended(each) for each in [commands.start(*arguments), commands.start(*arguments)]]
            wrong = [each for each in statuses if each != (0, "") and "no other run uses" not in each[1]]
            if wrong or not any(status == 0 for status, _ in statuses):
                raise Failure(f"{arguments} twice at once: {statuses}")
        outcome = f"{arguments[0]}, {fault}"
        added = ("claims.json", "findings.json", "replication") if arguments[0] == "run" else ()  # by fresh seeds
        if changed := difference(out, whole, added):
            raise Failure(f"{outcome}; the run has another {changed}")
        commands.ending(commands.start(*arguments), trial=f"{outcome}, then ")
        if left := [
            file for of in (out, beside) for file in of.rglob("*") if ".tmp" in file.name or ".keep-" in file.name
        ]:
            raise Failure(f"{outcome}: {left} are left")
        self.outcomes.append(outcome)


def interrupted(commands: Commands, rng: Random, arguments: list[str]) -> str:
    """A command that a signal ends at a random time: of Ctrl-C, at most one line."""
    number, process = SIGNALS[rng.integers(3)], commands.start(*arguments)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(rng.uniform(1.0, commands.seconds))
    process.send_signal(number)
    status, message = commands.ended(process)
    line = message.startswith("error: ") and "stopped" in message and message.count("\n") == 1
    if (status, message) not in ((0, ""), (-number, "")) and not (status == 128 + number and line):
        raise Failure(f"{arguments}, {number.name}: expected its status and at most one line, got {status}: {message}")
    return f"{number.name}{'' if status else ' after its end'}"
