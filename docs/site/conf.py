"""Sphinx's settings for jattn's site; ``build.py`` prepares the pages and calls it."""

import inspect
import operator
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature

import jattn
from docs.site.public_api import public_names
from docs.site.search import write_sections

project = "jattn"
author = "The jattn authors"
copyright = "The jattn authors, Apache-2.0"
version = release = jattn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
exclude_patterns = ["extra"]
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give types and shapes in the letters of the axes
autodoc_class_signature = "mixed"
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_use_param = False  # parameters that share a description stay together
napoleon_attr_annotations = False
napoleon_custom_sections = [("Example", "example")]

html_theme = "furo"
html_title = f"jattn {release}"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
templates_path = [str(Path(__file__).parent / "templates")]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True


def _reachable(mapping: dict[str, str]) -> dict[str, tuple[str, None]]:
    """The object lists that can be read now: a build without a network has no links to other projects."""
    reachable = {}
    for name, address in mapping.items():
        try:
            with urllib.request.urlopen(f"{address}/objects.inv", timeout=5):
                reachable[name] = (address, None)
        except (urllib.error.URLError, TimeoutError):
            pass
    return reachable


intersphinx_mapping = _reachable(
    {
        "python": "https://docs.python.org/3",
        "numpy": "https://numpy.org/doc/stable",
        "jax": "https://docs.jax.dev/en/latest",
        "flax": "https://flax.readthedocs.io/en/latest",
    }
)

# Where a name is defined, and the public name that its page has.
_PUBLIC = {
    f"{value.__module__}.{value.__qualname__}": name
    for name, value in public_names().items()
    if (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__.startswith("jattn.")
}


def _where(name: str) -> object:
    """The object of a dotted name of jattn, public or not; None if there is none."""
    try:
        return operator.attrgetter(name.partition(".")[2])(jattn)
    except AttributeError:
        return None


def _public_reference(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element) -> Element | None:
    """Resolves a reference to where a name is defined; an unknown name of jattn is an error."""
    target = node.get("reftarget", "")
    if not target.startswith("jattn."):
        return None
    domain = env.get_domain("py")
    if name := _PUBLIC.get(target):
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, contnode)
    if _where(target) is None:
        logging.getLogger(__name__).warning("there is no %r", target, location=node)
    return None


def _link_names(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Links public names that stand alone as code in a docstring: those of its own module, or with their module."""
    names, module = public_names(), ".".join(name.split(".")[: 2 if name.split(".")[1][0].islower() else 1])

    def new(code: re.Match) -> str:
        known = [
            full for full in (f"{module}.{code[1]}", f"jattn.{code[1]}", code[1]) if full in names and full != name
        ]
        return f":py:obj:`{code[1]} <{known[0]}>`" if known else code[0]

    lines[:] = [line if ">>>" in line else re.sub(r"``([\w.]+)``", new, line) for line in lines]
    lines[:] = [re.sub(r"(?:``)?docs/([\w-]+)\.md(?:``)?", r":doc:`/\1`", line) for line in lines]


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: object, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """The parameters of ``__init__`` where a metaclass hides them; defaults by their names, not as objects."""
    if getattr(obj, "_is_protocol", False):
        return "", result  # nobody calls it
    if what == "class" and signature == "(*args, **kwargs)":
        parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
        bare = inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in parameters])
        signature = stringify_signature(bare)
    for shown, name in (
        (r"<(?:class|function) '?(?:\w+\.)*(\w+)(?:\.<locals>\.\w+)?'?>", r"\1"),
        (r"<[\w.]+ object>", "..."),
        (r"mappingproxy\((.*?)\)", r"\1"),
    ):
        signature = signature and re.sub(shown, name, signature)
    return signature, result


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _link_names)
    app.connect("missing-reference", _public_reference)
    app.connect("build-finished", write_sections)
