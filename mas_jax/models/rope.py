"""Rotary positions, plain and stretched for contexts longer than the ones a model was pretrained on."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mas_jax.config import ConfigError

Angles = tuple[Float[Array, "B T H"], Float[Array, "B T H"]]


@dataclass(frozen=True)
class Rope:
    """The base of the rotary frequencies and how they are stretched; ConfigError for a scaling we do not compute.

    `low` and `high` bound the ramp between stretched and kept frequencies: low_freq_factor and high_freq_factor of
    llama3, beta_slow and beta_fast of yarn. `magnitude` multiplies sines and cosines (yarn's attention factor).
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low: float = 1.0
    high: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ConfigError("model.rope.scaling", self.scaling, f"use one of {sorted(SCALINGS)}")
        if not (1 < self.theta < math.inf and 0 < self.factor < math.inf and 0 < self.magnitude < math.inf):
            raise ConfigError("model.rope", self, "theta must be above 1, factor and magnitude positive")
        if self.scaling in ("llama3", "yarn") and not (self.original_positions > 0 and self.high > self.low > 0):
            remedy = "needs original_positions, and 0 < low < high for the ramp between kept and stretched frequencies"
            raise ConfigError("model.rope", self, remedy)


def frequencies(rope: Rope, head_dim: int, dtype: DTypeLike) -> Float[Array, " half"]:
    """Radians a position turns each of head_dim / 2 pairs by, computed in `dtype`."""
    plain = 1.0 / rope.theta ** (jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    return SCALINGS[rope.scaling](rope, head_dim, plain)


def _linear(rope: Rope, head_dim: int, plain: Array) -> Array:
    """Position interpolation (Chen et al., 2023, arXiv:2306.15595): every frequency over the factor."""
    return plain / rope.factor


def _llama3(rope: Rope, head_dim: int, plain: Array) -> Array:
    """Llama 3.1: wavelengths beyond original / low are stretched, those within original / high kept, linear between."""
    turns = rope.original_positions * plain / (2 * math.pi)
    kept = jnp.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(rope: Rope, head_dim: int, plain: Array) -> Array:
    """YaRN (Peng et al., 2023, arXiv:2309.00071, section 3.2): a ramp over the pairs, by their turns in the original context."""

    def pair(turns: float) -> float:
        """The pair that makes this many turns over the original positions."""
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.high), pair(rope.low)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    stretched = jnp.clip((jnp.arange(plain.size, dtype=plain.dtype) - first) / width, 0, 1)
    return stretched * plain / rope.factor + (1 - stretched) * plain


SCALINGS: dict[str, Callable[[Rope, int, Array], Array]] = {
    "default": lambda rope, head_dim, plain: plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def rotary_angles(rope: Rope | None, head_dim: int, positions: Int[Array, "B T"], dtype: DTypeLike) -> Angles:
    """Cosines and (first half negated) sines [B, T, H] of the rotary angles in float32 or wider; None turns nothing."""
    wide = jnp.promote_types(dtype, jnp.float32)
    if rope is None:
        shape = (*positions.shape, head_dim)
        return jnp.ones(shape, wide), jnp.zeros(shape, wide)
    angles = positions[:, :, None].astype(wide) * frequencies(rope, head_dim, wide)[None, None]
    sin, cos = jnp.sin(angles) * rope.magnitude, jnp.cos(angles) * rope.magnitude
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(x: Float[Array, "B T N H"], angles: Angles) -> Float[Array, "B T N H"]:
    """x with its first and second halves turned into one another by the rotary angles (Hugging Face's layout)."""
    cos, sin = angles
    first, second = jnp.split(x, 2, axis=-1)
    swapped = jnp.concatenate([second, first], axis=-1)
    return (x * cos[:, :, None] + swapped * sin[:, :, None]).astype(x.dtype)
