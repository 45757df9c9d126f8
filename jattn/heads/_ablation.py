"""Measures what heads are needed for, using head ablations, gradients of gates, and training without a pattern.

These functions use options of a layer's attention (``jattn.multi_head_attention`` and the modules): ``head_gate``,
``head_fill`` (the output of a switched-off head, 0 by default) and ``frozen`` (a query and key that set the weights).
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from jattn._mods.arrays import AnyArray, Index, Length
from jattn._mods.pytree import pytree_dataclass, static_field
from jattn._mods.validation import check_fits, pair
from jattn.masks import Mask, MaskFunction, and_masks, bounds

KINDS = ("zero", "mean", "resample")
Heads = Sequence[Any]  # (layer, head) pairs


def ablate(
    run: Callable[[list[dict[str, Any]]], PyTree[Array]],
    clean: Sequence[Mapping[str, Array]],
    kind: str = "zero",
    *,
    freeze_weights: bool = False,
    groups: Sequence[Heads] | None = None,
    batch_size: int | None = None,
) -> PyTree[Array]:
    """Ablation: runs a model with each head switched off; returns ``run``'s results with leading axes ``[L,N]``.

    All ``L * N`` ablations run as one program, ``run`` under ``jax.vmap`` over their gates. Wrap the call in
    ``jax.jit``. With ``groups``, each run switches off one group of heads, and the results have one leading axis
    ``[len(groups)]``.

    Args:
        run: a function of a list with one dict per layer. It passes each dict to that layer's attention as keyword
            arguments, ``head_gate`` ``[N]`` and, if used, ``head_fill`` and ``frozen``, and returns any pytree of
            arrays.
        clean: for each layer, the dict sown by its attention on the same inputs without ablation (``sow_heads=True``),
            with ``"query"``, ``"key"`` and ``"z"`` ``[B,T,N,D]``. All layers have N heads. Means and resampled outputs
            include padding, so use sequences of equal length.
        kind: the output of a switched-off head: ``"zero"``; ``"mean"``, its mean over sequences and queries; or
            ``"resample"``, its output on the previous sequence of the batch (B must be at least 2).
        freeze_weights: keep every layer's attention weights from the clean run. The result then shows the effect of
            losing the head's output alone, without any change in the patterns of later heads.
        groups: lists of ``(layer, head)`` pairs. An empty group switches nothing off.
        batch_size: the number of ablations to run at once; all by default. Smaller batches take less memory.

    Raises:
        ValueError: ``kind`` is unknown; a layer lacks an array; layers have different numbers of heads; there is only
            one sequence to resample from; there are no groups, or a head does not exist.

    Example:
        >>> from flax import nnx
        >>> layer, x = jattn.nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)), jnp.ones((1, 3, 4))
        >>> layer.out.kernel[...] = layer.out.kernel[...].at[1].set(0.0)  # head 1 writes nothing
        >>> _, sown = nnx.capture(lambda layer: layer(x, sow_heads=True), nnx.Intermediate)(layer)
        >>> run = lambda layers: layer(x, **layers[0])
        >>> effect = jattn.heads.ablate(run, jattn.heads.collect(sown)) - run([{}])  # [L,N,B,T,M]
        >>> (abs(effect).max((2, 3, 4)) > 1e-4).tolist()  # which heads are needed
        [[True, False]]
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    check_layers("clean", clean, ("z", "query", "key") if freeze_weights else ("z",))
    numbers = sorted({layer["z"].shape[-2] for layer in clean})
    if len(numbers) != 1:
        raise ValueError(f"the layers of clean must have the same number of heads, got {numbers}")
    if kind == "resample" and (clean[0]["z"].ndim < 4 or clean[0]["z"].shape[0] < 2):
        raise ValueError(f"kind='resample' needs at least 2 sequences, got z of shape {list(clean[0]['z'].shape)}")
    options: list[dict[str, Any]] = [{} for _ in clean]
    for layer, option in zip(clean, options, strict=True):
        if kind != "zero":
            option["head_fill"] = fill_of(layer["z"], kind)
        if freeze_weights:
            option["frozen"] = layer["query"], layer["key"]

    def run_with(gates: Array) -> PyTree[Array]:
        return run([option | {"head_gate": gate} for option, gate in zip(options, gates, strict=True)])

    shape = len(clean), numbers[0]
    if groups is not None:
        return run_each(run_with, group_gates(groups, shape), batch_size)
    one_off = 1.0 - jnp.eye(shape[0] * shape[1]).reshape(-1, *shape)
    return with_axes(run_each(run_with, one_off, batch_size), shape)


