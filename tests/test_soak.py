"""Tests of the soak itself: its gradients match its values, a structure passes, and a wrong result is detected."""

import functools
import json
import os

import numpy as np
import pytest

from tests.soak import __main__ as soak
from tests.soak import crash, files, models
from tests.soak.draw import Arrays, Recipe, Spec, Structure, draw_structure, draw_values
from tests.soak.reference import expected, t5_bucket, visible_pairs
from tests.soak.trial import Trial, differences

MODS = {
    "none": None,
    "alibi": Spec("alibi", arrays=("own slopes",)),
    "relative": Spec("relative", arrays=("own table",), static=(True, 16)),
    "cap, then gain": Spec("then", (Spec("cap", arrays=("own cap",)), Spec("gain", arrays=("own gain",)))),
    "tilt, then cap": Spec("then", (Spec("tilt", arrays=("own tilt",)), Spec("cap", static=(2.0,)))),
}


def structure(mod: Spec | None = None, **options) -> Structure:
    sizes = B, T, S, N, K, H, D = 2, 5, 7, 4, 2, 3, 4
    shapes = {
        "query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, D), "bias": (1, N, T, 1), "sinks": (N,), "scale": (),
        "out_cotangent": (B, T, N, D), "lse_cotangent": (B, T, N),
    }  # fmt: skip
    own = {"own slopes": (N,), "own table": (8, N), "own cap": (), "own gain": (N,), "own tilt": (8,)}
    recipes = {
        name: Recipe("cotangent" if "cotangent" in name else "cap" if "cap" in name else "floats", shape, np.float64)
        for name, shape in (shapes | own).items()
        if name in shapes
        or (mod is not None and name in (*mod.arrays, *(x for part in mod.parts for x in part.arrays)))
    }
    mask = Spec("or", (Spec("causal"), Spec("not", (Spec("prefix", static=(5,)),))))
    given = {"implementation": "xla", "dtype": "float64", "x64": True, "mask": mask} | options
    return Structure(0, sizes=sizes, mod=mod, recipes=recipes, **given)


def loss(of: Structure, arrays: Arrays) -> float:
    found = expected(of, arrays)
    return sum(
        np.sum(np.where(np.isinf(found[x][0]), 0.0, found[x][0]) * arrays[f"{x}_cotangent"])
        for x in ("out", "lse")
        if f"{x}_cotangent" in arrays
    )


def check_by_differences(of: Structure, arrays: Arrays) -> None:
    rng, gradients = np.random.default_rng(0), expected(of, arrays)
    for name in of.learned:
        along = rng.normal(size=arrays[name].shape)
        ahead, behind = (loss(of, arrays | {name: arrays[name] + step * along}) for step in (1e-5, -1e-5))
        np.testing.assert_allclose(
            np.sum(gradients[f"d {name}"][0] * along), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8, err_msg=name
        )


@pytest.mark.parametrize("mod", MODS)
def test_gradients_of_the_reference_are_those_of_its_values(mod):
    of = structure(MODS[mod])
    check_by_differences(of, draw_values(of, 3, 0, visible_pairs))


def test_gradients_of_a_layer_are_those_of_its_values():
    of = next(
        x
        for x in (draw_structure(5, 9 + 11 * i, "local") for i in range(100))
        if x.dtype == "float64" and x.mask and x.mod
    )
    assert of.implementation == "nnx"
    check_by_differences(of, draw_values(of, 5, 1, visible_pairs))


def test_the_reference_on_a_case_done_by_hand():
    of = structure()
    arrays = draw_values(of, 0, 0, visible_pairs)
    arrays |= {name: np.zeros_like(arrays[name]) for name in ("query", "bias")}
    arrays["sinks"] = np.log([1.0, 2.0, 3.0, 4.0])
    out, lse = (expected(of, arrays)[name][0] for name in ("out", "lse"))
    # equal scores; query 1 sees keys 0, 1, 5 and 6
    np.testing.assert_allclose(lse[0, 1], np.log(4.0 + np.arange(1.0, 5.0)))
    np.testing.assert_allclose(out[1, 1, 3], arrays["value"][1, [0, 1, 5, 6], 1].sum(0) / 8.0)
    np.testing.assert_array_equal(
        t5_bucket(np.array([-20, -3, -2, -1, 0, 1, 2, 6]), 8, True, 16), [3, 2, 2, 1, 0, 5, 6, 7]
    )


def test_a_row_that_sees_nothing():
    of = structure(mask=Spec("prefix", static=(0,)))
    del of.recipes["sinks"]
    found = expected(of, draw_values(of, 0, 0, visible_pairs))
    assert (found["lse"][0] == -np.inf).all()
    assert all((x == 0).all() for name, (x, _) in found.items() if name != "lse")


