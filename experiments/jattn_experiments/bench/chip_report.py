"""The report of the chip suite: the verdict on each kernel, the tables and the figure."""

import collections
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
from jattn_experiments.runs.folder import save_figure

TUNABLE = tuple(name for name, kernel in IMPLEMENTATIONS.items() if hasattr(kernel, "block_sizes"))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on one kernel: ``text`` is its line, ``wrong`` says whether a step found a fault."""

    kernel: str
    wrong: bool
    text: str


def verdicts(results: Results) -> list[Verdict]:
    """One for each kernel that was checked."""
    kernels = dict.fromkeys(row["kernel"] for row in results.of("right") + results.of("bits"))
    return [_verdict(results, kernel) for kernel in kernels]


def _verdict(results: Results, kernel: str) -> Verdict:
    cases, bits = (
        [one for one in _answers(results.of(part, kernel=kernel)) if one["result"] != "refused"]
        for part in ("right", "bits")
    )
    if not cases and not bits:
        return Verdict(kernel, False, f"{kernel}: refuses every case on this device")
    phrases = [f"right in {_count(cases, 'right')} of {len(cases)}"]
    if bits:
        phrases.append(f"bits as expected in {_count(bits, 'right')} of {len(bits)}")
    peer, share = against_peers(results, kernel)
    if share is not None and not _interpreted(kernel):
        phrases.append(f"{short_number(share)} of {peer}'s time")
    text = f"{kernel}: {', '.join(phrases)}"
    if faults := _faults([*cases, *bits]):
        reason = f"{_what(faults[0])}: {faults[0]['reason']}"
        return Verdict(kernel, True, f"{text}: do not use it on this device; the first fault: {reason}")
    return Verdict(kernel, False, text + _standing(results, kernel))


def _standing(results: Results, kernel: str) -> str:
    """The consequence for a kernel without a fault."""
    known = IMPLEMENTATIONS.get(kernel)
    if known is None:
        return f": right {'in the interpreter' if _interpreted(kernel) else 'on this device'}"
    if not known.never_run:
        platform = results.about["environment"]["platform"]
        return ": one of the defaults" * (kernel in ORDER[{"gpu": "cuda"}.get(platform, platform)])
    plain = _ratio(results, f"jattn {kernel}", "jattn")
    if plain is None:
        return ": not timed, so it runs only when a call names it"
    beside = f", {short_number(plain)} of the plain call's"
    if plain > 1.0:
        return f"{beside}: right but no faster, so it runs only when a call names it"
    path = Path(inspect.getfile(type(known)))
    file = path.relative_to(path.parents[3]).as_posix()
    change = f"set never_run = False in {file} and add it to ORDER in jattn/kernels/dispatch.py"
    return f"{beside}: it could become the default: {change}"


def _interpreted(kernel: str) -> bool:
    return kernel not in IMPLEMENTATIONS and kernel.partition(" ")[0] in IMPLEMENTATIONS


def _answers(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [answer for row in rows for answer in row["answers"]]


def _count(answers: Iterable[dict[str, Any]], result: str) -> int:
    return sum(one["result"] == result for one in answers)


def _faults(answers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in answers if one["result"] in ("wrong", "failed")]


def _what(answer: dict[str, Any]) -> str:
    """The case or check in question."""
    return answer["asked"].get("case") or answer["asked"]["check"]


def _times_of(answer: dict[str, Any]) -> dict[str, float]:
    """The contestants' times, the shortest first."""
    times = {name: time for name, time in answer.get("medians", {}).items() if name != "matrix"}
    return dict(sorted(times.items(), key=lambda pair: pair[1]))


def against_peers(results: Results, kernel: str) -> tuple[str, float | None]:
    """The peer that was fastest most often, and the kernel's time relative to it, as a geometric mean over rows."""
    fastest: collections.Counter[str] = collections.Counter()
    for answer in _answers(results.of("fast")):
        others = [name for name in _times_of(answer) if not name.startswith("jattn")]
        if f"jattn {kernel}" in answer.get("medians", {}):
            fastest.update(others[:1])
    if not fastest:
        return "", None
    ((peer, _),) = fastest.most_common(1)
    return peer, _ratio(results, f"jattn {kernel}", peer)


