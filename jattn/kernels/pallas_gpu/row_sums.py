"""The reduction of ``"pallas_gpu"``: sums over the weights of each head, for ``jattn.heads.statistics``.

The log-sum-exp is known, so weights are final when computed. One kernel computes the sums for queries and another those
for keys; the queries or keys are then the rows, whose sums stay in registers. Sums by offset are in ``diagonals``.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jattn._blocks.reduction import Reduction, lowest_score
from jattn._mods.tile_function import KEY, QUERY
from jattn.kernels.pallas_gpu.pipeline import MosaicKernel, Step, Steps, full
from jattn.kernels.pallas_gpu.schedule import ROWS
from jattn.kernels.pallas_gpu.tile import GPUPlan, Place, Tile
from jattn.kernels.pallas_tiles import Ref

BLOCK = 2 * ROWS, 64  # rows and columns: half the forward pass's, to leave registers for the values


class Values:
    """The values that a reduction computes from a tile of weights."""

    def __init__(self, plan: GPUPlan, reduction: Reduction):
        self.scores, self.reduction, add_vector = plan.scores(), reduction, plan.operands.vector
        self.lowest = lowest_score(plan.call)
        lse = jnp.moveaxis(jnp.where(reduction.lse == -jnp.inf, 0.0, reduction.lse), 1, 2)
        self.lse = add_vector(QUERY, lse.astype(jnp.float32))
        self.data = {
            over: {
                name: (add_vector(over, x.astype(jnp.int32)[:, None]), x.dtype == bool) for name, x in arrays.items()
            }
            for over, arrays in ((QUERY, reduction.rows), (KEY, reduction.columns))
        }

    def of_tile(self, tile: Tile) -> tuple[dict[str, jax.Array], Callable[[], jax.Array]]:
        """The values of its pairs by name, and 1.0 where visible, otherwise 0.0."""
        s = tile.scores()
        hidden = s <= self.lowest
        logs = jnp.where(hidden, -jnp.inf, s - tile.vector(QUERY, self.lse))  # even where the lse is NaN
        values = self.reduction.values(logs, *(self._read(tile, over) for over in (QUERY, KEY)))
        return values, lambda: jnp.ones_like(s) if tile.visible is None else jnp.where(tile.visible, 1.0, 0.0)

    def _read(self, tile: Tile, over: str) -> dict[str, jax.Array]:
        vectors = ((name, tile.vector(over, number), is_bool) for name, (number, is_bool) in self.data[over].items())
        return {name: x != 0 if is_bool else x for name, x, is_bool in vectors}


def reduce_rows(
    make_plan: Callable[..., GPUPlan], q: jax.Array, k: jax.Array, reduction: Reduction
) -> dict[str, jax.Array]:
    """The sums ``{name: [B,N,...]}``; takes ``make_plan(by_key=...)``, and ``q`` and ``k`` as the kernels read them."""
    plan = make_plan(by_key=False)
    (T, S), names = (plan.call.query.shape[1], plan.call.key.shape[1]), reduction.named("row_sum", "row_max")
    results: dict[str, jax.Array] = {}
    counted = "visible" in reduction.counts
    if names or counted:
        sums = _sums(plan, q, k, reduction, names, counted)
        results |= {name: x[..., :T] for name, x in zip([*names, "visible"], sums, strict=False)}
    if by_key := reduction.named("column_sum"):
        sums = _sums(make_plan(by_key=True), k, q, reduction, by_key, False)
        results |= {name: x[..., :S] for name, x in zip(by_key, sums, strict=True)}
    return results


def _sums(
    plan: GPUPlan, rows: jax.Array, columns: jax.Array, reduction: Reduction, names: list[str], count: bool
) -> Sequence[jax.Array]:
    """The sums of each row, ``[B,N,T|S]``, for these names, and the number of visible pairs if ``count``."""
    values, largest = Values(plan, reduction), reduction.named("row_max")

    def start(_: Place) -> list[jax.Array]:
        return [full((ROWS,), -jnp.inf if name in largest else 0.0) for name in names] + [full((ROWS,), 0.0)] * count

    def add(step: Step, rows: Sequence[Ref], columns: Sequence[Ref], carry: list[jax.Array]) -> list[jax.Array]:
        def of_tile(tile: Tile) -> list[jax.Array]:
            by_name, seen = values.of_tile(tile)
            results = [(jnp.max if name in largest else jnp.sum)(by_name[name], axis=1) for name in names]
            if count:
                results.append(jnp.sum(seen(), axis=1))
            return results

        tile_sums = step.either(of_tile, *step.products((rows[0], columns[0])))
        step.release(0)
        kept = [jnp.maximum if name in largest else jnp.add for name in names] + [jnp.add] * count
        return [combine(old, new) for combine, old, new in zip(kept, carry, tile_sums, strict=True)]

    def finish(_: Place, carry: list[jax.Array]) -> tuple:
        return [], carry

    steps = Steps(start, add, finish)
    vectors = len(names) + count
    return MosaicKernel(plan, values.scores, steps, [rows], [columns], [], vectors, each_head=plan.by_key).call()[1]