def test_a_small_structure_runs_and_a_wrong_result_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "Trial", functools.cache(Trial))  # compiled once
    arguments = [
        "--mode",
        "local",
        "--seed",
        "0",
        "--first",
        "78",
        "--draws",
        "4",
        "--cases",
        "4",
        "--out",
        str(tmp_path / "found.json"),
    ]
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "0":  # like all tests
        arguments.append("--optimised")
    assert soak.main(arguments) == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["cases"] == 4 and found["failures"] == [] and found["seed"] == 0

    again, right = "python -m tests.soak --mode local --replay 0:78", Trial.run

    def off(self, arrays, eagerly=False):
        found = right(self, arrays, eagerly)
        found["d value"] = found["d value"].copy()
        found["d value"].flat[-1] += 0.1
        return found

    monkeypatch.setattr(Trial, "run", off)
    assert soak.main(arguments) == 1
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [one["case"].removesuffix(" --optimised") for one in found["failures"]] == [
        f"{again}:{draw}" for draw in range(4)
    ]
    assert f"{again}:3" in capsys.readouterr().err
    assert soak.main([*arguments, "--replay", "0:78:3"]) == 1
    assert "d value[" in capsys.readouterr().out


@pytest.mark.slow_except("files-0", "looking-6")
@pytest.mark.parametrize(
    ("mode", "index"),
    [*(("looking", i) for i in range(8)), *(("models", i) for i in range(6)), *(("files", i) for i in range(5))],
    ids=str,
)
def test_every_kind_of_trial_passes_and_sees_what_is_wrong(mode, index, monkeypatch):
    trial = soak.make_trial(1, index, mode)
    assert soak.run_case(trial, 0)[0] == [] and trial.covers()
    if mode == "looking":
        found = trial._jitted
        trial._jitted = lambda arrays: {name: x + 0.25 for name, x in found(arrays).items()}
    elif mode == "models":
        monkeypatch.setattr(
            models, "forward", lambda *args: {name: x + 0.01 * x.std() for name, x in right(*args).items()}
        )
    else:
        return
    assert soak.run_case(trial, 0)[0]


right = models.forward


def test_the_reference_of_a_tokenizer():
    assert files.words("I'll  go\n\n 12ab!? x") == ["I", "'ll", " ", " go", "\n\n", " 12", "ab", "!?", " x"]
    assert files.digits_apart("a12 b") == ["a", "1", "2", " b"]
    assert [files.BYTES[byte] for byte in "é \n".encode()] == ["Ã", "©", "Ġ", "Ċ"]


def test_what_counts_as_a_difference():
    of, wanted = structure(), {"out": (np.array([1.0, 0.0, 2.0]), np.array([1e-3, 0.0, np.inf]))}
    ratio = lambda *x: differences(of, {"out": np.array(x)}, wanted)[1]
    assert ratio(1.0005, 0.0, 7.0) == pytest.approx(0.5)
    assert ratio(1.0, np.nan, 2.0) == ratio(np.inf, 0.0, 2.0) == np.inf
    wanted = {"lse": (np.array([-np.inf]), np.array([0.0]))}
    assert differences(of, {"lse": np.array([-np.inf])}, wanted) == ([], 0.0)
    assert differences(of, {"lse": np.array([-3e38])}, wanted)[0]
    assert differences(of, {}, wanted)[0][0].ratio == np.inf


def a_run(folder):
    """A run's files, as `crash.difference` compares them."""
    (folder / "looks").mkdir(parents=True)
    np.savez(folder / "looks" / "00000002.npz", x=np.arange(3))
    np.savez(folder / "findings.npz", x=np.arange(3))
    (folder / "findings.json").write_text('{"environment": {}, "seeds": [0]}')
    (folder / "claims.json").write_text("[]")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "report.html").write_text("x" * 20_000)
    return folder


@pytest.mark.parametrize(
    "name", ["looks/00000002.npz", "findings.npz", "findings.json", "metrics.jsonl", "report.html"]
)
def test_crash_trials_see_numbers_that_differ(tmp_path, name):
    whole, out = a_run(tmp_path / "whole"), a_run(tmp_path / "out")
    assert crash.difference(out, whole) == ""
    if name.endswith("npz"):
        np.savez(out / name, x=np.arange(3) + 1)
    else:
        (out / name).write_text('{"seeds": [1]}')
    assert crash.difference(out, whole) == name


def test_crash_trials_damage_files(tmp_path):
    file, rng = tmp_path / "file", np.random.default_rng(0)
    for how in ("flipped", "cut", "emptied", "doubled"):
        file.write_bytes(b"12345678")
        crash._damage(file, how, rng)
        assert file.read_bytes() != b"12345678"
    crash._damage(file, "removed", rng)
    assert not file.exists()
