"""Import rules: in jattn, imports only point down; in jattn_experiments, they follow a table.

Both tables are in docs/architecture.md. The modules of jattn are listed by layer and, in a layer, by row. A module may
import modules of earlier rows, but not of its own row. Files of one package may import each other, but not in a cycle.
Imports inside functions and for type checking count as well, since they are dependencies too.

The packages of jattn_experiments are listed with what each may import. Import cycles are forbidden there, too.
"""

import ast
import graphlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import jax.numpy as jnp
import pytest

import jattn
from jattn.masks import Causal

JATTN = Path(__file__).parents[1] / "jattn"
EXPERIMENTS = Path(__file__).parents[1] / "experiments" / "jattn_experiments"
DOCS = Path(__file__).parents[1] / "docs"

# The script that draws the tables also reads them.
_spec = importlib.util.spec_from_file_location("drawing", DOCS / "drawing.py")
drawing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(drawing)

DOCUMENT = (DOCS / "architecture.md").read_text(encoding="utf-8")
LAYERS = drawing.layers(DOCUMENT)  # the lowest first; one string is one row
ALLOWED = drawing.allowed_imports(DOCUMENT)


def rows(layers: list[list[str]]) -> dict[str, int]:
    """The row of each module, counted from the bottom."""
    flat = [row for layer in layers for row in layer]
    return {name: index for index, row in enumerate(flat) for name in row.split()}


def imports(file: Path, package: Path) -> list[tuple[int, str]]:
    """The (line, dotted name) of each import in ``file``; relative names are made absolute."""
    here = [package.name, *file.relative_to(package).parent.parts]
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            # `from jattn import masks` names a module, `from jattn.masks import Causal` something inside one; with
            # the imported name appended, the first two parts name the module in both cases.
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def pointing_up(package: Path, layers: list[list[str]]) -> list[str]:
    """Every import in ``package`` that does not point down, one message each."""
    row_of, found = rows(layers), []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        module = path.parts[0].removesuffix(".py")
        if module == "__init__":
            continue  # it re-exports the public names of all layers
        if module not in row_of:
            found.append(f"{path}: not in the table; add {module!r} to docs/architecture.md")
            continue
        for line, name in imports(file, package):
            top, _, rest = name.partition(".")
            if top in ("jattn_experiments", "tests"):
                found.append(f"{path}:{line}: imports {name}, which is not part of the library")
            if top != package.name:
                continue
            target = rest.partition(".")[0]
            inside = target == module and len(path.parts) > 1  # an import within a package
            if target not in row_of:
                found.append(f"{path}:{line}: imports {name} from the whole package; import the module that defines it")
            elif not inside and row_of[target] >= row_of[module]:
                found.append(f"{path}:{line}: imports {name}, which does not stand below {module}")
    return found + cycles(package, modules(package, "*/**/*.py"))


def outside_the_table(package: Path, allowed: dict[str, str]) -> list[str]:
    """Every import in ``package`` that ``allowed`` does not list, one message each."""
    files, found = modules(package), []
    for name, file in files.items():
        module = name.removeprefix(package.name).removeprefix(".")
        folder = module.partition(".")[0]
        targets = allowed.get(module, allowed.get(folder))
        if targets is None:
            if module:
                found.append(f"{module}: not in the table; add it to docs/architecture.md")
            continue
        known = [*targets.split(), *([folder] if module not in allowed or module == folder else [])]
        for line, imported in imports(file, package):
            if imported.partition(".")[0] in (package.name, "tests"):
                target = (_longest(imported, files) or imported).removeprefix(f"{package.name}.")
                if not any(f"{target}.".startswith(f"{one}.") for one in known):
                    found.append(f"{module}:{line}: imports {imported}; {module} may import {', '.join(known)}")
    return found + cycles(package, files)


def modules(package: Path, pattern: str = "**/*.py") -> dict[str, Path]:
    """The files of ``package``, keyed by dotted module name."""
    files = {}
    for file in sorted(package.glob(pattern)):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        files[".".join(parts).removesuffix(".__init__")] = file
    return files


def cycles(package: Path, files: dict[str, Path]) -> list[str]:
    """The first import cycle among ``files``, if there is one."""
    needs = {name: {_longest(target, files) for _, target in imports(files[name], package)} for name in files}
    try:
        graphlib.TopologicalSorter({name: targets - {None} for name, targets in needs.items()}).prepare()
    except graphlib.CycleError as error:
        return ["imports go in a cycle: " + " <- ".join(error.args[1])]
    return []


