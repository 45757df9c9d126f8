"""Every public name is in the committed list, has a docstring, and has an example that runs as it stands."""

import doctest
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from docs.site.public_api import LIST, constant_comment, listing, public_names
from tests.test_docs import same_output

NAMES = public_names()
# Examples begin with these names, as the reference says.
GIVEN = {"jax": jax, "jnp": jnp, "np": np, "jattn": jattn}
# Names without an example of their own, and why.
WITHOUT = {
    "jattn.heads.MIXED": "a constant", "jattn.heads.OF_TOKENS": "a constant", "jattn.heads.STATISTICS": "a constant",
    "jattn.heads.WEAK": "a constant", "jattn.sharding.LAYOUTS": "a constant", "jattn.interop.FAMILIES": "a constant",
    "jattn.testing.AT_SIZE": "a constant", "jattn.testing.CASES": "a constant",
}  # fmt: skip
# A method's example is the one of its class.
NEED = sorted(name for name in NAMES.keys() - WITHOUT.keys() if name.rpartition(".")[0] not in NAMES)
FAST = {"jattn.dot_product_attention", "jattn.masks.Causal", "jattn.score_mods.SoftCap"}


class SameOutput(doctest.OutputChecker):
    """As ``tests.test_docs``: words as they stand, the last digit of a fraction may differ by one."""

    def check_output(self, want, got, optionflags):
        return same_output(got, want) is None


def test_the_list_of_public_names_is_up_to_date():
    assert listing() == LIST.read_text(), "run python -m docs.site.public_api, and note in CHANGELOG.md what changed"


def _documented(value) -> str:
    return inspect.getdoc(value) or ""


def test_public_names_have_docstrings():
    assert [name for name, value in NAMES.items() if name not in WITHOUT and not value.__doc__] == []


@pytest.mark.parametrize("name", WITHOUT)
def test_constants_and_types_have_a_comment_that_documents_them(name):
    assert constant_comment(name)


@pytest.mark.slow_except(*FAST)
@pytest.mark.parametrize("name", NEED)
def test_an_example_runs_as_it_stands(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(_documented(NAMES[name]), dict(GIVEN), name, name, 0)
    assert example.examples, f"{name} has no example (>>>) in its docstring"
    report: list[str] = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        doctest.DocTestRunner(SameOutput()).run(example, out=report.append)
    assert not report, "".join(report)