def _ratio(results: Results, one: str, other: str) -> float | None:
    """The geometric mean of one contestant's time divided by another's, where both were timed."""
    rows = [answer.get("medians", {}) for answer in _answers(results.of("fast"))]
    logs = [math.log(row[one] / row[other]) for row in rows if one in row and other in row]
    return math.exp(sum(logs) / len(logs)) if logs else None


def outcome(row: Row) -> str:
    """The outcome of a step, in a phrase."""
    answers = row["answers"]
    if row.part in ("right", "bits"):
        counts = {result: _count(answers, result) for result in ("right", "wrong", "refused", "failed")}
        text = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
        return text + "".join(f"; {_what(one)}: {one['reason']}" for one in _faults(answers)[:1])
    (answer,) = answers
    if "medians" not in answer:
        return f"{answer['result']}: {answer['reason']}"
    times = _times_of(answer)
    if row.part == "tuned":
        best = next(iter(times))
        share = f"{short_number(times[best] / times['default'])} of the default's time" if "default" in times else None
        return f"{best} {share or 'was the only one that ran'}"
    return ", ".join(f"{name} {short_number(time / 1e3)} ms" for name, time in times.items())


def shown(results: Results) -> str:
    """The verdicts, one per line."""
    return "\n".join(one.text for one in verdicts(results))


def markdown(results: Results) -> str:
    """``chip.md``."""
    about = results.about["environment"]
    rehearsal = about["platform"] == "cpu"
    parts = [
        f"# {'A rehearsal on a CPU' if rehearsal else about['device']}: which kernels are right, and how fast they are",
        "The machine had no accelerator. Kernels for chips ran in an interpreter, so no time here is a chip's. "
        * rehearsal
        + "Written by `jattn bench --suite chip` (`make on-chip`).",
        "## Verdict",
        "\n".join(f"- {one.text}" for one in verdicts(results)) or "No kernel was checked.",
        "## Right?",
        "Values, log-sum-exp and gradients of each case, compared with the formula in float64 on the host. The "
        "largest error is given as a share of its tolerance.",
        _right(results),
        *_fault_table(results),
    ]
    if results.of("fast"):
        parts += ["## Fast?", _what_fast(results), _fast(results)]
    for part, text in _TIMED.items():
        if results.of(part):
            parts += [f"## {part.capitalize()}", text, _times(results, part)]
    if results.of("tuned"):
        text = "Causal, forward and backward. Block sizes are queries x keys; times are in milliseconds."
        parts += ["## Which block sizes?", text, _tuned(results)]
    now = {f"{name}, at the start": value for name, value in results.about["now"].items()}
    return document(*parts, "## The machine", listed(about | now | results.about["shape"]))


_TIMED = {
    "decode": "One token against a cache: a step of a loop within one program. Milliseconds, and the share of the "
    "memory bandwidth.",
    "statistics": "Entropy, distance, previous token and largest score of all heads, given the log-sum-exp. "
    "Milliseconds.",
    "ring": "All devices in a ring, causal, forward and backward. Milliseconds.",
}


def _right(results: Results) -> str:
    kinds, rows = ("right", "wrong", "failed", "refused"), []
    for kernel in dict.fromkeys(row["kernel"] for row in results.of("right")):
        for name in dict.fromkeys(row["table"] for row in results.of("right", kernel=kernel)):
            answers = _answers(results.of("right", kernel=kernel, table=name))
            worst = max((one["error"] for one in answers if one.get("error") is not None), default=None)
            counts = (_count(answers, kind) for kind in kinds)
            rows.append([kernel, name, *counts, "-" if worst is None else f"{worst:.2g}"])
    for row in results.of("bits"):
        counts = (_count(row["answers"], kind) for kind in kinds)
        rows.append([row["kernel"], "bits: looking, and the same call again", *counts, "-"])
    return table(["kernel", "cases", *kinds, "largest error"], rows)