def fill_of(z: Array, kind: str) -> Array:
    """The output of switched-off heads, which broadcasts to ``z [B,T,N,D]``."""
    if kind == "zero":
        return jnp.zeros_like(z)
    return z.mean(tuple(range(z.ndim - 2))) if kind == "mean" else jnp.roll(z, 1, 0)


def check_layers(argument: str, layers: Sequence[Mapping[str, Array]], needed: Sequence[str]) -> None:
    """Raises ``ValueError`` unless there is one dict per layer with the required arrays."""
    if isinstance(layers, Mapping) or not layers or not all(isinstance(layer, Mapping) for layer in layers):
        got = "one dict" if isinstance(layers, Mapping) else [type(layer).__name__ for layer in layers]
        raise ValueError(f"{argument} must be a list with a dict for each layer (see jattn.heads.collect), got {got}")
    if missing := [name for layer in layers for name in needed if name not in layer]:
        raise ValueError(
            f"each layer of {argument} must hold {', '.join(map(repr, needed))}; one has no {missing[0]!r}"
        )


def run_each(run: Callable[[Array], PyTree[Array]], gates: Array, batch_size: int | None) -> PyTree[Array]:
    """``run`` for each entry, as one program: all at once, or ``batch_size`` at a time."""
    return jax.vmap(run)(gates) if batch_size is None else jax.lax.map(run, gates, batch_size=batch_size)


