"""The pods suite without a compiler: its formula of bytes, its roofline and its tables. With one, a small run."""

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest

from jattn.sharding import to_zigzag
from jattn_experiments.bench.suite import Results, Row
from tools import chips, pod_arithmetic, pod_compiler, pods
from tools.pod_arithmetic import FLOPS, HBM, LINK, PASSES, Program, hop
from tools.pod_stack import Stack
from tools.pods import SUITE, Sizes

MIB = 2**20
KEYS = 2 * 8 * 128 * 16384 * 2  # bytes of the keys and values of a chip with 16384 tokens


# ---- what a ring must send


def test_a_topology_has_the_product_of_its_sizes():
    assert Program("v5p:4x4x4", 1048576).chips == 64 and Program("v5p:4x4x4", 1048576).tokens == 16384
    assert Program("v5e:4x4", 4096).chips == 16 and Program("h100:1x1x8", 4096).chips == 8


@pytest.mark.parametrize("how, passes, sends", [
    (("zigzag", "causal"), "forward", 7 * KEYS),
    (("zigzag", "causal"), "gradient", (7 + 7 + 7 * 2) * KEYS),  # gradients are twice as wide
    (("zigzag", "alibi"), "forward", 7 * KEYS),
    (("zigzag", "alibi"), "gradient", (7 + 7 + 7 + 7 * 2) * KEYS),
    (("contiguous", "window"), "forward", KEYS),
    (("contiguous", "window"), "gradient", (1 + 1 + 1 * 2) * KEYS),
    (("zigzag", "window"), "forward", 2 * KEYS),
    (("zigzag", "window"), "gradient", (2 + 2 + 2 * 2) * KEYS),
])  # fmt: skip
def test_bytes_that_a_chip_sends(how, passes, sends):
    assert Program("v5p:2x2x2", 131072, *how, passes).permuted() == sends


def test_a_chip_alone_sends_nothing():
    assert [Program("v5p:1x1x1", 4096, passes=passes).permuted() for passes in PASSES] == [0, 0]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("chips, window", [(2, 31), (4, 8), (4, 9), (8, 0), (8, 1), (8, 20), (8, 200)])
def test_the_chips_visited_are_those_whose_keys_any_chip_sees(layout, chips, window, monkeypatch):
    monkeypatch.setattr(pod_arithmetic, "WINDOW", window)
    tokens = np.arange(64) if layout == "contiguous" else np.asarray(to_zigzag(np.arange(64), chips, axis=0))
    behind, chip = tokens[:, None] - tokens, np.arange(64) // (64 // chips)
    apart = (chip[:, None] - chip) % chips
    assert Program(f"v5p:{chips}", 64, layout, "window").visits() == len(set(apart[(behind >= 0) & (behind <= window)]))


# ---- the roofline


@pytest.mark.parametrize("passes, products, width", [("forward", 2, 2), ("gradient", 5, 6)])
def test_a_hop_at_the_published_rates(passes, products, width):
    one_hop = hop(16384, passes)
    assert one_hop["flops"] == products * 2 * 128 * 32 * 16384**2 / 2
    assert one_hop["link"] == width * 2 * 8 * 128 * 16384
    wanted = {"compute": one_hop["flops"] / FLOPS, "memory": one_hop["hbm"] / HBM, "link": one_hop["link"] / LINK}
    assert one_hop["seconds"] == wanted
    edge = one_hop["hidden_from"]
    at, below = (hop(tokens, passes)["seconds"] for tokens in (edge, edge - 1))
    assert at["compute"] >= at["link"] and below["compute"] < below["link"]
    assert edge == hop(256, passes)["hidden_from"]


def test_memory_of_a_hop_counts_each_array_once_and_sums_twice():
    rows, columns, lse = 32 * 128 * 100, 8 * 128 * 100, 32 * 100
    assert hop(100, "forward")["hbm"] == 2 * (rows + 2 * columns) + 4 * 2 * (rows + lse)
    assert hop(100, "gradient")["hbm"] == 2 * (3 * rows + 2 * columns) + 4 * 2 * (rows + 2 * columns) + 4 * lse


