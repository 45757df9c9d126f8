"""Compiles runs of one sequence: the outputs of writers, the scores of edges, and a model with edges cut."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn._mods.pytree import pytree_dataclass
from jattn.circuits._parts import Layer, Parts

# For one sequence: logits [T,V], tokens [T] and its labels, if any.
Metric = Callable[..., Array]


class Example(NamedTuple):
    """One sequence: ``tokens [T]``, whether each is ``valid [T]`` (None: all), and labels for the metric, or None."""

    tokens: Array
    valid: Array | None
    labels: Any


@pytree_dataclass
class Outputs:
    """The outputs of all writers on one sequence of T tokens, or with 1 in place of T if all tokens share them.

    Returned by :func:`~jattn.circuits.mean_outputs`.
    Attributes:
        embedding: ``[T,M]``.
        heads: ``[L,N,T,M]``, what each head adds to the residual stream.
        attention: ``[L,T,M]``, the sum of the heads and the bias.
        mlp: ``[L,T,M]``, what each MLP adds.

    Example:
        >>> heads = jnp.zeros((2, 4, 1, 8))  # [L,N,1,M]: heads that write nothing
        >>> rest = {"attention": jnp.zeros((2, 1, 8)), "mlp": jnp.zeros((2, 1, 8))}
        >>> jattn.circuits.Outputs(embedding=jnp.ones((1, 8)), heads=heads, **rest).heads.shape
        (2, 4, 1, 8)
    """

    embedding: Any
    heads: Any
    attention: Any
    mlp: Any


def measured(parts: Parts, x: Array, example: Example, metric: Metric) -> Array:
    """The metric of the last layer's output ``[T,M]``."""
    given = () if example.labels is None else (example.labels,)
    value = jnp.asarray(metric(parts.unembed(x), example.tokens, *given))
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"metric must return a floating scalar for one sequence, got {value.dtype} of shape {list(value.shape)}"
        )
    return value


@functools.partial(jax.jit, static_argnames="metric")
def plain_metric(parts: Parts, example: Example, metric: Metric, read: Array | None = None) -> Array:
    """The metric of the unchanged model on the example's tokens, or on other tokens."""
    tokens = example.tokens if read is None else read
    x, _ = parts.scan(_plain(parts, example.valid), parts.embed(tokens, example.valid), _no_input(parts))
    return measured(parts, x, example, metric)


@jax.jit
def outputs_of(parts: Parts, example: Example) -> Outputs:
    """The output of each writer."""
    embedding = parts.embed(example.tokens, example.valid)
    _, of_layers = parts.scan(_plain(parts, example.valid, keep=True), embedding, _no_input(parts))
    return Outputs(embedding, *of_layers)


@jax.jit
def nothing_of(parts: Parts, example: Example) -> Outputs:
    """The outputs when no writer writes anything: only biases."""
    _, bias = parts.scan(lambda layer, carry, _: (carry, layer.bias()), 0, _no_input(parts))
    L, M = bias.shape
    x = jax.eval_shape(lambda: parts.embed(example.tokens, example.valid))
    zero = functools.partial(jnp.zeros, dtype=x.dtype)
    return Outputs(zero((1, M)), zero((L, parts.graph.num_heads, 1, M)), bias[:, None].astype(x.dtype), zero((L, 1, M)))


def _no_input(parts: Parts) -> Array:
    return jnp.zeros((len(parts.kinds), 0))


def _plain(parts: Parts, valid: Array | None, keep: bool = False) -> Callable[[Layer, Array, Any], tuple[Array, Any]]:
    def step(layer: Layer, x: Array, _: Any) -> tuple[Array, Any]:
        each, added = layer.attention(x, valid)
        mlp = layer.mlp(x if parts.graph.parallel else x + added)
        return (x + added + mlp).astype(x.dtype), (each, added, mlp) if keep else None

    return step


