"""What a run leaves behind while it trains: ``metrics.jsonl`` and ``looks/STEP.npz``."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np


class History:
    """Metrics and looks at the heads in a run's folder. Of several processes one writes.

    A line of ``metrics.jsonl`` is ``{"step", NAME: [one a seed], ...}``, averaged over the steps since the line
    before, or ``{"step", "scores": {NAME: [R][L][N]}}``. Arrays of a look lie in ``looks/STEP.npz``. Numbers are
    written so that they read back as the same float32.
    """

    def __init__(self, out: Path, writes: bool = True):
        self.lines = out / "metrics.jsonl"
        self.looks = out / "looks"
        self._writes = writes
        if writes:
            self.looks.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Forgets all that came after ``step``, also a line that a kill cut short; 0 forgets everything."""
        if not self._writes:
            return
        kept = [line for line in self._read() if line["step"] <= step] if step else []
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.lines, text.encode())
        for file in self.looks.iterdir():
            if file.suffix != ".npz" or int(file.stem) > step or not step:
                file.unlink()

    def add_metrics(self, begin: int, metrics: dict[str, np.ndarray], every: int) -> None:
        """Appends the metrics ``{name: [n,R]}`` of the steps after ``begin``, a line for ``every`` steps."""
        count = len(next(iter(metrics.values())))
        for first in range(0, count, every):
            last = min(first + every, count)
            means = {name: _plain(values[first:last].mean(0)) for name, values in metrics.items()}
            self._append({"step": begin + last} | means)

    def add_look(self, step: int, looked: dict[str, Any]) -> None:
        """Writes what ``train.look_at`` found at ``step``."""
        if not self._writes:
            return
        arrays = {name: np.asarray(looked[name]) for name in ("offset_profile", "examples")}
        unfinished = self.looks / f"{step:08d}.tmp"
        with unfinished.open("wb") as file:
            np.savez_compressed(file, **arrays)
        unfinished.replace(unfinished.with_suffix(".npz"))
        self._append({"step": step, "scores": {name: _plain(values) for name, values in looked["scores"].items()}})

    def sync(self) -> None:
        """Returns when the lines are on the disk."""
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
        with np.load(self.looks / f"{step:08d}.npz") as arrays:
            return dict(arrays)

    def _append(self, line: dict[str, Any]) -> None:
        if self._writes:
            with self.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        lines = self.lines.read_text().splitlines(keepends=True) if self.lines.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @staticmethod
    def _gather(lines: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        steps = np.array([line["step"] for line in lines])
        names = [name for name in lines[0] if name != "step"]
        return steps, {name: np.stack([np.array(line[name], np.float32) for line in lines], 1) for name in names}


class Clock:
    """The seconds that all processes took which worked on a run, as far as they ended by themselves."""

    def __init__(self, out: Path):
        self._file, self._started = out / "seconds.json", time.monotonic()

    def stop(self) -> float:
        """The sum, with this process; written down for the next."""
        before = json.loads(self._file.read_text()) if self._file.exists() else 0.0
        seconds = before + time.monotonic() - self._started
        write_atomically(self._file, json.dumps(seconds).encode())
        return seconds


def write_atomically(file: Path, content: bytes) -> None:
    """Writes ``file`` so that it holds the old content or the new, never a part."""
    unfinished = file.with_name(file.name + ".tmp")
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def _plain(array: Any) -> Any:
    """Nested lists of the shortest decimals that read back as the same float32."""
    array = np.asarray(array, np.float32)
    return [_plain(row) for row in array] if array.ndim else float(str(array))
