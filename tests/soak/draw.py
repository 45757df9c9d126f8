"""Draws cases: the *structure* of a call, which is compiled once, and many sets of *values* for its arrays.

Both are drawn from ``(seed, structure)`` and ``(seed, structure, draw)`` alone, so a case can be repeated from its id.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]
Random = np.random.Generator

NOWHERE, LARGEST = -(2**31), 2**31 - 1
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
LOCAL = (
    "default", "xla", "blockwise", "Blockwise(3, 4)", "Blockwise(7, 2)", "Blockwise(1, 5)", "decode", "Decode(4)",
    "Decode(7)", "nnx", "linen",
)  # fmt: skip
SHARDED = (
    "HeadParallel(2)", "HeadParallel(4)", "Ring(2, contiguous)", "Ring(4, contiguous)", "Ring(2, zigzag)",
    "Ring(4, zigzag)", "Ring(8, contiguous)",
)  # fmt: skip
NATIVE = ("native", "Native(0)")  # the second never takes the kernel for few queries
MODES = {"local": LOCAL, "native": NATIVE, "sharded": SHARDED}
THEMES = ("plain", "plain", "large", "zeros", "equal rows", "tiny", "unseen are NaN", "unseen are infinite", "nowhere")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A mask or score function: its kind, the parts it joins, the names of its arrays, and its static values."""

    kind: str
    parts: tuple["Spec", ...] = ()
    arrays: tuple[str, ...] = ()
    static: tuple[Any, ...] = ()

    def kinds(self) -> list[str]:
        """The kinds of the mask or score function and of its parts."""
        return [self.kind, *(kind for part in self.parts for kind in part.kinds())]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to draw the values of an array."""

    kind: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def learned(self) -> bool:
        """Whether the result is differentiated by the array."""
        return np.issubdtype(self.dtype, np.floating) or self.dtype == ml_dtypes.bfloat16


@dataclasses.dataclass
class Structure:
    """Everything about a case except the values of its arrays; ``recipes`` describes the arrays by name."""

    index: int
    implementation: str
    dtype: str
    x64: bool
    sizes: tuple[int, ...]  # B, T, S, N, K, H, D
    batched: bool = True
    eager: bool = False  # the first draws also run without jit
    static: bool = False  # integers and bools are constants of the program instead of arguments
    mask: Spec | None = None
    mod: Spec | None = None
    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    scale: float | None = None
    weights: bool = False
    statistics: bool = False
    features: int = 0  # M of a layer's inputs; 0: no layer
    recipes: dict[str, Recipe] = dataclasses.field(default_factory=dict)

    @property
    def softmax_dtype(self) -> str:
        """The dtype of the scores."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def learned(self) -> list[str]:
        """The arrays that the result is differentiated by."""
        return [name for name, recipe in self.recipes.items() if recipe.learned and recipe.kind != "cotangent"]

    @property
    def ring(self) -> tuple[int, bool]:
        """The number of devices in the ring, and whether the order is zigzag."""
        if not self.implementation.startswith("Ring"):
            return 1, False
        devices, layout = self.implementation[5:-1].split(", ")
        return int(devices), layout == "zigzag"

    def covers(self) -> list[str]:
        """The features that this structure covers, for the counts."""
        B, T, S, N, K, H, D = self.sizes
        there = {
            "causal": self.is_causal, "local_window_size": self.window is not None, "scale number": self.scale is not None,
            "unbatched": not self.batched, "grouped queries": K < N, "D != H": D != H, "static masks": self.static, "eager": self.eager,
            "attention_weights": self.weights, "statistics": self.statistics, "x64": self.x64, "no query": T == 0,
            "no key": S == 0,
        }  # fmt: skip
        found = [f"implementation {self.implementation}", f"dtype {self.dtype}"]
        found += [f"feature {name}" for name, yes in there.items() if yes]
        fixed = ("query", "key", "value", "out_cotangent", "lse_cotangent")
        found += [f"argument {name}" for name in self.recipes if name not in fixed and not name.startswith("own ")]
        found += sorted({f"mask {kind}" for kind in (self.mask.kinds() if self.mask else ())})
        found += sorted({f"mod {kind}" for kind in (self.mod.kinds() if self.mod else ())})
        positions = [recipe for name, recipe in self.recipes.items() if name.endswith("_positions")]
        return found + sorted({f"positions {np.dtype(one.dtype).name}, rank {len(one.shape)}" for one in positions})