def with_axes(results: PyTree[Array], shape: tuple[int, ...]) -> PyTree[Array]:
    """A tree of results whose axis of interventions is split into axes of these sizes."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), results)


def group_gates(groups: Sequence[Heads], shape: tuple[int, int]) -> Float[Array, "groups L N"]:
    """``[len(groups),L,N]``: 0 for the heads of each group."""
    gates = np.ones((len(groups), *shape), np.float32)
    if not len(groups):
        raise ValueError("groups must have at least one group of heads, got none")
    for gate, group in zip(gates, groups, strict=True):
        try:
            both = [pair("a head", head, "(layer, head)") for head in group]
            pairs = [(operator.index(layer), operator.index(head)) for layer, head in both]
        except (TypeError, ValueError):
            raise ValueError(f"groups must be lists of pairs (layer, head), got the group {group!r}") from None
        missing = [place for place in pairs if not all(0 <= i < size for i, size in zip(place, shape, strict=True))]
        if missing:
            raise ValueError(f"groups must name heads of {shape[0]} layers with {shape[1]} heads, got {missing}")
        for place in pairs:
            gate[place] = 0.0
    return jnp.asarray(gates)


def importance(losses: Callable[[Array], Array], num_layers: int, num_heads: int, batch: int) -> Float[Array, "L N"]:
    """A first-order estimate of each head's ablation effect, for all heads in one backward pass: ``[L,N]``, float32.

    The estimate is the mean over sequences of ``|d loss / d gate|`` at a gate of 1.

    Args:
        losses: a function of ``gates [L,B,N]``, each layer's ``head_gate``, that returns the loss of each sequence,
            ``[B]``.
        num_layers, num_heads, batch: the sizes L, N and B.

    Raises:
        ValueError: ``losses`` does not return one loss per sequence.

    Example:
        >>> from flax import nnx
        >>> layer, x = jattn.nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)), jnp.ones((1, 3, 4))
        >>> layer.out.kernel[...] = layer.out.kernel[...].at[1].set(0.0)  # head 1 writes nothing
        >>> losses = lambda gates: (layer(x, head_gate=gates[0]) ** 2).sum((1, 2))
        >>> (jattn.heads.importance(losses, num_layers=1, num_heads=2, batch=1) > 0).tolist()
        [[True, False]]

    Source: https://arxiv.org/abs/1905.10650 (Michel et al.).
    """

    def total(gates: Array) -> Array:
        per_sequence = losses(gates)
        if jnp.shape(per_sequence) != (batch,):
            raise ValueError(
                f"losses must return one loss for each sequence, [{batch}], got {list(jnp.shape(per_sequence))}"
            )
        return per_sequence.sum()

    return abs(jax.grad(total)(jnp.ones((num_layers, batch, num_heads)))).mean(1)


def forbid(pattern: MaskFunction, heads: Sequence[int] | Bool[AnyArray, " N"]) -> Mask:
    """A mask that hides only the pairs of ``pattern`` from these heads: ``mask=Causal() & forbid(...)``.

    Use it to train a model in which these heads cannot form a pattern, or to test what a pattern is needed for. A query
    that sees no key outputs 0.

    Args:
        pattern: a mask or a function ``(b, h, q_idx, kv_idx) -> bool``, True for the pairs of the pattern.
        heads: the indices of the heads; or bools ``[N]``, which may be traced and differ between layers:
            ``per_layer=[{"mask": forbid(pattern, of_layer)} for of_layer in chosen]``, with ``chosen [L,N]``.

    Raises:
        ValueError: an index is negative, or an array of bools is not ``[N]``.

    Example:
        >>> previous = lambda b, h, q_idx, kv_idx: kv_idx == q_idx - 1
        >>> mask = jattn.masks.Causal() & jattn.heads.forbid(previous, heads=[0])
        >>> even = jnp.zeros((3, 2, 4))  # [T,N,H], queries and keys of two uniform heads
        >>> (jattn.attention_weights(even, even, mask=mask)[:, 2] > 0).tolist()  # what the third query sees
        [[True, False, True], [True, True, True]]
    """
    table: Any = heads if isinstance(heads, jax.Array) else np.asarray(heads)
    if table.dtype == bool:
        return ~(and_masks(pattern) & OfHeads(table))
    numbers = tuple(operator.index(head) for head in heads)
    if any(number < 0 for number in numbers):
        raise ValueError(f"heads must be indices of at least 0, got {list(heads)}")
    return Forbidden(pattern, numbers)


@pytree_dataclass
class Forbidden(Mask):
    """Hides the pairs of ``pattern`` from ``heads``; see ``forbid``."""

    pattern: MaskFunction
    heads: tuple[int, ...] = static_field()

    def __post_init__(self):
        object.__setattr__(self, "pattern", and_masks(self.pattern))

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        """Raises ``ValueError`` if a head does not exist or the pattern does not fit."""
        if any(head >= N for head in self.heads):
            raise ValueError(f"forbid: heads must be below N = {N}, the number of query heads, got {list(self.heads)}")
        check_fits(self.pattern, B, N, T, S)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index):
        return True ^ (self.pattern(b, h, q_idx, kv_idx) & self._chosen(h))

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> tuple[Any, Any]:
        any_visible, all_visible = bounds(self.pattern, b, h, q_min, q_max, kv_min, kv_max)
        return True ^ (all_visible & self._chosen(h)), True ^ (any_visible & self._chosen(h))

    def _chosen(self, h: Index) -> AnyArray:
        chosen: AnyArray = np.False_
        for head in self.heads:
            chosen = chosen | (h == head)
        return chosen


@pytree_dataclass
class OfHeads(Mask):
    """Shows all pairs to the heads for which ``heads``, bool ``[N]``, is True; see ``forbid``."""

    heads: AnyArray

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        """Raises ``ValueError`` unless there is one bool per head."""
        if jnp.shape(self.heads) != (N,):
            raise ValueError(
                f"forbid: heads must be bools [N] = [{N}], one for each query head, got {list(jnp.shape(self.heads))}"
            )

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index):
        return self.heads[h]

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> tuple[Any, Any]:
        return self.heads[h], self.heads[h]
