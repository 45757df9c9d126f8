"""Models of runs at any of their checkpoints."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config import Config, Mesh, of_plain
from experiments.runs.checkpoint import named
from experiments.runs.folder import Damaged, read_json
from experiments.train import Setup


class Saved(NamedTuple):
    """A run's setup on one device, and the parameters of all seeds after ``step`` updates, leaves ``[R,...]``."""

    setup: Setup
    step: int
    params: Any


def config_of(folder: Path) -> Config:
    """The config of a run, on one device and from random parameters.

    Raises:
        ValueError: there is no run of this version in ``folder``.
    """
    try:
        config = of_plain(read_json(folder / "config.json", dict, "the config of a run"))
    except FileNotFoundError:
        raise ValueError(f"expected the folder of a run, got {str(folder)!r}") from None
    except (Damaged, argparse.ArgumentError, ValueError, OSError) as wrong:
        raise ValueError(f"{folder}: {wrong}") from None
    return dataclasses.replace(config, mesh=Mesh(), train=dataclasses.replace(config.train, start=""))


def load(run: str) -> Saved:
    """The model that ``run`` names: a folder, for the last checkpoint, or ``FOLDER@STEP``.

    Raises:
        ValueError: there is no such run or checkpoint, or it cannot be read.
    """
    folder, checkpoints, step = named(run)
    setup = Setup.of(config_of(folder))
    try:
        return Saved(setup, step, checkpoints.load(step, setup.init())["params"])
    except Damaged as wrong:
        raise ValueError(str(wrong)) from None