# Plain functions of an array and the indices, as users write them. In the reference, the array is a NumPy array.
MASK_FUNCTIONS: dict[str, Callable] = {
    "thirds": lambda table: lambda b, h, q, kv: (q % 5 + kv % 7 + b + h) % 3 != 0,
    "odd keys": lambda table: lambda b, h, q, kv: kv % 2 == 1,
    "some heads": lambda table: lambda b, h, q, kv: (h % 2 == 0) | (kv == q),
    "captured": lambda table: lambda b, h, q, kv: table[kv % 8] <= table[q % 8],
    "nobody": lambda table: lambda b, h, q, kv: False,
}
MOD_FUNCTIONS: dict[str, Callable] = {
    "gain": lambda table: lambda score, b, h, q, kv: score * table[h],
    "tilt": lambda table: lambda score, b, h, q, kv: score + table[(q % 8 + kv % 8) % 8],
}


def draw_structure(seed: int, index: int, mode: str) -> Structure:
    """Draws structure number ``index``."""
    rng = np.random.default_rng([seed, index])
    implementation = MODES[mode][index % len(MODES[mode])]
    layer, native = implementation in ("nnx", "linen"), mode == "native"
    dtype = str(rng.choice(["float32"] * 3 + (["float64"] if layer else ["bfloat16", "float16", "float64"])))
    dtype = "float32" if native and dtype == "float64" else dtype
    sizes = _sizes(rng, implementation)
    structure = Structure(
        index, implementation, dtype, x64=dtype == "float64" or bool(rng.random() < 0.2), sizes=sizes,
        static=bool(rng.random() < 0.3), weights=not layer and mode == "local" and bool(rng.random() < 0.3),
        statistics=not layer and bool(rng.random() < 0.25), features=int(rng.integers(1, 7)) if layer else 0,
    )  # fmt: skip
    structure.eager = mode == "local" and bool(rng.random() < 0.25)
    B, T, S, N, K, H, D = sizes
    if mode != "sharded" and not layer and B == 1 and rng.random() < 0.5:
        structure.batched = False
    lead = (B,) if structure.batched else ()
    floats = functools.partial(Recipe, dtype=DTYPES[dtype])
    softmax = functools.partial(Recipe, dtype=DTYPES[structure.softmax_dtype])
    recipes = structure.recipes
    if layer:
        M = structure.features
        recipes["inputs_q"] = floats("floats", (B, T, M))
        recipes["inputs_k"] = floats("floats", (B, S, M))
        for name, heads, dim in (("query", N, H), ("key", K, H), ("value", K, D)):
            recipes[f"own {name} kernel"] = floats("kernel", (M, heads, dim))
            recipes[f"own {name} bias"] = floats("floats", (heads, dim))
        recipes["own out kernel"] = floats("kernel", (N, D, M))
        recipes["own out bias"] = floats("floats", (M,))
        recipes["out_cotangent"] = floats("cotangent", (B, T, M))
    else:
        recipes["query"] = floats("query", (*lead, T, N, H))
        recipes["key"] = floats("key", (*lead, S, K, H))
        recipes["value"] = floats("value", (*lead, S, K, D))
        recipes["out_cotangent"] = floats("cotangent", (*lead, T, N, D))
        recipes["lse_cotangent"] = softmax("cotangent", (*lead, T, N))
    if rng.random() < 0.3:
        recipes["bias"] = (floats if rng.random() < 0.5 else softmax)("bias", _broadcast(rng, (B, N, T, S)))
    if rng.random() < 0.3:
        recipes["sinks"] = softmax("sinks", (N,))
    which = rng.random()
    if which < 0.2:
        recipes["mask"] = Recipe("bools", _broadcast(rng, (B, N, T, S)), np.bool_)
    elif which < 0.75:
        structure.mask = _interval(rng, structure) if native else _mask(rng, structure, depth=2)
    if rng.random() < 0.4:
        structure.mod = (
            _mod_of(rng, structure, str(rng.choice(["alibi", "relative", "cap"])))
            if native
            else _mod(rng, structure, 2)
        )
    structure.is_causal = bool(rng.random() < 0.25)
    if not layer:
        _draw_options(rng, structure)
    return structure


