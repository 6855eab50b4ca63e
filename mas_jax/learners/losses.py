"""Log-probs in, per-token loss out. Pure functions; masked places are selected away before the arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def safe_log_ratio(
    logprobs: Float[Array, "B T"], others: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """logprobs - others where masked in, exactly 0 (value and gradient) elsewhere, whatever stands there."""
    return jnp.where(mask, logprobs, 0) - jnp.where(mask, others, 0)


def ppo_clip(
    log_ratio: Float[Array, "B T"], advantage: Float[Array, "B T"], *, low: float, high: float
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], Bool[Array, "B T"]]:
    """-min(r A, clip(r, 1-low, 1+high) A), and where the lower and the upper bound were active.

    Schulman et al. 2017, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 8.
    """
    ratio = jnp.exp(log_ratio)
    bounded = jnp.clip(ratio, 1 - low, 1 + high)
    loss = -jnp.minimum(ratio * advantage, bounded * advantage)
    below, above = (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)
    return loss, below, above


def _k1(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return log_ratio


def _k2(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return log_ratio**2 / 2


def _k3(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.exp(-log_ratio) - 1 + log_ratio


# Estimators of KL(policy || other) at sampled tokens, of log_ratio = log policy - log other (joschu.net/blog/kl-approx.html).
KL: dict[str, Callable[[Float[Array, "B T"]], Float[Array, "B T"]]] = {"k1": _k1, "k2": _k2, "k3": _k3}
