"""What several tests of the commands need."""

import pytest

from tests.jattn.test_language_models import write_gguf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The file of a tiny language model with its tokenizer."""
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(file)
    return str(file)
