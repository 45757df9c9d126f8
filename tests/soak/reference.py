"""Attention in float64 NumPy with gradients derived by hand, and a bound on the rounding error of each number.

Shares no code with jattn and forms the ``[B,N,T,S]`` matrices. With ``s`` a modified score, ``p`` a weight,
``g`` and ``l`` the cotangents of output and lse:

    lse = log(sum e^s + e^sink)     p = e^(s - lse)     out = p v
    dp = g v^T     ds = p (dp - sum p dp + l)     dsink = sum p_sink (l - sum p dp)     dv = p^T g

and ``ds`` is propagated back through the score function, the scale and the bias.

Tolerances are propagated to first order. The error of a score is ``delta = C u (size)``, where ``size`` is the sum of
the absolute values of its terms and ``u`` the unit of the softmax's dtype. The relative error of a weight is its delta,
plus the mean delta of its row, plus ``C u`` of the arrays' dtype. Later errors follow from the equations above in
absolute values, so that the result of a cancellation is not expected to be exact. The comparison is ``|found -
expected| <= tolerance``. A tolerance may be as large as the number itself if float32 cannot do better (logits of 1e5
and more).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.soak.draw import DTYPES, LARGEST, MASK_FUNCTIONS, MOD_FUNCTIONS, Arrays, Spec, Structure

C = 8.0  # the approximate number of roundings per number

Where = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # b [B,1,1,1], h [1,N,1,1], q [B|1,1,T,1], kv [B|1,1,1,S]
Expected = dict[str, tuple[np.ndarray, Any]]  # name -> (value, tolerance)


def unit(dtype: str) -> float:
    """The distance between two neighbouring numbers near 1."""
    return float(ml_dtypes.finfo(DTYPES[dtype]).eps)


def least(dtype: str) -> float:
    """Numbers below this may become 0: processors flush subnormals, and compute float16 in float32."""
    info = ml_dtypes.finfo(DTYPES[dtype])
    return float(info.smallest_subnormal if dtype == "float16" else info.smallest_normal)


# ---- masks


def slots(structure: Structure, length: int) -> np.ndarray:
    """The token in each slot: in zigzag, device p has the p-th of 2P chunks from either end."""
    devices, zigzag = structure.ring
    if not zigzag:
        return np.arange(length)
    size = length // (2 * devices)
    starts = [start for p in range(devices) for start in (p, 2 * devices - 1 - p)]
    return np.concatenate([np.arange(start * size, (start + 1) * size) for start in starts])


def places(structure: Structure, arrays: Arrays) -> Where:
    """The indices that masks and score functions receive, int64."""
    B, T, S, N, *_ = structure.sizes
    found = []
    for name, length in (("query_positions", T), ("kv_positions", S)):
        x = np.asarray(arrays.get(name, slots(structure, length)), np.int64)
        found.append(x if x.ndim == 2 else x[None])
    q, kv = found
    return np.arange(B).reshape(B, 1, 1, 1), np.arange(N).reshape(1, N, 1, 1), q[:, None, :, None], kv[:, None, None, :]


def look_up(table: np.ndarray, *indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``table[indices]``, and whether the indices are in range."""
    inside, at = np.array(True), []
    for index, size in zip(indices, table.shape, strict=True):
        if size == 0:
            shape = np.broadcast_shapes(*(index.shape for index in indices))
            return np.zeros(shape, table.dtype), np.zeros(shape, bool)
        inside = inside & (index >= 0) & (index < size)
        at.append(index.clip(0, size - 1))
    return table[tuple(at)], inside


