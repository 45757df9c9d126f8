"""Draws calls: the *structure* of a call, which is compiled once, and many sets of *values* for its arrays.

Both are drawn from ``(seed, structure)`` and ``(seed, structure, draw)`` alone, so a case can be repeated from its id.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tests import reference
from tests.reference import definitions
from tests.reference.definitions import LARGEST
from tests.soak import vocabulary
from tests.soak.vocabulary import DTYPES, INTEGERS, Arrays, Part, Random, broadcast_shape

NOWHERE = -(2**31)
MODES = {
    "local": ("default", "xla", "blockwise", "Blockwise(3, 4)", "Blockwise(7, 2)", "Blockwise(1, 5)", "decode",
              "Decode(4)", "Decode(7)", "nnx", "linen"),
    "native": ("native", "Native(0)"),  # the second never takes the kernel for few queries
    "sharded": ("HeadParallel(2)", "HeadParallel(4)", "Ring(2, contiguous)", "Ring(4, contiguous)", "Ring(2, zigzag)",
                "Ring(4, zigzag)", "Ring(8, contiguous)", "Ulysses(2)"),
}  # fmt: skip
FORMS = "alone", "alone", "vmap", "scan", "remat", "transposed", "threads"  # of native calls
THEMES = ("plain", "plain", "large", "zeros", "equal rows", "tiny", "unseen are NaN", "unseen are infinite", "nowhere")
SHAPES = sorted({case.shape for case in vocabulary.table.CASES.values()})
COTANGENTS = ("out_cotangent", "lse_cotangent")


class Recipe(NamedTuple):
    """How to draw the values of an array."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def learned(self) -> bool:
        """Whether the array holds floats, so that the result is differentiated by it."""
        return self.dtype in DTYPES.values()


