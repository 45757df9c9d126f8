"""A process that answers questions one by one, so that a crash or hang costs only one answer."""

import atexit
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FATAL = re.compile(r"F\d{4} \S+ +\d+ \S+\] (.*)")  # a line of absl's log: file and message


class Worker:
    """The process. It starts with the first question, restarts after a crash, and ends with its parent.

    ``command``: a program that calls ``serve``. ``limit``: seconds for one answer.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limit: float):
        self.command, self.environment, self.limit = command, environment, limit
        self.process: subprocess.Popen | None = None
        atexit.register(self.close)

    def __call__(self, **question: Any) -> dict[str, Any]:
        """The answer, or ``result`` "failed", ``reason`` and ``seconds`` if the process ended or exceeded the limit."""
        if self.process is None:
            self._start()
        process, begin = self.process, time.perf_counter()
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], self.limit)
            answer = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, answer = True, b""
        if answer:
            return json.loads(answer)
        reason = self._end() if ready else f"took more than {self.limit:g} seconds"
        self.close()
        return {"result": "failed", "reason": reason, "seconds": round(time.perf_counter() - begin, 1)}

    def _start(self) -> None:
        self.errors = tempfile.TemporaryFile()
        checkout, environment = Path(__file__).parents[2], os.environ | self.environment
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(self.command, cwd=checkout, env=environment, **pipes)

    def _end(self) -> str:
        status = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        fatal = [match[1] for match in map(FATAL.match, lines) if match]  # a stack trace follows
        message = next(filter(None, map(str.strip, (*reversed(fatal), *reversed(lines)))), "it wrote nothing to stderr")
        return f"the process ended with status {status}: {message[:300]}"

    def kill(self) -> None:
        """Ends the process from another thread, so that its question fails. The process would ignore Ctrl-C."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.errors.close()
            self.process = None


def first_line(error: Exception, most: int | None = None) -> str:
    """The type of an exception and the first line of its message, cut to a number of characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:most] if lines else ''}"


def serve(answer: Callable[..., Mapping[str, Any]]) -> None:
    """Answers the questions on stdin, one JSON object of named arguments per line, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print; that is not an answer
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
