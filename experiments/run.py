"""One experiment from end to end: train it and its controls, measure, judge the claims, write the report."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import claims, devices, evaluate, look, pretrained, tasks
from experiments.config import Config, Pretrained, differences
from experiments.findings import Findings, environment
from experiments.folder import Busy, Damaged, owned, read_json, write_atomically
from experiments.history import Clock, History
from experiments.panels import plain
from experiments.train import Setup, Trained, train
from jattn.heads import Roles

CONTROL_METRICS = {
    "copy": ("mean_accuracy", "hardened_accuracy"),
    "copy_string": ("exact_match", "mean_accuracy"),
    "shift_bank": ("mean_accuracy", "hardened_accuracy", "distinct_places"),
    "induction": ("mean_accuracy", "best/previous_token", "best/induction"),
    "skills": ("worst_place_accuracy", "clean_heads"),
}


class DifferentConfig(Exception):
    """The folder holds a run of another config; one line for each key that differs."""


@contextlib.contextmanager
def prepared(config: Config, out: Path) -> Iterator[None]:
    """Marks ``out`` as a run of ``config``, before anything is trained, and keeps other runs out while it is entered.

    Several processes of one run are one owner: the first has the folder.

    Raises:
        ValueError: a claim names no metric; a pretrained model is not there; the devices of a mesh are not.
        Busy: another run works in ``out``.
        DifferentConfig: ``out`` holds a run of another config.
        Damaged: ``out`` holds a ``config.json`` that is no config.
        OSError: ``out`` cannot be written.
    """
    if config.pretrained != Pretrained():
        pretrained.check(config)
    else:
        claims.check(config, _known_metrics)
        devices.check(config)
    with contextlib.ExitStack() as stack:
        refused = None
        if devices.is_first():
            try:
                stack.enter_context(owned(out))
                _mark(config, out)
            except (Busy, DifferentConfig, Damaged, OSError) as error:
                refused = error
        if not devices.everywhere(refused is None):
            raise refused or Busy("the first process could not take the folder")
        yield


def _mark(config: Config, out: Path) -> None:
    """Writes ``config.json``, or holds ``config`` against the one that there is."""
    file = out / "config.json"
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    if not file.exists():
        write_atomically(file, json.dumps(plain, indent=1).encode())
        return
    saved = read_json(file, dict, "the config of a run")
    if different := differences(*(_of_any_mesh(one) for one in (saved, plain))):
        raise DifferentConfig(*(f"{out} holds another run: {line}" for line in different))


def _of_any_mesh(plain: dict[str, Any]) -> dict[str, Any]:
    """A config without what changes none of its numbers, so that a run can go on with more devices or fewer."""
    return {name: value for name, value in plain.items() if name != "mesh"}


def _known_metrics(config: Config) -> list[str]:
    task = tasks.make(config.task)
    return claims.known_metrics(config, task.places, look.ALL, task.roles)


def run(config: Config, out: Path) -> Findings | None:
    """Trains ``config`` and its controls in a prepared ``out``, or goes on where that stopped; writes what it found.

    A pretrained model is looked at instead. Of several processes the first returns what was found, the others None.

    Raises:
        Diverged: the loss of a seed is no longer finite.
        Damaged: what a stopped run left in ``out`` is not whole.
        OSError: ``out`` cannot be written.
        Stopped: a signal came.
    """
    findings = pretrained.run(config) if config.pretrained != Pretrained() else _train(config, out)
    if findings is None:
        return None
    write_atomically(out / "claims.json", json.dumps(findings.claims, indent=1).encode())
    findings.save(out)
    return findings


def _train(config: Config, out: Path) -> Findings | None:
    clock = Clock(out)
    trained = train(config, out)
    result = _result(trained)
    roles = evaluate.find_roles(trained.setup, result.trained, trained.params)
    results = {"": result._replace(groups=evaluate.ablate_groups(trained.setup, trained.params, roles.label))}
    itself = dataclasses.replace(config, controls={}, sweep={}, claims=[])
    for name, variant in config.variants().items():
        if dataclasses.replace(variant, name=config.name) == itself:
            results[name] = result  # the point of a sweep that is the run itself
        else:
            results[name] = _result(train(variant, out / "controls" / name))
    if not devices.is_first():
        return None
    return _findings(trained.setup, results, roles, trained.history, clock.stop())


def _result(run: Trained) -> claims.Result:
    setup = run.setup
    trained, untrained = evaluate.measure(setup, run.params, run.untrained)
    return claims.Result(
        config=setup.config,
        places=setup.task.places,
        seeds=setup.seeds,
        parameters=evaluate.num_parameters(run.params),
        trained=trained,
        untrained=untrained,
        groups={},
    )


def _findings(
    setup: Setup, results: dict[str, claims.Result], roles: Roles, history: History, seconds: float
) -> Findings:
    config, places = setup.config, setup.task.places
    trained, untrained = results[""].trained, results[""].untrained
    metric_steps, metrics = history.metrics()
    look_steps, scores = history.scores()
    length = trained.offset_profile.shape[-1]
    return Findings(
        name=config.name,
        description=config.description,
        config=dataclasses.asdict(config),
        environment=environment(seconds),
        seeds=setup.seeds,
        places=list(places),
        tokens=evaluate.example_tokens(setup),
        metric_steps=metric_steps,
        metrics={name: metrics[name] for name in sorted(metrics, key=_metric_order)},
        look_steps=look_steps,
        scores={name: scores[name] for name in (*places, *look.TRACKED)},
        statistics={name: np.stack([untrained.scores[name], trained.scores[name]], 1) for name in look.ALL},
        offsets=np.arange(1 - length, 1),
        offset_profile=np.stack([untrained.offset_profile, trained.offset_profile], 1),
        example_steps=look_steps,
        example_weights=np.stack([history.look(step)["examples"] for step in look_steps]),
        mean_weights=np.stack([untrained.mean_weights[0], trained.mean_weights[0]]),
        divergence=np.stack([untrained.divergence, trained.divergence], 1),
        noise=np.stack([untrained.noise, trained.noise], 1),
        accuracy=trained.accuracy,
        ablated=trained.ablated,
        groups=results[""].groups,
        heads=evaluate.head_rows(setup.seeds, roles),
        curves=_curves(results),
        controls=_control_rows(results),
        claims=[claims.judge(claim, results) for claim in config.claims],
    )


def _metric_order(name: str) -> tuple[int, str]:
    first = ("loss", "accuracy", "exact_match")
    return (first.index(name) if name in first else len(first)), name


def _curves(results: dict[str, claims.Result]) -> dict[str, dict[str, list[list[float]]]]:
    """Exact match over string length, a line for each position scheme; what a sweep varies, over its first option."""
    return _length_curves(results) | _sweep_curves(results)


def _length_curves(results: dict[str, claims.Result]) -> dict[str, dict[str, list[list[float]]]]:
    """Of the models that differ from the run itself in their positions alone."""
    base = results[""].config
    lengths = base.evaluate.lengths
    lines = {}
    for result in results.values():
        other = result.config
        alike = dataclasses.replace(other.model, position=base.model.position) == base.model
        if lengths and alike and (other.task, other.evaluate) == (base.task, base.evaluate):
            rows: Sequence[Sequence[float]] = result.trained.curve.T.tolist()
            line = [[float(n), *row] for n, row in zip(lengths, rows, strict=True)]
            lines.setdefault(other.model.position, line)
    return {"exact match over string length": lines} if lines else {}


def _sweep_curves(results: dict[str, claims.Result]) -> dict[str, dict[str, list[list[float]]]]:
    """A curve for each metric of the controls; a line for each combination of the options after the first."""
    base = results[""]
    if not base.config.sweep:
        return {}
    (option, values), *others = base.config.sweep.items()
    if not all(isinstance(value, int | float) for value in values):
        return {}  # there is no axis for words; the table of controls has them
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for metric in CONTROL_METRICS[base.config.task.kind]:
        lines = curves.setdefault(f"{plain(metric)} over {option}", {})
        for rest in itertools.product(*(values for _, values in others)):
            tail = [f"{key}={value}" for (key, _), value in zip(others, rest, strict=True)]
            found = [(value, results[",".join([f"{option}={value}", *tail])]) for value in sorted(values)]
            lines[", ".join(tail) or base.config.name] = [
                [float(value), *claims.measure(result, result.trained, metric)] for value, result in found
            ]
    return curves


def _control_rows(results: dict[str, claims.Result]) -> list[dict[str, Any]]:
    """A row for each control and metric, the run itself first."""
    return [
        {
            "name": name or result.config.name,
            "metric": metric,
            "values": claims.measure(result, result.trained, metric),
            "parameters": result.parameters,
        }
        for metric in CONTROL_METRICS[results[""].config.task.kind]
        for name, result in results.items()
    ]
