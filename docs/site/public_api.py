"""The public names of jattn, listed in ``public_api.txt``, which ``python -m docs.site.public_api`` writes."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_suffix(".txt")
MODULES = [
    "jattn",
    "jattn.masks",
    "jattn.score_mods",
    "jattn.positions",
    "jattn.heads",
    "jattn.sharding",
    "jattn.nnx",
    "jattn.linen",
    "jattn.interop",
    "jattn.plots",
    "jattn.reports",
    "jattn.circuits",
    "jattn.testing",
]


def public_names() -> dict[str, Any]:
    """Every public function, class and constant by its full name; a method by ``module.Class.method``."""
    names: dict[str, Any] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            names[f"{module_name}.{name}"] = value
            if inspect.isclass(value):
                names |= {f"{module_name}.{name}.{method}": function for method, function in _methods(value)}
    return names


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class brings, not those that override a method of another class."""
    inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
    for name, value in vars(kind).items():
        is_its = isinstance(value, property | classmethod) or f"{kind.__name__}." in getattr(value, "__qualname__", "")
        if is_its and not name.startswith("_") and name not in inherited:
            yield name, getattr(kind, name)


def constant_comment(name: str) -> str:
    """The comment ``#:`` above the definition of a constant or type, which has no docstring."""
    pattern = re.compile(rf"^((?:#: .*\n)+){name.rpartition('.')[2]}\b.* =", re.MULTILINE)
    for file in sorted((Path(__file__).parents[2] / "jattn").rglob("*.py")):
        if match := pattern.search(file.read_text(encoding="utf-8")):
            return " ".join(line[3:] for line in match[1].splitlines())
    raise LookupError(f"{name}: expected a comment '#:' above its definition")


def listing() -> str:
    """One line a name: its mark, its parameters, and which of them have defaults. New names are experimental."""
    known = marks()
    lines = (
        f"{known.get(name, 'experimental'):<13}{name}{_parameters(value)}" for name, value in public_names().items()
    )
    return "\n".join(sorted(lines, key=lambda line: line.split()[1])) + "\n"


def marks() -> dict[str, str]:
    """``"stable"`` or ``"experimental"`` for every name in the list."""
    words = (line.split() for line in LIST.read_text(encoding="utf-8").splitlines())
    return {name.partition("(")[0]: mark for mark, name, *_ in words}


def _parameters(value: Any) -> str:
    if not (inspect.isclass(value) or inspect.isroutine(value)) or getattr(value, "_is_protocol", False):
        return ""
    function = value
    if inspect.isclass(value):  # whose own signature a metaclass may hide
        function = value.__new__ if issubclass(value, tuple) else value.__init__
    signature = inspect.signature(function)
    plain = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=inspect.Parameter.empty if parameter.default is inspect.Parameter.empty else ...,
        )
        for name, parameter in signature.parameters.items()
        if name not in ("self", "_cls")
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)).replace(
        "=Ellipsis", "=..."
    )


if __name__ == "__main__":
    LIST.write_text(listing())
