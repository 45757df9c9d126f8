"""The archive of the chip suite: which wheels it holds, and that it runs without a network."""

import os
import subprocess
import sys
import tarfile

import pytest

from tools import chip_bundle


@pytest.mark.slow
def test_an_archive_runs_without_a_network(tmp_path):
    file = tmp_path / "bundle.tar.gz"
    assert chip_bundle.main(["--out", str(file)]) == 0
    assert file.stat().st_size < 60e6
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    offline = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "JAX_PLATFORMS": "cpu"}
    offline.pop("PYTHONPATH", None)
    command = ["sh", f"{chip_bundle.NAME}/run.sh", sys.executable, "--kernels", "xla", "--minutes", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / chip_bundle.NAME / "chip" / "chip.md").read_text()
    assert "- xla: " in text and "bits as expected in 4 of 4" in text


def test_wheels_are_chosen_for_the_python_and_platform_there():
    lines = ["a==1; python_version < '3.12'", "a==2; python_version >= '3.12'", "# a comment", "b[c]>=1"]
    assert chip_bundle.for_python("3.11", lines) == ["a==1", "b[c]>=1"]
    assert chip_bundle.for_python("3.13", lines) == ["a==2", "b[c]>=1"]
    platforms = chip_bundle.platforms("manylinux_2_28_aarch64")
    assert platforms[0] == "manylinux_2_28_aarch64" and "manylinux_2_17_aarch64" in platforms and len(platforms) == 24
    assert chip_bundle.platforms("macosx_11_0_arm64") == ["macosx_11_0_arm64"]
