"""The attention benchmark's results as text."""

import itertools
from collections.abc import Iterator

import numpy as np

from jattn_experiments.bench.goals import Goal, goal_table, has_native, ratio, worst
from jattn_experiments.bench.markdown import document, listed, short_number, table
from jattn_experiments.bench.problems import CASES, PLAIN
from jattn_experiments.bench.suite import Results, Row

PASSES = {"forward": "forward", "both": "forward and backward"}
SLOPE_FROM = 4096  # below, constant costs still matter
MOVED = 0.05


def row_of(results: Results, case: str, length: int, passes: str = "forward") -> Row | None:
    """The row of times in float32."""
    return next(iter(results.of("times", case=case, length=length, dtype="float32", passes=passes)), None)


def microseconds(row: Row | None, contestant: str = "jattn") -> float | None:
    """The contestant's median time in the row."""
    return row["medians"].get(contestant) if row else None


def speed(row: Row | None, peer: str) -> float | None:
    """The peer's time divided by jattn's."""
    return ratio(microseconds(row, peer), microseconds(row))


def share(row: Row | None, contestant: str = "jattn") -> float | None:
    """Floating-point operations per second, as a share of the matrix product's in the same turns."""
    time = microseconds(row, contestant)
    return row["flops"] / time / (row["matrix_flops"] / row["matrix"]) if row and time else None


def temporaries(results: Results, contestant: str, case: str, passes: str) -> dict[int, float]:
    """Bytes of one head, by length."""
    rows = results.of("memory", contestant=contestant, case=case, passes=passes)
    return dict(sorted((row["length"], row["bytes"]) for row in rows if row["bytes"] is not None))


def slope(by_length: dict[int, float]) -> float | None:
    """The exponent of the bytes' growth with length, fitted to lengths of at least ``SLOPE_FROM``."""
    long = {length: size for length, size in by_length.items() if length >= SLOPE_FROM and size > 0}
    if len(long) < 2:
        return None
    return float(np.polyfit(np.log(list(long)), np.log(list(long.values())), 1)[0])


def lengths_of(results: Results, part: str = "times") -> list[int]:
    """The measured lengths."""
    return sorted({row["length"] for row in results.of(part)})


def contestants_of(results: Results) -> list[str]:
    """Contestants in column order."""
    return results.about["environment"]["contestants"].split(", ")


def shape_of(results: Results) -> str:
    """The shape of the problems."""
    return "B={batch} N={num_heads} H={head_dim}".format(**results.about["shape"])


def goals(results: Results) -> list[Goal]:
    """Every goal and its measured number. Goals exist for float32 on a CPU only."""
    if not results.about["environment"]["device"].startswith("cpu"):
        return []
    if results.about["shape"]["batch"] > 1:
        return _batches(results)
    parts = (_against_peers, _short, _with_native, _shares, _cases, _memory, _compile)
    return [goal for part in parts for goal in part(results)]


# Peer, passes, length, minimum speed-up over the peer: full, causal.
AGAINST_PEERS = (
    ("jax.nn", "forward", 2048, 2.2, 3.5),
    ("jax.nn", "forward", 8192, 5.0, 6.0),
    ("jax.nn", "both", 2048, 2.0, 5.0),
    ("jax.nn", "both", 4096, 2.3, 4.5),
    ("torch", "forward", 2048, 1.0, 1.0),
    ("torch", "forward", 8192, 1.3, 1.3),
    ("torch", "both", 2048, 0.95, 0.95),
    ("torch", "both", 4096, 0.95, 0.95),
)


def _against_peers(results: Results) -> Iterator[Goal]:
    for peer, passes, length, *thresholds in AGAINST_PEERS:
        for case, threshold in zip(("full", "causal"), thresholds, strict=True):
            question = f"{case}, {PASSES[passes]}, n = {length}: time of {peer} / time of jattn"
            yield Goal(question, speed(row_of(results, case, length, passes), peer), threshold, at_least=True)


def _short(results: Results) -> Iterator[Goal]:
    """Short inputs must not become slow for the sake of long ones: the worst case that jax.nn supports."""
    rows = [row for row in results.of("times", dtype="float32") if row["length"] <= 1024 and speed(row, "jax.nn")]
    row = min(rows, key=lambda row: speed(row, "jax.nn"), default=None)
    where = f" (worst: {row['case']}, {PASSES[row['passes']]}, n = {row['length']})" if row else ""
    measured = ratio(microseconds(row), microseconds(row, "jax.nn"))
    yield Goal(f"every case, n <= 1024: time of jattn / time of jax.nn{where}", measured, 1.05, at_least=False)


