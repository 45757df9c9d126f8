"""What the chip suite's results say: the verdict on each kernel, the tables and the figure."""

import dataclasses
import inspect
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from jattn.kernels.dispatch import IMPLEMENTATIONS, ORDER
from jattn_experiments.bench.chip_rates import rates_of
from jattn_experiments.bench.markdown import document, listed, short_number, table
from jattn_experiments.bench.suite import Results, Row
from jattn_experiments.run_page.style import DPI, PALETTE, STYLE, WIDTH

TUNABLE = tuple(name for name, kernel in IMPLEMENTATIONS.items() if hasattr(kernel, "block_sizes"))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is known of one kernel: ``text`` is its line, ``wrong`` whether a step found a fault."""

    kernel: str
    wrong: bool
    text: str


def verdicts(results: Results) -> list[Verdict]:
    """One for each kernel that was asked about."""
    kernels = dict.fromkeys(row["kernel"] for row in results.of("right") + results.of("bits"))
    return [_verdict(results, kernel) for kernel in kernels]


def _verdict(results: Results, kernel: str) -> Verdict:
    name = kernel.partition(" ")[0]
    answers = _answers(results.of("right", kernel=kernel))
    bits = _answers(results.of("bits", kernel=kernel))
    asked, bits = ([one for one in some if one["result"] != "refused"] for some in (answers, bits))
    right = sum(one["result"] == "right" for one in asked)
    faults = [one for one in [*asked, *bits] if one["result"] in ("wrong", "failed")]
    said = [f"right in {right} of {len(asked)}"]
    if bits:
        said.append(f"bits as they should be in {sum(one['result'] == 'right' for one in bits)} of {len(bits)}")
    beside = against_peers(results, kernel)
    interpreted = kernel not in IMPLEMENTATIONS and name in IMPLEMENTATIONS
    if beside[1] is not None and not interpreted:
        said.append(f"{short_number(beside[1])} of {beside[0]}'s time")
    known = IMPLEMENTATIONS.get(kernel)
    text = f"{kernel}: {', '.join(said)}"
    if faults:
        first = faults[0]["asked"]
        what = first.get("case") or first["check"]
        return Verdict(kernel, True, f"{text}: not to be taken here; the first fault: {what}: {faults[0]['reason']}")
    if not asked and not bits:
        return Verdict(kernel, False, f"{kernel}: refused every case here")
    if known is None:
        return Verdict(
            kernel,
            False,
            f"{text}: right {'as interpreted' if interpreted else 'here'}",
        )
    if not known.never_run:
        return Verdict(kernel, False, f"{text}: one of the defaults" if _default(results, kernel) else text)
    plain = _ratio(results, f"jattn {kernel}", "jattn")
    file = Path(inspect.getfile(type(known))).relative_to(Path(inspect.getfile(type(known))).parents[3]).as_posix()
    if plain is None:
        return Verdict(kernel, False, f"{text}: not timed, stays by name")
    if plain > 1.0:
        return Verdict(
            kernel, False, f"{text}, {short_number(plain)} of the plain call's: right, but no faster: stays by name"
        )
    field = f"set never_run = False in {file}, and its place in ORDER of jattn/kernels/dispatch.py"
    return Verdict(kernel, False, f"{text}, {short_number(plain)} of the plain call's: could be the default: {field}")


def _default(results: Results, kernel: str) -> bool:
    platform = results.about["environment"]["platform"]
    return kernel in ORDER[{"gpu": "cuda"}.get(platform, platform)]


def _answers(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [answer for row in rows for answer in row["answers"]]


def against_peers(results: Results, kernel: str) -> tuple[str, float | None]:
    """The peer that was fastest most often, and the kernel's time in shares of it: the geometric mean of its rows."""
    best: dict[str, int] = {}
    for answer in _answers(results.of("fast")):
        times = {
            name: time
            for name, time in answer.get("medians", {}).items()
            if not name.startswith("jattn") and name != "matrix"
        }
        if times and f"jattn {kernel}" in answer["medians"]:
            fastest = min(times, key=times.__getitem__)
            best[fastest] = best.get(fastest, 0) + 1
    if not best:
        return "", None
    peer = max(best, key=best.__getitem__)
    return peer, _ratio(results, f"jattn {kernel}", peer)


