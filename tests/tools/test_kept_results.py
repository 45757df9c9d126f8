"""Results of the tools in the repository are read, and writing them again changes nothing."""

import pytest

from tests.experiments.kept_results import check, kept, suite_of
from tools.__main__ import SUITES

KEPT = kept(SUITES)


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_results_in_the_repository_are_read_and_kept_as_they_are(file, tmp_path):
    check(SUITES, file, tmp_path)


def test_every_suite_has_results_in_the_repository():
    assert {suite_of(file) for file in KEPT} == set(SUITES)
