"""``python -m tools SUITE``: chooses the suite and its options."""

import sys
from collections.abc import Sequence

from jattn_experiments.bench.command import Entry, dated, tools_command

SUITES = {
    "chips": Entry(
        "tools.chips",
        "cells out resume redraw",
        "attention compiled for TPUs and GPUs that this machine lacks",
        lambda options: "runs/bench" if options.cells else dated("chips"),
    ),
    "dispatch": Entry("tools.dispatch", "out", "short calls"),
    "imports": Entry("tools.imports", "out", "import time compared with JAX's and Flax's"),
    "pods": Entry("tools.pods", "out resume redraw", "rings compiled for pods of TPUs", lambda options: dated("pods")),
    "sharding": Entry("tools.sharding", "out", "rings of virtual CPU devices"),
}


def main(arguments: Sequence[str]) -> int:
    """Examines programs compiled for chips and for rings of devices, and times short calls and imports."""
    return tools_command(SUITES, str(main.__doc__), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
