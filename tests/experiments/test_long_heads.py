"""The experiment on long texts, with a tiny random model: its prompts, its cache against whole calls, its command."""

import dataclasses
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jattn import heads, interop
from jattn.masks import Causal
from jattn_experiments.__main__ import main
from jattn_experiments.config import Claim, Config, LanguageModel, LongTexts, Mesh, Task
from jattn_experiments.measure import long_heads, long_looks, long_metrics, long_texts, long_windows
from jattn_experiments.measure.long_needles import Study
from jattn_experiments.measure.long_reader import ROWS, Reader
from jattn_experiments.measure.saved_model import Model
from jattn_experiments.run import prepared
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged
from tests.jattn import test_model_families as model_families

FIRST = "<|endoftext|>"
LENGTH = 300  # more than a chunk


@pytest.fixture
def config(tiny):
    claims = [
        Claim("few", "Few heads copy.", "share_of_heads", 1, at_most=0.9),
        Claim("found", "Everything is found.", f"found/{LENGTH}", 1, at_least=1.0),
        Claim("back", "Some look back.", "induction/16", 1, at_least=0.0),
    ]
    return Config(
        "tiny",
        "A tiny one.",
        language=LanguageModel(tiny, FIRST, seed=1, sequences=2, period=24, matched=2),
        long=LongTexts(
            lengths=[LENGTH], depths=2, chosen=1, texts=2, ablated=LENGTH, sizes=[1, 2, 90], distances=[16, 64], window=64,
            streamed=256, pictured=256,
        ),
        claims=claims,
    )  # fmt: skip


def test_a_prompt_has_its_needle_where_it_says():
    needle = long_texts.Needle([7, 8, 9, 8], [7], [8, 9])
    text = np.arange(100, 200)
    for depth, before in ((0.0, 0), (0.5, 10), (1.0, 20)):
        tokens, start, stop, question, inside, answer = long_texts.prompt(text, needle, depth, 28, first=1)
        expected = [1, *text[:before], 7, 8, 9, 8, *text[before:20], 7, 8, 9]
        assert tokens.tolist() == expected and (start, stop, question, answer) == (1 + before, 5 + before, 25, 2)
        assert np.flatnonzero(inside).tolist() == [start + 1, start + 2, start + 3]
    with pytest.raises(
        ValueError, match=r"long\.lengths: expected more than 8 tokens \(a needle with its question and answer\), got 8"
    ):
        long_texts.prompt(text, needle, 0.5, 8, first=1)


def test_no_two_seeds_share_a_text(config, tiny):
    tokenizer = interop.tokenizer(tiny)

    def drawn(**changes):
        language = dataclasses.replace(config.language, **changes)
        return long_texts.draw(dataclasses.replace(config, language=language), tokenizer)

    one, other = drawn(seed=1), drawn(seed=2)
    pieces = {each.tobytes() for texts in (one, other) for each in (*texts.chosen, *texts.judged)}
    assert len(pieces) == 6 and one.needles != other.needles
    assert [len(each) for each in one.needles] == [2] * 3
    with pytest.raises(ValueError, match=r"language\.seed: expected a smaller one, because the documentation here has"):
        drawn(seed=10**6)
    with pytest.raises(ValueError, match=r"language\.first: expected a token of the model, got 'x'"):
        drawn(first="x")


def made_up(config):
    """What a run might measure on a model of two layers with three heads: head (1, 2) copies every needle."""
    options, matched, rng = config.long, config.language.matched, np.random.default_rng(0)
    copies = np.zeros((2, 3))
    copies[1, 2], copies[0, 1] = 1.0, 0.25

    def needles(share):
        right = np.array([share, 1.0])
        return {"found": right == 1, "right": right, "score": np.stack([copies, copies])}

    sinks = {"first": np.full((2, 2, 3), 0.5) + copies / 4, "entropy": np.full((2, 2, 3), np.log(128) / 2)}
    losses = np.ones((4, options.streamed - 1)) * np.array([[1.0], [3.0], [1.1], [1.2]])
    losses[:, : options.window] = 9.0  # not beyond the window
    groups = [[(1, 2)], *[[(1, 0)]] * matched]
    return {
        "scores": copies,
        "group": groups[0],
        "groups": groups,
        "needles": {LENGTH: [needles(1.0), needles(0.5)]},
        "hidden": [{"group": np.array([[False, True]] + [[True, True]] * matched), "elsewhere": np.ones(2, bool)}] * 2,
        "off": {f"off {i}": [needles(0.5 if i == 0 else 1.0)] for i in range(1 + matched)}
        | {f"{name} {size}": [needles(1.0)] for name in ("largest", "random") for size in (1, 2)},
        "beside": {f"off {i}": {"loss": np.array([3.0, 2.1, 2.4]), "facts": np.array([1, 0, 0], bool)} for i in range(1 + matched)}
        | {"whole": {"loss": np.array([2.0, 2.0, 2.0]), "facts": np.array([1, 1, 0], bool)}},
        "sinks": [sinks],
        "streams": [{"loss": losses}],
        "distances": [{"score": np.stack([copies * distance / 64 for distance in options.distances])}],
        "patterns": {"induction": copies + rng.random((2, 3)) / 100},
        "twins": [{"scores": copies / 10}, {"scores": copies / 5}],
    }  # fmt: skip


