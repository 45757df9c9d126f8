"""Attention by its formula, in NumPy and float64, with the whole matrix of weights; its gradients derived by hand.

With ``s`` a modified score, ``p`` a weight, ``g`` and ``l`` the cotangents of output and lse:

    lse = log(sum e^s + e^sink)     p = e^(s - lse)     out = p v
    dp = g v^T     ds = p (dp - g out + l)     dsink = sum p_sink (l - g out)     dv = p^T g

and ``ds`` is propagated back through the score function, the bias and the scale. `attend`, its gradients, `layer` and
`statistics` also take numbers that know their rounding error (`tests.reference.bounded`) and then return such numbers. The
conformance table, which users have too, has a reference of its own.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np


def float64(x: Any) -> Any:
    """In float64 (or complex128), unless the numbers know their rounding error."""
    return x if hasattr(x, "error") else np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def exponentials(scores: Any, visible: Any = True, sinks: Any = -np.inf) -> tuple[Any, np.ndarray, Any]:
    """``e^(s - high)``, 0 where hidden; the highest score of each row ``[...,1]``, sink included, or 0; the sum."""
    scores, sinks = np.where(visible, float64(scores), -np.inf), float64(sinks)
    high = np.maximum(np.asarray(scores).real.max(-1, keepdims=True, initial=-np.inf), np.asarray(sinks))
    high = np.where(high == -np.inf, 0.0, high)
    terms = np.exp(np.where(visible, scores - high, -np.inf))
    return terms, high, terms.sum(-1, keepdims=True) + np.exp(sinks - high)


def softmax(scores: Any, visible: Any = True) -> Any:
    """Along the last axis, over the visible entries; 0 for the others, also where none is visible."""
    terms, _, total = exponentials(scores, visible)
    return terms / np.where(total == 0.0, 1.0, total)


def weights(query: Any, key: Any, visible: Any = True) -> np.ndarray:
    """``[B,N,T,S]`` of a query ``[B,T,N,H]`` and a key ``[B,S,K,H]``; ``visible``: broadcastable to them."""
    query, key = float64(query), float64(key)
    key = key.repeat(query.shape[2] // key.shape[2], 2)
    return softmax(np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1]), visible)


def attention(query: Any, key: Any, value: Any, visible: Any = True) -> np.ndarray:
    """``[B,T,N,D]``, of the arguments of ``weights`` and a value ``[B,S,K,D]``."""
    p, value = weights(query, key, visible), float64(value)
    return np.einsum("bnts,bsnd->btnd", p, value.repeat(p.shape[1] // value.shape[2], 2))


# ---- every option, and gradients

# scores -> the modified ones, and the function from their cotangent to those of the scores and, by name, of parameters
Modify = Callable[[Any], tuple[Any, Callable[[Any], tuple[Any, dict[str, Any]]]]]


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call's results: ``out [B,T,N,D]``, ``lse [B,T,N]``, ``weights [B,N,T,S]``, and what they were computed from."""

    out: Any
    lse: Any
    weights: Any
    sink_weights: Any  # [B,N,T,1]
    scores: Any  # modified; finite where hidden
    visible: np.ndarray
    arrays: dict[str, Any]
    scale: float
    kv_heads: int
    back: Callable[[Any], tuple[Any, dict[str, Any]]]

    def gradients(self, of_out: Any, of_lse: Any) -> dict[str, Any]:
        """Those of every array, by name, from the cotangents of ``out`` and ``lse``."""
        query, key, value = (self.arrays[name] for name in ("query", "key", "value"))
        groups = lambda x, K: x.reshape((*x.shape[:2], K, x.shape[2] // K, x.shape[-1])).sum(3)
        dp = np.einsum("btnd,bsnd->bnts", of_out, value)
        change = np.swapaxes(of_lse - np.einsum("btnd,btnd->btn", of_out, self.out), 1, 2)[..., None]
        gradients = {}
        if "sinks" in self.arrays:
            gradients["sinks"] = (self.sink_weights * change).sum((0, 2, 3))
        ds, of_parameters = self.back(np.where(self.visible, self.weights * (dp + change), 0.0))
        if "bias" in self.arrays:
            gradients["bias"] = sum_to(ds, self.arrays["bias"].shape)
        dq = np.einsum("bnts,bsnh->btnh", ds, key)
        gradients["scale"] = np.einsum("btnh,btnh->", dq, query)
        gradients["query"] = self.scale * dq
        gradients["key"] = self.scale * groups(np.einsum("bnts,btnh->bsnh", ds, query), self.kv_heads)
        gradients["value"] = groups(np.einsum("bnts,btnd->bsnd", self.weights, of_out), self.kv_heads)
        return gradients | of_parameters


def attend(
    query: Any, key: Any, value: Any, visible: np.ndarray, *,
    scale: float | None = None, bias: Any = None, modify: Modify | None = None, sinks: Any = None,
) -> Attention:  # fmt: skip
    """A call with ``visible [B,N,T,S]``. What nobody sees counts as 0, even a NaN."""
    N = query.shape[2]
    seen = {"query": visible.any(3), "key": visible.any(2), "value": visible.any(2)}
    arrays = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        x = float64(x).repeat(N // x.shape[2], 2)
        arrays[name] = np.where(np.swapaxes(seen[name], 1, 2)[..., None], x, 0.0)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    scores, back = scale * np.einsum("btnh,bsnh->bnts", arrays["query"], arrays["key"]), lambda ds: (ds, {})
    if bias is not None:
        arrays["bias"] = float64(bias)
        scores = scores + arrays["bias"]
    if modify is not None:
        scores, back = modify(np.where(visible, scores, 1.0))
    if sinks is not None:
        arrays["sinks"] = float64(sinks)
    per_head = np.full((1, N, 1, 1), -np.inf) if sinks is None else arrays["sinks"].reshape(1, N, 1, 1)
    terms, high, total = exponentials(scores, visible, per_head)
    safe = np.where(total == 0.0, 1.0, total)
    p, lse = terms / safe, np.where(total == 0.0, -np.inf, high + np.log(safe))
    out = np.einsum("bnts,bsnd->btnd", p, arrays["value"])
    lse = np.swapaxes(lse[..., 0], 1, 2)
    of_sinks = np.exp(per_head - high) / safe
    return Attention(out, lse, p, of_sinks, scores, visible, arrays, scale, key.shape[2], back)


def sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """The transpose of broadcasting from ``shape`` to ``x.shape``."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)


def layer(inputs_q: Any, inputs_k: Any, parameters: dict[str, Any], of_out: Any, visible: np.ndarray, **options: Any) -> dict[str, Any]:  # fmt: skip
    """``out [B,T,M]`` of multi-head attention, and ``d NAME`` for inputs, parameters and options.

    ``parameters``: ``query kernel [M,N,H]``, ``query bias [N,H]``, ``out kernel [N,D,M]`` and so on.
    """
    inputs = {"query": inputs_q, "key": inputs_k, "value": inputs_k}
    linear = lambda name, x: np.einsum("btm,mnh->btnh", x, parameters[f"{name} kernel"]) + parameters[f"{name} bias"]
    inner = attend(*(linear(name, x) for name, x in inputs.items()), visible, **options)
    kernel = parameters["out kernel"]
    of_inner = inner.gradients(np.einsum("btm,ndm->btnd", of_out, kernel), np.zeros(inner.lse.shape))
    results = {
        "out": np.einsum("btnd,ndm->btm", inner.out, kernel) + parameters["out bias"],
        "d out kernel": np.einsum("btnd,btm->ndm", inner.out, of_out),
        "d out bias": of_out.sum((0, 1)),
    }
    of_inputs = {}
    for name, x in inputs.items():
        d = of_inner.pop(name)
        results |= {f"d {name} kernel": np.einsum("btnh,btm->mnh", d, x), f"d {name} bias": d.sum((0, 1))}
        of_inputs[name] = np.einsum("btnh,mnh->btm", d, parameters[f"{name} kernel"])
    results |= {"d inputs_q": of_inputs["query"], "d inputs_k": of_inputs["key"] + of_inputs["value"]}
    return results | {f"d {name}": x for name, x in of_inner.items()}


# ---- statistics


def places(
    sizes: tuple[int, int, int], slots: tuple[np.ndarray, np.ndarray], positions: list[np.ndarray | None],
    told: list[tuple[str, list]], by_slot: list[np.ndarray],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Of B, T, S: ``q``, ``kv``, ``before`` and ``counts`` as `statistics` takes them, token by token.

    ``told``: what masks tell, ``("segments", [query ids, key ids])``, ``("padding", [lengths])`` or ``("dense", [pairs])``,
    by position; ``by_slot``: bool ``[B|1,N|1,T|1,S|1]``, what mask arrays, lengths and biases show.
    """
    B, T, S = sizes
    row = lambda x, b: x[b % len(x)] if x.ndim > 1 else x  # of arrays with one row or one for each sequence
    results = {"q": np.zeros((B, 1, T, 1), int), "kv": np.zeros((B, 1, 1, S), int)}
    results |= {"before": np.zeros((B, S), int), "counts": np.ones((B, T), bool)}
    numbered = positions[1] is None  # keys have the numbers of their tokens
    for b in range(B):
        padding = np.zeros(S, bool)
        if T == S and (positions[0] is None) == numbered:
            shown = np.ones(S, bool)
            turned = [x[b % len(x)] for x in by_slot if x.shape[3] != 1]
            for pairs, order in [(x, np.argsort(slots[1])) for x in turned] + [
                (np.atleast_2d(x)[(None,) * (4 - max(x.ndim, 2))][b % (len(x) if x.ndim == 4 else 1)], np.arange(S))
                for kind, (x, *_) in told if kind == "dense" and numbered and x.shape[-1] != 1
            ]:  # fmt: skip
                for token in range(S):
                    sees = pairs.shape[1] != 1 and pairs[:, order[token]].any()
                    shown[token] &= pairs[:, :, order[token]].any() or sees
            for kind, (x, *_) in told:
                shown &= (np.arange(S) < int(x[b % len(x)])) if kind == "padding" and numbered else True
            real = np.flatnonzero(shown)
            padding = ~((np.arange(S) >= min(real, default=S)) & (np.arange(S) <= max(real, default=-1)))
            results["counts"][b] = ~padding[slots[0]]
        ids = [
            [row(x.astype(np.int64), b) for x in (values[0], values[-1])] for kind, values in told if kind == "segments"
        ]
        for side, name in enumerate(("q", "kv")):
            at = slots[side] if positions[side] is None else row(positions[side].astype(np.int64), b)
            labels = list(zip(*(pair[side] for pair in ids), strict=False))
            for slot, position in enumerate(at):
                place, last = int(position), int(slots[side][slot]) - 1
                if ids:
                    entry = min(max(place, 0), len(labels) - 1)
                    label = (labels[entry], numbered and T == S and padding[entry])
                    same = [i for i in range(entry) if (labels[i], numbered and T == S and padding[i]) == label]
                    place, last = len(same), (max(same, default=-1) if numbered else last)
                elif numbered and T == S and not padding.all():
                    place -= int(np.argmin(padding))
                results[name].reshape(B, -1)[b, slot] = place
                if name == "kv":
                    results["before"][b, slot] = last if place > 0 else -1
    return results


def statistics(
    scores: Any, visible: np.ndarray, q: np.ndarray, kv: np.ndarray, *,
    slots: tuple[np.ndarray, np.ndarray], counts: Any = True, tokens: np.ndarray | None = None, before: Any = None,
    lowest: float = -np.inf,
) -> dict[str, Any]:  # fmt: skip
    """``jattn.heads.statistics`` of modified scores ``[B,N,T,S]``: ``NAME [B,N,...]`` and ``support NAME``.

    ``q [B|1,1,T,1]`` and ``kv [B|1,1,1,S]`` are places of tokens in their own sequences, ``slots`` the tokens' numbers in
    each slot, ``counts [B|1,T]`` the queries that count. ``before [B|1,S]``: of each key, the number of the token before
    it in its sequence, -1 for none; by default the one with the number before, of keys whose place is not 0. A score up to
    ``lowest`` hides its pair.
    """
    T, S = visible.shape[2:]
    terms, high, total = exponentials(scores, visible)
    p = terms / np.where(total == 0.0, 1.0, total)
    pairs = visible & (np.asarray(getattr(scores, "value", scores)) > lowest)
    pairs = pairs & (np.ones((1, T), bool) & counts)[:, None, :, None]
    results: dict[str, Any] = {}

    def mean(name: str, values: Any, counted: np.ndarray) -> None:
        results[name] = np.where(counted, values, 0.0).sum(-1) / np.maximum(counted.sum(-1), 1)
        results[f"support {name}"] = counted.sum(-1).astype(float)

    # a query without a visible target says nothing of a head
    on = lambda name, values, targets: mean(name, values, (pairs & targets).any(-1))
    # log(1/p) = log(total) - (score - high), without the logarithm of a weight that rounds to 0
    surprise = np.log(np.where(total == 0.0, 1.0, total)) - np.where(visible, scores - high, 0.0)
    count = pairs.sum(-1)
    mean("entropy", (p * surprise).sum(-1) / np.log(np.maximum(count, 2)), count >= 2)
    on("max_weight", p.max(-1, initial=0.0), True)
    on("distance", (p * abs(q - kv)).sum(-1), True)
    one_key = {"previous_token": (kv == q - 1) & (q > 0), "current_token": kv == q, "first_token": (kv == 0) & (q > 0)}
    for name, targets in one_key.items():  # of several keys at one position, the largest weight
        on(name, np.where(targets, p, 0.0).max(-1, initial=0.0), targets)
    lse = high + np.log(np.where(total == 0.0, 1.0, total))
    # the score of a weight: as exact as the sum lets it be
    highest = np.where(pairs, scores - lse + lse, -np.inf).max((2, 3), initial=-np.inf)
    results["max_logit"] = np.where(pairs.any((2, 3)), highest, 0.0)
    received = np.where(pairs, p, 0.0)
    results["received"] = received.sum(2)
    # each diagonal of the tokens as a column
    token = np.arange(max(T + S - 1, 0)) + slots[0][:, None] - (T - 1)
    inside = (token >= 0) & (token < S)
    profile = np.zeros((*pairs.shape[:2], token.shape[1]))
    if S:
        at = np.arange(T)[:, None], np.argsort(slots[1])[token.clip(0, S - 1)]
        shown = pairs[:, :, *at] & inside
        profile = np.where(shown, received[:, :, *at], 0.0).sum(2) / np.maximum(shown.sum(2), 1)
    results["offset_profile"] = profile
    results |= {f"support {name}": results["support max_weight"] for name in ("max_logit", "received", "offset_profile")}  # fmt: skip
    if tokens is not None:
        tokens = np.atleast_2d(tokens)
        number = slots[0][:, None], slots[1][None]  # of the query's and the key's token
        before = np.where(kv[:, 0, 0] > 0, slots[1] - 1, -1) if before is None else before
        of_before = np.take_along_axis(tokens[:, np.argsort(slots[1])], before.clip(0), 1)
        same = (tokens[:, :, None] == tokens[:, None]) & (number[1] < number[0])
        after = (tokens[:, :, None] == of_before[:, None]) & (before[:, None] >= 0) & (before[:, None] < number[0])
        for name, targets in (("duplicate_token", same[:, None]), ("induction", after[:, None])):
            on(name, (p * targets).sum(-1), targets)
    return results


# ---- positions


def t5_bucket(offset: np.ndarray, buckets: int, bidirectional: bool, max_distance: int) -> np.ndarray:
    """T5's bucket of each ``offset = kv - q``."""
    first = np.zeros_like(offset)
    if bidirectional:
        buckets //= 2
        first = np.where(offset > 0, buckets, 0)
    distance = abs(offset) if bidirectional else np.maximum(-offset, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(distance, exact) / exact) / math.log(max_distance / exact)
    far = exact + np.floor(ratio * (buckets - exact) + 1e-6).astype(np.int64)  # where the logarithm is a whole number
    return first + np.where(distance < exact, distance, np.minimum(far, buckets - 1))


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Turns the pairs ``(i, i + R)`` of the last axis by ``angles [...,R]``; dimensions from ``2R`` on stay."""
    R = angles.shape[-1]
    cos, sin = np.cos(angles), np.sin(angles)
    a, b, rest = x[..., :R], x[..., R : 2 * R], x[..., 2 * R :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
