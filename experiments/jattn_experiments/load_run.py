"""Loads the models of runs at any of their checkpoints."""

import dataclasses
from typing import Any, NamedTuple

from jattn_experiments.config import Mesh
from jattn_experiments.runs.checkpoint import named
from jattn_experiments.runs.folder import Damaged
from jattn_experiments.train import Setup, config_of


class Saved(NamedTuple):
    """A run's setup on one device, and the parameters of all seeds after ``step`` updates, leaves ``[R,...]``."""

    setup: Setup
    step: int
    params: Any


def load(run: str) -> Saved:
    """The model that ``run`` names: a folder (the last checkpoint) or ``FOLDER@STEP``.

    Raises ``ValueError`` if there is no such run or checkpoint, or it cannot be read.
    """
    folder, checkpoints, step = named(run)
    setup = Setup.of(dataclasses.replace(config_of(folder), mesh=Mesh()))
    try:
        return Saved(setup, step, checkpoints.load(step, setup.init())["params"])
    except Damaged as wrong:
        raise ValueError(str(wrong)) from None
