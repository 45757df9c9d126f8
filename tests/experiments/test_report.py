"""The report and its pictures show the findings."""

import dataclasses
import re
import subprocess

import matplotlib.image
import numpy as np
import pytest

from jattn_experiments.run_page import curves, document, figures, plot_data, summary
from jattn_experiments.runs import devices
from jattn_experiments.runs.findings import Findings
from tests.web_page import embedded, weights_of

SEEDS, LAYERS, HEADS, TOKENS, EXAMPLES = 3, 2, 2, 5, 2
ORDER = [[0, 1], [1, 0], [0, 1]]  # in the second seed, the heads of each layer are swapped


def synthetic(**changes):
    """Findings of a small run of three seeds; the last one fails. All weights differ, so that a wrong one shows."""
    rng = np.random.default_rng(0)
    weights = rng.random((4, EXAMPLES, LAYERS, HEADS, TOKENS, TOKENS))
    weights[-1] **= 3
    weights /= weights.sum(-1, keepdims=True)
    scores = {name: np.full((SEEDS, 3, LAYERS, HEADS), 0.1) for name in ("one_back", "mirror", "entropy")}
    profile = np.full((SEEDS, 2, LAYERS, HEADS, 9), 0.1)
    ablated = np.full((SEEDS, LAYERS, HEADS, 2), 0.95)
    statistics = {"max_weight": np.full((SEEDS, 2, LAYERS, HEADS), 0.3), "distance": np.ones((SEEDS, 2, LAYERS, HEADS))}
    for seed, (back, mirror) in enumerate(ORDER):
        scores["one_back"][seed, 1:, :, back] = [[0.5], [0.9]]
        scores["mirror"][seed, 1:, :, mirror] = [[0.4], [0.8]]
        profile[seed, 1, :, back, 3] = 0.9
        statistics["max_weight"][seed, 1, :, back] = 0.8
        statistics["distance"][seed, 1, :, mirror] = 5.0
        ablated[seed, :, back, 0] = ablated[seed, :, mirror, 1] = 0.1
    divergence = np.tile(0.5 * (1 - np.eye(LAYERS * HEADS)), (SEEDS, 2, 1, 1))
    divergence[:, 0] *= 0.2
    accuracy = np.array([[1.0, 1.0], [1.0, 0.9], [0.4, 0.2]])
    names = "name statement values side threshold reference passed needed holds seeds rate again".split()
    claims = [
        ("accuracy", "Accuracy < 1 & > 0.85.", [1.0, 0.9, 0.2], "at least", 0.85, [0.06] * 3, [7, 8], 2, True, [7, 8, 9], [0.09, 0.99], 0.7),
        ("confusion", "At most 0.1.", [0.05, 0.3], "at most", 0.1, [0.9, 0.7], [5], 2, False, [5, 6], None, None),
    ]  # fmt: skip
    roles, description = ("one_back", "mirror"), "A description with <img src=x onerror=alert(1)> in it."
    fields = {
        "name": "tiny_copy",
        "description": description,
        "config": {"description": description, "train": {"steps": 20, "note": "<i>"}, "seeds": [7, 8, 9]},
        "environment": {"python": "3.12", "device": "cpu"},
        "seeds": [7, 8, 9],
        "places": ["one back", "mirror"],
        "tokens": [["<b>", "</script>", "$x", "“é”", "a long token indeed"], ["the", "cat", "&amp;", "sat", "."]],
        "metric_steps": np.arange(0, 20, 2),
        "metrics": {"loss": 1 + rng.random((SEEDS, 10)), "accuracy": rng.random((SEEDS, 10))},
        "look_steps": np.array([0, 10, 20]),
        "scores": scores,
        "statistics": statistics,
        "offsets": np.arange(-4, 5),
        "offset_profile": profile,
        "example_steps": np.array([0, 5, 10, 20]),
        "example_weights": weights,
        "mean_weights": np.stack([np.full((LAYERS, HEADS, TOKENS, TOKENS), 0.2), weights[-1].mean(0)]),
        "divergence": divergence,
        "noise": np.tile([[0.01], [0.04]], (SEEDS, 1, LAYERS * HEADS)),
        "accuracy": accuracy,
        "ablated": ablated,
        "groups": {"one_back": accuracy - [0.3, 0.0]},
        "paths": {},
        "heads": [
            {"seed": 7 + i, "layer": layer, "head": head, "role": roles[ORDER[i][head]], "score": 0.9, "null": 0.1, "p_value": 0.00123456}
            for i, layer, head in np.ndindex(SEEDS, LAYERS, HEADS)
        ],
        "curves": {"accuracy over length": {"learned": [[4, 0.9, 0.8, 0.7], [8, 0.5, 0.4, 0.3]]}},
        "grids": {},
        "controls": [{"name": "one head & no more", "metric": "accuracy", "values": [0.3, 0.4, 0.5], "parameters": 123}],
        "claims": [dict(zip(names, claim, strict=True)) | {"reference_name": "untrained"} for claim in claims],
    }  # fmt: skip
    fresh = {"seeds": [76, 77], "values": [0.9, 0.3], "passed": [76], "failed": [77], "needed": 2, "holds": False}
    fields["claims"][0]["replication"] = fresh | {"rate": None, "again": None}
    return Findings(**(fields | changes))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    findings = synthetic()
    return findings, document.write_page(findings, tmp_path_factory.mktemp("run"))


