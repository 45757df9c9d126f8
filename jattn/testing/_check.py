"""Runs an implementation on cases and compares the results with the reference."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn._core.call import Call
from jattn.api import dot_product_attention
from jattn.kernels import Implementation, Unsupported
from jattn.kernels.dispatch import by_name, check_implementation
from jattn.testing._cases import CASES, Case
from jattn.testing._reference import Inputs, Results, error, factors, inputs, poisoned, reference

Attention = Callable[[Inputs], Results]


class Outcome(NamedTuple):
    """The outcome of one case.

    Attributes:
        result: ``"right"``; ``"wrong"``; ``"refused"``, by ``unsupported_reason`` or ``jattn.Unsupported``;
            ``"failed"``, with any other exception.
        reason: why the result is not right; None if it is.
        error: the largest ratio of an error to its tolerance; None if no error was measured.

    Example:
        >>> jattn.testing.examine("cudnn", jattn.testing.Case({"sinks": np.zeros(3, np.float32)})).result
        'refused'
    """

    result: Literal["right", "wrong", "refused", "failed"]
    reason: str | None = None
    error: float | None = None


def check(
    implementation: str | Implementation, cases: Mapping[str, Case] | None = None, *, gradients: bool = True
) -> dict[str, Outcome]:
    """Tests an implementation on all cases.

    Args:
        implementation: a name, a ``Kernel``, or an object with ``unsupported_reason`` and ``run``. If its ``dtypes``
            lack float32, float32 cases run in the last of these dtypes.
        cases: ``{name: Case}``; None for all of ``CASES``. ``AT_SIZE`` has larger cases.
        gradients: also compare the gradients of query, key and value, and of ``bias``, ``sinks`` and arrays captured by
            score functions.

    Returns:
        ``{name: Outcome}``, each ``"right"`` or ``"refused"``. A refusal raises no error, so check which cases were
        refused.

    Raises:
        AssertionError: a case is wrong or failed; the message lists all such cases.
        TypeError: ``implementation`` is none of the above.

    Example:
        >>> cases = {name: jattn.testing.CASES[name] for name in ("causal, top-left", "sinks")}
        >>> outcomes = jattn.testing.check(jattn.kernels.blockwise.Blockwise((3, 4)), cases)
        >>> {name: outcome.result for name, outcome in outcomes.items()}
        {'causal, top-left': 'right', 'sinks': 'right'}
    """
    outcomes = {}
    for name, case in (CASES if cases is None else cases).items():
        try:
            outcomes[name] = examine(implementation, case, gradients=gradients)
        except Exception as failure:  # one exception must not hide the other cases
            outcomes[name] = Outcome("failed", f"{type(failure).__name__}: {failure}")
    faults = [f"  {name}: {x.reason}" for name, x in outcomes.items() if x.result in ("wrong", "failed")]
    if faults:
        refused = sum(x.result == "refused" for x in outcomes.values())
        title = f"{implementation!r} is wrong in {len(faults)} of {len(outcomes)} cases, and refused {refused}:"
        raise AssertionError("\n".join([title, *faults]))
    return outcomes


def examine(implementation: str | Implementation, case: Case, *, gradients: bool = True) -> Outcome:
    """The outcome of one case.

    The call is compiled, with float32 products in full precision: by default, TPUs and GPUs round the factors. For a
    ``poisoned`` case, the results with NaN, infinity and 0 in unseen positions must be bit-identical.

    Args:
        implementation: a name, a ``Kernel``, or an object with ``unsupported_reason`` and ``run``.
        case: the call and its definition.
        gradients: also compare gradients.

    Raises:
        Exception: whatever ``implementation`` raises, except ``jattn.Unsupported``.

    Example:
        >>> jattn.testing.examine("xla", jattn.testing.CASES["grouped queries"]).result
        'right'
    """
    kernel = by_name(implementation) if isinstance(implementation, str) else check_implementation(implementation)
    dtypes = [jnp.dtype(x) for x in getattr(kernel, "dtypes", ())]
    if dtypes and jnp.float32 not in dtypes:
        case = case.of(dtypes[-1])
    if dtypes and case.dtype not in dtypes:
        return Outcome("refused", f"it takes no {jnp.dtype(case.dtype)}")
    if case.offset and getattr(kernel, "reads_rounded_output", False):
        return Outcome("refused", "its backward pass takes a row's sum of d_out * out from the rounded output")
    compute = jax.jit(lambda x: values_and_gradients(case, lambda x: run(case, _Asked(kernel), x), x, gradients))
    with jax.default_matmul_precision("highest" if case.dtype == jnp.float32 else "default"):
        try:
            if not case.poisoned:
                return compare(case, jax.device_get(compute(inputs(case))), reference(case))
            clean, *others = (jax.device_get(compute(poisoned(case, x))) for x in (0.0, np.nan, np.inf))
        except Unsupported as refusal:
            return Outcome("refused", str(refusal))
    same = all(same_bits(clean, x) for x in others)
    return Outcome("right") if same else Outcome("wrong", "NaN or infinity in unseen places changes the result")


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Raises the implementation's reason against a call, if any; calls with an object skip this check."""

    implementation: Implementation

    def unsupported_reason(self, call: Call) -> str | None:
        return self.implementation.unsupported_reason(call)

    def run(self, call: Call) -> tuple[jax.Array, jax.Array]:
        reason = self.unsupported_reason(call)
        if reason is not None:
            raise Unsupported(reason)
        return self.implementation.run(call)


