"""Attention on a ring of devices and on a single device: cases shared by the tests and the sharding benchmark."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jattn
from jattn import masks, score_mods
from jattn.sharding import Ring, Ulysses, from_zigzag, to_zigzag
from jattn_experiments.bench.conformance import error

B, T, S, N, K, H, D = 2, 32, 32, 4, 2, 6, 5
RNG = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: its options, and the arrays besides query, key and value that it is differentiated by."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)  # bias, sinks; params of the mod
    mod: Callable[[Any], Any] | None = None  # params -> score_mod
    shape: tuple[int, int, int, int] = (T, S, N, K)
    amplify: float = 1.0  # of the queries
    against: str = "xla"  # the implementation of the unsharded call


def _floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


_EVEN = lambda b, h, q, kv: (q + kv + h + b) % 2 == 0
_IDS = np.sort(RNG.integers(0, 5, (B, T)), axis=1)
_SLOPES = np.array([0.5, 0.25, 0.125, 0.06], np.float32)

CASES = {
    "plain": Case(),
    "causal": Case({"is_causal": True}),
    "as many key heads as queries": Case({"is_causal": True}, shape=(T, S, 4, 4)),
    "one key head": Case({"is_causal": True}, shape=(T, S, 3, 1)),
    "cross, causal, bottom-right by positions": Case(
        {"is_causal": True, "query_positions": np.arange(16, 32)}, shape=(16, 32, N, K)
    ),
    "positions that differ by sequence, keys backwards": Case(
        {
            "is_causal": True,
            "query_positions": np.stack([np.arange(T), np.arange(T) // 2]),
            "kv_positions": np.arange(S)[::-1].copy(),
        }
    ),
    "window": Case({"local_window_size": (5, 2)}),
    "causal window": Case({"is_causal": True, "local_window_size": (4, 0)}),
    "window far away: a ring with gaps": Case({"mask": lambda b, h, q, kv: abs(q - kv) == 17}),
    "nobody sees anything": Case({"mask": masks.Prefix(0)}),
    "prefix": Case({"mask": masks.Causal() | masks.Prefix(9)}),
    "segments": Case({"mask": masks.Segments(_IDS) & masks.Causal()}),
    "padding, one sequence empty": Case({"mask": masks.Padding(np.array([19, 0]))}),
    "not a window": Case({"mask": ~masks.SlidingWindow(3, 3)}),
    "table": Case({"mask": masks.Dense(RNG.random((B, N, T, S)) < 0.3)}),
    "block mask of a function": Case({"mask": jattn.block_mask(lambda b, h, q, kv: (q * kv) % 7 == 1, T, S)}),
    "function of sequence and head, causal": Case({"mask": masks.Causal() & _EVEN}),
    "mask array": Case({"mask": RNG.random((1, N, T, S)) < 0.5}),
    "mask array by key": Case({"mask": RNG.random((B, 1, 1, S)) < 0.5}),
    "lengths, one of them 0": Case(
        {"query_seq_lengths": np.array([30, 11]), "key_value_seq_lengths": np.array([17, 0]), "is_causal": True}
    ),
    "lengths, and positions that are not the slots'": Case(
        {"key_value_seq_lengths": np.array([21, 9]), "query_positions": np.arange(T) + 3, "is_causal": True}
    ),
    "bias": Case({"is_causal": True}, {"bias": _floats(1, N, T, S)}),
    "bias by head alone": Case({}, {"bias": _floats(B, N, 1, 1)}),
    "scale": Case({"is_causal": True, "scale": 0.7}),
    "sinks": Case({"is_causal": True, "key_value_seq_lengths": np.array([32, 0])}, {"sinks": _floats(N)}),
    "alibi": Case({"is_causal": True}, {"params": _SLOPES}, score_mods.Alibi),
    "T5 bias": Case(
        {}, {"params": _floats(8, N)}, lambda table: score_mods.RelativeBias(table, bidirectional=True, max_distance=16)
    ),
    "soft cap, learned": Case({}, {"params": np.array(1.5, np.float32)}, score_mods.SoftCap, amplify=4.0),
    "alibi, then a soft cap": Case(
        {"is_causal": True},
        {"params": _SLOPES},
        lambda slopes: score_mods.then(score_mods.Alibi(slopes), score_mods.SoftCap(2.0)),
    ),
    "function that captures a table": Case(
        {"is_causal": True},
        {"params": _SLOPES},
        lambda table: lambda s, b, h, q, kv: s * 0.5 + (kv - q) * table[h] * (1 + b),
    ),
    "dropout": Case({"is_causal": True, "dropout_rate": 0.3, "dropout_rng": jax.random.key(3)}),
    "dropout, the same for all heads": Case(
        {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3), "broadcast_dropout": True}
    ),
    # "xla" scales the product instead of the query; at logits this large, that alone changes weights by 3e-4
    "logits of +-1e4": Case(amplify=3e3, against="blockwise"),
}


def inputs(case: Case) -> dict[str, Any]:
    """The arrays that the results are differentiated by."""
    (T, S, N, K), rng = case.shape, np.random.default_rng(1)
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, D)}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {"query": found["query"] * case.amplify} | case.arrays


def call(case: Case, given: dict[str, Any], implementation: Any, options: dict[str, Any] | None = None) -> Any:
    """``(out, lse)`` of one case."""
    given = dict(given)
    params = given.pop("params", None)
    if case.mod is not None:
        given["score_mod"] = case.mod(params)
    options = case.options if options is None else options
    return jattn.dot_product_attention(**given, **options, implementation=implementation, return_residual=True)


def with_gradients(fn: Callable, given: dict[str, Any]) -> Any:
    """``(out, lse)`` of ``fn(given)``, and the gradients of a sum of both with a different factor for each entry."""

    def both(given: dict[str, Any]) -> Any:
        out, lse = fn(given)
        weigh = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        seen = lse != -jnp.inf
        return jnp.sum(out * weigh) + jnp.sum(jnp.where(seen, lse * weigh[..., 0], 0.0)), (out, lse)

    (_, results), gradients = jax.value_and_grad(both, has_aux=True)(given)
    return results, gradients


def values_alone(fn: Callable, given: dict[str, Any]) -> Any:
    """Like ``with_gradients``, but without the gradients."""
    return fn(given), {}


@functools.cache
def expected(name: str, differentiate: Callable = with_gradients) -> Any:
    """Results and gradients of the unsharded call, computed by ``case.against`` (by default the dense formula)."""
    case = CASES[name]
    compiled = jax.jit(lambda given: differentiate(lambda x: call(case, x, case.against), given))
    return jax.tree.map(np.asarray, compiled(inputs(case)))


def in_a_ring(name: str, how: Ring | Ulysses, differentiate: Callable = with_gradients) -> Any:
    """Results and gradients of the call on a ring. Inputs are reordered to the ring's layout, and results back.

    ``differentiate``: ``with_gradients``, or ``values_alone``.
    """
    ring_axis = how.axis_name if isinstance(how, Ring) else how.ring_axis
    case, devices = CASES[name], how.mesh.shape.get(ring_axis, 1)
    zigzag = how.layout == "zigzag"

    def order(turn: Callable, name: str, x: Any) -> Any:
        axes = {"query": (1,), "key": (1,), "value": (1,), "query_positions": (-1,), "kv_positions": (-1,)}
        turned = (-2, -1) if name in ("bias", "mask") and hasattr(x, "ndim") else axes.get(name, ())
        for axis in turned if zigzag else ():
            x = x if x.shape[axis] == 1 else turn(x, devices, axis)
        return x

    options = {name: order(to_zigzag, name, x) for name, x in case.options.items()}

    def natural(given: dict[str, Any]) -> Any:
        given = {name: order(to_zigzag, name, x) for name, x in given.items()}
        return tuple(order(from_zigzag, "query", x) for x in call(case, given, how, options))

    return jax.jit(lambda given: differentiate(natural, given))(inputs(case))


def off(got: Any, wanted: Any) -> float:
    """The largest difference divided by the largest finite expected value; infinite for a NaN or a wrong infinity."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max((error(one, other) for one, other in pairs), default=0.0)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """A mesh of the first devices along one axis, ``sequence``."""
    return jax.make_mesh((devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices])


def numbers(name: str, devices: int, layout: str, implementation: Any = None) -> dict[str, Any]:
    """The errors of the values and gradients of one case on one ring."""
    how = Ring(mesh_of(devices), "sequence", layout=layout, implementation=implementation)
    results, gradients = in_a_ring(name, how)
    wanted_results, wanted_gradients = expected(name)
    each = [off(gradients[key], wanted_gradients[key]) for key in gradients]
    return {"values": off(results, wanted_results), "gradients": max(each)}