@dataclasses.dataclass
class Structure:
    """Everything about a case except the values of its arrays; ``recipes`` describes the arrays by name."""

    index: int
    implementation: str
    dtype: np.dtype  # of query, key and value
    wide: np.dtype  # of scores
    x64: bool
    sizes: tuple[int, ...]  # B, T, S, N, K, H, D
    batched: bool = True
    eager: bool = False  # the first draws also run without jit
    form: str = "alone"  # what is around the call, one of FORMS
    static: bool = False  # integers and bools are constants of the program instead of arguments
    mask: Part | None = None
    mod: Part | None = None
    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    scale: float | None = None
    weights: bool = False
    statistics: bool = False
    features: int = 0  # M of a layer's inputs; 0: no layer
    recipes: dict[str, Recipe] = dataclasses.field(default_factory=dict)

    @property
    def learned(self) -> list[str]:
        """The arrays that the result is differentiated by."""
        return [name for name, recipe in self.recipes.items() if recipe.learned and name not in COTANGENTS]

    def add(self, kind: str, shape: tuple[int, ...], dtype: Any, name: str = "") -> str:
        """Adds an array, of a mask or score function if it has no name; returns the name."""
        name = name or f"part {len(self.recipes)}"
        self.recipes[name] = Recipe(kind, shape, np.dtype(dtype))
        return name

    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """The token in each slot, of queries and of keys."""
        devices = int(self.implementation[5]) if self.implementation.endswith("zigzag)") else 0
        return definitions.zigzag(self.sizes[1], devices), definitions.zigzag(self.sizes[2], devices)

    def places(self, arrays: Arrays) -> definitions.Places:
        """The indices that masks and score functions get."""
        tokens = zip(("query_positions", "kv_positions"), self.slots(), strict=True)
        return definitions.places(self.sizes[0], self.sizes[3], *(arrays.get(name, x) for name, x in tokens))

    def visible(self, arrays: Arrays) -> np.ndarray:
        """Whether each query sees each key, ``[B,N,T,S]``."""
        where = self.places(arrays)
        mask = True if self.mask is None else self.mask.define(arrays, *where)
        return definitions.visible(where, self.slots(), arrays, mask, self.is_causal, self.window)

    def sequences(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Where each token is in its own sequence, and which queries are padding."""
        B, T, S, *_ = self.sizes
        at = [
            None if name not in arrays else np.atleast_2d(arrays[name]) for name in ("query_positions", "kv_positions")
        ]
        by_slot = [arrays["mask"]] if "mask" in arrays else []
        by_slot += [arrays["bias"] > -1e8] if "bias" in arrays else []
        by_slot = [np.asarray(x)[(None,) * (4 - np.ndim(x))] for x in by_slot]
        if "key_value_seq_lengths" in arrays:
            by_slot.append(np.arange(S) < arrays["key_value_seq_lengths"].astype(int)[:, None, None, None])
        told = [] if self.mask is None else self.mask.tells(arrays)
        return reference.places((B, T, S), self.slots(), at, told, by_slot)

    def covers(self) -> list[str]:
        """The features that this structure covers, for the counts."""
        B, T, S, N, K, H, D = self.sizes
        fields = ("x64", "eager", "static", "is_causal", "window", "scale", "weights", "statistics")
        present = {name: getattr(self, name) not in (None, False) for name in fields}
        present |= {"unbatched": not self.batched, "grouped queries": K < N, "D != H": D != H}
        present |= {"no sequence": B == 0, "no query": T == 0, "no key": S == 0}
        arguments = {name: x for name, x in self.recipes.items() if " " not in name and name not in COTANGENTS}
        parts = {"mask": self.mask, "mod": self.mod}
        covered = [
            "kind attention",
            f"form {self.form}",
            f"implementation {self.implementation}",
            f"dtype {self.dtype.name}",
        ]
        covered += [f"feature {name}" for name, value in present.items() if value]
        covered += [f"argument {name} {x.dtype.name}" for name, x in arguments.items()]
        return covered + sorted({f"{name} {kind}" for name, part in parts.items() if part for kind in part.kinds})


def draw_structure(seed: int, index: int, mode: str) -> Structure:
    """Draws structure number ``index``."""
    rng = np.random.default_rng([seed, index])
    flip = lambda share: bool(rng.random() < share)
    implementation = MODES[mode][index % len(MODES[mode])]
    layer, native = implementation in ("nnx", "linen"), mode == "native"
    without = {"bfloat16", "float16"} if layer else {"float64"} if native else set()
    dtype, wide = DTYPES[str(rng.choice(["float32"] * 2 + sorted(DTYPES.keys() - without)))], np.dtype(np.float32)
    wide = dtype if dtype == np.float64 else wide
    structure = Structure(
        index, implementation, dtype, wide, x64=dtype == np.float64 or flip(0.2), sizes=_sizes(rng, implementation),
        static=flip(0.3), weights=not layer and mode == "local" and flip(0.3), statistics=not layer and flip(0.25),
        features=int(rng.integers(1, 7)) if layer else 0, eager=mode == "local" and flip(0.25),
    )  # fmt: skip
    if native:
        structure.form = FORMS[np.random.default_rng([seed, index, 3]).integers(len(FORMS))]
    B, T, S, N, K, H, D = structure.sizes
    structure.batched = mode == "sharded" or layer or B != 1 or flip(0.5)
    add, M, lead = structure.add, structure.features, (B,) if structure.batched else ()
    if layer:
        lengths = {"inputs_q": T, "inputs_k": S, "out_cotangent": T}
        inputs = {name: ("floats", (B, length, M)) for name, length in lengths.items()}
        for name, heads, size in (("query", N, H), ("key", K, H), ("value", K, D)):
            inputs |= {f"{name} kernel": ("kernel", (M, heads, size)), f"{name} bias": ("floats", (heads, size))}
        inputs |= {"out kernel": ("kernel", (N, D, M)), "out bias": ("floats", (M,))}
    else:
        inputs = {"query": ("vectors", (*lead, T, N, H)), "key": ("vectors", (*lead, S, K, H))}
        inputs |= {"value": ("floats", (*lead, S, K, D)), "out_cotangent": ("floats", (*lead, T, N, D))}
        add("floats", (*lead, T, N), wide, "lse_cotangent")
    for name, (kind, shape) in inputs.items():
        add(kind, shape, dtype, name)
    if flip(0.3):
        add("bias", broadcast_shape(rng, (B, N, T, S)), dtype if flip(0.5) else wide, "bias")
    if flip(0.3):
        add("sinks", (N,), wide, "sinks")
    which = rng.random()
    if which < 0.2:
        add("bools", broadcast_shape(rng, (B, N, T, S)), np.bool_, "mask")
    elif which < 0.75:
        structure.mask = (vocabulary.interval_mask if native else vocabulary.draw_mask)(rng, add, structure.sizes)
    if flip(0.4):
        kinds = vocabulary.SCALED if native else tuple(vocabulary.MODS)
        structure.mod = vocabulary.draw_mod(rng, add, N, wide, kinds, depth=0 if native else 2)
    structure.is_causal = flip(0.25)
    if not layer:
        _draw_options(rng, structure)
    return structure


def _draw_options(rng: Random, structure: Structure) -> None:
    """Draws the options that a layer does not have."""
    B, T, S, *_ = structure.sizes
    flip, integers = lambda share: bool(rng.random() < share), lambda: INTEGERS[rng.integers(len(INTEGERS))]
    if flip(0.15):
        sides = [int(rng.choice([0, 1, 3, LARGEST, 2**40])) for _ in range(2)]
        structure.window = sides[0] if flip(0.3) else (sides[0], sides[1])
    if flip(0.15):
        structure.scale = float(rng.choice([0.0, -0.5, 1.0, 0.3]))
    elif flip(0.25):
        structure.add("scale", (), structure.wide, "scale")
    for name, length in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if flip(0.15):
            structure.add(f"upto {length}", (B,), integers(), name)
    for name, length in (("query_positions", T), ("kv_positions", S)):
        if flip(0.35):
            structure.add("positions", [(length,), (B, length), (1, length)][rng.integers(3)], integers(), name)
    if structure.statistics and T == S and flip(0.5):
        structure.add("tokens", (B, T) if structure.batched else (T,), np.int32, "tokens")
    if structure.statistics and flip(0.3):
        structure.add("bools", (T,), np.bool_, "eligible")


def _sizes(rng: Random, implementation: str) -> tuple[int, ...]:
    """Those of a case of the table, or drawn ones."""
    local = implementation in MODES["local"][:-2]
    if local and rng.random() < 0.2:
        return SHAPES[rng.integers(len(SHAPES))]
    B, H, D, T, S = (int(rng.integers(1, most + 1)) for most in (3, 8, 8, 24, 24))
    N, K = [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 4), (4, 2), (4, 1)][rng.integers(8)]
    if implementation in MODES["native"] and rng.random() < 0.3:  # several tiles
        T, S = (int(rng.integers(1, 200)) for _ in range(2))
    empty = [(0, S), (T, 0)][rng.integers(2)] if local else (T, S)
    T, S = ([(S, S)] * 8 + [(1, S)] * 2 + [(T, S)] * 9 + [empty])[rng.integers(20)]
    if implementation.startswith(("HeadParallel", "Ulysses")):
        N, K = [(4, 4), (8, 4), (4, 2)][rng.integers(3)]
    if implementation.startswith(("Ring", "Ulysses")):
        T, S = ((max(length // 8, 1) + 1) // 2 * 16 for length in ((T, S) if rng.random() < 0.5 else (16, 16)))
    return B, T, S, N, K, H, H if rng.random() < 0.4 else D


def draw_values(structure: Structure, seed: int, draw: int) -> Arrays:
    """Draws the arrays of one case; NaN or infinity may stand where nobody looks.

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
        _spoil(rng, structure, arrays, np.nan if theme.endswith("NaN") else np.inf)
    return arrays


def _spoil(rng: Random, structure: Structure, arrays: Arrays, by: float) -> None:
    """Writes ``by`` into queries that see nothing, and into keys and values that no query sees."""
    B, T, S, N, K, _, _ = structure.sizes
    visible = structure.visible(arrays)
    rows = np.swapaxes(~visible.any(3), 1, 2)
    columns = np.swapaxes(~visible.reshape(B, K, N // K, T, S).any((2, 3)), 1, 2)
    for name, unseen in (("query", rows), ("key", columns), ("value", columns)):
        unseen = unseen if structure.batched else unseen[0]
        arrays[name][unseen & (rng.random(unseen.shape) < 0.7)] = by


def _values(rng: Random, recipe: Recipe, structure: Structure, theme: str) -> np.ndarray:
    (kind, *limit), shape, most = recipe.kind.split(), recipe.shape, 30.0 if structure.dtype == np.float16 else 100.0
    normal = lambda large=1.0: rng.normal(size=shape) * (large if theme == "large" else 1.0)
    values = {
        "floats": normal,
        "kernel": lambda: normal(5.0) / np.sqrt(shape[0]),
        "sinks": lambda: normal(30.0),
        "bias": lambda: np.where((rng.random(shape) < 0.3) & (theme == "nowhere"), -1e4, normal(20.0)),  # as people mask
        "vectors": lambda: normal(rng.choice([3.0, 10.0, most])) * {"tiny": 1e-3, "zeros": 0.0}.get(theme, 1.0),
        "scale": lambda: rng.choice([0.3, 1.0, -0.5, 0.0]),
        "slopes": lambda: rng.choice([0.5, 0.25, 0.0, -0.05, 2.0**-8], size=shape),
        "cap": lambda: rng.choice([1.0, 5.0, 50.0]),
        "bools": lambda: rng.random(shape) < rng.choice([0.0, 0.2, 0.5, 0.9, 1.0]),
        "upto": lambda: rng.integers(0, int(limit[0]) + 2, shape),
        "side": lambda: rng.choice([0, 1, 2, 5, LARGEST, -1], shape),
        "ids": lambda: rng.integers(0, rng.choice([1, 3, 6]) + 1, shape),
        "tokens": lambda: rng.integers(0, 4, shape),
        "positions": lambda: _positions(rng, shape, recipe.dtype, theme),
    }  # fmt: skip
    x = np.asarray(values[kind]()).astype(recipe.dtype)
    return np.broadcast_to(x[..., :1, :, :], shape).copy() if kind == "vectors" and theme == "equal rows" and x.size else x  # fmt: skip


def _positions(rng: Random, shape: tuple[int, ...], dtype: np.dtype, theme: str) -> np.ndarray:
    info, x = np.iinfo(dtype), np.broadcast_to(np.arange(shape[-1]), shape)
    x = [
        lambda: x + rng.integers(-4, 9, (*shape[:-1], 1)),
        lambda: rng.permuted(x, axis=-1),
        lambda: rng.integers(-3, 2 * shape[-1] + 2, shape),
        lambda: x + rng.choice([100, 2**30, -(2**30)]),
        lambda: x,
    ][rng.integers(5)]()
    if theme == "nowhere":
        x = np.where(rng.random(shape) < 0.3, NOWHERE, x)
    return x.clip(max(info.min, NOWHERE), min(info.max, LARGEST))
