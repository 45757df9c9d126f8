"""The conformance table that users hold kernels to: a right kernel passes, and each fault is found and named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import testing
from jattn.kernels.dense import Dense
from jattn.testing import CASES, Case

FEW = {name: CASES[name] for name in ("grouped queries", "causal, top-left", "sinks", "NaN where nobody looks: mask function")}  # fmt: skip


class Right:
    """A user's own, with the two methods that it needs, and no other."""

    def unsupported_reason(self, args):
        return "it takes no sinks" if args.query.shape[1] == 1 else None

    def run(self, args):
        return Dense().run(args)


class WrongLse(Right):
    """Its log-sum-exp is to base 2."""

    def run(self, args):
        out, lse = super().run(args)
        return out, lse * np.float32(np.log2(np.e))


class NoGradientOfLse(Right):
    def run(self, args):
        out, lse = super().run(args)
        return out, jax.lax.stop_gradient(lse)


class SpreadsNaN(Right):
    """It multiplies hidden values by 0."""

    def run(self, args):
        out, lse = super().run(args)
        return out + 0 * jnp.sum(args.value), lse


class WrongScale(Right):
    """Where query heads share a key head, it scales by their number, too."""

    def run(self, args):
        scale = args.query.shape[-1] ** -0.5 / (args.query.shape[2] // args.key.shape[2])
        return super().run(dataclasses.replace(args, scale=scale))


class Raises(Right):
    def run(self, args):
        if args.query.shape[2] > args.key.shape[2]:
            raise ValueError("not written yet")
        return super().run(args)


class HalfPrecision(Right):
    def run(self, args):
        out, lse = super().run(args)
        return out.astype(jnp.bfloat16), lse


def test_a_right_kernel_passes():
    outcomes = testing.check(Right(), FEW)
    assert {x.result for x in outcomes.values()} == {"right"} and list(outcomes) == list(FEW)
    assert all(x.error <= 0.5 for x in outcomes.values() if x.error is not None)


GROUPED, CAUSAL, SINKS, POISONED = FEW
FAULTS = {
    WrongLse: {GROUPED: "lse is off by", CAUSAL: "lse is off by", SINKS: "gradient of sinks is off by"},
    NoGradientOfLse: {GROUPED: "gradient of key is off by", CAUSAL: "gradient of query", SINKS: "gradient of query"},
    SpreadsNaN: {POISONED: "NaN or infinity in unseen places changes the result"},
    WrongScale: {GROUPED: "out is off by"},
    Raises: {GROUPED: "ValueError: not written yet"},
    HalfPrecision: dict.fromkeys((GROUPED, CAUSAL, SINKS), "out is bfloat16 and lse float32, expected float32"),
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_each_fault_is_found_and_named(kernel):
    with pytest.raises(AssertionError) as found:
        testing.check(kernel(), FEW)
    title, *lines = str(found.value).splitlines()
    assert f"{kernel.__name__} object" in title and f"wrong in {len(lines)} of {len(FEW)} cases" in title
    for (name, reason), line in zip(FAULTS[kernel].items(), lines, strict=True):
        assert line.startswith(f"  {name}: ") and reason in line


def test_without_gradients_only_the_forward_pass_counts():
    assert testing.examine(NoGradientOfLse(), CASES[GROUPED], gradients=False).result == "right"


def test_a_refusal_is_reported_and_is_no_fault():
    outcomes = testing.check(Right(), {"one query": CASES["one query"], "causal": CASES[CAUSAL]})
    assert outcomes["one query"] == ("refused", "it takes no sinks", None) and outcomes["causal"].result == "right"
    result, reason, _ = testing.examine("cudnn", CASES["sinks"].of(jnp.bfloat16))
    assert result == "refused" and "head_dim must be a multiple of 8" in reason


def test_a_kernel_without_float32_gets_its_own_dtype():
    @dataclasses.dataclass(frozen=True)
    class Half(Right):
        dtypes = (jnp.float16, jnp.bfloat16)

        def run(self, args):
            assert args.query.dtype == jnp.bfloat16
            return super().run(args)

    assert testing.examine(Half(), CASES[CAUSAL]).result == "right"
    wide = Case(shape=(1, 2, 2, 1, 1, 2, 2), dtype=jnp.bfloat16)
    assert testing.examine(Half(), wide).result == "right"
    Half.dtypes = (jnp.float16,)
    assert testing.examine(Half(), wide) == ("refused", "it takes no bfloat16", None)


def test_a_case_of_ones_own_may_be_wrong():
    """The table is not a dummy: a plain definition that is not the call's mask is found."""
    options = {"is_causal": True}
    assert testing.examine("xla", Case(options, lambda b, h, q, kv: kv <= q)).result == "right"
    result, reason, error = testing.examine("xla", Case(options, lambda b, h, q, kv: kv < q + 2))
    assert result == "wrong" and error > 100 and {"out", "lse"} <= {part.split()[0] for part in reason.split(", ")}


def test_what_is_no_implementation_is_named():
    with pytest.raises(TypeError, match="implementation"):
        testing.examine(jattn.dot_product_attention, CASES["plain"])
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        testing.examine("nosuch", CASES["plain"])


def test_options_of_none_are_left_out_and_an_unknown_dtype_is_named():
    none = Case({"mask": None, "bias": None, "sinks": None, "scale": None})
    assert testing.examine("xla", none).result == "right"
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, got float64"):
        Case(dtype=jnp.float64)