def _fault_table(results: Results) -> list[str]:
    lines = [
        [row["kernel"], _what(one), one["result"], _in_cell(one["reason"])]
        for row in results.of("right") + results.of("bits")
        for one in _faults(row["answers"])
    ]
    return [table(["kernel", "case", "", "what happened"], lines)] if lines else []


def _what_fast(results: Results) -> str:
    shape, rates = results.about["shape"], rates_of(results.about["environment"]["device"])
    text = f"B=1, {shape['num_heads']} heads of {shape['head_dims'][0]}; medians of calls in turn, in milliseconds."
    if rates is None:
        return text
    return f"{text} In parentheses: the share of the published {rates.flops / 1e12:.0f} TFLOP/s ({rates.source})."


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
    left = {f"{name}: {why}" for _, one in answers for name, why in one.get("left_out", {}).items()}
    failed = {
        f"{row['case']}, {row['length']}, {row['passes']}: {one['reason']}"
        for row, one in answers
        if "medians" not in one
    }
    return "\n\n".join([table(["", *names], rows), *("- " + text for text in sorted(left | failed))])


def _times(results: Results, part: str) -> str:
    rates, lines = rates_of(results.about["environment"]["device"]), []
    for row in results.of(part):
        (one,) = row["answers"]
        for name, time in one.get("medians", {}).items():
            share = f"{one['bytes'] / (time / 1e6) / rates.bandwidth:.0%}" if "bytes" in one and rates else "-"
            lines.append([row["length"], name, short_number(time / 1e3), share])
        for name, why in one.get("left_out", {}).items():
            lines.append([row["length"], name, _in_cell(why), "-"])
        if one["result"] not in ("measured", "right"):
            lines.append([row["length"], one["result"], one["reason"], "-"])
    return table(["length", "", "", "share"], lines)


def _tuned(results: Results) -> str:
    rows = []
    for row in results.of("tuned"):
        (one,) = row["answers"]
        cells = ", ".join(f"{name} {short_number(time / 1e3)}" for name, time in _times_of(one).items())
        left = "; ".join(f"{name}: {why}" for name, why in one.get("left_out", {}).items()) or one.get("reason", "-")
        rows.append([row["kernel"], row["head_dim"], row["length"], cells or "-", _in_cell(left)])
    return table(["kernel", "head_dim", "T = S", "times", "left out"], rows)


def _in_cell(text: object) -> str:
    return str(text).replace("|", "\\|")


def write_figure(results: Results, file: Path) -> None:
    """Writes ``chip.png``: the rate of each contestant, a panel for each case, at the first length."""
    rows = [(row, row["answers"][0]) for row in results.of("fast") if "medians" in row["answers"][0]]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.8 + 1.7 * max(1, math.ceil(len(rows) / 2))))
        if rows:
            axes = figure.subplots(math.ceil(len(rows) / 2), 2, squeeze=False).flat
            for ax, (row, one) in zip(axes, rows, strict=False):
                times = sorted(_times_of(one).items(), key=lambda pair: -pair[1])
                speeds = {name: one["flops"] / time / 1e6 for name, time in times}
                colors = [PALETTE[0] if name.startswith("jattn") else PALETTE[1] for name in speeds]
                ax.barh(list(speeds), list(speeds.values()), color=colors)
                ax.set_title(f"{row['case']}, {row['length']}, {row['passes']}", fontsize=9)
                ax.tick_params(labelsize=7)
                ax.set_xlabel("TFLOP/s", fontsize=8)
        figure.suptitle(f"Rates on {results.about['environment']['device']}: jattn and others", fontsize=10)
        save_figure(figure, file, dpi=DPI, facecolor="white")
