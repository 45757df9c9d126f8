"""What is released: the wheel and the sources hold what they should, and the wheel works alone, outside of a checkout.

The tests use the network. Where a package cannot be had, the test skips and says what pip said.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import jattn
from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Of the accelerators and the peers: hardware vendors' packages, which an index may lack.
ELSEWHERE = {"bench", "chips", "gpu", "tpu"}
pytestmark = pytest.mark.slow

# None needs a peer or a file of the checkout to be imported.
IMPORT_ALL = """
import importlib, pkgutil, jattn_experiments
for module in pkgutil.walk_packages(jattn_experiments.__path__, "jattn_experiments."):
    importlib.import_module(module.name)
"""


def run(*command, cwd, status=0, **environment):
    """stdout of a command that does not see the checkout."""
    seen = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX_"))}
    words, pipes = map(str, command), {"capture_output": True, "text": True, "timeout": 1500}
    done = subprocess.run([*words], cwd=cwd, env=seen | environment, **pipes)
    assert done.returncode == status, f"{command}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if status == 0 else done.stderr


def pip(python, *words, cwd):
    """Runs pip; a status other than 0 fails the test."""
    return run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words, cwd=cwd)


def build(*words, cwd):
    pytest.importorskip("build", reason="pip install build")
    run(sys.executable, "-m", "build", *words, cwd=cwd)


def find_python(version):
    """An interpreter of that version, from PATH or pyenv, as ``.ci/run`` finds them; skips without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (f"python{version}", *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))):
        says = [python, "-c", "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"]
        if shutil.which(python) and subprocess.run(says, capture_output=True, text=True).stdout.strip() == version:
            return python
    pytest.skip(f"there is no Python {version} with venv here")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The wheel and the sources, built from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build("--sdist", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    (wheel,), (sources,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sources


def contents(wheel):
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


def test_the_wheel_holds_the_packages_and_nothing_else(released):
    places = {  # in the checkout, and in the wheel
        "jattn": "jattn",
        "experiments/jattn_experiments": "jattn_experiments",
        "configs": "jattn_experiments/configs",
    }
    expected = {
        f"{there}/{file.relative_to(ROOT / here)}"
        for here, there in places.items()
        for file in (ROOT / here).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    info = f"jattn-{jattn.__version__}.dist-info"
    held = contents(released[0])
    assert {name for name in held if not name.startswith(f"{info}/")} == expected
    assert held[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert {".yaml", ".html", ".css", ".js", ".typed"} <= {Path(name).suffix or Path(name).name for name in held}


def test_the_sources_are_small_and_build_the_same_wheel(released, tmp_path):
    wheel, sources = released
    assert sources.stat().st_size < 2**21
    with tarfile.open(sources) as files:
        assert not [name for name in files.getnames() if "experiments/results" in name]
        files.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build("--wheel", "--outdir", tmp_path / "dist", unpacked, cwd=tmp_path)
    assert contents(next((tmp_path / "dist").iterdir())) == contents(wheel)


def test_the_links_of_the_readme_lead_to_the_repository(released):
    repository, info = PROJECT["urls"]["Repository"], f"jattn-{jattn.__version__}.dist-info"
    text = message_from_string(contents(released[0])[f"{info}/METADATA"].decode()).get_payload()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    undone = re.sub(rf"\]\({re.escape(repository)}/(?:blob|raw)/main/", "](", text)
    assert undone.strip() == readme.strip(), "more than addresses differ"
    links = re.findall(r"(!?)\[[^\[\]]*(?:\[[^\]]*\][^\[\]]*)?\]\(([^)\s]+)\)", text)
    assert len(links) == readme.count("](") == text.count("]("), "a link that this test does not read"
    for picture, link in links:
        path = link.removeprefix(f"{repository}/{'raw' if picture else 'blob'}/main/")
        assert path.startswith("https://") or (path != link and (ROOT / path.partition("#")[0]).exists()), link


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_wheel_works_alone(version, released, tmp_path):
    wheel, python = released[0], tmp_path / "venv" / "bin" / "python"
    empty, pins = tmp_path / "empty", ("-c", ROOT / "constraints.txt")
    empty.mkdir()
    run(find_python(version), "-m", "venv", tmp_path / "venv", cwd=empty)
    pip(python, "install", *pins, wheel, cwd=empty)

    where, version_of = "import jattn; print(jattn.__file__, jattn.__version__)", f" {jattn.__version__}\n"
    assert run(python, "-c", where, cwd=empty).startswith(str(tmp_path / "venv"))
    assert run(python, "-c", where, cwd=empty).endswith(version_of)
    run(python, "-c", "import jattn.nnx", cwd=empty)
    first, second = blocks((ROOT / "README.md").read_text(encoding="utf-8"))[:2]
    run(python, "-c", first.code, cwd=empty)
    run(python, "-c", f"{first.code}\n{second.code}", cwd=empty)
    assert (empty / "heads.html").stat().st_size > 10_000
    for command in ([python.with_name("jattn")], [python, "-m", "jattn_experiments"]):
        error = run(*command, "--help", cwd=empty, status=2)
        assert re.fullmatch(r"error: .* pip install 'jattn\[experiments\]'\n", error)

    pip(python, "install", *pins, f"{wheel}[experiments]", cwd=empty)
    run(python, "-c", IMPORT_ALL, cwd=empty)
    listed = run(python.with_name("jattn"), "list", cwd=empty)
    assert all(file.stem in listed for file in (ROOT / "configs").glob("*.yaml"))
    small = {"task.length": 12, "evaluate.batch": 8, "claims": [], "controls": {}}
    brief = {"train.steps": 60, "train.seeds": 1, "train.batch": 4, "train.checkpoint_every": 60}
    options = [f"--{name}={value}" for name, value in {**small, **brief}.items()]
    run(python.with_name("jattn"), "run", "copy", *options, cwd=empty, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert (empty / "runs/copy/report.html").stat().st_size > 10_000


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_experiments_resolve_on_every_python(version, released, tmp_path):
    wanted = f"{released[0]}[experiments]"
    pip(find_python(version), "install", "--dry-run", "--ignore-installed", wanted, cwd=tmp_path)


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_resolves(extra, released, tmp_path):
    where = []
    if extra == "native":  # released with jattn, from the same tag
        build("--sdist", "--outdir", tmp_path, ROOT / "native", cwd=tmp_path)
        where = ["--find-links", tmp_path]
    try:
        wanted = f"{released[0]}[{extra}]"
        pip(sys.executable, "install", "--dry-run", "--ignore-installed", *where, wanted, cwd=tmp_path)
    except AssertionError as failed:
        if extra in ELSEWHERE:
            pytest.skip(str(failed).strip().splitlines()[-1])
        raise
