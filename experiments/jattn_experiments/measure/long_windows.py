"""What the windows of a model's local layers do: results with other windows and no training, and with each head off."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn_experiments.measure.head_groups import one_off
from jattn_experiments.measure.long_losses import losses
from jattn_experiments.measure.long_metrics import LENGTH
from jattn_experiments.measure.long_needles import Part, Study, needles
from jattn_experiments.measure.saved_model import Model


def other_window(study: Study, number: int, window: int) -> Part:
    """The results of ``needles``, and ``loss []`` of the text, if local layers see ``window`` tokens."""
    whole = nnx.merge(study.model.graph, study.model.state)
    whole.config = dataclasses.replace(whole.config, window=window)
    changed = copy.copy(study)
    changed.use(Model.of(whole))
    tokens = jnp.asarray(study.beginning(study.text(number), min(LENGTH, max(study.options.lengths))))

    @jax.jit
    def loss(state: nnx.State) -> jax.Array:
        model = changed.model.whole(state)
        return losses(model, model(tokens[None])[0], tokens).mean()

    return needles(changed, number, study.options.ablated) | {"loss": np.asarray(loss(changed.model.state))}


def alone(study: Study, number: int) -> Part:
    """``found [L,N,D]``: the needles found with one head off while the question is read and answered."""
    length, shape, found = study.options.ablated, study.model.shape, []
    for prompt, cache in study.read(number, length):
        answers = [study.reader(length).answer(cache, prompt, gates).right.all() for gates in one_off(shape)]
        found.append(np.reshape(answers, shape))
    return {"found": np.stack(found, -1)}
