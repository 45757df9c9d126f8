"""Draws what looks inside a model: patches, ablations, attributions, ranks, ``unmerge``; against float64 NumPy.

The model has attention alone: ``x + sum_i z_i W_i^O`` in each layer, and reads ``tanh(x) w`` at the end. Its reference
forms every matrix and runs once for each patch. A derivative is a complex step: the imaginary part of the result of
``z + i step (z' - z)``, which is exact.
"""

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jattn
from jattn import heads
from jattn.positions import Rotary
from tests.soak.draw import Arrays, Random
from tests.soak.program import implementation_of
from tests.soak.trial import Difference, compare

TASKS = (
    "patch", "attribution_patch", "ablate", "path_patch", "logit_attribution", "qk_attribution", "target_rank", "unmerge",
)  # fmt: skip
NAMES = {"q": "query", "k": "key", "v": "value"}
STEP = 1e-30
Hook = Callable[[int, str, np.ndarray], np.ndarray]  # layer, what, array -> array
Expected = tuple[np.ndarray, Any]  # value, tolerance


@dataclasses.dataclass(frozen=True)
class Look:
    """Everything about a case except the values of its arrays."""

    task: str
    implementation: str
    dtype: str
    sizes: tuple[int, ...]  # L, B, T, N, K, H, D, M
    causal: bool
    what: str
    by: str
    kind: str
    freeze: bool
    groups: list[list[tuple[int, int]]] | None
    batch_size: int | None
    norm: str | None
    rotary: bool
    large: bool
    rank: int  # of directions; the parts' sizes follow from it, too


def draw_look(seed: int, index: int) -> Look:
    """Draws structure number ``index``."""
    rng = np.random.default_rng([seed, index, 3])
    task, dtype = TASKS[index % len(TASKS)], str(rng.choice(["float32", "float32", "float64"]))
    N, K = [(1, 1), (2, 2), (2, 1), (4, 2)][rng.integers(4)]
    L, B, T, D, M = (int(rng.integers(1, most + 1)) for most in (2, 2, 5, 4, 5))
    implementation = str(rng.choice(["xla", "blockwise", "Blockwise(2, 3)", "native"]))
    if implementation == "native" and (dtype == "float64" or importlib.util.find_spec("jattn_native") is None):
        implementation = "default"
    every = list(itertools.product(range(L), range(N)))
    groups = [[every[i] for i in rng.permutation(len(every))[: rng.integers(0, len(every) + 1)]] for _ in range(2)]
    kinds = ["zero", "mean", "resample"] if B > 1 else ["zero", "mean"]
    return Look(
        task, implementation, dtype, (L, B, T, N, K, 2 * int(rng.integers(1, 3)), D, M), bool(rng.random() < 0.6),
        what=str(rng.choice(["q", "k", "v", "z", "pattern"])), by=str(rng.choice(["head", "position", "head_position"])),
        kind=str(rng.choice(kinds)), freeze=bool(rng.random() < 0.4), groups=groups if rng.random() < 0.3 else None,
        batch_size=[None, 1, 3][rng.integers(3)], norm=[None, "layer", "rms"][rng.integers(3)],
        rotary=bool(rng.random() < 0.5), large=bool(rng.random() < 0.3), rank=int(rng.integers(1, 4)),
    )  # fmt: skip


