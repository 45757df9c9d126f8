"""The training loop: resuming bit for bit, errors, stopping; and one experiment from end to end."""

import dataclasses
import json
import re
import signal
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jattn_experiments import batches, config, run, train
from jattn_experiments.__main__ import main as run_main
from jattn_experiments.measure import assemble, claims, evaluate, language_model
from jattn_experiments.runs.checkpoint import Checkpoints
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.history import History
from tests.experiments import processes

TINY = """
name: tiny
task: {kind: copy, length: 12, symbols: 3}
model: {model_dim: 8, num_heads: 2, head_dim: 4}
train: {seeds: 2, steps: 40, warmup: 2, batch: 4, log_every: 2, look_every: 4, checkpoint_every: 8}
evaluate: {batch: 8}
"""

pytestmark = pytest.mark.usefixtures("as_experiments_run")


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return file


def setup_of(file, *options):
    return train.Setup.of(config.load(["--config", str(file), *options]).config)


def start(file, out, cache):
    code = "import sys; from jattn_experiments import config, train; train.train(*config.load(sys.argv[1:])[:2])"
    return processes.start("-c", code, "--config", file, "--out", out, variables=processes.environment(cache))


def kill_after(process, step, out):
    """Kills the process once the metrics of ``step`` are written."""
    processes.wait_until_logged(process, out, step)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def state_of(out):
    setup = setup_of(out.parent / "tiny.yaml")
    checkpoints = Checkpoints(out / "checkpoints")
    assert checkpoints.steps[-1] == 40
    return checkpoints.load(40, setup.init())