def sees(spec: Spec, arrays: Arrays, where: Where) -> Any:
    """The pairs that the mask keeps visible; broadcasts to ``[B,N,T,S]``."""
    b, h, q, kv = where
    given = [arrays[name] for name in spec.arrays]
    numbers = [int(x) for x in (*spec.static, *given)] if spec.kind in ("window", "prefix") else []
    match spec.kind:
        case "and":
            return np.logical_and(*(sees(part, arrays, where) for part in spec.parts))
        case "or":
            return np.logical_or(*(sees(part, arrays, where) for part in spec.parts))
        case "not":
            return np.logical_not(sees(spec.parts[0], arrays, where))
        case "causal":
            return kv <= q
        case "window":
            return window(q, kv, *numbers)
        case "prefix":
            return kv < numbers[0]
        case "padding":
            lengths = given[0].astype(np.int64)
            return kv < (lengths[0] if lengths.size == 1 else lengths[b])
        case "segments":
            ids = [given[0], given[-1]]
            ids = [x[0] if x.ndim == 2 and len(x) == 1 else x for x in ids]
            (one, here), (other, there) = (
                look_up(x.astype(np.int64), *([b] if x.ndim == 2 else []), at)
                for x, at in zip(ids, (q, kv), strict=True)
            )
            return (one == other) & here & there
        case "dense":
            table = given[0].reshape((1,) * (4 - given[0].ndim) + given[0].shape)
            at = [np.zeros_like(x) if size == 1 else x for x, size in zip(where, table.shape, strict=True)]
            value, inside = look_up(table, *at)
            return value & inside
        case "function":
            return MASK_FUNCTIONS[spec.static[0]](given[0])(*where)
    raise AssertionError(spec.kind)


def window(q: np.ndarray, kv: np.ndarray, left: int, right: int) -> np.ndarray:
    """``-left <= kv - q <= right``; a side of 2^31 - 1 or more is unlimited."""
    return ((left >= LARGEST) | (kv >= q - left)) & ((right >= LARGEST) | (kv <= q + right))


def visible_pairs(structure: Structure, arrays: Arrays) -> np.ndarray:
    """Whether each query sees each key, ``[B,N,T,S]``."""
    B, T, S, N, *_ = structure.sizes
    b, _, q, kv = where = places(structure, arrays)
    visible = np.ones((B, N, T, S), bool)
    if structure.mask is not None:
        visible &= sees(structure.mask, arrays, where)
    if "mask" in arrays:
        visible &= arrays["mask"]
    if structure.is_causal:
        visible &= kv <= q
    if structure.window is not None:
        sides = structure.window if isinstance(structure.window, tuple) else (structure.window,) * 2
        visible &= window(q, kv, *sides)
    if "query_seq_lengths" in arrays:
        visible &= slots(structure, T)[:, None] < arrays["query_seq_lengths"].astype(int)[b]
    if "key_value_seq_lengths" in arrays:
        visible &= slots(structure, S) < arrays["key_value_seq_lengths"].astype(int)[b]
    return visible


# ---- score functions


@dataclasses.dataclass(frozen=True)
class Modified:
    """A modified ``score``, and its ``size``: the sum of the absolute values of its terms.

    ``back`` maps the cotangent of ``score`` to those of the original score and, by name, of the function's arrays. Its
    second argument selects absolute values throughout.
    """

    score: np.ndarray
    size: np.ndarray
    back: Callable[[np.ndarray, bool], tuple[np.ndarray, Arrays]]


def modify(spec: Spec, score: np.ndarray, size: np.ndarray, arrays: Arrays, where: Where) -> Modified:
    """Applies the score function to ``score [B,N,T,S]``."""
    b, h, q, kv = where
    given = [np.asarray(arrays[name], np.float64) for name in spec.arrays]
    heads = np.broadcast_to(h, score.shape)

    def gathered(ds: np.ndarray, at: Any, like: np.ndarray) -> np.ndarray:
        found = np.zeros(like.shape)
        np.add.at(found, at, ds)
        return found

    match spec.kind:
        case "then":
            first = modify(spec.parts[0], score, size, arrays, where)
            second = modify(spec.parts[1], first.score, first.size, arrays, where)

            def through(ds: np.ndarray, absolute: bool) -> tuple[np.ndarray, Arrays]:
                ds, later = second.back(ds, absolute)
                ds, earlier = first.back(ds, absolute)
                return ds, later | earlier

            return Modified(second.score, second.size, through)
        case "alibi":
            distance = np.broadcast_to(abs(q - kv).astype(np.float64), score.shape)
            added = -given[0][h] * distance

            def of_slopes(ds: np.ndarray, absolute: bool) -> tuple[np.ndarray, Arrays]:
                return ds, {spec.arrays[0]: gathered(ds * distance * (1 if absolute else -1), heads, given[0])}

            return Modified(score + added, size + abs(added), of_slopes)
        case "relative":
            table, (both, most) = given[0], spec.static
            bucket = t5_bucket(np.broadcast_to(kv - q, score.shape), len(table), both, most)

            def of_table(ds: np.ndarray, absolute: bool) -> tuple[np.ndarray, Arrays]:
                return ds, {spec.arrays[0]: gathered(ds, (bucket, heads), table)}

            return Modified(score + table[bucket, h], size + abs(table[bucket, h]), of_table)
        case "cap":
            cap = float(given[0]) if given else spec.static[0]
            ratio = score / cap
            bent = np.tanh(ratio)
            slope = 1 - bent**2

            def of_cap(ds: np.ndarray, absolute: bool) -> tuple[np.ndarray, Arrays]:
                by_cap = abs(bent) + abs(ratio) * (slope + 1e-3) if absolute else bent - ratio * slope
                learned = {spec.arrays[0]: np.asarray(np.sum(ds * by_cap))} if given else {}
                return ds if absolute else ds * slope, learned

            return Modified(cap * bent, size * slope + abs(cap * bent), of_cap)
        case "gain":
            gain = given[0][h]

            def of_gain(ds: np.ndarray, absolute: bool) -> tuple[np.ndarray, Arrays]:
                into = size if absolute else score
                return ds * (abs(gain) if absolute else gain), {spec.arrays[0]: gathered(ds * into, heads, given[0])}

            return Modified(MOD_FUNCTIONS["gain"](given[0])(score, *where), size * abs(gain), of_gain)
        case "tilt":
            at = np.broadcast_to((q % 8 + kv % 8) % 8, score.shape)

            def of_tilt(ds: np.ndarray, absolute: bool) -> tuple[np.ndarray, Arrays]:
                return ds, {spec.arrays[0]: gathered(ds, at, given[0])}

            tilted = MOD_FUNCTIONS["tilt"](given[0])(score, *where)
            return Modified(tilted, size + abs(given[0][at]), of_tilt)
    raise AssertionError(spec.kind)


