"""The package of compiled kernels: from its sources, by other compilers, for other processors, under sanitizers."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import jax
import pytest

from jattn.kernels.native import VERSION

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.cc")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

# The environment that a compiler is named in, and what runs its programs.
TARGETS = {
    "c++": ({}, []),
    "clang++": ({"CXX": "clang++"}, []),
    "aarch64": ({"CXX": "aarch64-linux-gnu-g++", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}, ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"]),
}  # fmt: skip
PROGRAM = """
import jax.numpy as jnp, jattn
x = jnp.zeros((1, 4, 1, 16))
jattn.dot_product_attention(x, x, x)
try:
    jattn.dot_product_attention(x, x, x, implementation="native")
except jattn.Unsupported as reason:
    print(reason)
"""


def run(*command, cwd=None, check=True, **environment):
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert not check or done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """What a source distribution holds."""
    folder = tmp_path_factory.mktemp("native")
    shutil.copytree(ROOT / "native", folder / "native", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    run(sys.executable, "setup.py", "-q", "sdist", "-d", folder, cwd=folder / "native")
    with tarfile.open(folder / f"jattn_native-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"jattn_native-{VERSION}"


def compiled(compiler, source, to, *flags):
    """A program, or with ``-shared`` a library."""
    run(compiler, "-std=c++17", *flags, f"-I{jax.ffi.include_dir()}", source, "-o", to, "-pthread", "-ldl")
    return to


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_by_themselves(target, sources, tmp_path):
    """A wheel's, against the formula in double precision. It is for all Pythons of a platform."""
    environment, emulator = TARGETS[target]
    compiler = environment.get("CXX", "c++")
    for program in [compiler, *emulator[:1]]:
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    shutil.copytree(sources, tmp_path / "sources")
    run(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", tmp_path, cwd=tmp_path / "sources", **environment)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"jattn_native-{VERSION}-py3-none-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("jattn_native/_attention.so", tmp_path)
    driver = compiled(compiler, DRIVER, tmp_path / "driver", "-O1")
    older = [option.replace("max", "cortex-a72") for option in emulator]  # which has no products of bfloat16
    outputs = [run(*by, driver, library).stdout for by in ([emulator, older] if emulator else [emulator])]
    assert all(text.endswith(" 0 wrong\n") for text in outputs)
    if target == "aarch64":
        assert ["of bfloat16, too" in text for text in outputs] == [True, False]
        assert wheel.name.endswith("linux_aarch64.whl")
        code = run("aarch64-linux-gnu-objdump", "-d", library).stdout
        assert re.search(r"fmla\s+v\d+\.4s", code), "four floats are not multiplied and added at once"
        assert re.search(r"bfdot\s+v\d+\.4s", code), "nor eight of bfloat16"


@needs_compiler
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_under_sanitizers(sanitizers, tmp_path):
    flags = "-O1", "-g", "-w", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"
    library = compiled("c++", ROOT / "native/src/attention.cc", tmp_path / "library.so", "-shared", "-fPIC", *flags)
    driver = compiled("c++", DRIVER, tmp_path / "driver", *flags)
    assert run(driver, library).stdout.endswith(" 0 wrong\n")


def test_without_a_compiler(sources, tmp_path):
    build = sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path
    failed = run(*build, cwd=sources, check=False, PATH=str(tmp_path))
    assert failed.returncode
    assert re.search(r"jattn-native is compiled from C\+\+, but there is no compiler '[^']*c?[g+]\+\+'", failed.stderr)


@needs_compiler
def test_a_jaxlib_that_the_kernels_were_not_compiled_for(sources, tmp_path):
    """XLA refuses them when they are registered; a call that names them says so, and others take something else."""
    headers = tmp_path / "headers"
    shutil.copytree(jax.ffi.include_dir(), headers)
    (version,) = headers.rglob("c_api.h")
    version.write_text(re.sub(r"(define XLA_FFI_API_MINOR) \d+", r"\1 999", version.read_text()))
    package = shutil.copytree(sources / "jattn_native", tmp_path / "path/jattn_native")
    flags = "-std=c++17", "-O0", "-w", "-shared", "-fPIC", f"-I{headers}"
    run("c++", *flags, sources / "src/attention.cc", "-o", package / "_attention.so")
    output = run(sys.executable, "-c", PROGRAM, PYTHONPATH=f"{package.parent}{os.pathsep}{ROOT}").stdout
    assert "was not compiled for jaxlib" in output and "pip install -U jattn-native jax" in output
    (package / "_attention.so").unlink()
    output = run(sys.executable, "-c", PROGRAM, PYTHONPATH=f"{package.parent}{os.pathsep}{ROOT}").stdout
    assert "jattn-native cannot be loaded; reinstall it" in output
    (package / "__init__.py").write_text("__version__ = '0.0.1'")
    output = run(sys.executable, "-c", PROGRAM, PYTHONPATH=f"{package.parent}{os.pathsep}{ROOT}").stdout
    assert f"it needs jattn-native {VERSION}, not 0.0.1" in output


def test_without_the_package():
    start, end = "import sys\nsys.modules['jattn_native'] = None", "print(jattn.explain(x, x, x).splitlines()[-1])\n"
    output = run(sys.executable, "-c", start + PROGRAM + end).stdout
    assert "implementation='native' cannot do this: it needs the package jattn-native" in output
    assert "native: it needs the package jattn-native" in output