def test_metrics_are_those_that_claims_can_name_and_mean_what_they_say(config):
    numbers = made_up(config)
    metrics = long_metrics.metrics_of(config, numbers)
    assert set(metrics) == set(long_metrics.names(config))
    expected = {
        "heads": 1, "share_of_heads": 1 / 6, "score/chosen": 1, f"found/{LENGTH}": 0.75, f"score/{LENGTH}": 1,
        "off/found": 0.5, "off/matched": 1, "p/off": 1 / 3, "off/loss": 0.4, "off/other tokens": 0.1,
        "off/repeated bigrams": 1, "off/facts": 0.5, "hidden/found": 0.5, "hidden/matched": 1, "hidden/elsewhere": 1,
        "first/128": 0.5 + 1.25 / 24, "entropy/128": np.log(128) / 2, "share/128": 0.5, "sinks": 1, "sinks/stable": 1,
        "stream/window": 2, "stream/sinks": 0.1, "stream/without first": 0.2, "same/induction": 1, "twin/retrieval": 0.2,
        "stable/depths": 1, "stable/texts": 1, "stable/needles": 1, "stable/lengths": 0, "induction/64": 1.25 / 6,
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name].values, [value], atol=1e-6, err_msg=name)
    assert metrics["off/found"].reference == [1.0, 1.0] and metrics["off/matched"].reference == [0.75]
    drawn = long_metrics.curves(config, numbers)
    assert drawn["needles found over tokens"] == {"documentation": [[LENGTH, 1.0]], "source": [[LENGTH, 0.5]]}
    assert drawn["needles found over heads off"]["largest retrieval scores"] == [[1, 1.0], [2, 1.0]]
    assert drawn["loss in nats over position"]["window"][-1] == [224, 3.0]
    assert long_metrics.grids(config, numbers)["needles found"]["values"] == [[0.5, 1.0]]


def test_metrics_of_a_model_some_of_whose_layers_have_a_window(config):
    long = dataclasses.replace(config.long, windows=[8, 512])
    config = dataclasses.replace(config, long=long)
    numbers = made_up(config) | {"local": np.array([True, False]), "window": 64}  # the head that copies is global
    window = lambda share, loss: [{"found": np.array([share == 1, True]), "loss": np.float64(loss)}]
    numbers["windows"] = {8: window(0.5, 2.5), 64: window(1.0, 2.0), 512: window(1.0, 1.75)}
    numbers["alone"] = [{"found": np.stack([np.array([[1, 1, 1], [1, 1, 0]], bool)] * 2, -1)}]
    metrics = long_metrics.metrics_of(config, numbers)
    assert set(metrics) == set(long_metrics.names(config))
    expected = {
        "share_of_global": 1, "score/global": 1, "score/local": 0.25, "score/local beyond": 0.25, "alone/global": 0,
        "alone/local": 1, "window/8/found": 0.5, "window/8/loss": 0.5, "window/512/found": 1, "window/512/loss": -0.25,
        "induction/64/global": 1, "induction/64/local": 0.25, "first/128/global": 0.5 + 1 / 12,
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name].values, [value], atol=1e-6, err_msg=name)
    drawn = long_metrics.curves(config, numbers)
    assert drawn["loss in nats over the local layers' window"][f"text of {LENGTH} tokens"] == [
        [8, 2.5],
        [64, 2.0],
        [512, 1.75],
    ]


@pytest.fixture(scope="module")
def windowed(tiny, tmp_path_factory):
    """The folder of a tiny Gemma 3, two of whose three layers have a window of 5 tokens."""
    folder = tmp_path_factory.mktemp("windowed")
    safetensors.numpy.save_file(model_families.tensors_of("gemma3"), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model_families.CONFIGS["gemma3"] | {"max_position_embeddings": 512}))
    interop.tokenizer(tiny).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.slow
