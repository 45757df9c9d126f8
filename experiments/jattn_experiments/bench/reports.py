"""The reports benchmark: ``jattn.report`` beside bertviz and CircuitsVis, on the same models and texts.

Shared by all rows: ``environment``, and ``missing`` (tool: why). The part ``pages`` has a row for each ``text`` and
``tool``: ``bytes``, ``seconds`` to make it from queries and keys, resident memory ``before`` that and at its ``peak``;
milliseconds to the ``paint`` and until it is ``ready``, and the ``marks`` and ``requests`` of the page in Chromium; or
what ``failed``. Without a network, a page that requests its code draws nothing. It is opened a second time, ``served``,
if the folder ``scripts`` in ``--out`` has what it requests.
"""

import functools
import importlib.metadata
import importlib.util
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jattn_experiments.bench import pages, timing
from jattn_experiments.bench.probe import ask
from jattn_experiments.bench.suite import Job, Results, Suite
from jattn_experiments.bench.tables import Asked, asked_table, listed, report, short_number, table

TEXTS = ("MiniLM, 15 sentences", "SmolLM2, 512 tokens", "12 x 12 heads, 4096 tokens")  # those with goals
LIMITS = dict(zip(TEXTS, ((3.0, 1.0), (8.0, None), (6.0, 2.0)), strict=True))  # MB, seconds until it paints
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
SHOWN = [
    ["the heads of", "any number of sequences, one page", "one sequence a view", "one sequence a view"],
    ["pictures", "all heads, and one large", "lines between two columns of tokens", "all heads, and one large"],
    ["long sequences", "blocks, and each query's largest weights", "dense", "dense"],
    ["the text, coloured by what a token sees", "yes", "yes, in `head_view`", "yes"],
    ["statistics and roles of heads", "yes", "no", "no"],
    ["two models side by side", "yes", "no", "no"],
    ["queries of one text, keys of another", "yes", "yes", "no"],
    ["queries and keys, dimension by dimension", "no", "`neuron_view`, of its own BERT, GPT-2, RoBERTa", "no"],
    ["activations and logits", "no", "no", "yes, in other views"],
    ["works without a network", "yes", "no: code from a CDN", "`local_src` does; `str(...)` takes its code from a CDN"],
]


def about(out: Path) -> dict[str, Any]:
    """What all rows share."""
    packages = {package for package, _ in pages.TOOLS.values()} - {"jattn"}
    absent = {package for package in packages if importlib.util.find_spec(package) is None}
    versions = {name: importlib.metadata.version(name) for name in sorted(packages - absent)}
    browser = _browser()
    chromium = "not installed" if browser is None else _line([browser, "--version"])
    missing = {tool: "not installed" for tool, (package, _) in pages.TOOLS.items() if package in absent}
    return {"environment": timing.machine() | versions | {"chromium": chromium}, "missing": missing}


def jobs(out: Path) -> Iterator[Job]:
    """Every text in every tool that is there."""
    there = [tool for tool, (package, _) in pages.TOOLS.items() if importlib.util.find_spec(package) is not None]
    scripts = out.absolute() / "scripts"
    for text in pages.TEXTS:
        for tool in there:
            yield Job("pages", {"text": text, "tool": tool}, functools.partial(page, text, tool, scripts))


def page(text: str, tool: str, scripts: Path) -> dict[str, Any]:
    """Makes a page and opens it, without a network."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        try:
            made = ask("pages", {"text": text, "tool": tool, "file": str(file)})
        except RuntimeError as failed:
            return {"failed": f"to make: {failed}"}
        try:
            found = made | open_page(file)
        except TimeoutError as failed:
            return made | {"failed": f"to open: {failed}"}
        if found["requests"] and scripts.is_dir():
            try:
                found["served"] = open_page(file, scripts)
            except TimeoutError as failed:
                found["failed"] = f"to open with its code: {failed}"
    return found


def open_page(file: Path, scripts: Path | None = None) -> dict[str, Any]:
    """The medians of what ``WATCH`` says of a page in Chromium, ``{}`` without Chromium.

    ``scripts``: a folder with the files that the page's links of the same names are turned to.

    Raises:
        TimeoutError: it was not ready after ``PATIENCE`` seconds.
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
    found = [_open(browser, watched, file.parent / "profile") for _ in range(TURNS)]
    numbers = {name: [one[name] for one in found if one[name] is not None] for name in found[0]}
    return {name: round(statistics.median(values), 1) if values else None for name, values in numbers.items()}