@pytest.fixture
def coarse(monkeypatch):
    """Pictures of few pixels, for tests of their names only."""
    monkeypatch.setattr(figures, "DPI", 30)


def read(path):
    return path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_picture_is_written(written):
    _, path = written
    pictures = {file.stem: matplotlib.image.imread(file) for file in (path.parent / "figures").glob("*.png")}
    names = {"heads", "training", "offsets", "statistics", "ablation", "divergence", "map", "curves", "controls"}
    assert set(pictures) == names == {file.stem for file in (path.parent / "figures").glob("*.svg")}
    for name, picture in pictures.items():
        assert picture.shape[1] >= 1600, name  # twice a README's width
        grey = picture[..., :3].mean(-1)
        assert 0.005 < (grey < 0.95).mean() < 0.9 and grey.std() > 0.05, f"{name} is empty or full"


@pytest.mark.slow
def test_the_page_stands_alone_and_escapes_its_text(written):
    page = written[1].read_text(encoding="utf-8")
    assert len(page) < 200_000
    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=(?!\"data:,\")", page)
    # The SVG namespaces are the only addresses: nothing is fetched.
    assert set(re.findall(r"https?://[^\"'\s)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "{{" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page and "<img" not in page
    assert page.count("</script>") == page.count("<script") > 2  # the token "</script>" closes none of them
    assert "&lt;i&gt;" in page and "train.note" in page


@pytest.mark.slow
def test_claims_are_readable_without_colour(written):
    page = written[1].read_text(encoding="utf-8")
    claims = re.findall(r'<article class="claim.*?</article>', page, re.DOTALL)
    assert "Claims: 1 of 2 hold" in page
    assert "✓ holds" in claims[0] and "✗ fails" in claims[1]
    facts = [re.findall(r'<dd class="number">(.*?)</dd>', claim) for claim in claims]
    assert facts == [
        ["0.9", "at least 0.85", "0.06", "2 of 3, 2 needed", "9% to 99%", "70%", "1 of 2: fails"],
        ["0.175", "at most 0.1", "0.8", "1 of 2, 2 needed"],  # too few seeds to say more
    ]
    # Failed seeds are marked; a control has its own seeds.
    lost = [re.findall(r'class="lost".*?<title>(.*?)</title>', claim) for claim in claims]
    assert lost == [["seed 9: 0.2", "seed 77: 0.3"], ["seed 6: 0.3"]]
    assert [claim.count('class="untrained"') for claim in claims] == [6, 2]


@pytest.mark.slow
def test_tables_hold_every_head_and_control(written):
    page = written[1].read_text(encoding="utf-8")
    table = page[page.index('id="heads-table"') :].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
    assert len(rows) == SEEDS * LAYERS * HEADS
    assert rows[0] == ["7", "0", "0", "one back", "0.900", "0.100", "0.00123"]
    controls = page[page.index('id="controls"') :]
    assert "one head &amp; no more" in controls and ">123<" in controls and controls.count("<title>one head") == 3


def test_heads_of_other_seeds_are_matched():
    findings = synthetic()
    assert plot_data.matched_heads(findings).tolist() == [[order] * LAYERS for order in ORDER]
    profiles = plot_data.matched_profiles(findings)
    assert (profiles[:, 1, 0, 3] == 0.9).all() and (profiles[:, 1, 1, 3] == 0.1).all()
    ablated = plot_data.matched_ablation(findings)
    assert (ablated[:, 2, 0] == 0.1).all() and (ablated[:, 2, 1] == 0.95).all()
    findings.divergence[1, 1] = np.arange(16).reshape(4, 4)
    swapped = findings.divergence[1, 1][[1, 0, 3, 2]][:, [1, 0, 3, 2]]
    np.testing.assert_array_equal(plot_data.matched_divergence(findings)[1, 1], swapped)


def test_a_seed_is_shown_by_its_best_head():
    panels = {panel.title: panel for panel in curves.time_panels(synthetic())}
    assert list(panels) == ["loss", "accuracy", "best head's weight\non its place", "other head scores"]
    back, mirror = panels["best head's weight\non its place"].lines
    np.testing.assert_allclose(back.seeds, [[0.1, 0.5, 0.9]] * SEEDS)
    np.testing.assert_allclose(mirror.seeds, [[0.1, 0.4, 0.8]] * SEEDS)
    assert panels["other head scores"].lines[0].label == "entropy (mean of heads)"
    assert panels["loss"].log and panels["accuracy"].unit


@pytest.mark.slow
def test_a_seed_that_is_not_finite_does_not_stop_the_report(coarse, tmp_path):
    findings = synthetic()
    findings.metrics["loss"][2, 5:] = findings.scores["mirror"][0, 1] = np.nan
    findings.accuracy[2] = np.nan
    findings.statistics["distance"][2] = findings.divergence[0, 1] = findings.noise[2] = np.nan
    path = document.write_page(findings, tmp_path)
    assert embedded(read(path))["numbers"][1]["values"] == [[0.5, 0.1, 0.5, 0.1], [None] * 4, [0.1] * 4]
    seed = re.search(r'<title>seed 9: loss</title><path d="([^"]*)"', path.read_text(encoding="utf-8"))[1]
    assert seed.count("M") == 1 and seed.count("L") == 4  # it ends where its numbers end


@pytest.mark.slow
def test_figures_are_embedded_in_the_colours_of_the_page(written):
    _, path = written
    page = path.read_text(encoding="utf-8")
    drawn = dict(re.findall(r'<section id="(\w+)" class="drawn">.*?(<svg.*?</svg>)', page, re.DOTALL))
    files = {file.stem for file in (path.parent / "figures").glob("*.svg")}
    assert list(drawn) == "training offsets statistics ablation divergence map curves controls".split()
    assert set(drawn) == files - {"heads"}
    defined = set(re.findall(r"(--\w+):", page.partition("</style>")[0]))
    for name, svg in drawn.items():
        assert not re.search(r"#[0-9a-f]{6}\b|rgb|font-family|<image|<style|<metadata|<a ", svg), name
        assert 'style="fill:var(--page)"' not in svg, f"{name} has a background"
        assert set(re.findall(r"var\((--\w+)\)", svg)) <= defined, name
        assert len(re.findall("<text", svg)) > 5, name
        opening = svg.partition(">")[0]
        assert "viewBox=" in opening and "max-width:" in opening and " width=" not in opening, name
        assert 'role="img"' in opening and f'aria-labelledby="{name}-title"' in opening, name
        ids, targets = re.findall(r' id="([^"]*)"', svg), re.findall(r'(?:url\(|href=")#([\w.-]+)', svg)
        assert targets and set(targets) <= set(ids) and all(one.startswith(f"{name}-") for one in ids), name
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) and {f"{name}-title" for name in drawn} <= set(ids)


@pytest.mark.slow
def test_a_figure_without_a_section_gets_one(written, monkeypatch, tmp_path):
    added = tmp_path / "added.svg"
    added.write_bytes((written[1].parent / "figures" / "curves.svg").read_bytes())
    monkeypatch.setattr(document, "write_figures", lambda *_: [added])
    whole = document.write_page(synthetic(), tmp_path).read_text(encoding="utf-8")
    assert re.findall(r'<section id="(\w+)" class="drawn">', whole) == ["added"] and "accuracy over length" in whole


@pytest.mark.slow
def test_embedded_weights_are_those_of_the_findings(written):
    findings, path = written
    text = read(path)
    for example in range(EXAMPLES):
        for step, weights in enumerate(findings.example_weights[:, example]):
            np.testing.assert_allclose(weights_of(text, example, step).reshape(weights.shape), weights, atol=1e-5)
    for step, weights in enumerate(findings.mean_weights):
        np.testing.assert_allclose(weights_of(text, EXAMPLES, step).reshape(weights.shape), weights, atol=1e-5)
    assert embedded(text)["top"] == findings.example_weights.max()


def test_a_long_run_keeps_its_first_and_last_step(monkeypatch, tmp_path):
    frame = 2 * LAYERS * HEADS * TOKENS**2
    monkeypatch.setattr(document, "WEIGHT_BUDGET", 7 * frame)  # two of the mean, two of the second example
    monkeypatch.setattr(document, "write_figures", lambda *_: [])
    path = document.write_page(synthetic(), tmp_path)
    steps = [[frame["step"] for frame in view["frames"]] for view in embedded(read(path))["views"]]
    assert steps == [[0, 10, 20], [0, 20], [0, 20]]
    assert "example 1 has 3 of 4 steps, and every other example has 2." in path.read_text(encoding="utf-8")


def test_a_page_says_which_options_differ_and_what_made_it(monkeypatch, tmp_path):
    monkeypatch.setattr(document, "write_figures", lambda *_: [])
    shipped = read(document.write_page(synthetic(), tmp_path))
    assert "Options differ" not in shipped and "<title>tiny copy</title>" in shipped
    environment = {"jattn": "1.2.3", "commit": "abcdef-dirty", "device": "cpu"}
    synthetic(changed=["model.num_heads was 4, now <6>"], environment=environment).save(tmp_path)
    findings = Findings.load(tmp_path)
    assert findings.title == "tiny copy (changed)" and findings.environment == environment
    page = read(document.write_page(findings, tmp_path))
    assert "<title>tiny copy (changed)</title>" in page and "device cpu · jattn 1.2.3 · commit abcdef-dirty" in page
    assert re.search(r"Options differ.*<code>tiny_copy</code>.*<li>model.num_heads was 4, now &lt;6&gt;</li>", page)
    assert summary.summary(findings)["changed"] == findings.changed


def test_small_scores_do_not_look_like_findings(monkeypatch, tmp_path):
    monkeypatch.setattr(document, "write_figures", lambda *_: [])
    numbers = {"clear": (0.9, 0.1), "small": (0.073, 0.069), "weak x": (0.5, 0.1), "mixed": (0.05, 0.069)}
    rows = [
        {"seed": 7, "layer": 0, "head": 0, "role": role, "score": score, "null": null, "p_value": 0.025}
        for role, (score, null) in numbers.items()
    ]
    findings = synthetic(heads=rows)
    page = read(document.write_page(findings, tmp_path))
    assert re.findall(r'<td( class="soft")?>(clear|small|weak x|mixed)</td>', page) == [
        ("", "clear"), *((' class="soft"', role) for role in ("small", "weak x", "mixed"))
    ]  # fmt: skip
    assert plot_data.role_colours(findings) == {"clear": 2, "small": 3, "weak x": -1, "mixed": -1}
    assert "than the scores followed in training" not in page  # nothing was
    run = dataclasses.replace(document.run_page(findings, []), figures={"training": "<svg></svg>"})
    assert "than the scores followed in training" in run.html() and "sequences followed in training" in run.html()


def test_the_commit_is_that_of_jattn_s_own_checkout(monkeypatch, tmp_path):
    package = tmp_path / "site-packages" / "jattn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C"]
    for folder in (tmp_path, package.parent):  # of a user, then of jattn
        monkeypatch.setattr(devices.jattn, "__file__", str(package / "__init__.py"))
        assert devices.commit() is None
        subprocess.run([*git, folder, "init", "-q"], check=True)
        subprocess.run([*git, folder, "add", "."], check=True)
        subprocess.run([*git, folder, "commit", "-qm", "first"], check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", devices.commit())
    (package / "__init__.py").write_text("changed")
    assert re.fullmatch(r"[0-9a-f]{40}-dirty", devices.commit())
    monkeypatch.setenv("PATH", "")
    assert devices.commit() is None


@pytest.mark.slow
def test_what_is_missing_is_left_out(coarse, tmp_path):
    """One seed of one head in one layer, without optional findings."""
    full = synthetic()
    narrow = dataclasses.replace(
        full,
        seeds=[7],
        metrics={name: values[:1] for name, values in full.metrics.items()},
        scores={name: values[:1, :, :1, :1] for name, values in full.scores.items()},
        offset_profile=full.offset_profile[:1, :, :1, :1],
        example_weights=full.example_weights[:, :1, :1, :1],
        mean_weights=full.mean_weights[:, :1, :1],
        divergence=full.divergence[:1, :, :1, :1],
        noise=full.noise[:1, :, :1],
        accuracy=full.accuracy[:1],
        ablated=full.ablated[:1, :1, :1],
        **{"statistics": {}, "groups": {}, "curves": {}, "controls": [], "claims": [], "heads": []},
    )
    path = document.write_page(narrow, tmp_path)
    pictures = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert pictures == {"heads", "training", "offsets", "ablation", "divergence", "map"}
    whole, data = read(path), embedded(read(path))
    assert not re.findall(r'<section id="(claims|heads-table)"', whole)
    text = whole.partition("<body>")[2].partition("<script")[0]
    assert "thin:" not in text and "median" not in text and "matched" not in text  # there is one seed
    drawn = re.findall(r'<section id="(\w+)" class="drawn">', whole)
    assert drawn == "training offsets ablation divergence map".split()
    assert data["heads"] == [{"code": "L0H0", "title": "layer 0 head 0", "layer": 0}]
