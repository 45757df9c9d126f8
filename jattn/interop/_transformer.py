"""Implements the Transformer for all families: one compiled layer of each kind, scanned over all layers."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike

from jattn import _shares as shares
from jattn import masks
from jattn._core.call import softmax_dtype
from jattn.cache import KVCache, init_cache, within_capacity
from jattn.interop._config import Config
from jattn.interop._per_layer import stack_options
from jattn.interop._products import dot_general
from jattn.interop._transformer_block import Block
from jattn.positions import at_length


class Transformer(nnx.Module):
    """A Transformer on ``jattn.nnx.MultiHeadAttention``, without dropout, for any family described by ``Config``.

    ``layers`` is one ``Block`` that holds the parameters of all layers, each with a leading axis ``[L]``. A call scans
    over them, so it compiles a single layer, or two if only some layers have a window (``Config.local``). Values sown
    by the layers also have the leading axis.

    Args:
        config: the sizes and the kind, such as ``model.config`` of another model.
        rngs: the random keys of the float32 parameters; :func:`~jattn.interop.load` loads published parameters.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> model.logits(model(jnp.array([[3, 1, 4]]))).shape  # [B,T,vocabulary]
        (1, 3, 11)
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        embed = functools.partial(nnx.Embed, features=config.model_dim, rngs=rngs)
        self.token_embed = embed(config.vocabulary)
        self.position_embed = embed(config.max_length) if config.position is None else nnx.data(None)
        self.type_embed = embed(config.token_types) if config.token_types else nnx.data(None)
        at_the_end = config.norm_first or config.norm_outputs
        self.embed_norm = nnx.data(None) if at_the_end else config.new_norm(rngs)
        blocks = [nnx.split(Block(config, rngs=rngs)) for _ in range(config.num_layers)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(state for _, state in blocks))
        self.layers = nnx.merge(blocks[0][0], stacked)
        self.last_norm = config.new_norm(rngs) if at_the_end else nnx.data(None)
        self.pooler = nnx.Linear(config.model_dim, config.model_dim, rngs=rngs) if config.pooler else nnx.data(None)
        self.head = nnx.data(None)
        if config.head:
            sizes = config.model_dim, config.vocabulary
            self.head = nnx.Linear(*sizes, use_bias=False, dot_general=dot_general, rngs=rngs)

    def __call__(
        self,
        tokens: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        per_layer: Sequence[Mapping[str, Any]] | None = None,
        cache: KVCache | None = None,
        **attention: Any,
    ) -> Any:
        """The final hidden states ``[B,T,M]`` of ``tokens``, integers ``[B,T]``.

        Args:
            tokens: ids from 0 to ``config.vocabulary - 1``. An id, type or learned position outside its table gives
                NaN. If positions are learned, T is at most ``config.max_length``.
            valid: bool ``[B,T]``: False for padding, on either side. No query sees padding, and padding takes no
                learned position. Its ids may be any integers: outside a table, the nearest row is read.
            token_types: integers ``[B,T]``, BERT's segments; 0 by default.
            per_layer: a list with the options of each layer's attention call, such as ``head_gate``
                (``jattn.heads.ablate``). A layer without ``head_gate``, ``head_fill`` or ``patch`` gets gates of 1,
                which change nothing. Give other options to every layer or to none, with the same functions and arrays
                of the same shape.
            cache: a ``KVCache`` of the tokens so far (``init_cache``). The result is then ``(hidden states, cache)``,
                and tokens that are not ``valid`` take no slot.
            attention: options of every layer's attention call, such as ``sow_weights``; ``score_mod``, ``scale`` and
                ``local_window_size`` replace the model's own. Let ``input_positions`` restart in each document of a
                packed row (``mask=Segments(ids)``); masks see slots. ``sow_parts`` sows ``residual_parts`` of every
                layer, and ``last_stream``, the input of the last norm.

        Raises:
            ValueError: ``tokens`` are not integers ``[B,T]`` or are too long for the model; ``per_layer`` does not have
                one entry per layer, or layers differ in more than gates; the cache belongs to another model.
            TypeError: ``decode`` is given, which would keep a cache in each layer.
        """
        tokens, config = jnp.asarray(tokens), self.config
        limit = config.max_length if config.position is None and cache is None else None
        integers = tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer)
        if not integers or (limit is not None and tokens.shape[1] > limit):
            within = "" if limit is None else f" with T at most {limit}"
            raise ValueError(
                f"tokens must be integers [B, T]{within}, got {tokens.dtype} of shape {list(tokens.shape)}"
            )
        if attention.get("decode"):
            raise TypeError(
                "decode: a model has one cache for all layers; pass cache=model.init_cache(batch, capacity)"
            )
        valid = None if valid is None else jnp.asarray(valid, bool)
        if valid is not None and valid.shape != tokens.shape:
            raise ValueError(f"valid must be bools [B, T] = {list(tokens.shape)}, got shape {list(valid.shape)}")
        self._check_cache(cache, tokens, valid)
        x = self._embedded(tokens, valid, token_types, cache, attention.get("input_positions"))
        if config.position is None:
            attention.pop("input_positions", None)
        x, cache = self._through_layers(x, {"is_causal": config.causal, **attention}, per_layer, cache, valid)
        if attention.get("sow_parts"):
            self.sow(nnx.Intermediate, "last_stream", x)
        x = x if self.last_norm is None else self.last_norm(x)
        return x if cache is None else (x, cache)

    def init_cache(
        self,
        batch_size: int,
        capacity: int,
        *,
        dtype: Any = None,
        rolling: bool = False,
        first_tokens: int = 0,
        sharding: NamedSharding | None = None,
    ) -> KVCache:
        """An empty cache for all layers: a ``KVCache`` with keys and values ``[L,B,C,K,H]``.

        Args:
            batch_size: B, the number of sequences.
            capacity: C, the number of tokens that fit.
            dtype: the dtype of the cache; by default the dtype of the parameters.
            rolling: keep the last ``capacity`` tokens and drop older ones.
            first_tokens: the number of first tokens that a rolling cache always keeps.
            sharding: the ``NamedSharding`` of B, C and K of one layer.

        Raises:
            ValueError: the model is not causal; the capacity exceeds its positions; a rolling cache is smaller than the
                model's window plus the first tokens, or the model has learned positions.
        """
        config = self.config
        if rolling and config.position is None:
            raise ValueError(f"rolling: a {config.family} has only {config.max_length} learned positions")
        if rolling and config.window is not None and capacity - first_tokens < config.window:
            also = f" and {first_tokens} first tokens" if first_tokens else ""
            raise ValueError(
                f"capacity must be at least {config.window + first_tokens}, the model's window{also}, got {capacity}"
            )
        by_length = any(at_length(one, 1) is not one for one in (config.position, config.local_position))
        if rolling and not first_tokens and by_length:
            raise ValueError(f"rolling: the rotary positions of this {config.family} depend on the length of the text")
        if not config.causal:
            raise ValueError(f"a {config.family} is not causal: tokens see later tokens, so it cannot use a cache")
        if config.position is None and capacity > config.max_length:
            raise ValueError(f"capacity must be at most {config.max_length}, the model's positions, got {capacity}")
        dtype = self.token_embed.embedding[...].dtype if dtype is None else dtype
        heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
        sizes = batch_size, capacity, heads, config.size_of_head
        one = init_cache(*sizes, dtype=dtype, rolling=rolling, first_tokens=first_tokens, sharding=sharding)
        of_all = None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        key, value = (shares.zeros((config.num_layers, *x.shape), x.dtype, of_all) for x in (one.key, one.value))
        return dataclasses.replace(one, key=key, value=value)

    def embed(self, tokens: Array) -> Array:
        """The input ``[B,T,M]`` of the first layer for ``tokens [B,T]``, without padding or a cache."""
        return self._embedded(tokens, None, None, None, None)

    def unembed(self, x: Array) -> Array:
        """The logits ``[B,T,vocabulary]`` of the last layer's output ``x [B,T,M]``: the last norm, then ``logits``."""
        return self.logits(x if self.last_norm is None else self.last_norm(x))

    def logits(self, hidden: Array) -> Array:
        """The logits ``[..., vocabulary]`` of ``hidden [..., M]``: ``output_embedding``, then the soft cap.

        Raises ``ValueError`` if the model has no output embedding.
        """
        if self.head is not None:
            logits = self.head(hidden)
        else:
            embedding = self.output_embedding()
            dtype = jnp.result_type(hidden, embedding)
            axes = (((hidden.ndim - 1,), (1,)), ((), ()))
            logits = dot_general(hidden.astype(dtype), embedding.astype(dtype), axes)
        cap = self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def output_embedding(self) -> Array:
        """``[vocabulary, M]``, one row per logit; the input embedding if the config ties the two.

        Raises:
            ValueError: the checkpoint has no output embedding, and its config does not tie it to the input embedding.
        """
        if self.head is not None:
            return self.head.kernel[...].T
        if not self.config.tied:
            raise ValueError(
                "this checkpoint has no output embedding (lm_head), and its config does not tie the embeddings"
            )
        return self.token_embed.embedding[...]

    def pooled(self, hidden: Array) -> Array:
        """BERT's pooler, ``tanh(W x + b)`` on the first token of ``hidden [B,T,M]``: ``[B,M]``.

        Raises:
            ValueError: the checkpoint has no pooler.
        """
        if self.pooler is None:
            raise ValueError("this checkpoint has no pooler")
        return jnp.tanh(self.pooler(hidden[:, 0]))

    def layer(self, index: int) -> Block:
        """A copy of layer ``index``, with its rotary positions but without its window: pass the window in the call."""
        graph, state = nnx.split(self.layers)
        index = range(self.config.num_layers)[index]
        block = nnx.merge(graph, jax.tree.map(lambda x: x[index], state))
        if self.config.is_local[index] and self.config.local_position is not None:
            block.attention.position = self.config.local_position
        return block

    def _embedded(
        self, tokens: Array, valid: Array | None, token_types: ArrayLike | None, cache: Any, positions: ArrayLike | None
    ) -> Array:
        x = _rows(self.token_embed, tokens, valid)
        if self.config.embed_scale is not None:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        if self.position_embed is not None:
            T = tokens.shape[1]
            if positions is not None:
                positions = jnp.asarray(positions)
            elif cache is not None:
                positions = jnp.maximum(cache.next_positions(T, valid), 0)
            else:
                positions = jnp.arange(T) if valid is None else jnp.maximum(jnp.cumsum(valid, 1) - 1, 0)
            positions = positions.reshape((1,) * (2 - positions.ndim) + positions.shape)
            x = x + _rows(self.position_embed, positions, valid)
        if self.type_embed is not None:
            types = jnp.zeros_like(tokens) if token_types is None else jnp.asarray(token_types)
            x = x + _rows(self.type_embed, types, valid)
        return x if self.embed_norm is None else self.embed_norm(x)

    def _through_layers(
        self, x: Array, options: Mapping[str, Any], per_layer: Any, cache: KVCache | None, valid: Array | None
    ) -> tuple[Array, KVCache | None]:
        """Scans over the layers. The cache of all layers is carried from step to step, so XLA writes it in place."""
        config, L = self.config, self.config.num_layers
        arrays, options_of = stack_options(per_layer, L, options)
        graph, sown_before, state = nnx.split(self.layers, nnx.Intermediate, ...)

        def one_layer(carry: Any, entry: Any) -> tuple[Any, Any]:
            (x, held), (i, local, parameters, option_arrays) = carry, entry

            def of_kind(local: bool) -> tuple[Array, tuple, Any]:
                # A layer must not see earlier sown values. Sowing changes it in place, so each call has its own copy.
                nothing = jax.tree.map(_emptied, sown_before, is_leaf=lambda x: isinstance(x, nnx.Variable))
                block = nnx.merge(graph, nothing, parameters)
                if local and config.local_position is not None:
                    block.attention.position = config.local_position
                call = {**options, **options_of(option_arrays)}
                if cache is None:
                    y, new = block(x, **layer_options(config, call, local, valid)), held
                else:
                    call = layer_options(config, call, local)
                    of_layer = dataclasses.replace(cache, key=held[0], value=held[1], layer=i)
                    y, new = block(x, **call, cache=of_layer, valid=valid)
                    new = new.key, new.value
                # Parameters or a cache with more bits do not change the stream's dtype.
                return y.astype(x.dtype), new, nnx.state(block, nnx.Intermediate)

            kinds = set(config.is_local)
            # Two programs, so that kernels know the window in each and skip empty blocks.
            by_kind = [functools.partial(of_kind, kind) for kind in (True, False)]
            y, held, sown = of_kind(kinds.pop()) if len(kinds) == 1 else jax.lax.cond(local, *by_kind)
            return (y, held), sown

        held = () if cache is None else (cache.key, cache.value)
        entries = jnp.arange(L), np.array(config.is_local), state, arrays
        (x, held), sown = jax.lax.scan(one_layer, (x, held), entries)
        if jax.tree.leaves(sown):
            nnx.update(self.layers, sown)
        if cache is None:
            return x, None
        key, value = held
        length = _length_after(cache, x.shape[1], valid)
        return x, dataclasses.replace(cache, key=key, value=value, length=length)

    def _check_cache(self, cache: KVCache | None, tokens: Array, valid: Array | None) -> None:
        """Raises ``ValueError`` if the cache is full or from another model or batch; under ``jit``, see ``append``."""
        if cache is None:
            return
        L, B = self.config.num_layers, tokens.shape[0]
        if cache.key.ndim != 5 or cache.key.shape[:2] != (L, B):
            raise ValueError(
                f"cache must hold keys [L, B, C, K, H] of {L} layers and {B} sequences, from init_cache of this model, "
                f"got {list(cache.key.shape)}"
            )
        if not cache.rolling:
            within_capacity(_length_after(cache, tokens.shape[1], valid), cache.capacity)


