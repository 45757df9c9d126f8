"""What each kernel does not take, with the reason that it gives: by name when called, and in what ``explain`` says.

``xla``, ``blockwise`` and ``decode`` take every call whose lengths are known while tracing.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, score_mods
from jattn.kernels import native
from jattn.kernels.dispatch import IMPLEMENTATIONS
from jattn.kernels.native import Native
from jattn.kernels.pallas_gpu import OLDEST
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash

B, T, S, N, K, H = 2, 7, 11, 4, 2, 16
SPLASH, PALLAS_TPU = Splash((128, 128), interpret=True), PallasTPU((128, 128), interpret=True)
IDS, KV_IDS = np.arange(T) // 3, np.arange(S) // 3
DTYPES = {"cudnn": jnp.bfloat16, "pallas_gpu": jnp.bfloat16}  # that a kernel takes; float32 elsewhere
MARKS = {
    "native": pytest.mark.skipif(not native._is_installed(), reason="jattn-native is not installed"),
    "pallas_gpu": pytest.mark.skipif(jax.__version_info__ < OLDEST, reason="pallas_gpu needs a newer JAX"),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Options, and what of the shape and the dtype is not the usual."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    T: int = T
    S: int = S
    N: int = N
    K: int = K
    H: int = H
    dtype: Any = None
    x64: bool = False

    def arrays(self, name: str) -> list[jax.ShapeDtypeStruct]:
        dtype = self.dtype or DTYPES.get(name, jnp.float32)
        shapes = (B, self.T, self.N, self.H), (B, self.S, self.K, self.H), (B, self.S, self.K, self.H)
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def context(self) -> Any:
        return jax.enable_x64(True) if self.x64 else contextlib.nullcontext()


DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
PRECISION = {"precision": "highest"}
POSITIONS = {"query_positions": np.arange(T)}
BIAS = {"bias": np.zeros((T, S), np.float32)}
ARRAY = {"mask": np.ones((T, S), bool)}
CAP = {"score_mod": score_mods.SoftCap(1.0)}
FAR = {"score_mod": score_mods.RelativeBias(np.ones((8, N), np.float32), max_distance=2**21)}
PAIRS = {"mask": masks.Dense(jnp.ones((T, S), bool))}
LGAMMA = {"score_mod": lambda s, *_: jax.scipy.special.gammaln(s)}
RELU = {"score_mod": lambda s, *_: jax.nn.relu(s)}
SEGMENTS = masks.Segments(IDS, KV_IDS)
with jax.enable_x64(True):
    WIDE = masks.Segments(jnp.zeros(T, jnp.int64), jnp.zeros(S, jnp.int64))

# The implementation, the call, and a regular expression for a part of the reason.
REFUSED = {
    "cudnn, bias": ("cudnn", Call(BIAS), "no bias"),
    "cudnn, mask array": ("cudnn", Call(ARRAY), "no mask array"),
    "cudnn, function": ("cudnn", Call({"mask": lambda b, h, q, kv: kv <= q}), "Causal and SlidingWindow"),
    "cudnn, or": ("cudnn", Call({"mask": masks.Causal() | masks.Prefix(2)}), "Causal and SlidingWindow"),
    "cudnn, two-sided window": ("cudnn", Call({"local_window_size": (2, 1)}), "Causal and SlidingWindow"),
    "cudnn, score_mod": ("cudnn", Call(CAP), "no score_mod"),
    "cudnn, positions": ("cudnn", Call(POSITIONS), "no positions"),
    "cudnn, dropout": ("cudnn", Call(DROPOUT), "no dropout"),
    "cudnn, precision": ("cudnn", Call(PRECISION), "no precision"),
    "cudnn, float32": ("cudnn", Call(dtype=jnp.float32), "it takes float16 and bfloat16, not float32"),
    "cudnn, head_dim 12": ("cudnn", Call(H=12), "multiple of 8 up to 256, got 12"),
    "cudnn, head_dim 264": ("cudnn", Call(H=264), "got 264"),
    "cudnn, no keys": ("cudnn", Call(S=0), "empty"),
    "splash, bias": (SPLASH, Call(BIAS), "no bias"),
    "splash, mask array": (SPLASH, Call(ARRAY), r"no mask array; masks\.Dense\(array\) is a mask"),
    "splash, positions": (SPLASH, Call(POSITIONS), "no positions"),
    "splash, dropout": (SPLASH, Call(DROPOUT), "no dropout"),
    "splash, precision": (SPLASH, Call(PRECISION), "no precision setting"),
    "splash, score_mod": (SPLASH, Call({"score_mod": score_mods.Alibi(np.ones(N, np.float32))}), "no score_mod but SoftCap"),
    "splash, cap": (SPLASH, Call({"score_mod": score_mods.SoftCap(jnp.float32(1))}), "cap of a SoftCap must be a plain number"),
    "splash, float16": (SPLASH, Call(dtype=jnp.float16), "float32 and bfloat16, not float16"),
    "splash, float64": (SPLASH, Call(dtype=jnp.float64, x64=True), "not float64"),
    "splash, no keys": (SPLASH, Call(S=0), "no empty arrays"),
    "splash, by sequence": (SPLASH, Call({"mask": masks.Dense(np.ones((B, 1, T, S), bool))}), "differ by sequence"),
    "splash, padding inside an or": (SPLASH, Call({"mask": masks.Padding(np.array([3, 4])) | masks.Causal()}), "differ by sequence"),
    "splash, 64-bit ids": (SPLASH, Call({"mask": WIDE}, x64=True), "fit int32"),
    "pallas_tpu, dropout": (PALLAS_TPU, Call(DROPOUT), "dropout"),
    "pallas_tpu, pairs": (PALLAS_TPU, Call(PAIRS), "its mask needs dynamic_slice by query and key together"),
    "pallas_tpu, lgamma": (PALLAS_TPU, Call(LGAMMA), "its score_mod needs lgamma"),
    "pallas_tpu, float16": (PALLAS_TPU, Call(dtype=jnp.float16), "float32 and bfloat16, not float16"),
    "pallas_tpu, long": (PallasTPU(), Call(T=2**20, S=2**20, dtype=jnp.bfloat16), "2048 by 2048 blocks are too many"),
    "pallas_gpu, dropout": ("pallas_gpu", Call(DROPOUT), "dropout"),
    "pallas_gpu, pairs": ("pallas_gpu", Call(PAIRS), "its mask needs dynamic_slice by query and key together"),
    "pallas_gpu, lgamma": ("pallas_gpu", Call(LGAMMA), "its score_mod needs lgamma"),
    "pallas_gpu, relu": ("pallas_gpu", Call(RELU), "its score_mod needs a function with a derivative of its own"),
    "pallas_gpu, float32": ("pallas_gpu", Call(dtype=jnp.float32), "float16 and bfloat16, not float32"),
    "pallas_gpu, long": ("pallas_gpu", Call(T=2**19, S=2**19, H=64), "8192 by 8192 blocks are too many"),
    "native, float64": ("native", Call(dtype=jnp.float64, x64=True), "it takes float16, bfloat16 and float32, not float64"),
    "native, function": ("native", Call({"mask": lambda b, h, q, kv: q > kv}), "it takes no masks but Causal, "),
    "native, or": ("native", Call({"mask": masks.Causal() | masks.SlidingWindow(3)}), "it takes no masks but Causal, "),
    "native, two segments": ("native", Call({"mask": SEGMENTS & SEGMENTS}), "it takes no masks but .* one Segments"),
    "native, score_mod": ("native", Call({"score_mod": lambda s, b, h, q, kv: 2 * s}), "it takes no score_mod but SoftCap, Alibi and RelativeBias"),
    "native, distances": ("native", Call(POSITIONS | FAR), "no RelativeBias with a max_distance above 1048576"),
    "native, no keys": ("native", Call(S=0), "it takes no empty arrays"),
    "native, width": (Native(5), Call(), r"width must be one of \(None, 4, 8, 16\), got 5"),
}  # fmt: skip


KERNELS = {"cudnn": "cudnn", "splash": SPLASH, "pallas_tpu": PALLAS_TPU, "pallas_gpu": "pallas_gpu", "native": "native"}


def cases(names: Iterable[str]) -> list:
    return [pytest.param(name, marks=[mark for kernel, mark in MARKS.items() if kernel in name]) for name in names]


def attend(implementation: Any, options: dict, *arrays: Any) -> jax.Array:
    return jattn.dot_product_attention(*arrays, **options, implementation=implementation)


def assert_refused(implementation: Any, arrays: list[jax.ShapeDtypeStruct], options: dict, reason: str) -> None:
    wanted = f"implementation={re.escape(repr(implementation))} cannot do this: .*{reason}"
    with pytest.raises(jattn.Unsupported, match=wanted):
        jax.eval_shape(functools.partial(attend, implementation, options), *arrays)
    line = jattn.explain(*arrays, **options, implementation=implementation).splitlines()[0]
    assert re.search(f", but .*{reason}", line)


def test_every_kernel_is_in_the_table():
    takes_all = {"xla", "blockwise", "decode"}
    assert {name.partition(",")[0] for name in REFUSED} == set(KERNELS) == set(IMPLEMENTATIONS) - takes_all


@pytest.mark.parametrize("name", cases(REFUSED))
def test_the_reason_is_given(name):
    implementation, call, reason = REFUSED[name]
    with call.context():
        assert_refused(implementation, call.arrays(name.partition(",")[0]), call.options, reason)


@pytest.mark.parametrize("name", cases(KERNELS))
def test_the_same_call_without_it_is_taken(name):
    dtypes = [jnp.float16, jnp.bfloat16] if name == "cudnn" else [None]
    for dtype in dtypes:
        arrays = Call(dtype=dtype).arrays(name)
        platform = {"cudnn": "gpu", "pallas_gpu": "gpu"}.get(name)
        line = jattn.explain(*arrays, implementation=KERNELS[name], platform=platform).splitlines()[0]
        assert re.search(r": (taken by name|given, as an object)(?!.*, but)", line), line


@jattn.pytree_dataclass
class Recent(masks.Mask):
    """A mask class that no kernel knows: the last ``length`` keys."""

    length: int = jattn.static_field(default=3)

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx > q_idx - self.length)


@jattn.pytree_dataclass
class RecentInterval(Recent):
    """The same, with its interval."""

    def interval(self, b, h, q_idx):
        return q_idx - (self.length - 1), q_idx


@pytest.mark.parametrize("name", cases(["cudnn", "native"]))
def test_a_mask_class_of_ones_own_is_taken_by_its_interval(name):
    arrays, platform = Call().arrays(name), "gpu" if name == "cudnn" else None
    line = jattn.explain(*arrays, mask=RecentInterval(), implementation=name, platform=platform)
    assert line.startswith(f"{name}: taken by name"), line
    assert_refused(name, arrays, {"mask": Recent()}, "it (supports|takes) no masks but")


@pytest.mark.parametrize("name", cases(["native"]))
def test_distances_beyond_the_sequence_need_no_entry(name):
    assert jattn.explain(*Call().arrays(name), **FAR, implementation=name).startswith(f"{name}: taken by name")


@pytest.mark.parametrize("name", cases(KERNELS))
def test_arrays_that_may_be_divided(name):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert_refused(KERNELS[name], Call().arrays(name), {}, "the arrays may lie on several devices")
