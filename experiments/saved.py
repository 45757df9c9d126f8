"""Models of runs at any of their checkpoints."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.config import Config, Mesh, of_plain
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.folder import Damaged, read_json


class Saved(NamedTuple):
    """A run's config and the parameters of all seeds after ``step`` updates, leaves ``[R,...]``."""

    folder: Path
    config: Config
    step: int
    params: Any


def config_of(folder: Path) -> Config:
    """The config of a run, on one device.

    Raises:
        ValueError: there is no run of this version in ``folder``.
    """
    try:
        plain = read_json(folder / "config.json", dict, "the config of a run")
        return dataclasses.replace(of_plain(plain), mesh=Mesh())
    except FileNotFoundError:
        raise ValueError(f"expected the folder of a run, got {str(folder)!r}") from None
    except (Damaged, argparse.ArgumentError, ValueError, OSError) as wrong:
        raise ValueError(f"{folder}: {wrong}") from None


def load(run: str) -> Saved:
    """The model that ``run`` names: a folder, or ``FOLDER@STEP``; by default after the last checkpoint.

    Raises:
        ValueError: there is no such run or checkpoint, or it cannot be read.
    """
    from experiments.train import Setup  # which starts from a saved model itself

    named, at, step = run.rpartition("@")
    folder = Path(named if at else step)
    config = config_of(folder)
    if config.language.model or config.pretrained.groups or not (folder / "checkpoints").is_dir():
        raise ValueError(f"expected a run that trains a model, got {str(folder)!r}")
    checkpoints = Checkpoints(folder / "checkpoints")
    if not checkpoints.steps or (at and step not in map(str, checkpoints.steps)):
        more = "; train.keep=0 keeps every one" if checkpoints.steps else ""
        raise ValueError(
            f"{folder}: expected one of its checkpoints, {checkpoints.steps}, got {step if at else None}{more}"
        )
    which = int(step) if at else checkpoints.steps[-1]
    fresh = dataclasses.replace(config, train=dataclasses.replace(config.train, start=""))
    try:
        state = checkpoints.load(which, Setup.of(fresh).init())
    except Damaged as wrong:
        raise ValueError(str(wrong)) from None
    return Saved(folder, config, which, state["params"])


def check(config: Config) -> None:
    """Raises ``ValueError`` if training cannot start from what ``train.start`` names."""
    from experiments.train import Setup

    if config.train.start:
        Setup.of(config).init()


def started(run: str, params: Any) -> Any:
    """The saved parameters that ``run`` names, in place of ``params`` of the same structure and shapes.

    Raises:
        ValueError: there are none, or they are of another model or another number of seeds.
    """
    found = load(run).params
    shapes = [jax.tree.map(lambda leaf: tuple(leaf.shape), tree) for tree in (found, params)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"train.start: expected a model of the config's layers, sizes and number of seeds, got {run!r}"
        )
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), found, params)
