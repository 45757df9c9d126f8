"""What heads are needed for: every one switched off in turn, the gradient of its gate, and training without a pattern.

A layer's attention takes three things (``jattn.multi_head.attend_heads``, the modules): ``head_gate``, ``head_fill``
(what a head that is off gives instead of 0) and ``held`` (queries and keys whose weights are used instead).
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn.masks import Mask, MaskFunction, and_masks, bounds
from jattn.mods import check, pytree_dataclass, static_field

KINDS = ("zero", "mean", "resample")


def ablate(
    run: Callable[[list[dict[str, Any]]], Any],
    clean: Sequence[Mapping[str, Array]],
    kind: str = "zero",
    *,
    hold_weights: bool = False,
    batch_size: int | None = None,
) -> Any:
    """What a model gives with each single head switched off: ``run``'s result with leading axes ``[L,N]``.

    One program: ``run`` under ``jax.vmap`` over the gates of all ``L * N`` ablations, so ``jax.jit`` it whole.

    Args:
        run: a function of one dict per layer, to be passed on to that layer's attention as keyword arguments:
            ``head_gate`` ``[N]`` and, as asked for, ``head_fill`` and ``held``. It returns any pytree of arrays.
        clean: what each layer's attention hands out on the same inputs when nothing is switched off, as the modules
            sow it (``sow_heads=True``): dicts with ``"query"``, ``"key"``, ``"z"`` ``[B,T,N,D]``. All layers have N
            heads. Padding is part of means and of other sequences' outputs: give sequences of one length.
        kind: what a head gives that is off: ``"zero"``; ``"mean"``, its mean output over sequences and queries; or
            ``"resample"``, its output on the sequence before in the batch (B at least 2).
        hold_weights: every layer keeps the attention weights of the clean run, so that what is seen is the loss of
            the head's output alone, without the shift of later heads' patterns.
        batch_size: how many ablations at once; all by default. Fewer take less memory.

    Raises:
        ValueError: no such kind; a layer without what is needed of it; layers with different numbers of heads; one
            sequence to resample from.

    Example:
        ``ablate(lambda layers: loss(model(x, layers)), clean)``
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if isinstance(clean, Mapping) or not clean or not all(isinstance(layer, Mapping) for layer in clean):
        got = "one dict" if isinstance(clean, Mapping) else [type(layer).__name__ for layer in clean]
        raise ValueError(f"clean must be a list with a dict for each layer, got {got}")
    wanted = ("z", "query", "key") if hold_weights else ("z",)
    if missing := [name for layer in clean for name in wanted if name not in layer]:
        raise ValueError(f"each layer of clean must hold {', '.join(map(repr, wanted))}; one has no {missing[0]!r}")
    numbers = sorted({layer["z"].shape[-2] for layer in clean})
    if len(numbers) != 1:
        raise ValueError(f"the layers of clean must have the same number of heads, got {numbers}")
    if kind == "resample" and (clean[0]["z"].ndim < 4 or clean[0]["z"].shape[0] < 2):
        raise ValueError(f"kind='resample' needs at least 2 sequences, got z of shape {list(clean[0]['z'].shape)}")
    options: list[dict[str, Any]] = [{} for _ in clean]
    for layer, option in zip(clean, options, strict=True):
        z = layer["z"]
        if kind == "mean":
            option["head_fill"] = z.mean(tuple(range(z.ndim - 2)))
        elif kind == "resample":
            option["head_fill"] = jnp.roll(z, 1, 0)
        if hold_weights:
            option["held"] = layer["query"], layer["key"]

    def one(gates: Array) -> Any:
        return run([option | {"head_gate": gate} for option, gate in zip(options, gates, strict=True)])

    shape = len(clean), numbers[0]
    one_off = 1.0 - jnp.eye(shape[0] * shape[1]).reshape(-1, *shape)
    found = jax.vmap(one)(one_off) if batch_size is None else jax.lax.map(one, one_off, batch_size=batch_size)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)


def importance(losses: Callable[[Array], Array], num_layers: int, num_heads: int, batch: int) -> Array:
    """``[L,N]``: the mean over sequences of ``|d loss / d gate|`` at a gate of 1, all heads in one backward pass.

    The first order of what switching the head off would do. Source: https://arxiv.org/abs/1905.10650 (Michel et al.).

    Args:
        losses: a function of ``gates [L,B,N]``, layer by layer the ``head_gate``, to the loss ``[B]`` of each sequence.
        num_layers, num_heads, batch: L, N and B.

    Raises:
        ValueError: the losses are not one for each sequence.
    """

    def total(gates: Array) -> Array:
        found = losses(gates)
        if jnp.shape(found) != (batch,):
            raise ValueError(f"losses must return one loss for each sequence, [{batch}], got {list(jnp.shape(found))}")
        return found.sum()

    return abs(jax.grad(total)(jnp.ones((num_layers, batch, num_heads)))).mean(1)


def forbid(pattern: MaskFunction, heads: Sequence[int]) -> Mask:
    """A mask that hides the pairs of ``pattern`` from these heads, and nothing else: ``mask=Causal() & forbid(...)``.

    To train a model in which no head, or not these, can have a pattern. A query that would see nothing else gets 0.

    Args:
        pattern: a mask or a function ``(b, h, q_idx, kv_idx) -> bool``, True where the pattern looks.
        heads: the heads' numbers.

    Raises:
        ValueError: a negative number.

    Example:
        ``forbid(lambda b, h, q, kv: kv == q - 1, heads=[0, 1])``: heads 0 and 1 never see the token before.
    """
    numbers = tuple(operator.index(head) for head in heads)
    if any(number < 0 for number in numbers):
        raise ValueError(f"heads must be numbers from 0 on, got {list(heads)}")
    return Forbidden(pattern, numbers)


@pytree_dataclass
class Forbidden(Mask):
    """Everything but the pairs of ``pattern`` in ``heads``: see ``forbid``."""

    pattern: Any
    heads: tuple[int, ...] = static_field()

    def __post_init__(self):
        object.__setattr__(self, "pattern", and_masks(self.pattern))

    def check(self, B, N, T, S) -> None:
        """Raises ``ValueError`` for a head that is not there, and where the pattern does not fit."""
        if any(head >= N for head in self.heads):
            raise ValueError(f"forbid: heads must be below N = {N}, the number of query heads, got {list(self.heads)}")
        check(self.pattern, B, N, T, S)

    def __call__(self, b, h, q_idx, kv_idx):
        return True ^ (self.pattern(b, h, q_idx, kv_idx) & self._chosen(h))

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        may, must = bounds(self.pattern, b, h, q_min, q_max, kv_min, kv_max)
        return True ^ (must & self._chosen(h)), True ^ (may & self._chosen(h))

    def _chosen(self, h: Any) -> Any:
        chosen: Any = np.False_
        for head in self.heads:
            chosen = chosen | (h == head)
        return chosen
