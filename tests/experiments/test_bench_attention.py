"""The attention benchmark: its arithmetic on made-up numbers, and whole runs on tiny problems."""

import ast
import importlib.metadata
import importlib.util
import itertools
import json
import re
import sys
import types
from pathlib import Path

import jax
import matplotlib.image
import numpy as np
import pytest

from jattn_experiments.__main__ import main as run_main
from jattn_experiments.bench import attention, attention_figure, attention_tables, goals, peers, plan, problems, timing
from jattn_experiments.bench.attention import SUITE
from jattn_experiments.bench.plan import Plan
from jattn_experiments.bench.probe import probe
from jattn_experiments.bench.problems import CASES, PASSES, Problem
from jattn_experiments.bench.suite import Suite

without_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU, so it is no mistake")
without_tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="there may be a TPU")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def tiny(monkeypatch, as_experiments_run):
    """Reduces everything that takes time."""
    monkeypatch.setattr(attention, "MATRIX", 64)
    monkeypatch.setattr(attention, "ROUNDS", 1)
    monkeypatch.setattr(attention, "SETTLE", 0.0)
    platforms = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", platforms)


NATIVE = {"jattn-native": "0.1.0"}


def made_up(environment=None, shape=None, **changes) -> dict:
    """Results without rows, except for those in ``changes``."""
    machine = {"device": "cpu: cpu", "contestants": "jattn, jax.nn, torch", "cpu": "a CPU", "cores": "2"}
    shape = {"batch": 1, "num_heads": 8, "head_dim": 64} | (shape or {})
    contents = {"environment": machine | (environment or {}), "shape": shape, "missing": {}}
    return contents | {part: [] for part in ("times", "memory", "peak", "compile")} | changes


def row(case: str, length: int, passes: str = "forward", left_out=None, plain=None, **medians: float) -> dict:
    names = {"jax_nn": "jax.nn", "jattn_blockwise": "jattn blockwise"}
    medians = {names.get(name, name): value for name, value in medians.items()}
    key = {"case": case, "length": length, "dtype": "float32", "passes": passes, "medians": medians}
    key |= {"left_out": left_out or {}, "plain": plain or {}, "flops": Problem(case, length).flops(passes)}
    return key | {"rounds": 3, "seconds": 1.0, "matrix": 17.0, "matrix_flops": 17e6}


def answers(contents: dict) -> dict[str, tuple[float | None, str]]:
    return {one.question: (one.measured, one.answer) for one in attention_tables.goals(SUITE.parse(contents))}


# ---- the work in a case


def visible(case: str, length: int) -> np.ndarray:
    q, kv = np.arange(length)[:, None], np.arange(length)[None, :]
    ids = problems.document_ids(length)
    cases = {"window": kv >= q - problems.WINDOW, "segments": ids[:, None] == ids[None, :]}
    return np.broadcast_to((kv <= q) & cases[case] if case in cases else True, (length, length))


@pytest.mark.parametrize("case", ["full", "window", "segments"])
def test_pairs_are_counted(case, short_window):
    assert Problem(case, 40).pairs() == visible(case, 40).sum()


def test_operations_are_counted_as_usual():
    full, causal = Problem("full", 1000), Problem("causal", 1000)
    assert full.flops("forward") == 4 * 1000**2 * 64 * 8
    assert full.flops("both") == 3.5 * full.flops("forward")
    assert causal.flops("forward") == full.flops("forward") / 2
    assert Problem("full", 1000, batch=3).flops("both") == 3 * full.flops("both")


def test_documents_are_eight_and_in_order():
    ids = problems.document_ids(512)
    assert ids.min() == 0 and ids.max() == 7 and (np.diff(ids) >= 0).all()
    assert (ids == problems.document_ids(512)).all(), "contestants must get the same documents"
    assert problems.document_ids(2).tolist() == [0, 1]


def test_a_batch_is_of_different_sequences():
    query, key, value, ids = Problem("segments", 12, num_heads=2, head_dim=4, batch=3).arrays()
    assert query.shape == key.shape == value.shape == (3, 12, 2, 4) and ids.shape == (12,)
    assert (query[0] != query[1]).any()


# ---- contestants


