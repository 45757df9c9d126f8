"""Attention on a ring of devices beside that of one: cases shared by the tests and the suite ``sharding`` of the tools."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jattn import heads, masks, score_mods
from jattn._blocks.block_mask import block_mask
from jattn.kernels import Kernel
from jattn.sharding import Ring, Ulysses, from_zigzag, to_zigzag
from jattn.testing._cases import Case
from jattn.testing._check import largest_error, run, values_and_gradients
from jattn.testing._reference import Inputs, Results, error, inputs

B, T, S, N, K, H, D = 2, 32, 32, 4, 2, 6, 5
_RNG = np.random.default_rng(0)
_case = functools.partial(Case, shape=(B, T, S, N, K, H, D))


def _floats(*shape: int) -> np.ndarray:
    return _RNG.normal(size=shape).astype(np.float32)


_even = lambda b, h, q, kv: (q + kv + h + b) % 2 == 0
_ids = np.sort(_RNG.integers(0, 5, (B, T)), axis=1)
_slopes = np.array([0.5, 0.25, 0.125, 0.06], np.float32)
_causal = {"is_causal": True}
_dropout = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3)}
_two = np.stack([np.arange(T), np.arange(T) // 2])

CASES: Mapping[str, Case] = {
    "plain": _case(),
    "causal": _case(_causal),
    "as many key heads as queries": _case(_causal, shape=(B, T, S, 4, 4, H, D)),
    "one key head": _case(_causal, shape=(B, T, S, 3, 1, H, D)),
    "cross, causal, bottom-right by positions": _case(_causal | {"query_positions": np.arange(16, 32)}, shape=(B, 16, 32, N, K, H, D)),
    "positions that differ by sequence, keys backwards": _case(_causal | {"query_positions": _two, "kv_positions": np.arange(S)[::-1].copy()}),
    "window": _case({"local_window_size": (5, 2)}),
    "causal window": _case(_causal | {"local_window_size": (4, 0)}),
    "window far away: a ring with gaps": _case({"mask": lambda b, h, q, kv: abs(q - kv) == 17}),
    "nobody sees anything": _case({"mask": masks.Prefix(0)}),
    "prefix": _case({"mask": masks.Causal() | masks.Prefix(9)}),
    "segments": _case({"mask": masks.Segments(_ids) & masks.Causal()}),
    "padding, one sequence empty": _case({"mask": masks.Padding(np.array([19, 0]))}),
    "not a window": _case({"mask": ~masks.SlidingWindow(3, 3)}),
    "table": _case({"mask": masks.Dense(_RNG.random((B, N, T, S)) < 0.3)}),
    "block mask of a function": _case({"mask": block_mask(lambda b, h, q, kv: (q * kv) % 7 == 1, T, S)}),
    "function of sequence and head, causal": _case({"mask": masks.Causal() & _even}),
    "mask array": _case({"mask": _RNG.random((1, N, T, S)) < 0.5}),
    "mask array by key": _case({"mask": _RNG.random((B, 1, 1, S)) < 0.5}),
    "lengths, one of them 0": _case(_causal | {"query_seq_lengths": np.array([30, 11]), "key_value_seq_lengths": np.array([17, 0])}),
    "lengths, and positions that are not the slots'": _case(_causal | {"key_value_seq_lengths": np.array([21, 9]), "query_positions": np.arange(T) + 3}),
    "bias": _case(_causal | {"bias": _floats(1, N, T, S)}),
    "bias by head alone": _case({"bias": _floats(B, N, 1, 1)}),
    "scale": _case(_causal | {"scale": 0.7}),
    "sinks": _case(_causal | {"key_value_seq_lengths": np.array([32, 0]), "sinks": _floats(N)}),
    "alibi": _case(_causal, mod=score_mods.Alibi, params=_slopes),
    "T5 bias": _case(mod=lambda table: score_mods.RelativeBias(table, bidirectional=True, max_distance=16), params=_floats(8, N)),
    "soft cap, learned": _case(mod=score_mods.SoftCap, params=np.array(1.5, np.float32), amplify=4.0),
    "alibi, then a soft cap": _case(_causal, mod=lambda slopes: score_mods.then(score_mods.Alibi(slopes), score_mods.SoftCap(2.0)), params=_slopes),
    "function that captures a table": _case(_causal, mod=lambda table: lambda s, b, h, q, kv: s * 0.5 + (kv - q) * table[h] * (1 + b), params=_slopes),
    "dropout": _case(_causal | _dropout),
    "dropout, the same for all heads": _case(_dropout | {"broadcast_dropout": True}),
    "logits of +-1e4": _case(amplify=3e3),
}  # fmt: skip
# What a ring is compared with, if not the dense formula: "xla" scales the product instead of the query; at logits this
# large, that alone changes weights by 3e-4.
AGAINST = {"logits of +-1e4": "blockwise"}


@functools.cache
def expected(name: str, gradients: bool = True) -> tuple[Results, Inputs]:
    """Results and gradients of the call on one device."""
    case, against = CASES[name], AGAINST.get(name, "xla")
    compiled = jax.jit(lambda arrays: values_and_gradients(case, lambda x: run(case, against, x), arrays, gradients))
    return jax.device_get(compiled(inputs(case)))


def in_a_ring(name: str, how: Ring | Ulysses, gradients: bool = True) -> tuple[Results, Inputs]:
    """Results and gradients of the call on a ring. Inputs are reordered to the ring's layout, and results back."""
    ring_axis = how.axis_name if isinstance(how, Ring) else how.ring_axis
    case, devices = CASES[name], how.mesh.shape.get(ring_axis, 1)
    axes = {"query": (1,), "key": (1,), "value": (1,), "query_positions": (-1,), "kv_positions": (-1,)}

    def order(turn: Callable[[ArrayLike, int, int], ArrayLike], name: str, x: Any) -> Any:
        along = (-2, -1) if name in ("bias", "mask") and hasattr(x, "ndim") else axes.get(name, ())
        for axis in along if how.layout == "zigzag" else ():
            x = x if x.shape[axis] == 1 else turn(x, devices, axis)
        return x

    options = {name: order(to_zigzag, name, x) for name, x in case.options.items()}

    def natural(arrays: Inputs) -> Results:
        arrays = {name: order(to_zigzag, name, x) for name, x in arrays.items()}
        return tuple(order(from_zigzag, "query", x) for x in run(case, how, arrays, options))

    return jax.jit(lambda arrays: values_and_gradients(case, natural, arrays, gradients))(inputs(case))


