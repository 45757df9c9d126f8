"""Replication of a run: the same recipe and the same claims on fresh seeds that nobody chose."""

import dataclasses
import json
import math
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from jattn_experiments.config import Config, variants
from jattn_experiments.run import finished, prepared
from jattn_experiments.runs import devices
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged, read_json, write_atomically

FOLDER = "replication"  # inside the run's
LARGEST_SEED = 2**32  # a key is made of 32 bits
# What a replication adds to a claim's row.
_KEPT = ("seeds", "values", "passed", "failed", "needed", "holds", "rate", "again")


def replicate(config: Config, out: Path, count: int, first_seed: int | None) -> Findings | None:
    """Trains ``config`` on ``count`` seeds from ``first_seed`` on, in ``out/replication``, or resumes or takes that.

    By default the first seed is drawn from the system's entropy, once for a folder. Raises the errors of ``prepared``
    and ``finished``.
    """
    beside = out / FOLDER
    again = fresh(config, count, _first_seed(beside, config, count) if first_seed is None else first_seed)
    with prepared(again, beside):
        return finished(again, beside)


def fresh(config: Config, count: int, first_seed: int) -> Config:
    """``config`` on other seeds, as many of which must pass each claim as before, in proportion."""
    seeds = {"": config.train.seeds} | {name: one.train.seeds for name, one in variants(config).items()}
    claims = []
    for claim in config.claims:
        before = seeds[claim.metric.rpartition(":")[0]]
        same = before != config.train.seeds  # a control with its own number of seeds keeps it
        needed = claim.needed if same else math.ceil(claim.needed * count / before)
        claims.append(dataclasses.replace(claim, needed=needed))
    train = dataclasses.replace(config.train, seeds=count, first_seed=first_seed)
    return dataclasses.replace(config, train=train, claims=claims)


def _first_seed(beside: Path, config: Config, count: int) -> int:
    """The seed of the replication that is there, or one that no tuning or judging uses."""
    file = beside / "config.json"
    if devices.is_first() and file.exists():
        saved = read_json(file, dict, "the config of a run")
        try:
            drawn = int(saved["train"]["first_seed"])
        except (KeyError, TypeError, ValueError):
            raise Damaged(f"{file}: expected the config of a run") from None
    else:
        beyond = config.train.first_seed + config.train.seeds + 1000
        drawn = (beyond + secrets.randbelow(LARGEST_SEED // 2)) % (LARGEST_SEED - count)
    return int(devices.agreed(np.array(drawn, np.uint32)))


def with_replication(findings: Findings, out: Path) -> Findings:
    """The findings with what the replication in ``out``, if there is a finished one, says of each claim."""
    try:
        beside = Findings.load(out / FOLDER)
    except FileNotFoundError:
        return findings
    added = {row["name"]: {"replication": {name: row[name] for name in _KEPT}} for row in beside.claims}
    rows: list[dict[str, Any]] = [row | added.get(row["name"], {}) for row in findings.claims]
    findings = dataclasses.replace(findings, claims=rows)
    write_atomically(out / "claims.json", json.dumps(rows, indent=1).encode())
    findings.save(out)
    return findings
