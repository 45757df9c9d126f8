"""Calculations for the report: blocks, the budget for weights, the map of the heads and the matrices."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from jattn_experiments.run_page import curves, deep_figures, document, explorer, figures, plot_data, terminal_tables
from tests.experiments.test_report import read, synthetic
from tests.web_page import browse, embedded, weights_of


def test_blocks_average_queries_and_sum_keys():
    weights = np.array([[10, 0, 0, 0, 0], [5, 5, 0, 0, 0], [2, 3, 5, 0, 0], [0, 0, 0, 10, 0], [0, 1, 0, 2, 7]]) / 10
    blocks, names = plot_data.pooled(np.stack([weights, weights[::-1]]), 3)
    assert names == ["0-1", "2-3", "4"]
    np.testing.assert_allclose(blocks[0], [[1, 0, 0], [0.25, 0.75, 0], [0.1, 0.2, 0.7]])
    np.testing.assert_allclose(blocks.sum(-1), 1)
    whole, names = plot_data.pooled(weights, 5)
    assert whole is weights and names == ["0", "1", "2", "3", "4"]
    assert [len(plot_data.pooled(np.zeros((size, size)))[1]) for size in (128, 129, 1000)] == [128, 65, 125]


@pytest.mark.parametrize(("steps", "examples", "room", "counts"), [
    (10, 3, 30, [10, 10, 10]),  # all of them
    (10, 3, 16, [10, 3, 3]),  # the others share what the first leaves
    (10, 3, 9, [5, 2, 2]),
    (10, 3, 0, [2, 2, 2]),  # never fewer
    (10, 1, 4, [4]),
    (1, 2, 99, [1, 1]),
])  # fmt: skip
def test_the_first_example_keeps_most_steps(steps, examples, room, counts):
    kept = explorer.kept_steps([steps] * examples, room)
    assert [len(keep) for keep in kept] == counts
    for keep in kept:
        assert keep[0] == 0 and keep[-1] == steps - 1
        gaps = np.diff(keep)
        assert not len(gaps) or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(("size", "room", "expected"), [
    (64, 10 * 64**2 * 2, 64),
    (64, 10 * 64**2 * 2 - 1, 63),
    (1000, 10 * 128**2 * 2, 128),
    (64, -1, 1),
])  # fmt: skip
def test_weights_that_do_not_fit_are_drawn_in_larger_blocks(size, room, expected):
    assert explorer.fitting(5, 2, size, room) == expected


def test_the_map_keeps_the_distances_that_two_dimensions_hold():
    corners = np.array([[0.0, 0.0], [0.6, 0.0], [0.6, 0.3], [0.0, 0.3], [0.2, 0.1]])
    squared = ((corners[:, None] - corners) ** 2).sum(-1)
    points, kept = plot_data.plane(squared)
    np.testing.assert_allclose(((points[:, None] - points) ** 2).sum(-1), squared, atol=1e-12)
    assert kept == pytest.approx(1)
    np.testing.assert_allclose(points.mean(0), 0, atol=1e-12)
    # Four heads equally far from each other need three dimensions of equal size.
    assert plot_data.plane(0.5 * (1 - np.eye(4)))[1] == pytest.approx(2 / 3)
    assert plot_data.plane(np.zeros((1, 1)))[0].tolist() == [[0, 0]]


def test_names_on_the_map_touch_nothing():
    findings = synthetic()
    # In pixels. Neither is symmetric, or rounding would choose the axes. The first has no room for all names.
    for when, corners in enumerate([[(0, 0), (8, 2), (16, 4), (24, 7)], [(0, 0), (250, 0), (250, 130), (0, 120)]]):
        points = np.array(corners) / 400
        findings.divergence[0, when] = ((points[:, None] - points) ** 2).sum(-1)
    (crowded, spread), reach = plot_data.head_maps(findings)
    assert all(spread.sides) and not all(crowded.sides)
    assert np.abs(spread.points).max() < reach
    boxes = []
    for point, side in zip(spread.points, spread.sides, strict=True):
        boxes += [(point / reach * 180, (10, 10)), (point / reach * 180 + np.multiply(side, (24, 12)), (36, 12))]
    for (at, size), (other, other_size) in itertools.combinations(boxes, 2):
        assert (np.abs(at - other) >= np.add(size, other_size) / 2).any()


def test_statistics_are_coloured_on_their_scale():
    untrained, trained = plot_data.statistics_matrices(synthetic())
    assert trained.columns == ["max weight", "distance"]
    assert trained.rows == ["L0H0 one back", "L0H1 mirror", "L1H0 one back", "L1H1 mirror"]
    # Heads are matched: every seed has the same numbers, with its heads in a different order.
    np.testing.assert_allclose(trained.seeds, [[[0.8, 1], [0.3, 5]] * 2] * 3)
    np.testing.assert_allclose(trained.shades, [[0.8, 0], [0.3, 1]] * 2)  # distance from 1 to 5
    np.testing.assert_allclose(untrained.shades, [[0.3, 0]] * 4)


def test_ablations_are_cut_by_layers_where_they_are_many(monkeypatch):
    findings = synthetic()
    (whole,) = plot_data.ablation_matrices(findings)
    monkeypatch.setattr(plot_data, "TOGETHER", 4)
    cut = plot_data.ablation_matrices(findings)
    assert [matrix.title for matrix in cut] == ["layer 0", "layer 1", "all heads of a role"]
    assert [name for matrix in cut for name in matrix.columns] == whole.columns
    np.testing.assert_array_equal(np.concatenate([matrix.seeds for matrix in cut], 2), whole.seeds)
    none = plot_data.ablation_matrices(dataclasses.replace(findings, groups={}))
    assert [matrix.title for matrix in none] == [""]


def test_roles_have_colours_of_their_own():
    rows = [dict(synthetic().heads[0], role=role) for role in ("one_back", "mixed", *"abcdefg")]
    colours = plot_data.role_colours(synthetic(heads=rows))
    assert (colours["one back"], colours["mixed"]) == (0, -1)
    assert len(set(colours.values())) == len(colours) == 9
    assert max(colours.values()) < len(figures.PALETTE) == plot_data.PALETTE_SIZE


def large(layers, heads, size, examples, steps, seeds=10):
    """Findings with many numbers, none of them compressible."""
    rng = np.random.default_rng(0)
    count, both = layers * heads, (seeds, 2, layers, heads)
    accuracy = rng.random((seeds, 3))
    weights = rng.random((steps, examples, layers, heads, size, size), np.float32)
    weights /= weights.sum(-1, keepdims=True)
    full = synthetic()
    shown = [f"token{i}" for i in range(size)]
    return dataclasses.replace(
        full,
        seeds=list(range(seeds)),
        places=["one back", "five back", "mirror"],
        tokens=[shown] * examples,
        metric_steps=np.arange(50),
        metrics={"loss": rng.random((seeds, 50)), "accuracy": rng.random((seeds, 50))},
        look_steps=np.arange(50),
        scores={name: rng.random((seeds, 50, layers, heads)) for name in "abcdefgh"},
        statistics={name: rng.random(both) for name in (*"abcdefg", "distance", "max_logit")},
        offsets=np.arange(1 - size, size),
        offset_profile=rng.random((*both, 2 * size - 1)),
        example_steps=np.arange(steps),
        example_weights=weights,
        mean_weights=weights[:2, 0],
        divergence=rng.random((seeds, 2, count, count)),
        noise=rng.random((seeds, 2, count)) / 100,
        accuracy=accuracy,
        ablated=accuracy[:, None, None] * rng.random((seeds, layers, heads, 3)),
        groups={role: accuracy * rng.random((seeds, 3)) for role in ("one back", "mirror", "sink")},
        heads=[full.heads[0] | {"seed": r, "layer": l, "head": n} for r, l, n in np.ndindex(seeds, layers, heads)],
        claims=[],
    )


@pytest.mark.slow
def test_the_largest_page_stays_under_five_megabytes(monkeypatch, tmp_path):
    drawn = tmp_path / "divergence.svg"
    drawn.write_text(f'<svg viewBox="0 0 9 9" width="9" height="9"><title>{"1.25 " * 100_000}</title></svg>')
    findings, dropped = large(6, 12, 64, 3, 50), []
    for budget, files in ((document.PAGE_BUDGET, []), (1_300_000, []), (1_300_000, [drawn])):
        monkeypatch.setattr(document, "PAGE_BUDGET", budget)
        monkeypatch.setattr(document, "write_figures", lambda *_, files=files: files)
        path = document.write_page(findings, tmp_path)
        assert 0.2 * budget < path.stat().st_size < budget + 10_000
        data = embedded(read(path))
        kept = [[frame["step"] for frame in view["frames"]] for view in data["views"]]
        assert all({0, 49} <= set(steps) for steps in kept)
        frame = data["views"][0]["frames"][0]
        assert len(data["views"][0]["queries"]) == 64
        assert (frame["bits"] == 8) == ("Weights are rounded to 1/255 of the largest." in frame["note"])
        dropped.append(frame["dropped"] + (16 - frame["bits"]) / 1e6)
    assert dropped[0] < dropped[1] <= dropped[2]  # what the figures take, the weights leave


def test_many_offsets_are_drawn_as_fewer_points(monkeypatch):
    monkeypatch.setattr(figures, "LINE_BUDGET", 5)
    monkeypatch.setattr(figures, "PROFILE_BUDGET", 9)
    findings = synthetic()  # 9 offsets, from -4; heads "one back" have 0.9 at -1, all else 0.1
    offsets, values, step = plot_data.drawn_profiles(findings, 5)
    assert offsets.tolist() == [-4, -2, 0, 2, 4] and step == 2
    np.testing.assert_allclose(values[:, 1, 0], [[0.1, 0.9, 0.1, 0.1, 0.1]] * 3)
    figure = figures.offsets_figure(findings)
    assert "median of 3 seeds" in figure.get_suptitle() and "largest of 2" in figure.get_supxlabel()
    assert [len(ax.lines) for ax in figure.axes] == [2] * 4  # no line per seed
    monkeypatch.setattr(figures, "PROFILE_BUDGET", 999)
    assert [len(ax.lines) for ax in figures.offsets_figure(findings).axes] == [8] * 4


@pytest.mark.slow
def test_a_long_sequence_is_drawn_in_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "DPI", 30)
    findings = large(1, 2, 300, 2, 2, seeds=1)
    path = document.write_page(findings, tmp_path)
    text = read(path)
    views = embedded(text)["views"]
    first, mean = views[0], views[-1]
    assert first["keys"][:2] == ["0-2", "3-5"] and len(first["queries"]) == 100
    assert first["texts"][1] == "3-5: token3 token4 token5" and mean["texts"][1] == "3-5"
    weight = findings.example_weights[1, 0, 0, 1, 3:6, 6:9].sum() / 3
    assert abs(weights_of(text, 0, 1)[1, 1, 2] - weight) < 1e-5
    assert "The 300 tokens are drawn in blocks of 3" in text
    svg = (tmp_path / "figures" / "heads.svg").read_text(encoding="utf-8")
    assert ">0-2<" in svg and "token" not in svg


@pytest.mark.slow
def test_a_browser_draws_a_long_sequence_in_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(document, "write_figures", lambda *_: [])
    dom, console = browse(document.write_page(large(1, 2, 300, 2, 2, seeds=1), tmp_path), tmp_path)
    assert console == [] and '<b id="query">297-299: token297 token298 token299</b>' in dom


@pytest.mark.slow
def test_many_heads_are_drawn_layer_by_layer():
    findings = large(12, 9, 10, 2, 2, seeds=1)
    assert deep_figures.is_deep(findings) and not deep_figures.is_deep(synthetic())
    rows = deep_figures.statistics_matrices(findings)
    assert [[matrix.title for matrix in row] for row in rows] == [[*"abcdefg", "distance", "max logit"]] * 2
    np.testing.assert_array_equal(rows[1][2].median, findings.statistics["c"][0, 1])
    assert rows[0][7].shades.max() <= 1 and {rows[0][7].shades.min(), rows[1][7].shades.min()} >= {0.0}
    assert len(deep_figures.statistics_figure(findings).axes) == 2 * 9 + 1  # and a bar
    assert len(deep_figures.ablation_figure(findings).axes) == 3 + 1 + 1  # places, their bar, roles
    one, other, _ = deep_figures.offsets_figure(findings).axes
    assert one.images[0].get_array().shape == (108, 19) == other.images[0].get_array().shape
    shown = deep_figures.heads_figure(dataclasses.replace(findings, heads=_ranked()))
    assert len(shown.axes) == 18 + 1  # 3 heads of x and 12 of y, in rows of six, and a bar


def test_one_head_a_layer_stands_beside_its_untrained_self():
    panels = figures.heads_figure(large(3, 1, 10, 2, 2, seeds=1)).axes[:-1]
    assert [panel.get_subplotspec().get_gridspec().get_geometry() for panel in panels] == [(3, 2)] * 6
    assert [panel.get_title().endswith("untrained") for panel in panels] == [True, False] * 3


def test_the_first_look_of_a_run_that_started_elsewhere_is_not_called_untrained():
    findings = synthetic(config={"train": {"start": "runs/other@200"}})
    views = explorer.views(findings, 10**6)
    assert [view.frames[0].title for view in views] == ["0 (start)", "0 (start)", "0 (untrained)"]
    assert plot_data.first_look(findings) == "start" and plot_data.first_look(synthetic()) == "untrained"


def _ranked():
    """Roles of 108 heads: half mixed, a quarter weak, the rest of two roles, one of three heads."""
    names = ["mixed"] * 54 + ["weak x"] * 27 + ["x"] * 3 + ["y"] * 24
    row = {"seed": 0, "null": 0.1, "p_value": 0.01}
    return [row | {"layer": i // 9, "head": i % 9, "role": name, "score": i / 108} for i, name in enumerate(names)]


def test_the_clearest_heads_are_of_all_roles():
    findings = dataclasses.replace(large(12, 9, 2, 2, 2, seeds=1), heads=_ranked())
    assert deep_figures.strongest(findings, 8) == [83, 82, 81, 107, 106, 105, 104]
    unclear = dataclasses.replace(findings, heads=_ranked()[:60])
    assert deep_figures.strongest(unclear, 4) == [53, 52, 59, 58]


@pytest.mark.parametrize("side", ["at least", "at most"])
def test_the_worst_of_numbers_with_a_nan_is_nan(side):
    numbers = [0.9, float("nan"), 0.4]
    assert terminal_tables._worst({"side": side}, {"values": numbers}) == "nan"
    assert terminal_tables._worst({"side": side}, {"values": [0.9, 0.4]}) == {"at least": "0.4", "at most": "0.9"}[side]


def test_paths_are_coloured_up_to_the_largest():
    key = np.zeros((12, 9))
    key[3, 4] = 0.4
    findings = dataclasses.replace(synthetic(), paths={"key": key, "query": key / 4})
    one, other, bar = deep_figures.paths_figure(findings).axes
    assert one.get_title() == "into their key" and other.get_title() == "into their query"
    assert "0.40" in [text.get_text() for text in one.texts] and "0.10" in [text.get_text() for text in other.texts]
    assert bar.get_ylabel() == "score lost"


@pytest.mark.slow
def test_vector_pictures_hold_text_and_repeat(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "DPI", 30)
    findings = synthetic()
    figures.write_figures(findings, tmp_path / "first")
    # again without optional parts; the remaining pictures include every kind of drawing
    few = dataclasses.replace(findings, statistics={}, metrics={}, scores={}, curves={}, controls=[])
    figures.write_figures(few, tmp_path / "second")
    for file in (tmp_path / "second").glob("*.svg"):
        assert file.read_bytes() == (tmp_path / "first" / file.name).read_bytes(), file.name
    for file in (tmp_path / "first").glob("*.svg"):
        text = file.read_text(encoding="utf-8")
        assert len(re.findall("<text", text)) > 5 and "<dc:date>" not in text, file.name
        assert len(text) < 200_000, file.name
    ablation = (tmp_path / "first" / "ablation.svg").read_text(encoding="utf-8")
    counts = [ablation.count(f">{number}<") for number in ("0.90", "0.80", "0.30")]
    assert counts == [2, 2, 1]  # two heads each, and the group


def test_what_comes_first_is_told_by_seed():
    steps = np.arange(6) * 10
    rising = np.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], float)
    scores = {"mirror": np.zeros((3, 6, 2, 2)), "entropy": np.zeros((3, 6, 2, 2)), "still": np.zeros((3, 6, 2, 2))}
    scores["mirror"][:, :, 1, 0] = 0.8 * rising
    scores["entropy"][:, :, 0, 0] = rising
    metrics = {"loss": 1 - np.roll(rising, 2, 1) * (steps >= 20)}
    findings = synthetic(look_steps=steps, scores=scores, metric_steps=steps, metrics=metrics)
    (first, turned), (second, fallen) = curves.turns(findings)
    assert first == "mirror, layer 1" and second == "loss falls"
    np.testing.assert_allclose(turned, [15, 25, 5])
    assert (turned < fallen).all()
    texts = [text.get_text() for text in figures.turns_figure(findings).axes[0].texts]
    assert texts == ["3 of 3 in this order (29% to 100%)"]
    scores["mirror"][1] = 0
    scores["mirror"][1, 0] = 0.1  # of this seed the score only falls
    axes = figures.turns_figure(dataclasses.replace(findings, scores=scores)).axes[0]
    assert [line.get_fillstyle() for line in axes.lines if line.get_marker() == "o"] == ["full", "none", *["full"] * 4]
    assert "hollow: never" in axes.get_xlabel()
    assert curves.turns(synthetic()) == [], "three looks are too few to tell"