@pytest.fixture
def short_window(monkeypatch):
    """A window of 7 tokens."""
    for module in ("problems", "peers", "torch_peers"):
        monkeypatch.setattr(f"jattn_experiments.bench.{module}.WINDOW", 7)


def computed(contestant, problem: Problem, passes: str) -> list[np.ndarray]:
    """The outputs, converted to ``[B,T,N,H]`` from the contestant's layout."""
    outputs = contestant.repeated(problem, passes)()
    outputs = [outputs] if passes == "forward" else list(outputs)
    if isinstance(contestant, peers.InTorch):
        return [np.swapaxes(x.numpy(), 1, 2) for x in outputs]
    return [np.asarray(x) for x in outputs]


@pytest.mark.slow_except("full-forward", "softcap-both")
@pytest.mark.parametrize("case, passes", [("full", "forward"), *((case, "both") for case in CASES)])
def test_every_contestant_computes_the_same(case, passes, short_window, as_experiments_run):
    problem = Problem(case, 24, num_heads=2, head_dim=8, batch=2)
    jattn, *others = peers.contestants(plan.PEERS if case == "t5" else plan.PEERS[:3], "cpu")[0]
    expected = computed(jattn, problem, passes)
    assert np.abs(expected[0]).max() > 1e-3
    for other in others:
        if peers.unsupported_reason(other, problem, 1e9) is None:
            for ours, theirs in zip(expected, computed(other, problem, passes), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=other.name)


@needs_torch
@pytest.mark.parametrize("case", ["full", "window", "segments", "alibi", "softcap"])
def test_flex_attention_is_asked_for_the_same(case, monkeypatch, short_window, as_experiments_run):
    import torch
    from torch.nn.attention import flex_attention

    from jattn_experiments.bench import torch_peers

    monkeypatch.setattr(torch, "compile", lambda function: function)  # needs a C++ compiler
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    problem = Problem(case, 24, num_heads=2, head_dim=8, batch=2)
    tensors = [x.detach() for x in torch_peers.InTorch("flex", "cpu", flex=True).inputs(problem)]
    out = torch_peers.torch_flex(problem, "cpu")(*tensors).numpy()
    expected = computed(peers.contestants((), "cpu")[0][0], problem, "forward")[0]
    np.testing.assert_allclose(np.swapaxes(out, 1, 2), expected, atol=2e-5)


def test_a_peer_takes_part_where_it_can(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(dot_product_attention=None))
    by_name = {one.name: one for one in peers.contestants(plan.PEERS, "cpu")[0]}
    assert list(by_name) == ["jattn", "jax.nn", "torch", "tokamax", "jattn xla", "jattn blockwise", "jattn avx2"]
    assert peers.contestants(("jattn-avx2",), "gpu")[0][1:] == []
    for device in "gpu", "tpu":
        (kernels,) = peers.contestants(("jattn-kernels",), device)[0][1:]
        assert kernels.name == f"jattn pallas_{device}" and kernels.dtypes == ("bfloat16",)
    matrix = 3 * 4 * 4096**2

    def why(name: str, case: str, memory: float, batch: int = 1) -> str | None:
        return peers.unsupported_reason(by_name[name], Problem(case, 4096, batch=batch), memory)

    assert why("jattn", "full", 0) is None and why("torch", "causal", 0) is None
    assert why("jax.nn", "full", 8 * matrix) is None
    assert why("jax.nn", "full", 8 * matrix - 1) == "would hold 2 GiB of scores"
    assert why("jax.nn", "full", 16 * matrix, batch=2) is None
    assert why("jax.nn", "full", 16 * matrix - 1, batch=2) == "would hold 3 GiB of scores"
    assert why("torch", "window", matrix, batch=2) is None and why("torch", "alibi", matrix) is not None
    for name in "jattn", "jattn blockwise":
        assert all(why(name, case, 0, batch=8) is None for case in CASES)
    assert why("jax.nn", "softcap", np.inf) == why("torch", "t5", np.inf) == "does not support this case"
    fused = peers.InJax("cudnn", lambda: None, ("full",), dtypes=("bfloat16",))
    assert peers.unsupported_reason(fused, Problem("full", 8), np.inf) == "does not take float32"