def test_other_windows_and_pictures_are_those_of_the_model_with_them(config, windowed, tmp_path):
    texts = long_texts.draw(config, interop.tokenizer(windowed))

    def study(folder, **change):
        return Study(
            config, Model.of(interop.load(windowed, config=change)), texts, tmp_path / folder, lambda **_: None
        )

    trained = study("one")
    changed = long_windows.other_window(trained, 0, 2)
    expected = long_windows.other_window(study("other", sliding_window=2), 0, 2)
    for name, x in changed.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    assert trained.model.config.window == 5
    assert np.abs(changed["score"] - long_windows.other_window(trained, 0, 5)["score"]).max() > 1e-3

    weights = long_looks.pictured(trained, 0)["weights"]
    tokens = trained.beginning(texts.judged[0], config.long.pictured)
    for shown, layer in zip(weights, interop.look(interop.load(windowed), tokens[None]), strict=True):
        options = {name: x for name, x in layer.items() if name not in ("value", "lse", "z")}
        coarse = heads.coarse_weights(options.pop("query"), options.pop("key"), long_heads.SPANS, **options)
        np.testing.assert_allclose(shown, coarse[0], atol=1e-5)


def test_a_model_without_such_layers_has_no_windows(config, tiny, tmp_path):
    config = dataclasses.replace(config, long=dataclasses.replace(config.long, windows=[8]))
    with pytest.raises(Damaged, match=r"long\.windows: expected a model in which some layers have a window"):
        long_heads.run(config, tmp_path)


