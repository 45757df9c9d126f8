"""The suite for a chip: faults are found and cost their own answer alone, time is kept, and verdicts say what to do."""

import dataclasses
import json
import sys

import pytest

from jattn_experiments.__main__ import main
from jattn_experiments.bench import chip, chip_report
from jattn_experiments.bench.chip import SUITE, Asking, Sizes
from jattn_experiments.bench.chip_rates import RATES, rates_of
from jattn_experiments.bench.chip_worker import TABLES
from jattn_experiments.bench.suite import Results, Row

FACTS = {"platform": "cpu", "device": "cpu", "devices": 1, "jax": "0"}
TPU = FACTS | {"platform": "tpu", "device": "TPU v5 lite"}
# Answers as ``chip_worker`` does; kernels that crash, hang or raise.
FAKE = """
import json, os, sys, time
for line in sys.stdin:
    q = json.loads(line)
    kernels = q.get("kernels") or [q.get("kernel")]
    if "crash" in kernels:
        os._exit(6)
    if "hang" in kernels:
        time.sleep(60)
    if q.get("sizes") and [8, 8] in q["sizes"]:
        os._exit(7)
    if "raise" in kernels:
        answer = {"result": "failed", "reason": "ValueError: no"}
    elif "sizes" in q:
        times = {"x".join(map(str, pair)): 5.0 for pair in q["sizes"]}
        answer = {"result": "measured", "medians": {"default": 10.0} | times, "left_out": {}}
    elif "kernels" in q:
        times = {"jattn " + k: 2.0 for k in q["kernels"]}
        answer = {"result": "measured", "medians": {"jattn": 1.0} | times, "left_out": {}, "flops": 1e9, "matrix_flops": 1e9}
    else:
        answer = {"result": "right", "reason": None, "error": 0.25}
    print(json.dumps(answer | {"pid": os.getpid()}), flush=True)
"""


def sizes_of(*kernels, facts=FACTS, **options):
    settings = {"lengths": (256,), "head_dims": (64,), "num_heads": 2, "seconds": 0.1, "limit": 1.0} | options
    return Sizes(facts, {}, kernels, command=(sys.executable, "-c", FAKE), **settings)


# ---- asking


def test_a_fault_costs_its_own_answer_alone():
    ask = Asking(sizes_of())
    kernels = ("good", "crash", "good", "raise", "good")
    questions = [{"ask": "right", "kernel": kernel, "case": "a"} for kernel in kernels]
    answers = ask(questions)["answers"]
    assert [one["result"] for one in answers] == ["right", "failed", "right", "failed", "right"]
    assert "ended with status 6" in answers[1]["reason"] and answers[3]["reason"] == "ValueError: no"
    # after a crash and after an exception, which may have left the device in any state, a new process goes on
    assert len({one["pid"] for one in answers if "pid" in one and one["result"] == "right"}) == 3
    assert [one["asked"] for one in answers] == questions


def test_each_step_has_a_process_of_its_own():
    ask, questions = Asking(sizes_of()), [{"ask": "right", "kernel": "good", "case": "a"}] * 2
    first, second = (ask(questions)["answers"] for _ in range(2))
    assert first[0]["pid"] == first[1]["pid"] != second[0]["pid"]


def test_a_kernel_that_hangs_twice_is_asked_no_more():
    ask = Asking(sizes_of(limit=0.5))
    answers = ask([{"ask": "right", "kernel": "hang", "case": "a"}] * 4)["answers"]
    slow, spared = "took more than 0.5 seconds", "skipped: 2 earlier processes crashed or took too long"
    assert [one["reason"] for one in answers] == [slow] * 2 + [spared] * 2
    (answer,) = ask([{"ask": "fast", "kernels": ["hang", "good"]}])["answers"]
    assert set(answer["medians"]) == {"jattn", "jattn good"} and "apart" not in answer