def draw_arrays(look: Look, rng: Random) -> Arrays:
    """The arrays of one case, in float64: the model's, two inputs, and what the tasks without a model read."""
    L, B, T, N, K, H, D, M = look.sizes
    P, C = look.rank + 1, 6
    shapes = {
        "query": (L, M, N, H), "key": (L, M, K, H), "value": (L, M, K, D), "out": (L, N, D, M), "x": (B, T, M),
        "other": (B, T, M), "read": (M,), "directions": [(M,), (B, 1, M), (B, T, M)][look.rank - 1], "scale": (M,),
        "bias": (M,), "query parts": (P, 3, M), "key parts": (P + 1, 3, M), "query bias": (N, H), "key bias": (K, H),
        "embed": (7, M), "unembed": (M, C), "scores": (B, T, 9), "values": (B, T, 9, D),
    }  # fmt: skip
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if look.large:
        arrays["query"] *= rng.choice([5.0, 20.0])
        arrays["scores"] *= 20.0
    if rng.random() < 0.3:
        arrays["unembed"][:, 1] = arrays["unembed"][:, 0]  # equal logits
    if rng.random() < 0.3:
        arrays["out"][0, 0] = 0.0  # a head that writes nothing
    arrays = {name: np.asarray(x, look.dtype).astype(np.float64) for name, x in arrays.items()}
    whole = {"sources": rng.integers(0, 7, 4), "targets": rng.integers(0, C, 4), "q positions": rng.integers(0, 40, 3),
             "kv positions": rng.integers(0, 40, 3)}  # fmt: skip
    return arrays | {name: x.astype(np.int32) for name, x in whole.items()}


# ---- the reference