@pytest.mark.slow
@pytest.mark.bits
def test_killed_and_resumed_is_bit_equal_to_uninterrupted(tiny, tmp_path):
    whole, broken, cache = tmp_path / "whole", tmp_path / "broken", tmp_path / "cache"
    processes.finish(start(tiny, whole, cache))
    for step in (6, 26):  # before the first checkpoint, and between two
        kill_after(start(tiny, broken, cache), step, broken)
    processes.finish(start(tiny, broken, cache))
    assert (whole / "metrics.jsonl").read_bytes() == (broken / "metrics.jsonl").read_bytes()
    steps = [json.loads(line)["step"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert steps.count(40) == 2 and len(steps) == 20 + 11
    for step in range(0, 41, 4):
        one, other = History(whole).look(step), History(broken).look(step)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    chex.assert_trees_all_equal(state_of(whole), state_of(broken))


def test_a_history_cut_anywhere_rewinds_to_the_checkpoint(tmp_path):
    history = History(tmp_path)
    look = {"scores": {"sink": np.full((1, 1, 2), 0.1)}, "offset_profile": np.zeros(3), "examples": np.zeros(2)}
    for begin in range(0, 12, 4):
        history.add_metrics(begin, {"loss": np.arange(4.0)[:, None] + begin / 3}, 2)
        history.add_look(begin + 4, look)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    kept = [line for line in whole.splitlines(keepends=True) if json.loads(line)["step"] <= 4]
    for size in range(len(b"".join(kept)), len(whole) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:size])
        history.rewind(4)
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(kept)
    (tmp_path / "looks" / "00000008.tmp").touch()
    history.rewind(4)
    assert [file.name for file in (tmp_path / "looks").iterdir()] == ["00000004.npz"]
    steps, metrics = history.metrics()
    assert steps.tolist() == [2, 4] and metrics["loss"].tolist() == [[0.5, 2.5]]
    assert history.scores()[1]["sink"].shape == (1, 1, 1, 2)
    history.rewind(0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"" and not list((tmp_path / "looks").iterdir())


def test_numbers_read_back_as_the_same_float32(tmp_path, getkey):
    history, values = History(tmp_path), np.asarray(jax.random.normal(getkey(), (1, 50)))
    history.add_metrics(0, {"loss": values}, 1)
    np.testing.assert_array_equal(history.metrics()[1]["loss"][:, 0], values[0])


@pytest.mark.slow
@pytest.mark.bits
def test_a_run_that_stopped_goes_on_to_the_same_bits(tiny, tmp_path, monkeypatch, capsys):
    """It stops at a loss that is not finite and keeps the last checkpoint before that."""
    real, words = train._stop_unless_finite, ["--config", str(tiny), "--train.steps", "16"]

    def breaks(setup, begin, finite):
        broken = begin + np.arange(len(finite)) == 13
        real(setup, begin, finite & ~(broken[:, None] & (np.arange(finite.shape[1]) == 1)))

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = train.train(config.load(words).config, whole)
    monkeypatch.setattr(train, "_stop_unless_finite", breaks)
    assert run_main(["run", *words, "--out", str(broken)]) == 1
    error = capsys.readouterr().err
    assert "seed 1" in error and "step 14;" in error and error.count("\n") == 1
    assert Checkpoints(broken / "checkpoints").steps[-1] == 8
    assert "NaN" not in (broken / "metrics.jsonl").read_text()

    monkeypatch.undo()
    resumed = train.train(config.load(words).config, broken)
    assert (whole / "metrics.jsonl").read_bytes() == (broken / "metrics.jsonl").read_bytes()
    for step in range(0, 17, 4):
        chex.assert_trees_all_equal(History(whole).look(step), History(broken).look(step))
    chex.assert_trees_all_equal(resumed.params, expected.params)


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_seen(tiny):
    setup = setup_of(tiny, "--train.learning_rate", "1e38", "--train.warmup", "0")
    state = jax.tree.map(lambda leaf: leaf[0], setup.init())
    step = jax.jit(lambda state, at: train.train_step(setup, state, setup.keys[0], at))
    state, metrics = step(state, 0)  # still the untrained model's loss
    assert jnp.isfinite(metrics["loss"]) and not metrics["finite"]


def test_a_nan_among_5000_numbers_is_kept():
    """In the loss, in the norm that says whether parameters are finite, and in clipped gradients."""
    logits = np.zeros((1, 2, 1, 5000), np.float32)
    logits[0, 1, 0, 4000] = np.nan
    batch = batches.Batch(
        tokens=np.zeros((1, 2, 1), int), targets=np.zeros((1, 2, 1), int), target_weights=np.ones((1, 2, 1)),
        sources=np.zeros((1, 2, 1), int), real=np.ones((1, 2), bool),
    )  # fmt: skip
    assert np.isnan(jax.jit(train.loss_of)(logits, batch))
    assert np.isfinite(jax.jit(train.loss_of)(np.nan_to_num(logits), batch))
    assert np.isnan(jax.jit(optax.tree.norm)({"x": logits}))
    clip = optax.clip_by_global_norm(1.0)
    assert np.isnan(jax.jit(lambda x: clip.update(x, clip.init(x))[0])(logits)[0, 1, 0, 4000])


def test_on_one_cpu_device_seeds_share_the_memory_of_one(tiny):
    alone, together = (setup_of(tiny, "--train.batch", "64", "--train.seeds", seeds) for seeds in ("1", "8"))
    compiled = [train.updates(one).lower(one.init(), jnp.arange(2)).compile() for one in (alone, together)]
    sizes = [one.memory_analysis() for one in compiled]
    assert sizes[1].temp_size_in_bytes < 2 * sizes[0].temp_size_in_bytes
    losses = [step(one.init(), jnp.arange(2))[1]["loss"] for step, one in zip(compiled, (alone, together), strict=True)]
    np.testing.assert_allclose(losses[0][:, 0], losses[1][:, 0], rtol=1e-3)


@pytest.mark.slow
def test_one_experiment_from_end_to_end(tmp_path, capsys, monkeypatch):
    file, out = tmp_path / "string.yaml", tmp_path / "out"
    file.write_text("""
name: string
task: {kind: copy_string, symbols: 5, shortest: 2, longest: 4, farthest: 8}
model: {num_heads: 2, model_dim: 8, head_dim: 4, position: alibi}
train: {seeds: 2, first_seed: 3, steps: 4, warmup: 1, batch: 4, log_every: 2, look_every: 2, checkpoint_every: 2}
evaluate: {batch: 8, lengths: [2, 8]}
controls: {relative: {model.position: relative}}
sweep: {model.num_heads: [1, 2]}
claims:
- {name: sink, statement: Some head looks first., metric: best/first_token, at_least: 0.0, needed: 2}
- {name: never, statement: Never., metric: "relative:exact_match", at_least: 2.0, needed: 1}
""")
    assert run_main(["run", "--config", str(file), "--out", str(out), "--check"]) == 1  # a claim fails
    shown = capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "holds" in shown and "fails" in shown and "Claims: 1 of 2 hold" in page
    findings = Findings.load(out)
    assert findings.seeds == [3, 4] and findings.places == ["copy source"] and len(findings.heads) == 2 * 2
    assert findings.scores["copy source"].shape == (2, 3, 1, 2) and findings.look_steps.tolist() == [0, 2, 4]
    (tokens,) = {len(example) for example in findings.tokens}
    assert findings.example_weights.shape == (3, train.EXAMPLES, 1, 2, tokens, tokens)
    np.testing.assert_allclose(findings.example_weights.sum(-1), 1.0, atol=1e-5)
    assert findings.offset_profile.shape == (2, 2, 1, 2, len(findings.offsets)) and findings.offsets[-1] == 0
    assert findings.ablated.shape == (2, 1, 2, 1) and findings.divergence.shape == (2, 2, 2, 2)
    assert findings.noise.shape == (2, 2, 2) and findings.statistics["max_logit"].shape == (2, 2, 1, 2)
    curves = findings.curves["exact match over string length"]
    assert list(curves) == ["alibi", "relative"] and [row[0] for row in curves["alibi"]] == [2, 8]
    rows = {row["name"]: row["values"] for row in findings.controls if row["metric"] == "exact_match"}
    swept = findings.curves["exact match over model.num_heads"]["string"]
    assert swept == [[heads, *rows[f"model.num_heads={heads}"]] for heads in (1, 2)]
    assert rows["model.num_heads=2"] == rows["string"]
    assert not (out / "controls" / "model.num_heads=2").exists()  # the run itself, not a control
    judged = json.loads((out / "claims.json").read_text())
    assert [claim["holds"] for claim in judged] == [True, False]
    assert judged[0]["passed"] == [3, 4] and judged[1]["failed"] == [3, 4] and len(judged[0]["reference"]) == 2

    assert json.loads((out / "seconds.json").read_text()) > 1

    held = dataclasses.replace(findings, claims=findings.claims[:1])
    monkeypatch.setattr(run, "run", lambda settings, out: held)
    assert run_main(["run", "--config", str(file), "--out", str(out), "--check"]) == 0  # every claim holds

    (out / "report.html").unlink()
    assert run_main(["report", "--run", str(out)]) == 0 and (out / "report.html").read_text() == page
    assert run_main(["keep", "--run", str(out), "--to", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "string" / "summary.json").read_text())
    assert kept["controls"] == findings.controls and kept["curves"] == findings.curves and len(kept["heads"]) == 4
    np.testing.assert_allclose(kept["noise_floor"], findings.noise.mean(-1), rtol=1e-3)
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "string").iterdir()}
    assert set(sizes) == {"claims.json", "config.json", "summary.json", "page.tar.xz"} and max(sizes.values()) < 200_000
    capsys.readouterr()
    assert run_main(["run", "--config", str(file), "--out", str(out), "--train.steps", "6", "--train.batch", "8"]) == 2
    errors, differences = capsys.readouterr().err.splitlines(), ("batch was 4, now 8", "steps was 4, now 6")
    assert errors == [f"error: {out} holds a run of another config: train.{line}" for line in differences]


