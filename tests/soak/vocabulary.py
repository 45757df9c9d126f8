"""What calls are drawn from: masks and score functions, each as a user builds it and by its plain definition.

Those of the conformance table are drawn with it. What the table holds with fixed arrays is here with drawn ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jattn import masks, score_mods
from jattn.testing import _cases as table
from tests.reference import definitions, t5_bucket
from tests.reference.definitions import FORMULAS, LARGEST

Arrays = dict[str, np.ndarray]
Random = np.random.Generator
Add = Callable[[str, tuple[int, ...], Any], str]  # how to draw an array, its shape and dtype -> its name

DTYPES = {
    **{name: np.dtype(getattr(ml_dtypes, name, name)) for name in table.TOLERANCES},
    "float64": np.dtype("float64"),
}
INTEGERS = [np.int32, np.int32, np.int32, np.int8, np.uint8, np.int16, np.int64]
TABLE = {  # the masks whose definition holds at any size
    name.removeprefix("mask "): case
    for name, case in table.CASES.items()
    if set(case.options) == {"mask"} and not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(case.options))
}


class Part(NamedTuple):
    """A mask or score function: its kinds, ``arrays -> it``, and its definition, which also takes the arrays.

    ``(arrays, b, h, q, kv)`` gives the visible pairs, or the reference's `tests.reference.Modify`. ``tells(arrays)`` is what
    a mask tells of documents and padding: ``(kind, values)``, as `tests.reference.places` takes it.
    """

    kinds: list[str]
    build: Callable[[dict[str, Any]], Any]
    define: Callable[..., Any]
    tells: Callable[[Arrays], list] = lambda a: []


def of_table(name: str) -> Part:
    """A mask of the conformance table, whose definition knows one pair at a time."""
    mask, sees = TABLE[name].options["mask"], np.vectorize(TABLE[name].sees, otypes=[bool])
    # plain functions compute in int32, as jattn does; the classes' definitions hold without overflow
    integers = np.int64 if isinstance(mask, masks.Mask) else np.int32
    return Part([name], lambda a: mask, lambda a, *where: sees(*(x.astype(integers) for x in where)))


# Plain functions of an array and the indices; in the definition, the array is a NumPy array.
MASK_FUNCTIONS: dict[str, Callable] = {
    "captured table": lambda t: lambda b, h, q, kv: t[kv % 8] <= t[q % 8],
    "some heads": lambda t: lambda b, h, q, kv: (h % 2 == 0) | (kv == q),
}
MASKS = ("causal", "window", "prefix", "padding", "segments", "dense", "function", "table")


def draw_mask(rng: Random, add: Add, sizes: tuple[int, ...], depth: int = 2) -> Part:
    """Any mask: one of ``MASKS``, or a composition of such."""
    if depth == 0 or rng.random() < 0.45:
        return simple_mask(rng, add, sizes, str(rng.choice(MASKS)))
    join = str(rng.choice(["and", "and", "or", "or", "not"]))
    return joined(join, *(draw_mask(rng, add, sizes, depth - 1) for _ in range(1 if join == "not" else 2)))


def interval_mask(rng: Random, add: Add, sizes: tuple[int, ...]) -> Part:
    """A mask under which each query sees an interval of keys, of its segment or of all."""
    either = rng.random() < 0.3
    kinds = rng.choice(["causal", "prefix", "padding"], 2) if either else rng.choice(MASKS[:5], rng.integers(1, 4), replace=False)  # fmt: skip
    mask, *rest = (simple_mask(rng, add, sizes, str(kind)) for kind in kinds)
    for part in rest:
        mask = joined("or" if either else "and", mask, part)
    return mask


def joined(join: str, *parts: Part) -> Part:
    """``&``, ``|`` or ``~``; of plain functions, which have no operators, ``and_masks``, ``or_masks`` or ``Not``."""
    operator, function, combine = {
        "and": (lambda x, y: x & y, masks.and_masks, np.logical_and),
        "or": (lambda x, y: x | y, masks.or_masks, np.logical_or),
        "not": (lambda x: ~x, masks.Not, np.logical_not),
    }[join]

    def build(a: dict[str, Any]) -> Any:
        built = [part.build(a) for part in parts]
        return (operator if any(isinstance(mask, masks.Mask) for mask in built) else function)(*built)

    kinds = [join, *(kind for part in parts for kind in part.kinds)]
    define = lambda a, *where: combine(*(part.define(a, *where) for part in parts))
    return Part(kinds, build, define, lambda a: [one for part in parts for one in part.tells(a) if join == "and"])


def simple_mask(rng: Random, add: Add, sizes: tuple[int, ...], kind: str) -> Part:
    """A mask of one kind, with Python numbers or arrays."""
    B, T, S, N, *_ = sizes
    static, integers = rng.random() < 0.5, INTEGERS[rng.integers(len(INTEGERS))]
    numbers: list[int] = []
    arrays: list[str] = []
    match kind:
        case "table":
            return of_table(str(rng.choice(list(TABLE))))
        case "function":
            name, ids = str(rng.choice(list(MASK_FUNCTIONS))), add("ids", (8,), np.int32)
            function = MASK_FUNCTIONS[name]
            return Part([name], lambda a: function(jnp.asarray(a[ids])), lambda a, *where: function(a[ids])(*where))
        case "causal":
            of, define = masks.Causal, lambda x, b, h, q, kv: kv <= q
        case "window":
            of, numbers = masks.SlidingWindow, [int(rng.integers(0, 5)), int(rng.choice([0, 1, 4, LARGEST]))]
            arrays = [] if static else [add("side", (), np.int32) for _ in range(2)]
            define = lambda x, b, h, q, kv: definitions.window(q, kv, *map(int, x))
        case "prefix":
            of, numbers = masks.Prefix, [int(rng.integers(0, S + 2))]
            arrays = [] if static else [add(f"upto {S}", (), np.int32)]
            define = lambda x, b, h, q, kv: kv < int(x[0])
        case "padding":
            of, arrays = masks.Padding, [add(f"upto {S}", (int(rng.choice([1, B])),), integers)]
            define = lambda x, b, h, q, kv: definitions.padding(x[0], b, kv)
        case "segments":
            lead, lengths = [(), (B,), (1,)][rng.integers(3)], (T,) if T == S and rng.random() < 0.7 else (T, S)
            of, arrays = masks.Segments, [add("ids", (*lead, length), integers) for length in lengths]
            define = lambda x, b, h, q, kv: definitions.segments(x, b, q, kv)
        case _:
            of, arrays = masks.Dense, [add("bools", broadcast_shape(rng, (B, N, T, S)), np.bool_)]
            define = lambda x, *where: definitions.dense(x[0], *where)
    values = lambda a: [a[name] for name in arrays] if arrays else numbers
    tells = lambda a: [(kind, values(a))] if kind in ("padding", "segments", "dense") else []
    return Part([kind], lambda a: of(*values(a)), lambda a, *where: define(values(a), *where), tells)


def broadcast_shape(rng: Random, full: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of rank 2 to 4 that broadcasts to ``full``."""
    return tuple(1 if rng.random() < 0.3 else size for size in full)[int(rng.integers(0, 3)) :]