def test_on_a_cpu_the_peer_of_kernels_is_what_a_plain_call_is_without_the_package(monkeypatch, as_experiments_run):
    named = []
    record = lambda *arrays, implementation, **_: named.append(implementation)
    monkeypatch.setattr(peers.jattn, "dot_product_attention", record)
    for contestant in peers.contestants(("jattn-kernels",), "cpu")[0]:
        contestant.attention(Problem("full", 8), None, None, None)
    assert named == [None, "blockwise"]


def test_torch_and_tokamax_are_imported_where_they_are_asked_for():
    for file in Path(timing.__file__).parent.glob("*.py"):
        outside = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in outside if re.match(r"(import|from) (torch|tokamax)\b", ast.unparse(node))], file


# ---- in turn


def test_calls_are_timed_in_turn_and_the_order_turns_round():
    called = []
    calls = [lambda name=name: called.append(name) for name in "abc"]
    medians, rounds = timing.in_turn(calls, seconds=0.0, least=4)
    assert rounds == 4 and "".join(called[::2]) == "".join(called[1::2]) == "cbaabccbaabc", "each twice, one untimed"
    assert len(medians) == 3 and min(medians) > 0


def test_a_short_call_is_repeated_for_as_long_as_the_rest():
    called = []
    _, rounds = timing.in_turn([lambda: called.append(1)], seconds=0.0, least=2, settle=1e-3)
    assert rounds == 2 and len(called) > 20


# ---- what was asked


def test_ratios_are_those_of_the_rows():
    contents = made_up(
        times=[
            row("full", 2048, jattn=100.0, jax_nn=220.0, torch=99.0),
            row("causal", 2048, jattn=100.0, jax_nn=349.0),
            row("full", 8192, jattn=1000.0),
            row("causal", 8192, plain={"jattn": 1000.0}, jattn=600.0),
            row("window", 32768, plain={"jattn": 1400.0}, jattn=100.0),
            row("alibi", 2048, plain={"jattn": 100.0, "jattn blockwise": 10.0}, jattn=150.0, jattn_blockwise=12.0),
            row("alibi", 4096, plain={"jattn": 100.0}, jattn=120.0),
            row("full", 1024, jattn=10.0, jax_nn=10.0),
            row("alibi", 512, "both", jattn=21.2, jax_nn=20.0),
        ],
        environment={"contestants": "jattn, jax.nn, torch, jattn blockwise"},
    )
    answer_to = answers(contents)
    peer = "forward, n = 2048: time of {} / time of jattn"
    assert answer_to["full, " + peer.format("jax.nn")] == (2.2, "met")
    assert answer_to["causal, " + peer.format("jax.nn")] == (3.49, "not met")  # the planted failure
    assert answer_to["full, " + peer.format("torch")] == (0.99, "not met")
    assert answer_to["causal, " + peer.format("torch")] == (None, "not measured")
    assert answer_to["causal / full, forward, n = 8192"] == (0.6, "met")
    assert answer_to["window / full, forward, n = 32768"] == (100 / 1400, "met")
    assert answer_to["jattn: alibi / causal, forward, n >= 2048"] == (1.5, "not met")
    assert answer_to["jattn blockwise: alibi / causal, forward, n >= 2048"] == (1.2, "met")
    assert answer_to["jattn: softcap / full, forward, n >= 2048"] == (None, "not measured")
    worst = "every case, n <= 1024: time of jattn / time of jax.nn (worst: alibi, forward and backward, n = 512)"
    assert answer_to[worst] == (pytest.approx(1.06), "not met")


def test_shares_are_of_the_rate_in_the_same_row_and_the_worst_length_counts():
    # half of 1e6 operations per microsecond takes flops / 0.5e6
    times = {n: Problem("full", n).flops("forward") / 1e6 for n in (2048, 4096, 8192)}
    contents = made_up(times=[row("full", n, jattn=times[n] * k) for n, k in ((2048, 9.0), (4096, 1.25), (8192, 2.5))])
    question = "full, forward, n >= 4096: share of the matrix rate"
    assert answers(contents)[question] == (pytest.approx(0.4), "not met")
    contents["times"][2]["matrix"] *= 1.75  # the machine was slower at that moment; the share is relative to it
    assert answers(contents)[question] == (pytest.approx(0.7), "met")


