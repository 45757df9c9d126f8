"""Draws what looks inside a model: patches, ablations, attributions, ranks, ``unmerge``; against `tests.reference.looks`."""

import functools
import importlib.util
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import jattn
from jattn import heads
from jattn.positions import Rotary
from tests.reference.looks import NAMES, expected, halves
from tests.soak.attention import implementation_of
from tests.soak.trial import Difference, Trial, compare
from tests.soak.vocabulary import Arrays, Random

TASKS = "patch attribution_patch ablate path_patch logit_attribution qk_attribution target_rank unmerge".split()
IMPLEMENTATIONS, DTYPES = ("xla", "blockwise", "Blockwise(2, 3)", "native"), ("float32", "float32", "float64")


def draw_look(seed: int, index: int) -> SimpleNamespace:
    """Draws structure number ``index``: everything about a case except the values of its arrays."""
    rng = np.random.default_rng([seed, index, 3])
    N, K = [(1, 1), (2, 2), (2, 1), (4, 2)][rng.integers(4)]
    L, B, T, D, M = (int(rng.integers(1, most + 1)) for most in (2, 2, 5, 4, 5))
    dtype, implementation = DTYPES[rng.integers(3)], IMPLEMENTATIONS[rng.integers(4)]
    if implementation == "native" and (dtype == "float64" or importlib.util.find_spec("jattn_native") is None):
        implementation = "default"
    every, flip = list(itertools.product(range(L), range(N))), lambda share: bool(rng.random() < share)
    groups = [[every[i] for i in rng.permutation(len(every))[: rng.integers(0, len(every) + 1)]] for _ in range(2)]
    return SimpleNamespace(
        task=TASKS[index % len(TASKS)], implementation=implementation, dtype=dtype,
        sizes=(L, B, T, N, K, 2 * int(rng.integers(1, 3)), D, M), causal=flip(0.6),
        what=["q", "k", "v", "z", "pattern"][rng.integers(5)], by=["head", "position", "head_position"][rng.integers(3)],
        kind=["zero", "mean", "resample"][rng.integers(3 if B > 1 else 2)], freeze=flip(0.4),
        groups=groups if flip(0.3) else None, batch_size=[None, 1, 3][rng.integers(3)],
        norm=[None, "layer", "rms"][rng.integers(3)], rotary=flip(0.5), large=flip(0.3),
        rank=int(rng.integers(1, 4)),  # of directions; the parts' sizes follow from it, too
    )  # fmt: skip


def draw_arrays(look: SimpleNamespace, rng: Random) -> Arrays:
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
    integers = {"sources": (7, 4), "targets": (C, 4), "q positions": (40, 3), "kv positions": (40, 3)}
    return arrays | {name: rng.integers(0, *most).astype(np.int32) for name, most in integers.items()}


def program(look: SimpleNamespace, arrays: dict[str, Any]) -> dict[str, Any]:
    """The same by jattn."""
    layers = [{name: {"kernel": arrays[name][i]} for name in (*NAMES.values(), "out")} for i in range(look.sizes[0])]
    common = {"is_causal": look.causal, "implementation": implementation_of(look.implementation)}

    def through(x: Any, per_layer: Any = None) -> tuple[Any, list]:
        kept = []
        for i, layer in enumerate(layers):
            edits = per_layer[i] if per_layer else {}
            y, parts = jattn.multi_head_attention(layer, x, return_heads=True, **common, **edits)
            x, kept = x + y, [*kept, parts]
        return x, kept

    result = lambda x: jax.numpy.tanh(x) @ arrays["read"]
    run = lambda per_layer: result(through(arrays["x"], per_layer)[0])
    (last, parts), (_, source) = through(arrays["x"]), through(arrays["other"])
    options = {"groups": look.groups, "batch_size": look.batch_size}
    match look.task:
        case "patch":
            return {"result": heads.patch(run, source, look.what, look.by, batch_size=look.batch_size)}
        case "attribution_patch":
            return {"result": heads.attribution_patch(lambda layers: run(layers).sum(), source, look.what, look.by)}
        case "ablate":
            return {"result": heads.ablate(run, parts, look.kind, freeze_weights=look.freeze, **options)}
        case "path_patch":
            return {"result": heads.path_patch(result, last, parts, source, list(arrays["out"]), **options)}
        case "logit_attribution":
            written = {"x": arrays["x"], "z": (jax.numpy.stack([part["z"] for part in parts]), arrays["out"])}
            final = {"norm": look.norm, "scale": arrays["scale"], "bias": arrays["bias"]}
            return heads.logit_attribution(written, arrays["directions"], last, **final)
        case "qk_attribution":
            sides = [{"kernel": arrays[name][0], "bias": arrays[f"{name} bias"]} for name in ("query", "key")]
            at = {"query_positions": arrays["q positions"], "kv_positions": arrays["kv positions"]}
            position = Rotary() if look.rotary else None
            inputs = arrays["query parts"], arrays["key parts"]
            return {"result": heads.qk_attribution(*inputs, *sides, position=position, **at)}
        case "target_rank":
            circuit = arrays["embed"], arrays["value"][0], arrays["out"][0], arrays["unembed"]
            return {"result": heads.target_rank(*circuit, arrays["sources"], arrays["targets"])}
    whole, part = ((arrays[f"{name} out"], arrays[f"{name} lse"]) for name in ("whole", "part"))
    return dict(zip(("out", "lse"), jattn.unmerge(*whole, *part), strict=True))


class LookTrial(Trial):
    """A structure and its program, which is compiled when the first case runs."""

    stream = 4

    def __init__(self, seed: int, index: int):
        super().__init__(seed, index)
        self.structure = look = draw_look(seed, index)
        self.label, self.jitted = f"{look.dtype}, {look.task}", jax.jit(functools.partial(program, look))
        of = [f"{look.task} of {look.what} by {look.by}"] if look.task in ("patch", "attribution_patch") else []
        self.outcomes = ["kind look", f"look {look.task}", f"look on {look.implementation}", *of]

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """One input, and one to patch from."""
        arrays, dtype = draw_arrays(self.structure, self.rng(draw)), self.structure.dtype
        for name, results in zip(("whole", "part"), halves(arrays), strict=True):
            arrays |= {f"{name} out": results[0], f"{name} lse": results[1]}
        arguments = {name: x.astype(dtype) if x.dtype.kind == "f" else x for name, x in arrays.items()}
        with jax.enable_x64(dtype == "float64"):
            return compare(self.jitted(arguments), expected(self.structure, arrays))
