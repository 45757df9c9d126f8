"""The page of ``jattn.report`` in a real browser: every way to use it, and what it then shows."""

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests.web_page import browse, drive

L, N, T, H = 2, 3, 9, 5
WORDS = ["The", " cat", " sat", " on", " the", " mat", " of", " the", " cat"]
SHOWN = """
const shown = () => ({ readout: readout(), pinned: state.pinned, window: state.window, hash: location.hash,
  pressed: [...document.querySelectorAll("#grid [aria-pressed=true]")].map((button) => button.title) });
"""

pytestmark = pytest.mark.slow


def layers(seed, T=T, S=T):
    """``{name: (query, key)}``, drawn in NumPy: the page is the object here, not the weights."""
    rng = np.random.default_rng(seed)
    shapes = (1, T, N, H), (1, S, N, H)
    draw = lambda shape: jnp.asarray(2 * rng.normal(size=shape), jnp.float32)
    return {f"layer {i}": tuple(map(draw, shapes)) for i in range(L)}


def dense(arrays, **options):
    return np.concatenate([jattn.attention_weights(q, k, **options)[0] for q, k in arrays.values()])


@pytest.fixture(scope="module")
def report():
    other = jattn.report(layers(1), WORDS, is_causal=True, title="other")
    return jattn.report(layers(0), WORDS, is_causal=True, title="one", compare=other)


def test_pointing_pinning_and_keys(report, tmp_path):
    script = SHOWN + """
    hover(large, 4, 2); verdict.hovered = shown();
    large.dispatchEvent(new MouseEvent("click", hover(large, 4, 2))); verdict.pinned = shown();
    hover(large, 7, 1); verdict.kept = shown(); // a pinned query stays, the key follows
    verdict.text = [...document.querySelectorAll("#text .token")].map((span) => [span.textContent, span.title]);
    verdict.looks = [...document.querySelectorAll("#looks tr")].map((row) => [...row.cells[1].querySelectorAll(".look")].map((one) => one.textContent));
    document.querySelectorAll("#text .token")[6].click(); verdict.word = shown();
    press(large, "ArrowDown"); press(large, "ArrowLeft"); verdict.arrows = shown();
    press(large, "ArrowDown", { shiftKey: true }); verdict.far = shown();
    press(large, "Enter"); verdict.released = shown();
    press(large, "]"); verdict.next = shown();
    press(small[1], "ArrowDown"); verdict.below = [shown(), document.activeElement.title];
    small[2].click(); verdict.clicked = shown();
    verdict.labels = [large.getAttribute("aria-label"), small.map((button) => button.tabIndex)];
    """  # fmt: skip
    seen = drive(report.save(tmp_path / "page.html"), script, tmp_path)
    weights = dense(layers(0), is_causal=True)

    def check(shown, head, query, key):
        name, q, kv, weight = shown["readout"]
        title = f"layer {head // N} head {head % N}"
        assert [name, q, kv] == [title, f"{query}: {WORDS[query]}", f"{key}: {WORDS[key]}"]
        assert abs(float(weight) - weights[head, query, key]) < 6e-5
        assert shown["pressed"] == [title]

    check(seen["hovered"], 0, 4, 2)
    assert not seen["hovered"]["pinned"] and seen["pinned"]["pinned"] and seen["kept"]["pinned"]
    check(seen["kept"], 0, 4, 1)
    row = weights[0, 4]
    for i, (word, told) in enumerate(seen["text"]):
        assert word == WORDS[i] and (told == "") == (i > 4)
        assert i > 4 or abs(float(told.rsplit(": ")[-1]) - row[i]) < 6e-5
    for head, chips in enumerate(seen["looks"]):  # the three largest, largest first
        order = np.argsort(-weights[head, 4], kind="stable")[:3]
        assert chips == [f"{WORDS[i].strip()}{weights[head, 4, i]:.2f}" for i in order]
    check(seen["word"], 0, 6, 1)
    check(seen["arrows"], 0, 7, 0)
    check(seen["far"], 0, 8, 0)
    assert seen["word"]["pinned"] and not seen["released"]["pinned"]
    check(seen["next"], 1, 8, 0)
    below, focused = seen["below"]
    assert below["pressed"] == [focused] == ["layer 1 head 1"]
    check(seen["clicked"], 2, 8, 0)
    label, tabs = seen["labels"]
    assert label == "layer 0 head 2: attention weights, queries in rows, keys in columns"
    assert tabs == [-1, -1, 0, -1, -1, -1]


