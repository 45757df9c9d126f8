"""Defines what a survey requires of a language model, and runs the model layer by layer, starting from any layer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jattn import heads, masks
from jattn._mods.pytree import pytree_dataclass, static_field
from jattn.interop import Transformer

Metric = Callable[[Array, Array], Array]  # for one sequence: logits [T,V], tokens [T]


class LanguageModel(Protocol):
    """What ``survey`` requires of an ``nnx.Module``: three names, and three more for attribution and paths.

    ``survey`` computes ``unembed(layers[-1](... layers[0](embed(tokens))))``, layer by layer, without dropout: call
    ``model.eval()`` first. Layers with the same structure share their compiled programs.

    - ``layers``: modules ``(x [B,T,M], **options) -> [B,T,M]``. Each has one ``jattn.nnx.MultiHeadAttention``, with the
      same number of heads in all layers, and passes ``options`` on to its call: ``sow_heads``, ``sow_statistics``,
      ``head_gate``, ``head_fill`` and ``patch``.
    - ``embed(tokens [B,T]) -> [B,T,M]`` and ``unembed(x [B,T,M]) -> logits [B,T,V]``, including the last norm.

    A model may also have:

    - ``out_kernels() -> [L,N,D,M]``, for paths and attribution: the kernels that multiply each layer's heads before
      they are added to the residual stream. No norm may follow the kernels.
    - ``last_norm``, ``nnx.RMSNorm``, ``nnx.LayerNorm`` or None, and ``output_embedding() -> [V,M]``, for attribution:
      ``unembed(x)`` is ``last_norm(x) @ output_embedding().T``.

    Example:
        >>> from flax import nnx
        >>> class Layer(jattn.nnx.MultiHeadAttention):
        ...     def __call__(self, x, **options):
        ...         return x + super().__call__(x, is_causal=True, **options)
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.embed = nnx.Embed(11, 8, rngs=rngs)
        ...         self.layers = nnx.List([Layer(2, 8, rngs=rngs)])
        ...         self.unembed = nnx.Linear(8, 11, rngs=rngs)
        >>> found = jattn.survey(Model(nnx.Rngs(0)), np.array([[3, 1, 4, 1]]), exact=None, progress=False)
        >>> found.effect.shape
        (1, 2)
    """

    @property
    def layers(self) -> Sequence[Callable[..., Array]]:
        """The layers, from the first to the last."""
        ...

    def embed(self, tokens: Array) -> Array:
        """The input of the first layer, ``[B,T,M]``, for ``tokens [B,T]``."""
        ...

    def unembed(self, x: Array) -> Array:
        """The logits ``[B,T,V]`` of the last layer's output ``x [B,T,M]``."""
        ...


@pytree_dataclass
class Layer:
    """One layer as a pytree, so that equal layers share one program."""

    graph: Any = static_field()  # an nnx.GraphDef
    state: Any
    index: Any  # the index, if ``state`` holds all layers; otherwise None
    mask: Any = static_field()  # of its attention call; None: the mask of the layer's own call

    def __call__(self, x: Array, **options: Any) -> tuple[Array, Any]:
        """The layer's output, and what it has sown."""
        state = self.state if self.index is None else jax.tree.map(lambda leaf: leaf[self.index], self.state)
        if self.mask is not None:
            options["mask"] = self.mask
        run = nnx.capture(lambda layer: layer(x, **options), nnx.Intermediate)
        return run(nnx.merge(self.graph, state))


@pytree_dataclass
class Whole:
    """The model as a pytree, for its first and last steps."""

    graph: Any = static_field()  # an nnx.GraphDef
    state: Any

    @property
    def model(self) -> Any:
        """The model itself."""
        return nnx.merge(self.graph, self.state)