def plain_calls(speed: float, share: float, **environment: str) -> list[tuple[float | None, str]]:
    """The answers on a machine where the worst length has this speed, compared with torch, and this share."""
    rows = []
    for case, passes in itertools.product(("full", "causal"), PASSES):
        for n, better in ((1024, 0.5), (2048, 1.5), (4096, 1.0), (8192, 1.1)):
            time = Problem(case, n).flops(passes) / 1e6 / share
            rows.append(row(case, n, passes, jattn=time / better, torch=speed * time))
    answer_to = answers(made_up(times=rows, environment=environment))
    return [answer_to[question] for question in answer_to if "n = 2048 to 8192" in question or "share" in question]


@pytest.mark.parametrize(
    "vectors, forward, both", [("avx512f", 2.0, 1.8), ("avx2", 1.1, 1.0), ("asimd", 1.1, 1.0), (None, 1.1, 1.0)]
)
def test_a_plain_call_with_the_compiled_kernels_is_judged_by_its_worst_length(vectors, forward, both):
    environment = NATIVE if vectors is None else NATIVE | {"vectors": vectors}
    for least in forward, both:
        for speed, answer in ((least + 1e-6, "met"), (least - 1e-6, "not met")):
            plain = plain_calls(speed, 0.9, **environment)[:4]
            assert [measured for measured, _ in plain] == [pytest.approx(speed)] * 4
            assert [one for _, one in plain][least != forward :: 2] == [answer] * 2


def test_shares_asked_of_a_plain_call_are_higher_with_the_compiled_kernels_and_avx512():
    higher = NATIVE | {"vectors": "avx512f"}
    # forward, full and causal, then both passes; "not met" below .88, .80, .75 and .65
    for share, missed in ((0.89, 0), (0.87, 1), (0.79, 2), (0.74, 3), (0.64, 4)):
        plain = [answer for _, answer in plain_calls(3.0, share, **higher)[4:]]
        assert plain == ["not met"] * missed + ["met"] * (4 - missed)


def test_nothing_more_is_asked_without_the_compiled_kernels():
    for environment in {}, {"vectors": "avx512f", "jattn-native": "not installed"}:
        share = pytest.approx(0.65)
        assert plain_calls(3.0, 0.65, **environment) == [(share, "not met"), (share, "met")]


def test_a_batch_is_compared_with_the_faster_peer_at_each_length():
    rows = [
        row("full", 128, "both", jattn=10.0, jax_nn=9.0, torch=20.0),
        row("full", 256, "both", jattn=10.0, jax_nn=20.0, torch=10.0),
        row("causal", 128, "both", jattn=10.0, jax_nn=20.0),
        row("causal", 128, jattn=10.0, jax_nn=1.0, torch=1.0),
    ]
    question = "{}, forward and backward, n = {}: time of the faster of torch and jax.nn / time of jattn"
    assert answers(made_up(times=rows, shape={"batch": 8})) == {
        question.format("full", 128): (0.9, "not met"),
        question.format("full", 256): (1.0, "met"),
        question.format("causal", 128): (None, "not measured"),
        question.format("causal", 256): (None, "not measured"),
    }


def test_shares_that_moved_are_told(tmp_path, monkeypatch):
    """Against the last kept result of the same kind of machine, which is not the one that is written."""
    here = {"device": "cpu: cpu", "cpu": "a CPU", "vectors": "avx2", "cores": "2", "contestants": "jattn"}
    folders = {"cpu-1": (here, 1.0), "cpu-2": (here, 2.0), "cpu-3": (here | {"vectors": "avx512f"}, 3.0)}
    for name, (environment, time) in folders.items():
        (tmp_path / name).mkdir()
        contents = made_up(environment=environment, times=[row("full", 8, jattn=time, torch=1.0)])
        (tmp_path / name / "attention.json").write_text(json.dumps(contents))
    monkeypatch.setattr(attention, "RESULTS", tmp_path)
    shape = made_up()["shape"]
    before = attention.last_kept(here, shape, tmp_path / "cpu-9")
    assert before["folder"] == "cpu-2" and attention.last_kept(here, shape, tmp_path / "cpu-2")["folder"] == "cpu-1"
    assert attention.last_kept(here, shape | {"batch": 8}, tmp_path)["shares"] == {}
    for time, lines in ((2.08, 0), (1.88, 1), (2.2, 1)):
        results = SUITE.parse(made_up(environment=here, before=before, times=[row("full", 8, jattn=time, torch=9.0)]))
        assert len(attention_tables.moved(results)) == lines
    text = attention_tables.markdown(results)
    assert "of the matrix rate, " in text and " in cpu-2.\n" in text
    assert attention.last_kept(here | {"cores": "4"}, shape, tmp_path)["shares"] == {}


