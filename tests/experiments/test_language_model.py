"""The experiments' command on a language model: a tiny random one, with a tokenizer of 37 words, and a tiny toy model."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import heads, interop
from jattn_experiments.__main__ import main
from jattn_experiments.config import Claim, Config, Evaluate, LanguageModel, Mesh, Model, Task, Train
from jattn_experiments.measure import head_groups, language_metrics, language_model, saved_model, sequences
from jattn_experiments.run import prepared
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged
from tests.jattn.test_language_models import CONFIGS, VOCABULARY, tensors_of

FIRST = "<s>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    words = "the of a to and is in that for be it as are an or if by not with object this value class name type".split()
    names = ["[UNK]", *words]
    names += [f"w{i}" for i in range(VOCABULARY - 1 - len(names))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(FIRST, special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(tensors_of("llama"), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    return folder


@pytest.fixture
def config(folder):
    claims = [
        Claim("chosen", "Some head looks back.", "chosen/previous_token", 1, at_least=0.01),
        Claim("rise", "It is needed.", "rise/induction/second copy", 1, at_least=100.0),
        Claim("toy", "It looks somewhere.", "toy:best/current_token", 1, at_least=0.001),
    ]
    return Config(
        "tiny",
        "A tiny one.",
        task=Task("induction", symbols=8, length=12, shortest=3, longest=4),
        model=Model(num_layers=2, num_heads=2, model_dim=8, head_dim=4, norm=False, position="relative"),
        train=Train(1, 5, 4, 8, warmup=1, log_every=2, look_every=2, checkpoint_every=4),
        evaluate=Evaluate(batch=16),
        language=LanguageModel(str(folder), FIRST, seed=3, sequences=2, period=24, group=2, matched=3),
        claims=claims,
    )


@pytest.fixture(scope="module")
def model(folder):
    return saved_model.Model.of(interop.load(folder))


@pytest.fixture
def data(config, folder):
    return sequences.draw(config.language, interop.tokenizer(folder), VOCABULARY)


def test_the_sequences_are_what_they_say(data):
    for tokens in (data.chosen, data.tested, data.short[: sequences.SHOWN]):
        period = tokens.shape[1] // 2
        assert (tokens[:, 0] == VOCABULARY - 1).all() and (tokens[:, 1:] != VOCABULARY - 1).all()
        np.testing.assert_array_equal(tokens[:, 1 : 1 + period], tokens[:, 1 + period :])
    assert (data.chosen != data.tested).any() and data.text.shape == data.tested.shape == (2, 49)
    assert [len(words) for words in data.words] == [49] * 3 and data.words[0][0] == FIRST
    second, repeated, others = data.places()
    assert second[:2, 25:].all() and not second[:2, :25].any() and not second[2:].any()
    assert not (repeated & others).any() and (repeated | others)[2:].all() and not (repeated | others)[:2].any()


def test_bigrams_that_came_before():
    repeats = sequences.continue_bigrams(np.array([[1, 2, 1, 2, 3, 1, 2], [5, 5, 5, 5, 6, 5, 5]]))
    expected = [[0, 0, 1, 0, 0, 1], [0, 1, 1, 0, 0, 1]]
    np.testing.assert_array_equal(repeats, np.array(expected, bool))


@pytest.mark.slow
def test_losses_with_heads_off_are_those_of_plain_code(model, data):
    gates = np.ones((3, 4))
    gates[1, 2] = gates[2, 0] = 0.0
    loss, right = language_model.judge(model, data)(gates)
    whole = interop.from_tensors(tensors_of("llama"), CONFIGS["llama"])
    hidden = whole(data.judged, per_layer=[{"head_gate": gate.astype(np.float32)} for gate in gates])
    logits = np.asarray(whole.logits(hidden), np.float64)[:, :-1]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(logs, data.judged[:, 1:, None], -1)[..., 0]
    hit = logits.argmax(-1) == data.judged[:, 1:]
    for at, place in enumerate(data.places()):
        np.testing.assert_allclose(loss[at], each[place].mean(), rtol=1e-4)
        np.testing.assert_allclose(right[at], hit[place].mean(), atol=1e-6)


def test_a_nan_among_5000_logits_is_no_right_answer():
    logits = np.zeros((3, 5000), np.float32)
    logits[:, 7] = 1.0
    logits[1, 4000] = logits[2] = np.nan
    loss, right = jax.jit(language_model.answers)(logits, np.full(3, 7))
    np.testing.assert_allclose(loss, [np.log(4999 + np.e) - 1, np.nan, np.nan], rtol=1e-6)
    assert right.tolist() == [True, False, False]


def test_a_nan_is_neither_a_small_p_value_nor_a_path():
    others = np.array([0.1, 0.2, 0.3])
    assert language_metrics.share_as_large(0.25, others) == 0.5
    assert np.isnan(language_metrics.share_as_large(np.nan, others))
    assert np.isnan(language_metrics.share_as_large(0.25, np.append(others, np.nan)))
    assert np.isnan(language_metrics.score_of_strongest(np.array([[0.1, np.nan]]), np.ones((1, 2))))


@pytest.mark.slow
def test_a_path_is_what_it_is_by_hand(model, data):
    """Keys of the readers in layer 2 computed from a stream in which one head of layer 0 has another's output."""
    readers, group = [(2, 1), (2, 3)], [(0, 2), (1, 0)]
    scores = language_model._paths(model, data.tested, readers, [group, [(2, 0)]])
    whole = interop.from_tensors(tensors_of("llama"), CONFIGS["llama"])
    _, sown = nnx.capture(lambda m: m(data.tested, sow_heads=True, sow_parts=True), nnx.Intermediate)(whole)
    streams, (sown_heads,) = (
        sown["layers"]["residual_parts"][0]["input"],
        sown["layers"]["attention"]["attention_heads"],
    )
    block, out = whole.layer(2), whole.layers.attention.out.kernel[...]

    change = jnp.roll(sown_heads["z"], 1, 1) - sown_heads["z"]

    def with_paths(*heads):
        stream = streams[2] + sum(jnp.einsum("btd,dm->btm", change[l][:, :, h], out[l, h]) for l, h in heads)
        forward = lambda b: b.attention(b.attention_norm(stream), is_causal=True, sow_heads=True)
        _, sown = nnx.capture(forward, nnx.Intermediate)(block)
        return sown["attention"]["attention_heads"][0]["key"]

    request = {"names": ("induction",), "tokens": jnp.asarray(data.tested)}

    def mean(key):
        statistics = heads.statistics(sown_heads["query"][2], key, is_causal=True, **request)
        return statistics["induction"].mean(0)[np.array([1, 3])].mean()

    np.testing.assert_allclose(scores["clean"], mean(sown_heads["key"][2]), rtol=1e-4)
    np.testing.assert_allclose(scores["key"][0, 2], mean(with_paths((0, 2))), rtol=1e-4)
    np.testing.assert_allclose(scores["key groups"][0], mean(with_paths(*group)), rtol=1e-4)
    # no path from the readers' own layer
    np.testing.assert_allclose(scores["key groups"][1], scores["clean"], rtol=1e-5)
    np.testing.assert_allclose(scores["query"][2], scores["clean"], rtol=1e-5)
    assert abs(scores["key"][0, 2] - scores["clean"]) > 1e-4 < abs(scores["query"][0, 2] - scores["clean"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"norm": "rms", "norm_outputs": True}, "norms of attention outputs"),
        ({"norm_first": False}, "norms of attention outputs"),
        ({"window": 4}, "layers with a window"),
        ({"scale": 0.1}, "a scale of its scores"),
    ],
)
def test_models_whose_paths_are_no_sums_are_refused(kind, reason):
    sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
    plain = interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
    language_model.refuse_other_paths("tiny", plain)
    with pytest.raises(Damaged, match=f"tiny has {reason}, for which paths between heads cannot be measured"):
        language_model.refuse_other_paths("tiny", dataclasses.replace(plain, **kind))


