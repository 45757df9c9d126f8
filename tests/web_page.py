"""A page of a report: what it holds, and what it does in a real browser while a script does what a reader does."""

import base64
import html
import json
import os
import re
import shutil
import signal
import subprocess
import zlib

import numpy as np
import pytest

# Before the page's own scripts: what goes wrong, from the first moment on.
RECORDER = """<script>
const problems = [];
addEventListener("error", (event) => problems.push(String(event.message)));
addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => problems.push(event.blockedURI));
console.error = console.warn = (...words) => problems.push(words.join(" "));
</script>"""
# The script of a test fills ``verdict``; it may await.
DRIVER = """<script>
const verdict = {}, wait = (ms) => new Promise((done) => setTimeout(done, ms));
const said = (id) => document.getElementById(id).textContent;
const hover = (canvas, query, key) => { // on a large picture
  const box = canvas.getBoundingClientRect(), { edge, top, cell, tall, q0, k0 } = canvas.place;
  const at = { clientX: box.left + edge + (key - k0 + .5) * cell, clientY: box.top + top + (query - q0 + .5) * tall, bubbles: true };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  showPoint();
  return at;
};
const readout = () => [said("head"), said("query"), said("key"), said("weight")];
const press = (element, key, more = {}) => element.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true, bubbles: true, ...more }));
const choose = (id, value) => { const list = document.getElementById(id); list.value = value; list.dispatchEvent(new Event("change")); };
(async () => {
  while (!document.documentElement.dataset.ready) await wait(5);
  const large = document.querySelector("#large canvas"), small = [...document.querySelectorAll("#grid button")];
  %s
  verdict.problems = problems;
})().catch((error) => problems.push(String(error.stack))).finally(() => {
  verdict.problems = problems;
  const made = document.body.appendChild(document.createElement("pre"));
  made.id = "verdict";
  made.textContent = JSON.stringify(verdict);
});
</script>"""


def embedded(text):
    """The page's data."""
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])


def weights_of(text, view, frame):
    """All weights ``[h,T,S]`` of a frame."""
    data = embedded(text)
    shown = data["views"][view]
    (heads, T, S), entry = (len(x) for x in (data["heads"], shown["queries"], shown["keys"])), shown["frames"][frame]
    assert entry["k"] == 0
    packed = re.search(rf'<script id="{entry["blob"]}"[^>]*>(.*?)</script>', text, re.DOTALL)[1]
    kind = "u1" if entry["bits"] == 8 else "<u2"
    codes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), kind).reshape(heads, T, S)
    return codes / (2 ** entry["bits"] - 1) * entry["top"]


def browse(page, folder, *flags, size=(500, 900), address=""):
    """The page's final HTML in Chromium, and the messages on its console."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium, chromium-browser or google-chrome found: the report cannot be opened")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", *flags]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=30000"]
    command += [f"--window-size={size[0]},{size[1]}", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    command.append(page.as_uri() + address)
    # In its own session, so that its child processes end with it.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, encoding="utf-8", start_new_session=True, **pipes) as process:
        try:
            dom, log = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            dom, log = process.communicate()
            if not dom.rstrip().endswith("</html>"):  # on a busy machine some stay alive after the whole page
                raise
    return dom, [line for line in log.splitlines() if "CONSOLE" in line]


def drive(path, script, folder, *flags, **where):
    """The ``verdict`` that the script filled, on a page without problems."""
    text = path.read_text(encoding="utf-8").replace("<head>", "<head>" + RECORDER, 1)
    copy = folder / "driven.html"
    copy.write_text(text.replace("</body>", DRIVER.replace("%s", script, 1) + "</body>"), encoding="utf-8")
    dom, console = browse(copy, folder, *flags, **where)
    assert not console, console
    verdict = json.loads(html.unescape(re.search(r'<pre id="verdict">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert verdict["problems"] == []
    return verdict
