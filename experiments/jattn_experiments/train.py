"""The training loop. It trains several seeds together, and can be stopped and resumed."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jattn_experiments import batches, head_scores, model, optimizers, tasks
from jattn_experiments.config import Config, of_plain
from jattn_experiments.runs import devices, stopping
from jattn_experiments.runs.checkpoint import Checkpoints, named
from jattn_experiments.runs.folder import Damaged, read_json
from jattn_experiments.runs.history import History
from jattn_experiments.runs.terminal import Terminal

# Folded into a seed's key, so that parameters and each kind of data are independent.
INIT, TRAIN_DATA, LOOK_DATA, TEST_DATA, PROBE_DATA, NULL_DATA, NULL_INIT = range(7)
LOOK_BATCH = 32
HELD_OUT_BATCH = 256  # held-out sequences for tasks with early and late queries
DENSE = 1024  # most tokens for which the entropy penalty uses whole weight matrices
EXAMPLES = 3  # sequences whose weights each look keeps

State = dict[str, Any]  # "params" and "optimizer"; every leaf has a leading axis of seeds


class Diverged(Exception):
    """The loss or the parameters of a seed are not finite."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A config made concrete."""

    config: Config
    task: tasks.Task
    model: model.Transformer
    optimizer: optax.GradientTransformation
    keys: Array  # [R], per seed
    mesh: jax.sharding.Mesh

    @classmethod
    def of(cls, config: Config) -> "Setup":
        """Task, model, optimizer, keys and mesh of ``config``."""
        task, train = tasks.make(config.task), config.train
        seeds = jnp.arange(train.first_seed, train.first_seed + train.seeds)
        keys, mesh = jax.vmap(jax.random.key)(seeds), devices.make(config.mesh)
        transformer = model.make(config.model, task, devices.attention(mesh))
        return cls(config, task, transformer, optimizers.make(config), keys, mesh)

    @property
    def looking(self) -> "Setup":
        """The setup for looks at heads: one device, ``evaluate.look_length`` tokens."""
        options = self.config.task
        length = self.config.evaluate.look_length or options.length
        task = tasks.make(dataclasses.replace(options, length=length))
        mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), devices.AXES)
        return dataclasses.replace(self, task=task, model=model.make(self.config.model, task), mesh=mesh)

    @property
    def seeds(self) -> list[int]:
        """The seeds as numbers."""
        return list(range(self.config.train.first_seed, self.config.train.first_seed + self.config.train.seeds))

    def init(self) -> State:
        """The state of all seeds with random parameters; ``train.start`` is not read."""

        def of_one_seed(key: Array) -> State:
            key = jax.random.fold_in(key, INIT)
            params = self.looking.model.init(key, self.task.sample(key, 1).tokens)
            return {"params": params, "optimizer": self.optimizer.init(params)}

        every_seed = jax.vmap(of_one_seed)
        shardings = devices.of_state(self.mesh, jax.eval_shape(every_seed, self.keys))
        return jax.jit(lambda: every_seed(self.keys), out_shardings=shardings)()

    def start(self, state: State) -> State:
        """The state before the first step: ``state``, from ``init``, with the parameters that ``train.start`` names.

        Raises ``ValueError`` if they are missing, or another model's.
        """
        if not self.config.train.start:
            return state
        try:
            folder, checkpoints, step = named(self.config.train.start)
            if _sizes(config_of(folder)) != _sizes(
                self.config
            ):  # checked first, because Orbax leaves threads behind when it fails
                raise ValueError(f"expected a run with this config's model, tokens, answers and seeds, got {folder}")
            return state | {"params": checkpoints.load(step, state)["params"]}
        except (Damaged, ValueError) as wrong:
            raise ValueError(f"train.start: {wrong}") from None


def _sizes(config: Config) -> tuple[Any, ...]:
    """The values that decide the shapes of a config's parameters."""
    task = tasks.make(config.task)
    return config.model, config.train.seeds, task.vocabulary, task.max_length, len(task.places), task.classes


def config_of(folder: Path) -> Config:
    """The config of a run. Raises ``ValueError`` if there is no run of this version in ``folder``."""
    try:
        return of_plain(read_json(folder / "config.json", dict, "the config of a run"))
    except FileNotFoundError:
        raise ValueError(f"expected the folder of a run, got {str(folder)!r}") from None
    except (Damaged, argparse.ArgumentError, ValueError, OSError) as wrong:
        raise ValueError(f"{folder}: {wrong}") from None


class Trained(NamedTuple):
    """The result of training; parameters have leaves ``[R,...]``."""

    setup: Setup
    untrained: Any
    params: Any
    history: History