SCALED = ("alibi", "relative", "cap")  # those that the compiled kernels take
MODS: dict[str, Callable] = {  # parameters -> score function
    "alibi": table.CASES["alibi"].mod,
    "cap": table.CASES["soft cap, its cap learned"].mod,
    "captured table": table.CASES["score function that captures a table, int times float"].mod,
    "gain": lambda t: lambda s, b, h, q, kv: s * t[h],
    "tilt": lambda t: lambda s, b, h, q, kv: s + t[(q % 8 + kv % 8) % 8],
    "relative": score_mods.RelativeBias,
}


def draw_mod(rng: Random, add: Add, heads: int, dtype: Any, kinds: tuple[str, ...], depth: int = 2) -> Part:
    """Any score function of these kinds, or up to ``2**depth`` of them in a row."""
    if depth == 0 or rng.random() < 0.65:
        return simple_mod(rng, add, heads, dtype, str(rng.choice(kinds)))
    first, second = (draw_mod(rng, add, heads, dtype, kinds, depth - 1) for _ in range(2))
    define = lambda a, *where: definitions.then(first.define(a, *where), second.define(a, *where))
    build = lambda a: score_mods.then(first.build(a), second.build(a))
    return Part(["then", *first.kinds, *second.kinds], build, define)


def simple_mod(rng: Random, add: Add, heads: int, dtype: Any, kind: str) -> Part:
    """A score function of one kind."""
    formula, static, distance = FORMULAS.get(kind, FORMULAS["added"]), (), lambda q, kv: (kv - q).astype(np.float64)
    if kind == "cap" and rng.random() < 0.4:
        cap = float(rng.choice([2.0, 30.0]))
        define = lambda a, b, h, q, kv: definitions.modified(formula, distance(q, kv), cap)
        return Part([kind], lambda a: score_mods.SoftCap(cap), define)
    draw, shape, index = "floats", (heads,), lambda h, q, kv: h
    if kind == "relative":  # sizes for which no logarithm falls on the edge of a bucket
        buckets, *static = [(8, True, 16), (8, False, 20), (12, True, 40)][rng.integers(3)]
        shape, index = (buckets, heads), lambda h, q, kv: t5_bucket(kv - q, buckets, *static) * heads + h
    elif kind == "tilt":
        shape, index = (8,), lambda h, q, kv: (q % 8 + kv % 8) % 8
    elif kind in ("cap", "alibi"):
        draw, shape = {"cap": ("cap", ()), "alibi": ("slopes", shape)}[kind]
    name, convert = add(draw, shape, dtype), (lambda x: x) if kind in SCALED else jnp.asarray  # functions index arrays
    where = lambda h, q, kv: 0 * h if kind == "cap" else index(h, q, kv)
    define = lambda a, b, h, q, kv: definitions.modified(formula, distance(q, kv), a[name], name, where(h, q, kv))
    return Part([kind], lambda a: MODS[kind](convert(a[name]), *static), define)
