"""The layers benchmark: its table on made-up numbers, what it refuses to time, and whole runs on tiny sizes."""

import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn.nnx
from jattn_experiments.__main__ import main as run_main
from jattn_experiments.bench import flax_modules, timing
from jattn_experiments.bench.flax_modules import DECODE, MODULE, SUITE, TRAIN, Failed, Sizes

SMALL = {"layers": 1, "width": 8, "num_heads": 4, "lengths": (6,), "slots": 16, "tokens": (16, 5)}
TINY = Sizes(**SMALL, seconds=1e-3, rounds=1, settle=0.0)

pytestmark = pytest.mark.usefixtures("as_experiments_run")


@pytest.fixture
def untimed(monkeypatch):
    """Makes a row return its contestants by name instead of timing them."""
    monkeypatch.setattr(flax_modules, "_timed", lambda sizes, calls, apart: calls)


# ---- the table


def made_up() -> dict:
    """Numbers for every row of the default sizes, each exactly at its threshold."""

    def row(step: str, length: int, **medians: float) -> dict:
        return {"step": step, "length": length, "medians": medians, "rounds": 3, "apart": 2e-6}

    times = [row(TRAIN, length, jattn=1000.0, flax=2500.0) for length in Sizes().lengths]
    times[0]["medians"]["jattn"] = 2500.0
    times[1]["medians"] |= {"jattn": 1250.0, "torch": 2000.0}
    times += [row(DECODE, tokens, jattn=1200.0, sum=800.0) for tokens in Sizes().tokens]
    times += [row(MODULE, 65536, jattn=1000.0, flax=1000.0)]
    peaks = {"jattn": 2**20, "flax": 5 * 2**20}
    memory = [{"contestant": name, "length": 4096, "temporaries": 3 * x, "peak": x} for name, x in peaks.items()]
    return {"environment": {"cores": "2"}, "sizes": {"layers": 4}, "times": times, "memory": memory}


def answers(contents: dict) -> list[tuple[float | None, str]]:
    return [(one.measured, one.answer) for one in flax_modules.goals(SUITE.parse(contents))]


def test_numbers_at_their_thresholds_are_met():
    assert answers(made_up()) == [(1.0, "met"), (0.5, "met"), (2.5, "met"), (0.2, "met"), (1.5, "met"), (1.0, "met")]


def test_numbers_beyond_their_thresholds_are_not_met():
    contents = made_up()
    short, middle, long, full, few, module = (row["medians"] for row in contents["times"])
    short["jattn"], middle["jattn"], long["flax"] = 2525.0, 1275.0, 2490.0
    full["jattn"], module["jattn"] = 1208.0, 1001.0
    few["jattn"] = 1e9  # has no threshold
    contents["memory"][0]["peak"] *= 1.05
    goals = answers(contents)
    assert [measured for measured, _ in goals] == pytest.approx([1.01, 0.51, 2.49, 0.21, 1.51, 1.001])
    assert {answer for _, answer in goals} == {"not met"}


def test_more_is_asked_of_decoding_with_the_compiled_kernels():
    question = "one token, 65536 in the cache: function / sum of the cache (aim: 1.1)"
    for time, answer in ((1040.0, "met"), (1048.0, "not met")):
        contents = made_up()
        contents["environment"]["jattn-native"] = "0.1.0"
        contents["times"][3]["medians"]["jattn"] = time
        assert {one.question: one.answer for one in flax_modules.goals(SUITE.parse(contents))}[question] == answer


def test_numbers_of_other_sizes_answer_nothing():
    contents = made_up()
    for row in [*contents["times"], *contents["memory"]]:
        row["length"] -= 1
    assert answers(contents) == [(None, "not measured")] * 6
    contents = made_up()
    del contents["memory"][1], contents["times"][4:]
    assert [answer for _, answer in answers(contents)] == ["met", "met", "met", "not measured", "met", "not measured"]