@functools.partial(jax.jit, static_argnames="metric")
def changes_of(parts: Parts, example: Example, base: Outputs | Example, metric: Metric) -> tuple[Array, Array, Array]:
    """The output of each writer in ``base``, or on other tokens, minus its output in the example: ``[W,T,M]``.

    Also returns the metric of the example and of ``base``.
    """
    run, first = _plain(parts, example.valid, keep=True), parts.embed(example.tokens, example.valid)

    def from_outputs(layer: Layer, both: tuple[Array, Array], base: tuple[Array, Array, Array]) -> tuple[Any, Array]:
        (x, other), (heads, attention, other_mlp) = both, base
        y, (each, _, mlp) = run(layer, x, None)
        return (y, other + attention + other_mlp), jnp.concatenate([heads - each, other_mlp[None] - mlp[None]])

    def side_by_side(layer: Layer, both: tuple[Array, Array], _: Any) -> tuple[Any, Array]:
        (y, (each, _, mlp)), (other, (heads, _, other_mlp)) = (run(layer, x, None) for x in both)
        return (y, other), jnp.concatenate([heads - each, (other_mlp - mlp)[None]])

    if isinstance(base, Outputs):
        embedding = jnp.broadcast_to(base.embedding, first.shape)
        streams, of_layers = parts.scan(from_outputs, (first, embedding), (base.heads, base.attention, base.mlp))
    else:
        embedding = parts.embed(base.tokens, base.valid)
        streams, of_layers = parts.scan(side_by_side, (first, embedding), _no_input(parts))
    changes = jnp.concatenate([(embedding - first)[None], of_layers.reshape(-1, *first.shape)])
    clean, corrupt = (measured(parts, x, example, metric) for x in streams)
    return changes, clean, corrupt


