"""The contestants of the attention benchmark, and how each is called.

Every peer is called in the way that suits it best: torch gets its own head layout and precomputed masks, and no
peer is given a case that it has no argument for.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jattn
from jattn.kernels.native import Native
from jattn.masks import Causal, Segments
from jattn.score_mods import Alibi, RelativeBias, SoftCap, alibi_slopes
from jattn_experiments.bench.problems import CAP, CASES, WINDOW, Problem, document_ids
from jattn_experiments.bench.torch_peers import InTorch

Attention = Callable[..., jax.Array]  # (problem, query, key, value, *what the case adds) -> output


@dataclasses.dataclass(frozen=True)
class InJax:
    """A contestant that is a function of JAX arrays, and the cases and dtypes that it supports."""

    name: str
    attention: Attention
    cases: tuple[str, ...]
    linear: tuple[str, ...] = ()  # the cases in which it holds no matrix of scores, mask or bias
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def matrices(self, problem: Problem) -> int:
        """How many matrices ``[T,S]`` it holds at once, up to a small factor."""
        return 0 if problem.case in self.linear else problem.batch * problem.num_heads

    def inputs(self, problem: Problem) -> list[jax.Array]:
        """The problem's arrays on the device, in its dtype; T5's table stays float32."""
        arrays = problem.arrays()
        return [jnp.asarray(x, problem.dtype if i < 3 else x.dtype) for i, x in enumerate(arrays)]

    def function(self, problem: Problem, passes: str) -> Callable[..., Any]:
        """A new function of ``inputs`` to jit: "forward", "both" or "hvp" (a Hessian-vector product)."""
        forward = functools.partial(self.attention, problem)
        if passes == "forward":
            return forward
        by = (0, 1, 2, 3) if problem.case == "t5" else (0, 1, 2)  # including T5's table
        gradient = jax.grad(lambda *arrays: jnp.sum(jnp.sin(forward(*arrays))), by)
        if passes == "both":
            return gradient
        return lambda *arrays: jax.jvp(gradient, arrays, arrays)[1]

    def repeated(self, problem: Problem, passes: str) -> Callable[..., Any]:
        """Computes the passes, once or ``times`` times: the output, or the gradients.

        Each is launched right after the one before it; the result is returned when all are done.
        """
        arrays, function = self.inputs(problem), jax.jit(self.function(problem, passes))

        def run(times: int = 1) -> Any:
            for _ in range(times):
                output = function(*arrays)
            return jax.block_until_ready(output)

        return run


Contestant = InJax | InTorch


def contestants(peers: Sequence[str], device: str) -> tuple[list[Contestant], dict[str, str]]:
    """jattn and the available ``peers`` in column order, and for each missing peer one line that says why."""
    available: list[Contestant] = [_jattn("jattn", None)]  # the plain call
    missing = {}
    for peer in peers:
        if reason := _missing(peer, device):
            missing[peer] = reason
        else:
            available += _PEERS[peer](device)
    return available, missing


def unsupported_reason(contestant: Contestant, problem: Problem, memory: float) -> str | None:
    """Why the contestant is left out of the problem, or None. ``memory``: limit for its matrices, in bytes."""
    if problem.case not in contestant.cases:
        return "does not support this case"
    if problem.dtype not in contestant.dtypes:
        return f"does not take {problem.dtype}"
    need = 3 * 4 * contestant.matrices(problem) * problem.length**2  # scores, weights, and one of their gradients
    return f"would hold {need / 2**30:.0f} GiB of scores" if need > memory else None


def versions(peers: Sequence[str]) -> dict[str, str]:
    """The version of each peer's package, if installed."""
    here = [peer for peer in peers if peer in ("torch", "tokamax") and importlib.util.find_spec(peer)]
    return {peer: importlib.metadata.version(peer) for peer in here}


def _missing(peer: str, device: str) -> str | None:
    if peer not in ("torch", "tokamax"):
        return None
    if importlib.util.find_spec(peer) is None:
        old = peer == "tokamax" and sys.version_info < (3, 12)
        return f"{peer} is not installed: pip install 'jattn[bench]'" + (" under Python 3.12 or newer" if old else "")
    if peer == "torch" and device == "tpu":
        return "torch is not measured on a TPU"
    if peer == "torch" and device == "gpu":
        import torch

        if not torch.cuda.is_available():
            return "torch finds no GPU that it can use"
    return None


_FUSED = ("full", "causal", "window")


def _jax_nn(device: str) -> list[Contestant]:
    named = lambda name: _like_jax_nn(functools.partial(jax.nn.dot_product_attention, implementation=name))
    by_xla = InJax("jax.nn", named("xla"), tuple(case for case in CASES if case != "softcap"))
    by_cudnn = InJax("jax.nn cudnn", named("cudnn"), _FUSED, linear=_FUSED, dtypes=("bfloat16",))
    return [by_xla, by_cudnn] if device == "gpu" else [by_xla]