def test_tables_show_milliseconds_and_mebibytes():
    contents = made_up()
    lines = flax_modules.markdown(SUITE.parse(contents)).splitlines()
    assert "| training step, n = 256: time of jattn / time of Flax | 1.00 | <= 1 | met |" in lines
    assert "| step | n | jattn | Flax | torch | sum of the cache | rounds | apart |" in lines
    assert "| training step | 1024 | 1.25 | 2.50 | 2.00 | - | 3 | 2e-06 |" in lines
    assert "| decode, function | 4096 | 1.20 | - | - | 0.80 | 3 | 2e-06 |" in lines
    assert "| jattn | 4096 | 3 | 1 |" in lines and "| Flax | 4096 | 15 | 5 |" in lines
    assert "- cores: 2" in lines and "- layers: 4" in lines
    contents["times"][4]["medians"]["native"] = 1000.0  # as before it was the plain call
    text = flax_modules.markdown(SUITE.parse(contents))
    assert "| decode, function | 4096 | 1.20 | - | - | 1.00 | 0.80 | 3 | 2e-06 |" in text


# ---- contestants


def test_either_module_is_its_own_librarys():
    assert flax_modules.MODULES == {"jattn": jattn.nnx.MultiHeadAttention, "flax": nnx.MultiHeadAttention}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_trains_layers_of_the_same_shapes(monkeypatch):
    """They see no later token, without a mask to read, and learn."""
    import torch

    attention, calls = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, key, value, mask, dropout, is_causal):
        calls.append((tuple(query.shape), mask, dropout, is_causal))
        return attention(query, key, value, mask, dropout, is_causal)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    step = flax_modules.torch_trainer(Sizes(**SMALL | {"layers": 2}), 6)
    losses = [step() for _ in range(4)]
    assert calls == [((1, 4, 6, 2), None, 0.0, True)] * 8
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] > 0


@pytest.mark.slow
def test_decoding_leaves_the_cache_as_long_as_it_was(untimed):
    calls = flax_modules.function_row(TINY, DECODE, 5)
    decode, before = calls["jattn"], calls["jattn"].state
    first, second = decode(), decode()
    assert (first == second).all() and decode.state.length == 4
    assert before.key.is_deleted() and before.value.is_deleted(), "the cache was copied"
    for total, x in zip(calls["sum"](), (decode.state.key, decode.state.value), strict=True):
        np.testing.assert_allclose(total, np.array(x, np.float64).sum(), rtol=1e-5)
    for one in flax_modules.modules_row(TINY, MODULE, 5, flax_modules.decoder).values():
        first, second = one(), one()
        assert (first == second).all() and one.state["cache_index"][...] == 4