@functools.partial(jax.jit, static_argnames="metric")
def gradient_scores(parts: Parts, example: Example, embedding: Array, changes: Array, metric: Metric) -> Array:
    """``[R,W]``: the metric's derivative at each reader's input, times each writer's change.

    ``embedding``: the input of the first layer, such as the example's own. One backward pass gives the derivatives with
    respect to what each head and MLP computes from its input. The derivatives with respect to the inputs follow layer
    by layer, so only one layer's derivatives are in memory at a time.
    """
    graph = parts.graph

    @jax.checkpoint
    def step(layer: Layer, x: Array, nudges: Any) -> tuple[Array, tuple[Array, Array]]:
        of_heads, of_mlp = nudges
        _, added = layer.attention(x, example.valid, of_heads)
        at_mlp = x if graph.parallel else x + added
        return (x + added + layer.mlp(at_mlp + of_mlp)).astype(x.dtype), (x, at_mlp)

    def value(nudges: Any) -> tuple[Array, Any]:
        x, inputs = parts.scan(step, embedding, nudges[0])
        return measured(parts, x + nudges[1], example, metric), inputs

    def projected(layer: Layer, x: Array, _: Any) -> tuple[Array, Any]:
        return x, jax.tree.map(jnp.zeros_like, layer.projected(layer.attention_input(x)))

    shapes = jax.eval_shape(lambda: parts.scan(projected, embedding, _no_input(parts))[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    nothing = (zeros, jnp.zeros((graph.num_layers, *embedding.shape), embedding.dtype)), jnp.zeros_like(embedding)
    (of_layers, at_logits), (inputs, _) = jax.grad(value, has_aux=True)(nothing)
    flat = changes.reshape(len(changes), -1)

    def of_layer(layer: Layer, carry: Any, entry: Any) -> tuple[Any, Array]:
        (of_heads, at_mlp), x = entry
        _, pull = jax.vjp(layer.attention_input, x)
        (at_heads,) = jax.vmap(pull)(layer.back_to_inputs(of_heads))
        every = jnp.concatenate([at_heads, at_mlp[None]]).reshape(graph.readers_of_layer, -1)
        return carry, jnp.matmul(flat, every.T, precision="highest").T

    _, scores = parts.scan(of_layer, 0, (of_layers, inputs))
    last = jnp.matmul(flat, at_logits.ravel(), precision="highest")
    return jnp.concatenate([scores.reshape(-1, len(changes)), last[None]])


@functools.partial(jax.jit, static_argnames="metric")
def cut_run(parts: Parts, example: Example, base: Outputs, edges: Array, metric: Metric | None) -> Array:
    """The metric or logits with ``edges``, bool ``[R,W]``, from the example and all other edges from ``base``.

    A reader's input is what it reads in ``base`` plus, for each of its edges, the change in the writer's output from
    ``base`` to this run. With all edges, it is this run's stream, and with none, the stream of ``base``, bit for bit.
    """
    graph, W = parts.graph, edges.shape[1]
    x = parts.embed(example.tokens, example.valid)
    stream = jnp.broadcast_to(base.embedding, x.shape).astype(x.dtype)
    N, L = graph.num_heads, graph.num_layers
    changes = jnp.zeros((W, x.size), x.dtype).at[0].set((x - stream).ravel())
    # For each reader: exact where all edges or none are kept, so that no sum is needed.
    every, none = (edges == graph.edges).all(1), ~edges.any(1)

    def sums(flags: tuple[Array, ...], changes: Array) -> Array:
        """``[readers,T,M]``: what each reader reads in addition to the base's stream, unless it keeps all or none."""
        edges, every, none = flags
        product = lambda: jnp.matmul(edges.astype(x.dtype), changes, precision="highest")
        zeros = lambda: jnp.zeros((len(edges), changes.shape[1]), x.dtype)
        return jax.lax.cond((every | none).all(), zeros, product).reshape(-1, *x.shape)

    def read(flags: tuple[Array, ...], x: Array, stream: Array, summed: Array) -> Array:
        _, every, none = (flag.reshape(*flag.shape[:1], 1, -1) for flag in flags)
        mixed = jnp.where(none, stream[None], stream[None] + summed)
        return jnp.where(every, x[None], mixed)

    def step(layer: Layer, carry: Any, of_layer: Any) -> tuple[Any, None]:
        (x, stream, changes), (i, flags, heads, attention, mlp) = carry, of_layer
        first, of_heads, of_mlp = 1 + i * (N + 1), tuple(x[:-1] for x in flags), tuple(x[-1:] for x in flags)
        summed = sums(flags, changes)
        each, added = layer.attention(read(of_heads, x, stream, summed[:-1]), example.valid)
        new = (each - heads).reshape(N, -1)
        if graph.parallel:
            (inputs,) = read(of_mlp, x, stream, summed[-1:])
        else:  # the heads of this layer are not among the changes yet
            before = jax.lax.dynamic_slice(of_mlp[0], (0, first), (1, N)).astype(x.dtype)
            by_heads = jnp.matmul(before, new, precision="highest").reshape(1, *x.shape)
            (inputs,) = read(of_mlp, x + added, stream + attention, summed[-1:] + by_heads)
        written = layer.mlp(inputs)
        # Once per layer, after all reads, so that XLA writes in place.
        new = jnp.concatenate([new, (written - mlp).reshape(1, -1)])
        return (
            x + added + written,
            stream + attention + mlp,
            jax.lax.dynamic_update_slice(changes, new, (first, 0)),
        ), None

    flags = edges, every, none
    by_layer = tuple(flag[:-1].reshape(L, graph.readers_of_layer, *flag.shape[1:]) for flag in flags)
    inputs = jnp.arange(L), by_layer, base.heads, base.attention, base.mlp
    (x, stream, changes), _ = parts.scan(step, (x, stream, changes), inputs)
    last = tuple(flag[-1:] for flag in flags)
    (stream,) = read(last, x, stream, sums(last, changes))
    return parts.unembed(stream) if metric is None else measured(parts, stream, example, metric)


@functools.partial(jax.jit, static_argnames="metric")
def base_metric(parts: Parts, example: Example, base: Outputs, metric: Metric) -> Array:
    """The metric when every edge carries the outputs in ``base``."""
    x = jnp.broadcast_to(base.embedding, (*example.tokens.shape, base.embedding.shape[-1]))
    x, _ = jax.lax.scan(lambda x, added: (x + added[0] + added[1], None), x, (base.attention, base.mlp))
    return measured(parts, x, example, metric)