def _splash_attention(problem: Problem, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """JAX's splash kernel for TPUs, called as JAX calls it, with MaxText's blocks of 512."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    n, block = problem.length, min(512, problem.length)
    mask = {
        "full": lambda: splash_attention_mask.FullMask((n, n)),
        "causal": lambda: splash_attention_mask.CausalMask((n, n)),
        "window": lambda: splash_attention_mask.LocalMask((n, n), (WINDOW, 0), 0),
    }[problem.case]()
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * problem.num_heads),
        block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{name}": block for name in names}),
        head_shards=1,
        q_seq_shards=1,
    )
    query = query * jnp.asarray(problem.head_dim**-0.5, query.dtype)
    out = jax.vmap(kernel)(*(jnp.swapaxes(x, 1, 2) for x in (query, key, value)))
    return jnp.swapaxes(out, 1, 2)


def _torch(device: str) -> list[Contestant]:
    if device == "gpu":
        return [InTorch("torch", "cuda"), InTorch("torch flex", "cuda", flex=True)]
    return [InTorch("torch", "cpu")]


def _tokamax(device: str) -> list[Contestant]:
    import tokamax

    # Without an accelerator it uses the dense formula.
    linear = (*_FUSED, "softcap") if device != "cpu" else ()
    return [InJax("tokamax", _like_jax_nn(tokamax.dot_product_attention), tuple(CASES), linear)]


def _jattn(name: str, implementation: Any) -> InJax:
    return InJax(name, by_jattn(implementation), tuple(CASES), linear=tuple(CASES))


def _jattn_kernels(device: str) -> list[Contestant]:
    """jattn's kernels that a plain call does not use here: on a CPU, those that it uses without jattn-native."""
    if device == "cpu":
        return [_jattn("jattn blockwise", "blockwise")]
    known = tuple(case for case in CASES if case != "t5")
    return [InJax(f"jattn pallas_{device}", by_jattn(f"pallas_{device}"), known, linear=known, dtypes=("bfloat16",))]


_PEERS: dict[str, Callable[[str], list[Contestant]]] = {
    "jax": _jax_nn,
    "torch": _torch,
    "tokamax": _tokamax,
    "splash": lambda device: [InJax("splash", _splash_attention, _FUSED, linear=_FUSED)] if device == "tpu" else [],
    "jattn-xla": lambda device: [InJax("jattn xla", by_jattn("xla"), tuple(CASES))],
    "jattn-kernels": _jattn_kernels,
    # The compiled kernels as on a CPU without AVX-512. PyTorch and XLA have their own settings for that.
    "jattn-avx2": lambda device: [_jattn("jattn avx2", Native(width=8))] if device == "cpu" else [],
}


def by_jattn(implementation: Any) -> Attention:
    """``jattn.dot_product_attention`` with jattn's masks and score functions for the cases."""

    def attention(problem: Problem, query: jax.Array, key: jax.Array, value: jax.Array, *extra: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"is_causal": problem.case in ("causal", "alibi")}
        match problem.case:
            case "window":
                options["local_window_size"] = (WINDOW, 0)
            case "segments":  # NumPy ids, so that empty blocks are known when compiling
                options["mask"] = Segments(document_ids(problem.length)) & Causal()
            case "segments-traced":
                options["mask"] = Segments(extra[0]) & Causal()
            case "alibi":
                options["score_mod"] = Alibi(alibi_slopes(problem.num_heads))
            case "softcap":
                options["score_mod"] = SoftCap(CAP)
            case "t5":
                options["score_mod"] = RelativeBias(extra[0])
        return jattn.dot_product_attention(query, key, value, implementation=implementation, **options)

    return attention


def _like_jax_nn(function: Callable[..., jax.Array]) -> Attention:
    """A function with ``jax.nn.dot_product_attention``'s arguments: masks and biases are arrays, built inside."""

    def attention(problem: Problem, query: jax.Array, key: jax.Array, value: jax.Array, *extra: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"is_causal": problem.case in ("causal", "alibi")}
        positions = jnp.arange(problem.length)
        offset = positions[None, :] - positions[:, None]  # kv - q
        match problem.case:
            case "window":
                options["local_window_size"] = (WINDOW, 0)
            case "segments" | "segments-traced":
                options["mask"] = ((extra[0][:, None] == extra[0][None, :]) & (offset <= 0))[None, None]
            case "alibi":
                slopes = jnp.asarray(alibi_slopes(problem.num_heads))[:, None, None]
                options["bias"] = (-slopes * abs(offset).astype(slopes.dtype)[None])[None].astype(query.dtype)
            case "softcap":
                options["logits_soft_cap"] = CAP
            case "t5":
                bias = extra[0][RelativeBias(extra[0]).bucket(offset)]  # [T,S,N]
                options["bias"] = jnp.moveaxis(bias, -1, 0)[None].astype(query.dtype)
        return function(query, key, value, **options)

    return attention
