"""What the five suites share: jobs that measure rows, the file that keeps the rows, and the report of that file.

A suite is a file here with a ``SUITE``. Its results are kept as ``NAME.json``: what holds for all rows, then the rows
of each part, a row a line. ``NAME.md`` and a picture, if any, are functions of these results.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.bench.cases import Plan
from experiments.config import differences
from experiments.runs.folder import write_atomically


class Refused(ValueError):
    """The options cannot be met here; one line, which names the option."""


class Failed(RuntimeError):
    """Contestants disagree, or a fresh process stopped; one line."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. ``row[name]`` is a field of either kind.

    Attributes:
        part: The list of the results that it stands in.
        key: What was measured: a case, a length, a contestant, ...
        found: What came out: times, bytes, ...
    """

    part: str
    key: Mapping[str, Any]
    found: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.key[name] if name in self.key else self.found[name]


@dataclasses.dataclass(frozen=True)
class Job:
    """A row to be measured: ``measure()`` returns what is ``found``."""

    part: str
    key: Mapping[str, Any]
    measure: Callable[[], Mapping[str, Any]]


@dataclasses.dataclass
class Results:
    """All rows, and what holds for them all: ``environment``, and the sizes or the shape of the problems."""

    about: dict[str, Any]
    rows: list[Row]

    def of(self, part: str, **key: Any) -> list[Row]:
        """The rows of a part whose keys have these values."""
        return [row for row in self.rows if row.part == part and key.items() <= row.key.items()]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        name: Of its files.
        parts: The lists of its results, each with the names of a row's key; a part without a key is one row.
        about: What holds for all rows of a run of these sizes.
        jobs: What there is to measure.
        markdown: The text of the report.
        shown: What of it is shown in the terminal.
        draw: Writes the picture, if there is one.
        sizes: From the options of the command line to the sizes of a run.
        start: Chooses the devices, before JAX does.
        resumable: Every row is kept as soon as it is known, and results are never replaced. Otherwise the results are
            written at the end, over older ones.
    """

    name: str
    parts: Mapping[str, tuple[str, ...]]
    about: Callable[[Any], dict[str, Any]]
    jobs: Callable[[Any], Iterable[Job]]
    markdown: Callable[[Results], str]
    shown: Callable[[Results], str]
    draw: Callable[[Results, Path], None] | None = None
    sizes: Callable[[Plan], Any] = lambda plan: plan
    start: Callable[[Plan], None] = lambda plan: None
    resumable: bool = False

    def measure(self, sizes: Any, out: Path, resume: bool = False) -> Results:
        """Measures what is not in ``out`` yet, writes the results there, and returns all of them.

        Raises:
            Refused: results must not be replaced, and ``resume`` is false or they are of another environment.
            Failed: nothing was written.
            OSError: ``out`` cannot be written.
        """
        out.mkdir(parents=True, exist_ok=True)
        results = self._begin(self.about(sizes), out, resume)
        done = [(row.part, row.key) for row in results.rows]
        jobs = [job for job in self.jobs(sizes) if (job.part, job.key) not in done]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("", total=len(jobs))
            for job in jobs:
                progress.update(task, description=" ".join(str(value) for value in (job.part, *job.key.values())))
                results.rows.append(Row(job.part, job.key, job.measure()))
                if self.resumable:
                    self.write(results, out)
                progress.advance(task)
        self.write(results, out)
        return results

    def _begin(self, about: dict[str, Any], out: Path, resume: bool) -> Results:
        """The results that are there, where they may go on, or none yet."""
        file = self._file(out)
        if not self.resumable or not file.exists():
            return Results(about, [])
        if not resume:
            raise Refused(f"--out: {file} already holds results; --resume continues them")
        results = self.read(out)
        if changed := differences(results.about["environment"], about["environment"]):
            raise Refused(f"--out: {file} holds results of another environment: {'; '.join(changed)}")
        return results

    def read(self, out: Path) -> Results:
        """The results in ``out``. Raises ``Refused`` where there are none."""
        file = self._file(out)
        try:
            return self.parse(json.loads(file.read_text()))
        except OSError:
            raise Refused(f"--out: expected a folder with {file.name}, got {str(out)!r}") from None
        except ValueError as wrong:
            raise Refused(f"--out: {file} is not valid JSON: {wrong}") from None

    def parse(self, found: Mapping[str, Any]) -> Results:
        """The results that a file holds."""
        rows = []
        for part, names in self.parts.items():
            for one in found[part] if names else [found[part]]:
                key = {name: one[name] for name in names}
                rows.append(Row(part, key, {name: value for name, value in one.items() if name not in key}))
        return Results({name: value for name, value in found.items() if name not in self.parts}, rows)

    def write(self, results: Results, out: Path) -> None:
        """Keeps the results in ``out``; a program that is stopped leaves a whole file."""
        lines = [f' "{name}": {json.dumps(value)}' for name, value in results.about.items()]
        for part, names in self.parts.items():
            rows = [json.dumps({**row.key, **row.found}) for row in results.of(part)]
            listed = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else "[]"
            lines.append(f' "{part}": {listed if names else rows[0]}')
        write_atomically(self._file(out), ("{\n" + ",\n".join(lines) + "\n}\n").encode())

    def write_report(self, results: Results, out: Path) -> Path:
        """Writes the text and the picture beside the results; returns the text's path."""
        text = out / f"{self.name}.md"
        write_atomically(text, self.markdown(results).encode())
        if self.draw is not None:
            self.draw(results, out / f"{self.name}.png")
        return text

    def _file(self, out: Path) -> Path:
        return out / f"{self.name}.json"