def test_matched_groups_are_of_the_same_layers_and_norms():
    norms = np.exp(np.random.default_rng(0).normal(size=(4, 6)))
    group, besides = [(1, 0), (1, 3), (2, 5)], [(1, 1), (3, 0)]
    groups = head_groups.matched_groups(group, 50, norms, besides, np.random.default_rng(1))
    for other in groups:
        assert [layer for layer, _ in other] == [1, 1, 2] and not set(other) & {*group, *besides}
    near = sorted((abs(np.log(norms[2, h] / norms[2, 5])), h) for h in range(5))[:4]
    assert {other[2][1] for other in groups} == {h for _, h in near}
    crowded = head_groups.matched_groups([(0, 0)], 5, np.ones((2, 1)), [], np.random.default_rng(0))
    assert crowded == [[(1, 0)]] * 5  # none of its layer is left
    with pytest.raises(
        ValueError,
        match=r"language\.group: expected a smaller group, so that enough other heads remain for random groups, got 2 of 2 heads",
    ):
        head_groups.matched_groups([(0, 0), (1, 0)], 1, np.ones((2, 1)), [], np.random.default_rng(0))


@pytest.mark.slow
def test_the_command_writes_the_report_of_the_model_and_its_toy(config, tmp_path, as_experiments_run, capsys):
    file, out = tmp_path / "tiny.yaml", tmp_path / "out"
    plain = {key: value for key, value in dataclasses.asdict(config).items() if key not in ("pretrained", "mesh")}
    file.write_text(json.dumps(plain))  # JSON is also YAML
    assert main(["run", "--config", str(file), "--out", str(out)]) == 0
    findings = Findings.load(out)
    shapes = findings.paths["key"].shape, findings.ablated.shape
    assert len(findings.heads) == 12 and shapes == ((3, 4), (1, 3, 4, 3))
    assert [claim["holds"] for claim in findings.claims] == [True, False, True]
    assert findings.claims[1]["reference_name"] == "matched groups" and len(findings.claims[1]["reference"]) == 3
    assert {"tiny", "matched groups", "toy"} <= {row["name"] for row in findings.controls}
    page = (out / "report.html").read_text()
    assert "Claims: 2 of 3 hold" in page and "What the induction heads read" in page
    assert (out / "figures" / "paths.png").exists() and not (out / "figures" / "training.png").exists()
    assert "compared with" in capsys.readouterr().out


