"""Lists the edges of a model, each from a writer to the residual stream to a later reader."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import ArrayLike

from jattn.interop import Transformer
from jattn.nnx import MultiHeadAttention, dot_product_attention


@dataclasses.dataclass(frozen=True)
class Graph:
    """The W writers and R readers of a model, and which pairs of them are edges.

    Writers: ``embedding``, then in each layer the heads, such as ``head 3.2`` (layer 3, head 2), and ``mlp 3``.
    Readers: in each layer, ``query 3.2`` for every head, ``key 3.0`` and ``value 3.0`` for every key head, and
    ``mlp 3``; then ``logits``. An edge leads from a writer to a later reader. Arrays of edges are ``[R,W]``.

    Attributes:
        num_layers, num_heads, num_kv_heads: L, N, K.
        parallel: whether a layer's attention and MLP read the same input, so that no edge connects them.

    Example:
        >>> graph = jattn.circuits.Graph(num_layers=2, num_heads=4, num_kv_heads=2)
        >>> graph.writers[4:7], graph.readers[3:5]
        (('head 0.3', 'mlp 0', 'head 1.0'), ('query 0.3', 'key 0.0'))
        >>> graph.edges.shape, int(graph.edges.sum())
        ((19, 11), 82)
        >>> graph.select([("head 0.1", "key 1.0"), ("head 1.2", "logits")]).sum()
        np.int64(2)
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    parallel: bool = False

    @property
    def writers(self) -> tuple[str, ...]:
        """The names of the writers."""
        layers = range(self.num_layers)
        return "embedding", *(name for i in layers for name in (*_numbered("head", i, self.num_heads), f"mlp {i}"))

    @property
    def readers(self) -> tuple[str, ...]:
        """The names of the readers."""
        N, K = self.num_heads, self.num_kv_heads
        each = (("query", N), ("key", K), ("value", K))
        names = (
            name
            for i in range(self.num_layers)
            for name in (*(one for kind, count in each for one in _numbered(kind, i, count)), f"mlp {i}")
        )
        return *names, "logits"

    @property
    def readers_of_layer(self) -> int:
        """The number of readers in a layer, including its MLP. The writers in a layer are its heads and its MLP."""
        return self.num_heads + 2 * self.num_kv_heads + 1

    @property
    def edges(self) -> np.ndarray:
        """Bool ``[R,W]``: which pairs are edges."""
        L, N, per_layer = self.num_layers, self.num_heads, self.readers_of_layer
        before = np.empty(L * per_layer + 1, int)  # the number of writers that come before each reader
        first = 1 + np.arange(L) * (N + 1)
        before[:-1] = np.repeat(first, per_layer)
        if not self.parallel:
            before[per_layer - 1 : -1 : per_layer] += N
        before[-1] = 1 + L * (N + 1)
        return np.arange(1 + L * (N + 1)) < before[:, None]

    def select(self, pairs: Iterable[tuple[str, str]]) -> np.ndarray:
        """Bool ``[R,W]``, True for these edges, given as pairs of writer and reader names.

        Raises:
            ValueError: a name is unknown, or a reader does not come after its writer.
        """
        writers, readers = ({name: i for i, name in enumerate(names)} for names in (self.writers, self.readers))
        chosen, edges = np.zeros((len(readers), len(writers)), bool), self.edges
        for writer, reader in pairs:
            for kind, name, known in (("writer", writer, writers), ("reader", reader, readers)):
                if name not in known:
                    raise ValueError(f"edges: there is no {kind} {name!r}; names are like {', '.join([*known][:5])}")
            at = readers[reader], writers[writer]
            if not edges[at]:
                raise ValueError(f"edges: {reader!r} does not come after {writer!r}, so it cannot read its output")
            chosen[at] = True
        return chosen

    def checked(self, edges: ArrayLike) -> np.ndarray:
        """``edges`` as bools ``[...,R,W]``; raises ``ValueError`` for other arrays, or if a pair is not an edge."""
        edges, exist = np.asarray(edges), self.edges
        if edges.dtype != bool or edges.shape[-2:] != exist.shape:
            raise ValueError(
                f"edges must be bools [..., R, W] = [..., {exist.shape[0]}, {exist.shape[1]}], as from Graph.select, "
                f"got {edges.dtype} of shape {list(edges.shape)}"
            )
        if (wrong := edges & ~exist).any():
            reader, writer = np.argwhere(wrong.reshape(-1, *exist.shape).any(0))[0]
            raise ValueError(f"edges: {self.readers[reader]!r} does not come after {self.writers[writer]!r}")
        return edges

    def heads_of(self, reader: int) -> np.ndarray:
        """The writers that a reader affects: the head of a query, the heads that share a key or value, or an MLP.

        Norms over all heads (of all queries together, or of the attention output) also slightly affect the layer's
        other heads; this effect is ignored.
        """
        L, N, K, per_layer = self.num_layers, self.num_heads, self.num_kv_heads, self.readers_of_layer
        layer, at = divmod(reader, per_layer)
        if layer == L:
            return np.empty(0, int)
        first = 1 + layer * (N + 1)
        if at == per_layer - 1:
            return np.array([first + N])
        if at < N:
            return np.array([first + at])
        group = N // K
        head = (at - N) % K * group
        return first + head + np.arange(group)


