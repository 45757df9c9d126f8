"""What looks inside a model: patches, ablations, attributions, ranks and ``unmerge``.

The model has attention alone: ``x + sum_i z_i W_i^O`` in each layer, and reads ``tanh(x) w`` at the end. Every matrix is
formed, and the model runs once for each patch. A derivative is a complex step: the imaginary part of the result of
``z + i step (z' - z)``, which is exact.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests import reference
from tests.reference.bounded import Bounded, Rounding

Arrays = dict[str, Any]
Hook = Callable[[int, str, np.ndarray], np.ndarray]  # layer, what, array -> array
NAMES, STEP = {"q": "query", "k": "key", "v": "value"}, 1e-30


class Model:
    """The model: its clean run, and the run on the other input. `tests.soak.looking.draw_look` lists what a look holds."""

    def __init__(self, look: Any, arrays: Arrays):
        self.look, self.arrays = look, arrays
        self.last, self.layers = self.run()
        _, self.source = self.run(arrays["other"])

    def run(self, x: np.ndarray | None = None, hook: Hook = lambda i, what, x: x) -> tuple[np.ndarray, list]:
        """The last stream ``[B,T,M]``, and every layer's q, k, v, z and pattern, after the hook."""
        (_, _, T, N, K, H, _, _), arrays, kept = self.look.sizes, self.arrays, []
        x = arrays["x"] if x is None else x
        visible = np.tri(T, dtype=bool) if self.look.causal else np.ones((T, T), bool)
        for i in range(self.look.sizes[0]):
            layer = {what: hook(i, what, np.einsum("btm,mnh->btnh", x, arrays[name][i])) for what, name in NAMES.items()}  # fmt: skip
            k, v = (layer[name].repeat(N // K, 2) for name in "kv")
            layer["scores"] = np.where(visible, np.einsum("btnh,bsnh->bnts", layer["q"], k) / np.sqrt(H), 0.0)
            layer["pattern"] = hook(i, "pattern", reference.softmax(layer["scores"], visible))
            layer["z"] = hook(i, "z", np.einsum("bnts,bsnd->btnd", layer["pattern"], v))
            x = x + np.einsum("btnd,ndm->btm", layer["z"], arrays["out"][i])
            kept.append(layer)
        return x, kept

    def read(self, x: np.ndarray) -> np.ndarray:
        """``[B,T]``."""
        return np.tanh(x) @ self.arrays["read"]

    def places(self) -> list[tuple[int, np.ndarray]]:
        """Each patch: its layer, and where it is, ``[T, heads]``; in the order of the results."""
        L, _, T, N, K, *_ = self.look.sizes
        t, n = np.ogrid[:T, : K if self.look.what in "kv" else N]
        steps, of_head = t[:, 0] if "position" in self.look.by else [None], n[0] if "head" in self.look.by else [None]
        patches = itertools.product(range(L), of_head, steps)
        return [(i, ((t == step) | (step is None)) & ((n == head) | (head is None))) for i, head, step in patches]

    def groups(self) -> list[list[tuple[int, int]]]:
        """The groups of heads; each head alone unless others are drawn."""
        L, _, _, N, *_ = self.look.sizes
        return self.look.groups or [[pair] for pair in itertools.product(range(L), range(N))]

    def patch(self) -> np.ndarray:
        hooks = [replacing(self.look.what, {i: here}, self.source) for i, here in self.places()]
        return np.stack([self.read(self.run(hook=hook)[0]) for hook in hooks])

    def attribution_patch(self) -> np.ndarray:
        effects = []
        for i, here in self.places():
            z = self.run(hook=replacing(self.look.what, {i: here}, self.source))[1][i]["z"]
            step = lambda j, what, x, i=i, z=z: x + 1j * STEP * (z - x) if (j, what) == (i, "z") else x
            effects.append(self.read(self.run(hook=step)[0]).sum().imag / STEP)
        return np.asarray(effects)

    def path_patch(self) -> np.ndarray:
        both = zip(self.layers, self.source, self.arrays["out"], strict=True)
        change = [np.einsum("btnd,ndm->btnm", other["z"] - layer["z"], out) for layer, other, out in both]
        return np.stack([self.read(sum((change[i][:, :, n] for i, n in set(pairs)), self.last)) for pairs in self.groups()])  # fmt: skip

    def ablate(self) -> np.ndarray:
        fill = {
            "zero": lambda z: 0 * z,
            "mean": lambda z: 0 * z + z.mean((0, 1)),
            "resample": lambda z: np.roll(z, 1, 0),
        }
        filled = [{"z": fill[self.look.kind](layer["z"])} for layer in self.layers]
        frozen = lambda i, what, x: self.layers[i][what] if what == "pattern" and self.look.freeze else x
        (L, _, T, N, *_), results = self.look.sizes, []
        for group in self.groups():
            here = {i: np.broadcast_to([(i, n) in group for n in range(N)], (T, N)) for i in range(L)}
            off = replacing("z", here, filled)
            results.append(self.read(self.run(hook=lambda i, what, x, off=off: off(i, what, frozen(i, what, x)))[0]))
        return np.stack(results)

    def logit_attribution(self) -> tuple[dict[str, np.ndarray], float]:
        """The shares of the input, of each head and of the bias, and the largest factor of the norm."""
        last, arrays, norm = self.last, self.arrays, self.look.norm
        both = zip(self.layers, arrays["out"], strict=True)
        of_heads = np.stack([np.einsum("btnd,ndm->nbtm", layer["z"], out) for layer, out in both])
        centred = lambda x: x - x.mean(-1, keepdims=True) if norm == "layer" else x
        factor = 1 / np.sqrt((centred(last) ** 2).mean(-1) + 1e-6) if norm else np.ones(last.shape[:2])
        share = lambda x: (centred(x) * arrays["scale"] * arrays["directions"]).sum(-1) * factor
        of_bias = np.broadcast_to((arrays["bias"] * arrays["directions"]).sum(-1), factor.shape)
        return {"x": share(arrays["x"]), "z": np.moveaxis(share(of_heads), 1, -1), "bias": of_bias}, factor.max()


def replacing(what: str, where: dict[int, np.ndarray], source: list) -> Hook:
    """Takes ``what`` from the source in these layers, at ``[T, heads]``."""

    def hook(i: int, name: str, x: np.ndarray) -> np.ndarray:
        if name != what or i not in where:
            return x
        here = where[i].T[None, :, :, None] if what == "pattern" else where[i][None, :, :, None]
        return np.where(here, source[i][what], x)

    return hook


def expected(look: Any, arrays: Arrays) -> dict[str, tuple[Any, Any]]:
    """What the task gives, and how far the dtype may be off."""
    if look.task in ALONE:
        rounding = Rounding(np.dtype(look.dtype), np.dtype(look.dtype))
        floats = {name: Bounded(x, rounding) if x.dtype.kind == "f" else x for name, x in arrays.items()}
        with np.errstate(all="ignore"):
            results = ALONE[look.task](look, floats)
        return {name: (x.value, x.error) if isinstance(x, Bounded) else x for name, x in results.items()}
    model = Model(look, arrays)
    # how sharp the softmax is
    scale = (1 + max(abs(layer["scores"]).max() for layer in (*model.layers, *model.source))) * (1 + abs(model.last).max())  # fmt: skip
    scale *= 1 + max(abs(arrays[name]).max() for name in ("query", "key"))
    if look.task == "logit_attribution":
        results, factor = model.logit_attribution()
        scale *= 1 + factor**2
    else:
        results = {"result": getattr(model, look.task)()}
        L, B, T, N, K, *_ = look.sizes
        axes = {"head": (-1,), "position": (T,), "head_position": (-1, T)}[look.by]
        lead = (L, *axes) if look.task.startswith(("patch", "attribution")) else (-1,) if look.groups else (L, N)
        results["result"] = results["result"].reshape(*lead, *(() if look.task == "attribution_patch" else (B, T)))
    unit = 4 * float(np.finfo(look.dtype).eps) * scale
    return {name: (x, unit * (1 + abs(x).max(initial=0.0))) for name, x in results.items()}


def scores_by_part(look: Any, arrays: Arrays) -> Arrays:
    """``[E,N,P,R]``."""
    _, _, _, N, K, H, _, _ = look.sizes
    sides = []
    for name, positions in (("query", "q positions"), ("key", "kv positions")):
        x = np.einsum("pem,mnh->penh", arrays[f"{name} parts"], arrays[name][0])
        x = np.concatenate([x, 0 * x[:1] + arrays[f"{name} bias"]])
        if look.rotary:
            frequency = Bounded(10000.0 ** (-np.arange(0, H, 2) / H), x.rounding)
            x = reference.rotate(x, arrays[positions][:, None, None] * frequency)
        sides.append(x)
    q, k = sides
    return {"result": np.einsum("penh,renh->enpr", q, k.repeat(N // K, 2)) / np.sqrt(H)}


def ranks(look: Any, arrays: Arrays) -> Arrays:
    """``[N,E]``; those logits that rounding may move past the target's are the tolerance."""
    N, K = look.sizes[3:5]
    written = np.einsum("em,mnd->end", arrays["embed"][arrays["sources"]], arrays["value"][0].repeat(N // K, 1))
    written = np.einsum("end,ndw->enw", written, arrays["out"][0])
    logits = np.einsum("enw,wc->nec", written, arrays["unembed"])
    e = np.arange(len(arrays["targets"]))
    target = logits[:, e, arrays["targets"]][..., None]
    others = np.arange(logits.shape[-1]) != arrays["targets"][:, None]
    close = others & (abs(logits.value - target.value) <= logits.error + target.error)
    rank = (logits > target).sum(-1) + ((logits == target) & others).sum(-1) / 2
    return {"result": (rank, close.sum(-1) / 1.0)}


def unmerged(look: Any, arrays: Arrays) -> Arrays:
    """Attention over the first 5 of 9 keys: what all 9 give without the last 4."""
    (out, lse), (part, of_part) = halves(arrays)
    rest = np.exp(lse - lse.value) - np.exp(of_part - lse.value)
    # where the part that is taken out holds everything, as far as rounding tells, anything may come
    rest = Bounded(rest.value, rest.rounding, np.where(rest.error < rest.value, rest.error, np.inf))
    share = np.exp(of_part - lse.value) / rest
    out = out + share[..., None] * (out - part)
    return {"out": out, "lse": np.log(rest) + lse.value}


def halves(arrays: Arrays) -> list[tuple[Any, Any]]:
    """``(out, lse)`` over all 9 keys, and over the last 4."""
    results = []
    for keys in (slice(0, 9), slice(5, 9)):
        terms, high, total = reference.exponentials(arrays["scores"][..., keys])
        out = np.einsum("bts,btsd->btd", terms / total, arrays["values"][..., keys, :])
        results.append((out, (high + np.log(total))[..., 0]))
    return results


ALONE = {"qk_attribution": scores_by_part, "target_rank": ranks, "unmerge": unmerged}
