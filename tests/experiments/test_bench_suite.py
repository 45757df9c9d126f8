"""The base of the benchmarks: result files in the repository are read, and writing them again changes nothing."""

import importlib
from pathlib import Path

import pytest

from jattn_experiments.bench.command import SUITES
from jattn_experiments.bench.plan import Plan
from jattn_experiments.bench.suite import Failed, Job, Refused, Suite
from tests.experiments.kept_results import check, kept, suite_of

KEPT = kept(SUITES)


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_results_in_the_repository_are_read_and_kept_as_they_are(file, tmp_path):
    check(SUITES, file, tmp_path)


def test_every_suite_has_results_in_the_repository():
    assert {suite_of(file) for file in KEPT} == set(SUITES)


def small(measure=lambda: {"seconds": 1.5}, **options) -> Suite:
    """A suite of two rows."""
    return Suite(
        name="small",
        parts={"rows": ("length",)},
        about=lambda sizes: {"environment": {"machine": sizes}},
        jobs=lambda sizes: [Job("rows", {"length": length}, measure) for length in (1, 2)],
        markdown=lambda results: f"{len(results.rows)} rows\n",
        shown=lambda results: "",
        **options,
    )


def test_a_run_that_is_killed_loses_nothing_and_goes_on(tmp_path):
    def killed():
        measured.append(1)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return {"seconds": 2.5}

    measured, out = [], tmp_path / "a" / "b"
    suite = small(killed, resumable=True)
    with pytest.raises(KeyboardInterrupt):
        suite.measure("a", out)
    assert [(row.key, row.values) for row in suite.read(out).rows] == [({"length": 1}, {"seconds": 2.5})]
    results = suite.measure("a", out, resume=True)
    assert [row["seconds"] for row in results.rows] == [2.5] * 2 and len(measured) == 3, "a row was measured twice"
    assert results == suite.read(out)


def test_rows_that_are_there_are_not_measured_again(tmp_path):
    first = small(resumable=True).measure("a", tmp_path)
    measured = []
    again = small(lambda: measured.append(1), resumable=True)
    assert again.measure("a", tmp_path, resume=True) == first and not measured
    with pytest.raises(Refused, match="already holds results; continue them with --resume"):
        again.measure("a", tmp_path)
    with pytest.raises(Refused, match="of another environment: machine was 'a', now 'b'"):
        again.measure("b", tmp_path, resume=True)


def test_a_suite_that_fails_leaves_the_results_of_before(tmp_path):
    suite = small()
    suite.measure("a", tmp_path)
    before = (tmp_path / "small.json").read_bytes()

    def fail():
        raise Failed("no")

    with pytest.raises(Failed):
        small(fail).measure("b", tmp_path)
    assert (tmp_path / "small.json").read_bytes() == before
    assert suite.measure("b", tmp_path).about == {"environment": {"machine": "b"}}, "the results were not replaced"
    assert suite.write_report(suite.read(tmp_path), tmp_path).read_text() == "2 rows\n"


def test_sizes_are_those_of_the_command_line():
    plan = Plan(Path("out"), seconds=0.5)
    for name in ("layers", "looking"):
        assert importlib.import_module(SUITES[name].module).SUITE.sizes(plan).seconds == 0.5