# ---- the programs


def test_every_program_is_compiled_forward_and_with_its_gradient():
    keys = [(job.part, *job.key.values()) for job in SUITE.jobs(Sizes())]
    assert len({str(key) for key in keys}) == len(keys)
    assert all(job.key.keys() == set(SUITE.parts[job.part]) for job in SUITE.jobs(Sizes()))
    rings = [Program(*key[1:]) for key in keys if key[0] == "rings"]
    for one in rings:
        assert dataclasses.replace(one, passes="gradient") in rings
        assert one.length % (2 * one.chips) == 0
    for topology in ("v5p:2x2x2", "v5e:4x4"):
        cases = {(one.layout, one.case) for one in rings if one.topology == topology}
        assert cases == {("zigzag", "causal"), ("zigzag", "window"), ("contiguous", "window"), ("zigzag", "alibi")}
    million = {one.chips for one in rings if (one.length, one.case) == (1048576, "causal")}
    assert million >= {8, 16, 32, 64}


@pytest.mark.parametrize("case", pod_arithmetic.CASES)
@pytest.mark.parametrize("passes", PASSES)
def test_every_program_is_a_call(case, passes, monkeypatch):
    monkeypatch.setattr(pod_compiler, "devices", lambda topology: jax.devices("cpu")[:1])
    function, types = pod_compiler.problem(Program("v5p:1", 256, "zigzag", case, passes))
    result = jax.eval_shape(function, *types)
    wanted = [types[0]] if passes == "forward" else types
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(result)] == [(x.shape, x.dtype) for x in wanted]


@pytest.mark.parametrize(
    "message, result",
    [("RESOURCE_EXHAUSTED: needs 378 GB\nof 95", "too large"), ("INTERNAL: no\nreason", "failed")],
)
def test_what_the_compiler_says_is_the_reason(message, result, monkeypatch):
    def refuse(topology):
        raise RuntimeError(message)

    monkeypatch.setattr(pod_compiler, "devices", refuse)
    outcome = pod_compiler.compiled(**dataclasses.asdict(Program("v5p:2x2x2", 64)))
    assert (outcome["result"], outcome["reason"]) == (result, f"RuntimeError: {message.splitlines()[0]}")


# ---- the tables


def travels(arrays, size, times, *behind):
    return {"arrays": arrays, "bytes": size, "times": times, "behind": list(behind)}


def row(program, permutes, temporaries=900 * MIB, **others):
    values = {"result": "compiled", "reason": None, "seconds": 20.0, "planning": 1.0, "planning_peak": 300 * MIB}
    values |= {"peak": 900 * MIB, "arguments": 192 * MIB, "outputs": 128 * MIB, "temporaries": temporaries}
    values |= {"kernels": 0, "collective-permute": len(permutes), "all-gather": 0, "all-reduce": 0}
    return Row("rings", dataclasses.asdict(program), values | {"permutes": permutes} | others)


def results(*rows):
    return Results({"environment": {"libtpu": "1.2"}, "shape": pods.SHAPE}, list(rows))


def ring(topology, passes, **values):
    """A row of a million tokens that sends what it must: all hidden, but for the first hop of the backward pass."""
    program = Program(topology, 1048576, passes=passes)
    keys, visits = 2 * 8 * 128 * program.tokens * 2, program.chips
    permutes = [travels(2, keys, visits - 1, "loop")]
    if passes == "gradient":
        permutes += [travels(2, keys, 1), travels(2, keys, visits - 2, "kernel")]
        permutes.append(travels(2, 2 * keys, visits - 1, "loop"))
    return row(program, permutes, **values)


STACK = Stack("v5p:4x4x4", (2, 2, 16), 2, 1048576)


def stack(program=STACK, **values):
    """A row of the stack: 20 GiB a chip, parameters gathered."""
    one = row(Program("v5p:4x4x4", 1048576), [travels(2, KEYS, 15, "loop")], temporaries=20 * 2**30, **values)
    return dataclasses.replace(one, part="stacks", key=dataclasses.asdict(program))


