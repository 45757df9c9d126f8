"""``python -m experiments run|list|report|keep|bench``: see ``python -m experiments run --help``."""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.table import Table

from experiments import config, stopping
from experiments.bench_command import bench_command
from experiments.findings import Findings
from experiments.folder import Busy, Damaged
from experiments.terminal import Terminal, drop_output, fail

USAGE = """usage: python -m experiments run --config FILE [--config FILE ...] [--out DIR] [--check]
                                 [--sweep model.num_heads=1,2,4 ...] [--train.steps 500 ...] [--mesh.data 2 ...]
                                 [--distributed [--coordinator HOST:PORT --num_processes 2 --process_id 0]]
       python -m experiments list
       python -m experiments report --run DIR
       python -m experiments keep --run DIR [--to experiments/results]
       python -m experiments bench [--suite attention|dispatch|layers|looking|sharding] [--peers jax,torch,tokamax]
                                   [--device cpu|gpu] [--lengths 128,4096] [--cases full,causal]
                                   [--parts times,memory,peak,compile] [--seconds 6] [--out DIR] [--resume | --redraw]

run     trains an experiment, its controls, every point of its sweep, and writes the report; stopped and started
        again, it goes on where it was; with --check a claim that fails ends with status 1 (run --help explains
        every option); --mesh.data, --mesh.heads, --mesh.sequence: on that many devices together; --distributed:
        the same command on every machine of a cluster
list    the experiments in configs/
report  writes the report of a finished run anew
keep    writes a finished run's claims, numbers and pictures, small enough for a repository, to TO/NAME
bench   times jattn and its peers in turn, and writes tables and a picture; hours for all lengths
        (bench --help explains every option)
"""


