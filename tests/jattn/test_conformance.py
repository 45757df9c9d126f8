"""Every implementation on every case: values, log-sum-exp and gradients, compared with the formula in float64.

The cases and the reference are those of ``jattn.testing``; a chip is held to them, too.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn._core.dropout import Dropout, dropout_keep, dropout_seeds
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.decode import Decode
from jattn.kernels.dispatch import IMPLEMENTATIONS
from jattn.kernels.native import Native
from jattn.kernels.pallas_gpu.interpreted import Interpreted
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash
from jattn.sharding import HeadParallel, Ring, SplitKeys, Ulysses
from jattn.testing import AT_SIZE, CASES, Case
from jattn.testing._cases import B, H, N, S, T
from jattn.testing._check import compare, run, values_and_gradients
from jattn.testing._reference import error, inputs, poisoned, reference


@dataclasses.dataclass(frozen=True)
class Variant:
    """An implementation, and how to call it."""

    name: str
    implementation: Any
    traced: bool = False  # positions, lengths and masks as arguments of the jitted function
    sharded: bool = False  # under a mesh, so arrays may be on several devices
    mapped: bool = False  # inside jax.shard_map, with arrays local to each device
    dtype: Any = None  # of all cases, for an implementation without float32; of those IN_KIND

    def __str__(self):
        how = {"traced": self.traced, "on a mesh": self.sharded, "in shard_map": self.mapped}
        return ", ".join([self.name, *(name for name, yes in how.items() if yes)])

    @property
    def plain(self) -> bool:
        return not (self.traced or self.sharded or self.mapped or self.dtype)

    def of(self, case: Case) -> Case:
        """The case in the variant's dtype."""
        return case if self.dtype is None else case.of(self.dtype)

    def in_force(self):
        """A context in which the mesh is set."""
        return jax.set_mesh(DEVICES) if self.sharded else contextlib.nullcontext()


# Lengths are mostly 7 and 11: 7 queries divide evenly, the others do not. Traced variants run the cases with arrays.
WAYS = {}, {"traced": True}, {"mapped": True}
VARIANTS = [
    Variant("xla", "xla"),
    Variant("cudnn", "cudnn"),
    Variant("blockwise", Blockwise((3, 4))),
    Variant("blockwise", Blockwise((7, 4)), traced=True, sharded=True),
    Variant("decode", Decode(4)),  # products of all heads at once
    Variant("decode", Decode(4), traced=True, sharded=True),  # products of each head
    Variant("xla", "xla", mapped=True),
    Variant("blockwise", Blockwise((3, 4)), mapped=True),
    Variant("decode", Decode(4), mapped=True),
    *(Variant("splash", Splash(interpret=True), **way) for way in WAYS),
    *(Variant("pallas_tpu", PallasTPU(interpret=True), **way) for way in WAYS),
    Variant("pallas_gpu", Interpreted(), dtype=jnp.bfloat16),
    Variant("native", Native()),  # few queries
    *(Variant("native", Native(few=0), **way) for way in WAYS),
]
DEVICES = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request):
    return request.param


def test_every_implementation_has_a_variant_and_cases_that_exist():
    assert {variant.name for variant in VARIANTS} == set(IMPLEMENTATIONS)
    assert set(CASES) >= IN_KIND.union(*FAST.values())


def options_of(case: Case, arrays: list | None) -> dict[str, Any]:
    """The case's options, with ``arrays`` for their arrays."""
    leaves, structure = jax.tree.flatten(dict(case.options))
    rest = iter(arrays_of(case) if arrays is None else arrays)
    return jax.tree.unflatten(structure, [next(rest) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])


def arrays_of(case: Case) -> list:
    return [leaf for leaf in jax.tree.leaves(dict(case.options)) if isinstance(leaf, np.ndarray)]


def caller(case: Case, variant: Variant) -> Callable:
    """``given -> results and gradients``, jitted; for a traced variant, with all arrays of the options as arguments."""
    arrays = arrays_of(case) if variant.traced else None

    def both(given, arrays):
        options = options_of(case, arrays)
        return values_and_gradients(case, lambda x: run(case, variant.implementation, x, options), given)

    def on_a_device(given, arrays):
        own = jax.tree.map(lambda x: jax.lax.pcast(x, "devices", to="varying"), (given, arrays))
        return jax.tree.map(lambda x: x[None], both(*own))

    def mapped(given, arrays):
        spec = jax.sharding.PartitionSpec
        each = jax.shard_map(on_a_device, mesh=DEVICES, in_specs=spec(), out_specs=spec("devices"))
        return jax.tree.map(lambda x: x[1], each(given, arrays))

    jitted = jax.jit(mapped if variant.mapped else both)

    def call(given: dict[str, np.ndarray]):
        with variant.in_force():
            return jitted(jax.tree.map(jnp.asarray, given), arrays)

    return call


@functools.cache
def expected(name: str, dtype: Any):
    """The reference for one case, computed once for all implementations."""
    return reference(dataclasses.replace((CASES | AT_SIZE)[name], dtype=dtype))


