"""Compiled runs of one sequence: what writers write, what an edge's change is worth, and a model with edges cut."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn._mods.pytree import pytree_dataclass
from jattn.circuits._parts import Layer, Parts

# Of one sequence: logits [T,V], tokens [T] and, if there are, its labels.
Metric = Callable[..., Array]


class Example(NamedTuple):
    """One sequence: ``tokens [T]``, which of them are ``valid [T]`` (None: all), and labels for the metric, or None."""

    tokens: Array
    valid: Array | None
    labels: Any


@pytree_dataclass
class Outputs:
    """What each writer writes: of one sequence with T tokens, or with 1 in place of T, the same at every token.

    ``embedding [T,M]``, ``heads [L,N,T,M]``, ``mlp [L,T,M]``; ``attention [L,T,M]``, the sum of the heads and the bias.
    :func:`~jattn.circuits.mean_outputs` makes one.

    Example:
        >>> heads = jnp.zeros((2, 4, 1, 8))  # [L,N,1,M]: heads that write nothing at all
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
def plain_metric(parts: Parts, example: Example, metric: Metric) -> Array:
    """The metric of the model as it is."""
    x, _ = parts.scan(_plain(parts, example.valid), parts.embed(example.tokens, example.valid), _no_input(parts))
    return measured(parts, x, example, metric)


@jax.jit
def outputs_of(parts: Parts, example: Example) -> Outputs:
    """What each writer writes."""
    embedding = parts.embed(example.tokens, example.valid)
    _, of_layers = parts.scan(_plain(parts, example.valid, keep=True), embedding, _no_input(parts))
    return Outputs(embedding, *of_layers)


@jax.jit
def nothing_of(parts: Parts, example: Example) -> Outputs:
    """As if no writer wrote anything: only biases."""
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
        return x + added + mlp, (each, added, mlp) if keep else None

    return step


@jax.jit
def changes_of(parts: Parts, example: Example, base: Outputs) -> Array:
    """``[W,T,M]``: what each writer writes in ``base``, less what it writes in the example."""

    def step(layer: Layer, x: Array, base: tuple[Array, Array]) -> tuple[Array, Array]:
        (y, (each, _, mlp)), (heads, other) = _plain(parts, example.valid, keep=True)(layer, x, None), base
        return y, jnp.concatenate([heads - each, other[None] - mlp[None]])

    embedding = parts.embed(example.tokens, example.valid)
    _, of_layers = parts.scan(step, embedding, (base.heads, base.mlp))
    first = jnp.broadcast_to(base.embedding, embedding.shape) - embedding
    return jnp.concatenate([first[None], of_layers.reshape(-1, *first.shape)])


@jax.custom_vjp
def _each_reads(x: Array, gates: Array, changes: Array) -> Array:
    """``x + gates [R,W] @ changes [W,T,M]`` at gates of 0: ``[R,T,M]``. The derivative by a gate needs no such sum."""
    return jnp.broadcast_to(x, (len(gates), *x.shape))


def _each_reads_forward(x: Array, gates: Array, changes: Array) -> tuple[Array, Array]:
    return _each_reads(x, gates, changes), changes


def _each_reads_backward(changes: Array, g: Array) -> tuple[Array, Array, None]:
    # Two axes as one: XLA's product over both at once takes several times as long on a CPU.
    flat, of_writers = g.reshape(len(g), -1), changes.reshape(len(changes), -1)
    return g.sum(0), jnp.matmul(of_writers, flat.T, precision="highest").T, None


_each_reads.defvjp(_each_reads_forward, _each_reads_backward)


@functools.partial(jax.jit, static_argnames="metric")
def gradient_scores(
    parts: Parts, example: Example, embedding: Array, changes: Array, metric: Metric
) -> tuple[Array, Array, Array]:
    """The metric, and its derivatives by each edge's gate ``[L,R',W]``, ``[W]``: a gate of g adds g times the change.

    ``embedding``: the input of the first layer, such as the example's own. R' are the readers of a layer.
    """

    @jax.checkpoint
    def step(layer: Layer, x: Array, gates: Array) -> tuple[Array, None]:
        _, added = layer.attention(_each_reads(x, gates[:-1], changes), example.valid)
        (read,) = _each_reads(x if parts.graph.parallel else x + added, gates[-1:], changes)
        return x + added + layer.mlp(read), None

    def value(gates: tuple[Array, Array]) -> Array:
        x, _ = parts.scan(step, embedding, gates[0])
        (read,) = _each_reads(x, gates[1][None], changes)
        return measured(parts, read, example, metric)

    readers, W = parts.graph.readers_of_layer, changes.shape[0]
    zeros = jnp.zeros((len(parts.kinds), readers, W), changes.dtype), jnp.zeros(W, changes.dtype)
    metric_value, (of_layers, of_logits) = jax.value_and_grad(value)(zeros)
    return metric_value, of_layers, of_logits


@functools.partial(jax.jit, static_argnames="metric")
def cut_run(parts: Parts, example: Example, base: Outputs, edges: Array, metric: Metric | None) -> Array:
    """The model with the ``edges``, bool ``[R,W]``, of the example, and all others of ``base``: metric, or logits.

    A reader's input is what it reads in ``base``, and for each of its edges the change of the writer from ``base`` to
    this run. With all edges it reads this run's stream itself, and with none that of ``base``, with the same bits.
    """
    graph, W = parts.graph, edges.shape[1]
    x = parts.embed(example.tokens, example.valid)
    stream = jnp.broadcast_to(base.embedding, x.shape).astype(x.dtype)
    N, L = graph.num_heads, graph.num_layers
    changes = jnp.zeros((W, x.size), x.dtype).at[0].set((x - stream).ravel())
    # Of each reader: exact where all edges or none are kept, and no sum is needed.
    every, none = (edges == graph.edges).all(1), ~edges.any(1)

    def sums(flags: tuple[Array, ...], changes: Array) -> Array:
        """``[readers,T,M]``: what each reader reads besides the base's stream, if not all or nothing."""
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
        # Once a layer, after all reads: XLA then writes in place.
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
    """The metric where every edge carries what is written in ``base``."""
    x = jnp.broadcast_to(base.embedding, (*example.tokens.shape, base.embedding.shape[-1]))
    x, _ = jax.lax.scan(lambda x, added: (x + added[0] + added[1], None), x, (base.attention, base.mlp))
    return measured(parts, x, example, metric)