def main(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit status."""
    command, *rest = arguments or ["--help"]
    commands = {
        "run": run_command,
        "list": list_command,
        "report": report_command,
        "keep": keep_command,
        "bench": bench_command,
    }
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command not in commands:
        return fail(f"no command {command!r}; expected one of {', '.join(commands)}")
    return commands[command](rest)


def run_command(arguments: Sequence[str]) -> int:
    """Trains an experiment and reports on it."""
    settings, out, check, processes = config.load(arguments)
    with stopping.stoppable():
        try:
            return _run(settings, out, check, processes)
        except BaseException as error:
            if (number := stopping.asked()) is None:
                raise
            warnings.simplefilter("ignore", RuntimeWarning)  # a save that is cut short leaves coroutines behind
            # a library may have made another error of the exception
            said = (str(error) if isinstance(error, stopping.Stopped) else "") or f"{settings.name}: stopped"
            status = fail(f"{said}; the same command goes on", status=128 + number)
    if processes is not None:
        _leave(status)
    return status


def _run(settings: config.Config, out: Path, check: bool, processes: config.Processes | None) -> int:
    # JAX and Orbax take seconds to import, which a wrong option or --help need not wait for
    from experiments import devices
    from experiments.run import DifferentConfig, prepared, run

    with contextlib.ExitStack() as stack:
        try:
            devices.start(settings, processes)
            stack.enter_context(prepared(settings, out))
        except DifferentConfig as different:
            return fail(*different.args)
        except (Busy, Damaged) as refused:
            return fail(f"--out: {refused}")
        except ValueError as wrong:
            return fail(str(wrong))
        except OSError as wrong:
            return fail(f"--out: {wrong}")
        try:
            findings = run(settings, out)
            if findings is None:  # the first process has them
                return 0
            report = _write_report(findings, out)
        except Exception as error:
            stopping.check()
            status = _say_why(error, out)
            if processes is not None:
                _leave(status)
            return status
    _show(findings)
    print(f"report: {report}")
    failed = [claim["name"] for claim in findings.claims if not claim["holds"]]
    return fail(f"claims that fail: {', '.join(failed)}", status=1) if check and failed else 0


def list_command(arguments: Sequence[str]) -> int:
    """Prints the experiments in configs/."""
    if arguments:
        return fail(f"list takes no options, got {arguments[0]!r}")
    table = Table("config", "name", "description", box=None)
    for file in sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")):
        try:
            experiment = config.read(file)
            table.add_row(f"configs/{file.name}", experiment.name, experiment.description)
        except ValueError as wrong:
            table.add_row(f"configs/{file.name}", "", f"not valid: {wrong}")
    Terminal().print(table)
    return 0


def report_command(arguments: Sequence[str]) -> int:
    """Writes the report of a finished run anew."""
    parser = config.Parser(prog="python -m experiments report", description=report_command.__doc__)
    parser.add_argument("--run", type=str, required=True, help="folder of a finished run")
    out = Path(parser.parse_args(arguments).run)
    try:
        findings = Findings.load(out)
    except FileNotFoundError:
        return fail(f"--run: expected the folder of a finished run, got {str(out)!r}")
    except (Damaged, OSError) as wrong:
        return fail(f"--run: {wrong}")
    except TypeError:
        return fail(f"--run: {str(out)!r} was written by another version; run its config anew")
    try:
        report = _write_report(findings, out)
    except OSError as wrong:
        return fail(f"--run: {wrong}")
    _show(findings)
    print(f"report: {report}")
    return 0


def keep_command(arguments: Sequence[str]) -> int:
    """Writes what of a finished run is kept in a repository."""
    parser = config.Parser(prog="python -m experiments keep", description=keep_command.__doc__)
    parser.add_argument("--run", type=str, required=True, help="folder of a finished run")
    parser.add_argument("--to", type=str, default=str(Path(__file__).parent / "results"), help="folder of results")
    options = parser.parse_args(arguments)
    from experiments.keep import keep

    try:
        print(f"kept: {keep(Path(options.run), Path(options.to))}")
    except FileNotFoundError:
        return fail(f"--run: expected the folder of a finished run, got {options.run!r}")
    except Damaged as wrong:
        return fail(f"--run: {wrong}")
    except TypeError:
        return fail(f"--run: {options.run!r} was written by another version; run its config anew")
    except OSError as wrong:
        return fail(f"--to: {wrong}")
    return 0


def _say_why(error: Exception, out: Path) -> int:
    """Says why a run ended, in one line where it is the run's matter; returns the exit status."""
    from experiments.train import Diverged

    if isinstance(error, Diverged):
        return fail(str(error), status=1)
    if isinstance(error, Damaged):
        return fail(f"--out: {error}")
    if isinstance(error, OSError):  # mostly a full disk
        return fail(f"--out: {out}: {error}; the same command goes on from the last checkpoint", status=1)
    from jax.errors import JaxRuntimeError

    if isinstance(error, JaxRuntimeError) and _are_many():  # mostly another process that is gone
        line = str(error).splitlines()[0]
        return fail(f"stopped: {line}; start all processes again to go on from the last checkpoint", status=1)
    traceback.print_exception(error)
    return 1


def _are_many() -> bool:
    import jax

    return jax.process_count() > 1


def _leave(status: int) -> NoReturn:
    """Ends one of several processes at once: Python's way out waits for the others, and they wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _write_report(findings: Findings, out: Path) -> Path:
    from experiments.report import write_report

    return write_report(findings, out)


def _show(findings: Findings) -> None:
    """The table of heads and the table of claims, in the terminal."""
    console = Terminal()
    heads = Table("seed", "layer", "head", "role", "score", "null", "p", title="heads", title_justify="left")
    for row in findings.heads:
        numbers = (f"{row[key]:.3f}" for key in ("score", "null", "p_value"))
        heads.add_row(*(str(row[key]) for key in ("seed", "layer", "head", "role")), *numbers)
    claims = Table("claim", "worst", "threshold", "untrained", "seeds", "", title="claims", title_justify="left")
    for row in findings.claims:
        least = row["side"] == "at least"
        values = f"{min(row['values']) if least else max(row['values']):.4g}"
        untrained = f"{max(row['untrained']) if least else min(row['untrained']):.4g}"
        seeds = f"{len(row['passed'])} of {len(row['values'])}, {row['needed']} needed"
        holds = "[green]holds[/]" if row["holds"] else "[bold red]fails[/]"
        claims.add_row(row["name"], values, f"{row['side']} {row['threshold']:g}", untrained, seeds, holds)
    for table in (heads, claims):
        console.print(table)
    from experiments.panels import divergence_text  # SciPy, too, takes a while

    for when, name in enumerate(("untrained", "trained")):
        console.print(f"divergence between heads, {name}: {divergence_text(findings, when)}", highlight=False)


def _as_command() -> int:
    """``main`` for a command line: a closed pipe and Ctrl-C are no errors of ours."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        drop_output()
        return 0
    except KeyboardInterrupt:
        return fail("stopped", status=130)


if __name__ == "__main__":
    sys.exit(_as_command())