@pytest.mark.parametrize("change, message", [
    ({"mesh": Mesh(data=2)}, "mesh: does not apply to a language model"),
    ({"task": Task()}, "expected 'induction', the task of a language model's toy model, got 'copy'"),
    ({"claims": [Claim("x", "", "margin", 1, at_least=1.0)]}, r"claims\.x\.metric: expected one of"),
    ({"claims": [Claim("x", "", "toy:margin", 1, at_least=1.0)]}, r"claims\.x\.metric: expected one of"),
    ({"claims": [Claim("x", "", "p/key", 2, at_least=1.0)]}, r"claims\.x\.needed: expected 1"),
    ({"language": LanguageModel("nowhere", FIRST)}, r"language\.model: expected smollm2, gemma3, a GGUF file or the folder"),
])  # fmt: skip
def test_wrong_options_are_named(config, tmp_path, change, message):
    with pytest.raises(ValueError, match=message), prepared(dataclasses.replace(config, **change), tmp_path / "out"):
        pass


def test_wrong_sequences_are_named(config, folder):
    tokenizer = interop.tokenizer(folder)
    with pytest.raises(ValueError, match=r"language\.first: expected a token of the model, got 'x'"):
        sequences.draw(dataclasses.replace(config.language, first="x"), tokenizer, VOCABULARY)
    with pytest.raises(ValueError, match=r"the examples need 48; got 2 sequences of language\.period=9"):
        sequences.draw(dataclasses.replace(config.language, period=9), tokenizer, VOCABULARY)