def model(look: Look, arrays: Arrays, x: np.ndarray, hook: Hook = lambda i, what, x: x) -> tuple[np.ndarray, list]:
    """The last stream ``[B,T,M]``, and every layer's q, k, v, z and pattern, after the hook."""
    _, _, T, N, K, H, _, _ = look.sizes
    kept = []
    for i in range(look.sizes[0]):
        own = {what: hook(i, what, np.einsum("btm,mnh->btnh", x, arrays[name][i])) for what, name in NAMES.items()}
        own["pattern"] = hook(i, "pattern", softmax(scores_of(look, own)))
        v = own["v"].repeat(N // K, 2)
        own["z"] = hook(i, "z", np.einsum("bnts,bsnd->btnd", own["pattern"], v))
        x = x + np.einsum("btnd,ndm->btm", own["z"], arrays["out"][i])
        kept.append(own)
    return x, kept


def scores_of(look: Look, own: dict[str, np.ndarray]) -> np.ndarray:
    """``[B,N,T,S]``, -inf where hidden."""
    _, _, T, N, K, H, _, _ = look.sizes
    scores = np.einsum("btnh,bsnh->bnts", own["q"], own["k"].repeat(N // K, 2)) / np.sqrt(H)
    return np.where(np.tri(T, dtype=bool), scores, -np.inf) if look.causal else scores


def softmax(scores: np.ndarray) -> np.ndarray:
    """Of scores that may be complex."""
    weights = np.exp(scores - scores.real.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def read(arrays: Arrays, x: np.ndarray) -> np.ndarray:
    """``[B,T]``."""
    return np.tanh(x) @ arrays["read"]


def places(look: Look) -> list[tuple[int, np.ndarray]]:
    """Each patch: its layer, and where it is, ``[T, heads]``; in the order of the results."""
    L, _, T, N, K, *_ = look.sizes
    count = K if look.what in ("k", "v") else N
    axes = {"head": [None], "position": range(T), "head_position": range(T)}[look.by]
    of_head = [None] if look.by == "position" else range(count)
    found = []
    for i, head, t in itertools.product(range(L), of_head, axes):
        here = np.ones((T, count), bool)
        here &= True if head is None else np.arange(count)[None] == head
        here &= True if t is None else np.arange(T)[:, None] == t
        found.append((i, here))
    return found


def replacing(what: str, where: dict[int, np.ndarray], source: list) -> Hook:
    """Takes ``what`` from the source in these layers, at ``[T, heads]``."""

    def hook(i: int, name: str, x: np.ndarray) -> np.ndarray:
        if name != what or i not in where:
            return x
        here = where[i].T[None, :, :, None] if what == "pattern" else where[i][None, :, :, None]
        return np.where(here, source[i][what], x)

    return hook


def expected(look: Look, arrays: Arrays) -> dict[str, Expected]:
    """What the task gives, and how far float32 may be off."""
    unit = float(np.finfo(look.dtype).eps)
    if look.task == "unmerge":
        return unmerged(arrays, unit)
    if look.task == "target_rank":
        return {"found": ranks(look, arrays, unit)}
    if look.task == "qk_attribution":
        shares, sizes = scores_by_part(look, arrays, abs), scores_by_part(look, arrays, lambda x: x)
        return {"found": (sizes, 64 * unit * (shares + 1e-3))}
    value, scale = of_model(look, arrays)
    return {name: (x, 4 * unit * scale * (1 + abs(x).max(initial=0.0))) for name, x in value.items()}


def of_model(look: Look, arrays: Arrays) -> tuple[dict[str, np.ndarray], float]:
    """The results of a task on the model, and the factor of their tolerance: how sharp its softmax is."""
    L, B, T, N, K, H, D, M = look.sizes
    last, own = model(look, arrays, arrays["x"])
    _, source = model(look, arrays, arrays["other"])
    lead = (L, *{"head": (-1,), "position": (T,), "head_position": (-1, T)}[look.by])
    finite = [x[np.isfinite(x)] for x in (scores_of(look, one) for one in (*own, *source))]
    scale = (1 + max(abs(x).max() for x in finite)) * (1 + abs(last).max())
    scale *= 1 + max(abs(arrays[name]).max() for name in ("query", "key"))
    if look.task == "patch":
        results = [
            model(look, arrays, arrays["x"], replacing(look.what, {i: here}, source))[0] for i, here in places(look)
        ]
        return {"found": np.stack([read(arrays, x) for x in results]).reshape(*lead, B, T)}, scale
    if look.task == "attribution_patch":
        effects = []
        for i, here in places(look):
            z = model(look, arrays, arrays["x"], replacing(look.what, {i: here}, source))[1][i]["z"]
            step = lambda j, what, x, i=i, z=z: x + 1j * STEP * (z - x) if (j, what) == (i, "z") else x
            effects.append(read(arrays, model(look, arrays, arrays["x"], step)[0]).sum().imag / STEP)
        return {"found": np.asarray(effects).reshape(lead)}, scale
    groups = look.groups or [[pair] for pair in itertools.product(range(L), range(N))]
    lead = (len(groups),) if look.groups else (L, N)
    if look.task == "path_patch":
        change = [
            np.einsum("btnd,ndm->btnm", b["z"] - a["z"], arrays["out"][i])
            for i, (a, b) in enumerate(zip(own, source, strict=True))
        ]
        streams = [last + sum((change[i][:, :, n] for i, n in set(group)), np.zeros_like(last)) for group in groups]
        return {"found": np.stack([read(arrays, x) for x in streams]).reshape(*lead, B, T)}, scale
    if look.task == "ablate":
        fill = {
            "zero": lambda z: 0 * z,
            "mean": lambda z: 0 * z + z.mean((0, 1)),
            "resample": lambda z: np.roll(z, 1, 0),
        }
        filled = [{"z": fill[look.kind](one["z"])} for one in own]
        results = []
        for group in groups:
            where = {i: np.broadcast_to([(i, n) in group for n in range(N)], (T, N)) for i in range(L)}
            off = replacing("z", where, filled)
            hook = lambda i, what, x, off=off: own[i][what] if what == "pattern" and look.freeze else off(i, what, x)
            results.append(read(arrays, model(look, arrays, arrays["x"], hook)[0]))
        return {"found": np.stack(results).reshape(*lead, B, T)}, scale
    assert look.task == "logit_attribution"
    parts = {
        "x": arrays["x"][None],
        "z": np.stack([np.einsum("btnd,ndm->nbtm", one["z"], arrays["out"][i]) for i, one in enumerate(own)]),
    }
    moved = last - last.mean(-1, keepdims=True) if look.norm == "layer" else last
    factor = 1 / np.sqrt((moved**2).mean(-1) + 1e-6) if look.norm else np.ones((B, T))
    shares = {}
    for name, part in parts.items():
        part = part - part.mean(-1, keepdims=True) if look.norm == "layer" else part
        shares[name] = (part * arrays["scale"] * arrays["directions"]).sum(-1) * factor
    shares = {"x": shares["x"][0], "z": np.moveaxis(shares["z"], 1, -1)}
    shares["bias"] = np.broadcast_to((arrays["bias"] * arrays["directions"]).sum(-1), (B, T))
    return shares, scale * (1 + factor.max() ** 2)


def scores_by_part(look: Look, arrays: Arrays, of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """``[E,N,P,R]``; with ``abs``, the sums of the absolute values of their terms."""
    _, _, _, N, K, H, _, _ = look.sizes
    found = []
    for name, positions in (("query", "q positions"), ("key", "kv positions")):
        x = np.einsum("pem,mnh->penh", of(arrays[f"{name} parts"]), of(arrays[name][0]))
        bias = np.broadcast_to(of(arrays[f"{name} bias"]), (1, *x.shape[1:]))
        x = np.concatenate([x, bias])
        if look.rotary:
            angle = arrays[positions][:, None, None] * 10000.0 ** (-np.arange(0, H, 2) / H)
            cos, sin, a, b = np.cos(angle), np.sin(angle), x[..., : H // 2], x[..., H // 2 :]
            turned = [a * cos - b * sin, a * sin + b * cos]
            # the rounding of an angle is that of its size
            x = np.concatenate([(a + b) * (1 + abs(angle))] * 2, -1) if of is abs else np.concatenate(turned, -1)
        found.append(x)
    q, k = found
    return np.einsum("penh,renh->enpr", q, k.repeat(N // K, 2)) / np.sqrt(H)


def ranks(look: Look, arrays: Arrays, unit: float) -> Expected:
    """``[N,E]``; those logits that rounding may move past the target's are the tolerance."""
    N, K = look.sizes[3:5]
    value = arrays["value"][0].repeat(N // K, 1)
    parts = arrays["embed"][arrays["sources"]], value, arrays["out"][0], arrays["unembed"]
    logits = np.einsum("em,mnd,ndw,wc->nec", *parts)
    size = 64 * unit * np.einsum("em,mnd,ndw,wc->nec", *map(abs, parts))
    e = np.arange(len(arrays["targets"]))
    target, own = logits[:, e, arrays["targets"]][..., None], size[:, e, arrays["targets"]][..., None]
    close = (abs(logits - target) < size + own) & (np.arange(logits.shape[-1]) != arrays["targets"][:, None])
    equal = (logits == target).sum(-1) - 1
    return (logits > target).sum(-1) + equal / 2, close.sum(-1) / 1.0


def unmerged(arrays: Arrays, unit: float) -> dict[str, Expected]:
    """Attention over the first 5 of 9 keys."""
    weights = np.exp(arrays["scores"][..., :5] - arrays["scores"][..., :5].max(-1, keepdims=True))
    lse = np.log(weights.sum(-1)) + arrays["scores"][..., :5].max(-1)
    out = np.einsum("bts,btsd->btd", weights / weights.sum(-1, keepdims=True), arrays["values"][..., :5, :])
    size = np.logaddexp(lse, halves(arrays)[1][1])
    off = 16 * unit * (1 + abs(size)) * np.exp(np.minimum(size - lse, 700))
    off = np.where(off < 1, off, np.inf)  # the part that is taken out holds everything, as far as rounding tells
    return {"out": (out, (off * (1 + abs(arrays["values"]).max()))[..., None]), "lse": (lse, off)}


def halves(arrays: Arrays) -> list[tuple[np.ndarray, np.ndarray]]:
    """``(out, lse)`` over all 9 keys, and over the last 4."""
    found = []
    for keys in (slice(0, 9), slice(5, 9)):
        scores = arrays["scores"][..., keys]
        high = scores.max(-1, keepdims=True)
        total = np.exp(scores - high).sum(-1)
        out = np.einsum("bts,btsd->btd", np.exp(scores - high) / total[..., None], arrays["values"][..., keys, :])
        found.append((out, np.log(total) + high[..., 0]))
    return found


# ---- jattn


def program(look: Look, arrays: dict[str, Any]) -> dict[str, Any]:
    """The same by jattn."""
    L, _, _, _, _, _, _, _ = look.sizes
    layers = [{name: {"kernel": arrays[name][i]} for name in (*NAMES.values(), "out")} for i in range(L)]
    common = {"is_causal": look.causal, "implementation": implementation_of(look.implementation)}

    def through(x: Any, per_layer: Any = None) -> tuple[Any, list]:
        kept = []
        for i, layer in enumerate(layers):
            own = per_layer[i] if per_layer else {}
            y, one = jattn.multi_head_attention(layer, x, return_heads=True, **common, **own)
            x, kept = x + y, [*kept, one]
        return x, kept

    def result(x: Any) -> Any:
        return jax.numpy.tanh(x) @ arrays["read"]

    def run(per_layer: Any) -> Any:
        return result(through(arrays["x"], per_layer)[0])

    (last, own), (_, source) = through(arrays["x"]), through(arrays["other"])
    kernels = list(arrays["out"])
    match look.task:
        case "patch":
            return {"found": heads.patch(run, source, look.what, look.by, batch_size=look.batch_size)}
        case "attribution_patch":
            return {"found": heads.attribution_patch(lambda layers: run(layers).sum(), source, look.what, look.by)}
        case "ablate":
            options = {"freeze_weights": look.freeze, "groups": look.groups, "batch_size": look.batch_size}
            return {"found": heads.ablate(run, own, look.kind, **options)}
        case "path_patch":
            options = {"groups": look.groups, "batch_size": look.batch_size}
            return {"found": heads.path_patch(result, last, own, source, kernels, **options)}
        case "logit_attribution":
            parts = {"x": arrays["x"], "z": (jax.numpy.stack([one["z"] for one in own]), arrays["out"])}
            given = {name: arrays[name] for name in ("scale", "bias")}
            return heads.logit_attribution(parts, arrays["directions"], last, norm=look.norm, **given)
        case "qk_attribution":
            params = [{"kernel": arrays[name][0], "bias": arrays[f"{name} bias"]} for name in ("query", "key")]
            places = {"query_positions": arrays["q positions"], "kv_positions": arrays["kv positions"]}
            position = Rotary() if look.rotary else None
            return {
                "found": heads.qk_attribution(
                    arrays["query parts"], arrays["key parts"], *params, position=position, **places
                )
            }
        case "target_rank":
            circuit = arrays["embed"], arrays["value"][0], arrays["out"][0], arrays["unembed"]
            return {"found": heads.target_rank(*circuit, arrays["sources"], arrays["targets"])}
    whole, part = ((arrays[f"{name} out"], arrays[f"{name} lse"]) for name in ("whole", "part"))
    return dict(zip(("out", "lse"), jattn.unmerge(*whole, *part), strict=True))


class LookTrial:
    """A structure and its program, which is compiled when the first case runs."""

    eager = False

    def __init__(self, seed: int, index: int):
        self.seed, self.index, self.structure = seed, index, draw_look(seed, index)
        self.label = f"{self.structure.dtype}, {self.structure.task}"
        self._jitted = jax.jit(functools.partial(program, self.structure))

    def covers(self) -> list[str]:
        """What is counted."""
        look = self.structure
        found = ["kind look", f"look {look.task}", f"look on {look.implementation}"]
        return found + [f"{look.task} of {look.what} by {look.by}"] * look.task.endswith("patch") * (
            look.task != "path_patch"
        )

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """The differences in a case, and the largest ratio of error to tolerance."""
        arrays = draw_arrays(self.structure, np.random.default_rng([self.seed, self.index, 4, draw]))
        of_unmerge = dict(zip(("whole", "part"), halves(arrays), strict=True))
        arrays |= {f"{name} {x}": of_unmerge[name][i] for name in of_unmerge for i, x in enumerate(("out", "lse"))}
        given = {name: x.astype(self.structure.dtype) if x.dtype.kind == "f" else x for name, x in arrays.items()}
        with jax.enable_x64(self.structure.dtype == "float64"):
            found = {name: np.asarray(x) for name, x in self._jitted(given).items()}
        return compare(found, expected(self.structure, arrays))