def test_memory_and_compilation_are_judged():
    def memory(passes: str, length: int, size: float) -> dict:
        return {"contestant": "jattn", "case": "full", "passes": passes, "length": length, "bytes": size}

    linear = [memory("both", n, 2048.0 * n) for n in (4096, 8192, 32768)]
    product = [memory("hvp", 32768, 161 * 2**20)]
    compiled = [
        {"contestant": name, "case": "full", "length": 2048, "passes": passes, "seconds": seconds}
        for name, passes, seconds in (("jattn", "forward", 1.5), ("jattn", "both", 3.1), ("jax.nn", "forward", 9.0))
    ]
    answer_to = answers(made_up(memory=linear + product, compile=compiled))
    name = "temporaries of one head, full"
    assert answer_to[f"{name}, forward and backward, n = 32768"] == (64.0, "met")
    assert answer_to[f"{name}, forward and backward: exponent of growth"] == (pytest.approx(1.0), "met")
    assert answer_to[f"{name}, Hessian-vector product, n = 32768"] == (161.0, "not met")
    assert answer_to["compilation, forward, the slowest in the table below"] == (1.5, "met")
    assert answer_to["compilation, forward and backward, the slowest in the table below"] == (3.1, "not met")

    dense = [memory("both", n, 4.0 * n**2) for n in (128, 4096, 8192)]
    sizes = attention_tables.temporaries(SUITE.parse(made_up(memory=dense)), "jattn", "full", "both")
    assert attention_tables.slope(sizes) == pytest.approx(2)


def test_nothing_is_asked_of_another_device():
    contents = made_up(times=[row("full", 2048, jattn=1.0, jax_nn=1.0)])
    assert attention_tables.goals(SUITE.parse(contents))
    contents["environment"]["device"] = "gpu: a GPU"
    results = SUITE.parse(contents)
    assert not attention_tables.goals(results) and "## Goals" not in attention_tables.markdown(results)


def test_tables_show_time_share_and_who_is_left_out():
    rows = [
        row("full", 256, jattn=1340.0, torch=33.5, left_out={"jax.nn": "would hold 9 GiB of scores"}),
        row("full", 64, jattn=2.0, jax_nn=3.0, torch=4.0),
    ]
    text = attention_tables.markdown(SUITE.parse(made_up(times=rows, missing={"tokamax": "tokamax is not installed"})))
    lines = text.splitlines()
    share = Problem("full", 256).flops("forward") / 1340.0 / 1e6
    long = f"| full | 256 | 1.34 ({share:.2f}) | - | 0.0335 ({share * 40:.2f}) | 3 |"
    assert lines.index(long) == lines.index("| full | 64 | 0.0020 (4.19) | 0.0030 (2.80) | 0.0040 (2.10) | 3 |") + 1
    assert "- jax.nn, full, n = 256: would hold 9 GiB of scores." in lines
    assert "Not here: tokamax is not installed." in lines and "- cores: 2" in lines


# ---- whole runs


def short_plan(out: Path, **changes) -> Plan:
    plan = {"peers": ("jax",), "lengths": (8, 16), "cases": ("causal",), "parts": ("times",)}
    return Plan(out, **plan | {"seconds": 1e-3} | changes)