def _draw_options(rng: Random, structure: Structure) -> None:
    """Draws the options that a layer does not have."""
    B, T, S, *_ = structure.sizes
    recipes = structure.recipes
    if rng.random() < 0.15:
        sides = [int(rng.choice([0, 1, 3, 2**31 - 1, 2**40])) for _ in range(2)]
        structure.window = sides[0] if rng.random() < 0.3 else (sides[0], sides[1])
    which = rng.random()
    if which < 0.15:
        structure.scale = float(rng.choice([0.0, -0.5, 1.0, 0.3]))
    elif which < 0.35:
        recipes["scale"] = Recipe("scale", (), DTYPES[structure.softmax_dtype])
    for name, length in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if rng.random() < 0.15:
            recipes[name] = Recipe(f"upto {length}", (B,), _integers(rng))
    for name, length in (("query_positions", T), ("kv_positions", S)):
        if rng.random() < 0.35:
            shapes = [(length,), (B, length), (1, length)]
            recipes[name] = Recipe("positions", shapes[rng.integers(3)], _integers(rng))
    if structure.statistics and T == S and rng.random() < 0.5:
        recipes["tokens"] = Recipe("tokens", (B, T) if structure.batched else (T,), np.int32)
    if structure.statistics and rng.random() < 0.3:
        recipes["eligible"] = Recipe("bools", (T,), np.bool_)