def _length_after(cache: KVCache, tokens: int, valid: Array | None) -> Any:
    """``cache.length`` after a chunk."""
    return cache.length + (tokens if valid is None else valid.sum(1).astype(cache.length.dtype))


def _emptied(variable: Any) -> Any:
    """A variable of ``Module.sow``, or of ``nnx.capture``, without the sown values."""
    return variable.replace({} if isinstance(variable.get_value(), dict) else ())


def _rows(embed: nnx.Embed, indices: Array, valid: Array | None) -> Array:
    """The rows of a table in its own dtype; the module's call would cast to the module's dtype.

    NaN for an index outside the table, at either end; for padding the nearest row, so that gradients stay finite.
    Rows are looked up in at least float32, so that the gradient of a frequent row is a sum in float32: in bfloat16, a
    sum of ones would stop at 256.
    """
    stored = embed.embedding[...]
    table = stored.astype(softmax_dtype(stored))
    if valid is not None:
        last = min(table.shape[0] - 1, jnp.iinfo(indices.dtype).max)
        indices = jnp.where(valid, indices, indices.clip(0, last))
    rows = table.at[indices].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return rows.astype(stored.dtype)


def layer_options(config: Config, call: Mapping[str, Any], local: bool, valid: Array | None = None) -> dict[str, Any]:
    """The options of a layer's attention ``call``, with its window, and with padding in the mask."""
    window = {"local_window_size": config.window_sides} if local and config.window is not None else {}
    options = {**window, **call}
    if valid is not None:
        options["mask"] = mask_padding(valid, call.get("mask"))
    return options


def mask_padding(valid: Array, mask: Any) -> Any:
    """``mask``, if any, joined with one that shows only the valid keys, ``valid [B,T]``."""
    if callable(mask):
        return masks.and_masks(mask, masks.Dense(valid[:, None, None]))
    valid_keys = valid[:, None, None, :]
    if mask is None:
        return valid_keys
    mask = jnp.asarray(mask, bool)
    return valid_keys & mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