@pytest.mark.slow
def test_redrawing_measures_nothing_and_gives_the_same(tmp_path, tiny, monkeypatch, capsys):
    plan = short_plan(tmp_path, lengths=(8,), parts=("times", "memory"))
    results = SUITE.measure(plan, plan.out)
    rows = [("causal", 8, dtype, one) for dtype in ("float32", "bfloat16") for one in PASSES]
    assert [tuple(r.key.values()) for r in results.of("times")] == rows
    assert all(set(r["medians"]) == {"jattn", "jax.nn"} and r["matrix"] > 0 for r in results.of("times"))
    assert len(results.of("memory")) == 2 * 3 and all(r["bytes"] > 0 for r in results.of("memory"))
    SUITE.write_report(results, plan.out)
    files = [tmp_path / f"attention.{kind}" for kind in ("json", "md", "png")]
    before = [file.read_bytes() for file in files]
    for file in files[1:]:
        file.unlink()
    monkeypatch.setattr(Suite, "measure", None)
    assert run_main(["bench", "--redraw", "--out", str(tmp_path)]) == 0
    assert [file.read_bytes() for file in files] == before
    shown = capsys.readouterr().out
    assert f"report: {files[1]}" in shown and "not measured" not in shown

    picture = matplotlib.image.imread(files[2])[..., :3]
    assert picture.shape[1] == 1800 and (picture[0, 0] == 1).all(), "the background is not white"
    for colour in ("#0072B2", "#E69F00"):  # jattn's line and jax.nn's
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(picture - rgb).max(-1) < 0.02).sum() > 100, f"{colour} is not drawn"


def test_a_picture_of_nothing_and_of_everything():
    assert attention_figure.attention_figure(SUITE.parse(made_up())).axes
    every = itertools.product(CASES, (64, 128), PASSES)
    times = [row(case, n, passes, jattn=n * 1.0, torch=n * 2.0) for case, n, passes in every]
    drawn = attention_figure.attention_figure(SUITE.parse(made_up(times=times)))
    forward = drawn.axes[0]
    assert [list(line.get_ydata()) for line in forward.lines[:3]] == [[64, 128], [], [128, 256]]
    assert drawn.get_suptitle().startswith("Causal attention, float32, B=1 N=8 H=64, a CPU, 2 cores")


@pytest.mark.slow
def test_a_batch_is_measured_and_kept_apart(tmp_path, tiny, capsys):
    options = ["--peers", "jax", "--lengths", "8", "--cases", "causal", "--parts", "times", "--seconds", ".001"]
    assert run_main(["bench", *options, "--batch", "2", "--out", str(tmp_path)]) == 0
    contents = json.loads((tmp_path / "attention.json").read_text())
    assert contents["shape"] == {"batch": 2, "num_heads": 8, "head_dim": 64}
    assert contents["environment"]["jattn-native"] == timing.native_version()
    assert contents["environment"]["jattn_source"] == timing.source_digest()
    flops = [Problem("causal", 8, batch=2).flops(one) for one in PASSES]
    assert [row["flops"] for row in contents["times"]] == flops * 2  # in float32 and in bfloat16
    assert (tmp_path / "attention.md").read_text().splitlines()[2].startswith("B=2 N=8 H=64, T = S = n.")
    capsys.readouterr()
    assert run_main(["bench", *options, "--out", str(tmp_path), "--resume"]) == 2
    held = f"{tmp_path / 'attention.json'} holds results of another problem shape"
    assert capsys.readouterr().err == f"error: --out: {held}: batch was 2, now 1\n"