def test_a_sweep_of_two_options_has_a_line_for_each_value_of_the_second():
    sweep = {"model.num_heads": [{"model.num_heads": 4, "train.steps": 9}, 1], "model.position": ["none", "alibi"]}
    base = config.Config("x", sweep=sweep)
    results = {"": claims.Result(base, ("a",), [0], 1, None, None, {})}
    for number, (heads, position) in enumerate(((4, "none"), (4, "alibi"), (1, "none"), (1, "alibi"))):
        measured = types.SimpleNamespace(accuracy=np.full((1, 1), number), hardened=np.full((1, 1), 10 + number))
        result = results[""]._replace(trained=measured)
        results[f"model.num_heads={heads},model.position={position}"] = result
    curves = assemble._sweep_curves(results)
    lines = {"model.position=none": [[1, 2], [4, 0]], "model.position=alibi": [[1, 3], [4, 1]]}
    assert curves["mean accuracy over model.num_heads"] == lines
    words = {"model.position": ["none", "alibi"]}
    assert assemble._sweep_curves({"": results[""]._replace(config=config.Config("x", sweep=words))}) == {}


def test_a_sweep_of_one_option_has_a_line_for_each_place():
    base = config.Config("x", sweep={"model.num_layers": [3, 1]})
    results = {"": claims.Result(base, ("near", "far"), [0], 1, None, None, {})}
    for layers, accuracy in ((3, [1.0, 0.75]), (1, [0.5, 0.25])):
        measured = types.SimpleNamespace(accuracy=np.array([accuracy]), hardened=np.ones((1, 2)))
        results[f"model.num_layers={layers}"] = results[""]._replace(trained=measured)
    curves = assemble._sweep_curves(results)["accuracy over model.num_layers"]
    assert curves == {"near": [[1, 0.5], [3, 1.0]], "far": [[1, 0.25], [3, 0.75]]}


