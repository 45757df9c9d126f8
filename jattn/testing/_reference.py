"""Computes the result of a case in float64: the formula and its gradients, without using jattn's code."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jattn._mods.arrays import AnyArray
from jattn.testing._cases import Case

Inputs = dict[str, AnyArray]  # query, key, value, and bias, sinks and params if the case has them
Results = tuple[AnyArray, AnyArray]  # out, lse


def inputs(case: Case) -> dict[str, np.ndarray]:
    """All differentiated arrays, as float32 NumPy arrays, rounded to the case's dtype."""
    B, T, S, N, K, H, D = case.shape
    rng = np.random.default_rng(7)
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, D)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    arrays["query"] = arrays["query"] * case.amplify
    arrays["key"] = arrays["key"] + case.offset * rng.normal(size=(K, H))
    arrays = {name: x.astype(case.dtype).astype(np.float32) for name, x in arrays.items()}
    arrays |= {name: case.options[name] for name in ("bias", "sinks") if name in case.options}
    return arrays if case.params is None else arrays | {"params": np.asarray(case.params)}


def poisoned(case: Case, value: float) -> dict[str, np.ndarray]:
    """``inputs``, with ``value`` in all unseen keys and in all queries past their length."""
    arrays, seen = inputs(case), visible(case)
    lengths = np.reshape(case.options.get("query_seq_lengths", [case.shape[1]] * case.shape[0]), (-1, 1))
    unseen, blind = ~seen.any((1, 2)), np.arange(case.shape[1]) >= lengths
    assert unseen.any() or blind.any()
    arrays["key"][unseen], arrays["value"][unseen], arrays["query"][blind] = value, value, value
    return arrays


def visible(case: Case) -> np.ndarray:
    """The visible pairs ``[B,N,T,S]``, evaluated one by one unless the case is ``vectorized``."""
    (B, T, S, N, *_), options = case.shape, case.options
    q_pos = np.broadcast_to(options.get("query_positions", np.arange(T)), (B, T))
    kv_pos = np.broadcast_to(options.get("kv_positions", np.arange(S)), (B, S))
    if case.vectorized:
        b, h = np.arange(B)[:, None, None, None], np.arange(N)[:, None, None]
        seen = np.broadcast_to(case.sees(b, h, q_pos[:, None, :, None], kv_pos[:, None, None, :]), (B, N, T, S))
    else:
        pairs = np.ndindex(B, N, T, S)
        seen = [bool(case.sees(b, h, int(q_pos[b, t]), int(kv_pos[b, s]))) for b, h, t, s in pairs]
        seen = np.array(seen, bool).reshape(B, N, T, S)
    lengths = zip((T, S), ("query_seq_lengths", "key_value_seq_lengths"), strict=True)
    rows, columns = (np.arange(x) < np.reshape(options.get(name, [x] * B), (B, 1)) for x, name in lengths)
    seen = seen & rows[:, None, :, None] & columns[:, None, None, :]
    return seen if callable(options.get("mask", len)) else seen & options["mask"]


def reference(case: Case) -> tuple[Results, Inputs]:
    """The formula, computed explicitly: ``out`` and ``lse``, and handwritten gradients of ``factors`` times both.

    With an ``offset``, the gradients of ``factors`` times ``out`` only.
    """
    _, T, S, N, K, H, _ = case.shape
    arrays = {name: x.astype(np.float64) for name, x in inputs(case).items()}
    query, key, value = arrays["query"], *(np.repeat(arrays[name], N // K, axis=2) for name in ("key", "value"))
    scale, bias = case.options.get("scale", 1 / np.sqrt(H)), arrays.get("bias", np.zeros(()))
    seen, scores = visible(case), scale * np.einsum("btnh,bsnh->bnts", query, key) + bias
    h, q_idx, kv_idx = np.arange(N)[:, None, None], np.arange(T)[:, None], np.arange(S)[None, :]
    before = arrays.get("params"), np.where(seen, scores, 1.0)
    of_pairs = case.score or (lambda params, scores, *indices: scores)
    score = lambda params, scores: of_pairs(params, scores, h, q_idx, kv_idx)
    if case.score is not None:
        scores = _in_float64(score, *before)
        seen = seen & (scores > -np.inf)
    sinks = arrays.get("sinks", np.full(N, -np.inf))[None, :, None]
    high = np.maximum(np.max(scores, axis=-1, initial=-np.inf, where=seen), sinks)
    high = np.where(high == -np.inf, 0.0, high)
    exponentials = np.exp(np.where(seen, scores - high[..., None], -np.inf))
    total = exponentials.sum(-1) + np.exp(sinks - high)
    with np.errstate(divide="ignore"):
        lse = high + np.log(total)
    weights = exponentials / np.where(total == 0, 1.0, total)[..., None]
    out = np.einsum("bnts,bsnd->btnd", weights, value)

    of_out, of_lse = (factors(x.shape) for x in (out, lse.swapaxes(1, 2)))
    of_lse = np.where((lse == -np.inf) | (case.offset != 0.0), 0.0, of_lse.swapaxes(1, 2))
    of_weights = np.einsum("btnd,bsnd->bnts", of_out, value)
    mean = (weights * of_weights).sum(-1)
    of_scores = weights * (of_weights - mean[..., None] + of_lse[..., None])
    gradients = {}
    if "sinks" in arrays:
        gradients["sinks"] = (np.exp(sinks - lse) * (of_lse - mean)).sum((0, 2))
    if case.score is not None:
        pull = lambda of_scores, *before: jax.vjp(score, *before)[1](of_scores)
        gradients["params"], of_scores = _in_float64(pull, of_scores, *before)
    if "bias" in arrays:
        shared = [axis for axis, size in enumerate((1,) * (4 - bias.ndim) + bias.shape) if size == 1]
        gradients["bias"] = of_scores.sum(tuple(shared)).reshape(bias.shape)
    grouped = lambda x: x.reshape(*x.shape[:2], K, N // K, x.shape[-1]).sum(3)
    gradients["query"] = scale * np.einsum("bnts,bsnh->btnh", of_scores, key)
    gradients["key"] = grouped(scale * np.einsum("bnts,btnh->bsnh", of_scores, query))
    gradients["value"] = grouped(np.einsum("bnts,btnd->bsnd", weights, of_out))
    return (out, lse.swapaxes(1, 2)), gradients


def _in_float64(fn: Callable[..., Any], *arguments: np.ndarray | None) -> Any:
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.device_get(jax.jit(fn)(*arguments))


def factors(shape: tuple[int, ...]) -> np.ndarray:
    """A different factor for each entry, exact in float32."""
    return np.random.default_rng(9).normal(size=shape).astype(np.float32).astype(np.float64)


def error(x: AnyArray, expected: AnyArray) -> float:
    """The largest difference divided by the largest finite expected value; infinite for unexpected NaN or infinity."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    if x.shape != expected.shape or (x[~finite] != expected[~finite]).any() or not np.isfinite(x[finite]).all():
        return np.inf
    return float(np.abs(x[finite] - expected[finite]).max(initial=0.0) / np.abs(expected[finite]).max(initial=1e-3))