def test_the_package_of_the_compiled_kernels_is_told(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jattn_native" else real(name))
    assert timing.native_version() == timing.machine()["jattn-native"] == "not installed"
    assert not goals.has_native(timing.machine()) and not goals.has_native({})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1.2")
    assert timing.native_version() == "jattn-native 1.2" and goals.has_native({"jattn-native": "1.2"})


def test_the_command_says_who_is_missing(tmp_path, tiny, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    options = ["--peers", "jax,torch", "--lengths", "8", "--cases", "softcap", "--parts", "times", "--seconds", ".001"]
    assert run_main(["bench", *options, "--out", str(tmp_path)]) == 0
    assert "torch is not installed: pip install 'jattn[bench]'\n" in capsys.readouterr().out
    text = (tmp_path / "attention.md").read_text()
    assert "Not here: torch is not installed: pip install 'jattn[bench]'." in text
    assert "| case | n | jattn | jax.nn | rounds |" in text and "- jax.nn, softcap: does not support this case." in text


def test_a_peer_that_fails_is_left_out_and_jattn_is_not(tiny):
    def fails(*arrays):
        raise NotImplementedError("not today\nnor tomorrow")

    jattn = peers.contestants((), "cpu")[0][0]
    broken = peers.InJax("broken", fails, ("full",))
    problem = Problem("full", 8)
    times = attention.time_row(problem, "forward", [jattn, broken], 1e9, 1e-3)
    assert list(times["medians"]) == ["jattn"]
    assert times["left_out"] == {"broken": "NotImplementedError: not today"}
    missing = attention.temporaries(broken, problem, "both")
    assert missing == {"bytes": None, "reason": "NotImplementedError: not today"}
    with pytest.raises(NotImplementedError):
        attention.time_row(problem, "forward", [peers.InJax("jattn", fails, ("full",))], 1e9, 1e-3)


@pytest.mark.slow
def test_fresh_processes_tell_memory_and_compilation(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(attention, "COMPILATIONS", 1)
    monkeypatch.setattr(attention, "PASSES", ("forward",))
    plan = short_plan(tmp_path, peers=(), lengths=(16,), cases=("causal",), parts=("peak", "compile"))
    results = SUITE.measure(plan, plan.out)
    assert results.of("peak")[0]["bytes"] > 0 and 0 < results.of("compile")[0]["seconds"] < 60
    text = attention_tables.markdown(results)
    assert "## Peak memory" in text and "| jattn | causal | 16 | forward |" in text


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="StopIteration"):
        probe("peak", "cpu", [], "nobody", Problem("full", 8), "both")


@pytest.mark.parametrize("options, message", [
    ("--suite layer", "--suite: expected one of attention, chip, language, layers, looking, reports, got 'layer'\n"),
    ("--suite chips", "--suite: expected one of attention, chip, language, layers, looking, reports, got 'chips'\n"),  # one of tools
    ("--peers jax,flax", "--peers: expected some of jax, torch, tokamax, splash, jattn-xla, jattn-kernels, jattn-avx2, separated by commas, got"),
    ("--peers=", "--peers: expected some of jax, torch, tokamax, splash, jattn-xla, jattn-kernels, jattn-avx2, separated by commas, got ''"),
    ("--cases diagonal", "--cases: expected some of full, causal, window, "),
    ("--cases ,", "--cases: expected some of full, "),
    ("--parts energy", "--parts: expected some of times, memory, peak, compile, "),
    ("--lengths=-4", "--lengths: expected whole numbers of at least 2, separated by commas, got '-4'"),
    ("--lengths 8,1", "--lengths: expected whole numbers of at least 2, separated by commas, got '8,1'"),
    ("--device npu", "--device: expected one of cpu, gpu, tpu, got 'npu'"),
    pytest.param("--device tpu", "--device: JAX finds no tpu here; ", marks=without_tpu),
    pytest.param("--device gpu", "--device: JAX finds no gpu here; ", marks=without_gpu),
    ("--seconds 0", "--seconds: expected > 0, got 0.0"),
    ("--batch 0", "--batch: expected >= 1, got 0"),
    ("--suite layers --batch 8", "--batch: --suite layers takes only --device and --out and --seconds\n"),
    ("--suite layers --lengths 8", "--lengths: --suite layers takes only --device and --out and --seconds\n"),
    ("--suite layers --resume", "--resume: --suite layers takes only --device and --out and --seconds\n"),
    ("--suite layers --device gpux", "--device: expected one of cpu, gpu, tpu, got 'gpux'\n"),
    ("--suite layers --seconds 0", "--seconds: expected > 0, got 0.0\n"),
    ("--suite language --lengths 8", "--lengths: --suite language takes only --out and --seconds\n"),
    ("--suite reports --lengths 8", "--lengths: --suite reports takes only --out and --resume and --redraw\n"),
    ("--redraw", "--out: expected a folder with attention.json, got "),
])  # fmt: skip
def test_bad_options_are_named_in_one_line(options, message, tmp_path, capsys):
    assert run_main(["bench", "--out", str(tmp_path / "out"), *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_or_broken_is_refused(tmp_path, capsys):
    file = tmp_path / "attention.json"
    file.write_text("{")
    assert run_main(["bench", "--out", str(file)]) == 2
    assert run_main(["bench", "--out", str(tmp_path), "--redraw"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: --out: ") and second.startswith(f"error: --out: {file} is not valid JSON: ")
