"""The report in a real browser: what a reader does, and what the page then shows."""

import numpy as np
import pytest

from jattn_experiments.run_page import document, figures, plot_data
from tests.experiments.test_report import HEADS, LAYERS, synthetic
from tests.web_page import drive

# What a reader does: moves the slider, points at cells, presses keys, opens a head, clicks the chart.
SCRIPT = """
const slider = document.getElementById("step");
const step = async (frame) => { slider.value = frame; slider.dispatchEvent(new Event("input")); await wait(30); };
verdict.cells = [];
for (let frame = 0; frame <= Number(slider.max); frame++) {
  await step(frame);
  small.forEach((button, head) => { button.click(); [[0, 4], [3, 1]].forEach(([query, key]) => {
    hover(large, query, key); verdict.cells.push([said("now"), frame, head, query, key, ...readout()]); }); });
}
verdict.slider = slider.type;
small[3].click();
press(large, "ArrowUp"); press(large, "ArrowRight");
verdict.keys = readout();
verdict.chosen = document.querySelectorAll("#grid [aria-pressed=true]").length;
const chart = document.querySelector("#training svg"), box = chart.querySelector("[id^=training-steps]").getBoundingClientRect();
const click = (share) => chart.dispatchEvent(new MouseEvent("click", { clientX: box.left + share * box.width }));
const marked = () => [...chart.querySelectorAll(".cursor")].map((line) => (line.getBoundingClientRect().x - box.left) / box.width);
click(0.45); await wait(30);
verdict.middle = [said("now"), ...marked()];
verdict.scores = [...document.querySelectorAll("#heads-numbers tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
click(0.01); await wait(30);
verdict.clicked = said("now");
const view = document.getElementById("view");
verdict.offered = [...view.options].map((option) => option.textContent);
choose("view", 1); await wait(30);
small[2].click(); hover(large, 3, 1);
verdict.second = [said("now"), ...readout()];
await step(3);
press(large, "ArrowLeft");
verdict.second_keys = [said("now"), ...readout()];
choose("view", 2); await wait(30);
small[0].click(); hover(large, 2, 3);
verdict.mean = [said("now"), ...readout()];
document.getElementById("play").click(); await wait(30); // from the last step it starts anew
verdict.played = said("now");
document.getElementById("play").click();
const tips = (id) => [...document.querySelectorAll(`#${id} svg title`)].map((mark) => mark.textContent);
for (const id of ["statistics", "ablation", "divergence", "map", "controls"]) verdict[id] = tips(id);
const matrix = document.querySelector("#ablation svg"), told = () => matrix.parentNode.nextElementSibling.textContent;
matrix.dispatchEvent(new Event("focus"));
["ArrowRight", "ArrowDown", "ArrowDown"].forEach((key) => press(matrix, key));
verdict.told = [told(), matrix.querySelectorAll(".marked").length];
matrix.querySelectorAll("title")[5].nextElementSibling.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
verdict.told.push(told());
const look = () => ["text", "[style*='--s0)']"].map((mark) => getComputedStyle(matrix.querySelector(mark)).fill);
verdict.colours = [look()];
document.documentElement.style.cssText = "--ink: rgb(1, 2, 3); --r0: rgb(4, 5, 6)"; // as another colour scheme does
verdict.colours.push(look());
const column = (at) => [...document.querySelectorAll("#heads-table tbody tr")].map((row) => row.cells[at].textContent);
const sorters = document.querySelectorAll("#heads-table th button");
verdict.sorted = [column(0)];
sorters[3].click(); // by role
verdict.sorted.push(column(3));
sorters[0].click(); sorters[0].click(); // by seed, largest first
verdict.sorted.push(column(0), document.querySelector("#heads-table th").getAttribute("aria-sort"));
const drawn = [...document.querySelectorAll(".drawn svg")];
const widths = (items) => items.map((item) => item.getBoundingClientRect().width);
verdict.drawn = [drawn.length, Math.min(...widths(drawn)) > 300 && // a narrow page scrolls a figure in its section
  Math.max(...widths(drawn.map((svg) => svg.closest(".drawn")))) <= innerWidth];
verdict.too_wide = document.documentElement.scrollWidth - innerWidth;
"""


