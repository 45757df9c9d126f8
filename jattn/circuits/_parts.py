"""Splits a model into the ends of its edges: the readers' inputs, the writers' outputs, and the layers in order."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn import masks
from jattn._core.call import softmax_dtype
from jattn._mods.pytree import pytree_dataclass, static_field
from jattn.circuits._graph import Graph, graph_of
from jattn.interop import Block, Transformer
from jattn.interop._transformer import mask_padding
from jattn.multi_head import attend_heads
from jattn.nnx import variables_read
from jattn.reports._language_model import Whole, parts_of


class CircuitModel(Protocol):
    """The interface that ``jattn.circuits`` requires of your own model, an ``nnx.Module`` without dropout.

    The model must compute ``unembed(x)``, where x begins as ``embed(tokens)`` and each layer adds
    ``attention(attention_input(x), **attention_options)``, and then ``mlp_added(x)``.

    - ``embed(tokens [B,T]) -> [B,T,M]``, and ``unembed(x [B,T,M]) -> logits [B,T,V]``, including the last norm.
    - ``layers``: each has ``attention``, a ``jattn.nnx.MultiHeadAttention``; ``attention_input(x)``, such as a norm;
      and ``mlp_added(x)``, such as ``mlp(norm(x))``, or ``jnp.zeros_like(x)`` without an MLP. Both functions map
      ``[...,T,M]`` to ``[...,T,M]``.
    - A layer may have ``attention_options``, the keywords of its attention call (``mask``, ``is_causal``, ``scale``,
      ``local_window_size``): ``nnx.static`` of a dict, or ``nnx.data`` if it contains arrays. A layer may also have
      ``parallel``, which is True if attention and MLP read the same x.

    Example:
        >>> from flax import nnx
        >>> class Layer(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.attention = jattn.nnx.MultiHeadAttention(2, 8, rngs=rngs)
        ...         self.attention_options = nnx.static({"is_causal": True})
        ...     def attention_input(self, x):
        ...         return x
        ...     def mlp_added(self, x):
        ...         return jnp.zeros_like(x)
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.embed, self.unembed = nnx.Embed(11, 8, rngs=rngs), nnx.Linear(8, 11, rngs=rngs)
        ...         self.layers = nnx.List([Layer(rngs), Layer(rngs)])
        >>> jattn.circuits.graph_of(Model(nnx.Rngs(0))).num_layers
        2
    """

    @property
    def layers(self) -> Any:
        """The layers, from the first to the last."""
        ...

    def embed(self, tokens: Array) -> Array:
        """The input of the first layer, ``[B,T,M]``, for ``tokens [B,T]``."""
        ...

    def unembed(self, x: Array) -> Array:
        """The logits ``[B,T,V]`` of the last layer's output ``x [B,T,M]``."""
        ...


@pytree_dataclass
class Parts:
    """A model as a pytree: its first and last steps, and its layers, stacked if they have the same structure."""

    whole: Whole
    graph: Graph = static_field()
    graphs: tuple[Any, ...] = static_field()  # one for each kind of layer
    masks: tuple[Any, ...] = static_field()  # one for each kind; None: the mask in the layer's own options
    kinds: tuple[int, ...] = static_field()  # the kind of each layer
    states: Any  # for all layers, with a leading axis or as a tuple
    stacked: bool = static_field()

    @classmethod
    def of(cls, model: Any) -> "Parts":
        """Splits a model accepted by ``graph_of``."""
        graph = graph_of(model)
        whole, layers = parts_of(model)
        if isinstance(model, Transformer):
            local = model.config.is_local
            kinds = [local.index(kind) for kind in sorted(set(local))]
            first = [layers[i] for i in kinds]
            of_each = tuple(sorted(set(local)).index(kind) for kind in local)
            return cls(
                whole,
                graph,
                tuple(x.graph for x in first),
                tuple(x.mask for x in first),
                of_each,
                layers[0].state,
                True,
            )
        graphs, states = tuple(x.graph for x in layers), tuple(x.state for x in layers)
        return cls(whole, graph, graphs, (None,) * len(layers), tuple(range(len(layers))), states, False)

    def embed(self, tokens: Array, valid: Array | None) -> Array:
        """The embedding ``[T,M]`` of one sequence, in at least float32."""
        model = self.whole.model
        if isinstance(model, Transformer):
            config = model.config
            if config.position is None and len(tokens) > config.max_length:
                raise ValueError(f"tokens: a {config.family} has {config.max_length} positions, got T = {len(tokens)}")
            x = model._embedded(tokens[None], None if valid is None else valid[None], None, None, None)[0]
        else:
            x = model.embed(tokens[None])[0]
        return x.astype(softmax_dtype(x))

    def unembed(self, x: Array) -> Array:
        """The logits ``[T,V]`` of one sequence."""
        return self.whole.model.unembed(x[None])[0]

    def scan(self, step: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
        """Scans ``step(layer, carry, x) -> (carry, y)`` over layers; ``xs`` and all y have a leading axis ``[L]``."""

        def of_kind(kind: int) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
            def run(state: Any, carry: Any, x: Any) -> tuple[Any, Any]:
                return step(Layer(nnx.merge(self.graphs[kind], state), self.masks[kind]), carry, x)

            return run

        kinds = [of_kind(kind) for kind in range(len(self.graphs))]
        if self.stacked:

            def body(carry: Any, entry: Any) -> tuple[Any, Any]:
                state, kind, x = entry
                return kinds[0](state, carry, x) if len(kinds) == 1 else jax.lax.switch(kind, kinds, state, carry, x)

            return jax.lax.scan(body, carry, (self.states, np.array(self.kinds, np.int32), xs))
        results = []
        for i, state in enumerate(self.states):
            carry, y = kinds[i](state, carry, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
            results.append(y)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


class Layer(NamedTuple):
    """A layer of a model, within a compiled function."""

    module: Any
    mask: masks.Mask | None

    def attention_input(self, x: Array) -> Array:
        """The input of the projections, from the stream ``[...,T,M]``."""
        if not isinstance(self.module, Block):
            return self.module.attention_input(x)
        norm = self.module.attention_norm
        return x if norm is None else norm(x)

    def projected(self, inputs: Array) -> list[Array]:
        """Query, key and value ``[T,N|K,H]`` from ``inputs [T,M]``, or ``[N+2K,T,M]`` with separate inputs."""
        projections = self._projections()
        if inputs.ndim == 2:
            return [projection(inputs) for projection in projections]
        N, K = self.module.attention.num_heads, self.module.attention.num_kv_heads
        parts = inputs[:N], inputs[N : N + K], inputs[N + K :]
        return [_projected(projection, x) for projection, x in zip(projections, parts, strict=True)]

    def back_to_inputs(self, cotangents: list[Array]) -> Array:
        """``[N+2K,T,M]``: derivatives with respect to each input of ``projected``, given those for its results."""
        return jnp.concatenate([
            jnp.einsum("tnh,mnh->ntm", g, projection.kernel[...].astype(g.dtype), precision=projection.precision)
            for projection, g in zip(self._projections(), cotangents, strict=True)
        ])  # fmt: skip

    def _projections(self) -> list[nnx.LinearGeneral]:
        module = self.module.attention
        return [module.query, module.key, module.value]

    def attention(self, x: Array, valid: Array | None, nudges: list[Array] | None = None) -> tuple[Array, Array]:
        """What each head adds to the stream, ``[N,T,M]``, and the sum over heads plus the bias, ``[T,M]``.

        ``x``: the stream that each query, key and value reads, ``[N+2K,T,M]``, or ``[T,M]`` for all. ``nudges`` are
        added to query, key and value. An output norm divides each head's part by the same factor as the sum.
        """
        module = self.module.attention
        query, key, value = self.projected(self.attention_input(x))
        if nudges is not None:
            query, key, value = (x + nudge for x, nudge in zip((query, key, value), nudges, strict=True))
        if module.query_ln is not None:
            query, key = module.query_ln(query), module.key_ln(key)
        z = attend_heads(query[None], key[None], value[None], **self._options(valid))[0]
        kernel = module.out.kernel[...].astype(z.dtype)
        each, added = jnp.einsum("tnd,ndm->ntm", z, kernel, precision=module.precision), module.out(z)
        out_norm: Any = self.module.attention_out_norm if isinstance(self.module, Block) else None
        if out_norm is not None:
            factor = jax.lax.rsqrt(jnp.square(added).mean(-1, keepdims=True) + out_norm.epsilon)
            scale = out_norm.scale[...].astype(each.dtype)[None, None]
            each, added = each * factor[None] * scale, out_norm(added)
        return each, added

    def bias(self) -> Array:
        """What attention adds at every token when no head writes: ``[M]``."""
        out = self.module.attention.out
        return jnp.zeros(out.kernel.shape[-1], out.kernel.dtype) if out.bias is None else out.bias[...]

    def mlp(self, x: Array) -> Array:
        """What the MLP adds, ``[T,M]``, given its input."""
        if not isinstance(self.module, Block):
            return self.module.mlp_added(x)
        module = self.module
        y = module.mlp(x if module.mlp_norm is None else module.mlp_norm(x))
        return y if module.mlp_out_norm is None else module.mlp_out_norm(y)

    def _options(self, valid: Array | None) -> dict[str, Any]:
        module = self.module.attention
        options: dict[str, Any] = {name: getattr(module, name) for name in ("position", "precision", "implementation")}
        options["score_mod"] = variables_read(module.score_mod)
        if module.sinks is not None:
            options["sinks"] = module.sinks[...]
        if isinstance(self.module, Block):
            options |= {"mask": self.mask, "scale": self.module.scale}
        else:
            options |= getattr(self.module, "attention_options", {})
        if valid is not None:
            options["mask"] = mask_padding(valid[None], options.get("mask"))
        return options


def _projected(projection: nnx.LinearGeneral, inputs: Array) -> Array:
    """``[N,T,M] -> [T,N,H]``: projects a separate input for each head."""
    kernel = projection.kernel[...].astype(inputs.dtype)
    result = jnp.einsum("ntm,mnh->tnh", inputs, kernel, precision=projection.precision)
    return result if projection.bias is None else result + projection.bias[...].astype(inputs.dtype)[None]