def test_where_one_contestant_crashes_the_others_are_timed_apart():
    (answer,) = Asking(sizes_of())([{"ask": "fast", "kernels": ["good", "crash", "other"]}])["answers"]
    assert set(answer["medians"]) == {"jattn", "jattn good", "jattn other"} and answer["apart"]
    assert "status 6" in answer["left_out"]["jattn crash"]
    (answer,) = Asking(sizes_of())([{"ask": "tune", "kernel": "good", "sizes": [[4, 4], [8, 8]]}])["answers"]
    assert set(answer["medians"]) == {"default", "4x4"} and "status 7" in answer["left_out"]["8x8"]


def test_after_the_last_second_nothing_is_asked(tmp_path, capsys):
    ask = Asking(sizes_of(minutes=0.0))
    assert ask([{"ask": "right", "kernel": "good", "case": "a"}]) is None
    # what the run's end cut off is no result; what a limit cut off is one
    assert Asking(sizes_of(minutes=0.01, limit=5.0))([{"ask": "right", "kernel": "hang", "case": "a"}]) is None
    results = SUITE.measure(sizes_of("good", minutes=0.0), tmp_path)
    assert results.rows == [] and "steps remain. Add --resume to continue" in capsys.readouterr().out
    results = SUITE.measure(sizes_of("good", parts=("bits",)), tmp_path, resume=True)
    assert [row.part for row in results.rows] == ["bits"] and "left" not in capsys.readouterr().out


def test_a_chip_is_asked_for_everything_in_order_of_worth():
    facts = TPU | {"devices": 4}
    steps = list(chip._steps(sizes_of("pallas_tpu", "splash", facts=facts, lengths=(4096, 16384), head_dims=(128, 64))))
    parts = list(dict.fromkeys(part for part, _, _ in steps))
    assert [part for part in parts if part in ("right", "bits", "fast", "decode", "tuned")] == ["right", "bits", "fast", "decode", "tuned"]  # fmt: skip
    assert {"decode", "statistics", "ring"} <= set(parts)
    of_right = [question for part, _, questions in steps if part == "right" for question in questions]
    cases = [(one["table"], one["case"]) for one in of_right if one["kernel"] == "splash"]
    assert sorted(cases) == sorted((name, case) for name, table in TABLES.items() for case in table)
    keys = [(part, json.dumps(key)) for part, key, _ in steps]
    assert len(keys) == len(set(keys))
    json.dumps([questions for *_, questions in steps])


# ---- what the results say


def results_of(*rows, facts=TPU):
    shape = {"lengths": [4096], "head_dims": [128], "num_heads": 16}
    return Results({"environment": facts, "now": {"clocks.sm": "1 MHz"}, "shape": shape}, list(rows))


def right(kernel, *results, table="at size", share=0):
    answers = [{"asked": {"case": f"case {n}"}, "error": 0.5, "reason": None} | one for n, one in enumerate(results)]
    return Row("right", {"kernel": kernel, "table": table, "share": share}, {"answers": answers, "seconds": 1.0})


def bits(kernel, result):
    return Row("bits", {"kernel": kernel}, {"answers": [result | {"asked": {"check": "twice"}}], "seconds": 1.0})


def fast(passes="forward", **times):
    medians = {name.replace("__", " "): time for name, time in times.items()} | {"matrix": 1000.0}
    answer = {"result": "measured", "medians": medians, "left_out": {}, "flops": 1e11, "matrix_flops": 1e11}
    key = {"case": "causal", "length": 4096, "passes": passes}
    return Row("fast", key, {"answers": [answer], "seconds": 2.0})


GOOD, BAD = {"result": "right"}, {"result": "wrong", "reason": "out is off by 9 times its tolerance", "error": 9.0}
REFUSED = {"result": "refused", "reason": "takes no float16"}


def text_of(*rows, **options):
    (verdict,) = chip_report.verdicts(results_of(*rows, **options))
    return verdict.text, verdict.wrong