@pytest.mark.slow
def test_the_page_works_in_a_browser(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "DPI", 30)
    findings = synthetic()
    verdict = drive(document.write_page(findings, tmp_path), SCRIPT, tmp_path)

    assert len(verdict["cells"]) == 4 * LAYERS * HEADS * 2
    steps = ["0 (untrained)", "5", "10", "20"]
    for step, frame, head, query, key, *shown in verdict["cells"]:
        weight = findings.example_weights[frame, 0, head // HEADS, head % HEADS, query, key]
        names = [f"layer {head // HEADS} head {head % HEADS}", f"{query}: {findings.tokens[0][query]}"]
        assert step == steps[frame]
        assert shown[:3] == [*names, f"{key}: {findings.tokens[0][key]}"]
        assert abs(float(shown[3]) - weight) < 6e-5  # four decimals

    last = findings.example_weights[-1, 0]
    assert verdict["slider"] == "range"  # the browser handles its arrow keys
    assert verdict["keys"][:3] == ["layer 1 head 1", "2: $x", "2: $x"]
    assert abs(float(verdict["keys"][3]) - last[1, 1, 2, 2]) < 6e-5
    assert verdict["chosen"] == 1
    at_ten = ["layer 1 head 1", "mirror", "0.100", "0.400", "0.100"]
    assert verdict["scores"][3] == at_ten and len(verdict["scores"]) == LAYERS * HEADS
    assert verdict["clicked"] == "0 (untrained)"
    step, *marked = verdict["middle"]
    assert step == "10" and marked == pytest.approx([0.5] * 4, abs=0.01)  # the nearest step, in each panel
    assert verdict["drawn"] == [8, True]
    before, after = verdict["colours"]
    assert after[0] == "rgb(1, 2, 3)" != before[0] and before[1] != after[1]
    assert verdict["too_wide"] <= 0
    check_views(findings, verdict)
    check_matrices(findings, verdict)


def check_views(findings, verdict):
    """Every example has its own tokens and weights; the mean has positions."""
    assert verdict["offered"] == ["example 1", "example 2", "mean over a batch"]
    second = findings.example_weights[:, 1, 1, 0]
    assert verdict["second"][:4] == ["0 (untrained)", "layer 1 head 0", "3: sat", "1: cat"]
    assert abs(float(verdict["second"][4]) - second[0, 3, 1]) < 6e-5
    assert verdict["second_keys"][:4] == ["20", "layer 1 head 0", "3: sat", "0: the"]
    assert abs(float(verdict["second_keys"][4]) - second[3, 3, 0]) < 6e-5
    assert verdict["mean"][:4] == ["20", "layer 0 head 0", "2", "3"]
    assert verdict["played"] == "0 (untrained)"
    assert abs(float(verdict["mean"][4]) - findings.mean_weights[1, 0, 0, 2, 3]) < 6e-5


def check_matrices(findings, verdict):
    """A cell or a dot for each number, which stands in its tooltip."""
    cells = LAYERS * HEADS * 2
    before, by_role, by_seed, direction = verdict["sorted"]
    assert before == sorted(before) and by_role == sorted(by_role) and set(by_role) == {"mirror", "one back"}
    assert by_seed == before[::-1] and direction == "descending"
    untrained, trained = verdict["statistics"][:cells], verdict["statistics"][cells:]
    assert len(trained) == cells
    assert untrained[0] == "L0H0 one back, max weight: 0.300 · seeds 7, 8, 9: 0.300, 0.300, 0.300"
    assert trained[0].startswith("L0H0 one back, max weight: 0.800 · ")
    assert trained[3].startswith("L0H1 mirror, distance: 5.000 · ")
    # Columns are the four heads and the group; the last seed failed. Seed 8 has its heads in the other order.
    cells = verdict["ablation"]
    assert len(cells) == 2 * (LAYERS * HEADS + 1)
    assert cells[0] == "one back, L0H0 one back: 0.900 · seeds 7, 8, 9: 0.900, 0.900, 0.300"
    assert cells[5] == "mirror, L0H0 one back: -0.050 · seeds 7, 8, 9: 0.050, -0.050, -0.750"
    told = "mirror, L0H1 mirror: 0.800 · seeds 7, 8, 9: 0.900, 0.800, 0.100"
    assert verdict["told"] == [told, 1, cells[5]]
    assert cells[4].startswith("one back, all one back: 0.300 · ")
    assert cells[9].startswith("mirror, all one back: 0.000 · ")
    assert len(verdict["divergence"]) == 2 * (LAYERS * HEADS) ** 2
    assert verdict["divergence"][1] == "L0H0, L0H1: 0.100"
    assert verdict["divergence"][(LAYERS * HEADS) ** 2 + 1] == "L0H0, L0H1: 0.500"
    assert verdict["controls"] == [f"one head & no more: {value}" for value in (0.3, 0.4, 0.5)]
    named = [dot.partition(": ") for dot in verdict["map"]]
    assert [name for name, _, _ in named] == ["L0H0 one back", "L0H1 mirror", "L1H0 one back", "L1H1 mirror"] * 2
    points = [[float(value) for value in place.split(", ")] for _, _, place in named]
    planes = [plot_data.plane(matrix)[0] for matrix in findings.divergence[0]]
    np.testing.assert_allclose(points, np.concatenate(planes), atol=1e-3)