@pytest.mark.slow
def test_reading_in_chunks_is_the_whole_call(config, tiny):
    """From a cache, in padded chunks, with heads off and blind: answers and scores of one call on the whole prompt."""
    whole, tokenizer = interop.load(tiny), interop.tokenizer(tiny)
    reader, texts = Reader(Model.of(interop.load(tiny)), LENGTH), long_texts.draw(config, tokenizer)
    prompt = long_texts.prompt(texts.judged[0], texts.needles[1][0], 0.5, LENGTH, texts.first)
    gates, blind = np.ones(reader.model.shape, np.float32), np.zeros(reader.model.shape, bool)
    gates[0, 1], blind[1, 2], blind[0, 0] = 0.0, True, True
    hidden = (np.arange(LENGTH) >= prompt.start) & (np.arange(LENGTH) < prompt.stop)
    before = reader.read(reader.empty(), prompt.tokens[: prompt.start], gates)
    cache = reader.read(before, prompt.tokens[prompt.start : prompt.question], gates)
    assert int(before.length.ravel()[0]) == prompt.start  # what was read before can go on in another way
    everywhere = np.ones(LENGTH, bool)  # a random model copies nothing from a needle
    answer = reader.answer(cache, prompt._replace(needle=everywhere), gates=gates, blind=blind, hidden=hidden)

    asks = np.arange(LENGTH) >= prompt.question
    pattern = lambda b, h, q_idx, kv_idx: jnp.asarray(hidden)[kv_idx] & jnp.asarray(asks)[q_idx]
    seen = (Causal() & heads.forbid(pattern, of_layer) for of_layer in blind)
    per_layer = [{"head_gate": gate, "mask": mask} for gate, mask in zip(gates, seen, strict=True)]

    def forward(model):
        return model(prompt.tokens[None], per_layer=per_layer, sow_weights=True)

    states, sown = nnx.capture(forward, nnx.Intermediate)(whole)
    weights = jnp.stack(heads.collect(sown, "attention_weights"))[:, 0]
    G = prompt.answer
    logits = np.asarray(whole.logits(states))[0, -G - 1 : -1]
    assert answer.written.tolist() == logits.argmax(-1).tolist()
    assert answer.right.tolist() == (logits.argmax(-1) == prompt.tokens[-G:]).tolist()
    score = heads.retrieval_score(weights[:, :, -G - 1 : -1], prompt.tokens, prompt.tokens[-G:], everywhere)
    assert 0 < answer.score.max() <= 1
    np.testing.assert_allclose(answer.score, score, atol=1e-6)
    rows = reader.rows(cache, prompt.tokens[prompt.question :])
    assert rows.shape[2] == LENGTH - prompt.question <= ROWS
    np.testing.assert_allclose(rows.sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x93NUMPY", b"PK\x03\x04"])
def test_a_part_that_was_damaged_is_one_line(tmp_path, content):
    study = types.SimpleNamespace(folder=tmp_path, _tell=lambda **_: None)
    measured = [Study.part(study, "sinks", lambda: {"first": np.arange(3)})["first"].tolist() for _ in range(2)]
    assert measured == [[0, 1, 2]] * 2
    for damaged in (content, (tmp_path / "sinks.npz").read_bytes()[:-30]):
        (tmp_path / "sinks.npz").write_bytes(damaged)
        with pytest.raises(Damaged, match=r"sinks\.npz: the file is damaged; remove it"):
            Study.part(study, "sinks", lambda: {"first": np.arange(9)})


@pytest.mark.slow
def test_the_command_writes_its_report_and_resumes_from_its_parts(config, tmp_path, as_experiments_run, capsys):
    file, out = tmp_path / "tiny.yaml", tmp_path / "out"
    plain = {"name": config.name, "claims": [dataclasses.asdict(claim) for claim in config.claims]}
    plain |= {"language": dataclasses.asdict(config.language), "long": dataclasses.asdict(config.long)}
    file.write_text(json.dumps(plain))  # JSON is also YAML
    assert main(["run", str(file), "--out", str(out)]) == 0
    findings = Findings.load(out)
    L, N = findings.ablated.shape[1:3]
    assert [claim["holds"] for claim in findings.claims] == [True, False, True]
    grid = findings.grids["needles found"]
    assert (grid["rows"], grid["columns"]) == ([f"{LENGTH} tokens"], ["0%", "100%"])
    assert findings.example_weights.shape == (2, 2, L, N, long_heads.SPANS, long_heads.SPANS)
    assert len(findings.heads) == L * N
    assert findings.curves["loss in nats over position"].keys() == set(long_metrics.STREAMS)
    page = (out / "report.html").read_text()
    assert "Claims: 2 of 3 hold" in page and (out / "figures" / "grids.png").exists()
    capsys.readouterr()

    parts = sorted((out / "parts" / "model").glob("*.npz"))
    again = {part.name: part.read_bytes() for part in parts if part.name.startswith(("sinks", "off 1", "zoom"))}
    assert len(again) == 5
    for name in again:
        (out / "parts" / "model" / name).unlink()
    (out / "findings.json").unlink()
    assert main(["run", str(file), "--out", str(out)]) == 0
    resumed = Findings.load(out)
    assert [claim["values"] for claim in resumed.claims] == [claim["values"] for claim in findings.claims]
    assert resumed.curves == findings.curves
    np.testing.assert_array_equal(resumed.example_weights, findings.example_weights)
    files, twins = (len(list((out / "parts").glob(pattern))) for pattern in ("*/*.npz", "twin *"))
    assert files == long_heads._count(config, twins, L * N)  # of the progress bar

    np.savez(out / "parts" / "model" / "texts.npz", digest=np.zeros(32, np.uint8))
    capsys.readouterr()
    assert main(["run", str(file), "--out", str(out)]) == 2
    assert "was measured on other texts" in capsys.readouterr().err


@pytest.mark.parametrize("change, message", [
    ({"mesh": Mesh(data=2)}, "mesh: does not apply to long texts, where nothing is trained"),
    ({"task": Task("induction")}, "task: does not apply to long texts, where nothing is trained"),
    ({"claims": [Claim("x", "", "margin", 1, at_least=1.0)]}, r"claims\.x\.metric: expected one of"),
    ({"claims": [Claim("x", "", "heads", 2, at_least=1.0)]}, r"claims\.x\.needed: expected 1"),
    ({"claims": [Claim("x", "", "p/off", 1, at_most=0.05)]}, r"a p-value needs language\.matched to be at least 19, got 2"),
    ({"long": LongTexts([512, 1024, 512])}, r"long\.lengths: expected distinct numbers"),
    ({"long": LongTexts([1024], sizes=[-1])}, r"long\.sizes: expected distinct numbers of at least 1, got \[-1\]"),
    ({"long": LongTexts([1024], window=900, streamed=1024)}, r"long\.streamed: expected at least twice long\.window=900"),
    ({"long": LongTexts([1024], streamed=1024, pictured=9)}, r"long\.pictured: expected at least 60"),
    ({"language": LanguageModel("nowhere", FIRST)}, r"language\.model: expected smollm2, gemma3, a GGUF file or the folder"),
    ({"long": LongTexts([32, 1024])}, r"long\.lengths: expected numbers of at least 64, including long\.ablated=1024"),
    ({"long": LongTexts([512])}, r"including long\.ablated=1024, got \[512\]"),
    ({"long": LongTexts([1024])}, r"long\.pictured: expected at most 1024 tokens, .* got 4096 and 8192"),
    ({"long": LongTexts([1024], texts=9)}, r"long\.texts: expected at most 4, got 9"),
    ({"long": LongTexts([8192, 1024], distances=[9000])}, r"long\.distances: expected 2 to 8159, .* got \[9000\]"),
])  # fmt: skip
def test_wrong_options_are_named(config, tmp_path, change, message):
    with pytest.raises(ValueError, match=message), prepared(dataclasses.replace(config, **change), tmp_path / "out"):
        pass
