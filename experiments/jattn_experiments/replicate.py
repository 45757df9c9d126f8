"""Replication of a run: the same recipe and the same claims on fresh seeds that nobody has chosen."""

import dataclasses
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from jattn_experiments.config import Config, scaled_claims, variants
from jattn_experiments.runs import devices
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged, read_json

FOLDER = "replication"  # a folder in the run's folder
FIRST_SEED = "train.first_seed"
LARGEST_SEED = 2**32  # a key is made of 32 bits
# The fields that a replication adds to a claim's row.
_KEPT = ("seeds", "values", "passed", "failed", "needed", "holds", "rate", "again")


def replication(config: Config, out: Path, count: int, first_seed: int | None) -> Config:
    """``config`` with ``count`` seeds starting at ``first_seed``, to train in ``out/replication``.

    By default the first seed is drawn from the system's entropy, once per folder. Raises ``Damaged`` if that folder
    holds no config of a run.
    """
    return fresh(config, count, _first_seed(out / FOLDER, config, count) if first_seed is None else first_seed)


def fresh(config: Config, count: int, first_seed: int) -> Config:
    """``config`` on other seeds, of which the same share must pass each claim.

    Controls that set a first seed also take the fresh one. Controls that set a number of seeds keep it.
    """

    def without_first_seed(changed: Any) -> Any:
        return {option: value for option, value in changed.items() if option != FIRST_SEED}

    again = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, seeds=count, first_seed=first_seed),
        controls={name: without_first_seed(changed) for name, changed in config.controls.items()},
        sweep={
            option: [without_first_seed(value) if isinstance(value, dict) else value for value in values]
            for option, values in config.sweep.items()
        },
    )
    return dataclasses.replace(again, claims=scaled_claims(again, config.train.seeds))


def _first_seed(beside: Path, config: Config, count: int) -> int:
    """The first seed of the existing replication, or a new one that no tuning or judging has used."""
    file = beside / "config.json"
    if devices.is_first() and file.exists():
        saved = read_json(file, dict, "the config of a run")
        try:
            drawn = int(saved["train"]["first_seed"])
        except (KeyError, TypeError, ValueError):
            raise Damaged(f"{file}: expected the config of a run") from None
    else:
        every = [one.train for one in (config, *variants(config).values())]
        beyond = max(train.first_seed + train.seeds for train in every) + 1000
        most = max(count, *(train.seeds for train in every))
        drawn = (beyond + secrets.randbelow(LARGEST_SEED // 2)) % (LARGEST_SEED - most)
    return int(devices.agreed(np.array(drawn, np.uint32)))


def with_replication(findings: Findings, out: Path) -> Findings:
    """The findings, with each claim's result in the finished replication in ``out``, if there is one."""
    try:
        beside = Findings.load(out / FOLDER)
    except FileNotFoundError:
        return findings
    added = {row["name"]: {"replication": {name: row[name] for name in _KEPT}} for row in beside.claims}
    rows: list[dict[str, Any]] = [row | added.get(row["name"], {}) for row in findings.claims]
    findings = dataclasses.replace(findings, claims=rows)
    findings.save(out)
    return findings
