"""Tests of the soak itself: its gradients match its values, a structure passes, and a wrong result is detected."""

import functools
import json
import os

import jax
import numpy as np
import pytest

from jattn import interop
from tests.reference import models, t5_bucket, tokenizer
from tests.reference.bounded import Bounded, Rounding
from tests.soak import __main__ as soak
from tests.soak import crash, files
from tests.soak.attention import CallTrial, expected
from tests.soak.draw import Structure, draw_structure, draw_values
from tests.soak.trial import compare, run_case
from tests.soak.vocabulary import DTYPES, Part, draw_mod, simple_mask, simple_mod

FLOAT64 = DTYPES["float64"]


def a_structure(mod=None, prefix=5, **arrays) -> Structure:
    """A call in float64 of the mask ``Causal() | ~Prefix(prefix)``; ``mod``: draws its score function."""
    B, T, S, N, K, H, D = sizes = 2, 5, 7, 4, 2, 3, 4
    visible = lambda a, b, h, q, kv: (kv <= q) | (kv >= prefix)
    structure = Structure(0, "xla", FLOAT64, FLOAT64, True, sizes, mask=Part([], lambda a: None, visible))
    shapes = {
        "query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, D), "out_cotangent": (B, T, N, D),
        "lse_cotangent": (B, T, N), "bias": (1, N, T, 1), "sinks": (N,), "scale": (),
    } | arrays  # fmt: skip
    for name, shape in shapes.items():
        if shape is not None:
            structure.add("floats", shape, FLOAT64, name)
    structure.mod = mod and mod(structure)
    return structure


def of_kind(kind):
    return lambda structure: simple_mod(np.random.default_rng(1), structure.add, 4, FLOAT64, kind)


def two(structure):
    return draw_mod(np.random.default_rng(0), structure.add, 4, FLOAT64, ("cap", "gain"), depth=5)


def check_by_differences(structure, arrays):
    """The derivative along a random direction is the difference of the results, weighted by the cotangents."""
    cotangents = {x: arrays[f"{x}_cotangent"] for x in ("out", "lse") if f"{x}_cotangent" in arrays}

    def loss(arrays):
        results = expected(structure, arrays)
        return sum(np.sum(np.where(np.isinf(results[x][0]), 0.0, results[x][0]) * g) for x, g in cotangents.items())

    rng, gradients = np.random.default_rng(0), expected(structure, arrays)
    for name in structure.learned:
        along = rng.normal(size=arrays[name].shape)
        ahead, behind = (loss(arrays | {name: arrays[name] + step * along}) for step in (1e-5, -1e-5))
        np.testing.assert_allclose(np.sum(gradients[f"d {name}"][0] * along), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8, err_msg=name)  # fmt: skip


@pytest.mark.parametrize("mod", [None, "alibi", "relative", "cap", "gain", "tilt", "captured table", two])
def test_gradients_of_the_reference_are_those_of_its_values(mod):
    structure = a_structure(of_kind(mod) if isinstance(mod, str) else mod)
    assert mod is None or any(name.startswith("part") for name in structure.learned)
    check_by_differences(structure, draw_values(structure, 3, 0))


def test_gradients_of_a_layer_are_those_of_its_values():
    drawn = (draw_structure(5, 9 + 11 * i, "local") for i in range(100))
    structure = next(x for x in drawn if x.dtype == FLOAT64 and x.mask and x.mod)
    assert structure.implementation == "nnx"
    check_by_differences(structure, draw_values(structure, 5, 1))


def test_the_reference_on_a_case_done_by_hand():
    structure = a_structure(scale=None)
    arrays = draw_values(structure, 0, 0)
    arrays |= {name: np.zeros_like(arrays[name]) for name in ("query", "bias")}
    arrays["sinks"] = np.log([1.0, 2.0, 3.0, 4.0])
    out, lse = (expected(structure, arrays)[name][0] for name in ("out", "lse"))
    # equal scores; query 1 sees keys 0, 1, 5 and 6
    np.testing.assert_allclose(lse[0, 1], np.log(4.0 + np.arange(1.0, 5.0)))
    np.testing.assert_allclose(out[1, 1, 3], arrays["value"][1, [0, 1, 5, 6], 1].sum(0) / 8.0)
    offsets = np.array([-20, -3, -2, -1, 0, 1, 2, 6])
    np.testing.assert_array_equal(t5_bucket(offsets, 8, True, 16), [3, 2, 2, 1, 0, 5, 6, 7])


