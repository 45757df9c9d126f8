"""Shared steps of examining any saved model: checks of its config, twins with random parameters, findings."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jattn import heads, interop
from jattn_experiments import head_scores
from jattn_experiments.config import Claim, Config
from jattn_experiments.runs import devices
from jattn_experiments.runs.findings import Findings

NULL_HEADS = 216  # heads of models with random parameters, which show what a head scores by chance


class Model(NamedTuple):
    """A language model, split into graph and state so that compiled functions can take it."""

    graph: nnx.GraphDef
    state: nnx.State
    config: interop.Config

    @classmethod
    def of(cls, model: interop.Transformer) -> "Model":
        """Splits a model of jattn.interop."""
        return cls(*nnx.split(model), model.config)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of layers, and of heads in each."""
        return self.config.num_layers, self.config.num_heads

    def whole(self, state: nnx.State) -> interop.Transformer:
        """The model with this state, within a compiled function."""
        return nnx.merge(self.graph, state)

    def sown(self, state: nnx.State, tokens: Array, **options: Any) -> Any:
        """The values that the model's layers sow on ``tokens [B,T]``, with this state."""
        forward = nnx.capture(lambda model: model(tokens, **options), nnx.Intermediate)
        return forward(self.whole(state))[1]


def refuse(config: Config, sections: Sequence[str], reason: str) -> None:
    """Raises ``ValueError`` if one of these sections of a config is not left out."""
    for section in sections:
        if getattr(config, section) != getattr(Config(config.name), section):
            raise ValueError(f"{section}: {reason}; remove its options from the config")


def need(section: str, extras: str, packages: Sequence[str]) -> None:
    """Raises ``ValueError`` if one of these packages is missing; the ``extras`` of jattn install them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{section}: {package} is not installed; pip install 'jattn[{extras}]'")


def check_claim(claim: Claim, known: Sequence[str], one_model: bool = True) -> None:
    """Raises ``ValueError`` for a claim that cannot be measured, or that needs several seeds of ``one_model``."""
    if claim.metric not in known:
        raise ValueError(f"claims.{claim.name}.metric: expected one of {list(known)}, got {claim.metric!r}")
    if one_model and claim.needed != 1:
        raise ValueError(f"claims.{claim.name}.needed: expected 1, because there is one model, got {claim.needed}")


def num_twins(config: interop.Config) -> int:
    """The number of twins that have ``NULL_HEADS`` in total."""
    return math.ceil(NULL_HEADS / (config.num_layers * config.num_heads))


def twins(config: interop.Config) -> Iterator[interop.Transformer]:
    """Models of the same sizes, with random parameters."""
    return (interop.Transformer(config, rngs=nnx.Rngs(seed)) for seed in range(num_twins(config)))


def statistics_of(model: Model) -> Callable[[Array, Array, Sequence[str]], dict[str, Array]]:
    """A compiled function of ``tokens [B,T]``, the tokens of patterns and names of statistics, which are ``[L,N]``."""

    def statistics(state: nnx.State, tokens: Array, of: Array, names: tuple[str, ...]) -> dict[str, Array]:
        request = {"names": names, "tokens": of}
        layers = heads.collect(model.sown(state, tokens, sow_statistics=request), "attention_statistics")
        return head_scores.of_layers(layers, names)

    run = jax.jit(statistics, static_argnums=3)
    return lambda tokens, of, names: run(model.state, tokens, of, tuple(names))


def output_norms(model: Model, tokens: Array) -> Array:
    """``[L,N]``: the mean length of what each head adds to the residual stream."""

    @jax.jit
    def norms(state: nnx.State) -> Array:
        out = model.whole(state).layers.attention.out.kernel[...]
        z = jnp.stack([layer["z"] for layer in heads.collect(model.sown(state, tokens, sow_heads=True))])
        gram = jnp.einsum("lndm,lnem->lnde", out, out)
        return jnp.sqrt(jnp.einsum("lbtnd,lnde,lbtne->lbtn", z, gram, z)).mean((1, 2))

    return norms(model.state)


Scores = Mapping[str, np.ndarray]  # name -> [L,N]


def roles(
    model: Scores,
    twins: Sequence[Scores],
    names: Sequence[str],
    shuffled: Sequence[Scores] = (),
    baseline: Scores | None = None,
) -> heads.Roles:
    """The role of every head ``[1,L,N]`` among ``names``, tested against the twins.

    Patterns of tokens are also tested against ``shuffled``, the model's scores with other sequences' tokens.
    """
    null = {name: [twin[name] for twin in twins] for name in names}
    for name in heads.OF_TOKENS if shuffled else ():
        null[name] += [one[name] for one in shuffled]
    null = {name: np.stack(scores) for name, scores in null.items()}
    return heads.roles({name: model[name][None] for name in names}, null, baseline=baseline)


def pair(twin: Mapping[str, Any], model: Mapping[str, Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    """``[1,2,...]``: the twin's and the model's."""
    return {name: np.stack([twin[name], model[name]])[None] for name in names}


def findings(config: Config, seconds: float, /, **measured: Any) -> Findings:
    """The findings of a model, with its twin as the untrained model. All other findings are empty by default."""
    fields: dict[str, Any] = {
        "name": config.name,
        "description": config.description,
        "config": dataclasses.asdict(config),
        "environment": devices.environment(seconds),
        "metric_steps": np.zeros(0, int),
        "look_steps": np.array([0, 1]),  # the twin, the model
        "example_steps": np.array([0, 1]),
        **{name: {} for name in ("metrics", "groups", "paths", "curves", "grids")},
    }
    return Findings(**fields | measured)