def mesh_of(devices: int) -> Mesh:
    """A mesh of the first devices along one axis, ``sequence``."""
    return jax.make_mesh((devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices])


def numbers(name: str, devices: int, layout: str, implementation: str | Kernel | None = None) -> dict[str, float]:
    """The errors of the values and gradients of one case on one ring."""
    how = Ring(mesh_of(devices), "sequence", layout=layout, implementation=implementation)
    (results, gradients), (exact, exact_gradients) = in_a_ring(name, how), expected(name)
    each = [error(x, exact_gradients[argument]) for argument, x in gradients.items()]
    return {"values": largest_error(results, exact), "gradients": max(each)}


def assert_close(found: tuple[Results, Inputs], name: str) -> None:
    """Results and gradients of a case, as far as rounding goes, are those of one device."""
    (results, gradients), (wanted, wanted_gradients) = found, expected(name)
    assert largest_error(results, wanted) <= 1e-5
    assert largest_error(gradients, {name: wanted_gradients[name] for name in gradients}) <= 1e-4


def check_statistics(how: Ring | Ulysses, spec: PartitionSpec, ring: int, kv_heads: int) -> None:
    """Every statistic on a ring of so many devices is that of one device, of arrays that lie there by ``spec``."""
    turn, back = (to_zigzag, from_zigzag) if how.layout == "zigzag" else (lambda x, devices, axis=1: x,) * 2
    query, key = (np.random.default_rng(3).normal(size=(2, 16, n, 6)).astype(np.float32) for n in (4, kv_heads))
    tokens, eligible = np.random.default_rng(4).integers(0, 5, (2, 16)), np.arange(16) < np.array([[13], [16]])
    options = {"is_causal": True, "key_value_seq_lengths": np.array([11, 16])}
    wanted = heads.statistics(query, key, tokens=tokens, eligible=eligible, **options)
    look = jax.jit(lambda q, k, t, e: heads.statistics(q, k, tokens=t, eligible=e, implementation=how, **options))
    given = [turn(jnp.asarray(x), ring) for x in (query, key, tokens, eligible)]
    found = look(*(jax.device_put(x, NamedSharding(how.mesh, spec)) for x in given[:2]), *given[2:])
    found["received"] = back(np.asarray(found["received"]), ring, axis=2)
    assert set(found) == set(wanted)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-6), found, wanted)
