"""The sequences that a circuit is looked at on, and what its cut edges carry instead."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from jattn.circuits._parts import Parts
from jattn.circuits._runs import Example, Outputs, nothing_of, outputs_of


@dataclasses.dataclass(frozen=True)
class Examples:
    """Sequences and what is put in the place of cut edges, checked."""

    clean: np.ndarray
    corrupt: np.ndarray | Outputs | str
    labels: Any
    valid: np.ndarray | None

    @classmethod
    def of(cls, clean: ArrayLike, corrupt: Any, labels: Any, valid: ArrayLike | None) -> "Examples":
        """Raises ``ValueError`` if they do not fit each other."""
        clean = _tokens("clean", clean)
        if isinstance(corrupt, str):
            if corrupt != "zero":
                raise ValueError(f"corrupt must be tokens [B, T], mean_outputs(...) or 'zero', got {corrupt!r}")
        elif not isinstance(corrupt, Outputs):
            corrupt = _tokens("corrupt", corrupt)
            if corrupt.shape != clean.shape:
                raise ValueError(
                    f"clean and corrupt must be tokens of one shape, since edges are cut token by token, got "
                    f"{list(clean.shape)} and {list(corrupt.shape)}; pad both alike and pass valid="
                )
            if same := [i for i, pair in enumerate(zip(clean, corrupt, strict=True)) if (pair[0] == pair[1]).all()]:
                raise ValueError(f"clean and corrupt must differ, but are equal in example {same[0]}")
        if valid is not None:
            valid = np.asarray(valid, bool)
            if valid.shape != clean.shape:
                raise ValueError(f"valid must be bools [B, T] = {list(clean.shape)}, got {list(valid.shape)}")
        for leaf in jax.tree.leaves(labels):
            if np.shape(leaf)[:1] != clean.shape[:1]:
                raise ValueError(f"labels must be arrays [B, ...] with B = {len(clean)}, got {list(np.shape(leaf))}")
        return cls(clean, corrupt, labels, valid)

    def __len__(self) -> int:
        return len(self.clean)

    def one(self, parts: Parts, i: int) -> tuple[Example, Outputs]:
        """An example, and what its cut edges carry."""
        valid = None if self.valid is None else jnp.asarray(self.valid[i])
        labels = jax.tree.map(lambda x: jnp.asarray(x[i]), self.labels)
        example = Example(jnp.asarray(self.clean[i]), valid, labels)
        if isinstance(self.corrupt, Outputs):
            return example, self.corrupt
        if isinstance(self.corrupt, str):
            return example, nothing_of(parts, example)
        return example, outputs_of(parts, example._replace(tokens=jnp.asarray(self.corrupt[i])))


def _tokens(name: str, tokens: ArrayLike) -> np.ndarray:
    array = np.asarray(tokens)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise ValueError(f"{name} must be integers [B, T], got {array.dtype} of shape {list(array.shape)}")
    return array


def check_finite(ends: tuple[float, float], number: int) -> None:
    if not np.isfinite(ends).all():
        raise ValueError(
            f"metric of example {number} is {ends[0]} with all edges and {ends[1]} with none; a metric must be finite "
            "(are all tokens within the vocabulary?)"
        )