def _sizes(rng: Random, implementation: str) -> tuple[int, ...]:
    B, H, D = (int(rng.integers(1, most + 1)) for most in (3, 8, 8))
    if rng.random() < 0.4:
        D = H
    N, K = [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 4), (4, 2), (4, 1)][rng.integers(8)]
    T, S = (int(rng.integers(1, 25)) for _ in range(2))
    which = rng.random()
    if which < 0.4:
        S = T
    elif which < 0.5:
        T = 1
    elif which < 0.53 and implementation in LOCAL[:-2]:
        T, S = [(0, S), (T, 0)][rng.integers(2)]
    if implementation in NATIVE and rng.random() < 0.3:  # several tiles
        T, S = (int(rng.integers(1, 200)) for _ in range(2))
    if implementation.startswith("HeadParallel"):
        N, K = [(4, 4), (8, 4), (4, 2)][rng.integers(3)]
    if implementation.startswith("Ring"):
        T, S = ((max(length // 8, 1) + 1) // 2 * 16 for length in (T, S))
        T, S = (16, 16) if rng.random() < 0.5 else (T, S)
    return B, T, S, N, K, H, D


def _broadcast(rng: Random, full: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of rank 2 to 4 that broadcasts to ``full``."""
    shape = tuple(1 if rng.random() < 0.3 else size for size in full)
    return shape[int(rng.integers(0, 3)) :]


def _integers(rng: Random) -> Any:
    return [np.int32, np.int32, np.int32, np.int8, np.uint8, np.int16, np.int64][rng.integers(7)]


def _add(structure: Structure, kind: str, shape: tuple[int, ...], dtype: Any) -> str:
    name = f"own {len(structure.recipes)}"
    structure.recipes[name] = Recipe(kind, shape, dtype)
    return name


def _mask(rng: Random, structure: Structure, depth: int) -> Spec:
    if depth and rng.random() < 0.55:
        join = str(rng.choice(["and", "and", "or", "or", "not"]))
        return Spec(join, tuple(_mask(rng, structure, depth - 1) for _ in range(1 if join == "not" else 2)))
    return _mask_of(
        rng, structure, str(rng.choice(["causal", "window", "prefix", "padding", "segments", "dense", "function"]))
    )


def _interval(rng: Random, structure: Structure) -> Spec:
    """A mask under which each query sees an interval of keys, of its segment or of all."""
    kinds = ["causal", "window", "prefix", "padding", "segments"]
    if rng.random() < 0.3:
        parts = [_mask_of(rng, structure, str(kind)) for kind in rng.choice(["causal", "prefix", "padding"], 2)]
        return Spec("or", tuple(parts))
    parts = [_mask_of(rng, structure, str(kind)) for kind in rng.choice(kinds, rng.integers(1, 4), replace=False)]
    found = parts[0]
    for part in parts[1:]:
        found = Spec("and", (found, part))
    return found


def _mask_of(rng: Random, structure: Structure, kind: str) -> Spec:
    B, T, S, N, *_ = structure.sizes
    add = functools.partial(_add, structure)
    number = rng.random() < 0.5  # otherwise an array
    match kind:
        case "window" if number:
            return Spec(kind, static=(int(rng.integers(0, 5)), int(rng.choice([0, 1, 4, 2**31 - 1]))))
        case "window":
            return Spec(kind, arrays=tuple(add("side", (), np.int32) for _ in range(2)))
        case "prefix" if number:
            return Spec(kind, static=(int(rng.integers(0, S + 2)),))
        case "prefix":
            return Spec(kind, arrays=(add(f"upto {S}", (), np.int32),))
        case "padding":
            return Spec(kind, arrays=(add(f"upto {S}", (int(rng.choice([1, B])),), _integers(rng)),))
        case "segments":
            lead = [(), (B,), (1,)][rng.integers(3)]
            alone = T == S and rng.random() < 0.7
            return Spec(kind, arrays=tuple(add("ids", (*lead, x), _integers(rng)) for x in ((T,) if alone else (T, S))))
        case "dense":
            return Spec(kind, arrays=(add("bools", _broadcast(rng, (B, N, T, S)), np.bool_),))
        case "function":
            return Spec(kind, arrays=(add("ids", (8,), np.int32),), static=(str(rng.choice(list(MASK_FUNCTIONS))),))
    return Spec(kind)


def _mod(rng: Random, structure: Structure, depth: int) -> Spec:
    if depth and rng.random() < 0.35:
        return Spec("then", tuple(_mod(rng, structure, depth - 1) for _ in range(2)))
    return _mod_of(rng, structure, str(rng.choice(["alibi", "relative", "cap", "gain", "tilt"])))


def _mod_of(rng: Random, structure: Structure, kind: str) -> Spec:
    N, dtype = structure.sizes[3], DTYPES[structure.softmax_dtype]
    add = functools.partial(_add, structure)
    match kind:
        case "alibi":
            return Spec(kind, arrays=(add("slopes", (N,), dtype),))
        case "relative":
            # sizes for which no logarithm falls on the edge of a bucket
            buckets, both, most = [(8, True, 16), (8, False, 20), (12, True, 40)][rng.integers(3)]
            return Spec(kind, arrays=(add("floats", (buckets, N), dtype),), static=(both, most))
        case "cap" if rng.random() < 0.4:
            return Spec(kind, static=(float(rng.choice([2.0, 30.0])),))
        case "cap":
            return Spec(kind, arrays=(add("cap", (), dtype),))
    return Spec(kind, arrays=(add("floats", (N if kind == "gain" else 8,), dtype),))


def draw_values(structure: Structure, seed: int, draw: int, see: Callable[[Structure, Arrays], np.ndarray]) -> Arrays:
    """Draws the arrays of one case. ``see`` gives the visible pairs ``[B,N,T,S]``: NaN may go where nothing sees it.

    In a ``static`` structure, the arrays of the masks are the same in every draw.
    """
    rng = np.random.default_rng([seed, structure.index, 1, draw])
    theme = str(rng.choice(THEMES))
    arrays = {}
    for number, (name, recipe) in enumerate(structure.recipes.items()):
        if structure.static and not recipe.learned:
            fixed = np.random.default_rng([seed, structure.index, 2, number])
            arrays[name] = _values(fixed, recipe, structure, str(fixed.choice(THEMES)))
        else:
            arrays[name] = _values(rng, recipe, structure, theme)
    if theme.startswith("unseen") and not structure.features:
        _spoil(rng, structure, arrays, see(structure, arrays), np.nan if theme.endswith("NaN") else np.inf)
    return arrays


def _spoil(rng: Random, structure: Structure, arrays: Arrays, visible: np.ndarray, by: float) -> None:
    """Writes ``by`` into queries that see nothing, and into keys and values that no query sees."""
    B, T, S, N, K, _, _ = structure.sizes
    rows = np.swapaxes(~visible.any(3), 1, 2)
    columns = np.swapaxes(~visible.reshape(B, K, N // K, T, S).any((2, 3)), 1, 2)
    for name, nobody in (("query", rows), ("key", columns), ("value", columns)):
        nobody = nobody if structure.batched else nobody[0]
        nobody = nobody & (rng.random(nobody.shape) < 0.7)
        arrays[name][nobody] = by


def _values(rng: Random, recipe: Recipe, structure: Structure, theme: str) -> np.ndarray:
    kind, shape = recipe.kind, recipe.shape
    match kind.split()[0]:
        case "floats" | "value" | "cotangent":
            x = rng.normal(size=shape)
        case "query" | "key":
            x = rng.normal(size=shape)
            if theme == "large":
                x *= rng.choice([3.0, 10.0, 30.0 if structure.dtype == "float16" else 100.0])
            if theme == "tiny":
                x *= 1e-3
            if theme == "zeros":
                x *= 0.0
            if theme == "equal rows" and x.size:
                x[:] = x[..., :1, :, :]
        case "kernel":
            x = rng.normal(size=shape) / np.sqrt(shape[0]) * (5.0 if theme == "large" else 1.0)
        case "bias":
            x = rng.normal(size=shape) * (20.0 if theme == "large" else 1.0)
            if theme == "nowhere":
                x = np.where(rng.random(shape) < 0.3, -1e4, x)  # the way people mask by hand
        case "sinks":
            x = rng.normal(size=shape) * (30.0 if theme == "large" else 1.0)
        case "scale":
            x = np.asarray(rng.choice([0.3, 1.0, -0.5, 0.0]))
        case "slopes":
            x = rng.choice([0.5, 0.25, 0.0, -0.05, 2.0**-8], size=shape)
        case "cap":
            x = np.asarray(rng.choice([1.0, 5.0, 50.0]))
        case "bools":
            x = rng.random(shape) < rng.choice([0.0, 0.2, 0.5, 0.9, 1.0])
        case "upto":
            x = rng.integers(0, int(kind.split()[1]) + 2, shape)
        case "side":
            x = rng.choice([0, 1, 2, 5, LARGEST, -1], shape)
        case "ids":
            x = rng.integers(0, rng.choice([1, 3, 6]) + 1, shape)
        case "tokens":
            x = rng.integers(0, 4, shape)
        case "positions":
            x = _positions(rng, shape, recipe.dtype, theme)
        case _:
            raise AssertionError(kind)
    return np.asarray(x).astype(recipe.dtype)


def _positions(rng: Random, shape: tuple[int, ...], dtype: Any, theme: str) -> np.ndarray:
    length, info = shape[-1], np.iinfo(dtype)
    x = np.broadcast_to(np.arange(length), shape).copy()
    match rng.integers(5):
        case 0:
            x += rng.integers(-4, 9, (*shape[:-1], 1))
        case 1:
            x = rng.permuted(x, axis=-1)
        case 2:
            x = rng.integers(-3, 2 * length + 2, shape)
        case 3:
            x += rng.choice([100, 2**30, -(2**30)])
    if theme == "nowhere":
        x = np.where(rng.random(shape) < 0.3, NOWHERE, x)
    return x.clip(max(info.min, NOWHERE), min(info.max, LARGEST))
