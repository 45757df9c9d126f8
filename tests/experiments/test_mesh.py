"""Training on a mesh: same results as on one device, placement of arrays, resuming on another mesh, and errors."""

import chex
import jax
import numpy as np
import pytest

from jattn.sharding import from_zigzag, to_zigzag
from jattn_experiments import config, run, train
from jattn_experiments.__main__ import main as run_main
from jattn_experiments.measure import evaluate
from jattn_experiments.runs import devices
from jattn_experiments.runs.checkpoint import Checkpoints
from tests.experiments import processes

TINY = """
name: tiny
task: {kind: copy, length: 12, symbols: 3}
model: {model_dim: 8, num_heads: 4, num_kv_heads: 2, head_dim: 4}
train: {seeds: 1, steps: 12, warmup: 2, batch: 4, log_every: 2, look_every: 4, checkpoint_every: 4}
evaluate: {batch: 8}
"""
LAST = 12
ALL = "--mesh.data 2 --mesh.heads 2 --mesh.sequence 2"

pytestmark = pytest.mark.usefixtures("as_experiments_run")


def settings(folder, *options):
    file = folder / "tiny.yaml"
    file.write_text(TINY)
    return config.load(["--config", str(file), *" ".join(options).split()]).config


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return train.train(settings(folder), folder / "out")


def assert_close(trained, expected):
    processes.assert_close(trained.history.metrics(), expected.history.metrics())
    processes.assert_close(trained.history.scores(), expected.history.scores())


@pytest.mark.slow
def test_numbers_are_those_of_one_device(tmp_path, on_one_device):
    trained = train.train(settings(tmp_path, ALL), tmp_path / "out")
    assert trained.setup.mesh.size == 8
    assert_close(trained, on_one_device)
    measured, expected = (evaluate.measure(one.setup, one.params)[0] for one in (trained, on_one_device))
    for one in (measured, expected):  # no weight depends on the keys' biases, which Adam moves by rounding errors
        del one.scores["max_logit"]
    chex.assert_trees_all_close(measured, expected, rtol=1e-4, atol=1e-5)
    labels = np.array([[["a", "mixed", "a", "b"]]])
    groups, expected = (evaluate.ablate_groups(x.setup, x.params, labels) for x in (trained, on_one_device))
    chex.assert_trees_all_close(groups, expected, atol=1e-6)


@pytest.mark.slow
def test_heads_and_their_moments_are_split_and_the_rest_is_whole(tmp_path):
    setup = train.Setup.of(settings(tmp_path, "--mesh.heads 4"))
    split = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(setup.init()):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shapes = {shard.data.shape for shard in leaf.addressable_shards}
        if shapes != {leaf.shape}:
            assert leaf.size == 4 * np.prod(*shapes)
            split.add(name.removeprefix("params/").removeprefix("optimizer/1/0/"))
    of_heads = {"query/kernel", "query/bias", "out/kernel"}  # two key/value heads cannot be split over four devices
    trees = ("params", "mu/params", "nu/params")
    assert split == {f"{tree}/layer_0/attention/{name}" for tree in trees for name in of_heads}


@pytest.mark.slow
def test_a_batch_is_split_over_sequences_and_tokens(tmp_path):
    setup = train.Setup.of(settings(tmp_path, ALL))
    batch = jax.jit(lambda key: devices.split(setup.mesh, setup.task.sample(key, 4)))(setup.keys[0])
    for path, leaf in jax.tree.leaves_with_path(batch):
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 6, *leaf.shape[2:])}, path
    in_order = jax.tree.map(lambda leaf: from_zigzag(leaf, 2), batch)
    chex.assert_trees_all_equal(in_order, setup.task.sample(setup.keys[0], 4))


@pytest.mark.slow
def test_the_entropy_penalty_is_that_of_one_device_without_the_weights_of_whole_sequences(tmp_path):
    losses = {}
    for words in ("--mesh.sequence 2", "", "--train.entropy_penalty 0"):
        setup = train.Setup.of(settings(tmp_path, "--train.entropy_penalty 1", words))
        losses[words] = train.updates(setup)(setup.init(), np.arange(8))[1]["loss"]
    ring, dense, without = losses.values()
    np.testing.assert_allclose(ring, dense, rtol=1e-4)
    assert abs(without - dense).max() > 2e-3, "the penalty must matter"


class Stopped(Exception):
    pass


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices(tmp_path, on_one_device, monkeypatch):
    save, out = Checkpoints.save, tmp_path / "out"

    def save_and_stop(self, step, *state):
        save(self, step, *state)
        if step < LAST:
            raise Stopped

    monkeypatch.setattr(Checkpoints, "save", save_and_stop)
    for words in ("--mesh.heads 4", "--mesh.data 4"):
        wanted = settings(tmp_path, words)
        with run.prepared(wanted, out), pytest.raises(Stopped):
            train.train(wanted, out)
    with run.prepared(settings(tmp_path), out):
        assert_close(train.train(settings(tmp_path), out), on_one_device)
    other = run.prepared(settings(tmp_path, "--train.batch 8"), out)
    with pytest.raises(run.DifferentConfig, match=r"train.batch was 4, now 8$"), other:
        pass


def test_devices_that_are_not_there_are_named(tmp_path, capsys):
    settings(tmp_path)
    words = "--train.batch 16 --evaluate.batch 16 --mesh.data 16".split()
    assert run_main(["run", "--config", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "out"), *words]) == 2
    message = "mesh: expected at most 8 cpu devices, got data=16 x heads=1 x sequence=1 for tiny"
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_tokens_out_of_order_keep_their_positions(tmp_path, position):
    setup = train.Setup.of(settings(tmp_path, "--mesh.sequence 2", f"--model.position {position}"))
    plain, tokens = setup.looking.model, setup.task.sample(setup.keys[0], 2).tokens
    params = jax.jit(plain.init)(setup.keys[0], tokens)
    logits = jax.jit(setup.model.apply)(params, to_zigzag(tokens, 2))
    np.testing.assert_allclose(from_zigzag(logits, 2), jax.jit(plain.apply)(params, tokens), atol=1e-5)
