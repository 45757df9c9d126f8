"""The parts of a run that are kept in the repository, and the page that is made from them.

``claims.json``, ``config.json`` and ``summary.json`` hold the numbers that a reader looks up. ``page.tar.xz`` holds
what only the page shows: figures as SVG, the explorer's names and scores as JSON, and heads' weights in one byte each.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jattn.reports._html_page import Head, Numbers, View
from jattn.reports._pack_weights import Frame
from jattn_experiments.config import differences, of_plain
from jattn_experiments.run_page.document import RunPage, run_page
from jattn_experiments.run_page.explorer import Explorer
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged, read_json

PAGE = "page.tar.xz"
COLOURS = 128  # per picture: a third of the bytes, no visible difference
KEPT_WEIGHTS = 1_500_000  # unless the first and last steps of the examples have more
LEVELS = 255  # of a kept weight
FIGURES = "figures/"


def finished(run: Path) -> Findings:
    """The findings of a finished run. Raises ``FileNotFoundError`` for an unfinished one."""
    (run / "report.html").stat()  # written last
    return Findings.load(run)


def keep(findings: Findings, run: Path, folder: Path, replace: bool = False) -> Path:
    """Writes ``folder/NAME`` from a finished ``run``, or rewrites what an earlier ``keep`` wrote there; returns it.

    It copies only those of the run's pictures that the folder already has, because a document shows them. Other files
    in the folder stay. Each file is replaced by a complete one, so that stopping halfway loses nothing.

    Raises:
        FileExistsError: ``folder/NAME`` is something else: the run, a folder inside or around it, or a user's; or,
            unless ``replace``, it holds the results of another config.
    """
    target = folder / findings.name
    _check(run, target)
    if not replace and (target / "summary.json").exists():
        if different := differences(_config_in(target), _config_in(run)):
            raise FileExistsError(
                f"{str(target)!r} holds the results of another config (add --replace to replace them): "
                f"{'; '.join(different)}"
            )
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".keep-", dir=folder) as beside:
        out = Path(beside)
        for name in ("claims.json", "config.json"):
            shutil.copy(run / name, out / name)
        page = run_page(findings, (run / "figures").glob("*.svg"))
        (out / "summary.json").write_text(json.dumps(page.summary, indent=1) + "\n")
        save(out / PAGE, page.explorer.thinned(KEPT_WEIGHTS), page.figures)
        for picture in (run / "figures").glob("*.png"):
            if (target / picture.name).exists():
                small = Image.open(picture).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                small.save(out / picture.name, optimize=True)
        for file in sorted(out.iterdir(), key=lambda file: file.name != "summary.json"):  # it marks the folder: first
            file.replace(target / file.name)
    return target


def _check(run: Path, target: Path) -> None:
    """Raises ``FileExistsError`` if ``target`` holds anything but what an earlier ``keep`` wrote."""
    inner, outer = target.resolve(), run.resolve()
    if inner == outer or inner in outer.parents or outer in inner.parents:
        raise FileExistsError(f"expected a folder outside the run's folder {str(run)!r}, got {str(target)!r}")
    if not target.exists() or target.is_dir() and not any(target.iterdir()):
        return
    try:
        earlier = read_json(target / "summary.json", dict, "the summary of a kept run")
    except (OSError, Damaged):
        earlier = {}
    if earlier.get("name") != target.name or "environment" not in earlier:
        raise FileExistsError(f"{str(target)!r} exists, but was not written by jattn keep; choose another folder")


def _config_in(folder: Path) -> dict[str, Any]:
    """The config in a folder, with defaults for newer options and without the mesh, which changes no numbers."""
    try:
        plain = read_json(folder / "config.json", dict, "the config of a run")
    except (OSError, Damaged):
        return {}
    with contextlib.suppress(argparse.ArgumentError, ValueError):  # another version's
        plain = dataclasses.asdict(of_plain(plain))
    return plain | {"mesh": None}


def kept_page(folder: Path) -> RunPage:
    """The page of the run that ``keep`` wrote to ``folder``."""
    files = (folder / f"{name}.json" for name in ("config", "claims", "summary"))
    config, claims, summary = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    shown, figures = load(folder / PAGE)
    return RunPage(config, claims, summary, figures, shown)


def save(file: Path, shown: Explorer, figures: Mapping[str, str]) -> None:
    """Writes the explorer with rounded weights, and the figures. Equal contents give equal files."""
    frames = [frame for view in shown.views for frame in view.frames]
    weights = np.nan_to_num(np.stack([np.asarray(frame.weights) for frame in frames]))
    largest = float(weights.max()) or 1.0
    data = {
        "heads": [[head.code, head.title, head.layer] for head in shown.heads],
        "columns": shown.columns,
        "roles": shown.numbers[0].roles,
        "numbers": [_rounded(look.values.tolist()) for look in shown.numbers],
        "views": [
            {"name": view.name, "labels": view.keys, "texts": view.texts}
            | {"frames": [[frame.title, frame.step, frame.numbers] for frame in view.frames]}
            for view in shown.views
        ],
        "steps": shown.steps,
        "tokens": shown.tokens,
        "largest": largest,
    }
    codes = io.BytesIO()
    np.save(codes, np.rint(weights / largest * LEVELS).astype(np.uint8))
    parts = {"page.json": json.dumps(data).encode(), "weights.npy": codes.getvalue()}
    parts |= {f"{FIGURES}{name}.svg": svg.encode() for name, svg in sorted(figures.items())}
    with tarfile.open(file, "w:xz") as archive:
        for name, content in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def load(file: Path) -> tuple[Explorer, dict[str, str]]:
    """The explorer and the figures that ``save`` wrote."""
    with tarfile.open(file) as archive:
        parts = {entry.name: archive.extractfile(entry).read() for entry in archive}
    data = json.loads(parts["page.json"])
    weights = iter(np.load(io.BytesIO(parts["weights.npy"])) * (data["largest"] / LEVELS))
    views = []
    for view in data["views"]:
        frames = [Frame(title, next(weights), step=step, numbers=look) for title, step, look in view["frames"]]
        views.append(View(view["name"], view["labels"], view["labels"], frames, view["texts"]))
    heads = [Head(*head) for head in data["heads"]]
    looks = (np.array(values, float).reshape(-1, len(heads)) for values in data["numbers"])
    numbers = [Numbers(look, data["roles"]) for look in looks]
    shown = Explorer(heads, data["columns"], numbers, views, data["steps"], data["tokens"], LEVELS)
    figures = {Path(name).stem: part.decode() for name, part in parts.items() if name.startswith(FIGURES)}
    return shown, figures


def _rounded(value: Any) -> Any:
    """Rounds numbers to four digits; numbers that are not finite become null."""
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.4g}") if np.isfinite(value) else None