def test_a_kernel_that_is_right_and_faster_could_be_the_default():
    text, wrong = text_of(
        right("pallas_tpu", GOOD, GOOD, REFUSED), right("pallas_tpu", GOOD, share=1),
        fast(jattn=1000.0, jattn__pallas_tpu=900.0, splash=800.0), fast("both", jattn=400.0, jattn__pallas_tpu=360.0, splash=400.0),
    )  # fmt: skip
    assert not wrong
    assert text == (
        "pallas_tpu: right in 3 of 3, 1.01 of splash's time, 0.900 of the plain call's: it could become the default: set "
        "never_run = False in jattn/kernels/pallas_tpu/__init__.py and add it to ORDER in jattn/kernels/dispatch.py"
    )


def test_a_slower_one_stays_by_name_and_a_wrong_one_is_not_taken():
    slow = fast(jattn=1000.0, jattn__pallas_tpu=1200.0, splash=800.0)
    text, wrong = text_of(right("pallas_tpu", GOOD), slow)
    assert (
        text.endswith("1.20 of the plain call's: right but no faster, so it runs only when a call names it")
        and not wrong
    )
    text, wrong = text_of(right("pallas_tpu", GOOD, BAD), slow)
    assert wrong and text.endswith(
        "do not use it on this device; the first fault: case 1: out is off by 9 times its tolerance"
    )
    assert text_of(right("splash", GOOD))[0] == "splash: right in 1 of 1: one of the defaults"
    no_bits = bits("pallas_tpu", REFUSED)
    assert text_of(right("pallas_tpu", REFUSED), no_bits)[0] == "pallas_tpu: refuses every case on this device"
    assert text_of(right("pallas_tpu", GOOD))[0].endswith("not timed, so it runs only when a call names it")
    crashed = {
        "result": "failed",
        "reason": "the process ended with status -6: it wrote nothing to stderr",
        "error": None,
    }
    assert text_of(right("my.kernels:Fast", GOOD, crashed))[1]
    assert text_of(right("my.kernels:Fast", GOOD))[0] == "my.kernels:Fast: right in 1 of 1: right on this device"


def test_the_report_holds_what_was_seen(tmp_path):
    tuned = {"default": 100.0, "512x1024": 80.0, "256x512": 120.0}
    answer = {"result": "measured", "medians": tuned, "left_out": {"2048x1024": "Mosaic: out of memory"}}
    key = {"kernel": "splash", "head_dim": 128, "length": 4096}
    results = results_of(
        right("splash", GOOD, BAD),
        bits("splash", GOOD),
        fast(jattn=1000.0, splash=800.0),
        Row("decode", {"length": 8}, {"answers": [{"result": "measured", "medians": {"jattn": 10.0}, "left_out": {"jax.nn": "x|y"}, "bytes": 819e3}], "seconds": 1.0}),
        Row("ring", {"length": 8}, {"answers": [{"result": "wrong", "reason": "off", "medians": {"ring": 3.0}}], "seconds": 1.0}),
        Row("tuned", key, {"answers": [answer], "seconds": 3.0}),
    )  # fmt: skip
    SUITE.write(results, tmp_path)
    text = SUITE.write_report(SUITE.read(tmp_path), tmp_path).read_text()
    for line in (
        "# TPU v5 lite: which kernels are right, and how fast they are",
        "| splash | at size | 1 | 1 | 0 | 0 | 9 |",
        "| splash | case 1 | wrong | out is off by 9 times its tolerance |",
        "| causal, 4096, forward | 1.00 (51%) | 0.800 (63%) | 1.00 (51%) |",
        "| 8 | jattn | 0.0100 | 10% |",
        "| 8 | jax.nn | x\\|y | - |",
        "| splash | 128 | 4096 | 512x1024 0.0800, default 0.100, 256x512 0.120 | 2048x1024: Mosaic: out of memory |",
        "- clocks.sm, at the start: 1 MHz",
    ):
        assert line in text, line
    assert (tmp_path / "chip.png").stat().st_size > 5000
    assert chip.line(results.rows[-1]).startswith("tuned splash 128 4096: 512x1024 0.800 of the default's time")
    assert chip.wrong(results) == "wrong on this device: splash"
    assert "case 1: out is off" in chip.line(results.rows[0])


