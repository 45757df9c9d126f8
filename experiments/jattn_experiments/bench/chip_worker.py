"""Answers the chip suite's questions about an accelerator, one at a time, in a separate process.

``python -m jattn_experiments.bench.chip_worker`` reads questions from stdin and answers each with one line. An answer
has a ``result``: "right", "wrong", "refused" by the implementation, "failed" with an exception, or "measured".
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import testing
from jattn.kernels import ReducesWeights
from jattn.kernels.dispatch import IMPLEMENTATIONS
from jattn.kernels.pallas_gpu.interpreted import Interpreted
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash
from jattn.sharding import Ring
from jattn.testing import AT_SIZE, CASES, Case
from jattn.testing._check import largest_error, same_bits
from jattn_experiments.bench import peers, timing
from jattn_experiments.bench.problems import CASES as TIMED
from jattn_experiments.bench.problems import Problem
from jattn_experiments.bench.worker import first_line, serve

# Kernels for chips that run in an interpreter on a CPU.
INTERPRETED = {
    "splash (interpreted)": lambda: Splash(interpret=True),
    "pallas_tpu (interpreted)": lambda: PallasTPU(interpret=True),
    "pallas_gpu (interpreted)": Interpreted,
}
TABLES: Mapping[str, Mapping[str, Case]] = {
    "at size": AT_SIZE,
    "small": {name: case for name, case in CASES.items() if not case.poisoned},
    "unseen": {name: case for name, case in CASES.items() if case.poisoned},
}
STATISTICS = ("entropy", "distance", "previous_token", "max_logit")
TURN = 0.03  # seconds of work in a turn: launching takes less

Launch = Callable[[int], Any]  # launches this many calls one after the other; returns when the last is done


def kernel_of(word: str) -> Any:
    """The ``implementation=`` that a word means: a name, an interpreted kernel, or a user's ``module:object``.

    Raises ``ValueError`` for none of these.
    """
    if word in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[word]
    if word in INTERPRETED:
        return INTERPRETED[word]()
    module, colon, name = word.partition(":")
    if not colon:
        known = ", ".join((*IMPLEMENTATIONS, *INTERPRETED))
        raise ValueError(f"expected some of {known}, or module:object, got {word!r}")
    try:
        implementation = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as wrong:
        raise ValueError(f"{word!r} cannot be imported: {wrong}") from None
    return implementation() if isinstance(implementation, type) else implementation


def device() -> dict[str, Any]:
    """The device: facts that decide a result, and ``now``, facts that change over time."""
    one, now = jax.devices()[0], {}
    facts = {
        "platform": one.platform,
        "device": one.device_kind,
        "devices": jax.device_count(),
        "host": timing.cpu_model(),
        **{name: timing.machine()[name] for name in ("python", "jax", "flax", "jattn", "jattn_source", "jattn-native")},
    }
    try:
        facts["memory"] = f"{one.memory_stats()['bytes_limit'] / 2**30:.1f} GiB"
    except (TypeError, KeyError, jax.errors.JaxRuntimeError):  # a CPU has none
        facts["memory"] = f"{timing.memory_bytes('cpu') / 2**30:.1f} GiB"
    for name in ("jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "torch", "tokamax"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if one.platform == "gpu" and shutil.which("nvidia-smi"):
        facts |= _of_nvidia("driver_version", "vbios_version", "power.limit", "clocks.max.sm", "clocks.max.memory")
        now |= _of_nvidia("clocks.sm", "clocks.memory", "temperature.gpu", "power.draw", "utilization.gpu")
    return {"result": "measured", "facts": facts, "now": now}


def _of_nvidia(*fields: str) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return dict(zip(fields, (value.strip() for value in lines[0].split(",")), strict=False)) if lines else {}


def right(kernel: str, table: str, case: str) -> dict[str, Any]:
    """One case of the conformance table; ``error`` is the largest error as a share of its tolerance."""
    outcome = testing.examine(kernel_of(kernel), TABLES[table][case])
    result: dict[str, Any] = {"result": outcome.result, "reason": outcome.reason}
    return result if outcome.error is None else result | {"error": min(outcome.error, 1e30)}


def bits(kernel: str, check: str, length: int, head_dim: int, num_heads: int, times: int) -> dict[str, Any]:
    """Whether looking at the heads changes a bit of a result, or two equal calls differ, as after a race."""
    implementation = kernel_of(kernel)
    dtypes = getattr(implementation, "dtypes", ())
    dtype = jnp.bfloat16 if not dtypes or jnp.bfloat16 in dtypes else dtypes[0]
    rng = np.random.default_rng(3)
    shapes = [(2, length, heads, head_dim) for heads in (num_heads, num_heads // 2, num_heads // 2)]
    query, key, value = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)

    def alone(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
        return jattn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation), ()

    def looked(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
        options = {"implementation": implementation, "return_residual": True}
        out, lse = jattn.dot_product_attention(query, key, value, is_causal=True, **options)
        return out, jattn.heads.statistics(query, key, lse=lse, is_causal=True, names=STATISTICS)

    def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, Any]:
            out, others = fn(*arrays)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), others

        return jax.grad(loss, (0, 1, 2), has_aux=True)

    what, _, passes = check.partition(", ")
    of = gradient if passes else lambda fn: fn
    call = jax.jit(of(alone))
    first = jax.device_get(call(query, key, value)[0])
    if what == "looking":
        same, reason = same_bits(first, jax.jit(of(looked))(query, key, value)[0]), "statistics change bits"
    else:
        differ = sum(not same_bits(first, call(query, key, value)[0]) for _ in range(times))
        same, reason = differ == 0, f"{differ} of {times} equal calls differ: a race, or sums without a fixed order"
    return {"result": "right" if same else "wrong", "reason": None if same else reason}


def _contestants(kernels: Sequence[str], device: str) -> list[peers.Contestant]:
    """The plain call, the kernels, and the installed peers."""
    every = tuple(TIMED)
    ours = (peers.InJax(f"jattn {word}", peers.by_jattn(kernel_of(word)), every, linear=every) for word in kernels)
    plain, *others = peers.contestants(("jax", "splash", "torch", "tokamax"), device)[0]
    # FlexAttention compiles for half a minute or longer
    return [plain, *ours, *(one for one in others if one.name != "torch flex")]


def _dtype() -> str:
    """What is timed here."""
    return "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"


def _random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), _dtype()) for shape in shapes]


def _launched(fn: Callable[..., Any], *arrays: Any) -> Launch:
    compiled = jax.jit(fn)
    return lambda times: jax.block_until_ready([compiled(*arrays) for _ in range(times)][-1])


def _timed(calls: Mapping[str, Launch], seconds: float) -> dict[str, Any]:
    """Medians, in turn; each time is of as many calls, launched one after the other, as take ``TURN`` seconds."""
    once, _ = timing.in_turn([functools.partial(call, 1) for call in calls.values()], 0.0, 1)
    repeats = {name: max(1, round(TURN / (time / 1e6))) for name, time in zip(calls, once, strict=True)}
    every = [functools.partial(call, repeats[name]) for name, call in calls.items()]
    medians, rounds = timing.in_turn(every, seconds, least=3)
    of_one = {name: round(time / repeats[name], 2) for name, time in zip(calls, medians, strict=True)}
    return {"result": "measured", "medians": of_one, "rounds": rounds}


def _ready(calls: Mapping[str, Callable[[], Launch]]) -> tuple[dict[str, Launch], dict[str, str]]:
    """The calls that compile and run, and why the others do not."""
    ready, left_out = {}, {}
    for name, make in calls.items():
        try:
            call = make()
            call(1)
            ready[name] = call
        except Exception as wrong:  # any exception of a peer is the reason why it has no time
            left_out[name] = first_line(wrong, 200)
    return ready, left_out


def fast(
    kernels: Sequence[str], case: str, length: int, passes: str, seconds: float,
    num_heads: int, head_dim: int,
) -> dict[str, Any]:  # fmt: skip
    """The time of one problem in microseconds, by contestant, and of a matrix product in the same turns."""
    device = jax.devices()[0].platform
    problem = Problem(case, length, _dtype(), num_heads=num_heads, head_dim=head_dim)
    taken = {
        one.name: functools.partial(one.repeated, problem, passes)
        for one in _contestants(kernels, device)
        if case in one.cases and problem.dtype in one.dtypes
    }
    calls, left_out = _ready(taken)
    side = 512 if device == "cpu" else 8192
    matrix = jnp.ones((side, side), problem.dtype)
    calls["matrix"] = _launched(jnp.matmul, matrix, matrix)
    calls["matrix"](1)
    work = {"flops": problem.flops(passes), "matrix_flops": 2.0 * side**3}
    return _timed(calls, seconds) | {"left_out": left_out} | work


def decode(kernels: Sequence[str], length: int, batch: int, seconds: float) -> dict[str, Any]:
    """One token of each sequence against ``length`` keys, in microseconds: steps of a loop within one program.

    A step is too short to launch on its own: the launch would take most of the measured time.
    """
    steps, N, K, H = 16, 32, 8, 128
    arrays = _random((batch, 1, N, H), (batch, length, K, H), (batch, length, K, H))

    def looped(attention: Callable[..., jax.Array]) -> Launch:
        def program(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            step = lambda query, _: (attention(query, key, value).astype(query.dtype), None)
            return jax.lax.scan(step, query, None, length=steps)[0]

        return _launched(program, *arrays)

    of = lambda **options: functools.partial(jattn.dot_product_attention, **options)
    taken = {"jattn": of()} | {f"jattn {word}": of(implementation=kernel_of(word)) for word in kernels}
    taken["jax.nn"] = jax.nn.dot_product_attention
    calls, left_out = _ready({name: functools.partial(looped, fn) for name, fn in taken.items()})
    row = _timed(calls, seconds)
    row["medians"] = {name: round(time / steps, 2) for name, time in row["medians"].items()}
    read = sum(x.size * x.dtype.itemsize for x in arrays[1:])
    return row | {"left_out": left_out, "bytes": read}


def statistics(kernels: Sequence[str], length: int, seconds: float, num_heads: int, head_dim: int) -> dict[str, Any]:
    """Four statistics of all heads, by each kernel that computes them, and the plain call's forward pass."""
    query, key, value = _random(*[(1, length, num_heads, head_dim)] * 3)
    attention = jax.jit(lambda q, k, v: jattn.dot_product_attention(q, k, v, is_causal=True, return_residual=True))
    lse = attention(query, key, value)[1]

    def of(implementation: Any) -> Callable[..., Any]:
        options = {"is_causal": True, "names": STATISTICS, "implementation": implementation}
        return lambda q, k, lse: jattn.heads.statistics(q, k, lse=lse, **options)

    taken = {"forward": functools.partial(_launched, attention, query, key, value)}
    kinds = {"jattn": None} | {f"jattn {word}": kernel_of(word) for word in kernels}
    for name, kernel in kinds.items():
        if kernel is None or isinstance(kernel, ReducesWeights):
            taken[name] = functools.partial(_launched, of(kernel), query, key, lse)
    calls, left_out = _ready(taken)
    return _timed(calls, seconds) | {"left_out": left_out}