def skip_where_unsupported(case: Case, variant: Variant) -> None:
    """Skips the case with the reason that the implementation gives, instead of letting it raise ``Unsupported``."""
    B, T, S, N, K, H, D = case.shape
    q, k, v = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, D)))
    mod = {} if case.mod is None else {"score_mod": case.mod(jnp.asarray(case.params))}  # it is differentiated
    texts = []

    def ask(arrays):
        options = options_of(case, arrays)
        texts.append(jattn.explain(q, k, v, **options, **mod, implementation=variant.implementation))

    jax.eval_shape(ask, arrays_of(case)) if variant.traced else ask(None)
    text = texts[0]
    if case.offset and IMPLEMENTATIONS[variant.name].reads_rounded_output:
        pytest.skip(f"{variant.name} reads the rounded output")
    if variant.name == "cudnn" and jax.default_backend() != "gpu":
        pytest.skip("cudnn: it needs an NVIDIA GPU")
    if "but " in text.splitlines()[0]:
        pytest.skip(text.splitlines()[0])


COMPARED = {name: case for name, case in CASES.items() if not case.poisoned}
POISONED = {name: case for name, case in CASES.items() if case.poisoned}

# Cases that differ in blocks, tables, groups or the kind of numbers.
IN_KIND = {
    "grouped, with per-head bias and mask", "positions that differ by row", "both lengths and causal",
    "mask function of all four indices", "score function that captures a table, int times float",
    "score function with an infinite derivative where masked", "sinks, and rows that see nothing", "logits of +-1e4",
    "no keys, causal", "bfloat16, causal", "user-defined mask class, with an interval",
    "bfloat16, keys with much in common",
}  # fmt: skip

# The cases that are not slow, by variant: each kind of case for the implementations that need no compiler, and with the
# others where it is most likely to fail; the dense formula and tests/jattn/test_masks.py cover what the rest add.
FAST = {
    "xla": IN_KIND - {
        "positions that differ by row", "both lengths and causal", "score function that captures a table, int times float",
        "score function with an infinite derivative where masked",
    } | {
        "one key", "positions up to 2**30", "key lengths, one of them 0", "mask Causal | Prefix", "mask Padding", "mask Dense",
        "mask SlidingWindow & ~Prefix: rows that see nothing", "every row sees nothing",
        "mask function and causal and lengths", "soft cap, its cap learned", "alibi, then a soft cap, causal",
        "no queries", "no keys", "no sequences",
    },
    "cudnn": set(CASES),  # skipped where there is no GPU
    "blockwise": {"bfloat16, causal", "bfloat16, keys with much in common", "no keys, causal"},
    "decode": {"mask function of all four indices", "no keys, causal"},
    "splash": IN_KIND - {
        "both lengths and causal", "sinks, and rows that see nothing", "logits of +-1e4", "bfloat16, causal"
    },
    "splash, traced": {
        "grouped, with per-head bias and mask", "positions that differ by row",
        "score function with an infinite derivative where masked",
    },
    "pallas_tpu": {"bfloat16, causal"},
    "native": IN_KIND,
    "native, traced": IN_KIND - {"grouped, with per-head bias and mask"},
}  # fmt: skip


def pairs():
    for variant in VARIANTS:
        for name, case in COMPARED.items():
            if variant.dtype is not None and name not in IN_KIND:
                continue
            if arrays_of(case) if variant.traced else variant.name != "decode" or not arrays_of(case):
                yield param(variant, name, fast=name in FAST.get(str(variant), ()))


def param(*values: Any, fast: bool):
    return pytest.param(*values, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize("variant, name", list(pairs()), indirect=["variant"], ids=str)
def test_values_lse_and_gradients(variant, name):
    case = variant.of((CASES | AT_SIZE)[name])
    skip_where_unsupported(case, variant)
    outcome = compare(case, caller(case, variant)(inputs(case)), expected(name, case.dtype))
    assert outcome.result == "right", outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_SIZE)
def test_at_the_size_of_real_calls(name):
    test_values_lse_and_gradients(Variant("blockwise", "blockwise"), name)


def poisoned_pairs():
    """Those that compile in less than a second are fast, and one case in blocks."""
    for variant in VARIANTS:
        for name in POISONED:
            fast = variant.plain and (
                variant.name in ("xla", "cudnn", "native")
                or (variant.name, name) == ("blockwise", "NaN where nobody looks: key lengths")
            )
            yield param(variant, name, fast=fast)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NumPy's, in an interpreted kernel
