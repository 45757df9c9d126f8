"""The reports suite: pages of ``jattn.report``, bertviz and CircuitsVis compared on the same models and texts.

Shared by all rows: ``environment``, and ``missing`` (tool: why). The part ``pages`` has a row for each ``text`` and
``tool``: ``bytes``, ``seconds`` to make it from queries and keys, resident memory ``before`` that and at its ``peak``;
milliseconds to the ``paint`` and until it is ``ready``, and the ``marks`` and ``requests`` of the page in Chromium; or
what ``failed``. Without a network, a page that requests its code draws nothing. If the folder ``scripts`` in ``--out``
has the requested files, the page is opened a second time, as ``served``.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import selectors
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jattn_experiments.bench import timing
from jattn_experiments.bench.goals import Goal, goal_table, ratio
from jattn_experiments.bench.markdown import document, listed, short_number, table
from jattn_experiments.bench.probe import ask
from jattn_experiments.bench.suite import Job, Results, Suite
from jattn_experiments.bench.viewer_page import MEMORY, SECONDS, TEXTS, TOOLS

LONGEST = "12 x 12 heads, 4096 tokens"
# MB, seconds until it paints, by text.
LIMITS = {"MiniLM, 15 sentences": (3.0, 1.0), "SmolLM2, 512 tokens": (8.0, None), LONGEST: (6.0, 2.0)}
OURS = "jattn.report"
OPENED, TURNS, PATIENCE = "OPENED ", 3, 90.0
# A page is ready when no task of the main thread has taken more than 50 ms for a second.
WATCH = """<script>{
let last = 0, loaded = 0;
const busy = (list) => list.getEntries().forEach((task) => { last = Math.max(last, task.startTime + task.duration); });
new PerformanceObserver(busy).observe({ type: "longtask", buffered: true });
const settle = () => {
  const ready = Math.max(last, loaded), paint = performance.getEntriesByName("first-contentful-paint")[0];
  const quiet = performance.now() - ready;
  if (quiet < 1000 || !paint && quiet < 10000) return setTimeout(settle, 100);
  const names = performance.getEntriesByType("resource").map((entry) => entry.name);
  console.log("OPENED " + JSON.stringify({ paint: paint ? paint.startTime : null, ready,
    marks: document.querySelectorAll("svg *, canvas").length,
    requests: names.filter((name) => name.startsWith("http")).length }));
};
addEventListener("load", () => { loaded = performance.now(); settle(); });
}</script>"""
COLUMNS = ("file, MB", "to make, s", "memory, MiB", "first paint, s", "ready, s", "offline")
SHOWN = [
    ["the heads of", "any number of sequences, one page", "one sequence a view", "one sequence a view"],
    ["pictures", "all heads, and one large", "lines between two columns of tokens", "all heads, and one large"],
    ["long sequences", "blocks, and each query's largest weights", "dense", "dense"],
    ["the text, coloured by what a token sees", "yes", "yes, in `head_view`", "yes"],
    ["statistics and roles of heads", "yes", "no", "no"],
    ["two models side by side", "yes", "no", "no"],
    ["queries from one text, keys from another", "yes", "yes", "no"],
    ["queries and keys by dimension", "no", "`neuron_view`, for its own BERT, GPT-2 and RoBERTa", "no"],
    ["activations and logits", "no", "no", "yes, in other views"],
    ["works without a network", "yes", "no: code from a CDN", "with `local_src`; `str(...)` loads code from a CDN"],
]


def about(out: Path) -> dict[str, Any]:
    """What all rows share."""
    installed = _installed()
    packages = {TOOLS[tool][0] for tool in installed} - {"jattn"}
    versions = {name: importlib.metadata.version(name) for name in sorted(packages)}
    versions["chromium"] = "not installed"
    if browser := _browser():
        versions["chromium"] = subprocess.check_output([browser, "--version"], text=True).strip()
    missing = {tool: "not installed" for tool in TOOLS if tool not in installed}
    return {"environment": timing.machine() | versions, "missing": missing}


def _installed() -> list[str]:
    return [tool for tool, (package, _) in TOOLS.items() if importlib.util.find_spec(package) is not None]


def jobs(out: Path) -> Iterator[Job]:
    """Every text in every installed tool."""
    scripts = out.absolute() / "scripts"
    for text, tool in itertools.product(TEXTS, _installed()):
        yield Job("pages", {"text": text, "tool": tool}, functools.partial(page, text, tool, scripts))


def page(text: str, tool: str, scripts: Path) -> dict[str, Any]:
    """Makes a page and opens it, without a network."""
    with tempfile.TemporaryDirectory() as folder:
        file, row, step = Path(folder) / "page.html", {}, "make"
        try:
            row |= ask("viewer_page", text=text, tool=tool, file=str(file))
            step = "open"
            row |= open_page(file)
            if row["requests"] and scripts.is_dir():
                step = "open with its code"
                row["served"] = open_page(file, scripts)
        except (RuntimeError, TimeoutError) as wrong:
            row["failed"] = f"to {step}: {wrong}"
    return row


def open_page(file: Path, scripts: Path | None = None) -> dict[str, Any]:
    """The medians of what ``WATCH`` reports about a page in Chromium; ``{}`` without Chromium.

    ``scripts``: a folder with files that replace the page's links of the same names. Raises ``TimeoutError``
    if the page was not ready after ``PATIENCE`` seconds.
    """
    browser = _browser()
    if browser is None:
        return {"requests": 0}
    text = file.read_text(encoding="utf-8")
    if scripts is not None:
        for one in scripts.glob("*.js"):
            text = re.sub(rf"https://[\w./-]+/{re.escape(one.stem)}\b", one.with_suffix("").as_uri(), text)
    whole = text.replace("<head>", "<head>" + WATCH, 1) if "<head>" in text[:1000] else f"<!doctype html>{WATCH}{text}"
    watched = file.with_name("watched.html")
    watched.write_text(whole, encoding="utf-8")
    opened = [_open(browser, watched, file.parent / "profile") for _ in range(TURNS)]
    numbers = {name: [one[name] for one in opened if one[name] is not None] for name in opened[0]}
    return {name: round(statistics.median(values), 1) if values else None for name, values in numbers.items()}


def _open(browser: str, file: Path, profile: Path) -> dict[str, Any]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--remote-debugging-port=0", "--enable-logging=stderr"]
    command = [browser, *flags, f"--user-data-dir={profile}", file.as_uri()]
    end, log = time.monotonic() + PATIENCE, b""
    # A new session, so that the browser's child processes end with it.
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(process.stderr, selectors.EVENT_READ)
                while (left := end - time.monotonic()) > 0 and ready.select(left):
                    chunk = os.read(process.stderr.fileno(), 2**16)
                    log += chunk
                    if line := re.search(rf"{OPENED}(\{{.*\}})\",".encode(), log):
                        return json.loads(line[1])
                    if not chunk:
                        break
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    raise TimeoutError(f"not ready after {PATIENCE:.0f} s")


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def goals(results: Results) -> list[Goal]:
    """Every goal of ``jattn.report``, and its measured number."""
    lines = []
    for text, (megabytes, seconds) in LIMITS.items():
        values = results.values("pages", text=text, tool=OURS)
        lines.append(Goal(f"{text}: the file", ratio(values.get("bytes"), 1e6), megabytes, False, "MB"))
        if seconds is not None:
            lines.append(Goal(f"{text}: first paint", ratio(values.get("paint"), 1e3), seconds, False, "s"))
        if text == LONGEST:
            rise = values["peak"] - values["before"] if "peak" in values else None
            lines.append(Goal(f"{text}: memory to make it", ratio(rise, 2**20), 1024.0, False, "MiB"))
    return lines


def markdown(results: Results) -> str:
    """``reports.md``."""
    return document(
        "# Pages of heads, measured",
        "`jattn.report`, bertviz and CircuitsVis: the same queries and keys, a fresh process for each page, all "
        f"sequences on one. Opened {TURNS} times in headless Chromium without a network; medians of its own timing. "
        f"Failed: more than {MEMORY // 2**30} GiB or {SECONDS} s to make, or {PATIENCE:.0f} s to open. "
        "Written by `jattn bench --suite reports`.",
        "## Goals",
        goal_table(goals(results)),
        "## Every page",
        table(["text", "tool", *COLUMNS], [[*row.key.values(), *_cells(row.values)] for row in results.of("pages")]),
        "Memory is what making the page adds to the process. Paint is the first contentful paint. A page is ready "
        "when the main thread has no more long tasks. Parentheses: with the requested code next to the file.",
        "## What each tool shows",
        table(["", "jattn.report", "bertviz", "CircuitsVis"], SHOWN),
        "## Measured on",
        listed(results.about["environment"] | results.about["missing"]),
    )


def _cells(values: Mapping[str, Any]) -> list[str]:
    size = ["-"] * 3
    if "bytes" in values:
        size = [short_number(values["bytes"] / 1e6), f"{values['seconds']:.1f}"]
        size.append(f"{max(values['peak'] - values['before'], 0) / 2**20:.0f}")
    if "failed" in values:
        return [*size, "-", "-", f"failed {values['failed']}"]
    both = [values, values["served"]] if "served" in values else [values]
    opened = []
    for name in ("paint", "ready"):
        alone, *served = ("-" if one.get(name) is None else f"{one[name] / 1e3:.2f}" for one in both)
        opened.append(" ".join([alone, *(f"({seconds})" for seconds in served)]))
    network = "works"
    if values["requests"]:
        network = f"requests {values['requests']:.0f} files" + ("" if values["marks"] else ", draws nothing")
    return [*size, *opened, network]


SUITE = Suite(
    name="reports",
    parts={"pages": ("text", "tool")},
    about=about,
    jobs=jobs,
    markdown=markdown,
    shown=lambda results: goal_table(goals(results)),
    sizes=lambda plan: plan.out,
    start=lambda plan: timing.use("cpu"),
    resumable=True,
)
