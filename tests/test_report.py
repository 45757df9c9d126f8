"""The report and its pictures: what they show is what was found, and the page works in a real browser."""

import base64
import dataclasses
import html
import json
import os
import re
import shutil
import signal
import subprocess

import matplotlib.image
import numpy as np
import pytest

from experiments import figures, panels, report
from experiments.findings import Findings

SEEDS, LAYERS, HEADS, TOKENS = 3, 2, 2, 5
ORDER = [[0, 1], [1, 0], [0, 1]]  # in the second seed the heads of each layer have changed places


def synthetic(**changes):
    """A small run of three seeds; the last one fails. Every weight is different, so that a wrong one is seen."""
    rng = np.random.default_rng(0)
    weights = rng.random((4, LAYERS, HEADS, TOKENS, TOKENS))
    weights[-1] **= 3
    weights /= weights.sum(-1, keepdims=True)
    scores = {name: np.full((SEEDS, 3, LAYERS, HEADS), 0.1) for name in ("one_back", "mirror", "entropy")}
    profile = np.full((SEEDS, 2, LAYERS, HEADS, 9), 0.1)
    ablated = np.full((SEEDS, LAYERS, HEADS, 2), 0.95)
    for seed, (back, mirror) in enumerate(ORDER):
        scores["one_back"][seed, 1:, :, back] = [[0.5], [0.9]]
        scores["mirror"][seed, 1:, :, mirror] = [[0.4], [0.8]]
        profile[seed, 1, :, back, 3] = 0.9
        ablated[seed, :, back, 0] = ablated[seed, :, mirror, 1] = 0.1
    divergence = np.tile(0.5 * (1 - np.eye(LAYERS * HEADS)), (SEEDS, 2, 1, 1))
    accuracy = np.array([[1.0, 1.0], [1.0, 0.9], [0.4, 0.2]])
    names = ("name", "statement", "values", "side", "threshold", "untrained", "passed", "needed", "holds", "seeds")
    claims = [
        (
            "accuracy",
            "Accuracy < 1 & > 0.85.",
            [1.0, 0.9, 0.2],
            "at least",
            0.85,
            [0.06] * 3,
            [7, 8],
            2,
            True,
            [7, 8, 9],
        ),
        ("confusion", "At most 0.1.", [0.05, 0.3], "at most", 0.1, [0.9, 0.7], [5], 2, False, [5, 6]),  # of a control
    ]
    roles = ("one_back", "mirror")
    found = {
        "name": "tiny_copy",
        "description": "A description with <img src=x onerror=alert(1)> in it.",
        "config": {"train": {"steps": 20, "note": "<i>"}, "seeds": [7, 8, 9]},
        "environment": {"python": "3.12", "device": "cpu"},
        "seeds": [7, 8, 9],
        "places": ["one back", "mirror"],
        "tokens": ["<b>", "</script>", "$x", "“é”", "a long token indeed"],
        "metric_steps": np.arange(0, 20, 2),
        "metrics": {"loss": 1 + rng.random((SEEDS, 10)), "accuracy": rng.random((SEEDS, 10))},
        "look_steps": np.array([0, 10, 20]),
        "scores": scores,
        "offsets": np.arange(-4, 5),
        "offset_profile": profile,
        "example_steps": np.array([0, 5, 10, 20]),
        "example_weights": weights,
        "mean_weights": np.stack([np.full((LAYERS, HEADS, TOKENS, TOKENS), 0.2), weights[-1]]),
        "divergence": divergence,
        "accuracy": accuracy,
        "ablated": ablated,
        "heads": [
            {"seed": seed, "layer": layer, "head": head, "role": roles[ORDER[i][head]], "score": 0.9, "null": 0.1}
            for i, seed in enumerate([7, 8, 9])
            for layer in range(LAYERS)
            for head in range(HEADS)
        ],
        "curves": {"accuracy over length": {"learned": [[4, 0.9, 0.8, 0.7], [8, 0.5, 0.4, 0.3]]}},
        "controls": [
            {"name": "one head & no more", "metric": "accuracy", "values": [0.3, 0.4, 0.5], "parameters": 123}
        ],
        "claims": [dict(zip(names, claim, strict=True)) for claim in claims],
    }
    return Findings(**(found | changes))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    findings = synthetic()
    return findings, report.write_report(findings, tmp_path_factory.mktemp("run"))