def test_rates_are_those_of_the_longest_name():
    assert rates_of("NVIDIA H100 80GB HBM3") is RATES["H100"] and rates_of("NVIDIA H100 PCIe") is RATES["H100 PCIe"]
    assert rates_of("TPU v5 lite") is RATES["TPU v5 lite"] and rates_of("TPU v5") is RATES["TPU v5"]
    assert rates_of("cpu") is None


# ---- in processes that run kernels


FAULTS = "tests.experiments.faulty_kernels:"


@pytest.mark.slow
def test_kernels_are_found_in_the_folder_of_the_call_or_refused_in_one_line(capsys, tmp_path, monkeypatch):
    assert main(["bench", "--suite", "chip", "--kernels", "splash,nosuch", "--out", str(tmp_path)]) == 2
    assert "--kernels: expected some of decode, blockwise" in capsys.readouterr().err
    assert main(["bench", "--suite", "chip", "--kernels", "nosuch.module:K", "--out", str(tmp_path)]) == 2
    assert "'nosuch.module:K' cannot be imported" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    options = ["--kernels", "mine:Mine", "--minutes", "0.001", "--out", str(tmp_path / "out")]
    assert main(["bench", "--suite", "chip", *options]) == 0
    assert "steps remain. Add --resume to continue" in capsys.readouterr().out


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Kernels with faults, and one without."""
    kernels, out = tuple(FAULTS + name for name in ("Faulty", "Loose", "Right")), tmp_path_factory.mktemp("chip")
    small = {"lengths": (64,), "head_dims": (16,), "num_heads": 2, "seconds": 0.1}
    sizes = Sizes(FACTS, {}, kernels, minutes=30.0, limit=40.0, parts=("bits", "right", "fast"), **small)
    return sizes, out, SUITE.measure(sizes, out)


def reasons(results, kernel, part="right"):
    answers = [one for row in results.of(part, kernel=FAULTS + kernel) for one in row["answers"]]
    return {one["asked"].get("case", one["asked"].get("check")): one["reason"] for one in answers}


@pytest.mark.slow
def test_every_injected_fault_is_found(rehearsed):
    *_, results = rehearsed
    verdicts = {one.kernel.removeprefix(FAULTS): one for one in chip_report.verdicts(results)}
    assert [name for name, one in verdicts.items() if not one.wrong] == ["Right"]
    wrong, of_gradient, crashed, hung = (reasons(results, "Faulty")[case] for case in chip.IN_SHORT)
    assert wrong.startswith("out is off by") and of_gradient.startswith("gradient of")
    assert crashed.startswith("the process ended with status -6") and hung == "took more than 40 seconds"
    assert reasons(results, "Faulty", "bits")["looking"].startswith("skipped: 2 earlier processes")
    shows = reasons(results, "Loose")["NaN where nobody looks: key lengths"]
    assert shows == "NaN or infinity in unseen places changes the result"
    assert "2 of 2 equal calls differ" in reasons(results, "Loose", "bits")["twice"]
    assert chip.wrong(results) == f"wrong on this device: {FAULTS}Faulty, {FAULTS}Loose"


@pytest.mark.slow
def test_no_step_is_lost_to_anothers_fault(rehearsed):
    sizes, out, results = rehearsed
    assert set(reasons(results, "Right").values()) | set(reasons(results, "Right", "bits").values()) == {None}
    for row in results.of("fast"):
        assert {"jattn", "jax.nn", f"jattn {FAULTS}Right"} <= set(row["answers"][0]["medians"])
    SUITE.write_report(results, out)
    # a second run has nothing left to ask
    again = SUITE.measure(dataclasses.replace(sizes, minutes=0.0), out, resume=True)
    assert len(again.rows) == len(results.rows)
