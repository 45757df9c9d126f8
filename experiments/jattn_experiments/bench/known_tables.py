"""Pallas kernels that compute the tables of their blocks, where they would read them from scalar memory.

libtpu's simulator knows no data: it takes every scalar that a kernel reads for 0, and so skips every block that a table
lists. If all blocks are full, an entry is a sum of its row, its column, and whether it ends a row: that it does know.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pltpu

Tables = Mapping[str, Sequence[np.ndarray | None]]  # by the kernel's name


def tables_of(function: Callable, *arrays: jax.Array) -> Tables:
    """The tables of the kernels that ``function(*arrays)`` calls, without running these; in interpret mode only."""
    found = {}

    def call(kernel: Callable, out_shape: Any, *, grid_spec: Any, name: str, **_: Any) -> Callable:
        def record(*operands: Any) -> Any:
            tables = operands[: grid_spec.num_scalar_prefetch]
            jax.debug.callback(lambda *known: found.update({name: known}), *tables)
            return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), out_shape)

        return record

    with _called_by(call):
        jax.block_until_ready(function(*arrays))
        jax.effects_barrier()
    return found


@contextlib.contextmanager
def known(tables: Tables, longest: int) -> Iterator[None]:
    """Kernels that are traced inside compute ``tables``. Rows of blocks have the length ``longest``, if any has."""

    def call(kernel: Callable, out_shape: Any, *, grid_spec: Any, name: str, **settings: Any) -> Callable:
        values = [None if table is None else Entries(np.asarray(table), longest) for table in tables[name]]

        def spec(one: Any) -> Any:
            index = None if one is None else one.index_map
            return one if index is None else dataclasses.replace(one, index_map=lambda *ids: index(*ids, *values))

        specs = lambda some: jax.tree.map(spec, some, is_leaf=lambda x: x is None or isinstance(x, pallas.BlockSpec))
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=grid_spec.grid,
            in_specs=specs(grid_spec.in_specs),
            out_specs=specs(grid_spec.out_specs),
            scratch_shapes=grid_spec.scratch_shapes,
        )
        run = own(lambda *refs: kernel(*values, *refs), out_shape, grid_spec=grid, name=name, **settings)
        return lambda *operands: run(*operands[grid_spec.num_scalar_prefetch :])

    own = pallas.pallas_call
    with _called_by(call):
        yield


@contextlib.contextmanager
def _called_by(call: Callable) -> Iterator[None]:
    own = pallas.pallas_call
    jax.clear_caches()  # kernels are traced once
    pallas.pallas_call = call
    try:
        yield
    finally:
        pallas.pallas_call = own
        jax.clear_caches()


class Entries:
    """A table as a kernel reads it, computed from the index.

    Raises:
        ValueError: an entry is no such sum, as where a mask hides blocks.
    """

    def __init__(self, table: np.ndarray, longest: int):
        self.shape, self.columns = table.shape, min(longest, table.size)
        if self.columns & (self.columns - 1):
            raise ValueError(f"expected rows of a power of two of blocks, got {self.columns}")
        terms: list[np.ndarray] = []
        self.used = []
        for term in self._terms(np.arange(table.size)):  # without those that follow from others, as in short rows
            self.used.append(bool(np.linalg.matrix_rank(np.stack([*terms, term])) > len(terms)))
            terms += [term] * self.used[-1]
        flat, whole = table.reshape(-1).astype(np.int64), np.stack(terms, 1).astype(np.int64)
        self.factors = np.rint(np.linalg.lstsq(whole.astype(float), flat.astype(float), rcond=None)[0]).astype(np.int64)
        if (whole @ self.factors != flat).any():
            raise ValueError("the entries of the table do not follow from their indices")

    def _terms(self, index: Any) -> tuple[Any, ...]:
        """1, row, column, whether it is the first of its row, whether it is the last."""
        row, column = index >> (self.columns.bit_length() - 1), index & (self.columns - 1)
        return index * 0 + 1, row, column, column == 0, column == self.columns - 1

    def __getitem__(self, at: Any) -> jax.Array:
        index = jnp.int32(0)
        for one, size in zip(at if isinstance(at, tuple) else (at,), self.shape, strict=True):
            index = index * size + jnp.asarray(one, jnp.int32)
        terms = (term for term, used in zip(self._terms(index), self.used, strict=True) if used)
        value = jnp.int32(0)
        for factor, term in zip(self.factors.tolist(), terms, strict=True):
            if factor:
                value = value + jnp.asarray(term, jnp.int32) * jnp.int32(factor)
        return value
