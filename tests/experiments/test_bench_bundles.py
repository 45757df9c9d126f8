"""The bundles suite without libtpu: what it reads in dumps, tables that kernels compute, its rows and its report."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash
from jattn_experiments.__main__ import main
from jattn_experiments.bench import bundle_compiler, bundles, llo
from jattn_experiments.bench.bundles import FOUR, HEAD, SUITE, Sizes
from jattn_experiments.bench.known_tables import Entries, known, tables_of
from jattn_experiments.bench.suite import Results

# A loop over the grid; in it one of 8 / 2 trips that uses the matrix unit, after a branch that does not.
TEXT = """
= control target key start
LB: loop body
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2   : > { %9 = sbr.rel (%p1) target = $region3 }
   0x3   : > { %10 = vst [vmem:[#allocation5_spill]] %v1 } /* Start region 3 */
   0x4 LB: >> { %s7_s8 = sadd.s32 2, %s6_s8  ;;  %11 = vmatpush.bf16.msra.mxu0 %v2 }
   0x5   : >> { %p2 = scmp.ge.s32.totalorder %s7_s8, 8 /* loop exit test */  ;;  %12 = vst [vmem:[#allocation6_spill]] }
   0x6 PF: > { %13 = vst [vmem:[%s3]] %v3  ;;  %p3 = scmp.ge.s32.totalorder %s2, 66 /* loop exit test */ }
   0x7   :  { %14 = sbr.rel (!%p3) target = $region1 }
"""
SLOTS = """== CAPACTIY:
MXU, XLU, VALU, VSTORE, VSTORE:SPILL
    4     3     4     1     1
== UTILIZATION:
0 0 0 0 0
0 0 0 0 0
0 0 0 0 0
0 0 0 1 1
3 0 0 0 0
1 0 0 1 1
0 0 0 1 0
0 0 0 0 0
"""


def test_a_loop_counts_as_often_as_it_runs_and_a_block_is_what_uses_the_matrix_unit(tmp_path):
    found = llo.code(TEXT, SLOTS)
    assert found == llo.Code(step=6 + 4 * 2, bundles=4 * 2, products=4 * 4, matrix=0.5, spills=0.5)
    for name, text in (("72-final_bundles", TEXT), ("71-schedule-analysis_final_bundles", "none")):
        (tmp_path / f"1-jattn_forward.1-{name}.txt").write_text(text)
    (tmp_path / "1-jattn_forward.1-70-final_hlo-static-per-bundle-utilization.txt").write_text(SLOTS)
    assert llo.read_code(tmp_path, "jattn_forward") == found
    with pytest.raises(ValueError):
        llo.read_code(tmp_path, "jattn_d_query")


def test_cycles_are_read_by_the_name_of_the_kernel(tmp_path):
    for name, cycles in (("jattn_forward.1", 77426), ("fusion", 74)):
        text = f'hlo_op_estimate {{\n  hlo_op_name: "{name}"\n  estimated_cycles: {cycles}\n}}\n'
        (tmp_path / f"{name}_TPU v5 lite_static_llo_profile.textproto").write_text(text)
    assert llo.read_cycles(tmp_path) == {"jattn_forward": 77426, "fusion": 74}


# ---- tables that kernels compute


def test_entries_are_computed_or_refused():
    row, column = np.divmod(np.arange(32), 8)
    table = (row | column << 13 | 2 << 26 | (column == 0) << 28).astype(np.int32)
    entries = Entries(table, 8)
    assert [int(entries[i]) for i in range(32)] == table.tolist()
    square = Entries(table.reshape(1, 4, 8), 8)
    assert int(square[0, 3, 5]) == table[29] and square.shape == (1, 4, 8)
    with pytest.raises(ValueError, match="do not follow from their indices"):
        Entries(np.where(row > column, table, 0), 8)
    with pytest.raises(ValueError, match="expected rows of a power of two of blocks, got 6"):
        Entries(table[:6], 8)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [Splash, PallasTPU])
@pytest.mark.parametrize("queries, keys", [(256, 256), (256, 128)])
def test_kernels_that_compute_their_tables_compute_the_same(implementation, queries, keys):
    arrays = [
        jnp.asarray(np.random.default_rng(i).normal(size=(1, length, 1, 128)), jnp.bfloat16)
        for i, length in enumerate((queries, keys, keys))
    ]
    kernel = implementation(block_sizes=(128, 128), interpret=True)

    def loss(query, key, value):
        return jnp.sum(jnp.sin(jattn.dot_product_attention(query, key, value, implementation=kernel)))

    run = jax.grad(loss, (0, 1, 2))
    expected = run(*arrays)
    tables = tables_of(run, *arrays)
    assert len(tables) == 3, "not the kernels of both passes"
    with known(tables, max(queries, keys) // 128):
        found = run(*arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    assert np.abs(np.asarray(found[0], np.float32)).max() > 0


# ---- the suite

SIZES = Sizes(
    ("v5e", "tpu7x"),
    blocks=(512,),
    simulators=("v5e",),
    simulated=(("splash", 512, 4096), ("splash", 512, 8192), ("pallas_tpu", 512, 4096)),
)


def answers(task, chip, **question):
    """As the compiler would: all kernels alike, but for one that fails and one that takes too long."""
    done = {"result": "compiled", "reason": None, "seconds": 2.0}
    if task == "gradients" and (chip, question["kernel"]) == ("tpu7x", "splash"):
        return done | {"result": "failed", "reason": "no a|b"}
    if question.get("passes") == "d query" and question["kernel"] == "pallas_tpu":
        return done | {"result": "failed", "reason": "took more than 600 seconds"}
    code = {"step": 1700, "bundles": 1200, "products": 3600, "matrix": 0.75, "spills": 0.25}
    if task in ("gradients", "statistics"):
        return done | dict.fromkeys((*bundles.PASSES, FOUR), code)
    if task == "matmul":
        return done | {"cycles": 2**20 + question["simulate"]}
    return done | {"cycles": 1000 * question["queries"] // 512 * (question["keys"] // 512)}


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.setattr(bundles, "ask", answers)
    about = lambda sizes: {"environment": {"libtpu": "1.2"}, "shape": {"head_dim": 128}}
    found = dataclasses.replace(SUITE, about=about, start=lambda plan: None, sizes=lambda plan: SIZES)
    monkeypatch.setattr(bundles, "SUITE", found)
    return found


def test_the_command_prints_rows_and_fails_if_a_kernel_does(suite, tmp_path, capsys):
    assert main(["bench", "--suite", "bundles", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    said = "v5e splash 512 forward: 1200 bundles a block, matrix unit 75%, spill stores 25%; 1700 in all (2 s)\n"
    assert said in out and f"v5e matmul: {2**20 + 1:,} cycles, expected {2**20:,} (2 s)\n" in out
    assert "v5e pallas_tpu 512 d query 4096: failed: took more than 600 seconds (2 s)\n" in out
    assert err == "error: 3 of 14 kernels failed; the first: tpu7x splash 512 forward: failed: no a|b (2 s)\n"
    text = (tmp_path / "bundles.md").read_text()
    assert "| v5e | 512 | forward | 1200 | 75% | 25% | 1700 | 1200 | 75% | 25% | 1700 | 1.00 |" in text
    assert f"| tpu7x | 512 | {FOUR} | - | - | - | - | 1200 | 75% | 25% | 1700 | - |" in text
    # A block takes 1000, a row of 8 blocks 8000, 8 heads of 8 rows 512,000; twice the tokens take 4 times as many.
    rate = f"{2 * 4096**2 * 128 / 64000 / (4096**3 / 2**20):.0%}"
    assert f"| v5e | 4,096 | forward | 0.51 | {rate} | 0.51 | {rate} |" in text
    assert "| v5e | 8,192 | d key and value | 2.05 | " in text
    assert "| v5e | 4,096 | d query | 0.51 | " in text and " | failed | - |" in text
    assert "| tpu7x splash 512 forward | no a\\|b |" in text
    assert f"| v5e | {HEAD} | 64000 | 64000 | 1.000 |" in text
    assert main(["bench", "--suite", "bundles", "--redraw", "--out", str(tmp_path)]) == 1
    assert (tmp_path / "bundles.md").read_text() == text


def test_every_row_is_what_the_compilers_process_answers(monkeypatch):
    monkeypatch.setattr(bundle_compiler, "compiled", lambda function, chip, arrays, flags: None)
    monkeypatch.setattr(bundle_compiler, "read_code", lambda folder, name: llo.code(TEXT, SLOTS))
    monkeypatch.setattr(bundles, "ask", bundle_compiler.answer)
    rows = [
        bundles.code(task, "v5e", "pallas_tpu", 512, one)
        for task, names in (("gradients", bundles.PASSES), ("statistics", [FOUR]))
        for one in names
    ]
    assert [row["bundles"] for row in rows] == [8] * 4 and {row["result"] for row in rows} == {"compiled"}
    monkeypatch.setattr(bundle_compiler, "read_code", lambda folder, name: 1 / 0)
    assert bundles.code("gradients", "v5e", "splash", 512, "forward") | {"seconds": 0} == {
        "result": "failed",
        "reason": "ZeroDivisionError: division by zero",
        "seconds": 0,
    }


def test_a_suite_that_was_stopped_goes_on(suite, tmp_path):
    everything = suite.measure(SIZES, tmp_path)
    kept = json.loads((tmp_path / "bundles.json").read_text())
    suite.write(Results(everything.about, everything.rows[:5]), tmp_path)
    again = suite.measure(SIZES, tmp_path, resume=True)
    assert again == everything and json.loads((tmp_path / "bundles.json").read_text()) == kept


def test_the_programs_are_those_of_the_issue():
    rows = [job.key for job in bundles.jobs(Sizes()) if job.part == "simulated"]
    asked = {
        (kernel, passes, length) for kernel in Sizes.kernels for passes in bundles.PASSES for length in (4096, 32768)
    }
    for chip in ("v5e", "v6e"):
        assert asked == {(row["kernel"], row["passes"], row["length"]) for row in rows if row["chip"] == chip}
    kernels = {(job.key["chip"], job.key["passes"]) for job in bundles.jobs(Sizes()) if job.part == "code"}
    assert kernels == {(chip, passes) for chip in Sizes.chips for passes in (*bundles.PASSES, FOUR)}


def test_options_of_other_suites_are_refused(capsys):
    assert main(["bench", "--suite", "bundles", "--cells", "v5e"]) == 2
    assert capsys.readouterr().err == "error: --cells: --suite bundles takes only --out and --resume and --redraw\n"