def _batches(results: Results) -> list[Goal]:
    """Batches of short sequences, as in training, compared with the faster peer at each length."""
    question = f"{{}}, {PASSES['both']}, n = {{}}: time of the faster of torch and jax.nn / time of jattn"
    lines = []
    for case, length in itertools.product(("full", "causal"), lengths_of(results)):
        speeds = [speed(row_of(results, case, length, "both"), peer) for peer in ("torch", "jax.nn")]
        lines.append(Goal(question.format(case, length), None if None in speeds else min(speeds), 1.0, at_least=True))
    return lines


def _with_native(results: Results) -> Iterator[Goal]:
    """A plain call that may use the compiled kernels, compared with PyTorch at the worst length."""
    thresholds = {"forward": 2.0, "both": 1.8} if _has_native_avx512(results) else {"forward": 1.1, "both": 1.0}
    lengths = [length for length in lengths_of(results) if 2048 <= length <= 8192]
    for case, passes in itertools.product(("full", "causal"), PASSES):
        if has_native(results.about["environment"]):
            least = worst((speed(row_of(results, case, n, passes), "torch") for n in lengths), highest=False)
            question = f"{case}, {PASSES[passes]}, n = 2048 to 8192: time of torch / time of jattn"
            yield Goal(question, least, thresholds[passes], at_least=True)


# Passes, and the minimum share of the matrix product's rate: full, causal. ``SHARES`` is for any plain call,
# ``SHARES_AVX512`` for one with jattn-native and AVX-512.
SHARES = (("forward", 0.7, 0.6),)
SHARES_AVX512 = (("forward", 0.88, 0.80), ("both", 0.75, 0.65))


def _shares(results: Results) -> Iterator[Goal]:
    lengths = [length for length in lengths_of(results) if length >= 4096]
    for passes, *thresholds in SHARES_AVX512 if _has_native_avx512(results) else SHARES:
        for case, threshold in zip(("full", "causal"), thresholds, strict=True):
            least = worst((share(row_of(results, case, length, passes)) for length in lengths), highest=False)
            question = f"{case}, {PASSES[passes]}, n >= 4096: share of the matrix rate"
            yield Goal(question, least, threshold, at_least=True)


def _has_native_avx512(results: Results) -> bool:
    environment = results.about["environment"]
    return has_native(environment) and environment.get("vectors") == "avx512f"


def _cases(results: Results) -> Iterator[Goal]:
    """One case compared with another, both forward."""

    def times(case: str, length: int, name: str = "jattn") -> float | None:
        row = row_of(results, case, length)
        return ratio(microseconds(row, name), row.values.get("plain", {}).get(name)) if row else None

    long = [length for length in lengths_of(results) if length >= 2048]
    yield Goal("causal / full, forward, n = 8192", times("causal", 8192), 0.6, at_least=False)
    yield Goal("window / full, forward, n = 32768", times("window", 32768), 1 / 14, at_least=False)
    for name in ("jattn", "jattn blockwise", "jattn native"):  # the last in results from before it was the plain call
        for case in ("alibi", "softcap") if name == "jattn" or name in contestants_of(results) else ():
            highest = worst((times(case, length, name) for length in long), highest=True)
            yield Goal(f"{name}: {case} / {PLAIN[case]}, forward, n >= 2048", highest, 1.25, at_least=False)


def _memory(results: Results) -> Iterator[Goal]:
    both, product = (temporaries(results, "jattn", "full", passes) for passes in ("both", "hvp"))
    of_both, of_product = (ratio(sizes.get(32768), 2**20) for sizes in (both, product))
    name = "temporaries of one head, full,"
    yield Goal(f"{name} forward and backward, n = 32768", of_both, 80, at_least=False, unit="MiB")
    yield Goal(f"{name} forward and backward: exponent of growth", slope(both), 1.05, at_least=False)
    yield Goal(f"{name} Hessian-vector product, n = 32768", of_product, 160, at_least=False, unit="MiB")


def _compile(results: Results) -> Iterator[Goal]:
    for passes, threshold in (("forward", 1.5), ("both", 3.0)):
        seconds = (row["seconds"] for row in results.of("compile", contestant="jattn", passes=passes))
        question = f"compilation, {PASSES[passes]}, the slowest in the table below"
        yield Goal(question, worst(seconds, highest=True), threshold, at_least=False, unit="s")


def shares(results: Results) -> dict[str, float]:
    """jattn's shares of the matrix rate, by what was measured."""
    return {
        f"{name}, {row['case']}, {PASSES[row['passes']]}, {row['dtype']}, n = {row['length']}": share(row, name)
        for row in results.of("times")
        for name in row["medians"]
        if name.startswith("jattn")
    }


def moved(results: Results) -> list[str]:
    """One line for each share that differs by 5% from the newest kept one on this kind of machine."""
    before = results.about.get("before", {"shares": {}})
    return [
        f"{what}: {now:.2f} of the matrix rate, {old:.2f} in {before['folder']}"
        for what, now in shares(results).items()
        if (old := before["shares"].get(what)) and abs(now / old - 1) > MOVED
    ]