def _ratio(results: Results, one: str, other: str) -> float | None:
    """The geometric mean of one contestant's time in shares of another's, where both were timed."""
    rows = [answer.get("medians", {}) for answer in _answers(results.of("fast"))]
    logs = [math.log(row[one] / row[other]) for row in rows if one in row and other in row]
    return math.exp(sum(logs) / len(logs)) if logs else None


def said(row: Row) -> str:
    """What came of a step, in a phrase."""
    answers = row["answers"]
    counts = {
        result: sum(one["result"] == result for one in answers) for result in ("right", "wrong", "refused", "failed")
    }
    if row.part in ("right", "bits"):
        text = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
        fault = next((one for one in answers if one["result"] in ("wrong", "failed")), None)
        if fault is not None:
            text += f"; {fault['asked'].get('case') or fault['asked']['check']}: {fault['reason']}"
        return text
    (answer,) = answers
    if "medians" not in answer:
        return f"{answer['result']}: {answer['reason']}"
    times = {name: time for name, time in answer["medians"].items() if name != "matrix"}
    if row.part == "tuned":
        best = min(times, key=times.__getitem__)
        return (
            f"{best} takes {short_number(times[best] / times['default'])} of the default"
            if "default" in times
            else f"{best} alone ran"
        )
    return ", ".join(
        f"{name} {short_number(time / 1e3)} ms" for name, time in sorted(times.items(), key=lambda x: x[1])
    )


def shown(results: Results) -> str:
    """The verdicts, one a line."""
    return "\n".join(one.text for one in verdicts(results))


def markdown(results: Results) -> str:
    """``chip.md``."""
    about = results.about["environment"]
    rehearsal = about["platform"] == "cpu"
    parts = [
        f"# {'A rehearsal on a CPU' if rehearsal else about['device']}: which kernels are right, how fast they are",
        (
            "No accelerator was there. The kernels of chips were interpreted, and no time says anything about a chip. "
            if rehearsal
            else ""
        )
        + "Written by `jattn bench --suite chip` (`make on-chip`).",
        "## Verdict",
        "\n".join(f"- {one.text}" for one in verdicts(results)) or "No kernel was asked about.",
        "## Right?",
        "Values, log-sum-exp and gradients of each case beside the formula in float64, computed on the host. The "
        "largest error is in shares of its tolerance.",
        _right(results),
        *_faults(results),
    ]
    if results.of("fast"):
        parts += ["## Fast?", _what_fast(results), _fast(results)]
    for part, text in (
        ("decode", _DECODE),
        ("statistics", _STATISTICS),
        ("ring", "All devices in a ring, causal, both passes; milliseconds."),
    ):
        if results.of(part):
            parts += [f"## {part.capitalize()}", text, _times(results, part)]
    if results.of("tuned"):
        parts += [
            "## Which block sizes?",
            "Causal, forward and backward, queries by keys of a block; milliseconds.",
            _tuned(results),
        ]
    now = {f"{name}, when it began": value for name, value in results.about["now"].items()}
    return document(*parts, "## The machine", listed(about | now | results.about["shape"]))


_DECODE = (
    "One token against a cache, a step of a loop within one program; milliseconds, and the share of the memory's "
    "bandwidth."
)
_STATISTICS = "Entropy, distance, previous token and largest score of all heads, the log-sum-exp known; milliseconds."


def _right(results: Results) -> str:
    rows = []
    for kernel in dict.fromkeys(row["kernel"] for row in results.of("right")):
        for name in dict.fromkeys(row["table"] for row in results.of("right", kernel=kernel)):
            answers = _answers(results.of("right", kernel=kernel, table=name))
            counts = [
                sum(one["result"] == result for one in answers) for result in ("right", "wrong", "failed", "refused")
            ]
            worst = max((one["error"] for one in answers if one.get("error") is not None), default=None)
            rows.append([kernel, name, *counts, "-" if worst is None else f"{worst:.2g}"])
    for row in results.of("bits"):
        counts = [
            sum(one["result"] == result for one in row["answers"]) for result in ("right", "wrong", "failed", "refused")
        ]
        rows.append([row["kernel"], "bits: looking, and the same call again", *counts, "-"])
    return table(["kernel", "cases", "right", "wrong", "failed", "refused", "largest error"], rows)


def _faults(results: Results) -> list[str]:
    lines = []
    for row in results.of("right") + results.of("bits"):
        for one in row["answers"]:
            if one["result"] in ("wrong", "failed"):
                what = one["asked"].get("case") or one["asked"]["check"]
                lines.append([row["kernel"], what, one["result"], str(one["reason"]).replace("|", "\\|")])
    return [table(["kernel", "case", "", "what was seen"], lines)] if lines else []


