"""Block sizes measured on a chip: which entry a call takes, and that kernels read it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn._core.arguments import make_args
from jattn.kernels import tuned
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.pallas_tpu.pipeline import make_plan
from jattn.kernels.splash import Splash
from jattn.masks import SlidingWindow


def entry(kernel="splash", chip="TPU v9", head_dim=128, length=4096, sizes=(1024, 512)):
    return {"chip": chip, "kernel": kernel, "head_dim": head_dim, "length": length, "sizes": list(sizes), "gain": 1.1}


@pytest.mark.parametrize("head_dim, length, sizes", [
    (128, 4096, (1024, 512)), (64, 4096, (512, 512)), (100, 4096, (1024, 512)), (128, 10000, (1024, 512)),
    (128, 12000, (2048, 1024)), (64, 10**6, (512, 512)), (129, 4096, None),
])  # fmt: skip
def test_the_entry_of_the_next_larger_head_dim_and_the_nearest_length(head_dim, length, sizes):
    table = [entry(), entry(head_dim=64, sizes=(512, 512)), entry(length=32768, sizes=(2048, 1024)),
             entry(chip="TPU v8", sizes=(128, 128)), entry(kernel="pallas_tpu", sizes=(256, 256))]  # fmt: skip
    assert tuned.largest(table, "splash", "TPU v9", head_dim, length) == sizes


def call(length, dtype=jnp.bfloat16, **options):
    x = jax.ShapeDtypeStruct((1, length, 2, 64), dtype)
    found = []
    jax.eval_shape(lambda x: found.append(make_args(x, x, x, **options)), x)
    return found[0]


def plan(length, sizes=None, **options):
    return make_plan(call(length, **options), PallasTPU(interpret=True), sizes, 128)


@pytest.fixture
def measured(monkeypatch):
    """Entries for this process's chip."""
    chip = jax.devices()[0].device_kind
    found = [
        entry(kernel, chip, sizes=sizes) for kernel, sizes in (("splash", (256, 384)), ("pallas_tpu", (512, 1024)))
    ]
    monkeypatch.setattr(tuned, "table", lambda: found)


@pytest.mark.parametrize("length, sizes", [(2048, (256, 384)), (300, (256, 384)), (200, (256, 256))])
def test_splash_reads_them(measured, length, sizes):
    assert Splash()._plan(call(length)).size == sizes
    assert Splash((128, 128))._plan(call(length)).size == (128, 128)  # given sizes come first


def test_pallas_tpu_reads_them(measured):
    assert plan(2048).size == (512, 1024)
    assert plan(2048, (128, 256)).size == (128, 256)
    assert plan(8192, mask=SlidingWindow(64, 0)).size == (512, 512)  # small ones skip more


def test_calls_that_need_other_memory_keep_the_default(measured):
    for args in (call(2048, jnp.float32), call(2048, bias=np.zeros((1, 1, 2048, 1), np.float32))):
        assert tuned.measured_sizes("pallas_tpu", args) is None
    assert tuned.measured_sizes("blockwise", call(2048)) is None


def test_the_file_holds_entries_of_kernels_that_read_it():
    for one in tuned.table():
        assert one.keys() == entry().keys() and one["kernel"] in ("splash", "pallas_tpu")
