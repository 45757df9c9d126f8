"""Makes an archive that runs the chip suite on a machine without a network: ``make on-chip-bundle``.

It holds jattn's source, the command ``run.sh``, and wheels of all requirements for one Python and platform. JAX and
its own requirements are left out, because a machine with an accelerator already has them.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[1]
# JAX and its own requirements: the machine already has versions that fit its accelerator.
WITH_JAX = {"jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum"}
SOURCE = (
    "jattn",
    "experiments/jattn_experiments",
    "configs",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "constraints.txt",
)
NAME = "jattn-on-chip"
RUN = """\
#!/bin/sh
# sh run.sh [PYTHON [OPTIONS]]: checks and times jattn on this machine's accelerator, with PYTHON's JAX; python3 by
# default. Nothing is downloaded. The results are in the folder chip.
set -eu
python=${1:-python3}
[ $# -gt 0 ] && shift
cd "$(dirname "$0")"
with_jax=$("$python" -c 'import jax, pathlib; print(pathlib.Path(jax.__file__).parents[1])') ||
    { echo "'$python' has no JAX: pass the Python that has one" >&2; exit 1; }
[ -d environment ] || "$python" -m venv environment
# That Python's packages come after the wheels here.
echo "$with_jax" > "$(environment/bin/python -c 'import site; print(site.getsitepackages()[0])')/with_jax.pth"
environment/bin/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps wheels/*.whl
cd source
export PYTHONPATH="$PWD:$PWD/experiments"
exec ../environment/bin/python -m jattn_experiments bench --suite chip --out ../chip --resume "$@"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the archive."""
    parser = argparse.ArgumentParser(prog="make on-chip-bundle", description=main.__doc__)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help="Python version of the other machine, such as 3.12")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="platform of the other machine's wheels")
    parser.add_argument("--out", type=Path, default=Path(f"build/{NAME}.tar.gz"), help="the archive")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / NAME
        download(options.python, options.platform, root / "wheels")
        for name in SOURCE:
            copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
            skip = {"ignore": shutil.ignore_patterns("__pycache__")} if copy is shutil.copytree else {}
            (root / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            copy(CHECKOUT / name, root / "source" / name, **skip)
        (root / "run.sh").write_text(RUN)
        with tarfile.open(options.out, "w:gz") as archive:
            archive.add(root, NAME)
    size = options.out.stat().st_size / 2**20
    print(f"{options.out}: {size:.1f} MiB, for Python {options.python} on {options.platform}")
    print(f"there: tar xf {options.out.name} && sh {NAME}/run.sh; then send {NAME}/chip")
    return 0


def download(python: str, platform: str, to: Path) -> None:
    """The wheels, without those of ``WITH_JAX``. Raises ``SystemExit`` with pip's last line if one is missing."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    pip += ["--dest", str(to), "--python-version", python, "--implementation", "cp"]
    pip += [f"--platform={one}" for one in (*platforms(platform), "any")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as versions:
        versions.write("\n".join(for_python(python, (CHECKOUT / "constraints.txt").read_text().splitlines())))
        versions.flush()
        done = subprocess.run(
            [*pip, "-c", versions.name, *requirements(python)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    for wheel in to.glob("*.whl"):
        if wheel.name.partition("-")[0].lower() in WITH_JAX:
            wheel.unlink()


def platforms(platform: str) -> list[str]:
    """A platform, and the older platforms whose wheels it also runs."""
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform)
    return [f"manylinux_2_{minor}_{match[2]}" for minor in range(int(match[1]), 4, -1)] if match else [platform]


def requirements(python: str) -> list[str]:
    """The requirements of jattn and its extra ``experiments`` on the other machine."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    return for_python(python, [*project["dependencies"], *project["optional-dependencies"]["experiments"]])


def for_python(python: str, lines: Sequence[str]) -> list[str]:
    """The requirements for that Python version; pip would evaluate markers for the Python that runs it."""
    every = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    there = {"python_version": python, "python_full_version": f"{python}.0"}
    return [str(one).partition(";")[0] for one in every if one.marker is None or one.marker.evaluate(there)]


if __name__ == "__main__":
    sys.exit(main())