def test_comparing_numbers_and_files(report, tmp_path):
    script = SHOWN + """
    hover(large, 5, 3);
    const second = document.querySelector("#second");
    verdict.alone = [second.hidden, getComputedStyle(second).display];
    choose("beside", "0,1"); await wait(50);
    hover(large, 5, 3);
    verdict.beside = [second.hidden, [...second.querySelectorAll("figcaption > *")].map((part) => part.textContent), readout()[3]];
    const rows = () => [...document.querySelectorAll("#heads-numbers tbody tr")];
    const column = (at) => rows().map((row) => row.cells[at].textContent);
    verdict.both = column(1);
    choose("beside", ""); await wait(50);
    verdict.names = [...document.querySelectorAll("#heads-numbers thead th")].map((cell) => cell.textContent);
    verdict.before = column(1);
    document.querySelectorAll("#heads-numbers thead button")[1].click(); verdict.sorted = column(1);
    rows()[0].click(); verdict.first = [rows()[0].cells[0].textContent, readout()[0]];
    choose("by", 1); verdict.map = [...document.querySelectorAll("#head-map button")].map((cell) => cell.title);
    choose("view", 1); await wait(50); verdict.other = [document.getElementById("view").selectedOptions[0].textContent, readout()[3]];
    choose("view", 0); await wait(50);
    choose("of", "mean"); verdict.mean = [...document.querySelectorAll("#text .token")].map((span) => span.title);
    choose("own", "1"); await wait(50); verdict.scale = said("top");
    const svgFile = asSvg(large), pngFile = await savePng(large);
    verdict.svg = [svgFile.slice(0, 4), (svgFile.match(/<rect/g) || []).length, svgFile.includes("cat")];
    verdict.png = [pngFile.type, pngFile.size > 1000, fileName("png")];
    """  # fmt: skip
    seen = drive(report.save(tmp_path / "page.html"), script, tmp_path)
    one, other = (dense(layers(seed), is_causal=True) for seed in (0, 1))
    head = 0
    assert seen["alone"] == [True, "none"]
    hidden, (name, weight, side), _ = seen["beside"]
    match = int(name.rpartition("H")[2])
    assert not hidden and name.startswith("layer 0 head 0 ↔ L0H") and side == "other"
    assert abs(float(weight) - other[match, 5, 3]) < 6e-5
    assert all(" → " in cell for cell in seen["both"]) and not any("→" in cell for cell in seen["before"])
    assert seen["names"][:2] == ["head", "entropy"]
    assert sorted(map(float, seen["before"])) == list(map(float, seen["sorted"])) != list(map(float, seen["before"]))
    row, shown = seen["first"]
    assert row == shown
    head = int(row[6]) * N + int(row[-1])
    assert seen["map"][0].startswith("layer 0 head 0, max weight: 0.")
    name, weight = seen["other"]
    assert name.endswith("· other") and abs(float(weight) - one[head, 5, 3]) > 1e-4
    told = [float(title.rsplit(": ")[-1]) for title in seen["mean"][:6]]
    np.testing.assert_allclose(told, one[:, 5, :6].mean(0), atol=6e-5)
    assert seen["scale"] == "the picture's largest"
    assert seen["svg"][0] == "<svg" and seen["svg"][1] > 20 and seen["svg"][2]
    assert seen["png"][:2] == ["image/png", True] and seen["png"][2].endswith("-The-cat-sat-on-the-mat-of-the-cat.png")


def long(T):
    """A head that looks three back and one that looks at the first token."""
    code = np.linalg.qr(np.random.default_rng(0).normal(size=(T, T)))[0][:, :64].astype(np.float32)
    key = np.stack([code, 0 * code], 1)
    query = np.stack([np.roll(code, 3, 0) * 4000, 0 * code], 1)
    key[0, 1], query[:, 1] = 1, 1
    return {"only": tuple(jnp.asarray(x)[None] for x in (query, key))}