def t5_bucket(offset: np.ndarray, buckets: int, bidirectional: bool, max_distance: int) -> np.ndarray:
    """T5's bucket of each ``offset = kv - q``."""
    first = np.zeros_like(offset)
    if bidirectional:
        buckets //= 2
        first = np.where(offset > 0, buckets, 0)
        distance = abs(offset)
    else:
        distance = np.maximum(-offset, 0)
    exact = buckets // 2
    far = exact + np.floor(
        np.log(np.maximum(distance, exact) / exact) / math.log(max_distance / exact) * (buckets - exact)
    ).astype(np.int64)
    return first + np.where(distance < exact, distance, np.minimum(far, buckets - 1))


# ---- attention


def attention(structure: Structure, arrays: Arrays, sizes: Arrays | None = None) -> Expected:
    """All results of a call by name: ``out``, ``lse``, ``d NAME`` for each array, weights, statistics.

    ``arrays`` are those of the call; without a batch axis if it is not batched. ``sizes``: where query, key, value and
    the output's cotangent are results themselves, the sums of the absolute values of their terms.
    """
    B, T, S, N, K, H, D = structure.sizes
    u, u_softmax = unit(structure.dtype), unit(structure.softmax_dtype)
    tiny = least(structure.dtype)
    floats = ("query", "key", "value", "out_cotangent", "lse_cotangent")
    lead = {name: np.asarray(arrays[name], np.float64).reshape(B, *arrays[name].shape[-3:]) for name in floats[:4]}
    of_lse = np.asarray(arrays["lse_cotangent"], np.float64).reshape(B, T, N)
    visible, where = visible_pairs(structure, arrays), places(structure, arrays)

    def per_head(x: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """``[B,.,N,.]``, 0 where the head uses none of it."""
        return np.where(np.swapaxes(seen, 1, 2)[..., None], np.repeat(x, N // x.shape[2], axis=2), 0.0)

    q, k, v = (
        per_head(lead[name], visible.any(axis)) for name, axis in (("query", 3), ("key", 2), ("value", 2))
    )  # fmt: skip
    g, l = lead["out_cotangent"], np.swapaxes(of_lse, 1, 2)[..., None]
    size_of = {"query": abs(q), "key": abs(k), "value": abs(v), "out_cotangent": abs(g)}
    for name, x in (sizes or {}).items():
        size_of[name] = np.repeat(x, N // x.shape[2], axis=2)
    abs_q, abs_k, abs_v, abs_g = size_of.values()

    # forward
    scale = float(arrays["scale"]) if "scale" in arrays else structure.scale
    scale = H**-0.5 if scale is None else scale
    raw, abs_raw = np.einsum("btnh,bsnh->bnts", q, k), np.einsum("btnh,bsnh->bnts", abs_q, abs_k)
    score, size = scale * raw, abs(scale) * abs_raw
    if "bias" in arrays:
        bias = np.asarray(arrays["bias"], np.float64)
        score, size = score + bias, size + abs(bias)
    modified = Modified(score, size, lambda ds, absolute: (ds, {}))
    if structure.mod is not None:
        stand_in = np.where(visible, score, 1.0), np.where(visible, size, 1.0)
        modified = modify(structure.mod, *stand_in, arrays, where)
    score, size = np.where(visible, modified.score, -np.inf), np.where(visible, modified.size, 0.0)
    sinks = np.asarray(arrays["sinks"], np.float64).reshape(1, N, 1, 1) if "sinks" in arrays else np.array(-np.inf)
    high = np.maximum(score.max(-1, keepdims=True, initial=-np.inf), sinks)
    high = np.where(high == -np.inf, 0.0, high)
    total = np.exp(score - high).sum(-1, keepdims=True) + np.exp(sinks - high)
    lse = np.where(total > 0, high + np.log(np.where(total > 0, total, 1.0)), -np.inf)
    finite = np.where(lse == -np.inf, 0.0, lse)
    p, p_sink = np.exp(score - finite), np.exp(sinks - finite)
    out = np.einsum("bnts,bsnd->btnd", p, v)

    # bounds on the errors of weights (relative) and lse (absolute)
    delta = C * u_softmax * (size + np.where(visible, abs(score - high), 0.0))
    sink_delta = C * u_softmax * np.where(sinks == -np.inf, 0.0, abs(sinks) + abs(sinks - high))
    of_row = (p * delta).sum(-1, keepdims=True) + p_sink * sink_delta + C * u_softmax * np.where(total > 0, 1.0, 0.0)
    exact = expm1(delta + of_row)  # the weights themselves, in the softmax's dtype
    off = exact + C * u  # as multiplied with the values
    found: Expected = {
        "out": (out, np.einsum("bnts,bsnd->btnd", p * off + tiny * visible, abs_v) + C * u * abs(out)),
        "lse": (np.swapaxes(lse[..., 0], 1, 2), np.swapaxes((of_row + C * u_softmax * abs(finite))[..., 0], 1, 2)),
    }

    # backward
    dp, abs_dp = np.einsum("btnd,bsnd->bnts", g, v), np.einsum("btnd,bsnd->bnts", abs_g, abs_v)
    mean, abs_mean = (p * dp).sum(-1, keepdims=True), (p * abs_dp).sum(-1, keepdims=True)
    ds = p * (dp - mean + l)
    off_mean = (p * off * abs_dp).sum(-1, keepdims=True)
    moved = abs_dp + abs_mean + abs(l)
    off_ds = np.where(visible, p * off * moved + p * off_mean + tiny * (moved + 1.0), 0.0)
    gradients: dict[str, tuple[Any, Any]] = {}
    if "sinks" in arrays:
        off_sink = p_sink * ((sink_delta + of_row + C * u) * (abs_mean + abs(l)) + off_mean) + tiny
        gradients["sinks"] = (p_sink * (l - mean)).sum((0, 2, 3)), off_sink.sum((0, 2, 3))
    ds, of_mod = modified.back(ds, False)
    off_ds, off_mod = modified.back(off_ds, True)
    ds, off_ds = (np.where(visible, x, 0.0) for x in (ds, off_ds))
    gradients |= {name: (of_mod[name], off_mod[name]) for name in of_mod}
    if "bias" in arrays:
        shape = np.shape(arrays["bias"])
        gradients["bias"] = sum_to(ds, shape), sum_to(off_ds, shape)
    if "scale" in arrays:
        gradients["scale"] = (ds * raw).sum(), (off_ds * abs_raw).sum()
    dq, off_q = scale * np.einsum("bnts,bsnh->btnh", ds, k), abs(scale) * np.einsum("bnts,bsnh->btnh", off_ds, abs_k)
    dk, off_k = scale * np.einsum("bnts,btnh->bsnh", ds, q), abs(scale) * np.einsum("bnts,btnh->bsnh", off_ds, abs_q)
    dv, off_v = np.einsum("bnts,btnd->bsnd", p, g), np.einsum("bnts,btnd->bsnd", p * off + tiny * visible, abs_g)
    gradients["query"] = dq, off_q
    for name, x, by in (("key", dk, off_k), ("value", dv, off_v)):
        groups = (B, S, K, N // K, x.shape[-1])
        gradients[name] = x.reshape(groups).sum(3), by.reshape(groups).sum(3)
    for name, (x, by) in gradients.items():
        narrow = structure.dtype if name not in arrays else str(np.asarray(arrays[name]).dtype)
        found[f"d {name}"] = x, by + C * unit(narrow) * abs(np.asarray(x)) + least(narrow)

    if structure.weights:
        found["weights"] = p, p * exact + least(structure.softmax_dtype)
    if structure.statistics:
        found |= statistics(structure, arrays, score, delta, visible)
    if not structure.batched:
        batched = {"out", "lse", "d query", "d key", "d value", "weights"}
        found = {
            name: (x[0], by[0]) if name in batched or name.startswith("of ") else (x, by)
            for name, (x, by) in found.items()
        }
    return found


def expm1(off: np.ndarray) -> np.ndarray:
    """The relative error of ``exp`` if its exponent is off by ``off``; infinite if that is too much."""
    return np.where(off < 100.0, np.expm1(np.minimum(off, 100.0)), np.inf)


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The transpose of broadcasting from ``shape`` to ``x.shape``."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)


def statistics(
    structure: Structure, arrays: Arrays, score: np.ndarray, delta: np.ndarray, visible: np.ndarray
) -> Expected:
    """``jattn.heads.statistics`` without sinks, as ``of NAME [B,N,...]`` and ``of support NAME``."""
    B, T, S, N, *_ = structure.sizes
    u = unit(structure.softmax_dtype)
    high = score.max(-1, keepdims=True, initial=-np.inf)
    high = np.where(high == -np.inf, 0.0, high)
    p = np.exp(score - high)
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total > 0, total, 1.0)
    size = abs(np.where(visible, score, 0.0)).max(-1, keepdims=True, initial=0.0)
    of_row = (p * delta).sum(-1, keepdims=True)
    off = p * expm1(2 * delta + 2 * of_row + 2 * C * u * (1 + size)) + least(structure.softmax_dtype)
    _, _, q, kv = places(structure, arrays)
    q_slot, kv_slot = slots(structure, T), slots(structure, S)
    seen = visible.any(-1)
    if "eligible" in arrays:
        seen = seen & arrays["eligible"]
    later = np.broadcast_to(q[..., 0] > 0, seen.shape) & seen
    count = visible.sum(-1)
    logs = np.log(np.where(p > 0, p, 1.0))
    most = np.log(np.maximum(count, 2))[..., None]
    entropy = -p * logs / most, off * (abs(logs) + 1 + 2 * C * u * size) / most
    found: Expected = {}

    def mean(name: str, values: np.ndarray, by: np.ndarray, counted: np.ndarray) -> None:
        many = np.maximum(counted.sum(-1), 1)
        x, by = (np.where(counted, x, 0.0).sum(-1) / many for x in (values, by))
        found[f"of {name}"] = x, by + C * u * abs(x)
        found[f"of support {name}"] = counted.sum(-1).astype(float), np.zeros((B, N))

    def share(name: str, pairs: np.ndarray, counted: np.ndarray) -> None:
        mean(name, (p * pairs).sum(-1), (off * pairs).sum(-1), counted)

    mean("entropy", entropy[0].sum(-1), entropy[1].sum(-1), seen & (count >= 2))
    mean("max_weight", p.max(-1, initial=0.0), off.max(-1, initial=0.0), seen)
    share("distance", abs(q - kv).astype(float), seen)
    share("previous_token", kv == q - 1, later)
    share("current_token", kv == q, seen)
    share("first_token", kv == 0, later)
    counted = seen[..., None] & visible
    some = counted.any((2, 3))
    x = np.where(some, np.where(counted, score, -np.inf).max((2, 3), initial=-np.inf), 0.0)
    wide = np.where(counted, 4 * delta + 4 * C * u * (1 + size), 0.0).max((2, 3), initial=0.0)
    found["of max_logit"] = x, wide
    received = seen[..., None]
    found["of received"] = (p * received).sum(2), (off * received).sum(2) * (1 + C * u)
    offsets = kv_slot[None, :] - q_slot[:, None] + T - 1
    profile, by, pairs = (np.zeros((B, N, max(T + S - 1, 0))) for _ in range(3))
    for t in range(T):
        profile[..., offsets[t]] += np.where(seen[..., t, None], p[:, :, t], 0.0)
        by[..., offsets[t]] += np.where(seen[..., t, None], off[:, :, t], 0.0)
        pairs[..., offsets[t]] += seen[..., t, None]
    found["of offset_profile"] = profile / np.maximum(pairs, 1), by / np.maximum(pairs, 1)
    for name in ("max_logit", "received", "offset_profile"):
        found[f"of support {name}"] = found["of support max_weight"]
    if "tokens" in arrays:
        tokens = arrays["tokens"].reshape(B, T)
        of_token = np.empty_like(tokens)  # in the order of the tokens
        of_token[:, q_slot] = tokens
        alike = of_token[:, :, None] == of_token[:, None, :]  # [B,q,kv], in the order of the tokens
        earlier = np.arange(T)[None, :] < np.arange(T)[:, None]
        before = alike & earlier
        after = np.zeros_like(before)
        after[:, :, 1:] = before[:, :, :-1]
        occurred = before.any(-1)[:, None, q_slot]
        for name, x in (("duplicate_token", before), ("induction", after)):
            share(name, x[:, None][:, :, q_slot][..., kv_slot], seen & occurred)
    return found


# ---- layers


def layer(structure: Structure, arrays: Arrays) -> Expected:
    """``MultiHeadAttention``: ``attention`` between linear maps. ``y``, and ``d NAME`` for inputs and parameters."""
    u = unit(structure.dtype)
    x = {name: np.asarray(arrays[name], np.float64) for name in structure.learned}
    inputs = {"query": x["inputs_q"], "key": x["inputs_k"], "value": x["inputs_k"]}
    projected, sizes = dict(arrays), {}
    for name, given in inputs.items():
        kernel, bias = x[f"own {name} kernel"], x[f"own {name} bias"]
        projected[name] = np.einsum("btm,mnh->btnh", given, kernel) + bias
        sizes[name] = np.einsum("btm,mnh->btnh", abs(given), abs(kernel)) + abs(bias)
    g, out_kernel = np.asarray(arrays["out_cotangent"], np.float64), x["own out kernel"]
    projected["out_cotangent"] = np.einsum("btm,ndm->btnd", g, out_kernel)
    sizes["out_cotangent"] = np.einsum("btm,ndm->btnd", abs(g), abs(out_kernel))
    projected["lse_cotangent"] = np.zeros(projected["out_cotangent"].shape[:3])
    inner = attention(structure, projected, sizes)
    out, off_out = inner.pop("out")
    inner.pop("lse")
    y = np.einsum("btnd,ndm->btm", out, out_kernel)
    size = np.einsum("btnd,ndm->btm", abs(out), abs(out_kernel)) + abs(x["own out bias"])
    found: Expected = {
        "out": (y + x["own out bias"], np.einsum("btnd,ndm->btm", off_out, abs(out_kernel)) + C * u * size),
        "d own out kernel": tuple(np.einsum("btnd,btm->ndm", *one) for one in ((out, g), (off_out + C * u * abs(out), abs(g)))),
        "d own out bias": (g.sum((0, 1)), C * u * abs(g).sum((0, 1))),
    }  # fmt: skip
    of_inputs = {name: [np.zeros(x[name].shape), np.zeros(x[name].shape)] for name in ("inputs_q", "inputs_k")}
    for name, given in inputs.items():
        d, off = inner.pop(f"d {name}")
        off = off + C * u * abs(d)
        kernel = x[f"own {name} kernel"]
        found[f"d own {name} kernel"] = tuple(
            np.einsum("btnh,btm->mnh", *one) for one in ((d, given), (off, abs(given)))
        )
        found[f"d own {name} bias"] = d.sum((0, 1)), off.sum((0, 1))
        of_input = of_inputs["inputs_q" if name == "query" else "inputs_k"]
        of_input[0] += np.einsum("btnh,mnh->btm", d, kernel)
        of_input[1] += np.einsum("btnh,mnh->btm", off, abs(kernel))
    return found | inner | {f"d {name}": (d, off) for name, (d, off) in of_inputs.items()}


def expected(structure: Structure, arrays: Arrays) -> Expected:
    """The expected results of a case, with tolerances."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        return layer(structure, arrays) if structure.features else attention(structure, arrays)