def ring(length: int, seconds: float, num_heads: int, head_dim: int) -> dict[str, Any]:
    """All devices in a ring: whether output and gradient equal those of one device, and the time of both passes."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = _random(*[(1, length, num_heads, head_dim)] * 3)
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "sequence"))

    def both(implementation: Any, placed: list[jax.Array]) -> Launch:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = jattn.dot_product_attention(*arrays, is_causal=True, implementation=implementation)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        return _launched(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), *placed)

    divided = both(Ring(mesh, "sequence"), [jax.device_put(x, where) for x in arrays])
    whole = both("blockwise", arrays)
    ((_, out), gradients), ((_, one), exact) = jax.device_get(divided(1)), jax.device_get(whole(1))
    off = max(largest_error(out, one), largest_error(gradients, exact) / 4) / (1e-5 if _dtype() == "float32" else 2e-2)
    row = _timed({"ring": divided, "one device": whole}, seconds)
    result, reason = ("right", None) if off <= 1.0 else ("wrong", f"off by {off:.3g} times the tolerance")
    return row | {"result": result, "reason": reason, "devices": devices}


def tune(
    kernel: str, sizes: Sequence[Sequence[int]], length: int, head_dim: int,
    num_heads: int, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """The time of both passes, causal, with the default block sizes and with others."""
    problem = Problem("causal", length, _dtype(), num_heads=num_heads, head_dim=head_dim)
    kinds = {"default": kernel_of(kernel)}
    for pair in sizes:
        kinds["x".join(map(str, pair))] = dataclasses.replace(kinds["default"], block_sizes=tuple(pair))
    taken = {
        name: functools.partial(peers.InJax(name, peers.by_jattn(one), ("causal",)).repeated, problem, "both")
        for name, one in kinds.items()
    }
    calls, left_out = _ready(taken)
    if not calls:
        return {"result": "failed", "reason": next(iter(left_out.values()))}
    return _timed(calls, seconds) | {"left_out": left_out}


def known(kernel: str) -> dict[str, Any]:
    """Whether there is such a kernel."""
    kernel_of(kernel)
    return {"result": "measured"}


ASKED = {fn.__name__: fn for fn in (device, right, bits, fast, decode, statistics, ring, tune, known)}


def answer(ask: str, **question: Any) -> dict[str, Any]:
    """The answer to one question, by the function of that name."""
    try:
        return ASKED[ask](**question)
    except jattn.Unsupported as refused:
        return {"result": "refused", "reason": str(refused).splitlines()[0][:300]}
    except Exception as wrong:  # any exception is an answer, and the next question has a new process
        return {"result": "failed", "reason": first_line(wrong, 300)}


if __name__ == "__main__":
    serve(answer)
