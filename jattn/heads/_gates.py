"""Applies gates to the inputs and outputs of attention: ``head_gate``, ``frozen`` and ``patch``.

A gate of 1 keeps an activation, a gate of 0 replaces it, and values in between mix: ``gate * x + (1 - gate) * fill``.
Activations are ``[B,T,N,D]`` with at most one batch axis; gates and fills have the ``lead`` batch axes of the input.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from jattn._core.call import softmax_dtype
from jattn._mods.arrays import Length
from jattn._mods.validation import pair

PatternPatch = tuple[Array, tuple[Array, Array]]  # a gate [B|1, T|1, N, 1], and another query and key
KeyPatch = tuple[Array, Array]  # a gate [B|1, S|1, K], and other keys [B,S,K,H]
PATCHED = ("query", "key", "value", "pattern", "each_key")


def expand_gate(gate: ArrayLike, x: Array, lead: tuple[Length, ...], name: str = "head_gate") -> Array:
    """A gate ``[N]``, ``[B,N]`` or ``[B,T,N]`` for ``x``, as ``[B|1, T|1, N, 1]``, without B if ``x`` has none."""
    gate = jnp.asarray(gate)
    *own_batch, T, N, _ = x.shape
    for full in ((N,), (*lead, N), (*lead, T, N)):
        if gate.ndim == len(full) and gate.shape[-1] == N and _fits(gate.shape, full):
            break
    else:
        raise ValueError(
            f"{name} must be [N] = [{N}], [B, N] or [B, T, N], got {list(gate.shape)} for outputs "
            f"{[*lead, *x.shape[-3:]]}"
        )
    if len(full) > 1 and any(size > 1 for size in gate.shape[: len(lead)]):
        gate = jnp.broadcast_to(gate, (*lead, *gate.shape[len(lead) :]))
    tokens = gate.shape[len(lead)] if len(full) == len(lead) + 2 else 1
    batch = [math.prod(gate.shape[: len(lead)]) if len(full) > 1 else 1] * len(own_batch)
    return gate.reshape(*batch, tokens, N, 1).astype(softmax_dtype(x))


def through_gate(
    x: Array, gate: Array, fill: ArrayLike | None, lead: tuple[Length, ...], name: str = "head_fill"
) -> Array:
    """``x * gate + fill * (1 - gate)``, in at least float32: a gate's derivative sums over tokens and dimensions."""
    wide = x.astype(gate.dtype)
    if fill is None:
        return (wide * gate).astype(x.dtype)
    return (wide * gate + expand_fill(fill, x, lead, name).astype(gate.dtype) * (1 - gate)).astype(x.dtype)


def expand_fill(fill: ArrayLike, x: Array, lead: tuple[Length, ...], name: str) -> Array:
    """A fill that broadcasts to ``[*lead, T, N, D]``, in the shape of ``x``."""
    full = (*lead, *x.shape[-3:])
    try:
        return jnp.broadcast_to(jnp.asarray(fill), full).reshape(x.shape)
    except ValueError:
        raise ValueError(
            f"{name} must broadcast to the heads' {'outputs' if name == 'head_fill' else 'activations'} {list(full)}, "
            f"got {list(jnp.shape(fill))}"
        ) from None


def replace_both(
    frozen: Any, query: Array, key: Array, lead: tuple[Length, ...], name: str = "frozen"
) -> tuple[Array, Array]:
    """The frozen query and key, with the shapes and dtypes of the arrays they replace; None replaces nothing."""
    replaced = []
    both = pair(f"the {name} query and key", frozen, "(query, key)")
    for which, new, old in zip(("query", "key"), both, (query, key), strict=True):
        if new is None:
            replaced.append(old)
            continue
        expected = (*lead, *old.shape[-3:])
        if jnp.shape(new) != expected:
            raise ValueError(f"the {name} {which} must have shape {list(expected)}, got {list(jnp.shape(new))}")
        replaced.append(jnp.reshape(new, old.shape).astype(old.dtype))
    return replaced[0], replaced[1]


def checked_patch(patch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``patch``; raises ``ValueError`` if it has an entry not in ``PATCHED``."""
    if unknown := sorted(patch.keys() - set(PATCHED)):
        outputs = "; a head's output, z, is replaced by head_gate=gate and head_fill=z" if "z" in unknown else ""
        raise ValueError(f"patch must have entries {', '.join(PATCHED)}, got {', '.join(unknown)}{outputs}")
    return patch


def patched(
    patch: Mapping[str, Any], inputs: Mapping[str, Array], lead: tuple[Length, ...]
) -> tuple[list[Array], PatternPatch | None, KeyPatch | None]:
    """The gated inputs, and the patches of ``"pattern"`` and ``"each_key"``, which change the output."""
    patch, results = checked_patch(patch), dict(inputs)
    for name, x in inputs.items():
        if name not in patch:
            continue
        gate, fill = pair(f"patch[{name!r}]", patch[name], "(gate, fill)")
        label = f"the gate of patch[{name!r}]"
        results[name] = through_gate(x, expand_gate(gate, x, lead, label), fill, lead, f"the fill of patch[{name!r}]")
    pattern = each = None
    if "pattern" in patch:
        gate, other = pair("patch['pattern']", patch["pattern"], "(gate, (query, key))")
        gate = expand_gate(gate, inputs["query"], lead, "the gate of patch['pattern']")
        pattern = gate, replace_both(other, inputs["query"], inputs["key"], lead, "patched")
    if "each_key" in patch:
        (gate, fill), key = pair("patch['each_key']", patch["each_key"], "(gate, fill)"), inputs["key"]
        gate = expand_gate(gate, key, lead, "the gate of patch['each_key']")[..., 0]
        each = gate, expand_fill(fill, key, lead, "the fill of patch['each_key']")
    return [*results.values()], pattern, each


def _fits(shape: tuple[Length, ...], full: tuple[Length, ...]) -> bool:
    return all(size in (1, whole) for size, whole in zip(shape, full, strict=True))
