"""Every wrong call of a table says what is wrong: the argument, what came, what was expected."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from error_table import ROWS


@pytest.fixture(scope="module")
def errors():
    """What the calls raise in a process of their own, which no type checker watches."""
    found = subprocess.run(
        [sys.executable, Path(__file__).with_name("error_table.py")], capture_output=True, text=True, check=True
    )
    return json.loads(found.stdout)


@pytest.mark.parametrize("name", ROWS)
def test_the_error_says_what_is_wrong(errors, name):
    assert errors[name] is not None, "nothing was raised"
    kind, message = errors[name]
    assert kind in ("TypeError", "ValueError", "FileNotFoundError", "Unsupported")
    assert [word for word in ROWS[name][1] if word not in message] == [], message
    assert len(message) < 800  # a checkpoint names all that does not fit


def test_the_table_is_long_enough():
    assert len(ROWS) >= 150
