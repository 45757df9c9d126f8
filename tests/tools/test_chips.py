"""The chips suite without a chip's compiler: what it finds in a program's text, its tables, and its process."""

import dataclasses
import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jattn_experiments.bench.suite import Refused, Results, Row
from jattn_experiments.bench.worker import Worker
from tools import chip_compiler, chips
from tools.__main__ import main
from tools.chip_compiler import CASES, dense_arrays
from tools.chips import AXES, SUITE, Sizes

LINEAR = """
  %p = bf16[1,64,2,16]{3,1,2,0:T(8,128)(2,1)} parameter(0)
  %w = (s32[]{:T(128)}, f32[8,8,32]{2,1,0:T(8,128)}, pred[8,16,16]) while(%t), metadata={op_name="jit(f)/while"}
  %b = s8[4194304]{0:T(1024)(128)(4,1)} bitcast(%w)
  %s = bf16[4,8]{1,0} slice(%p), slice={[0:4096], [0:8]}, dimensions={64,64}
"""
DENSE = {
    "scores": ("%d = f32[8,64,64]{2,1,0:T(8,128)} dot(%q, %k)", "f32[8,64,64]"),
    "a mask": ("%d = pred[64,64]{1,0} compare(%q, %k)", "pred[64,64]"),
    "flat": ("%d = bf16[4096]{0} bitcast(%q)", "bf16[4096]"),
    "padded": ("%d = f8e4m3fn[1,128,64]{2,1,0} pad(%q)", "f8e4m3fn[1,128,64]"),
    "in a tuple": ("%d = (s32[], u32[64,64]{1,0}) while(%t)", "u32[64,64]"),
    "bytes": ("%d = s8[64,64]{1,0} convert(%q)", "s8[64,64]"),
    "bounded": ("%d = f32[<=64,64]{1,0} dynamic(%q)", "f32[<=64,64]"),
}


def test_blocks_and_views_of_bytes_are_no_dense_arrays():
    assert dense_arrays(LINEAR, 64 * 64) == []


@pytest.mark.parametrize("line, array", DENSE.values(), ids=DENSE)
def test_a_planted_dense_array_is_found(line, array):
    assert dense_arrays(f"{LINEAR}  {line}\n", 64 * 64) == [array]


def test_the_largest_dense_array_comes_first():
    assert dense_arrays("f32[64,64] pred[8,64,64] f32[64,64]", 64 * 64) == ["pred[8,64,64]", "f32[64,64]"]


@pytest.mark.parametrize(
    "implementation, dense", [pytest.param("blockwise", False, marks=pytest.mark.slow), ("xla", True)]
)
def test_a_compiled_program_is_told_from_a_dense_one(implementation, dense):
    function, arrays = chip_compiler.problem(implementation, 16, 1024, "causal", "forward")
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]
    text = jax.jit(function).lower(*types).compile().as_text()
    assert bool(dense_arrays(text, 1024**2)) == dense


# ---- the cells


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["blockwise", "fold"])
@pytest.mark.parametrize("passes", AXES["passes"])
def test_every_cell_is_a_call(implementation, case, passes):
    function, arrays = chip_compiler.problem(implementation, 16, 64, case, passes)
    result = jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays))
    if passes == "gradient":
        assert [(x.shape, x.dtype) for x in result] == arrays[:3]
    elif implementation == "fold":
        assert result["entropy"].shape == (1, 8) and "offset_profile" in result
    else:
        assert (result.shape, result.dtype) == arrays[0]


def test_all_cells_are_those_of_the_issue():
    cells = [job.key for job in chips.jobs(Sizes.read(""))]
    of_a_chip = 4 * 3 * 2 * 6 * 2  # a chip has two kernels of its own, and two that all have
    assert len(cells) == 6 * of_a_chip
    for chip in ("h100", "b200"):
        on_gpu = {cell["implementation"] for cell in cells if cell["chip"] == chip}
        assert on_gpu == {"cudnn", "pallas_gpu", "fold", "blockwise"}
    words = [str(value) for values in AXES.values() for value in values]
    assert len(set(words)) == len(words), "a word of --cells names two things"


def test_cells_are_chosen_by_their_words():
    keys = [job.key for job in chips.jobs(Sizes.read("v5e, 128,blockwise,fold,causal,8191"))]
    of_both = itertools.product(("fold", "blockwise"), ("forward", "gradient"))
    shared = {"chip": "v5e", "head_dim": 128, "length": 8191, "case": "causal"}
    assert keys == [shared | {"implementation": name, "passes": passes} for name, passes in of_both]
    with pytest.raises(Refused, match="--cells: expected some of splash, .*, gradient, separated by commas, got 'v4'"):
        Sizes.read("v4")


