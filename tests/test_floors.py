"""The house stands: in jattn, imports point down only.

The modules are listed floor by floor and, on a floor, row by row. A module may import what stands in an earlier row;
modules of one row do not know each other; the files of a package may, but not in a circle. Imports inside functions
and for type checking count like any other, because who needs whom is the same question there.
"""

import ast
import graphlib
from pathlib import Path

import pytest

JATTN = Path(__file__).parents[1] / "jattn"

# Floor 0 first; one string is one row. A name stands for a module or, as `kernels`, for a package with its files.
HOUSE = [
    ["mods tables", "fields", "masks", "score_mods positions"],
    ["staged lifting hoist dropout", "attention", "blocks", "one_block", "online_softmax"],
    ["request", "batching placement", "kernels", "choice", "api"],
    ["cache", "ring", "sharding", "heads", "multi_head"],
    ["flax_common", "nnx_functions linen_functions", "nnx linen", "plots interop"],
]


def rows(house: list[list[str]]) -> dict[str, int]:
    """The row of each module, counted from the bottom of the house."""
    flat = [row for floor in house for row in floor]
    return {name: index for index, row in enumerate(flat) for name in row.split()}


def imports(file: Path, package: Path) -> list[tuple[int, str]]:
    """The (line, dotted name) of all that ``file`` imports; relative names are made absolute."""
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
    """Every import in ``package`` that does not point down, as one line of text each."""
    row_of, found = rows(house), []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        module = path.parts[0].removesuffix(".py")
        if module == "__init__":
            continue  # the roof: it gathers the public names of every floor
        if module not in row_of:
            found.append(f"{path}: not in the table; add {module!r} to HOUSE in tests/test_floors.py and to the design")
            continue
        for line, name in imports(file, package):
            top, _, rest = name.partition(".")
            if top in ("experiments", "tests"):
                found.append(f"{path}:{line}: imports {name}, which is not part of the library")
            if top != package.name:
                continue
            target = rest.partition(".")[0]
            inside = target == module and len(path.parts) > 1  # one file of a package imports another
            if target not in row_of:
                found.append(f"{path}:{line}: imports {name} from the roof; import the module that defines it")
            elif not inside and row_of[target] >= row_of[module]:
                found.append(f"{path}:{line}: imports {name}, which does not stand below {module}")
    return found + circles(package)


def circles(package: Path) -> list[str]:
    """The first circle of files that import one another inside one package of ``package``, if there is one."""
    files = {}
    for file in package.glob("*/**/*.py"):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        files[".".join(parts).removesuffix(".__init__")] = file
    needs = {name: {_longest(target, files) for _, target in imports(files[name], package)} for name in files}
    try:
        graphlib.TopologicalSorter({name: targets - {None} for name, targets in needs.items()}).prepare()
    except graphlib.CycleError as error:
        return ["imports go in a circle: " + " <- ".join(error.args[1])]
    return []


def _longest(name: str, files: dict[str, Path]) -> str | None:
    """The file that a dotted name lies in: `jattn.kernels.cudnn.unsupported_reason` lies in `jattn.kernels.cudnn`."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name or None


def test_imports_point_down():
    assert not offences(JATTN, HOUSE)


def test_there_is_a_house():
    modules = {path.stem for path in JATTN.glob("*.py")}
    assert {"masks", "attention", "api"} <= modules, "read the wrong folder?"


PLANTED = {
    "up, absolute": ("cellar.py", "import house.attic"),
    "up, from": ("cellar.py", "from house.attic import Window"),
    "up, module from package": ("cellar.py", "from house import attic"),
    "up, relative": ("cellar.py", "from .attic import Window"),
    "up, relative module": ("cellar.py", "from . import attic"),
    "up, in a function": ("cellar.py", "def f():\n    import house.attic"),
    "up, for types": ("cellar.py", "import typing\nif typing.TYPE_CHECKING:\n    import house.attic"),
    "up, from a package's file": ("rooms/den.py", "from ..attic import Window"),
    "up, into a package's file": ("cellar.py", "from .rooms.den import sofa"),
    "same floor, row below": ("cellar.py", "from .pantry import jam"),
    "same row": ("stairs.py", "from .lift import cabin"),
    "itself": ("cellar.py", "import house.cellar"),
    "circle in a package": ("rooms/bath.py", "from .den import sofa"),
    "circle through a package's roof": ("rooms/bath.py", "from house.rooms import towel"),
    "roof": ("attic.py", "from house import Cat"),
    "roof, whole": ("attic.py", "import house"),
    "not in the table": ("annexe.py", "import os"),
    "experiments": ("attic.py", "from experiments import run"),
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
