"""``jattn COMMAND``, with the commands in ``commands``. ``python -m jattn_experiments`` is the same program."""

import argparse
import errno
import sys
from collections.abc import Callable, Sequence

EXTRA = {
    "PIL",
    "jsonargparse",
    "matplotlib",
    "optax",
    "orbax",
    "rich",
    "yaml",
}  # packages that jattn[experiments] adds to jattn


def commands() -> dict[str, Callable[[Sequence[str]], int]]:
    """The commands by name. They are imported here so that ``jattn`` without its extra can say what is missing."""
    from jattn_experiments.bench.command import bench_command
    from jattn_experiments.commands import keep_command, list_command, report_command, run_command
    from jattn_experiments.compare import compare_command
    from jattn_experiments.generate import generate_command
    from jattn_experiments.look import look_command

    of_runs = run_command, list_command, report_command, keep_command, look_command, compare_command
    return {one.__name__.removesuffix("_command"): one for one in (*of_runs, bench_command, generate_command)}


def main(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit status."""
    from jattn_experiments.runs.terminal import Refused, fail

    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        usage().print_help()
        return 0
    known = commands()
    if command not in known:
        return fail(f"expected one of the commands {', '.join(known)}, got {command!r}")
    try:
        return known[command](rest)
    except Refused as refused:
        return fail(str(refused))


def usage() -> argparse.ArgumentParser:
    """The parser of the whole program, which only lists the commands. Each command has its own parser."""
    parser = argparse.ArgumentParser(
        prog="jattn",
        description="Runs experiments that show what attention heads learn, and benchmarks.",
        epilog="jattn COMMAND --help explains the options of a command.",
    )
    shown = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in commands().items():
        shown.add_parser(name, help=str(command.__doc__).splitlines()[0])
    return parser


def as_command() -> int:
    """``main`` for the command line. A missing extra is reported in one line."""
    try:
        return _on_a_terminal(sys.argv[1:])
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in EXTRA:
            raise
        print(f"error: the jattn command needs {missing.name}: pip install 'jattn[experiments]'", file=sys.stderr)
        return 2


def _on_a_terminal(arguments: Sequence[str]) -> int:
    """Runs the command. A closed pipe and Ctrl-C are not errors; a full disk behind stdout is reported in one line."""
    from jattn_experiments.runs import stopping
    from jattn_experiments.runs.terminal import fail

    with stopping.stoppable():
        try:
            return _whole_output(arguments)
        except BaseException:
            if (number := stopping.last_signal()) is None:  # otherwise JAX may have converted the exception
                raise
            return fail("stopped", status=128 + number)


def _whole_output(arguments: Sequence[str]) -> int:
    from jattn_experiments.runs.terminal import drop_output, fail

    status = 0
    try:
        status = main(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        drop_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        drop_output()
        return status or fail(f"output: {error.strerror}", status=1)


if __name__ == "__main__":
    sys.exit(as_command())
