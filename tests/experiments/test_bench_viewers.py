"""The reports benchmark: its goals and table on made-up numbers, and a tiny page, made and opened."""

import shutil

import jax
import numpy as np
import pytest

from jattn_experiments.bench import viewer_page, viewers
from jattn_experiments.bench.viewers import LIMITS, OURS, SUITE

MIB = 2**20
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def made_up(worse: float = 1.0) -> dict:
    """Numbers exactly at their thresholds, or so many times as large."""
    rows = [
        {"text": text, "tool": OURS, "bytes": megabytes * 1e6 * worse, "seconds": 1.0, "before": 100 * MIB,
         "peak": (100 + 1024 * worse) * MIB, "paint": 1e3 * (seconds or 1.0) * worse, "ready": 900.0, "marks": 9,
         "requests": 0}
        for text, (megabytes, seconds) in LIMITS.items()
    ]  # fmt: skip
    return {"environment": {"cores": "2"}, "missing": {"bertviz head_view": "not installed"}, "pages": rows}


def test_goals_are_met_at_their_thresholds_and_not_beyond():
    assert [one.answer for one in viewers.goals(SUITE.parse(made_up()))] == ["met"] * 6
    assert [one.answer for one in viewers.goals(SUITE.parse(made_up(1.01)))] == ["not met"] * 6
    assert [one.answer for one in viewers.goals(SUITE.parse(made_up() | {"pages": []}))] == ["not measured"] * 6


def test_the_table_says_what_failed_and_what_a_page_requests():
    contents = made_up()
    online = {"paint": None, "ready": 500.0, "marks": 0, "requests": 3}
    served = {"paint": 400.0, "ready": 2500.0, "marks": 8, "requests": 0}
    size = {"bytes": 2e6, "seconds": 2.0, "before": 0.0, "peak": MIB}
    contents["pages"] += [
        {"text": "a", "tool": "bertviz head_view", **size, **online, "served": served},
        {"text": "b", "tool": "bertviz head_view", "failed": "to make: MemoryError"},
        {"text": "c", "tool": "bertviz head_view", **size, "failed": "to open: not ready after 90 s"},
        {"text": "d", "tool": OURS, **size, "requests": 0},
    ]
    text = viewers.markdown(SUITE.parse(contents))
    view = "bertviz head_view"
    assert f"| a | {view} | 2.00 | 2.0 | 1 | - (0.40) | 0.50 (2.50) | requests 3 files, draws nothing |" in text
    assert f"| b | {view} | - | - | - | - | - | failed to make: MemoryError |" in text
    assert f"| c | {view} | 2.00 | 2.0 | 1 | - | - | failed to open: not ready after 90 s |" in text
    assert f"| d | {OURS} | 2.00 | 2.0 | 1 | - | - | works |" in text


@pytest.mark.slow
def test_a_page_is_made_and_opened(tmp_path):
    query, key = (jax.random.normal(jax.random.key(i), (1, 5, 2, 4)) for i in (0, 1))
    text = viewer_page.Text([{"query": query, "key": key, "is_causal": True}], [list("abcde")])
    file = tmp_path / "page.html"
    size = viewer_page.write_page(text, OURS, file)
    assert size["bytes"] == file.stat().st_size > 0 and size["peak"] >= size["before"] > 0
    ((words, (weights,)),) = viewer_page._sequences(text)
    assert words == list("abcde") and weights.shape == (2, 5, 5) and np.allclose(weights.sum(-1), 1.0)
    opened = viewers.open_page(file)
    if any(map(shutil.which, BROWSERS)):
        assert 0 < opened["paint"] and 0 < opened["ready"] and opened["marks"] > 2
    assert opened["requests"] == 0


@pytest.mark.slow
def test_a_page_that_requests_its_code(tmp_path):
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("no chromium, chromium-browser or google-chrome found")
    file, scripts = tmp_path / "page.html", tmp_path / "scripts"
    file.write_text('<p>text</p><script src="https://code.invalid/x/1.2/draw.min.js"></script>')
    alone = viewers.open_page(file)
    assert (alone["requests"], alone["marks"]) == (1, 0) and alone["paint"] > 0
    scripts.mkdir()
    (scripts / "draw.min.js").write_text('document.body.append(document.createElement("canvas"))')
    served = viewers.open_page(file, scripts)
    assert (served["requests"], served["marks"]) == (0, 1)
