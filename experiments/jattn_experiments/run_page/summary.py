"""What a run measured, in numbers that are kept as JSON."""

from collections import Counter
from typing import Any

import numpy as np

from jattn_experiments.runs.findings import Findings


def summary(findings: Findings) -> dict[str, Any]:
    """A run's results by seed, with numbers of four digits (six for heads, all for curves, grids and controls)."""
    pairs = np.triu_indices(findings.divergence.shape[-1], 1)
    between = findings.divergence[:, :, pairs[0], pairs[1]]
    return {
        "name": findings.name,
        "changed": findings.changed,
        "environment": findings.environment,
        "seeds": findings.seeds,
        "places": findings.places,
        "accuracy": _digits(findings.accuracy),
        "groups_off": {role: _digits(accuracy) for role, accuracy in findings.groups.items()},
        "heads_in_groups": dict(Counter(row["role"] for row in findings.heads)),
        "divergence": _digits(between.mean(-1) if between.size else np.zeros(between.shape[:2])),
        "noise_floor": _digits(findings.noise.mean(-1)),
        "best_scores": {name: _digits(values[:, -1].max((1, 2))) for name, values in findings.scores.items()},
        "heads": [{name: _digits(value, 6) for name, value in row.items()} for row in findings.heads],
        "curves": findings.curves,
        "grids": findings.grids,
        "controls": findings.controls,
    }


def _digits(value: Any, digits: int = 4) -> Any:
    if isinstance(value, np.ndarray):
        return _digits(value.tolist(), digits)
    if isinstance(value, list):
        return [_digits(entry, digits) for entry in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
