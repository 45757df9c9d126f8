"""The loss of ordinary text, with heads switched off and with tokens hidden."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jattn import KVCache, interop, masks
from jattn_experiments.measure import sequences
from jattn_experiments.measure.long_needles import Part, Study

PLACE = 512  # tokens whose logits are computed at once, fewer for a large vocabulary
LOGITS = 2**25  # at most this many of them
LOSS = 512  # tokens of a text whose loss is measured


class Judge:
    """Other results with heads off: the loss of ordinary text in nats, and short answers without a text.

    The loss is measured at tokens that continue an earlier bigram, which can be copied, and at all others.
    """

    def __init__(self, study: Study):
        texts, self.model = study.texts, study.model
        self.texts = np.stack([study.beginning(text, 1 + LOSS) for text in texts.judged])
        self.last, self.right = (np.array(each) for each in zip(*((len(t), r) for t, r in texts.facts), strict=True))
        self.starts = np.zeros((len(texts.facts), 1 + self.last.max()), np.int32)
        for row, (tokens, _) in zip(self.starts, texts.facts, strict=True):
            row[: 1 + len(tokens)] = [texts.first, *tokens]
        copied = sequences.continue_bigrams(self.texts)
        self.places = np.stack([copied, ~copied, np.ones_like(copied)])
        self._of = jax.jit(self._of_state)

    def __call__(self, gates: np.ndarray) -> Part:
        """``loss [3]``: at tokens that continue a bigram, at others, at all; ``facts [F]``: which answers are right."""
        return jax.tree.map(np.asarray, self._of(self.model.state, jnp.asarray(gates, jnp.float32)))

    def _of_state(self, state: nnx.State, gates: Array) -> dict[str, Array]:
        model, per_layer = self.model.whole(state), [{"head_gate": gate} for gate in gates]

        def one_text(tokens: Array) -> Array:
            return losses(model, model(tokens[None], per_layer=per_layer)[0], tokens)

        of_tokens = jax.lax.map(one_text, self.texts)
        ends = model(self.starts, per_layer=per_layer)[np.arange(len(self.last)), self.last]
        return {
            "loss": jnp.stack([of_tokens.mean(where=place) for place in self.places]),
            "facts": model.logits(ends).argmax(-1) == self.right,
        }


def losses(model: interop.Transformer, hidden: Array, tokens: Array) -> Array:
    """``[T-1]``: the loss at each next token, for hidden states ``[T,M]``, in parts because all logits do not fit."""
    at_once = max(min(PLACE, LOGITS // model.config.vocabulary), 1)
    padding = -(len(tokens) - 1) % at_once
    states = jnp.pad(hidden[:-1], ((0, padding), (0, 0))).reshape(-1, at_once, hidden.shape[-1])

    def some(both: tuple[Array, Array]) -> Array:
        states, right = both
        logits = model.logits(states).astype(jnp.float32)
        return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, right[:, None], 1)[:, 0]

    right = jnp.pad(tokens[1:], (0, padding)).reshape(-1, at_once)
    return jax.lax.map(some, (states, right)).ravel()[: len(tokens) - 1]


def streams(study: Study, number: int) -> Part:
    """``loss [4,T-1]``: the loss of each next token, for each of ``long_metrics.STREAMS``.

    The window is a rolling cache. The variants with four first tokens and without the first are masks, so positions
    do not change.
    """
    model, window = study.model, study.options.window
    tokens = study.beginning(study.text(number), study.options.streamed)

    @jax.jit
    def masked(state: nnx.State, mask: masks.Mask) -> Array:
        whole = model.whole(state)
        return losses(whole, whole(tokens[None], mask=mask)[0], jnp.asarray(tokens))

    @jax.jit
    def rolled(state: nnx.State) -> Array:
        whole = model.whole(state)
        size = min(window, len(tokens))
        chunks = jnp.asarray(tokens[: len(tokens) // size * size].reshape(-1, 1, size))

        def chunk(cache: KVCache, tokens: Array) -> tuple[KVCache, Array]:
            hidden, cache = whole(tokens, cache=cache)
            return cache, hidden[0]

        _, hidden = jax.lax.scan(chunk, whole.init_cache(1, size, rolling=True), chunks)
        return losses(whole, hidden.reshape(-1, hidden.shape[-1]), chunks.ravel())

    sinks = masks.Causal() & (masks.SlidingWindow(window - 1) | masks.Prefix(4))
    each = [masked(model.state, masks.Causal()), rolled(model.state), masked(model.state, sinks)]
    each.append(masked(model.state, masks.Causal() & ~masks.Prefix(1)))
    return {"loss": np.stack([np.asarray(loss)[: len(each[1])] for loss in each])}
