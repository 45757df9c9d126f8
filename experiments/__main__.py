"""``python -m experiments`` in a checkout is the command ``jattn``."""

import sys

from jattn_experiments.__main__ import as_command

if __name__ == "__main__":
    sys.exit(as_command())