@pytest.mark.parametrize("variant, name", list(poisoned_pairs()), indirect=["variant"], ids=str)
def test_what_nobody_sees_may_hold_anything(variant, name):
    """NaN or Inf instead of zeros in unseen slots and in queries that see nothing changes no bit of the results."""
    case = variant.of(POISONED[name])
    skip_where_unsupported(case, variant)
    run_it = caller(case, variant)
    clean = jax.tree.leaves(run_it(poisoned(case, 0.0)))
    for poison in (np.nan, np.inf):
        for got, wanted in zip(jax.tree.leaves(run_it(poisoned(case, poison))), clean, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("argument", ["key", "value"])
@pytest.mark.parametrize("variant", [param(one, fast=one.plain) for one in VARIANTS], indirect=True, ids=str)
def test_visible_nan_shows_in_every_row_that_sees_it(variant, argument):
    case = variant.of(Case({"is_causal": True}))
    skip_where_unsupported(case, variant)
    given = inputs(case)
    given[argument][0, 4] = np.nan
    out, _ = jax.jit(functools.partial(run, case, variant.implementation))(given)
    assert np.isnan(out[0, 4:]).all() and np.isfinite(out[1]).all()


def on(kind, devices=4):
    """A division of the sequence, or of the heads, over devices."""
    mesh = jax.make_mesh((devices,), ("devices",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    return kind(mesh, "devices")


@pytest.mark.slow_except("native-value")
@pytest.mark.parametrize("argument", ["key", "value"])
@pytest.mark.parametrize("implementation", [
    "xla", "decode", "native", Native(few=0), "blockwise", Blockwise((8, 2**15)), Decode(2**15),
    *(functools.partial(on, kind) for kind in (Ring, Ulysses, SplitKeys, HeadParallel)),
], ids=lambda how: how.args[0].__name__ if callable(how) else how if isinstance(how, str) else repr(how))  # fmt: skip
def test_a_visible_nan_shows_where_a_row_is_longer_than_4096(implementation, argument):
    """JAX's maximum of float32 on a CPU drops NaN from 4096 entries on. Every device has more."""
    if implementation in ("native", Native(few=0)):
        pytest.importorskip("jattn_native")
    how = implementation() if callable(implementation) else implementation
    T, S, at = 8, 4 * 4224, 9000
    positions = np.array([100, at - 1, at, at + 1, S - 2, S - 1, 0, 6000])
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(size=(2, n, 4, 8)).astype(np.float32) for name, n in (("query", T), ("key", S), ("value", S))
    }
    arrays[argument][0, at] = np.nan

    def attend(query, key, value):
        options = {"is_causal": True, "query_positions": positions, "implementation": how, "return_residual": True}
        return jattn.dot_product_attention(query, key, value, **options)

    @jax.jit
    def results_and_gradients(query, key, value):
        (out, lse), pull = jax.vjp(attend, query, key, value)
        return out, lse[..., None], *pull((jnp.ones_like(out), jnp.ones_like(lse)))

    seen = np.arange(S) <= positions[:, None]
    rows = seen[:, at]
    keys = (seen & rows[:, None]).any(0)
    nan = [rows, rows, rows, keys, keys] if argument == "key" else [rows, ~rows & rows, rows, keys, ~keys & keys]
    for x, wanted in zip(results_and_gradients(**arrays), nan, strict=True):
        assert np.isnan(x[0, wanted]).all() and np.isfinite(x[1]).all()


@jax.jit
def kept_and_weights(q, k):
    """The entries ``[B,N,T,S]`` that dropout keeps, one head at a time, and the weights without it."""
    dropout, where = Dropout(jax.random.key(3), 0.4), (jnp.arange(T)[:, None], jnp.arange(S)[None, :])
    keep = lambda b, h: dropout_keep(dropout_seeds(dropout, b, h), 0.4, *where)
    return jnp.stack([jnp.stack([keep(b, h) for h in range(N)]) for b in range(B)]), jattn.attention_weights(q, k)


@pytest.mark.parametrize(
    "variant", [param(variant, fast=variant.name in ("xla", "native")) for variant in VARIANTS], indirect=True, ids=str
)
def test_dropout_keeps_what_the_key_and_the_indices_say(variant):
    """With ``value = identity``, the output equals the weights after dropout, which shows the kept entries."""
    case = Case(shape=(B, T, S, N, N, H, S))
    q, k = (jnp.asarray(x) for x in (inputs(case)["query"], inputs(case)["key"]))
    v = jnp.asarray(np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (B, S, N, S)))
    options = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(3), "implementation": variant.implementation}
    skip_where_unsupported(dataclasses.replace(case, options={"dropout_rate": 0.4, "dropout_rng": jax.random.key(3)}), variant)  # fmt: skip
    dropped = np.asarray(jattn.dot_product_attention(q, k, v, **options).transpose(0, 2, 1, 3))
    kept, weights = kept_and_weights(q, k)
    assert error(dropped, np.where(kept, weights / 0.6, 0.0)) <= 1e-6
    # half of the keys, at their own positions, keep the same entries
    half = jattn.dot_product_attention(
        q, k[:, 5:], v[:, 5:], **options, kv_positions=np.arange(5, S), return_residual=True
    )[0].transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(half[..., 5:] != 0, dropped[..., 5:] != 0)
    # one pattern for all heads and sequences
    shared = jattn.dot_product_attention(q, k, v, **options, broadcast_dropout=True).transpose(0, 2, 1, 3) != 0
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:1, :1], shared.shape))
    assert 0.5 < shared.mean() < 0.7