def train(config: Config, out: Path) -> Trained:
    """Trains ``config`` in the folder ``out``, or resumes a stopped run of the same config.

    The numbers equal those of an uninterrupted run: a checkpoint holds the whole state, data depend only on seed and
    step, and history lines after the checkpoint are written again.

    Raises:
        Diverged: names the step and seed. The last checkpoint before it is kept.
        Damaged: no checkpoint is intact with matching metrics and looks.
        Stopped: a signal arrived. It names the step.
    """
    setup, steps, every = Setup.of(config), config.train.steps, config.train.look_every
    devices.meet(setup.mesh)
    history = History(out, writes=devices.is_first())
    state, first_look, run_chunk = setup.init(), look_at(setup), chunk(setup)
    untrained = state["params"]
    begin = start = 0
    try:
        with _progress() as progress:
            checkpoints = Checkpoints(out / "checkpoints", config.train.keep)
            start, state = checkpoints.restore(state, lambda *which: _agreed(history.check, *which), _say)
            history.rewind(start)
            if start == 0:
                state = setup.start(state)
                history.add_look(0, first_look(devices.on_one(setup.mesh, state["params"])))
            bar = progress.add_task(config.name, total=steps, completed=start, shown="")
            for begin in range(start, steps, every):
                stopping.check()
                end = min(begin + every, steps)
                state, metrics, looked = run_chunk(state, jnp.arange(begin, end))
                metrics = {name: np.asarray(values) for name, values in metrics.items()}
                _stop_unless_finite(setup, begin, metrics.pop("finite"))
                history.add_metrics(begin, metrics, config.train.log_every)
                history.add_look(end, looked)
                if end % config.train.checkpoint_every == 0 or end == steps:
                    history.sync()
                    checkpoints.save(end, state, history.digests())
                shown = f"loss {metrics['loss'][-1].mean():.3f} accuracy {metrics['accuracy'][-1].mean():.3f}"
                progress.update(bar, completed=end, shown=shown)
    except stopping.Stopped as stopped:
        raise stopping.Stopped(stopped.number, f"{config.name}: stopped at step {begin}") from None
    return Trained(setup, untrained, state["params"], history)


def _agreed(check: Callable[..., str], *which: Any) -> str:
    """``check(*which)`` on the first process, which holds the history."""
    reason = check(*which) if devices.is_first() else ""
    return "" if devices.everywhere(not reason) else reason or "the first process rejected it"


def _say(line: str) -> None:
    if devices.is_first():
        print(f"warning: {line}", file=sys.stderr)


def updates(setup: Setup) -> Callable[[State, Array], tuple[State, dict[str, Array]]]:
    """A jitted ``(state, steps [n]) -> (state, metrics {name: [n,R]})``, with the metrics on every device."""

    def update(state: State, step: Array) -> Any:
        return devices.over_seeds(setup.mesh, lambda state, key: train_step(setup, state, key, step), state, setup.keys)

    def run(state: State, steps: Array) -> Any:
        state, metrics = jax.lax.scan(update, state, steps)
        shardings = devices.of_state(setup.mesh, state), devices.whole(setup.mesh)
        return jax.lax.with_sharding_constraint((state, metrics), shardings)

    return jax.jit(run)


def chunk(setup: Setup) -> Callable[[State, Array], tuple[State, dict[str, Array], dict[str, Any]]]:
    """A function ``(state, steps [n]) -> (state, metrics {name: [n,R]}, a look at the new heads)``."""
    looking, update = look_at(setup), updates(setup)

    def run(state: State, steps: Array) -> Any:
        state, metrics = update(state, steps)
        looked = looking(devices.on_one(setup.mesh, state["params"]))
        for name, value in looked["held_out"].items():
            metrics = metrics | {name: jnp.broadcast_to(value, (len(steps), *value.shape))}
        return state, metrics, looked

    return run