@pytest.mark.slow
def test_training_goes_on_from_step_to_step(untimed):
    for one in flax_modules.modules_row(TINY, TRAIN, 6, flax_modules.trainer).values():
        before = one.state
        losses = [float(one()) for _ in range(5)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
        assert all(x.is_deleted() for x in jax.tree.leaves(before)), "the parameters were copied"


class Altered(nnx.MultiHeadAttention):
    """Flax's module with a bug."""

    mistake = ""

    def __call__(self, x, is_causal=False):
        if self.mistake == "sees what comes":
            is_causal = False
        y = super().__call__(x, is_causal=is_causal)
        if self.mistake == "writes nothing":
            self.cached_key[...] = self.cached_key[...].at[:, -1].set(0.0)
        if self.mistake == "learns nothing":
            y = jax.lax.stop_gradient(y)
        return 1.01 * y if self.mistake == "exaggerates" else y


@pytest.mark.slow
@pytest.mark.parametrize("step, build, mistake", [
    (TRAIN, flax_modules.trainer, "sees what comes"),
    (TRAIN, flax_modules.trainer, "learns nothing"),
    (MODULE, flax_modules.decoder, "exaggerates"),
    (MODULE, flax_modules.decoder, "writes nothing"),
])  # fmt: skip
def test_modules_that_disagree_are_not_timed(step, build, mistake, monkeypatch):
    monkeypatch.setattr(Altered, "mistake", mistake)
    monkeypatch.setitem(flax_modules.MODULES, "flax", Altered)
    monkeypatch.setattr(timing, "in_turn", None)
    length = {TRAIN: 6, MODULE: 16}[step]
    with pytest.raises(Failed, match=rf"^{step}, n = {length}: .* of the largest number, expected at most 0.0001$"):
        flax_modules.modules_row(TINY, step, length, build)


def test_a_function_that_is_wrong_is_not_timed(monkeypatch):
    real = flax_modules.attend_heads
    one_more = lambda *chunk, **options: real(*chunk, **options, head_gate=jnp.ones(4).at[2].set(1.01))
    monkeypatch.setattr(flax_modules, "attend_heads", one_more)
    monkeypatch.setattr(timing, "in_turn", None)
    with pytest.raises(Failed, match="^decode, function, 5 tokens: "):
        flax_modules.function_row(TINY, DECODE, 5)


def test_agreement_is_of_the_largest_number_and_nan_is_none():
    ours = {"a": jnp.array([1.0, 100.0]), "b": jnp.array(0)}
    near = {"a": jnp.array([1.005, 100.0]), "b": jnp.array(0)}
    assert flax_modules.agree("x", ours, near) == pytest.approx(5e-5, rel=0.01)
    for wrong in (1.02, jnp.nan):
        with pytest.raises(Failed, match="^x: "):
            flax_modules.agree("x", ours, {"a": jnp.array([wrong, 100.0]), "b": jnp.array(0)})


# ---- whole runs


@pytest.fixture
def tiny(monkeypatch):
    """Runs the command at tiny sizes."""
    small = {"rounds": TINY.rounds, "settle": TINY.settle}
    monkeypatch.setattr(flax_modules, "Sizes", functools.partial(Sizes, **SMALL, **small))
    platforms = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", platforms)


@pytest.mark.slow
def test_the_command_writes_what_it_measures(tmp_path, tiny, capsys):
    torch = ["torch"] if importlib.util.find_spec("torch") else []
    out = tmp_path / "a" / "b"
    assert run_main(["bench", "--suite", "layers", "--seconds", "0.001", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("not measured") == 6 and f"report: {out / 'layers.md'}" in shown
    contents = json.loads((out / "layers.json").read_text())
    assert contents["sizes"] == json.loads(json.dumps(SMALL)) | {
        "num_kv_heads": 2, "seconds": 1e-3, "rounds": 1, "settle": 0.0, "device": "cpu",
    }  # fmt: skip
    assert contents["environment"]["jattn_source"] == timing.source_digest() and contents["environment"]["cpu"]
    rows = [(row["step"], row["length"], list(row["medians"])) for row in contents["times"]]
    both, alone = ["jattn", "flax"], ["jattn", "sum"]
    halves = ("", flax_modules.HALF)
    trained = [(TRAIN + half, 6, both + torch) for half in halves]
    decoded = [(DECODE + half, tokens, alone) for half in halves for tokens in (16, 5)]
    assert rows == [*trained, *decoded, (MODULE, 16, both)]
    assert all(min(row["medians"].values()) > 0 and row["rounds"] for row in contents["times"])
    assert all(row["apart"] < (2e-2 if flax_modules.HALF in row["step"] else 1e-4) for row in contents["times"])
    assert [(row["contestant"], row["length"]) for row in contents["memory"]] == [("jattn", 6), ("flax", 6)]
    assert all(row["temporaries"] > 0 and row["peak"] > 0 for row in contents["memory"])
    results = SUITE.parse(contents | {"sizes": vars(flax_modules.Sizes(seconds=1e-3))})
    assert (out / "layers.md").read_text() == flax_modules.markdown(results)


@pytest.mark.slow
def test_what_fails_is_said_in_one_line(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.setattr(Altered, "mistake", "sees what comes")
    monkeypatch.setitem(flax_modules.MODULES, "flax", Altered)
    assert run_main(["bench", "--suite", "layers", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: training step, n = 6: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    with pytest.raises(Failed, match=r"^memory of jattn: ValueError: qkv_features \(8\) must be a multiple"):
        flax_modules.memory_row(Sizes(**SMALL | {"num_heads": 3}), "jattn", 6)


@pytest.mark.parametrize("entries", [7, 5000])  # on a CPU, JAX's maximum drops NaN from 4096 entries on
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nan_does_not_agree(entries, dtype):
    x = jnp.ones(entries, dtype)
    assert flax_modules.agree("a step", [x], [x]) == 0
    with pytest.raises(Failed, match="a step: results differ by nan"):
        flax_modules.agree("a step", [x.at[3].set(jnp.nan)], [x])
