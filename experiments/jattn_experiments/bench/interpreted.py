"""``pallas_gpu`` in Pallas' interpreter, whose callbacks have no place in a deferred operation."""

from typing import Any

import jax
import jax.numpy as jnp

from jattn._core.shard import on_each_device
from jattn._core.vmap import canonical
from jattn.kernels import Unsupported
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.pallas_gpu import PallasGPU


class Interpreted:
    """An ``implementation=`` that runs the kernels of ``pallas_gpu`` on a CPU and looks for races.

    Derivatives with respect to query, key and value are the kernels', others are blockwise's, as in ``pallas_gpu``.
    """

    dtypes = PallasGPU.dtypes

    def _settings(self) -> PallasGPU:
        from jax.experimental.pallas import mosaic_gpu  # JAX 0.10 has no such interpreter

        return PallasGPU(mosaic_gpu.InterpretGPUParams(detect_races=True))

    def slots(self, length: Any) -> None:
        return None

    def fold(self, args: Any, fold: Any) -> Any:
        return self._settings().reduce("cpu", canonical(args), fold)

    def map_parts(self, fn: Any, args: Any, out_axes: Any, *extra: Any) -> Any:
        return on_each_device(fn, args, out_axes, *extra)

    def unsupported_reason(self, args: Any) -> str | None:
        return PallasGPU().unsupported_reason(args)

    def run(self, args: Any) -> Any:
        reason = self.unsupported_reason(args)
        if reason is not None:
            raise Unsupported(reason)
        settings = self._settings()
        leaves, structure = jax.tree.flatten(canonical(args))
        floats = [n for n, x in enumerate(leaves) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]

        def of(arrays: Any) -> Any:
            return structure.unflatten([dict(zip(floats, arrays, strict=True)).get(n, x) for n, x in enumerate(leaves)])

        @jax.custom_vjp
        def compute(*arrays: Any) -> Any:
            out, lse, seen = settings.forward("cpu", of(arrays))
            return out, jnp.where(seen > 0.0, lse, -jnp.inf), lse, seen

        def compute_forward(*arrays: Any) -> Any:
            results = compute(*arrays)
            return results, (arrays, results)

        def compute_backward(kept: Any, cotangents: Any) -> Any:
            (arrays, (out, lse, row_max, seen)), (d_out, d_lse, *_) = kept, cotangents
            wide = [d_out.astype(jnp.float32), jnp.where(lse == -jnp.inf, 0.0, d_lse)]  # of a row_sum of 1
            by_kernels = settings.backward("cpu", of(arrays), (out, row_max, seen), wide)
            _, pull = jax.vjp(lambda *others: Blockwise().run(of((*arrays[:3], *others))), *arrays[3:])
            return *by_kernels, *pull(cotangents[:2])

        compute.defvjp(compute_forward, compute_backward)
        return compute(*(leaves[n] for n in floats))[:2]
