"""Errors of wrong calls, from a table: each names the argument, what it got and what was expected."""

import json
import subprocess
import sys
from pathlib import Path

from tests.jattn.error_table import ROWS


def test_every_error_says_what_is_wrong():
    """In a separate process without a type checker, as users call."""
    command = [sys.executable, Path(__file__).with_name("error_table.py")]
    raised = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    unclear = {}
    for name, (_, words) in ROWS.items():
        kind, message = raised[name] or (None, "nothing was raised")
        known = kind in ("TypeError", "ValueError", "FileNotFoundError", "Unsupported")
        if not known or any(word not in message for word in words) or len(message) > 800:
            unclear[name] = kind, message, words
    assert unclear == {}


def test_the_table_is_long_enough():
    assert len(ROWS) >= 150