def good():
    sizes = {"v5p:2x2x2": 6600 * MIB, "v5p:2x2x4": 3400 * MIB, "v5p:2x4x4": 1750 * MIB, "v5p:4x4x4": 900 * MIB}
    rings = [ring(topology, passes, temporaries=size) for topology, size in sizes.items() for passes in PASSES]
    return [*rings, stack(longest_gathered=11008)]


def answers(*rows):
    return {one.question: one for one in pods.goals(results(*rows))}


def test_a_ring_as_it_should_be_meets_every_goal():
    goals = answers(*good())
    assert {one.answer for one in goals.values()} == {"met"} and len(goals) == 13
    measured = [round(one.measured, 3) for one in goals.values()]
    assert measured == [0.879, 0.879, 1.941, 1.941, 0, 1, 1, 0, 1, 1, 21.81, 0.168, 0.293]


@pytest.mark.parametrize("topology, passes, worse, missed", [
    ("v5p:4x4x4", "gradient", {"temporaries": 1025 * MIB}, ["64 chips, gradient", "gradient: smallest factor"]),
    ("v5p:2x4x4", "forward", {"temporaries": 1600 * MIB}, ["forward: smallest factor"]),
    ("v5p:2x2x2", "forward", {"all-gather": 1}, ["all-gathers"]),
    ("v5p:2x2x2", "forward", {"permutes": [travels(2, KEYS * 8, 8, "loop")]}, ["formula: the most"]),
    ("v5p:2x2x2", "forward", {"permutes": [travels(2, KEYS * 8, 6, "loop")]}, ["least of the causal"]),
    ("v5p:2x2x2", "forward", {"permutes": [travels(2, KEYS * 8, 7)]}, ["most in a ring, forward"]),
    ("v5p:2x2x4", "forward", {"planning": 10.5}, ["planning"]),
    ("v5p:2x2x4", "forward", {"planning_peak": 2049 * MIB}, ["of planning"]),
])  # fmt: skip
def test_a_goal_that_is_not_met_says_so(topology, passes, worse, missed):
    key = ring(topology, passes).key
    goals = answers(*(dataclasses.replace(x, values=x.values | worse) if x.key == key else x for x in good()))
    assert [one for one in goals if goals[one].answer == "not met" and any(name in one for name in missed)]
    assert sum(one.answer == "not met" for one in goals.values()) == len(missed)


@pytest.mark.parametrize("worse, missed", [
    ({"longest_gathered": 131072}, "longest gathered axis"),
    ({"longest_gathered": 0, "outputs": 80e9}, "a chip holds"),
])  # fmt: skip
def test_a_stack_that_gathers_a_sequence_or_is_too_large_says_so(worse, missed):
    goals = answers(*good()[:-1], stack(**worse))
    unmet = [question for question, one in goals.items() if one.answer == "not met"]
    assert unmet == [question for question in goals if missed in question]
    assert pods.line(stack(**worse)).startswith("v5p:4x4x4 (2, 2, 16) 2 1048576 attention: holds ")


def test_nothing_compiled_is_not_measured():
    assert {one.answer for one in pods.goals(results())} == {"not measured"}


def test_a_loop_of_unknown_length_leaves_the_bytes_unknown():
    one = row(Program("v5p:2x2x2", 131072), [travels(1, 8, 3, "loop"), travels(2, 8, None)])
    assert pods.sent(one) is None and pods.journeys(one) == (5, 2)
    assert "sends ? MiB, 3 of 5 hidden (loop)" in pods.line(one)
    assert answers(one)["bytes that a chip sends, as a share of the formula: the most"].answer == "not measured"


