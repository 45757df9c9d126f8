"""The page of a circuit in Chromium, and the circuit as JSON and for Graphviz."""

import json

import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import circuits, interop
from jattn.positions import Rotary
from tests.web_page import drive

TOKENS = np.array([[3, 1, 4, 1, 5, 9]])


@pytest.fixture(scope="module")
def found():
    sizes = {"num_layers": 2, "num_heads": 4, "model_dim": 16, "mlp_dim": 12, "vocabulary": 11, "max_length": 16}
    kind = {"norm_epsilon": 1e-5, "activation": "silu", "position": Rotary(), "num_kv_heads": 2}
    model = interop.Transformer(interop.Config("tiny", **sizes, **kind), rngs=nnx.Rngs(0))
    corrupt = np.array([[3, 2, 4, 1, 5, 9]])
    metric = lambda logits, tokens: logits[-1, 1] - logits[-1, 2]
    scores = circuits.edge_attribution(model, TOKENS, corrupt, metric, progress=False)
    kept = circuits.faithfulness(model, TOKENS, corrupt, metric, scores, sizes=[5, 82], progress=False)
    report = jattn.report(interop.look(model, TOKENS), TOKENS)
    return scores, kept, report


def test_the_page_in_a_browser(found, tmp_path):
    scores, kept, report = found
    path = tmp_path / "circuit.html"
    page = circuits.circuit_report(scores, report, kept=kept, shown=12, title="A <b>circuit</b>", path=path)
    assert repr(page) == "CircuitReport('A <b>circuit</b>', 8 heads, 1 sequences)"
    best = int(np.argmax(kept.kept >= 0.8))
    assert f"{kept.sizes[best]} edges keep {kept.kept[best]:.2f} of the difference" in page.html
    assert "<b>circuit" not in page.html
    script = """
      const size = document.getElementById("circuit-size"), lines = () => [...document.querySelectorAll("#circuit-picture .edge")];
      const nodes = () => [...document.querySelectorAll("#circuit-picture .node.in")];
      verdict.first = [lines().length, said("circuit-count"), size.max];
      lines()[0].dispatchEvent(new PointerEvent("pointerenter"));
      verdict.edge = said("circuit-readout");
      size.value = 3; size.dispatchEvent(new Event("input"));
      verdict.fewer = lines().length;
      size.value = 82; size.dispatchEvent(new Event("input"));
      verdict.kinds = {};
      for (const button of document.querySelectorAll("#circuit-kinds button")) {
        const before = lines().length;
        button.click();
        verdict.kinds[button.textContent] = before - lines().length;
        button.click();
      }
      const last = nodes().filter((node) => node.getAttribute("role") === "button").at(-1);
      verdict.node = last.getAttribute("aria-label");
      press(last, "Enter");
      verdict.head = said("head");
      verdict.curve = document.querySelectorAll("#circuit-kept svg path").length;
      let saved = 0;
      URL.createObjectURL = (blob) => { saved = blob.size; return "blob:x"; };
      HTMLAnchorElement.prototype.click = () => {};
      document.getElementById("circuit-svg").click();
      verdict.saved = saved > 5000;
    """
    verdict = drive(path, script, tmp_path, size=(1200, 900))
    (reader, writer), graph = scores.greedy_order()[0], scores.graph
    assert verdict["first"] == [12, "12", "82"] and verdict["fewer"] == 3
    assert verdict["edge"].startswith(f"{graph.writers[writer]} → {graph.readers[reader]}: ")
    assert verdict["edge"].endswith("(edge 1 of 82)")
    per_kind = {kind: int(graph.edges[[r.startswith(kind) for r in graph.readers]].sum()) for kind in verdict["kinds"]}
    assert verdict["kinds"] == per_kind and sum(per_kind.values()) == 82
    assert verdict["node"] == "head 1.3: show what it looks at" and verdict["head"] == "layer 1 head 3"
    assert verdict["curve"] >= 5 and verdict["saved"]


@pytest.mark.slow
def test_a_page_without_a_curve_on_a_narrow_screen(found, tmp_path):
    scores, _, report = found
    circuits.circuit_report(scores, report, path=tmp_path / "circuit.html")
    script = """
      verdict.hidden = document.getElementById("circuit-kept").hidden;
      verdict.wide = document.documentElement.scrollWidth - innerWidth;
    """
    verdict = drive(tmp_path / "circuit.html", script, tmp_path, size=(500, 900))
    assert verdict["hidden"] and verdict["wide"] <= 0


def test_json_and_graphviz(found):
    scores, _, _ = found
    graph = scores.graph
    order = scores.greedy_order()[:9]
    edges = [{"writer": graph.writers[w], "reader": graph.readers[r], "score": scores.scores[r, w]} for r, w in order]
    content = json.loads(scores.to_json(9))
    assert content["edges"] == edges and content["num_kv_heads"] == 2 and content["method"] == "eap"
    drawn = scores.to_graphviz(9).splitlines()
    assert drawn[0] == "digraph circuit {" and drawn[-1] == "}" and len(drawn) == len(set(drawn))
    solid = [line for line in drawn if "penwidth" in line]
    assert len(solid) == 9
    for line, edge in zip(solid, edges, strict=True):
        assert line.strip().startswith(f'"{edge["writer"]}" -> ') and f"{edge['score']:+.3g}" in line
    shared = [edge["reader"] for edge in edges if edge["reader"].startswith(("key", "value"))]
    for reader in shared:
        layer, at = map(int, reader.split()[1].split("."))
        for head in (2 * at, 2 * at + 1):
            assert f'  "{reader}" -> "head {layer}.{head}" [style=dotted];' in drawn


def test_what_cannot_be_shown(found, tmp_path):
    scores, _, report = found
    with pytest.raises(ValueError, match="report must be of the model's 2 layers of 4 heads, got one of 2 heads"):
        circuits.circuit_report(scores, jattn.report(np.full((2, 3, 3), 1 / 3)))
    with pytest.raises(ValueError, match="shown and most must be at least 1, got 0 and 500"):
        circuits.circuit_report(scores, report, shown=0)
    with pytest.raises(FileNotFoundError):
        circuits.circuit_report(scores, report, path=tmp_path / "nowhere" / "circuit.html")