@pytest.fixture
def coarse(monkeypatch):
    """Pictures of few pixels, where only their names matter."""
    monkeypatch.setattr(figures, "DPI", 30)


def embedded(path):
    page = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


def test_every_picture_is_written(written):
    _, path = written
    pictures = {file.stem: matplotlib.image.imread(file) for file in (path.parent / "figures").glob("*.png")}
    assert set(pictures) == {"heads", "training", "offsets", "ablation", "divergence", "curves", "controls"}
    for name, picture in pictures.items():
        assert picture.shape[1] >= 1600, name  # twice a README's width
        grey = picture[..., :3].mean(-1)
        assert 0.005 < (grey < 0.95).mean() < 0.9 and grey.std() > 0.05, f"{name} is empty or full"


def test_the_page_stands_alone_and_escapes_its_text(written):
    page = written[1].read_text(encoding="utf-8")
    assert len(page) < 200_000
    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=(?!\"data:,\")", page)
    # The name spaces of SVG are the only address: nothing to fetch.
    assert set(re.findall(r"https?://[^\"'\s)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "{{" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page and "<img" not in page
    assert page.count("</script>") == 2  # the token of that name ended none
    assert "&lt;i&gt;" in page and "train.note" in page


def test_claims_are_readable_without_colour(written):
    page = written[1].read_text(encoding="utf-8")
    claims = re.findall(r'<article class="claim.*?</article>', page, re.DOTALL)
    assert "Claims: 1 of 2 hold" in page
    assert "✓ holds" in claims[0] and "✗ fails" in claims[1]
    facts = [re.findall(r'<dd class="number">(.*?)</dd>', claim) for claim in claims]
    assert facts == [
        ["0.9", "at least 0.85", "0.06", "2 of 3, 2 needed"],
        ["0.175", "at most 0.1", "0.8", "1 of 2, 2 needed"],
    ]
    # Seeds that failed are marked as such; a control has seeds of its own.
    lost = [re.findall(r'class="lost".*?<title>(.*?)</title>', claim) for claim in claims]
    assert lost == [["seed 9: 0.2"], ["seed 6: 0.3"]]
    assert [claim.count('class="untrained"') for claim in claims] == [3, 2]


def test_tables_hold_every_head_and_control(written):
    page = written[1].read_text(encoding="utf-8")
    table = page[page.index('id="heads-table"') :].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
    assert len(rows) == SEEDS * LAYERS * HEADS
    assert rows[0] == ["7", "0", "0", "one back", "0.900", "0.100"]
    controls = page[page.index('id="controls"') :]
    assert "one head &amp; no more" in controls and ">123<" in controls and controls.count('class="seed"') == 3


def test_heads_of_other_seeds_are_matched():
    findings = synthetic()
    assert panels.matched_heads(findings).tolist() == [[order] * LAYERS for order in ORDER]
    profiles = panels.matched_profiles(findings)
    assert (profiles[:, 1, 0, 3] == 0.9).all() and (profiles[:, 1, 1, 3] == 0.1).all()
    ablated = panels.matched_ablation(findings)
    assert (ablated[:, 2, 0] == 0.1).all() and (ablated[:, 2, 1] == 0.95).all()
    findings.divergence[1, 1] = np.arange(16).reshape(4, 4)
    swapped = [1, 0, 3, 2]
    np.testing.assert_array_equal(
        panels.matched_divergence(findings)[1, 1], np.arange(16).reshape(4, 4)[swapped][:, swapped]
    )


def test_a_seed_is_shown_by_its_best_head():
    found = {panel.title: panel for panel in panels.time_panels(synthetic())}
    assert list(found) == ["loss", "accuracy", "best head's weight\non its place", "other head scores"]
    back, mirror = found["best head's weight\non its place"].lines
    np.testing.assert_allclose(back.seeds, [[0.1, 0.5, 0.9]] * SEEDS)
    np.testing.assert_allclose(mirror.seeds, [[0.1, 0.4, 0.8]] * SEEDS)
    assert found["other head scores"].lines[0].label == "entropy (mean of heads)"
    assert found["loss"].log and found["accuracy"].unit


def test_a_seed_that_is_not_finite_does_not_stop_the_report(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write_figures", lambda *_: [])
    findings = synthetic()
    findings.metrics["loss"][2, 5:] = np.nan
    findings.accuracy[2] = np.nan
    for draw in (figures.training_figure, figures.ablation_figure):
        draw(findings).savefig(tmp_path / "drawn.png", dpi=30)
    path = report.write_report(findings, tmp_path)
    line = embedded(path)["panels"][0]["lines"][0]
    assert line["seeds"][2][5:] == [None] * 5 and None not in line["seeds"][0]


def test_embedded_weights_are_those_found(written):
    findings, path = written
    data = embedded(path)
    one, mean = (
        np.frombuffer(base64.b64decode(view["weights"]), "<u2") / 65535 * data["top"] for view in data["views"]
    )
    np.testing.assert_allclose(one.reshape(findings.example_weights.shape), findings.example_weights, atol=1e-5)
    np.testing.assert_allclose(mean.reshape(findings.mean_weights.shape), findings.mean_weights, atol=1e-5)
    assert data["top"] == findings.example_weights.max()


def test_a_long_run_keeps_its_first_and_last_step(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "WEIGHT_BUDGET", 5 * LAYERS * HEADS * TOKENS**2)
    monkeypatch.setattr(report, "write_figures", lambda *_: [])
    path = report.write_report(synthetic(), tmp_path)
    assert embedded(path)["views"][0]["steps"] == [0, 10, 20]
    assert "1 of the steps are left out" in path.read_text(encoding="utf-8")


def test_what_is_missing_is_left_out(coarse, tmp_path):
    """One seed of one head in one layer, with nothing beside it."""
    full = synthetic()
    narrow = dataclasses.replace(
        full,
        seeds=[7],
        metrics={name: values[:1] for name, values in full.metrics.items()},
        scores={name: values[:1, :, :1, :1] for name, values in full.scores.items()},
        offset_profile=full.offset_profile[:1, :, :1, :1],
        example_weights=full.example_weights[:, :1, :1],
        mean_weights=full.mean_weights[:, :1, :1],
        divergence=full.divergence[:1, :, :1, :1],
        accuracy=full.accuracy[:1],
        ablated=full.ablated[:1, :1, :1],
        **{"curves": {}, "controls": [], "claims": [], "heads": []},
    )
    path = report.write_report(narrow, tmp_path)
    pictures = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert pictures == {"heads", "training", "offsets", "ablation", "divergence"}
    page, data = path.read_text(encoding="utf-8"), embedded(path)
    assert not re.findall(r'<section id="(claims|heads-table|controls)"', page)
    text = page.partition("<script")[0]
    assert "Thin lines" not in text and "matched" not in text  # there is one seed
    assert data["curves"] == []
    assert data["heads"] == [{"code": "L0H0", "title": "layer 0 head 0", "role": ""}]


# What a reader does: moves the slider, points at cells, presses keys, opens a head, clicks the chart.
RECORDER = """<script>
const problems = [];
addEventListener("error", (event) => problems.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => problems.push(event.blockedURI));
console.error = console.warn = (...words) => problems.push(words.join(" "));
</script>"""
DRIVER = """<script>
const text = (id) => document.getElementById(id).textContent;
const canvases = [...document.querySelectorAll("#grid canvas")], large = document.querySelector("#large canvas");
const hover = (canvas, query, key) => {
  const box = canvas.getBoundingClientRect(), { edge, top, cell } = canvas.place;
  const at = { clientX: box.left + edge + (key + .5) * cell, clientY: box.top + top + (query + .5) * cell };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  return [text("head"), text("query"), text("key"), text("weight")];
};
const press = (canvas, key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
const slider = document.getElementById("step"), verdict = { cells: [] };
for (let frame = 0; frame <= Number(slider.max); frame++) {
  slider.value = frame;
  slider.dispatchEvent(new Event("input"));
  canvases.forEach((canvas, head) => [[0, 4], [3, 1]].forEach(([query, key]) =>
    verdict.cells.push([text("now"), frame, head, query, key, ...hover(canvas, query, key)])));
}
verdict.slider = slider.type;
canvases[3].dispatchEvent(new Event("focus"));
press(canvases[3], "ArrowUp"); press(canvases[3], "ArrowRight");
verdict.keys = [text("head"), text("query"), text("key"), text("weight")];
press(canvases[3], "Enter");
verdict.opened = hover(large, 1, 2);
verdict.chosen = document.querySelectorAll("figure.chosen").length;
const chart = document.querySelector("#panels svg"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new MouseEvent("click", { clientX: box.left + 45, clientY: box.top + 20 }));
verdict.clicked = text("now");
const view = document.getElementById("view");
view.value = 1;
view.dispatchEvent(new Event("change"));
verdict.mean = [text("now"), hover(canvases[0], 2, 2)[3]];
verdict.hidden = [...document.querySelectorAll("section")].filter((section) => section.hidden).map((s) => s.id);
verdict.charts = document.querySelectorAll("#panels svg[role], #profiles svg[role], #bars svg[role]").length;
verdict.too_wide = document.documentElement.scrollWidth - innerWidth;
verdict.problems = problems;
const made = document.body.appendChild(document.createElement("pre"));
made.id = "verdict";
made.textContent = JSON.stringify(verdict);
</script>"""


def browse(page, folder):
    """The page as Chromium leaves it, and what went to its console."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium, chromium-browser or google-chrome found: the report cannot be opened")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    command = [browser, "--headless", *flags, "--enable-logging=stderr", "--v=0", "--window-size=500,900", "--dump-dom"]
    command.append(page.as_uri())
    # A session of its own, so that its helpers end with it.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, encoding="utf-8", start_new_session=True, **pipes) as process:
        try:
            dom, log = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return dom, [line for line in log.splitlines() if "CONSOLE" in line]


def test_the_page_works_in_a_browser(written, tmp_path):
    findings, path = written
    page = path.read_text(encoding="utf-8").replace("<head>", "<head>" + RECORDER, 1)
    copy = tmp_path / "driven.html"
    copy.write_text(page.replace("</body>", DRIVER + "</body>"), encoding="utf-8")
    dom, console = browse(copy, tmp_path)
    assert console == []
    verdict = json.loads(html.unescape(re.search(r'<pre id="verdict">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert verdict["problems"] == []

    assert len(verdict["cells"]) == 4 * LAYERS * HEADS * 2
    steps = ["0 (untrained)", "5", "10", "20"]
    for step, frame, head, query, key, *shown in verdict["cells"]:
        weight = findings.example_weights[frame, head // HEADS, head % HEADS, query, key]
        names = [f"layer {head // HEADS} head {head % HEADS}", f"{query}: {findings.tokens[query]}"]
        assert step == steps[frame]
        assert shown[:3] == [*names, f"{key}: {findings.tokens[key]}"]
        assert abs(float(shown[3]) - weight) < 6e-5  # four decimals

    last = findings.example_weights[-1]
    assert verdict["slider"] == "range"  # which moves with the arrow keys by itself
    assert verdict["keys"][:3] == ["layer 1 head 1", "2: $x", "2: $x"]
    assert abs(float(verdict["keys"][3]) - last[1, 1, 2, 2]) < 6e-5
    assert verdict["opened"][0] == "layer 1 head 1" and verdict["chosen"] == 1
    assert abs(float(verdict["opened"][3]) - last[1, 1, 1, 2]) < 6e-5
    assert verdict["clicked"] == "0 (untrained)"
    assert verdict["mean"][0] == "20" and abs(float(verdict["mean"][1]) - last[0, 0, 2, 2]) < 6e-5
    assert verdict["hidden"] == []
    assert verdict["charts"] == 4 + LAYERS * HEADS + LAYERS
    assert verdict["too_wide"] <= 0
