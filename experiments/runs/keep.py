"""The parts of a run kept in the repository: claims, config and numbers as small JSON, pictures as small PNG."""

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.runs.findings import Findings

COLOURS = 128  # per picture: a third of the bytes, no visible difference


def keep(run: Path, folder: Path) -> Path:
    """Rewrites ``folder/NAME`` from a finished ``run``; returns it.

    Raises:
        FileNotFoundError: the run has not finished.
    """
    findings = Findings.load(run)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".keep-", dir=folder) as beside:  # the old folder stays until then
        out = Path(beside) / findings.name
        out.mkdir()
        for name in ("claims.json", "config.json"):
            shutil.copy(run / name, out / name)
        (out / "summary.json").write_text(json.dumps(summary(findings), indent=1) + "\n")
        for picture in sorted((run / "figures").glob("*.png")):
            small = Image.open(picture).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            small.save(out / picture.name, optimize=True)
        shutil.rmtree(folder / findings.name, ignore_errors=True)
        return out.rename(folder / findings.name)


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
        "controls": findings.controls,
    }


def _digits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_digits(one) for one in value.tolist()]
    if isinstance(value, list):
        return [_digits(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
