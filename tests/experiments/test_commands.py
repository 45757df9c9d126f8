"""The command line: its help, and which modules it imports before it has read the options."""

import subprocess
import sys
from pathlib import Path

import pytest

from jattn_experiments.__main__ import commands, main

ROOT = Path(__file__).parents[2]


def test_help_names_every_command(capsys):
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in commands())


@pytest.mark.parametrize("command", commands())
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jattn {command}")


@pytest.mark.parametrize("words", [["run", "--help"], ["run", "--train.stepz", "1"], ["bench", "--parts", "energy"]])
def test_options_are_read_before_jax_is_imported(words):
    code = (
        "import sys\nfrom jattn_experiments.__main__ import main\n"
        f"try:\n    main({words})\nexcept SystemExit:\n    pass\n"
        "assert not {'jax', 'flax', 'matplotlib', 'scipy', 'orbax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
@pytest.mark.slow
def test_output_to_a_full_disk_is_an_error_in_one_line():
    with Path("/dev/full").open("wb") as full:
        words = [sys.executable, "-m", "jattn_experiments", "list"]
        process = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=200, text=True)
    assert (process.returncode, process.stderr) == (1, "error: output: No space left on device\n")
