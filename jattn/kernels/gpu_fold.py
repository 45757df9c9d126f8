"""The fold of ``"pallas_gpu"``: sums over the weights of each head, for ``jattn.heads.statistics``.

The log-sum-exp is known, so weights are final when they are computed. One kernel adds up the sums of queries, its rows,
and another those of keys, its rows: in both, a row's sums stay in registers. Sums by offset lie across the rows; they
are blockwise's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.kernels import Fold
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.gpu_program import Step, Steps, call, full
from jattn.kernels.gpu_tiles import ROWS, Plan, Tile
from jattn.separate import KEY, QUERY

BLOCK = 2 * ROWS, 64  # rows and columns: half of those of the forward pass leave registers for the values


def fold_rows(make_plan: Callable[..., Plan], q: jax.Array, k: jax.Array, fold: Fold) -> dict[str, jax.Array]:
    """``jattn.kernels.FoldsWeights.fold``; ``make_plan(by_key=...)``, and ``q`` and ``k`` as the kernels read them."""
    plan = make_plan(by_key=False)
    (T, S), names = (plan.request.query.shape[1], plan.request.key.shape[1]), fold.named("queries", "largest")
    results: dict[str, jax.Array] = {}
    if names or fold.count_visible:
        found = _sums(plan, q, k, fold, names, fold.count_visible)
        results |= {name: x[..., :T] for name, x in zip([*names, "visible"], found, strict=False)}
        if fold.count_visible:
            results["visible"] = results["visible"].astype(jnp.int32)
    if by_key := fold.named("keys"):
        found = _sums(make_plan(by_key=True), k, q, fold, by_key, False)
        results |= {name: x[..., :S] for name, x in zip(by_key, found, strict=True)}
    if fold.named("offsets"):
        kinds = tuple(kind for kind in fold.kinds if kind[1] == "offsets")
        results |= Blockwise().fold(plan.request, dataclasses.replace(fold, kinds=kinds, count_visible=False))
    return results


def _sums(plan: Plan, rows: jax.Array, columns: jax.Array, fold: Fold, names: list[str], count: bool) -> Any:
    """The sums of each row, ``[B,N,T|S]``, of these names, and of the visible pairs if ``count``."""
    scores, add_vector, largest = plan.scores(), plan.operands.vector, fold.named("largest")
    lse = add_vector(QUERY, jnp.moveaxis(jnp.where(fold.lse == -jnp.inf, 0.0, fold.lse), 1, 2).astype(jnp.float32))
    data = {
        over: {name: (add_vector(over, x.astype(jnp.int32)[:, None]), x.dtype == bool) for name, x in arrays.items()}
        for over, arrays in ((QUERY, fold.rows), (KEY, fold.columns))
    }

    def start(_: Any) -> list[jax.Array]:
        return [full((ROWS,), -jnp.inf if name in largest else 0.0) for name in names] + [full((ROWS,), 0.0)] * count

    def add(step: Step, rows: Any, columns: Any, carry: list[jax.Array]) -> list[jax.Array]:
        def of_tile(tile: Tile) -> list[jax.Array]:
            def read(over: str) -> dict[str, jax.Array]:
                return {
                    name: tile.vector(over, number) != 0 if is_bool else tile.vector(over, number)
                    for name, (number, is_bool) in data[over].items()
                }

            s = tile.scores()
            logs = jnp.where(s == -jnp.inf, s, s - tile.vector(QUERY, lse))  # 0, also where the lse is NaN
            found = fold.values(logs, read(QUERY), read(KEY))
            results = [(jnp.max if name in largest else jnp.sum)(found[name], axis=1) for name in names]
            if count:
                seen = jnp.ones_like(s) if tile.visible is None else jnp.where(tile.visible, 1.0, 0.0)
                results.append(jnp.sum(seen, axis=1))
            return results

        found = step.either(of_tile, *step.products((rows[0], columns[0])))
        step.release(0)
        kept = [jnp.maximum if name in largest else jnp.add for name in names] + [jnp.add] * count
        return [combine(old, new) for combine, old, new in zip(kept, carry, found, strict=True)]

    def finish(_: Any, carry: list[jax.Array]) -> tuple:
        return [], carry

    steps = Steps(start, add, finish)
    return call(plan, [rows], [columns], [], len(names) + count, steps, scores, each_head=plan.by_key)[1]
