"""The commands ``run``, ``list``, ``report`` and ``keep``: their options, one-line errors and exit statuses.

JAX, Orbax and matplotlib take seconds to import, so they are imported only after the options are read.
"""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from rich.table import Table

from jattn_experiments import config
from jattn_experiments.runs import stopping
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import RESULTS, Busy, Damaged
from jattn_experiments.runs.terminal import Refused, Terminal, fail, refusing


def run_command(arguments: Sequence[str]) -> int:
    """Trains an experiment and writes a report on it."""
    if "--distributed" in arguments:
        stopping.abort_in_one_line()  # reading a config imports JAX
    request = config.load(arguments)
    with stopping.stoppable():
        try:
            status = _run(request)
        except BaseException as error:
            if (number := stopping.last_signal()) is None:
                raise
            warnings.simplefilter("ignore", RuntimeWarning)  # an interrupted save leaves unfinished coroutines
            # a library may have converted the exception
            where = (str(error) if isinstance(error, stopping.Stopped) else "") or f"{request.config.name}: stopped"
            status = fail(f"{where}; rerun to resume", status=128 + number)
    if request.processes is not None and status > 1:  # this process was refused or stopped; the others may continue
        _leave(status)
    return status


def _run(request: config.Request) -> int:
    # slow to import: a wrong option or --help should not wait for JAX and Orbax
    from jattn_experiments.replicate import FOLDER, replication, with_replication
    from jattn_experiments.run import DifferentConfig, finished, prepared, run
    from jattn_experiments.run_page.document import write_page
    from jattn_experiments.runs import devices

    settings, out, processes = request.config, request.out, request.processes
    if request.replicate and settings.kind is not config.Kind.TRAINING:
        return fail(
            f"--replicate: expected a config that trains a model, got {settings.name}, which examines a saved model"
        )
    with contextlib.ExitStack() as stack:
        again = None
        try:
            devices.start(settings, processes)
            stack.enter_context(prepared(settings, out))
            if request.replicate:  # an invalid replication is refused before the run trains
                again = replication(settings, out, request.replicate, request.replicate_seed)
                stack.enter_context(prepared(again, out / FOLDER))
        except ValueError as wrong:
            return fail(f"--replicate: {wrong}" if again else str(wrong))
        except OSError as wrong:
            return fail(f"--out: {out}: {wrong}")
        except (DifferentConfig, Busy, Damaged) as refused:
            return _say_why(refused, out)
        try:
            findings = run(settings, out) if again is None else finished(settings, out)
            if again is not None:
                finished(again, out / FOLDER)
            if findings is None:  # only the first process has findings
                return 0
            findings = with_replication(findings, out)
            report = write_page(findings, out)
        except Exception as error:
            stopping.check()
            status = _say_why(error, out)
            if processes is not None:
                _leave(status)
            return status
    _show(findings, report)
    failed = [row["name"] for row in findings.claims if not (row["holds"] and row.get("replication", row)["holds"])]
    return fail(f"claims that fail: {', '.join(failed)}", status=1) if request.check and failed else 0


def list_command(arguments: Sequence[str]) -> int:
    """Lists the experiments that come with jattn, by the NAME that jattn run takes."""
    if arguments and arguments[0] not in ("-h", "--help"):
        return fail(f"list: expected no options, got {arguments[0]!r}")
    config.Parser(prog="jattn list", description=list_command.__doc__).parse_args(arguments)
    table = Table("config", "description", box=None)
    for file in sorted(config.CONFIGS.glob("*.yaml")):
        try:
            experiment = config.read(file)
            table.add_row(file.stem, experiment.description)
        except ValueError as wrong:
            table.add_row(file.stem, f"not valid: {wrong}")
    Terminal().print(table)
    return 0


def report_command(arguments: Sequence[str]) -> int:
    """Writes the report of a finished run again."""
    parser = config.Parser(prog="jattn report", description=report_command.__doc__)
    parser.add_argument("--run", type=str, required=True, help="folder of a finished run")
    out = Path(parser.parse_args(arguments).run)
    from jattn_experiments.run_page.document import write_page

    with refusing("--run", OSError):
        with _of_a_finished_run(out):
            findings = Findings.load(out)
        report = write_page(findings, out)
    _show(findings, report)
    return 0


def keep_command(arguments: Sequence[str]) -> int:
    """Saves the parts of a finished run that are worth keeping in a repository."""
    parser = config.Parser(prog="jattn keep", description=keep_command.__doc__)
    parser.add_argument("--run", type=str, required=True, help="folder of a finished run")
    parser.add_argument("--to", type=str, default=str(RESULTS), help="folder for kept results")
    parser.add_argument("--replace", action="store_true", help="also replace results of another config")
    options = parser.parse_args(arguments)
    from jattn_experiments.run_page.keep import finished, keep

    run = Path(options.run)
    with refusing("--run", OSError), _of_a_finished_run(run):
        findings = finished(run)
    with refusing("--to", OSError):
        print(f"kept: {keep(findings, run, Path(options.to), options.replace)}")
    return 0


@contextlib.contextmanager
def _of_a_finished_run(out: Path) -> Iterator[None]:
    """A context for reading findings."""
    try:
        with refusing("--run", Damaged):
            yield
    except FileNotFoundError:
        raise Refused(f"--run: expected the folder of a finished run, got {str(out)!r}") from None
    except TypeError:
        raise Refused(f"--run: {str(out)!r} was written by another version of jattn; run its config again") from None


def _say_why(error: Exception, out: Path) -> int:
    """Prints why a run ended, in one line for expected errors; returns the exit status."""
    from jattn_experiments.run import DifferentConfig
    from jattn_experiments.train import Diverged

    if isinstance(error, DifferentConfig):
        return fail(*error.args)
    if isinstance(error, Diverged):
        return fail(str(error), status=1)
    if isinstance(error, Busy | Damaged):
        return fail(f"--out: {error}")
    if isinstance(error, OSError):  # usually a full disk
        return fail(f"--out: {out}: {error}; rerun to resume from the last checkpoint", status=1)
    import jax

    if (
        isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1
    ):  # usually because another process died
        line = str(error).splitlines()[0]
        return fail(f"stopped: {line}; {stopping.RESTART}", status=1)
    traceback.print_exception(error)
    return 1


def _leave(status: int) -> NoReturn:
    """Ends one of several processes immediately. A normal exit would wait for the others, and they for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _show(findings: Findings, report: Path) -> None:
    from jattn_experiments.run_page.terminal_tables import show  # imports SciPy, also slow

    show(findings)
    print(f"report: {report}")