def times_table(results: Results, passes: str, dtype: str) -> str:
    """Milliseconds of each contestant, followed by its share of the matrix product's rate."""

    def cell(row: Row, name: str) -> str:
        time = microseconds(row, name)
        return "-" if time is None else f"{short_number(time / 1e3)} ({share(row, name):.2f})"

    names, rows = contestants_of(results), results.of("times", passes=passes, dtype=dtype)
    rows.sort(key=lambda row: (list(CASES).index(row["case"]), row["length"]))
    cells = [[row["case"], row["length"], *(cell(row, name) for name in names), row["rounds"]] for row in rows]
    return table(["case", "n", *names, "rounds"], cells)


def memory_table(results: Results) -> str:
    """Temporaries of one head in MiB by length, and the exponent of their growth."""
    lengths, rows = lengths_of(results, "memory"), []
    for name, case, passes in dict.fromkeys((r["contestant"], r["case"], r["passes"]) for r in results.of("memory")):
        sizes = temporaries(results, name, case, passes)
        growth, label = slope(sizes), PASSES.get(passes, "Hessian-vector product")
        cells = (_cell(sizes.get(length), 2**-20) for length in lengths)
        rows.append([name, case, label, *cells, "-" if growth is None else f"{growth:.2f}"])
    return table(["", "case", "passes", *map(str, lengths), "exponent"], rows)


def left_out(results: Results) -> list[str]:
    """Why a table has a "-": one line for each contestant, case and reason."""
    reasons = [
        (row["length"], name, row["case"], reason)
        for row in results.of("times")
        for name, reason in row["left_out"].items()
    ]
    for part, value in (("memory", "bytes"), ("peak", "bytes"), ("compile", "seconds")):
        rows = [row for row in results.of(part) if row[value] is None]
        reasons += [(row["length"], row["contestant"], row["case"], f"{part}: {row['reason']}") for row in rows]
    lengths_by_key: dict[tuple[str, ...], set[int]] = {}
    for length, *key in reasons:
        lengths_by_key.setdefault(tuple(key), set()).add(length)
    lines = []
    for (name, case, reason), lengths in lengths_by_key.items():
        where = "" if sorted(lengths) == lengths_of(results) else f", n = {', '.join(map(str, sorted(lengths)))}"
        lines.append(f"{name}, {case}{where}: {reason}")
    return lines


def shown(results: Results) -> str:
    """The missing peers, and the measured goals."""
    measured = [goal for goal in goals(results) if goal.measured is not None]
    lines = [goal_table(measured)] if measured else []
    return "\n".join([*results.about["missing"].values(), *lines, *moved(results)])


def markdown(results: Results) -> str:
    """``attention.md``."""
    parts = [
        "# Attention, measured",
        f"{shape_of(results)}, T = S = n. Times are medians of calls made in turn. The number in parentheses compares "
        "the rate of attention's matrix products with that of one large matrix product, timed in the same turns. "
        "Written by `jattn bench --suite attention`.",
        *(f"Not here: {line}." for line in results.about["missing"].values()),
    ]
    lines = goals(results)
    parts += ["## Goals", goal_table(lines)] if lines else []
    parts += ["![Time and memory over length](attention.png)"] if results.of("times") else []
    for dtype in dict.fromkeys(row["dtype"] for row in results.of("times")):
        for passes, name in PASSES.items():
            parts += [f"## Milliseconds, {name}, {dtype}", times_table(results, passes, dtype)]
    if results.of("memory"):
        parts += ["## Temporaries of one head, MiB", memory_table(results)]
    if results.of("peak"):
        about = "Forward and backward, all heads: the peak of a fresh process with compilation, minus the peak of one "
        cells = [[r["contestant"], r["case"], r["length"], _cell(r["bytes"], 2**-20)] for r in results.of("peak")]
        parts += ["## Peak memory", about + "that only creates the inputs.", table(["", "case", "n", "MiB"], cells)]
    if rows := results.of("compile"):
        cells = [[r["contestant"], r["case"], r["length"], PASSES[r["passes"]], _cell(r["seconds"])] for r in rows]
        head = ["", "case", "n", "passes", "s"]
        parts += ["## Compilation", "All heads, in fresh processes.", table(head, cells)]
    parts += ["## Cases", "\n".join(f"- {name}: {text}." for name, text in CASES.items())]
    for title, lines in (("Changes of more than 5%", moved(results)), ("Left out", left_out(results))):
        parts += [f"## {title}", "\n".join(f"- {line}." for line in lines)] if lines else []
    return document(*parts, "## Measured on", listed(results.about["environment"]))


def _cell(value: float | None, times: float = 1.0) -> str:
    return "-" if value is None else short_number(value * times)