def run(
    case: Case, implementation: str | Implementation, arrays: Inputs, options: Mapping[str, Any] | None = None
) -> Results:
    """``out`` and ``lse`` of a case; ``options`` replace the case's own."""
    options = {name: x for name, x in (case.options if options is None else options).items() if name not in arrays}
    if case.mod is not None:
        options["score_mod"] = case.mod(arrays["params"])
    qkv = {name: jnp.asarray(arrays[name]).astype(case.dtype) for name in ("query", "key", "value")}
    others = {name: arrays[name] for name in ("bias", "sinks") if name in arrays}
    return dot_product_attention(**qkv, **others, **options, implementation=implementation, return_residual=True)


def values_and_gradients(
    case: Case, attention: Attention, arrays: Inputs, gradients: bool = True
) -> tuple[Results, Inputs]:
    """The results of ``attention``, and gradients as in ``reference``; an lse of -inf is excluded."""

    def loss(arrays: Inputs) -> tuple[jax.Array, Results]:
        out, lse = attention(arrays)
        parts = out.astype(lse.dtype), jnp.where((lse == -jnp.inf) | (case.offset != 0.0), 0.0, lse)
        of_out, of_lse = (jnp.sum(x * jnp.asarray(factors(x.shape), lse.dtype)) for x in parts)
        return of_out + of_lse, (out, lse)

    if not gradients:
        return attention(arrays), {}
    (_, results), of_arrays = jax.value_and_grad(loss, has_aux=True)(arrays)
    return results, of_arrays


def compare(case: Case, values: tuple[Results, Inputs], expected: tuple[Results, Inputs]) -> Outcome:
    """The outcome, given results and gradients, which may be missing."""
    ((out, lse), gradients), ((exact_out, exact_lse), exact) = values, expected
    if (out.dtype, lse.dtype) != (case.dtype, jnp.float32):
        return Outcome("wrong", f"out is {out.dtype} and lse {lse.dtype}, expected {jnp.dtype(case.dtype)} and float32")
    of_gradients = 2 if case.dtype == jnp.float32 else 8
    errors = {"out": error(out, exact_out), "lse": error(lse, exact_lse)}
    errors |= {f"gradient of {name}": error(x, exact[name]) / of_gradients for name, x in gradients.items()}
    shares = {name: x / case.tolerance for name, x in sorted(errors.items(), key=lambda item: -item[1])}
    faults = [f"{name} {_off(share)}" for name, share in shares.items() if share > 1.0]
    return Outcome("wrong" if faults else "right", ", ".join(faults) or None, max(shares.values()))


def _off(share: float) -> str:
    if np.isfinite(share):
        return f"is off by {share:.3g} times its tolerance"
    return "is NaN or infinite where it should not be, or of another shape"


def same_bits(tree: Any, other: Any) -> bool:
    """Whether two trees of arrays are bit-identical."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def largest_error(tree: Any, expected: Any) -> float:
    """The largest ``error`` between two trees of arrays."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    return max((error(x, exact) for x, exact in pairs), default=0.0)