def test_a_row_that_sees_nothing():
    structure = a_structure(sinks=None)
    structure.mask = simple_mask(np.random.default_rng(0), structure.add, structure.sizes, "prefix")
    arrays = draw_values(structure, 0, 0)
    structure.mask = Part([], lambda a: None, lambda a, b, h, q, kv: kv < 0)
    results = expected(structure, arrays)
    assert (results["lse"][0] == -np.inf).all()
    assert all((x == 0).all() for name, (x, _) in results.items() if name != "lse")


def test_errors_of_rounding_are_bounded():
    """Float32 is within the bound, and nearly reaches it where it cancels."""
    rng, wide = np.random.default_rng(0), Rounding(np.dtype(np.float32), np.dtype(np.float32))
    x, y = (rng.normal(size=(2, 50, 8)) * 5).astype(np.float32)
    formula = lambda x, y: np.exp(np.einsum("ih,jh->ij", x, y)[..., :3] / 4.0) - np.tanh((x * y).sum(-1))[:, None] / 3.0
    bounded = formula(Bounded(x, wide), Bounded(y, wide))
    np.testing.assert_allclose(np.asarray(bounded), formula(*(z.astype(np.float64) for z in (x, y))))
    error = abs(formula(x, y) - bounded.value)
    assert (error <= bounded.error).all() and error.max() > 0.01 * bounded.error[np.unravel_index(error.argmax(), error.shape)]  # fmt: skip
    cancelled = Bounded(x, wide) * 3.0 - Bounded(3 * x, wide)
    assert (cancelled.error > 0.1 * abs(x) * np.finfo(np.float32).eps).all()


def test_a_small_structure_runs_and_a_wrong_result_is_found(tmp_path, monkeypatch, capsys):
    report = tmp_path / "report.json"
    arguments = f"--mode local --seed 0 --first 342 --draws 4 --cases 4 --out {report}".split()
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "0":  # like all tests
        arguments.append("--optimised")
    compiled_once = functools.cache(functools.partial(CallTrial, mode="local"))
    monkeypatch.setitem(soak.TRIALS, "local", compiled_once)
    assert soak.main(arguments) == 0
    results = json.loads(report.read_text(encoding="utf-8"))
    assert results["cases"] == 4 and results["failures"] == [] and results["seed"] == 0

    again, right = "python -m tests.soak --mode local --replay 0:342", CallTrial.run

    def off(self, arrays, eagerly=False):
        results = right(self, arrays, eagerly)
        results["d value"] = results["d value"].copy()
        results["d value"].flat[-1] += 0.1
        return results

    monkeypatch.setattr(CallTrial, "run", off)
    assert soak.main(arguments) == 1
    results = json.loads(report.read_text(encoding="utf-8"))
    cases = [failure["case"].removesuffix(" --optimised") for failure in results["failures"]]
    assert cases == [f"{again}:{draw}" for draw in range(4)]
    assert f"{again}:3" in capsys.readouterr().err
    assert soak.main([*arguments, "--replay", "0:342:3"]) == 1
    assert "d value[" in capsys.readouterr().out


@pytest.mark.slow_except("files-0", "looking-6")
@pytest.mark.parametrize(
    ("mode", "index"),
    [*(("looking", i) for i in range(8)), *(("models", i) for i in range(6)), *(("files", i) for i in range(6))],
    ids=str,
)
def test_every_kind_of_trial_passes_and_sees_what_is_wrong(mode, index, monkeypatch):
    trial = soak.TRIALS[mode](1, index)
    assert run_case(trial, 0)[0] == [] and trial.covers()
    if mode == "looking":
        program = trial.jitted
        trial.jitted = lambda arrays: {name: x + 0.25 for name, x in program(arrays).items()}
    elif mode == "models":
        right = models.Model.norm
        monkeypatch.setattr(models.Model, "norm", lambda self, name, x: right(self, name, x) * 1.01)
    else:  # every file is read as another one's, or with another error
        monkeypatch.setattr(interop, "tokenizer", lambda path: 1 / 0)
        monkeypatch.setattr(interop, "load", lambda path: 1 / 0)
    assert run_case(trial, 0)[0]