def test_what_jattn_refuses_is_refused(monkeypatch):
    cell = {"chip": "v5e", "head_dim": 16, "length": 64, "case": "function", "passes": "forward"}
    monkeypatch.setattr(chip_compiler, "_device", lambda chip: jax.devices("cpu")[0])
    outcome = chip_compiler.compiled("cudnn", **cell)
    assert outcome["result"] == "refused" and outcome["reason"].startswith("implementation='cudnn' cannot do this: ")


@pytest.mark.slow
def test_statistics_take_our_kernels():
    for chip, platform, kernel in (("tpu7x", "tpu", "jattn_fold"), ("h100", "cuda", "mosaic_gpu"), ("b200", "cuda", None)):  # fmt: skip
        function, arrays = chip_compiler.problem("fold", 64, 256, "full", "forward", chip_compiler.FOLDS.get(chip))
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]
        text = jax.jit(function).trace(*types).lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call" not in text if kernel is None else kernel in text, chip


def test_a_dense_program_fails_and_an_error_of_the_compiler_does(monkeypatch):
    monkeypatch.setattr(chip_compiler, "_device", lambda chip: jax.devices("cpu")[0])
    cell = {"chip": "v5e", "head_dim": 8, "length": 64, "case": "full", "passes": "forward"}
    outcome = chip_compiler.compiled("xla", **cell)
    assert outcome["result"] == "failed" and outcome["reason"].startswith("holds T * S elements: ")
    assert outcome["temporaries"] > 0 and outcome["kernels"] == 0

    def overflows(*cell):
        def function(x):
            raise RuntimeError("Ran out of memory in memory space vmem\nand more")

        return function, [((8,), jnp.float32)]

    monkeypatch.setattr(chip_compiler, "problem", overflows)
    outcome = chip_compiler.compiled("xla", **cell)
    assert (outcome["result"], outcome["reason"]) == ("failed", "RuntimeError: Ran out of memory in memory space vmem")


# ---- the process that compiles

ECHO = """
import json, os, sys, time
for line in sys.stdin:
    cell = json.loads(line)
    if cell["do"] == "die":
        print("Check failed: blocks > 0", *cell.get("trace", []), sep="\\n", file=sys.stderr, flush=True)
        os._exit(6)
    time.sleep(60 if cell["do"] == "hang" else 0)
    print(json.dumps({"pid": os.getpid()}), flush=True)
"""


@pytest.mark.slow
def test_one_process_answers_until_it_dies_or_hangs():
    worker = Worker((sys.executable, "-c", ECHO), {}, limit=5.0)
    first = worker(do="answer")["pid"]
    assert worker(do="answer")["pid"] == first
    died = worker(do="die")
    assert (died["result"], died["reason"]) == ("failed", "the process ended with status 6: Check failed: blocks > 0")
    assert worker(do="answer")["pid"] != first
    trace = ["F1125 17:40:00.1 7 dumper.cc:1] profiling failed: FIFO is full", "=== Source Location ===", "_start"]
    assert worker(do="die", trace=trace)["reason"].endswith("status 6: profiling failed: FIFO is full")
    assert worker(do="hang")["reason"] == "took more than 5 seconds"
    assert worker(do="answer")["pid"] != first
    worker.close()


# ---- the suite


class FakeCompiler:
    """Answers as a compiler would; dies after ``lives`` cells."""

    cells: list[dict] = []
    lives = 10**6

    def __call__(self, **cell):
        if len(self.cells) == self.lives:
            raise KeyboardInterrupt
        self.cells.append(cell)
        sizes = {"temporaries": 3 * 2**20, "kernels": 0, "spills": None}
        if cell["implementation"] == "splash":
            return {"result": "refused", "reason": "no a|b", "seconds": 0.0, **dict.fromkeys(sizes)}
        if cell["case"] == "function":
            return {"result": "failed", "reason": "holds T * S elements: f32[9]", "seconds": 1.0, **sizes}
        return {"result": "compiled", "reason": None, "seconds": 2.5, **sizes, "kernels": int(cell["chip"] == "v6e")}

    def kill(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeCompiler, "cells", [])
    monkeypatch.setattr(chips, "Compiler", FakeCompiler)
    monkeypatch.setattr(chips.timing, "cores", lambda: 1)  # so that it is known which cell comes when
    monkeypatch.setattr(chips, "about", lambda sizes: {"environment": {"libtpu": "1.2"}, "shape": {"batch": 1}})
    return FakeCompiler


@pytest.fixture
def suite(fake, monkeypatch):
    fake_suite = dataclasses.replace(SUITE, about=chips.about, start=lambda plan: None)
    monkeypatch.setattr(chips, "SUITE", fake_suite)
    return fake_suite


CELLS = "splash,fold,v5e,v6e,64,8191,causal,function"


