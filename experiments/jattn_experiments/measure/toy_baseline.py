"""The toy model to compare a language model with: trained here and measured in the same way."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jattn_experiments.config import Config, LanguageModel
from jattn_experiments.measure import claims, evaluate, induction_paths
from jattn_experiments.measure.language_metrics import GROUPS, PATTERNS, Measure, score_of_strongest
from jattn_experiments.model import Block
from jattn_experiments.train import TEST_DATA, Trained, train


def measure(config: Config, out: Path) -> dict[str, Measure]:
    """The metrics of the toy model, one number per seed."""
    itself = dataclasses.replace(config, name=f"{config.name}-toy", language=LanguageModel(), claims=[])
    trained = train(itself, out)
    setup = trained.setup
    both = evaluate.measure(setup, trained.params, trained.untrained)
    metrics = {"mean_accuracy": Measure(*(one.accuracy.mean(-1).tolist() for one in both))}
    for name in PATTERNS:
        metrics[claims.BEST + name] = Measure(*(one.scores[name].max((1, 2)).tolist() for one in both))
    scores = {name: np.asarray(both[0].scores[name]) for name in GROUPS}  # [R,L,N]
    of_seeds = ({name: of[seed] for name, of in scores.items()} for seed in range(len(setup.seeds)))
    routes = [_paths(trained, seed, of) for seed, of in enumerate(of_seeds)]
    for into in induction_paths.INTO:
        metrics[f"kept/{into}"] = Measure([float(one[f"{into} groups"][0] / one["clean"]) for one in routes])
    both = zip(routes, scores["previous_token"], strict=True)
    return metrics | {"strongest_path": Measure([score_of_strongest(one["key"], before) for one, before in both])}


def _paths(trained: Trained, seed: int, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The paths from one seed's previous-token heads into its induction heads, which have half of the best score.

    Heads of the first layer are no readers, because no head comes before them; ``scores [L,N]``.
    """
    setup, L = trained.setup, len(scores["induction"])
    above = scores["induction"] * (np.arange(L) > 0)[:, None]
    readers, senders = (
        [(int(i), int(j)) for i, j in np.argwhere(of >= of.max() / 2)] for of in (above, scores["previous_token"])
    )
    params = jax.tree.map(lambda leaf: leaf[seed], trained.params)["params"]
    tokens = setup.task.sample(jax.random.fold_in(setup.keys[seed], TEST_DATA), 64).tokens
    options: dict[str, Any] = {"sow_heads": True, "capture_intermediates": True, "mutable": ["intermediates"]}
    _, kept = setup.model.apply({"params": params}, tokens, **options)
    layers = [kept["intermediates"][f"layer_{i}"] for i in range(L)]
    outputs = [layer["__call__"][0] for layer in layers]
    block = Block(setup.config.model)

    def run(params: Any, stream: Array, **options: Any) -> Mapping[str, Any]:
        kept = block.apply({"params": params}, stream, False, options, mutable=["intermediates"])[1]
        return {name: sown[0] for name, sown in kept["intermediates"]["attention"].items()}

    return induction_paths.scores(
        run,
        layers=lambda i: params[f"layer_{i}"],
        streams=[jnp.zeros_like(outputs[0]), *outputs[:-1]],
        sown=[layer["attention"]["attention_heads"][0] for layer in layers],
        kernels=[params[f"layer_{i}"]["attention"]["out"]["kernel"] for i in range(L)],
        readers=readers,
        groups=[senders],
        tokens=tokens[..., 0],
    )