def test_the_reference_of_a_tokenizer():
    assert tokenizer.words("I'll  go\n\n 12ab!? x") == ["I", "'ll", " ", " go", "\n\n", " 12", "ab", "!?", " x"]
    assert tokenizer.digits_apart("a12 b") == ["a", "1", "2", " b"]
    assert [tokenizer.BYTES[byte] for byte in "é \n".encode()] == ["Ã", "©", "Ġ", "Ċ"]


@pytest.mark.slow
def test_a_checkpoint_without_damage_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(files.packed(*files.whole()))
    (tmp_path / "config.json").write_text(json.dumps(files.CONFIG))
    with jax.disable_jit():
        assert files.outcome(interop.load, tmp_path) == ("loaded", "")


def test_what_counts_as_a_difference():
    wanted = {"out": (np.array([1.0, 0.0, 2.0]), np.array([1e-3, 0.0, np.inf]))}
    ratio = lambda *x: compare({"out": np.array(x)}, wanted)[1]
    assert ratio(1.0005, 0.0, 7.0) == pytest.approx(0.5)
    assert ratio(1.0, np.nan, 2.0) == ratio(np.inf, 0.0, 2.0) == np.inf
    assert compare({"out": np.ones(3, np.float32)}, wanted, {"out": FLOAT64})[0][0].ratio == np.inf
    wanted = {"lse": (np.array([-np.inf]), np.array([0.0]))}
    assert compare({"lse": np.array([-np.inf])}, wanted) == ([], 0.0)
    assert compare({"lse": np.array([-3e38])}, wanted)[0]
    assert compare({}, wanted)[0][0].ratio == np.inf


def a_run(folder):
    """A run's files, as `crash.difference` compares them."""
    for file in ("looks/00000002.npz", "controls/wide/looks/00000002.npz", "parts/twin 0/sinks 1.npz"):
        (folder / file).parent.mkdir(parents=True)
        np.savez(folder / file, x=np.arange(3))
    np.savez(folder / "findings.npz", x=np.arange(3))
    (folder / "findings.json").write_text('{"environment": {}, "seeds": [0]}')
    (folder / "claims.json").write_text("[]")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "report.html").write_text("x" * 20_000)
    return folder


@pytest.mark.parametrize("name", ["looks/00000002.npz", "parts/twin 0/sinks 1.npz", "findings.npz", "findings.json", "claims.json", "metrics.jsonl", "report.html"])  # fmt: skip
def test_crash_trials_see_numbers_that_differ(tmp_path, name):
    whole, out = a_run(tmp_path / "whole"), a_run(tmp_path / "out")
    assert crash.difference(out, whole) == ""
    if name.endswith("npz"):
        np.savez(out / name, x=np.arange(3) + 1)
        assert crash.difference(out, whole) == name
        (out / name).unlink()
    else:
        (out / name).write_text('{"seeds": [1]}')
    assert crash.difference(out, whole) == name
    if name == "claims.json":
        assert crash.difference(out, whole, added=[name]) == ""


def test_crash_trials_stop_runs_in_every_phase(tmp_path):
    whole, rng = a_run(tmp_path), np.random.default_rng(0)
    (whole / "replication" / "checkpoints" / "40" / "arrays").mkdir(parents=True)
    for name in ("arrays/data", "contents.json"):
        (whole / "replication" / "checkpoints" / "40" / name).touch()
    files = [crash.drawn_file(whole, rng) for _ in range(300)]
    saves = {"controls/wide/looks", "replication/checkpoints", "looks", "parts/twin 0"}
    assert {crash.phase(file) for file in files} == saves | {"findings", "claims", "metrics", "report"}
    saved = {file.relative_to("replication/checkpoints").parts for file in files if "checkpoints" in file.parts}
    assert {"4", "8.tmp", "36"} <= {step for step, *_ in saved} and {"arrays", "contents.json"} <= {
        x[-1] for x in saved
    }


def test_crash_trials_damage_files(tmp_path):
    file, rng = tmp_path / "file", np.random.default_rng(0)
    for damage in ("flipped", "cut", "emptied", "doubled"):
        file.write_bytes(b"12345678")
        crash.harm(file, damage, rng)
        assert file.read_bytes() != b"12345678"
    crash.harm(file, "removed", rng)
    assert not file.exists()