def graph_of(model: nnx.Module) -> Graph:
    """The ``Graph`` of a ``jattn.interop`` model, or of your own :class:`~jattn.circuits.CircuitModel`.

    Raises:
        TypeError: the model is of neither kind.
        ValueError: its residual stream is not a sum, because norms act on the stream itself, as in BERT.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> graph = jattn.circuits.graph_of(jattn.interop.Transformer(config, rngs=nnx.Rngs(0)))
        >>> len(graph.readers), len(graph.writers)
        (15, 7)
    """
    if isinstance(model, Transformer):
        config = model.config
        if not (config.norm_first or config.norm_outputs):
            raise ValueError(
                f"model: a {config.family} norms its residual stream itself, so the stream is not a sum of outputs"
            )
        if config.norm_outputs and config.out_bias:
            raise ValueError(f"model: a {config.family} norms attention's output with a bias that belongs to no head")
        kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
        return Graph(config.num_layers, config.num_heads, kv_heads, config.parallel)
    layers: Any = getattr(model, "layers", None)
    wanted = ("attention", "attention_input", "mlp_added")
    if not isinstance(model, nnx.Module) or not layers or not all(hasattr(model, x) for x in ("embed", "unembed")):
        raise TypeError(
            f"model must be an nnx.Module with embed, layers and unembed (jattn.circuits.CircuitModel), got "
            f"{type(model).__name__}"
        )
    for i, layer in enumerate(layers):
        if missing := [name for name in wanted if not hasattr(layer, name)]:
            raise TypeError(
                f"layer {i} of the model must have {', '.join(wanted)}, got one without {', '.join(missing)}"
            )
        _check_attention(i, layer.attention)
    sizes = {(layer.attention.num_heads, layer.attention.num_kv_heads) for layer in layers}
    if len(sizes) > 1:
        raise ValueError(f"all layers must have the same numbers of heads and key heads, got {sorted(sizes)}")
    parallel = {bool(getattr(layer, "parallel", False)) for layer in layers}
    if len(parallel) > 1:
        raise ValueError("parallel must be the same for all layers")
    return Graph(len(layers), *sizes.pop(), parallel.pop())


def _check_attention(layer: int, attention: Any) -> None:
    """Raises unless a layer's attention is a plain ``jattn.nnx.MultiHeadAttention``, which can be run part by part."""
    usual = isinstance(attention, MultiHeadAttention) and type(attention).__call__ is MultiHeadAttention.__call__
    if not usual or attention.attention_fn is not dot_product_attention:
        raise TypeError(
            f"the attention of layer {layer} must be a jattn.nnx.MultiHeadAttention with its own __call__ and "
            f"attention_fn, got {type(attention).__name__}; put options of the call into attention_options"
        )
    if attention.dtype is not None and jnp.dtype(attention.dtype).itemsize < 4:
        raise ValueError(
            f"the attention of layer {layer} has dtype={jnp.dtype(attention.dtype)}, and every score would include its "
            "rounding; use dtype=None or float32"
        )
    if attention.dropout_rate > 0 and not attention.deterministic:
        raise ValueError(f"the attention of layer {layer} has dropout; call model.eval() first")


def _numbered(kind: str, layer: int, count: int) -> tuple[str, ...]:
    return tuple(f"{kind} {layer}.{i}" for i in range(count))
