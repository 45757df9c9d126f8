"""Generates text with a causal ``Transformer``, reading prompts in chunks, with one cache for all layers."""

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, SupportsFloat, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn.cache import KVCache
from jattn.interop._transformer import Transformer
from jattn.positions import at_length

CHUNK = 128  # prompt tokens at once; the cache's capacity is a multiple of it, so that few shapes are compiled


def generate(model: Transformer, prompts: Iterable[Any], max_new_tokens: int, **options: Any) -> list[Any]:
    """Continues each prompt; returns a list of integer arrays of new tokens, without stop tokens.

    Args:
        model: a causal model.
        prompts: lists of tokens, of any nonzero lengths, such as ``tokenizer.encode("Once upon a time").ids``.
        max_new_tokens: the largest number of tokens to add to each prompt.
        options: keywords of :func:`~jattn.interop.stream`: ``temperature``, ``top_k``, ``top_p``, ``stop``,
            ``key`` and ``cache_dtype``.

    Raises:
        ValueError: a prompt is empty or has an unknown token; an option is out of range; the tokens exceed the model's
            positions; the model is not causal.
        TypeError: ``key`` is not a JAX key, or ``stop`` is not a sequence of integers.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> first, second = jattn.interop.generate(model, [[3, 1, 4], [2, 7]], 4)
        >>> likeliest = model.logits(model(jnp.array([[3, 1, 4]])))[0, -1].argmax()
        >>> first.shape, second.shape, bool(first[0] == likeliest)
        ((4,), (4,), True)
    """
    prompts = list(prompts)
    steps = list(stream(model, prompts, max_new_tokens, **options))
    rows = np.stack(steps, 1) if steps else np.zeros((len(prompts), 0), np.int32)
    return [row[row >= 0] for row in rows]


def stream(
    model: Transformer,
    prompts: Iterable[Any],
    max_new_tokens: int,
    *,
    temperature: SupportsFloat = 0.0,
    top_k: SupportsIndex | None = None,
    top_p: SupportsFloat | None = None,
    stop: Iterable[Any] = (),
    key: Any = None,
    cache_dtype: Any = None,
) -> Iterator[np.ndarray]:
    """Yields the next token of every prompt, integers ``[B]``, as soon as it is known; -1 for prompts that have ended.

    Rotary positions that depend on the length (LongRoPE, dynamic) use the length of the longest prompt plus
    ``max_new_tokens``, for all prompts and all tokens, so that one cache serves all.

    Args:
        model: a causal model.
        prompts: B lists of tokens, of any nonzero lengths.
        max_new_tokens: the largest number of tokens to add to each prompt.
        temperature: divides the logits before a token is sampled; 0 takes the likeliest token.
        top_k: sample from the k likeliest tokens.
        top_p: sample from the likeliest tokens that together have at least this probability, after ``top_k``
            (https://arxiv.org/abs/1904.09751, section 3.1).
        stop: tokens that end a text; they are not yielded.
        key: a JAX random key, needed unless ``temperature`` is 0.
        cache_dtype: the dtype of the cache; by default the dtype of the parameters.

    Raises:
        ValueError: there is no prompt; a prompt is empty or has an unknown token; an option is out of range; the tokens
            exceed the model's positions; the model is not causal.
        TypeError: ``key`` is not a JAX key, or ``stop`` is not a sequence of integers.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> drawn = jattn.interop.stream(model, [[3, 1, 4], [2, 7]], 4, temperature=0.8, key=jax.random.key(0))
        >>> [tokens.shape for tokens in drawn]  # each has one for each prompt
        [(2,), (2,), (2,), (2,)]
    """
    prompts = list(prompts)
    texts = [np.asarray(prompt) for prompt in prompts]
    vocabulary = model.config.vocabulary
    for i, prompt in enumerate(texts):
        if prompt.ndim != 1 or not prompt.size or not np.issubdtype(prompt.dtype, np.integer):
            raise ValueError(f"prompts must be lists of tokens, and none may be empty; prompt {i} is {prompts[i]!r}")
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise ValueError(
                f"prompts must hold tokens from 0 to {vocabulary - 1}, got {prompt.min()} to {prompt.max()}"
            )
    if not texts:
        raise ValueError("prompts must hold at least one list of tokens, got none")
    max_new_tokens = operator.index(max_new_tokens)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    temperature = float(temperature)
    if not temperature >= 0 or not np.isfinite(temperature):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    top_k = None if top_k is None else operator.index(top_k)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    top_p = None if top_p is None else float(top_p)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature={temperature} samples tokens: pass key= from jax.random.key, or temperature=0")
    if key is not None and not isinstance(key, jax.Array):
        raise TypeError(f"key must be a JAX random key, from jax.random.key, got {type(key).__name__}")
    try:
        ends = frozenset(operator.index(token) for token in stop)
    except TypeError:
        raise TypeError(f"stop must be a sequence of tokens, integers, got {stop!r}") from None
    if any(not 0 <= token < vocabulary for token in ends):
        raise ValueError(f"stop must hold tokens from 0 to {vocabulary - 1}, got {sorted(ends)}")
    cache, chunks = _prepare(model, texts, max_new_tokens, cache_dtype)
    top_p = None if top_p == 1 else top_p
    return _stream(model, cache, chunks, max_new_tokens, (temperature, top_k, top_p), ends, key)