def train_step(setup: Setup, state: State, key: Array, step: Array) -> tuple[State, dict[str, Array]]:
    """One update of one seed, on data that depend only on its key and the step."""
    data_key = jax.random.fold_in(jax.random.fold_in(key, TRAIN_DATA), step)
    batch = devices.split(setup.mesh, setup.task.sample(data_key, setup.config.train.batch))

    def objective(params: Any) -> tuple[Array, tuple[Array, Array]]:
        train, spread = setup.config.train, jnp.zeros(())
        penalty, begun = train.entropy_penalty, step >= train.entropy_after * train.steps
        if penalty and (batch.tokens.shape[1] > DENSE or setup.mesh.shape["sequence"] > 1):
            # It costs as much as attention itself, forward and backward, so skip it until it counts.
            none = jnp.zeros((setup.config.model.num_layers, setup.config.model.num_heads))
            plain = lambda params: (setup.model.apply(params, batch.tokens, at=batch.at), none)
            logits, spread = jax.lax.cond(
                begun, lambda params: head_scores.with_entropy(setup.model, params, batch), plain, params
            )
        elif penalty:
            logits, weights = head_scores.with_weights(setup.model, params, batch.tokens, at=batch.at)
            spread = head_scores.entropy(weights, batch)
        else:
            logits = setup.model.apply(params, batch.tokens, at=batch.at)
        objective = loss_of(logits, batch, train.place_weights)
        counts = begun if train.entropy_below is None else begun & (objective < train.entropy_below)
        return objective + penalty * counts * spread.mean(), (objective, logits)

    (_, (loss, logits)), gradient = jax.value_and_grad(objective, has_aux=True)(state["params"])
    updates, optimizer = setup.optimizer.update(gradient, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    accuracy, exact = judge(logits, batch)
    metrics = {"loss": loss, "accuracy": accuracy.mean(), "exact_match": exact}
    if len(setup.task.places) > 1:
        metrics |= {f"accuracy/{place}": accuracy[index] for index, place in enumerate(setup.task.places)}
    metrics |= {f"above/{name}": loss - level.mean() for name, level in batch.levels.items()}
    metrics["finite"] = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(params))
    return {"params": params, "optimizer": optimizer}, metrics


def loss_of(logits: Array, batch: batches.Batch, place_weights: list[float] | None = None) -> Array:
    """The mean cross-entropy of the answers that count, in nats."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    weights = batch.target_weights * jnp.array(place_weights or [1.0] * logits.shape[-2])[None, None]
    return jnp.sum(loss * weights) / jnp.sum(weights)


def judge(logits: Array, batch: batches.Batch) -> tuple[Array, Array]:
    """The share of correct answers per place ``[A]``, and of sequences answered without a mistake."""
    right, counts = jnp.argmax(logits, -1) == batch.targets, batch.target_weights > 0
    accuracy = jnp.sum(right & counts, (0, 1)) / jnp.maximum(jnp.sum(counts, (0, 1)), 1)
    return accuracy, jnp.mean(jnp.all(right | ~counts, (1, 2)))


def held_out(transformer: model.Transformer, task: tasks.Task, params: Any, key: Array, size: int) -> dict[str, Array]:
    """Loss and in-context learning score on held-out sequences; nothing for a task without early and late queries.

    The score is the mean loss at late queries minus that at early ones: how much the earlier tokens help.
    """
    if task.contexts is None:
        return {}
    batch = task.held_out(key, size)
    logits = transformer.apply(params, batch.tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)[..., 0].mean(0)
    early, late = (losses[queries].mean() for queries in task.contexts)
    return {"held_out_loss": losses.mean(), "in_context": late - early}


def look_at(setup: Setup) -> Callable[[Any], dict[str, Any]]:
    """A jitted function of all seeds' parameters on one device: scores, offset profiles, first seed's examples."""
    task, transformer = setup.looking.task, setup.looking.model
    first_key = jax.random.fold_in(setup.keys[0], PROBE_DATA)

    def of_one_seed(params: Any, key: Array) -> dict[str, Any]:
        batch = task.look(jax.random.fold_in(key, LOOK_DATA), LOOK_BATCH)
        scores, weights = head_scores.scores(transformer, task, params, batch)
        return {
            "scores": scores,
            "offset_profile": head_scores.offset_profile(weights, batch),
            "held_out": held_out(transformer, task, params, jax.random.fold_in(key, TEST_DATA), HELD_OUT_BATCH),
        }

    @jax.jit
    def looking(params: Any) -> dict[str, Any]:
        first = jax.tree.map(lambda leaf: leaf[0], params)
        examples = head_scores.weights_of(transformer, first, task.probe(first_key, EXAMPLES).tokens)
        return devices.over_seeds(setup.looking.mesh, of_one_seed, params, setup.keys) | {"examples": examples}

    return looking


def _stop_unless_finite(setup: Setup, begin: int, finite: np.ndarray) -> None:
    """Raises ``Diverged`` for the first step and seed that are not ``finite [n,R]``."""
    if not finite.all():
        step, seed = np.argwhere(~finite)[0]
        raise Diverged(
            f"{setup.config.name}: the loss or the parameters of seed {setup.seeds[seed]} are not finite at step "
            f"{begin + step + 1}; the last good checkpoint is kept"
        )


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, *times, console=Terminal(), disable=not devices.is_first())
