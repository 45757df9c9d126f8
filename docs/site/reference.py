"""The pages of the reference: one for every public name, one for every module."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from docs.site.public_api import MODULES, constant_comment, marks, public_names


def write_reference(folder: Path) -> None:
    """Writes a page for every public name, and one for every module."""
    names, stable = public_names(), marks()
    folder.mkdir(exist_ok=True)
    shown = [name for name in names if name.rpartition(".")[0] in MODULES]
    for name in shown:
        methods = [other.rpartition(".")[2] for other in names if other.rpartition(".")[0] == name]
        if inspect.isclass(names[name]) and getattr(vars(names[name]).get("__call__"), "__doc__", None):
            methods.insert(0, "__call__")
        (folder / f"{name}.rst").write_text(_name_page(name, names[name], methods, stable[name]))
    for module in MODULES:
        inside = [name for name in shown if name.rpartition(".")[0] == module]
        (folder / f"{module}.rst").write_text(_module_page(module, inside, names, stable))


def _name_page(name: str, value: Any, methods: list[str], mark: str) -> str:
    fields = ""
    if inspect.isclass(value):
        directive = f".. autoclass:: {name}\n" + (f"   :members: {', '.join(methods)}\n" if methods else "")
        # No entries of their own: a search for "window" or "scale" would find them first.
        explained = re.findall(r"^    (\w+): .*  #: (.*)$", inspect.getsource(value), re.MULTILINE)
        fields = "".join(f"- ``{field}``: {meaning}\n" for field, meaning in explained)
        fields = f"The fields:\n\n{fields}" if fields else ""
    elif inspect.isroutine(value):
        directive = f".. autofunction:: {name}\n"
    else:
        directive = f".. py:data:: {name}\n\n   {constant_comment(name)}\n"
    note = "" if mark == "stable" else f"*{mark.capitalize()}*: see :doc:`/reference`.\n\n"
    seen = name.startswith(("jattn.masks", "jattn.score_mods"))
    more = "\n:doc:`/masks` shows each as a picture.\n" if seen else ""
    return f"{name}\n{'=' * len(name)}\n\n{note}{directive}\n{fields}{more}"


def _module_page(module: str, inside: list[str], names: dict[str, Any], stable: dict[str, str]) -> str:
    text = re.sub(r"docs/([\w-]+)\.md", r":doc:`/\1`", inspect.getdoc(importlib.import_module(module)) or "")
    rows = []
    for name in inside:
        has_docstring = inspect.isclass(names[name]) or inspect.isroutine(names[name])
        about = (inspect.getdoc(names[name]) or "") if has_docstring else constant_comment(name)
        first = about.partition("\n\n")[0].replace("\n", " ")
        mark = "" if stable[name] == "stable" else f" *({stable[name]})*"
        rows.append(f"   * - :doc:`{name.rpartition('.')[2]} <{name}>`\n     - {first}{mark}\n")
    table = ".. list-table::\n   :widths: 30 70\n\n" + "".join(rows)
    tree = ".. toctree::\n   :hidden:\n\n" + "".join(f"   {name.rpartition('.')[2]} <{name}>\n" for name in inside)
    return f"{module}\n{'=' * len(module)}\n\n{text}\n\n{table}\n{tree}"


def list_modules() -> str:
    rows = [
        f"| [`{module}`](reference/{module}.rst) | {_first_line(importlib.import_module(module))} |\n"
        for module in MODULES
    ]
    return "\n| module | |\n|---|---|\n" + "".join(rows) + "\n"


def _first_line(value: Any) -> str:
    line = (inspect.getdoc(value) or "").partition("\n")[0]
    return line.removeprefix("jattn: ").replace("``", "`")