def _prepare(
    model: Transformer, prompts: list[np.ndarray], new: int, dtype: Any
) -> tuple[KVCache, list[tuple[np.ndarray, np.ndarray]]]:
    """An empty cache, and the prompts in chunks ``[B,chunk]`` with a mask of the real tokens."""
    longest = max(len(prompt) for prompt in prompts)
    # Short prompts are padded to a power of two.
    chunk = min(CHUNK, 1 << (longest - 1).bit_length())
    if model.config.position is None:
        chunk = min(chunk, model.config.max_length)
    length = -(-longest // chunk) * chunk
    tokens, valid = np.zeros((len(prompts), length), np.int32), np.zeros((len(prompts), length), bool)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)], valid[i, : len(prompt)] = prompt, True
    needed = longest + max(new - 1, 0)  # the model does not read the last token that it writes
    capacity = -(-needed // CHUNK) * CHUNK
    if at_length(model.config.position, needed) is not model.config.position:
        capacity = needed  # the rotary positions take it for the length of the text
    if model.config.position is None:
        capacity = max(min(capacity, model.config.max_length), needed)
    cache = model.init_cache(len(prompts), capacity, dtype=dtype)
    starts = range(0, length, chunk)
    return cache, [(tokens[:, at : at + chunk], valid[:, at : at + chunk]) for at in starts]


def _stream(
    model: Transformer, cache: KVCache, chunks: list, new: int, sampling: tuple, stop: frozenset[int], key: Array | None
) -> Iterator[np.ndarray]:
    temperature, top_k, top_p = sampling
    graph, state = nnx.split(model)
    drawn = temperature > 0
    numbers = jnp.float32(temperature), jnp.float32(1.0 if top_p is None else top_p)
    keys = jax.random.split(jax.random.key(0) if key is None else key, max(new, 1))
    hidden = jnp.zeros((len(cache.length), model.config.model_dim), model.token_embed.embedding[...].dtype)
    advance = functools.partial(_advance, graph, drawn, top_k, top_p is not None)
    following = None
    for tokens, valid in chunks:
        following, hidden, cache = advance(
            state, cache, hidden, jnp.asarray(tokens), jnp.asarray(valid), keys[0], numbers
        )
    alive = np.ones(len(cache.length), bool)
    for i in range(new):
        tokens = np.asarray(following)
        alive &= ~np.isin(tokens, list(stop))
        if not alive.any():
            return
        yield np.where(alive, tokens, -1)
        if i + 1 < new:
            step = jnp.asarray(following)[:, None], jnp.asarray(alive)[:, None]
            following, hidden, cache = advance(state, cache, hidden, *step, keys[i + 1], numbers)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnames=("cache",))
def _advance(
    graph: Any, drawn: bool, top_k: int | None, by_mass: bool, state: Any, cache: KVCache, hidden: Array, tokens: Array,
    valid: Array, key: Array, numbers: tuple[Array, Array],
) -> tuple[Array, Array, KVCache]:  # fmt: skip
    """The next token ``[B]`` after a chunk ``[B,T]``, each sequence's last hidden state ``[B,M]``, and the cache."""
    model = nnx.merge(graph, state)
    states, cache = model(tokens, valid=valid, cache=cache)
    last = tokens.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)
    at_last = jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]
    hidden = jnp.where(valid.any(1)[:, None], at_last.astype(hidden.dtype), hidden)
    logits = model.logits(hidden).astype(jnp.float32)  # in bfloat16, JAX draws only the first of equal logits
    if not drawn:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), hidden, cache
    temperature, mass = numbers
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature  # the largest is 0: finite at any temperature
    if top_k is not None and top_k < logits.shape[-1]:
        _, kept = jax.lax.top_k(logits, top_k)  # exactly k tokens, even if logits are equal
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = jnp.full_like(logits, -jnp.inf).at[rows, kept].set(logits[rows, kept])
    if by_mass:
        ordered = -jnp.sort(-logits, axis=-1)
        shares = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(shares, axis=-1) - shares < mass  # the likelier tokens have less mass
        least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32), hidden, cache