def _open(browser: str, file: Path, profile: Path) -> dict[str, Any]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--remote-debugging-port=0", "--enable-logging=stderr"]
    command = [browser, *flags, f"--user-data-dir={profile}", file.as_uri()]
    end, said = time.monotonic() + PATIENCE, b""
    # In its own session, so that its child processes end with it.
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(process.stderr, selectors.EVENT_READ)
                while (left := end - time.monotonic()) > 0 and ready.select(left):
                    chunk = os.read(process.stderr.fileno(), 2**16)
                    said += chunk
                    if line := re.search(rf"{OPENED}(\{{.*\}})\",".encode(), said):
                        return json.loads(line[1])
                    if not chunk:
                        break
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    raise TimeoutError(f"not ready after {PATIENCE:.0f} s")


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _line(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def asked(results: Results) -> list[Asked]:
    """Every goal of ``jattn.report``, and its measured number."""
    goals = []
    for text, (megabytes, seconds) in LIMITS.items():
        found = next((row.found for row in results.of("pages", text=text, tool=OURS)), {})
        goals.append(Asked(f"{text}: the file", _scaled(found.get("bytes"), 1e6), megabytes, False, "MB"))
        if seconds is not None:
            goals.append(Asked(f"{text}: first paint", _scaled(found.get("paint"), 1e3), seconds, False, "s"))
    last = next((row.found for row in results.of("pages", text=TEXTS[-1], tool=OURS)), {})
    rise = last["peak"] - last["before"] if "peak" in last else None
    goals.append(Asked(f"{TEXTS[-1]}: memory to make it", _scaled(rise, 2**20), 1024.0, False, "MiB"))
    return goals


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def markdown(results: Results) -> str:
    """``reports.md``."""
    return report(
        "# Pages of heads, measured",
        "`jattn.report` beside bertviz and CircuitsVis: the same queries and keys, a fresh process for each page, all "
        f"sequences on one. Opened {TURNS} times in headless Chromium without a network; medians of its own timing. "
        f"Failed: more than {pages.MEMORY // 2**30} GiB or {pages.SECONDS} s to make, or {PATIENCE:.0f} s to open. "
        "Written by `jattn bench --suite reports`.",
        "## What was asked",
        asked_table(asked(results)),
        "## Every page",
        table(
            [
                "text",
                "tool",
                "file, MB",
                "to make, s",
                "memory, MiB",
                "first paint, s",
                "ready, s",
                "without a network",
            ],
            [_cells(row.key, row.found) for row in results.of("pages")],
        ),
        "Memory: what making the page adds to the process. Paint: the first contentful paint. Ready: the main thread "
        "has no more long task. In parentheses: with the requested code beside the file.",
        "## What each shows",
        table(["", "jattn.report", "bertviz", "CircuitsVis"], SHOWN),
        "## Measured on",
        listed(results.about["environment"] | results.about["missing"]),
    )


def _cells(key: Any, found: Any) -> list[Any]:
    made = ["-"] * 3
    if "bytes" in found:
        made = [short_number(found["bytes"] / 1e6), f"{found['seconds']:.1f}"]
        made.append(f"{max(found['peak'] - found['before'], 0) / 2**20:.0f}")
    if "failed" in found:
        return [key["text"], key["tool"], *made, "-", "-", f"failed {found['failed']}"]
    both = [found, found["served"]] if "served" in found else [found]
    opened = []
    for name in ("paint", "ready"):
        alone, *served = ("-" if one.get(name) is None else f"{one[name] / 1e3:.2f}" for one in both)
        opened.append(" ".join([alone, *(f"({seconds})" for seconds in served)]))
    network = "works"
    if found["requests"]:
        network = f"requests {found['requests']:.0f} files" + ("" if found["marks"] else ", draws nothing")
    return [key["text"], key["tool"], *made, *opened, network]


SUITE = Suite(
    name="reports",
    parts={"pages": ("text", "tool")},
    about=about,
    jobs=jobs,
    markdown=markdown,
    shown=lambda results: asked_table(asked(results)),
    sizes=lambda plan: plan.out,
    start=lambda plan: timing.use("cpu"),
    resumable=True,
)
