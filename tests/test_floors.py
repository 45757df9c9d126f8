"""Import rules: in jattn, imports only point down; in experiments, they follow a table.

Both tables are in docs/architecture.md. The modules of jattn are listed by floor and, on a floor, by row. A module may
import modules of earlier rows, but not of its own row. Files of one package may import each other, but not in a cycle.
Imports inside functions and for type checking count as well, since they are dependencies too.

The rooms of experiments are listed with what each may import. Import cycles are forbidden there, too.
"""

import ast
import graphlib
import importlib.util
from pathlib import Path

import pytest

JATTN = Path(__file__).parents[1] / "jattn"
EXPERIMENTS = Path(__file__).parents[1] / "experiments"
DOCS = Path(__file__).parents[1] / "docs"

# The script that draws the tables also reads them.
_spec = importlib.util.spec_from_file_location("drawing", DOCS / "drawing.py")
drawing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(drawing)

DOCUMENT = (DOCS / "architecture.md").read_text(encoding="utf-8")
HOUSE = drawing.layers(DOCUMENT)  # floor 0 first; one string is one row
ROOMS = drawing.rooms(DOCUMENT)


def rows(house: list[list[str]]) -> dict[str, int]:
    """The row of each module, counted from the bottom."""
    flat = [row for floor in house for row in floor]
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


def offences(package: Path, house: list[list[str]]) -> list[str]:
    """Every import in ``package`` that does not point down, one message each."""
    row_of, found = rows(house), []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        module = path.parts[0].removesuffix(".py")
        if module == "__init__":
            continue  # the roof: it re-exports the public names of all floors
        if module not in row_of:
            found.append(f"{path}: not in the table; add {module!r} to docs/architecture.md")
            continue
        for line, name in imports(file, package):
            top, _, rest = name.partition(".")
            if top in ("experiments", "tests"):
                found.append(f"{path}:{line}: imports {name}, which is not part of the library")
            if top != package.name:
                continue
            target = rest.partition(".")[0]
            inside = target == module and len(path.parts) > 1  # an import within a package
            if target not in row_of:
                found.append(f"{path}:{line}: imports {name} from the roof; import the module that defines it")
            elif not inside and row_of[target] >= row_of[module]:
                found.append(f"{path}:{line}: imports {name}, which does not stand below {module}")
    return found + circles(package, modules(package, "*/**/*.py"))


def trespasses(package: Path, rooms: dict[str, str]) -> list[str]:
    """Every import in ``package`` that ``rooms`` does not allow, one message each."""
    files, found = modules(package), []
    for name, file in files.items():
        module = name.removeprefix(package.name).removeprefix(".")
        room = module.partition(".")[0]
        allowed = rooms.get(module, rooms.get(room))
        if allowed is None:
            if module:
                found.append(f"{module}: not in the table; add it to docs/architecture.md")
            continue
        known = [*allowed.split(), *([room] if module not in rooms or module == room else [])]
        for line, imported in imports(file, package):
            if imported.partition(".")[0] in (package.name, "tests"):
                target = (_longest(imported, files) or imported).removeprefix(f"{package.name}.")
                if not any(f"{target}.".startswith(f"{one}.") for one in known):
                    found.append(f"{module}:{line}: imports {imported}; {module} may import {', '.join(known)}")
    return found + circles(package, files)


def modules(package: Path, pattern: str = "**/*.py") -> dict[str, Path]:
    """The files of ``package``, keyed by dotted module name."""
    files = {}
    for file in sorted(package.glob(pattern)):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        files[".".join(parts).removesuffix(".__init__")] = file
    return files


def circles(package: Path, files: dict[str, Path]) -> list[str]:
    """The first import cycle among ``files``, if there is one."""
    needs = {name: {_longest(target, files) for _, target in imports(files[name], package)} for name in files}
    try:
        graphlib.TopologicalSorter({name: targets - {None} for name, targets in needs.items()}).prepare()
    except graphlib.CycleError as error:
        return ["imports go in a circle: " + " <- ".join(error.args[1])]
    return []


