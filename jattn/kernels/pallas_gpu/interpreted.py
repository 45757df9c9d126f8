"""Runs ``pallas_gpu`` in Pallas' interpreter, which uses callbacks and so cannot run in a deferred operation."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn._blocks.reduction import Reduction
from jattn._core.call import Call
from jattn._core.vmap import canonical
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.kernel import Results
from jattn.kernels.pallas_gpu import PallasGPU


@dataclasses.dataclass(frozen=True)
class Interpreted(PallasGPU):
    """``implementation=``: the kernels of ``pallas_gpu`` on a CPU, with race detection.

    As in ``pallas_gpu``, the kernels compute derivatives with respect to query, key and value; blockwise computes all
    others.
    """

    def _on_cpu(self) -> PallasGPU:
        from jax.experimental.pallas import mosaic_gpu  # JAX 0.10 lacks this interpreter

        return PallasGPU(mosaic_gpu.InterpretGPUParams(detect_races=True))

    def fold(self, call: Call, reduction: Reduction) -> dict[str, Array]:
        return self._on_cpu().reduce("cpu", canonical(call), reduction)

    def _run(self, call: Call) -> tuple[Array, Array]:
        kernel = self._on_cpu()
        leaves, structure = jax.tree.flatten(canonical(call))
        floats = [n for n, x in enumerate(leaves) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]

        def of(arrays: Sequence[Array]) -> Call:
            return structure.unflatten([dict(zip(floats, arrays, strict=True)).get(n, x) for n, x in enumerate(leaves)])

        @jax.custom_vjp
        def compute(*arrays: Array) -> tuple[Array, Array, Array, Array]:
            out, lse, seen = kernel.forward("cpu", of(arrays))
            return out, jnp.where(seen > 0.0, lse, -jnp.inf), lse, seen

        def compute_forward(*arrays: Array) -> tuple[tuple, tuple]:
            results = compute(*arrays)
            return results, (arrays, results)

        def compute_backward(kept: tuple[Sequence[Array], tuple], cotangents: Sequence[Array]) -> tuple[Array, ...]:
            (arrays, (out, lse, row_max, seen)), (d_out, d_lse, *_) = kept, cotangents
            results: Results = out, row_max, seen
            wide = [d_out.astype(jnp.float32), jnp.where(lse == -jnp.inf, 0.0, d_lse)]  # for a row_sum of 1
            by_kernels = kernel.backward("cpu", of(arrays), results, wide)
            _, pull = jax.vjp(lambda *others: Blockwise().run(of((*arrays[:3], *others))), *arrays[3:])
            return *by_kernels, *pull((d_out, d_lse))

        compute.defvjp(compute_forward, compute_backward)
        return compute(*(leaves[n] for n in floats))[:2]
