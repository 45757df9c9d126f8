"""Where heads look in long texts: sinks, what followed a token long ago, and the weights that the report shows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jattn import heads
from jattn_experiments import head_scores
from jattn_experiments.measure import long_metrics, saved_model, sequences
from jattn_experiments.measure.long_needles import Part, Study
from jattn_experiments.measure.long_reader import ROWS

SPANS = 60  # blocks of a pictured text: as many as fit on the page
COMPARED = 2048  # tokens on which the model and its twin are compared


def sinks(study: Study, number: int) -> Part:
    """``first`` and ``entropy [lengths,L,N]``: weight on the first token, and nats, of each length's last queries."""
    longest, first, entropy = max(study.options.lengths), [], []
    tokens = study.beginning(study.text(number), longest)
    spans = [(length - ROWS, length) for length in long_metrics.sink_lengths(study.options.lengths)]
    for weights in study.reader(longest).rows_at(tokens, spans):
        first.append(weights[..., 0].mean(-1))
        entropy.append(np.stack([-(one * np.log(np.maximum(one, 1e-30))).sum(-1).mean(-1) for one in weights]))
    return {"first": np.stack(first), "entropy": np.stack(entropy)}


def distances(study: Study, number: int, ordinary: np.ndarray) -> Part:
    """``score [distances,L,N]``: weight on what followed the same token, if random tokens repeat at a distance."""
    longest = max(study.options.lengths)
    reader, rng = study.reader(longest), np.random.default_rng([study.config.language.seed, number])
    tokens = np.concatenate([[study.texts.first], rng.choice(ordinary, longest - ROWS - 1)])
    cache, scores = reader.read(reader.empty(), tokens), []
    for distance in study.options.distances:
        again = tokens[len(tokens) - distance :][:ROWS]
        weights, rows = reader.rows(cache, again), np.arange(1, len(again))  # the first has no token before it
        scores.append(weights[:, :, rows, len(tokens) - distance + rows + 1].mean(-1))
    return {"score": np.stack(scores)}


def patterns(study: Study, data: sequences.Sequences) -> Part:
    """``induction [L,N]`` on random tokens that repeat, and every statistic ``[L,N]`` on text."""
    length = min(COMPARED, max(study.options.lengths))
    text = jnp.asarray(np.stack([study.beginning(text, length) for text in study.texts.judged[:2]]))
    statistics, tested = saved_model.statistics_of(study.model), jnp.asarray(data.tested)
    repeated = statistics(tested, tested, ("induction",))
    return jax.tree.map(np.asarray, statistics(text, text, head_scores.ALL) | repeated)


def pictured(study: Study, number: int) -> Part:
    """``weights [L,N,SPANS,SPANS]`` of a judged text, in blocks."""
    tokens = study.beginning(study.texts.judged[number], study.options.pictured)

    config = study.model.config

    @jax.jit
    def blocks(state: nnx.State, tokens: Array) -> Array:
        sown = study.model.sown(state, tokens, sow_heads=True)["layers"]["attention"]["attention_heads"][0]

        def of_layer(both: tuple[Array, Array], window: tuple[int, int] | None) -> Array:
            options = {"is_causal": True, "scale": config.scale, "local_window_size": window}
            options["score_mod"] = study.model.whole(state).layers.attention.score_mod
            return heads.coarse_weights(*both, SPANS, **options)[0]

        def either(entry: tuple[Array, Array, Array]) -> Array:
            *both, local = entry
            if config.window is None:
                return of_layer(both, None)
            windows = (functools.partial(of_layer, window=window) for window in (config.window_sides, None))
            return jax.lax.cond(local, *windows, both)

        return jax.lax.map(either, (sown["query"], sown["key"], jnp.asarray(config.is_local)))

    return {"weights": np.asarray(blocks(study.model.state, jnp.asarray(tokens[None])))}


def zoom(study: Study, number: int) -> Part:
    """Weights ``[L,N,SPANS,SPANS]`` among the ``places [SPANS]`` of the longest text that concern a needle.

    These are the first two tokens, the needle with its surroundings, and the question with its answer.
    """
    longest = max(study.options.lengths)
    prompt = study.prompts(number, longest)[study.options.depths // 2]
    around = prompt.start - 4
    spans = [(0, 2), (around, around + ROWS), (longest - (SPANS - ROWS - 2), longest)]
    places = np.concatenate([np.arange(*span) for span in spans])
    weights = [rows[..., places] for rows in study.reader(longest).rows_at(prompt.tokens, spans)]
    return {"weights": np.concatenate(weights, 2), "places": places, "tokens": prompt.tokens[places]}