def test_a_long_text_from_afar_and_up_close(monkeypatch, tmp_path):
    size = 300
    monkeypatch.setattr("jattn.reports._kept_weights.ALL_WEIGHTS", 1000)
    monkeypatch.setattr("jattn.reports._kept_weights.LARGEST_WEIGHTS", 4 * 2 * size)
    arrays = long(size)
    report = jattn.report(arrays, [f"w{i}" for i in range(size)], is_causal=True)
    script = """
    verdict.far = [large.per > 4, said("kept"), said("zoomed")];
    hover(large, 200, 197); verdict.found = shown();
    press(large, "+"); press(large, "+"); press(large, "+");
    verdict.near = [large.per, said("zoomed"), state.window];
    hover(large, 200, 190); verdict.unkept = shown();
    for (let i = 0; i < 60; i++) press(large, "ArrowUp");
    verdict.followed = [state.window, state.query];
    press(large, "0"); verdict.whole = [state.window, said("zoomed")];
    document.getElementById("zoom-in").click(); verdict.button = state.window;
    small[1].click(); hover(large, 250, 0); verdict.first = shown();
    """
    seen = drive(report.save(tmp_path / "page.html"), SHOWN + script, tmp_path)
    weights = dense(arrays, is_causal=True)
    far, note, zoomed = seen["far"]
    assert far and "the 4 largest weights of each query" in note and zoomed == "all tokens"
    assert seen["found"]["readout"][1:3] == ["200: w200", "197: w197"]
    assert abs(float(seen["found"]["readout"][3]) - weights[0, 200, 197]) < 6e-5
    assert seen["near"][0] == 1 and seen["near"][1] == "38 of 300 tokens"
    assert seen["unkept"]["readout"][3].startswith("not kept: at most ")
    fourth, bound = np.sort(weights[0, 200])[-4], float(seen["unkept"]["readout"][3].split()[-1])
    assert fourth <= bound <= 1.1 * fourth + 2e-5  # what is rounded to 0 need not be 0
    window, query = seen["followed"]
    assert query == 140 and window[0] <= 140 < window[0] + window[2]
    assert seen["whole"] == [None, "all tokens"] and seen["button"][2] == 150


BOUNDS = {  # bits, the share of the largest below which weights are left out, how many of a query's stay nevertheless
    "each query's largest": (0, (16, 0.0, 0)),
    "few digits": (0, (10, 0.0, 0)),
    "few digits and the smallest left out": (0, (10, 0.0123, 2)),
    "all but the smallest": (2**23, (8, 0.0123, 0)),
}