def _what_fast(results: Results) -> str:
    shape, rates = results.about["shape"], rates_of(results.about["environment"]["device"])
    text = f"B=1, {shape['num_heads']} heads of {shape['head_dims'][0]}; medians of calls in turn, in milliseconds."
    if rates is None:
        return text
    return f"{text} In brackets the share of {rates.flops / 1e12:.0f} TFLOP/s, the published rate ({rates.source})."


def _fast(results: Results) -> str:
    answers = [(row, row["answers"][0]) for row in results.of("fast")]
    names = list(dict.fromkeys(name for _, one in answers for name in one.get("medians", {})))
    rates, rows = rates_of(results.about["environment"]["device"]), []
    for row, one in answers:
        cells = []
        for name in names:
            time = one.get("medians", {}).get(name)
            flops = one["matrix_flops"] if name == "matrix" else one.get("flops")
            share = f" ({flops / (time / 1e6) / rates.flops:.0%})" if time and rates else ""
            cells.append("-" if time is None else f"{short_number(time / 1e3)}{share}")
        apart = ", apart" if one.get("apart") else ""
        rows.append([f"{row['case']}, {row['length']}, {row['passes']}{apart}", *cells])
    found = table(["", *names], rows)
    left = {f"{name}: {why}" for _, one in answers for name, why in one.get("left_out", {}).items()}
    failed = {
        f"{row['case']}, {row['length']}, {row['passes']}: {one['reason']}"
        for row, one in answers
        if "medians" not in one
    }
    return "\n\n".join([found, *("- " + text for text in sorted(left | failed))])


def _times(results: Results, part: str) -> str:
    rates, lines = rates_of(results.about["environment"]["device"]), []
    for row in results.of(part):
        (one,) = row["answers"]
        for name, time in one.get("medians", {}).items():
            share = f"{one['bytes'] / (time / 1e6) / rates.bandwidth:.0%}" if "bytes" in one and rates else "-"
            lines.append([row["length"], name, short_number(time / 1e3), share])
        for name, why in one.get("left_out", {}).items():
            lines.append([row["length"], name, why.replace("|", "\\|"), "-"])
        if one["result"] not in ("measured", "right"):
            lines.append([row["length"], one["result"], one["reason"], "-"])
    return table(["length", "", "", "share"], lines)


def _tuned(results: Results) -> str:
    rows = []
    for row in results.of("tuned"):
        (one,) = row["answers"]
        times = one.get("medians", {})
        cells = ", ".join(
            f"{name} {short_number(time / 1e3)}" for name, time in sorted(times.items(), key=lambda x: x[1])
        )
        left = "; ".join(f"{name}: {why}" for name, why in one.get("left_out", {}).items()) or one.get("reason", "-")
        rows.append([row["kernel"], row["head_dim"], row["length"], cells or "-", str(left).replace("|", "\\|")])
    return table(["kernel", "head_dim", "T = S", "times", "left out"], rows)


def write_figure(results: Results, file: Path) -> None:
    """Writes ``chip.png``: the rate of each contestant, a panel for each case, at the first length."""
    rows = [(row, row["answers"][0]) for row in results.of("fast") if "medians" in row["answers"][0]]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.8 + 1.7 * max(1, math.ceil(len(rows) / 2))))
        if rows:
            for ax, (row, one) in zip(
                figure.subplots(math.ceil(len(rows) / 2), 2, squeeze=False).flat, rows, strict=False
            ):
                times = {name: time for name, time in one["medians"].items() if name != "matrix"}
                speeds = {name: one["flops"] / time / 1e6 for name, time in sorted(times.items(), key=lambda x: -x[1])}
                colors = [PALETTE[0] if name.startswith("jattn") else PALETTE[1] for name in speeds]
                ax.barh(list(speeds), list(speeds.values()), color=colors)
                ax.set_title(f"{row['case']}, {row['length']}, {row['passes']}", fontsize=9)
                ax.tick_params(labelsize=7)
                ax.set_xlabel("TFLOP/s", fontsize=8)
        figure.suptitle(f"Rates on {results.about['environment']['device']}: jattn and others", fontsize=10)
        figure.savefig(file, dpi=DPI, facecolor="white")
