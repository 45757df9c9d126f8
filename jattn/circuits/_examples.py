"""Checks the sequences on which a circuit runs and the outputs carried by its cut edges."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from jattn.circuits._parts import Parts
from jattn.circuits._runs import Example, Metric, Outputs, base_metric, nothing_of, outputs_of, plain_metric

# What a cut edge carries: the outputs on other tokens, the given outputs, or nothing.
Base = Example | Outputs | None


@dataclasses.dataclass(frozen=True)
class Examples:
    """The checked sequences and the outputs carried by cut edges."""

    clean: np.ndarray
    corrupt: np.ndarray | Outputs | str
    labels: Any
    valid: np.ndarray | None

    @classmethod
    def of(
        cls, clean: ArrayLike, corrupt: Any, labels: Any, valid: ArrayLike | None, name: str = "clean"
    ) -> "Examples":
        """Checks the arguments; raises ``ValueError`` if they do not match."""
        clean = _tokens(name, clean)
        if isinstance(corrupt, str):
            if corrupt != "zero":
                raise ValueError(f"corrupt must be tokens [B, T], mean_outputs(...) or 'zero', got {corrupt!r}")
        elif not isinstance(corrupt, Outputs):
            corrupt = _tokens("corrupt", corrupt)
            if corrupt.shape != clean.shape:
                raise ValueError(
                    f"clean and corrupt must be tokens of one shape, since edges are cut token by token, got shapes "
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
                raise ValueError(
                    f"labels must be arrays [B, ...] with B = {len(clean)}, got shape {list(np.shape(leaf))}; convert "
                    "lists with np.array"
                )
        return cls(clean, corrupt, labels, valid)

    def check_outputs(self, parts: Parts) -> None:
        """Raises ``ValueError`` if the corrupt outputs come from another model or have a different length."""
        if isinstance(self.corrupt, Outputs):
            graph, shape = parts.graph, jnp.shape(self.corrupt.heads)
            if shape[:2] != (graph.num_layers, graph.num_heads) or shape[2:3] not in ((1,), self.clean.shape[1:]):
                raise ValueError(
                    f"corrupt: outputs of heads must be [L, N, 1 or T, M] with L, N, T = {graph.num_layers}, "
                    f"{graph.num_heads}, {self.clean.shape[1]}, got shape {list(shape)}; use mean_outputs of this model"
                )

    def __len__(self) -> int:
        return len(self.clean)

    def one(self, i: int) -> tuple[Example, Base]:
        """An example and the outputs carried by its cut edges."""
        valid = None if self.valid is None else jnp.asarray(self.valid[i])
        labels = jax.tree.map(lambda x: jnp.asarray(x[i]), self.labels)
        example = Example(jnp.asarray(self.clean[i]), valid, labels)
        if isinstance(self.corrupt, np.ndarray):
            return example, example._replace(tokens=jnp.asarray(self.corrupt[i]))
        return example, None if isinstance(self.corrupt, str) else self.corrupt


def as_outputs(parts: Parts, example: Example, base: Base) -> Outputs:
    """Each writer's output on its cut edges."""
    if base is None:
        return nothing_of(parts, example)
    return base if isinstance(base, Outputs) else outputs_of(parts, base)


def metric_at_ends(parts: Parts, example: Example, base: Base, metric: Metric, number: int) -> tuple[float, float]:
    """The metric with all edges and with none; raises ``ValueError`` if either is not finite."""
    clean = float(plain_metric(parts, example, metric))
    if isinstance(base, Example):  # the metric uses the clean tokens, whatever the model reads
        corrupt = float(plain_metric(parts, example, metric, base.tokens))
    else:
        corrupt = float(base_metric(parts, example, as_outputs(parts, example, base), metric))
    return check_finite(clean, corrupt, number)


def check_finite(clean: float, corrupt: float, number: int) -> tuple[float, float]:
    """Returns both metrics; raises ``ValueError`` if either is not finite."""
    if not np.isfinite([clean, corrupt]).all():
        raise ValueError(
            f"metric of example {number} is {clean} with all edges and {corrupt} with none; the metric must be finite "
            "(are all tokens within the vocabulary?)"
        )
    return clean, corrupt


def _tokens(name: str, tokens: ArrayLike) -> np.ndarray:
    array = np.asarray(tokens)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise ValueError(f"{name} must be integers [B, T], got {array.dtype} of shape {list(array.shape)}")
    return array
