"""Implementations with faults that the chip suite has to find: ``--kernels tests.experiments.faulty_kernels:Faulty``."""

import itertools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from jattn.kernels.blockwise import Blockwise
from jattn.masks import Causal


class Right:
    """A kernel of a user's own, without a fault."""

    def unsupported_reason(self, args):
        return None

    def run(self, args):
        return Blockwise().run(args)


class Faulty(Right):
    """Hangs in bfloat16; wrong for grouped queries, wrong gradients of causal calls; others end the process."""

    def run(self, args):
        if args.query.dtype == jnp.bfloat16:
            time.sleep(1000)
        out, lse = super().run(args)
        if args.query.shape[2] > args.key.shape[2]:
            return out + 1e-3, lse
        if any(isinstance(mask, Causal) for mask in args.masks):
            return out + 0.01 * (out - jax.lax.stop_gradient(out)), lse
        os.abort()


class Loose(Right):
    """NaN in unseen keys comes through, and a number differs from call to call."""

    count = itertools.count()

    def run(self, args):
        out, lse = super().run(args)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        noise = jax.lax.stop_gradient(jax.pure_callback(lambda: np.float32(next(self.count) % 3 * 1e-2), shape))
        first = (jnp.arange(out.shape[1]) == 0)[:, None, None]
        return out + noise.astype(out.dtype) * first + 0 * jnp.sum(args.value), lse
