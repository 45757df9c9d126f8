"""The parts of a run kept in the repository: claims, config and numbers as JSON, pictures as small PNG, the report."""

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged, read_json

COLOURS = 128  # per picture: a third of the bytes, no visible difference


def keep(run: Path, folder: Path) -> Path:
    """Writes ``folder/NAME`` from a finished ``run``, or rewrites what an earlier ``keep`` wrote there; returns it.

    Other files in it stay. Each file is replaced by a complete one, so stopping halfway loses nothing.

    Raises:
        FileNotFoundError: the run has not finished.
        FileExistsError: ``folder/NAME`` is something else: the run, a folder inside or around it, or a user's.
    """
    findings = Findings.load(run)
    target = folder / findings.name
    stale = set(_pictures_of_an_earlier_keep(run, target))
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".keep-", dir=folder) as beside:
        out = Path(beside)
        for name in ("claims.json", "config.json", "report.html"):
            shutil.copy(run / name, out / name)
        pictures = sorted((run / "figures").glob("*.png"))
        for picture in pictures:
            small = Image.open(picture).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            small.save(out / picture.name, optimize=True)
        names = [picture.name for picture in pictures]
        (out / "summary.json").write_text(json.dumps(summary(findings) | {"pictures": names}, indent=1) + "\n")
        for file in sorted(out.iterdir(), key=lambda file: file.name != "summary.json"):  # it marks the folder: first
            file.replace(target / file.name)
    for name in stale - set(names):
        (target / name).unlink(missing_ok=True)
    return target


def _pictures_of_an_earlier_keep(run: Path, target: Path) -> list[str]:
    """The pictures of an earlier ``keep``; raises ``FileExistsError`` if ``target`` holds anything but one."""
    inner, outer = target.resolve(), run.resolve()
    if inner == outer or inner in outer.parents or outer in inner.parents:
        raise FileExistsError(f"expected a folder apart from the run's, got {str(target)!r} for {str(run)!r}")
    if not target.exists() or target.is_dir() and not any(target.iterdir()):
        return []
    try:
        earlier = read_json(target / "summary.json", dict, "the summary of a kept run")
    except (OSError, Damaged):
        earlier = {}
    if earlier.get("name") != target.name or "environment" not in earlier:
        raise FileExistsError(f"{str(target)!r} is not what an earlier keep wrote; choose another folder")
    return [name for name in earlier.get("pictures", []) if Path(name).name == name and name.endswith(".png")]


def summary(findings: Findings) -> dict[str, Any]:
    """What a run found, by seed; numbers have four digits, except in curves and controls."""
    pairs = np.triu_indices(findings.divergence.shape[-1], 1)
    between = findings.divergence[:, :, pairs[0], pairs[1]]
    return {
        "name": findings.name,
        "environment": findings.environment,
        "seeds": findings.seeds,
        "places": findings.places,
        "accuracy": _digits(findings.accuracy),
        "groups_off": {role: _digits(accuracy) for role, accuracy in findings.groups.items()},
        "heads_in_groups": dict(Counter(row["role"] for row in findings.heads)),
        "divergence": _digits(between.mean(-1) if between.size else np.zeros(between.shape[:2])),
        "noise_floor": _digits(findings.noise.mean(-1)),
        "best_scores": {name: _digits(values[:, -1].max((1, 2))) for name, values in findings.scores.items()},
        "heads": [{name: _digits(value) for name, value in row.items()} for row in findings.heads],
        "curves": findings.curves,
        "grids": findings.grids,
        "controls": findings.controls,
    }


def _digits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_digits(one) for one in value.tolist()]
    if isinstance(value, list):
        return [_digits(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
