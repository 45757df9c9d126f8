"""The files that a run writes while it trains: ``metrics.jsonl`` and ``looks/STEP.npz``."""

import hashlib
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from jattn_experiments.runs.folder import Damaged, read_json, write_atomically

_LOOK = re.compile(r"(\d{8,})\.(npz|tmp)")  # files of looks


class History:
    """Metrics and looks at the heads in a run's folder. With several processes, one writes.

    A line of ``metrics.jsonl`` is ``{"step", NAME: [one per seed], ...}``, averaged over the steps since the last
    such line, or ``{"step", "scores": {NAME: [R][L][N]}}``. The arrays of a look are in ``looks/STEP.npz``. Numbers
    round-trip as float32.
    """

    def __init__(self, out: Path, writes: bool = True):
        self.lines = out / "metrics.jsonl"
        self.looks = out / "looks"
        self._writes = writes
        self._hashed_lines, self._hashed_looks = hashlib.sha256(), hashlib.sha256()
        if writes:
            self.looks.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Removes everything after ``step``, including an incomplete last line; 0 removes all.

        Files that are not looks stay. Raises ``Damaged`` for an invalid line.
        """
        if not self._writes:
            return
        write_atomically(self.lines, self._until(step))
        for file in self.looks.iterdir():
            name = _LOOK.fullmatch(file.name)
            if name and (name[2] == "tmp" or int(name[1]) > step or not step):
                file.unlink()
        self._hash(step)

    def check(self, step: int, words: dict[str, str]) -> str:
        """Why lines and looks up to ``step`` do not match the ``digests`` in ``words``; "" if they do."""
        try:
            self._hash(step)
        except (Damaged, OSError) as wrong:
            return str(wrong)
        for kind, digest in self.digests().items():
            if words.get(kind) != digest:
                where, wrong = (
                    self.lines if kind == "metrics" else self.looks,
                    "lines or looks were removed, repeated or changed",
                )
                return f"{where}: expected the contents written up to step {step}, got other contents; {wrong}"
        return ""

    def digests(self) -> dict[str, str]:
        """SHA-256 of the lines and of the looks written so far, to keep in a checkpoint."""
        return {"metrics": self._hashed_lines.hexdigest(), "looks": self._hashed_looks.hexdigest()}

    def _hash(self, step: int) -> None:
        """Recomputes ``digests`` from the files."""
        self._hashed_lines = hashlib.sha256(self._until(step))
        self._hashed_looks = hashlib.sha256()
        names = (_LOOK.fullmatch(file.name) for file in self.looks.iterdir())
        steps = sorted(int(name[1]) for name in names if name and name[2] == "npz" and int(name[1]) <= step)
        for one in steps if step else []:
            self._hashed_looks.update(self._look_file(one).read_bytes())

    def _until(self, step: int) -> bytes:
        """The lines up to ``step``; none for 0."""
        lines = [line for line in self._read() if line["step"] <= step] if step else []
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    def add_metrics(self, begin: int, metrics: dict[str, np.ndarray], every: int) -> None:
        """Appends the metrics ``{name: [n,R]}`` of the steps after ``begin``, a line per ``every`` steps."""
        count = len(next(iter(metrics.values())))
        for first in range(0, count, every):
            last = min(first + every, count)
            means = {name: _plain(values[first:last].mean(0)) for name, values in metrics.items()}
            self._append({"step": begin + last} | means)

    def add_look(self, step: int, looked: dict[str, Any]) -> None:
        """Writes what ``train.look_at`` found at ``step``."""
        if not self._writes:
            return
        content, file = io.BytesIO(), self._look_file(step)
        np.savez_compressed(content, offset_profile=looked["offset_profile"], examples=looked["examples"])
        file.with_suffix(".tmp").write_bytes(content.getvalue())
        file.with_suffix(".tmp").replace(file)
        self._hashed_looks.update(content.getvalue())
        self._append({"step": step, "scores": {name: _plain(values) for name, values in looked["scores"].items()}})

    def sync(self) -> None:
        """Returns when the lines are on disk."""
        if self._writes:
            with self.lines.open("rb") as file:
                os.fsync(file.fileno())

    def metrics(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Steps ``[E]`` and metrics ``{name: [R,E]}``."""
        return self._gather([line for line in self._read() if "scores" not in line])

    def scores(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Steps ``[P]`` and scores ``{name: [R,P,L,N]}``."""
        return self._gather([{"step": line["step"]} | line["scores"] for line in self._read() if "scores" in line])

    def look(self, step: int) -> dict[str, np.ndarray]:
        """Arrays of the look at ``step``: ``offset_profile [R,L,N,O]``, ``examples [I,L,N,T,T]``."""
        with np.load(self._look_file(step)) as arrays:
            return dict(arrays)

    def _look_file(self, step: int) -> Path:
        return self.looks / f"{step:08d}.npz"

    def _append(self, line: dict[str, Any]) -> None:
        if self._writes:
            text = (json.dumps(line) + "\n").encode()
            with self.lines.open("ab") as file:
                file.write(text)
            self._hashed_lines.update(text)

    def _read(self) -> list[dict[str, Any]]:
        """All complete lines. Raises ``Damaged`` for an invalid line."""
        content = self.lines.read_bytes() if self.lines.exists() else b""
        lines = []
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                lines.append(json.loads(line))
                good = isinstance(lines[-1]["step"], int)
            except (ValueError, KeyError, TypeError, RecursionError):
                good = False
            if not good:
                raise Damaged(f"{self.lines}: expected JSON with a step in every line, got none in line {number}")
        return lines

    @staticmethod
    def _gather(lines: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        steps = np.array([line["step"] for line in lines])
        names = [name for name in lines[0] if name != "step"]
        return steps, {name: np.stack([np.array(line[name], np.float32) for line in lines], 1) for name in names}


class Clock:
    """Total seconds of all processes that worked on a run and were not killed. Raises ``Damaged`` if not a number."""

    def __init__(self, out: Path):
        self._file, self._started = out / "seconds.json", time.monotonic()
        self._before = read_json(self._file, float, "a number of seconds") if self._file.exists() else 0.0

    def stop(self) -> float:
        """The total including this process, saved for the next process."""
        seconds = self._before + time.monotonic() - self._started
        write_atomically(self._file, json.dumps(seconds).encode())
        return seconds


def _plain(array: Any) -> Any:
    """Nested lists of the shortest decimals that read back as the same float32."""
    array = np.asarray(array, np.float32)
    return [_plain(row) for row in array] if array.ndim else float(str(array))