def parts_of(model: nnx.Module) -> tuple[Whole, list[Layer]]:
    """The model and its layers; raises ``TypeError`` if it is not a ``LanguageModel``."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be an nnx.Module, got {type(model).__name__}; wrap it in an nnx.Module")
    if missing := [name for name in ("embed", "layers", "unembed") if not hasattr(model, name)]:
        raise TypeError(
            f"model must have embed, layers and unembed (jattn.reports.LanguageModel), got {type(model).__name__} "
            f"without {', '.join(missing)}"
        )
    whole = Whole(*nnx.split(model))
    if isinstance(model, Transformer):
        state = nnx.split(model.layers)[1]
        graphs = [nnx.split(model.layer(i))[0] for i in range(model.config.num_layers)]  # with its rotary positions
        every = enumerate(zip(graphs, model.config.is_local, strict=True))
        return whole, [Layer(graph, state, jnp.int32(i), _mask(model, local)) for i, (graph, local) in every]
    layers = [Layer(*nnx.split(layer), None, None) for layer in model.layers]  # type: ignore
    if not layers:
        raise ValueError("model.layers must have at least one layer, got none")
    return whole, layers


def _mask(model: Transformer, local: bool) -> masks.Mask | None:
    """The mask of a layer with or without the window."""
    config = model.config
    mask = masks.Causal() if config.causal else None
    if config.window is None or not local:
        return mask
    window = masks.SlidingWindow(*config.window_sides)
    return window if mask is None else mask & window


@jax.jit
def embed(whole: Whole, tokens: Array) -> Array:
    """The input of the first layer."""
    return whole.model.embed(tokens)


@jax.jit
@jax.checkpoint
def step(layer: Layer, x: Array, options: Mapping[str, Any]) -> Array:
    """The layer's output. The backward pass reruns the layer instead of keeping its intermediate values."""
    return layer(x, **options)[0]


@functools.partial(jax.jit, static_argnames="names")
def look(layer: Layer, x: Array, tokens: Array, names: tuple[str, ...], patch: Any = None) -> tuple[Array, Any, Any]:
    """The layer's output, what its attention sows (``sow_heads``), and statistics ``{name: [N]}`` by ``tokens``."""
    request = {"names": names, "tokens": tokens}
    y, sown = layer(x, sow_heads=True, sow_statistics=request, **({} if patch is None else {"patch": patch}))
    try:
        of_heads, of_statistics = heads.collect(sown), heads.collect(sown, "attention_statistics")
    except ValueError:
        raise ValueError(
            "a layer of the model has sown no heads; it must pass **options on to its jattn.nnx.MultiHeadAttention"
        ) from None
    if len(of_heads) != 1:
        raise ValueError(f"each layer of the model must have one attention, got one with {len(of_heads)}")
    return y, of_heads[0], {name: _mean_over_queries(of_statistics[0], name) for name in names}


def _mean_over_queries(statistics: Mapping[str, Any], name: str) -> Array:
    """``[N]``: the mean over the queries of all sequences that count; 0 if there are none."""
    counts = statistics["support"][name].astype(statistics[name].dtype)
    return (statistics[name] * counts).sum(0) / jnp.maximum(counts.sum(0), 1)


@functools.partial(jax.jit, static_argnames="metric")
def measured(whole: Whole, x: Array, tokens: Array, metric: Metric) -> Float[Array, ""]:
    """The mean of the metric over sequences, one by one because all logits together would be larger than the model."""
    model = whole.model

    @jax.checkpoint
    def of_sequence(sequence: tuple[Array, Array]) -> Array:
        x, tokens = sequence
        value = jnp.asarray(metric(model.unembed(x[None])[0], tokens))
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"metric must return a floating scalar for one sequence, got {value.dtype} of shape {list(value.shape)}"
            )
        return value

    return jax.lax.map(of_sequence, (x, tokens)).mean()


def next_token_loss(logits: Float[Array, "T V"], tokens: Array) -> Float[Array, ""]:
    """The mean cross-entropy of the next tokens, in nats; the default metric of ``survey``.

    ``mean over t of -log softmax(logits[t])[tokens[t + 1]]``, a scalar in float32.

    Args:
        logits: ``[T,V]``, of one sequence.
        tokens: integers ``[T]``.

    Example:
        >>> guess = jnp.zeros((3, 8))  # uniform predictions over 8 tokens: log 8
        >>> round(float(jattn.reports.next_token_loss(guess, jnp.array([2, 0, 1]))), 3)
        2.079
    """
    logits = logits[:-1].astype(jnp.float32)
    right = jnp.take_along_axis(logits, tokens[1:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - right).mean()
