"""Gathers a run's findings for the report: numbers of its models, curves over its sweep, rows of its controls."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jattn.heads import Roles
from jattn_experiments import head_scores, tasks
from jattn_experiments.config import points_of
from jattn_experiments.measure import claims, evaluate
from jattn_experiments.runs import devices
from jattn_experiments.runs.findings import Findings, plain
from jattn_experiments.runs.history import History
from jattn_experiments.train import Setup


def assemble(
    setup: Setup, results: dict[str, claims.Result], roles: Roles, history: History, seconds: float
) -> Findings:
    """The findings of a run, from its models, its controls' models, and its history."""
    config, places = setup.config, setup.task.places
    trained, untrained = results[""].trained, results[""].untrained
    metric_steps, metrics = history.metrics()
    first = [name for name in ("loss", "accuracy", "exact_match") if name in metrics]
    look_steps, scores = history.scores()
    length = trained.offset_profile.shape[-1]
    return Findings(
        name=config.name,
        description=config.description,
        config=dataclasses.asdict(config),
        environment=devices.environment(seconds),
        seeds=setup.seeds,
        places=list(places),
        tokens=evaluate.example_tokens(setup),
        metric_steps=metric_steps,
        metrics={name: metrics[name] for name in [*first, *sorted(metrics.keys() - first)]},
        look_steps=look_steps,
        scores={name: scores[name] for name in (*setup.task.located, *head_scores.TRACKED)},
        statistics={name: np.stack([untrained.scores[name], trained.scores[name]], 1) for name in head_scores.ALL},
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
        paths={},
        heads=evaluate.head_rows(setup.seeds, roles),
        curves=_length_curves(results) | _sweep_curves(results),
        grids={},
        controls=[
            claims.row(name or one.config.name, metric, claims.measure(one, one.trained, metric), one.parameters)
            for metric in setup.task.metrics
            for name, one in results.items()  # the run itself first
        ],
        claims=[claims.judge(claim, results) for claim in config.claims],
    )


Curves = dict[str, dict[str, list[list[float]]]]  # "Y over X" -> line -> [[x, y per seed ...], ...]


def _length_curves(results: dict[str, claims.Result]) -> Curves:
    """Exact match over string length, of the models that differ from the run only in their positions."""
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


def _sweep_curves(results: dict[str, claims.Result]) -> Curves:
    """A panel per metric of the controls, with a line per combination of the options after the first.

    With a single option, a task with several answers also has a line per answer in its accuracy panel.
    """
    base = results[""]
    if not base.config.sweep:
        return {}
    swept = {option: [value for value, _ in points_of(base.config, option)] for option in base.config.sweep}
    (option, values), *others = swept.items()
    if not all(isinstance(value, int | float) for value in values):
        return {}  # words have no axis; the table of controls lists them

    def line(points: Sequence[str], metric: str) -> list[list[float]]:
        each = zip(sorted(values), (results[point] for point in points), strict=True)
        return [[float(value), *claims.measure(one, one.trained, metric)] for value, one in each]

    curves: Curves = {}
    for metric in tasks.make(base.config.task).metrics:
        lines = curves.setdefault(f"{plain(metric)} over {option}", {})
        for rest in itertools.product(*(values for _, values in others)):
            tail = [f"{key}={value}" for (key, _), value in zip(others, rest, strict=True)]
            points = [",".join([f"{option}={value}", *tail]) for value in sorted(values)]
            lines[", ".join(tail) or base.config.name] = line(points, metric)
    if len(base.places) > 1 and not others:
        points = [f"{option}={value}" for value in sorted(values)]
        curves[f"accuracy over {option}"] = {place: line(points, claims.AT + place) for place in base.places}
    return curves
