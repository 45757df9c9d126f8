"""Computes position embeddings without parameters: the sinusoidal table and rotary embeddings."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from jattn._mods.arrays import Length
from jattn._mods.validation import to_int32

__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Rotary",
    "YarnScaling",
    "at_length",
    "sinusoidal",
]


def sinusoidal(length: int, dim: int) -> Float[Array, "T M"]:
    """The sinusoidal table ``[length, dim]``: ``sin(p / 10000^(2i/dim))`` at ``[p, 2i]``, the cosine at ``[p, 2i+1]``.

    Args:
        length: the number of positions p.
        dim: the number of features; the table is float32.

    Raises:
        ValueError: ``length`` is negative or ``dim`` is less than 1.

    Example:
        >>> table = jattn.positions.sinusoidal(8, 4)
        >>> table.shape, table[0].tolist()
        ((8, 4), [0.0, 1.0, 0.0, 1.0])
        >>> products = table @ table.T  # depend on the distance alone
        >>> np.allclose(products[0, 3], products[4, 7], atol=1e-2)
        True

    Source: Attention Is All You Need, https://arxiv.org/abs/1706.03762, section 3.5.
    """
    if length < 0 or dim < 1:
        raise ValueError(f"sinusoidal: length must be >= 0 and dim >= 1, got length={length}, dim={dim}")
    # float64 on the host: at position 10,000, a float32 angle is off in the fourth decimal place.
    angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, dim, 2) / dim)
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, dim + dim % 2)
    return jnp.asarray(table[:, :dim], jnp.float32)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """``scaling=`` of ``Rotary``: position interpolation, which divides every frequency by ``factor``.

    Example:
        >>> rotary = jattn.positions.Rotary(scaling=jattn.positions.LinearScaling(4.0))
        >>> x = jax.random.normal(jax.random.key(0), (2, 1, 8))
        >>> scaled, plain = rotary(x, jnp.array([4, 8])), jattn.positions.Rotary()(x, jnp.array([1, 2]))
        >>> np.allclose(scaled, plain, atol=1e-4)
        True

    Source: https://arxiv.org/abs/2306.15595.
    """

    factor: float

    def __call__(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        """The scaled frequencies, and the factor that multiplies cosine and sine."""
        return frequencies / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """``scaling=`` of ``Rotary``: divides low frequencies by ``factor``, keeps high ones, and interpolates in between.

    Frequencies that make fewer than ``low_freq_factor`` turns within ``original_length`` tokens are low; those that
    make more than ``high_freq_factor`` turns are high.

    Example:
        >>> scaling = jattn.positions.Llama3Scaling(factor=8.0, original_length=512)
        >>> rotary, scaled = jattn.positions.Rotary(), jattn.positions.Rotary(scaling=scaling)
        >>> (rotary.frequencies(16)[0] / scaled.frequencies(16)[0]).round(2).tolist()
        [1.0, 1.0, 1.0, 1.71, 8.0, 8.0, 8.0, 8.0]

    Source: Llama 3.1's published code (``apply_scaling``).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __call__(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        turns = self.original_length * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / self.factor), 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """``scaling=`` of ``Rotary``: YaRN's "NTK by parts", which divides low frequencies by ``factor``.

    Frequencies that make more than ``beta_fast`` turns within ``original_length`` tokens are kept; those that make
    fewer than ``beta_slow`` turns are divided. The dimensions in between are interpolated linearly; ``truncate`` first
    rounds their bounds to whole dimensions. Cosine and sine are multiplied by ``attention_factor``, by default
    ``0.1 ln(factor) + 1``, so scores are multiplied by its square.

    Example:
        >>> scaling = jattn.positions.YarnScaling(factor=4.0, original_length=512)
        >>> frequencies, attention_factor = jattn.positions.Rotary(scaling=scaling).frequencies(16)
        >>> (jattn.positions.Rotary().frequencies(16)[0] / frequencies).round(2).tolist()
        [1.0, 1.23, 1.6, 2.29, 4.0, 4.0, 4.0, 4.0]
        >>> round(attention_factor, 3)
        1.139

    Source: YaRN, https://arxiv.org/abs/2309.00071, section 3.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __call__(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        half = len(frequencies)

        def dimension(turns: float) -> float:
            # the (real-valued) index of the frequency that makes `turns` turns within original_length positions
            return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        interpolated = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0.0, 1.0)
        scaled = frequencies * (1.0 - interpolated) + frequencies / self.factor * interpolated
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return scaled, attention_factor


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """``scaling=`` of ``Rotary``: "dynamic NTK", a larger base for sequences longer than ``original_length``.

    The base is ``base * (factor * length / original_length - factor + 1) ^ (dim / (dim - 2))``. ``at_length`` sets
    ``length`` to the number of tokens in the call or the capacity of its cache; up to ``original_length``, nothing
    changes.

    Example:
        >>> rotary = jattn.positions.Rotary(scaling=jattn.positions.DynamicScaling(factor=2.0, original_length=512))
        >>> longer = jattn.positions.at_length(rotary, 1024)
        >>> (rotary.frequencies(16)[0] / longer.frequencies(16)[0]).round(2).tolist()
        [1.0, 1.17, 1.37, 1.6, 1.87, 2.19, 2.57, 3.0]

    Source: YaRN, https://arxiv.org/abs/2309.00071, appendix B.3.
    """

    factor: float
    original_length: int
    length: Length = 0

    def __call__(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        dim = 2 * len(frequencies)
        if self.length <= self.original_length or dim == 2:  # with two features, the only frequency is 1
            return frequencies, 1.0
        stretch = self.factor * self.length / self.original_length - self.factor + 1.0
        return (base * stretch ** (dim / (dim - 2))) ** (-np.arange(0, dim, 2) / dim), 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """``scaling=`` of ``Rotary``: LongRoPE, which divides each frequency by its own factor.

    For all tokens, the factors are ``short_factors`` if ``length`` is at most ``original_length`` tokens, and
    ``long_factors`` otherwise. ``at_length`` sets ``length`` to the number of tokens in the call or the capacity of its
    cache. Cosine and sine are multiplied by ``attention_factor``.

    Raises:
        ValueError: at a call, the number of factors is not half the number of rotated features.

    Example:
        >>> scaling = jattn.positions.LongRopeScaling((1.0, 1.0), (1.5, 4.0), original_length=512)
        >>> rotary = jattn.positions.Rotary(scaling=scaling)
        >>> longer = jattn.positions.at_length(rotary, 513)
        >>> (rotary.frequencies(4)[0] / longer.frequencies(4)[0]).tolist()
        [1.5, 4.0]

    Source: https://arxiv.org/abs/2402.13753, section 3; ``attention_factor``: Phi-3's published code.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    attention_factor: float = 1.0
    length: Length = 0

    def __call__(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        for factors in (self.short_factors, self.long_factors):
            if len(factors) != len(frequencies):
                raise ValueError(
                    f"LongRopeScaling: short_factors and long_factors must each have {len(frequencies)} entries, half "
                    f"the number of rotated features, got {len(self.short_factors)} and {len(self.long_factors)}"
                )
        short = self.short_factors == self.long_factors or self.length <= self.original_length
        return frequencies / np.asarray(self.short_factors if short else self.long_factors), self.attention_factor


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: rotates pairs of features by ``position * base^(-2i/dim)``.

    Feature ``i`` is paired with ``i + dim/2`` (the convention of GPT-NeoX, Llama's checkpoints on the hub and Flax).

    ``Rotary()(x, positions)`` takes ``x [..., T, N, H]`` and integers ``[T]`` or ``[..., T]``. It computes in at least
    float32 and returns an array of x's shape and dtype.

    Args:
        base: the base of the frequencies, larger than 1.
        fraction: the leading fraction of the head dim to rotate; the rest is unchanged.
        scaling: how to change the frequencies for long texts: ``LinearScaling``, ``Llama3Scaling``, ``YarnScaling``,
            ``DynamicScaling`` or ``LongRopeScaling``; None leaves them unchanged.

    Raises:
        ValueError: ``base`` is at most 1, ``fraction`` is not in (0, 1], or, at a call, shapes do not match.

    Example:
        >>> query, key = jax.random.normal(jax.random.key(0), (2, 4, 1, 8))  # [T,N,H]
        >>> rotary, positions = jattn.positions.Rotary(), jnp.arange(4)
        >>> now = jattn.attention_weights(rotary(query, positions), rotary(key, positions))
        >>> later = jattn.attention_weights(rotary(query, positions + 9), rotary(key, positions + 9))
        >>> np.allclose(now, later, atol=1e-2)  # scores depend on distances alone
        True

    Source: RoFormer, https://arxiv.org/abs/2104.09864.
    """

    base: float = 10000.0
    fraction: float = 1.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongRopeScaling | None = None

    def __post_init__(self):
        if not self.base > 1:
            raise ValueError(f"Rotary: base must be larger than 1, got {self.base}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"Rotary: fraction must lie in (0, 1], got {self.fraction}")

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """The angle per position of each feature pair, ``[dim/2]`` with dim = ``head_dim * fraction``, and the factor
        that multiplies cosine and sine.
        """
        dim = int(head_dim * self.fraction)
        if dim % 2 or dim == 0:
            raise ValueError(
                f"Rotary rotates pairs of features: head_dim * fraction must be even and positive, got "
                f"{head_dim} * {self.fraction} = {head_dim * self.fraction}"
            )
        frequencies = self.base ** (-np.arange(0, dim, 2) / dim)
        return (frequencies, 1.0) if self.scaling is None else self.scaling(frequencies, self.base)

    def __call__(self, x: Array, positions: ArrayLike) -> Array:
        """Rotates ``x [..., T, N, H]`` by ``positions [T]`` or ``[..., T]``."""
        if isinstance(positions, np.ndarray) and np.issubdtype(positions.dtype, np.integer):
            positions = to_int32("Rotary: positions", positions)  # jax.numpy would truncate to 32 bits
        positions = jnp.asarray(positions)
        if x.ndim < 3 or positions.shape != x.shape[:-2][-positions.ndim :] or positions.ndim == 0:
            raise ValueError(
                f"Rotary: x must be [..., T, N, H] and positions [T] or [..., T], got x of shape {x.shape} and "
                f"positions of shape {positions.shape} (one head [T, H]: pass x[:, None])"
            )
        frequencies, factor = self.frequencies(x.shape[-1])
        dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        angles = positions.astype(dtype)[..., None, None] * jnp.asarray(frequencies, dtype).reshape(
            (1,) * (positions.ndim + 1) + (-1,)
        )
        angles = angles.reshape((1,) * (x.ndim - angles.ndim) + angles.shape)
        cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
        half = len(frequencies)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        first, second = first.astype(dtype), second.astype(dtype)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


jax.tree_util.register_static(Rotary)  # holds only numbers, so it may be part of any pytree or module


def at_length(position: Any, length: Length) -> Any:
    """The ``Rotary`` with its frequencies for a text of ``length`` tokens; returns any other ``position`` unchanged.

    The modules and ``multi_head_attention`` call it with the number of tokens in a call or the capacity of its cache,
    so that a text processed in chunks is rotated like the whole. A ``Rotary`` called directly uses the frequencies for
    a short text.

    Example:
        >>> rotary = jattn.positions.Rotary(scaling=jattn.positions.DynamicScaling(factor=2.0, original_length=512))
        >>> jattn.positions.at_length(rotary, 1024).scaling.length
        1024
        >>> jattn.positions.at_length(jattn.positions.Rotary(), 1024) == jattn.positions.Rotary()
        True
    """
    scaling = position.scaling if isinstance(position, Rotary) else None
    if not isinstance(scaling, DynamicScaling | LongRopeScaling):
        return position
    if isinstance(scaling, LongRopeScaling) and scaling.short_factors == scaling.long_factors:
        return position
    return dataclasses.replace(position, scaling=dataclasses.replace(scaling, length=length))