@pytest.mark.parametrize(("all_weights", "stage"), BOUNDS.values(), ids=BOUNDS)
def test_what_is_not_kept_is_no_larger_than_it_says(monkeypatch, tmp_path, all_weights, stage):
    size = 80
    monkeypatch.setattr("jattn.reports._kept_weights.ALL_WEIGHTS", all_weights)
    monkeypatch.setattr("jattn.reports._kept_weights.LARGEST_WEIGHTS", 4 * L * N * size)
    monkeypatch.setattr("jattn.reports._pack_weights.STAGES", (stage,))
    arrays = {name: (0.3 * query, key) for name, (query, key) in layers(2, size, size).items()}
    report = jattn.report(arrays, is_causal=True)
    script = """
    verdict.note = frame().note;
    verdict.said = heads.map((_, head) => view().queries.map((_, query) => view().keys.map((_, key) => weightText(frame(), head, query, key))));
    """
    seen = drive(report.save(tmp_path / "page.html"), script, tmp_path)
    scores = [np.einsum("tnh,snh->nts", *(np.asarray(x[0], float) for x in pair)) / H**0.5 for pair in arrays.values()]
    weights = np.exp(np.where(np.tri(size, dtype=bool), np.concatenate(scores), -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    unkept = np.array([[["not kept" in one for one in row] for row in head] for head in seen["said"]])
    bound = np.array([[[float(one.split()[-1]) for one in row] for row in head] for head in seen["said"]])
    smallest = np.sort(np.where(unkept, np.inf, weights), -1)[..., :1]  # of those that are kept
    assert unkept.any() and (weights <= 1.00001 * bound)[unkept].all()
    assert (bound <= 1.1 * np.maximum(smallest, stage[1] * weights.max()) + weights.max() / 2 ** stage[0])[unkept].all()
    if stage[1]:  # the note names the number below which weights are left out
        least = float(seen["note"].partition("Weights below ")[2].split()[0].strip(","))
        rank = (-weights).argsort(-1).argsort(-1)
        clear = (abs(weights / least - 1) > 1e-4) & (weights > weights.max() / 1000) & ((rank < 4) | (all_weights > 0))
        assert (unkept == ((weights < least) & (rank >= stage[2])))[clear].all()


def test_a_link_carries_the_selection(report, tmp_path):
    path = report.save(tmp_path / "page.html")
    script = "hover(large, 6, 2); small[4].click(); press(large, 'Enter'); await wait(400); verdict.there = shown();"
    there = drive(path, SHOWN + script, tmp_path)["there"]
    again = drive(path, SHOWN + "verdict.again = shown();", tmp_path, address=there["hash"])["again"]
    assert again["readout"] == there["readout"] and again["pinned"] and again["pressed"] == ["layer 1 head 1"]
    address = "#head=99&query=x&view=-1&beside=7,7&window=a,b,c"
    odd = drive(path, SHOWN + "verdict.odd = shown();", tmp_path, address=address)
    assert odd["odd"]["pressed"] == ["layer 0 head 0"]
    stale = drive(path, SHOWN + "verdict.stale = shown();", tmp_path, address="#head=4&window=1000,1000,8")["stale"]
    assert stale["window"] is None and stale["pressed"] == ["layer 1 head 1"]  # a link to a longer text


def test_odd_words_and_texts_of_two_lengths(tmp_path):
    """The second picture may be of a longer text; of it, the first has no words to point at."""
    longer = jattn.report(layers(1, 12, 12), [f"w{i}" for i in range(12)], is_causal=True, title="longer")
    words = ["", "\u05e9\u05dc\u05d5\u05dd", "a\0b", "x" * 200, "5", "6", "7", "8", "9"]
    report = jattn.report(layers(0), words, compare=longer)
    script = """
    const largest = heads.map((_, head) => Math.max(...frame().cells(head, [0, 0, 9]).values));
    chooseHead(nearest(largest, 0));
    const file = (own) => { document.getElementById("own").value = own; return new DOMParser().parseFromString(asSvg(large), "image/svg+xml"); };
    const fills = (made) => [...made.querySelectorAll("rect")].map((one) => one.getAttribute("fill"));
    verdict.svg = [file(""), file("1")].map((made) => [made.querySelector("parsererror"), fills(made)]);
    verdict.colours = [ink.page, css(0), css(1), css(largest[state.head] / data.top) !== css(1)];
    const box = (one) => one.getBoundingClientRect();
    let chip;
    for (let query = 0; !chip && query < 9; query++) {
      hover(large, query, 1);
      chip = [...document.querySelectorAll("#looks .look")].find((one) => one.title === "1: " + view().keys[1]);
    }
    const word = document.createRange();
    word.selectNode(chip.firstChild);
    verdict.order = [box(word).left, box(chip.querySelector("b")).left];
    hover(large, 3, 1); verdict.wide = document.documentElement.scrollWidth - innerWidth;
    choose("beside", "1,0"); await wait(100);
    const second = document.querySelector("#second canvas");
    hover(second, 11, 2); hover(second, 2, 11); verdict.beyond = shown().readout;
    hover(second, 8, 2); verdict.within = shown().readout;
    const event = new KeyboardEvent("keydown", { key: "ArrowLeft", altKey: true, cancelable: true });
    large.dispatchEvent(event); verdict.back = [event.defaultPrevented, state.key];
    """
    dark = "--blink-settings=preferredColorScheme=0"
    seen = drive(report.save(tmp_path / "page.html"), SHOWN + script, tmp_path, dark)
    assert seen["wide"] <= 0 and seen["order"][0] < seen["order"][1]
    page, none, most, paler = seen["colours"]
    assert paler
    for (problem, fills), brightest in zip(seen["svg"], (False, True), strict=True):
        assert problem is None and fills[:2] == [page, none] and (most in fills) == brightest
    assert seen["beyond"][1].startswith("3: x") and seen["within"][1:3] == ["8: 9", "2: a\u2400b"]
    assert seen["back"] == [False, 2]


def test_parts_of_characters_are_legible(tmp_path):
    words = ["猫₁₂", "猫₃", "😀₁", "😀₂₃₄", "<0xE7>", "の", "\U00020bb7" * 30, "8", "9"]
    script = """
    verdict.text = [...document.querySelectorAll("#text .token")].map((span) => span.textContent);
    hover(large, 8, 3); verdict.readout = readout();
    verdict.note = document.querySelector("#attention p").textContent;
    const pen = large.getContext("2d");
    verdict.cut = [10, 20, 40, 60].map((room) => shorten(pen, view().keys[6], room)).map((text) => [text.isWellFormed(), text.endsWith("…")]);
    """
    seen = drive(jattn.report(layers(0), words, is_causal=True).save(tmp_path / "page.html"), script, tmp_path)
    assert seen["text"] == words and seen["readout"][2] == "3: 😀₂₃₄"
    assert "é₁ is the first byte of é." in seen["note"]
    assert seen["cut"] == [[True, True]] * 4


CONTRAST = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const rgb = (css, under) => { canvas.fillStyle = under || "#fff"; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
const behind = (element) => { for (let at = element; at; at = at.parentElement) { const css = getComputedStyle(at).backgroundColor; if (css !== "rgba(0, 0, 0, 0)") return css; } return "#fff"; };
const ratio = (a, b) => { const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x); return (high + 0.05) / (low + 0.05); };
const wordy = [...document.querySelectorAll("main *")].filter((one) => one.checkVisibility() && !one.closest("svg") && [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()));
verdict.faint = wordy.map((one) => [ratio(rgb(getComputedStyle(one).color), rgb(behind(one))), one.tagName, one.textContent.slice(0, 30)]).filter(([value]) => value < 4.5);
verdict.unnamed = [...document.querySelectorAll("button, select, input, canvas[tabindex], [role=img]")].filter((one) => one.checkVisibility() && !(one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length)).map((one) => one.outerHTML.slice(0, 80));
verdict.tabs = [...document.querySelectorAll(".scroll")].filter((one) => one.scrollHeight > one.clientHeight + 1 && one.tabIndex < 0 && !one.querySelector("button")).length;
verdict.wide = document.documentElement.scrollWidth - innerWidth;
verdict.dark = matchMedia("(prefers-color-scheme: dark)").matches;
"""


@pytest.mark.parametrize("flags", [(), ("--blink-settings=preferredColorScheme=0",)], ids=["light", "dark"])
def test_legible_in_light_and_dark_and_on_a_narrow_screen(report, tmp_path, flags):
    """Text has the contrast that WCAG 2 asks for at level AA, every control has a name, nothing is too wide."""
    seen = drive(report.save(tmp_path / "page.html"), CONTRAST, tmp_path, *flags, size=(500, 900))
    assert seen["dark"] == bool(flags)
    assert seen["faint"] == [] and seen["unnamed"] == [] and seen["tabs"] == 0 and seen["wide"] <= 0


def test_two_texts_and_grouped_queries(tmp_path):
    rng = np.random.default_rng(3)
    query, key = rng.normal(size=(1, 4, N * 2, H)), rng.normal(size=(1, 6, 2, H))
    arrays = {"cross": (jnp.asarray(query, jnp.float32), jnp.asarray(key, jnp.float32))}
    report = jattn.report(arrays, ["le", "chat", "est", "là"], key_tokens=["the", "cat", "is", "there", ",", "now"])
    script = """
    verdict.asked = [...document.querySelectorAll("#asked .token")].map((span) => span.textContent);
    document.querySelectorAll("#asked .token")[1].click(); hover(large, 1, 5); verdict.shown = shown();
    verdict.text = [...document.querySelectorAll("#text .token")].map((span) => span.title);
    """
    seen = drive(report.save(tmp_path / "page.html"), SHOWN + script, tmp_path)
    weights = np.asarray(jattn.attention_weights(*arrays["cross"]))[0]
    assert seen["asked"] == ["le", "chat", "est", "là"] and seen["shown"]["readout"][1:3] == ["1: chat", "5: now"]
    assert abs(float(seen["shown"]["readout"][3]) - weights[0, 1, 5]) < 6e-5
    told = [float(title.rsplit(": ")[-1]) for title in seen["text"]]
    np.testing.assert_allclose(told, weights[0, 1], atol=6e-5)


def test_a_notebook_shows_it_in_its_frame(report, tmp_path):
    """In the sandbox it has no origin: nothing of the page may need one."""
    path = tmp_path / "notebook.html"
    page = f"<!doctype html><html><head></head><body>{report._repr_html_()}</body></html>"
    inside = "addEventListener(&quot;load&quot;, () =&gt; setTimeout(() =&gt; parent.postMessage(document.documentElement.dataset.ready + getComputedStyle(document.body).color, &quot;*&quot;), 500));"
    outside = "addEventListener('message', (event) => { document.title = event.data; });"
    page = page.replace("&lt;head&gt;", f"&lt;head&gt;&lt;script&gt;{inside}&lt;/script&gt;", 1)
    path.write_text(page.replace("<head>", f"<head><script>{outside}</script>"), encoding="utf-8")
    dom, console = browse(path, tmp_path, "--disable-features=IsolateSandboxedIframes")
    assert not console, console
    assert "<title>1rgb(" in dom
