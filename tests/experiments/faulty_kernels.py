"""Implementations with a fault each, that the chip suite has to find: ``--kernels tests.experiments.faulty_kernels:Wrong``."""

import itertools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from jattn.kernels.blockwise import Blockwise


class Right:
    """A kernel of a user's own, without a fault."""

    def unsupported_reason(self, args):
        return None

    def run(self, args):
        return Blockwise().run(args)


class Wrong(Right):
    """The last key is left out of one case in many: that of grouped queries."""

    def run(self, args):
        out, lse = super().run(args)
        return (out + 1e-3 if args.query.shape[2] == 2 * args.key.shape[2] else out), lse


class WrongGradient(Right):
    """Values are right, gradients are not."""

    def run(self, args):
        out, lse = super().run(args)
        return out + 0.01 * (out - jax.lax.stop_gradient(out)), lse


class Racing(Right):
    """The last bit of a number differs from call to call."""

    count = itertools.count()

    def run(self, args):
        out, lse = super().run(args)
        noise = jax.pure_callback(
            lambda: np.float32(next(self.count) % 3 * 1e-6), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return out + jax.lax.stop_gradient(noise).astype(out.dtype) * (jnp.arange(out.shape[1]) == 0)[
            :, None, None
        ], lse


class Leaking(Right):
    """NaN in keys that nobody sees comes through."""

    def run(self, args):
        out, lse = super().run(args)
        return out + 0 * jnp.sum(args.value), lse


class Crashing(Right):
    def run(self, args):
        os.abort()


class Hanging(Right):
    def run(self, args):
        time.sleep(1000)


class OutOfMemory(Right):
    def run(self, args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 137438953472 bytes.")
