"""Import rules: in jattn and in jattn_experiments, imports only point down.

Both tables are in docs/architecture.md. Modules are listed by layer and, in a layer, by row. A module may import modules
of earlier rows, but not of its own row. Files of one package may import each other, but not in a cycle. Imports inside
functions and for type checking count as well, since they are dependencies too.
The tests of jattn import nothing from the experiments, nor from their tests; nothing imports tools.
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
TOOLS = Path(__file__).parents[1] / "tools"
DOCS = Path(__file__).parents[1] / "docs"
TESTS = Path(__file__).parent

# The script that draws the tables also reads them.
_spec = importlib.util.spec_from_file_location("drawing", DOCS / "drawing.py")
drawing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(drawing)

DOCUMENT = (DOCS / "architecture.md").read_text(encoding="utf-8")
# The lowest first; one string is one row.
LAYERS, LAYERS_OF_EXPERIMENTS = drawing.layers(DOCUMENT), drawing.layers(DOCUMENT, "experiments")


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
            if top != package.name:
                if top in ("tests", "tools") or (top, package.name) == ("jattn_experiments", "jattn"):
                    found.append(f"{path}:{line}: imports {name}, which is not part of the library")
                continue
            target = rest.partition(".")[0]
            inside = target == module and len(path.parts) > 1  # an import within a package
            if target not in row_of:
                found.append(f"{path}:{line}: imports {name} from the whole package; import the module that defines it")
            elif not inside and row_of[target] >= row_of[module]:
                found.append(f"{path}:{line}: imports {name}, which does not stand below {module}")
    return found + cycles(package, modules(package, "*/**/*.py"))


def above_the_tools(package: Path, allowed: str) -> list[str]:
    """Every import of this repository in ``package`` that is neither its own nor ``allowed``, one message each."""
    files, known = modules(package), (package.name, *allowed.split())
    wrong = [
        f"{name}:{line}: imports {imported}; {package.name} may import {allowed}"
        for name, file in files.items()
        for line, imported in imports(file, package)
        if imported.partition(".")[0] in ("jattn", "jattn_experiments", "tests", "tools")
        and not any(f"{imported}.".startswith(f"{one}.") for one in known)
    ]
    return wrong + cycles(package, files)


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


def of_the_experiments(tests: Path) -> list[str]:
    """Every import from the experiments, or from their tests, in the tests of jattn, one message each."""
    return [
        f"{file.relative_to(tests)}:{line}: imports {name}; the tests of jattn need jattn alone"
        for file in sorted((tests / "jattn").rglob("*.py"))
        for line, name in imports(file, tests)
        if f"{name}.".startswith(("jattn_experiments.", f"{tests.name}.experiments."))
    ]


def test_imports_point_down():
    assert not pointing_up(JATTN, LAYERS)


def test_imports_of_the_experiments_point_down():
    assert not pointing_up(EXPERIMENTS, LAYERS_OF_EXPERIMENTS)


def test_the_tests_of_jattn_import_nothing_from_the_experiments():
    assert not of_the_experiments(TESTS)


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    from jattn_experiments.bench import peers",
        "from ..experiments import processes",
        "import tests.experiments",
    ],
)
def test_a_planted_import_from_the_experiments_is_caught(tmp_path, code):
    file = tmp_path / "tests" / "jattn" / "test_masks.py"
    file.parent.mkdir(parents=True)
    file.write_text("import jattn\nfrom tests.jattn import test_api\nfrom tests import reference")
    assert of_the_experiments(tmp_path / "tests") == []
    file.write_text(code)
    assert len(of_the_experiments(tmp_path / "tests")) == 1


def test_tools_import_what_they_may():
    assert not above_the_tools(TOOLS, drawing.allowed_imports(DOCUMENT, "tools")["tools"])


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
    assert len(steps) == 15 and [file for file in files if file in steps] == steps


@pytest.mark.parametrize(
    "package, layers", [(JATTN, LAYERS), (EXPERIMENTS, LAYERS_OF_EXPERIMENTS)], ids=["jattn", "experiments"]
)
def test_all_in_the_table_exist(package, layers):
    assert set(rows(layers)) <= {path.stem for path in package.iterdir()}, "a name without a file"


def test_the_folder_is_that_of_jattn():
    modules = {path.stem for path in JATTN.glob("*.py")}
    assert {"masks", "api"} <= modules, "read the wrong folder?"


PLANTED = {
    "up, relative, in a function": ("numbers.py", "def f():\n    from . import modules"),
    "same row": ("api.py", "from .cache import Cache"),
    "tools": ("arrays.py", "def f():\n    import tools.chips"),
    "cycle through a package's __init__": ("kernels/blocks.py", "from library.kernels import Block"),
}


@pytest.mark.parametrize("path, code", PLANTED.values(), ids=PLANTED)
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


@pytest.mark.parametrize(
    "code",
    ["def f():\n    from jattn_experiments.train import Setup", "import tests.reference", "from tools import write"],
)
def test_a_planted_import_above_the_tools_is_caught(tmp_path, code):
    package = tmp_path / "tools"
    package.mkdir()
    (package / "read.py").write_text("import os\nimport jattn.masks\nfrom jattn_experiments.bench import suite")
    (package / "write.py").write_text("from tools import read")
    assert above_the_tools(package, "jattn jattn_experiments.bench") == []

    (package / "read.py").write_text(code)
    assert len(above_the_tools(package, "jattn jattn_experiments.bench")) == 1