@pytest.mark.slow
def test_groups_of_heads_are_switched_off_together(tiny):
    setup = setup_of(tiny)
    params = setup.init()["params"]
    labels = np.array([[["a", "weak b"]], [["a", "a"]]])
    accuracies = evaluate.ablate_groups(setup, params, labels)
    assert list(accuracies) == ["a"] and accuracies["a"].shape == (2, 4)
    apply = jax.jit(setup.model.apply)
    for seed, gates in enumerate(([0.0, 1.0], [0.0, 0.0])):
        one = jax.tree.map(lambda leaf, seed=seed: leaf[seed], params)
        batch = setup.task.sample(jax.random.fold_in(setup.keys[seed], train.TEST_DATA), 8)
        logits = apply(one, batch.tokens, per_layer=[{"head_gate": jnp.array(gates)}])
        np.testing.assert_allclose(accuracies["a"][seed], train.judge(logits, batch)[0], atol=1e-6)


@pytest.mark.slow
def test_the_null_is_of_untrained_models_and_of_other_tokens(tiny):
    setup = setup_of(tiny)
    scores = evaluate.null(setup, setup.init()["params"])
    assert set(scores) == set(setup.task.roles)
    untrained = evaluate.NULL_HEADS
    beside = 2 * 2 * (evaluate.NULL_BATCH - 1)  # seeds, heads, other sequences: all there are
    sizes = {name: len(values) for name, values in scores.items()}
    assert sizes["mirror"] == sizes["first_token"] == untrained
    assert sizes["same key"] == sizes["induction"] == untrained + min(beside, untrained)
    assert np.std(scores["induction"]) > 0 and len(np.unique(scores["mirror"])) > untrained / 2


@pytest.mark.slow
def test_a_config_of_the_project_asks_for_metrics_that_there_are():
    observations = {"recall_8192"}  # its one claim failed; the file says so
    for file in config.CONFIGS.glob("*.yaml"):
        settings = config.read(file)
        if settings.kind is config.Kind.LANGUAGE_MODEL:
            language_model.check(settings)
        elif settings.kind is config.Kind.TRAINING:
            claims.check(settings)
            assert bool(settings.claims) == (file.stem not in observations), file.name


@pytest.mark.parametrize("arguments, message", [
    (["fly"], "expected one of the commands run, list, report"),
    (["report", "--run", "nowhere"], "--run: expected the folder of a finished run, got 'nowhere'"),
    (["keep", "--run", "nowhere"], "--run: expected the folder of a finished run, got 'nowhere'"),
    (["list", "all"], "list: expected no options, got 'all'"),
])  # fmt: skip
def test_commands_say_what_is_wrong_in_one_line(capsys, arguments, message):
    assert run_main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


@pytest.mark.parametrize("minus, message", [
    ("beauty", r"minus: expected .*'clean_heads'.*, got 'beauty'"), ("other:divergence", "minus: expected .*, got 'other:"),
    ("few:divergence", "minus: expected a metric on the same seeds as 'divergence', got 'few:divergence'"),
])  # fmt: skip
def test_what_a_claim_takes_away_is_a_metric_of_the_same_seeds(minus, message):
    claim = config.Claim("a", "b", "divergence", 1, minus=minus, at_least=0.0)
    settings = config.Config("x", train=config.Train(seeds=2), controls={"few": {"train.seeds": 1}}, claims=[claim])
    with pytest.raises(ValueError, match=rf"^claims\.a\.{message}"):
        claims.check(settings)


def test_a_claim_on_an_unknown_metric_is_refused_before_training(tiny, tmp_path, capsys):
    claim = "[{name: a, statement: b, metric: beauty, needed: 1, at_least: 0}]"
    assert run_main(["run", "--config", str(tiny), "--out", str(tmp_path / "out"), "--claims", claim]) == 2
    assert re.match(r"error: claims.a.metric: expected .*'clean_heads'.*, got 'beauty'\n$", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_refused(tiny, capsys):
    assert run_main(["run", "--config", str(tiny), "--out", str(tiny)]) == 2
    assert re.match(r"error: --out: .*tiny.yaml.*\n$", capsys.readouterr().err)


@pytest.mark.slow
def test_list_shows_every_config(capsys):
    assert run_main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "copy" in shown.split() and "copy_string" in shown.split()
