"""The base of the suites: jobs that measure rows, the file that stores the rows, and its report.

A suite is a module here with a ``SUITE``. Its results are stored in ``NAME.json``: what all rows share, then the rows
of each part, one per line. ``NAME.md`` and the figure, if any, are functions of these results.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jattn_experiments.bench.plan import Plan
from jattn_experiments.config import differences
from jattn_experiments.runs.folder import write_atomically


class Refused(ValueError):
    """The options cannot be satisfied. The message is one line that names the option."""


class Failed(RuntimeError):
    """Contestants disagree, or a fresh process failed. The message is one line."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. ``row[name]`` is a field of ``key`` or ``values``."""

    part: str  # the list of results it belongs to
    key: Mapping[str, Any]  # what was measured: a case, a length, a contestant, ...
    values: Mapping[str, Any]  # times, bytes, ...

    def __getitem__(self, name: str) -> Any:
        return self.key[name] if name in self.key else self.values[name]


@dataclasses.dataclass(frozen=True)
class Job:
    """A row to measure: ``measure()`` returns ``values``, or None if this run has no time for it."""

    part: str
    key: Mapping[str, Any]
    measure: Callable[[], Mapping[str, Any] | None]


@dataclasses.dataclass
class Results:
    """All rows and what they share: ``environment``, and the sizes or shape of the problems."""

    about: dict[str, Any]
    rows: list[Row]

    def of(self, part: str, **key: Any) -> list[Row]:
        """The rows of a part with these key values."""
        return [row for row in self.rows if row.part == part and key.items() <= row.key.items()]

    def values(self, part: str, **key: Any) -> Mapping[str, Any]:
        """The values of the first row that matches; empty if none does."""
        return next((row.values for row in self.of(part, **key)), {})


@dataclasses.dataclass(frozen=True)
class Suite:
    """A benchmark, as the functions that make it up. Sizes are what one run measures, in any type."""

    name: str  # of its files
    parts: Mapping[str, tuple[str, ...]]  # the lists of rows, and the names of a row's key; without names, one row
    about: Callable[[Any], dict[str, Any]]  # what all rows of a run of these sizes share
    jobs: Callable[[Any], Iterable[Job]]  # of these sizes
    markdown: Callable[[Results], str]  # the text of the report
    shown: Callable[[Results], str]  # in the terminal
    draw: Callable[[Results, Path], None] | None = None  # writes the figure
    sizes: Callable[[Plan], Any] = lambda plan: plan
    start: Callable[[Plan], None] = lambda plan: None  # chooses the devices, before JAX does
    line: Callable[[Row], str] | None = None  # a row in one line, printed as soon as it is measured
    wrong: Callable[[Results], str | None] = lambda results: None  # one line about results that make the command fail
    # Whether each row is saved once measured, and results are never overwritten. Otherwise they are written at
    # the end and replace older ones.
    resumable: bool = False

    def measure(self, sizes: Any, out: Path, resume: bool = False) -> Results:
        """Measures what ``out`` lacks, writes the results there, and returns all of them.

        Raises:
            Refused: a resumable suite has results, and ``resume`` is false or their environment or shape differs.
            Failed: nothing was written.
            OSError: ``out`` is not writable.
        """
        out.mkdir(parents=True, exist_ok=True)
        results = self._begin(self.about(sizes), out, resume)
        done = [(row.part, row.key) for row in results.rows]
        jobs = [job for job in self.jobs(sizes) if (job.part, job.key) not in done]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = 0
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("", total=len(jobs))
            for job in jobs:
                progress.update(task, description=" ".join(map(str, (job.part, *job.key.values()))))
                if (values := job.measure()) is None:
                    left += 1
                    continue
                row = Row(job.part, job.key, values)
                results.rows.append(row)
                if self.resumable:
                    self.write(results, out)
                if self.line is not None:
                    progress.console.print(self.line(row), markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)
        if left:
            print(f"Time limit reached: {left} of {len(jobs)} steps remain. Add --resume to continue.")
        self.write(results, out)
        return results

    def _begin(self, about: dict[str, Any], out: Path, resume: bool) -> Results:
        """The existing results, if they may be continued, or empty ones."""
        file = out / f"{self.name}.json"
        if not self.resumable or not file.exists():
            return Results(about, [])
        if not resume:
            raise Refused(f"--out: {file} already holds results; continue them with --resume, or choose another folder")
        results = self.read(out)
        for name, kind in (("environment", "another environment"), ("shape", "another problem shape")):
            if changed := differences(results.about.get(name, {}), about.get(name, {})):
                raise Refused(f"--out: {file} holds results of {kind}: {'; '.join(changed)}")
        return results

    def read(self, out: Path) -> Results:
        """The results in ``out``. Raises ``Refused`` if there are none."""
        file = out / f"{self.name}.json"
        try:
            return self.parse(json.loads(file.read_text()))
        except OSError:
            raise Refused(f"--out: expected a folder with {file.name}, got {str(out)!r}") from None
        except ValueError as wrong:
            raise Refused(f"--out: {file} is not valid JSON: {wrong}") from None

    def parse(self, contents: Mapping[str, Any]) -> Results:
        """The results in a parsed file."""
        rows = []
        for part, names in self.parts.items():
            for fields in contents[part] if names else [contents[part]]:
                key = {name: fields[name] for name in names}
                rows.append(Row(part, key, {name: value for name, value in fields.items() if name not in key}))
        return Results({name: value for name, value in contents.items() if name not in self.parts}, rows)

    def write(self, results: Results, out: Path) -> None:
        """Writes the results to ``out`` atomically."""
        lines = [f' "{name}": {json.dumps(value)}' for name, value in results.about.items()]
        for part, names in self.parts.items():
            rows = [json.dumps({**row.key, **row.values}) for row in results.of(part)]
            listed = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else "[]"
            lines.append(f' "{part}": {listed if names else rows[0]}')
        write_atomically(out / f"{self.name}.json", ("{\n" + ",\n".join(lines) + "\n}\n").encode())

    def write_report(self, results: Results, out: Path) -> Path:
        """Writes the text and the figure next to the results; returns the text's path."""
        text = out / f"{self.name}.md"
        write_atomically(text, self.markdown(results).encode())
        if self.draw is not None:
            self.draw(results, out / f"{self.name}.png")
        return text
