"""Runs one experiment end to end: trains it and its controls, measures, judges the claims, saves the findings."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jattn_experiments.config import Config, Kind, changed_options, differences, variants
from jattn_experiments.measure import circuits, claims, evaluate, language_model, long_heads, sentence_encoder
from jattn_experiments.measure.assemble import assemble
from jattn_experiments.runs import devices
from jattn_experiments.runs.checkpoint import saved_steps
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Busy, Damaged, owned, read_json, write_atomically
from jattn_experiments.runs.history import Clock
from jattn_experiments.train import Setup, Trained, train

EXAMINATIONS = {
    Kind.SENTENCE_ENCODER: sentence_encoder,
    Kind.LANGUAGE_MODEL: language_model,
    Kind.LONG_TEXTS: long_heads,
    Kind.CIRCUITS: circuits,
}


class DifferentConfig(Exception):
    """The folder holds a run of another config. The arguments are one line for each differing key."""


@contextlib.contextmanager
def prepared(config: Config, out: Path) -> Iterator[None]:
    """Marks ``out`` as a run of ``config`` before training starts, and locks other runs out of it.

    Several processes of one run count as one owner: the first process holds the lock.

    Raises:
        ValueError: a claim names an unknown metric; a pretrained model, the model to start from or devices of the mesh
            are missing.
        Busy: another run works in ``out``.
        DifferentConfig: ``out`` holds a run of another config.
        Damaged: ``config.json`` in ``out`` is not a config.
        OSError: ``out`` is not writable.
    """
    if config.kind in EXAMINATIONS:
        EXAMINATIONS[config.kind].check(config)
    else:
        _check_training(config, out)
    with contextlib.ExitStack() as stack:
        refused = None
        if devices.is_first():
            try:
                stack.enter_context(owned(out))
                _mark(config, out)
            except (Busy, DifferentConfig, Damaged, OSError) as error:
                refused = error
        if not devices.everywhere(refused is None):
            raise refused or Busy("the first process could not lock the folder")
        yield


def _check_training(config: Config, out: Path) -> None:
    claims.check(config)
    devices.check(config)
    for one, folder in _trainings(config, out).values():
        if one.train.start and not saved_steps(folder / "checkpoints"):  # a resumed run does not read train.start again
            setup = Setup.of(one)
            setup.start(setup.init())


def _trainings(config: Config, out: Path) -> dict[str, tuple[Config, Path]]:
    """The config and folder of the run (as ""), of its controls and of the points of its sweep."""
    itself = dataclasses.replace(config, controls={}, sweep={}, claims=[])
    trainings = {"": (config, out)}
    for name, variant in variants(config).items():
        same = dataclasses.replace(variant, name=config.name) == itself  # this point of the sweep is the run itself
        trainings[name] = trainings[""] if same else (variant, out / "controls" / name)
    return trainings


def _mark(config: Config, out: Path) -> None:
    """Writes ``config.json``, or compares ``config`` with the existing one."""
    file = out / "config.json"
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    if not file.exists():
        write_atomically(file, json.dumps(plain, indent=1).encode())
        return
    saved = read_json(file, dict, "the config of a run")
    # The mesh does not affect the numbers, so a run can resume on more or fewer devices.
    if different := differences(saved | {"mesh": None}, plain | {"mesh": None}):
        raise DifferentConfig(*(f"{out} holds a run of another config: {line}" for line in different))


def run(config: Config, out: Path) -> Findings | None:
    """Trains ``config`` and its controls in a prepared ``out``, or resumes; writes and returns the findings.

    A saved model is only examined. With several processes, the first returns the findings and the others None.

    Raises:
        Diverged: the loss of a seed is not finite.
        Damaged: a stopped run left ``out`` incomplete.
        OSError: ``out`` is not writable.
        Stopped: a signal arrived.
    """
    examination = EXAMINATIONS.get(config.kind)
    findings = examination.run(config, out) if examination else _train(config, out)
    if findings is None:
        return None
    findings = dataclasses.replace(findings, changed=changed_options(config))
    findings.save(out)
    return findings


def finished(config: Config, out: Path) -> Findings | None:
    """The findings in ``out`` if the run has finished there, otherwise those of ``run``, which may raise."""
    findings = None
    if devices.is_first():
        with contextlib.suppress(FileNotFoundError, Damaged, TypeError):  # unfinished, altered or from another version
            findings = Findings.load(out)
    if devices.agreed(np.array(findings is not None)):
        return findings
    return run(config, out)


def _train(config: Config, out: Path) -> Findings | None:
    clock = Clock(out)
    trained = train(config, out)
    result = _result(trained)
    roles = evaluate.find_roles(trained.setup, result.trained, trained.params)
    results = {"": result._replace(groups=evaluate.ablate_groups(trained.setup, trained.params, roles.label))}
    for name, (variant, folder) in _trainings(config, out).items():
        if name:
            results[name] = result if folder == out else _result(train(variant, folder))
    if not devices.is_first():
        return None
    return assemble(trained.setup, results, roles, trained.history, clock.stop())


def _result(run: Trained) -> claims.Result:
    setup, first = run.setup, devices.is_first()  # the first process holds the history
    trained, untrained = evaluate.measure(setup, run.params, run.untrained)
    looks, metrics = (run.history.scores(), run.history.metrics()) if first else ((np.zeros(0), {}),) * 2
    parameters = sum(leaf.size // len(leaf) for leaf in jax.tree.leaves(run.params))  # of one seed's model
    models = setup.task.places, setup.seeds, parameters, trained, untrained
    return claims.Result(setup.config, *models, {}, *looks, *metrics)