def test_the_report(tmp_path):
    large = {"result": "too large", "reason": "JaxRuntimeError: 378 GB | 95", "seconds": 3.0}
    rows = [
        row(Program("v5p:2x2x2", 131072), [travels(2, KEYS, 8, "kernel", "loop"), travels(1, MIB, 1)]),
        Row("rings", dataclasses.asdict(Program("v5p:2x2x2", 8388608)), large),
        dataclasses.replace(row(Program("h100:1x1x8", 131072), [travels(2, KEYS, 7)]), part="gpus"),
        stack(longest_gathered=11008),
        dataclasses.replace(stack(Stack("v5p:4x4x4", (1, 4, 16), 1, 1048576, "nothing")), values=large),
        Row("roofline", {"topology": "v5p:2x2x2", "length": 131072, "passes": "forward"}, hop(16384, "forward")),
    ]
    text = pods.markdown(results(*rows))
    first = "| v5p:2x2x2 | 131,072 | zigzag | causal | forward |"
    assert f"{first} 192 | 128 | 900 | 1.0 | 300 | 20 | 900 |" in text
    assert f"{first} 513 | 448 | 1.145 | 16 of 17 hidden (kernel, loop) | 2 | 0 | 0 | 0 |" in text
    last = "| v5p:2x2x2 | 8,388,608 | zigzag | causal | forward |"
    assert f"{last} too large | - |" in text and f"{last} JaxRuntimeError: 378 GB \\| 95 |" in text
    assert "| h100:1x1x8 | 131,072 | zigzag | causal | forward | 448 | 448 | 1.000 | 0 of 14 hidden | 1 |" in text
    assert "| v5p:2x2x2 | 131,072 | 16,384 | forward | 2,199 |" in text
    assert "one line: " + pods.line(rows[-1]) == "one line: v5p:2x2x2 131072 forward: hidden from 2,295 tokens per chip"
    assert "| v5p:4x4x4 | 2 x 2 x 16 | 2 | 1,048,576 | attention | 192 | 128 | 20,480 | 21.8 |" in text
    assert "| v5p:4x4x4 | 1 x 4 x 16 | 1 | 1,048,576 | nothing | too large |" in text
    assert pods.wrong(results(*rows)) is None
    failed = dataclasses.replace(rows[1], values=large | {"result": "failed"})
    assert pods.wrong(results(failed)) == f"1 of 1 programs failed; the first: {pods.line(failed)}"
    SUITE.write(results(*rows), tmp_path)
    assert pods.markdown(SUITE.read(tmp_path)) == text


def test_each_program_has_a_process_of_its_own(monkeypatch):
    class FakeCompiler:
        closed = 0

        def __init__(self, module):
            assert module == "tools.pod_compiler"

        def __call__(self, **cell):
            return {"result": "compiled", "cell": cell}

        def close(self):
            FakeCompiler.closed += 1

    monkeypatch.setattr(pods, "Compiler", FakeCompiler)
    program = Program("v5p:2x2x2", 4096)
    assert [pods.compiled(program)["cell"] for _ in range(2)] == [dataclasses.asdict(program)] * 2
    assert FakeCompiler.closed == 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU's compiler, is not installed")
def test_a_small_run(tmp_path, monkeypatch):
    monkeypatch.setattr(chips, "environment", lambda: {"libtpu": "installed"})
    measured = SUITE.measure(Sizes(rings=(Program("v5p:2x2x2", 4096),), gpus=(), stacks=()), tmp_path)
    assert [one["result"] for one in measured.of("rings")] == ["compiled"] * 2
    for one in measured.of("rings"):
        assert one["all-gather"] == 0 and one["temporaries"] > 0 and one["peak"] >= one["planning_peak"]
        assert 0.9 < pods.sent(one) / Program(**one.key).permuted() < 1.2
        assert pods.journeys(one)[0] >= 2 * 7
    text = SUITE.write_report(measured, tmp_path).read_text()
    assert "| v5p:2x2x2 | 4,096 | zigzag | causal | gradient |" in text
    assert json.loads((tmp_path / "pods.json").read_text())["roofline"][0]["topology"] == "v5p:2x2x2"
    assert np.isfinite([one["hidden_from"] for one in measured.of("roofline")]).all()