def _longest(name: str, files: dict[str, Path]) -> str | None:
    """The module that contains a dotted name: `jattn.kernels.cudnn` for `jattn.kernels.cudnn.unsupported_reason`."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name or None


def test_imports_point_down():
    assert not offences(JATTN, HOUSE)


def test_experiments_keep_to_their_rooms():
    assert not trespasses(EXPERIMENTS, ROOMS)


def test_the_drawing_is_that_of_the_tables():
    assert (DOCS / "architecture.svg").read_text(encoding="utf-8") == drawing.draw(DOCUMENT)


def test_a_call_walks_through_files():
    steps = drawing.steps(DOCUMENT)
    assert len(steps) == 10 and all((JATTN / file).is_file() for file, _ in steps)


def test_there_are_rooms():
    assert set(ROOMS) <= {".".join(name.split(".")[1:]) for name in modules(EXPERIMENTS)}, "a room without a file"


def test_there_is_a_house():
    modules = {path.stem for path in JATTN.glob("*.py")}
    assert {"masks", "api"} <= modules, "read the wrong folder?"


PLANTED = {
    "up, relative, in a function": ("cellar.py", "def f():\n    from . import attic"),
    "same row": ("stairs.py", "from .lift import cabin"),
    "circle through a package's roof": ("rooms/bath.py", "from house.rooms import towel"),
}


@pytest.mark.parametrize("path, code", PLANTED.values(), ids=PLANTED)
def test_a_planted_offence_is_caught(tmp_path, path, code):
    house = [["cellar", "pantry"], ["rooms", "stairs lift", "attic"]]
    package = tmp_path / "house"
    sound = {
        "__init__.py": "from house.attic import Window as Window",
        "cellar.py": "import os\nfrom housekeeping import attic",
        "pantry.py": "from .cellar import shelf",
        "rooms/__init__.py": "from . import den as den\nfrom house.rooms import den as den",
        "rooms/den.py": "from ..pantry import jam\nfrom .bath import towel\nimport house.cellar",
        "rooms/bath.py": "import house.cellar",
        "stairs.py": "from . import rooms, pantry",
        "lift.py": "from house.rooms import den",
        "attic.py": "import house.stairs\nimport house.rooms.den\nfrom house import cellar",
    }
    for name, text in sound.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert offences(package, house) == []

    (package / path).write_text(code)
    assert len(offences(package, house)) == 1, offences(package, house)


TRESPASSES = {
    "in a function": ("cellar/shelf.py", "def f():\n    from house.attic import trunk"),
    "a file of a room that is closed": ("hall.py", "from house.attic.trunk import coat"),
    "circle in a room": ("cellar/jar.py", "from house.cellar.shelf import jam"),
}


@pytest.mark.parametrize("path, code", TRESPASSES.values(), ids=TRESPASSES)
def test_a_planted_trespass_is_caught(tmp_path, path, code):
    rooms = {"cellar": "", "cellar.door": "attic.hatch", "attic": "", "hall": "cellar attic.hatch"}
    package = tmp_path / "house"
    sound = {
        "__init__.py": "",
        "cellar/__init__.py": "",
        "cellar/shelf.py": "from house.cellar import jar\nfrom housekeeping import attic",
        "cellar/jar.py": "import os",
        "cellar/door.py": "from house.attic import hatch",
        "attic/__init__.py": "",
        "attic/hatch.py": "",
        "attic/trunk.py": "from . import hatch",
        "hall.py": "from house.cellar.shelf import jam\nimport house.attic.hatch",
    }
    for name, text in sound.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert trespasses(package, rooms) == []

    (package / path).write_text(code)
    assert len(trespasses(package, rooms)) == 1, trespasses(package, rooms)