def test_a_suite_that_was_stopped_goes_on(suite, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(fake, "lives", 5)
    with pytest.raises(KeyboardInterrupt):
        suite.measure(Sizes.read(CELLS), tmp_path)
    assert len(json.loads((tmp_path / "chips.json").read_text())["cells"]) == 5
    monkeypatch.setattr(fake, "lives", 10**6)
    with pytest.raises(Refused, match="--resume"):
        suite.measure(Sizes.read(CELLS), tmp_path)
    results = suite.measure(Sizes.read(CELLS), tmp_path, resume=True)
    assert len(fake.cells) == len(results.rows) == 2 * 2 * 2 * 2, "a cell was compiled twice or never"


def test_every_cell_gets_its_own_answer_and_is_compiled_once(monkeypatch):
    class Slow(FakeCompiler):
        def __call__(self, number):
            time.sleep(0.02 if number % 3 else 0)
            self.cells.append(number)
            return {"number": number}

    monkeypatch.setattr(FakeCompiler, "cells", [])
    monkeypatch.setattr(chips, "Compiler", Slow)
    ahead = chips.Ahead([{"number": i} for i in range(12)], workers=3)
    assert [ahead(i)["number"] for i in range(2, 12)] == list(range(2, 12))
    assert sorted(FakeCompiler.cells) == list(range(2, 12))


def test_the_command_prints_each_cell_and_fails_if_one_does(suite, tmp_path, capsys):
    assert main(["chips", "--cells", CELLS, "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "fold v6e 64 8191 causal forward: compiled, 3.0 MiB, kernels: 1 (2.5 s)\n" in out
    assert "splash v5e 64 8191 causal forward: refused: no a|b (0 s)\n" in out
    failed = "fold v5e 64 8191 function forward: failed: holds T * S elements: f32[9] (1 s)"
    assert f"{failed}\n" in out and err == f"error: 4 of 16 cells failed; the first: {failed}\n"
    text = (tmp_path / "chips.md").read_text()
    assert "| fold | v5e | 2 | 0 | 2 | 1.8 |" in text and "| splash | v6e | 0 | 4 | 0 | 0.0 |" in text
    assert "| causal | 64 | 8191 | 3.0 | 3.0 | 3.0 | 3.0 |" in text
    assert "| function | 64 | 8191 | failed | failed | failed | failed |" in text
    assert "| refused | 8 | v5e 64 8191 causal forward | no a\\|b |" in text
    assert "| failed | 4 | v5e 64 8191 function forward | holds T * S elements: f32[9] |" in text
    assert main(["chips", "--redraw", "--out", str(tmp_path)]) == 1
    assert (tmp_path / "chips.md").read_text() == text


def cell(implementation, chip, case, passes, kernels, spills):
    key = dict(zip(AXES, (implementation, chip, 64, 8192, case, passes), strict=True))
    values = {"result": "compiled", "reason": None, "seconds": 1.0, "temporaries": 2**20}
    return Row("cells", key, values | {"kernels": kernels, "spills": spills})


def test_spills_are_listed():
    rows = [cell("pallas_gpu", "h100", "full", "forward", 1, 84), cell("pallas_gpu", "h100", "causal", "forward", 1, 0)]
    rows.append(cell("pallas_gpu", "h100", "full", "gradient", 1, None))  # compiled before
    text = chips.markdown(Results({"environment": {}, "shape": {}}, rows))
    assert "Of 2 cells with new kernels, 1 spill registers; the bytes per thread are:" in text
    assert "| full | 64 | 8192 | forward | 84 |" in text
    assert chips.line(rows[0]).endswith("kernels: 1, spills: 84 (1 s)")


def test_a_cell_that_was_not_compiled_yet_is_a_dash():
    rows = [cell("fold", chip, "full", passes, 0, None) for chip, passes in (("v5e", "forward"), ("v5p", "gradient"))]
    text = chips.markdown(Results({"environment": {}, "shape": {}}, rows))
    assert "| full | 64 | 8192 | 1.0 | - | - | 1.0 |" in text and chips.wrong(Results({}, rows)) is None


@pytest.mark.parametrize("suite", ["chips", "pods"])
def test_without_the_compiler_one_line_says_how_to_get_it(suite, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: None)
    assert main([suite, "--out", str(tmp_path)]) == 2
    error = f"error: suite {suite}: expected libtpu, the TPU's compiler, found none. "
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.parametrize("arguments, message", [
    ("dispatch --cells v5e", "--cells: suite dispatch takes only --out"),
    ("chip", "suite: expected one of chips, dispatch, imports, pods, sharding, got 'chip'"),
    ("", "suite: expected one of chips, dispatch, imports, pods, sharding, got ''"),
])  # fmt: skip
def test_what_a_suite_does_not_take_is_named_in_one_line(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