def _longest(name: str, files: dict[str, Path]) -> str | None:
    """The module that contains a dotted name: `jattn.kernels.cudnn` for `jattn.kernels.cudnn.unsupported_reason`."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name or None


def test_imports_point_down():
    assert not pointing_up(JATTN, LAYERS)


def test_experiments_import_what_they_may():
    assert not outside_the_table(EXPERIMENTS, ALLOWED)


def test_the_drawing_is_that_of_the_tables():
    assert (DOCS / "architecture.svg").read_text(encoding="utf-8") == drawing.draw(DOCUMENT)


def entered(call: Callable[[], object]) -> list[str]:
    """The files of jattn whose functions ``call`` calls, in the order in which it first does."""
    package, files, outer = str(Path(jattn.__file__).parent), dict[str, None](), sys.getprofile()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.setdefault(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(outer)
    return [Path(file).relative_to(package).as_posix() for file in files]


def test_a_call_walks_through_files():
    steps = [file for file, _ in drawing.steps(DOCUMENT)]
    x = jnp.zeros((1, 1040, 1, 3))  # of a length that no other test has: a program in the cache would not be traced
    files = entered(lambda: jattn.dot_product_attention(x, x, x, mask=Causal(), implementation="blockwise"))
    assert len(steps) == 14 and [file for file in files if file in steps] == steps


def test_the_packages_of_experiments_exist():
    assert set(ALLOWED) <= {".".join(name.split(".")[1:]) for name in modules(EXPERIMENTS)}, "a line without a file"


def test_the_folder_is_that_of_jattn():
    modules = {path.stem for path in JATTN.glob("*.py")}
    assert {"masks", "api"} <= modules, "read the wrong folder?"


PLANTED_IN_JATTN = {
    "up, relative, in a function": ("numbers.py", "def f():\n    from . import modules"),
    "same row": ("api.py", "from .cache import Cache"),
    "cycle through a package's __init__": ("kernels/blocks.py", "from library.kernels import Block"),
}


@pytest.mark.parametrize("path, code", PLANTED_IN_JATTN.values(), ids=PLANTED_IN_JATTN)
def test_a_planted_import_that_points_up_is_caught(tmp_path, path, code):
    layers = [["numbers", "arrays"], ["kernels", "api cache", "modules"]]
    package = tmp_path / "library"
    sound = {
        "__init__.py": "from library.modules import Layer as Layer",
        "numbers.py": "import os\nfrom library_tools import modules",
        "arrays.py": "from .numbers import one",
        "kernels/__init__.py": "from . import dense as dense\nfrom library.kernels import dense as dense",
        "kernels/dense.py": "from ..arrays import zeros\nfrom .blocks import Block\nimport library.numbers",
        "kernels/blocks.py": "import library.numbers",
        "api.py": "from . import kernels, arrays",
        "cache.py": "from library.kernels import dense",
        "modules.py": "import library.api\nimport library.kernels.dense\nfrom library import numbers",
    }
    for name, text in sound.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert pointing_up(package, layers) == []

    (package / path).write_text(code)
    assert len(pointing_up(package, layers)) == 1, pointing_up(package, layers)


PLANTED_IN_EXPERIMENTS = {
    "in a function": ("data/copy.py", "def f():\n    from library.model import layers"),
    "a file of a package that is closed": ("run.py", "from library.model.layers import Layer"),
    "cycle in a package": ("data/draw.py", "from library.data.copy import Batch"),
}


@pytest.mark.parametrize("path, code", PLANTED_IN_EXPERIMENTS.values(), ids=PLANTED_IN_EXPERIMENTS)
def test_a_planted_import_outside_the_table_is_caught(tmp_path, path, code):
    allowed = {"data": "", "data.load": "model.saved", "model": "", "run": "data model.saved"}
    package = tmp_path / "library"
    sound = {
        "__init__.py": "",
        "data/__init__.py": "",
        "data/copy.py": "from library.data import draw\nfrom library_tools import model",
        "data/draw.py": "import os",
        "data/load.py": "from library.model import saved",
        "model/__init__.py": "",
        "model/saved.py": "",
        "model/layers.py": "from . import saved",
        "run.py": "from library.data.copy import Batch\nimport library.model.saved",
    }
    for name, text in sound.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert outside_the_table(package, allowed) == []

    (package / path).write_text(code)
    assert len(outside_the_table(package, allowed)) == 1, outside_the_table(package, allowed)
