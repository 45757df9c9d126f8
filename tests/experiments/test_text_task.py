"""The documentation as a task: what is drawn from it, what heads are scored on, and what is measured of the context."""

import jax
import numpy as np
import pytest

from jattn_experiments import config, model, text_task, train
from jattn_experiments.measure import claims
from tests import reference

pytestmark = pytest.mark.usefixtures("as_experiments_run")

TASK = text_task.Text(16, 20)


def firsts(rows):
    """Where each token of a row came first: what remains of a text in an unknown code."""
    return np.argmax(rows[:, :, None] == rows[:, None, :], -1)


def sampled(draw, key=0):
    batch = jax.tree.map(np.asarray, jax.jit(lambda key: draw(key, 64))(jax.random.key(key)))
    return batch, np.concatenate([batch.tokens[..., 0], batch.targets[:, -1:, 0]], 1)


@pytest.mark.slow
def test_sequences_are_text_in_a_new_code_and_the_held_out_ones_are_never_trained_on():
    every = (np.lib.stride_tricks.sliding_window_view(blocks, 17, 1).reshape(-1, 17) for blocks in text_task.corpus())
    windows = [{row.tobytes() for row in firsts(rows)} for rows in every]
    for draw, same, other in ((TASK.sample, *windows), (TASK.held_out, *windows[::-1])):
        batch, rows = sampled(draw)
        np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.real.all() and batch.target_weights.all() and rows.max() < 20
        codes = [row.tobytes() for row in firsts(rows)]
        assert set(codes) <= same
        assert np.mean([row in other for row in codes]) < 0.9  # windows without a repetition look alike
    rows = sampled(TASK.sample)[1]
    assert len(np.unique(rows[:, 0])) > 15, "no symbol is always the same word's"


def test_what_is_held_out_is_hardly_ever_in_the_text_for_training():
    trained, held_out = (blocks.reshape(-1) for blocks in text_task.corpus())
    assert 0.8 < len(trained) / (len(trained) + len(held_out)) < 0.95
    seen, tested = (
        [row.tobytes() for row in np.lib.stride_tricks.sliding_window_view(text, 100)] for text in (trained, held_out)
    )
    again = set(seen)
    assert np.mean([row in again for row in tested]) < 0.02  # paragraphs that differ in a word or two


def test_heads_are_scored_on_random_symbols_that_repeat_with_a_random_period():
    batch, rows = sampled(TASK.look)
    periods = 16 - batch.real.sum(1)
    assert set(periods) == {4, 5, 6, 7, 8}
    for row, real, period in zip(rows, batch.real, periods, strict=True):
        np.testing.assert_array_equal(row[period:], row[:-period])
        assert len(set(row[:period])) == period and not real[:period].any()
    np.testing.assert_array_equal(batch.target_weights[..., 0], batch.real)
    assert (sampled(TASK.probe)[0].real.sum(1) == 8).all()


@pytest.mark.slow
def test_the_in_context_score_is_late_loss_less_early_loss():
    transformer = model.make(config.Model(num_layers=1, num_heads=2, model_dim=8, head_dim=4), TASK)
    key = jax.random.key(4)
    params = jax.jit(transformer.init)(key, np.zeros((1, 16, 1), np.int32))
    scores = jax.jit(lambda params: train.held_out(transformer, TASK, params, key, 32))(params)
    batch = TASK.held_out(key, 32)
    likely = reference.softmax(np.asarray(jax.jit(transformer.apply)(params, batch.tokens))[:, :, 0])
    losses = -np.log(np.take_along_axis(likely, np.asarray(batch.targets), -1))[..., 0].mean(0)
    assert float(scores["in_context"]) == pytest.approx(losses[15] - losses[1], abs=1e-5)
    assert float(scores["held_out_loss"]) == pytest.approx(losses.mean(), abs=1e-5)


def test_a_bump_is_a_loss_that_falls_faster_again_and_the_score_turns_half_way_from_its_largest():
    steps = np.arange(10, 410, 10)
    straight = 3 - np.log2(steps)  # a nat for each doubling
    late = np.clip((steps - 200) / 100, 0, 1)
    scores = np.stack([0.1 - 0.4 * late, np.where(steps < 40, -0.1, 0.1 - 0.4 * late)])
    metrics = {"held_out_loss": np.stack([straight, straight - 0.5 * late]), "in_context": scores}
    nothing = claims.Result(*(None for _ in claims.Result._fields))
    result = nothing._replace(metric_steps=steps, metrics=metrics)
    assert claims.measure(result, None, "bump") == pytest.approx([0, 0.5])
    assert claims.measure(result, None, "turn/in_context") == [250, 250]
