"""Attention with grouped queries, in plain XLA: the reference for every faster kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    *,
    finite: bool = False,
) -> Float[Array, "B T N H"]:
    """Softmax attention of every query over the keys its mask row allows; a row that allows none gives zeros.

    Masked values change no bit. `finite` promises that they are finite, and saves selecting NaN out of keys, values and
    queries that take no part (decoding: the cache would be copied for it each step).
    """
    batch, length, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    if not finite:
        # 0 * NaN is NaN, forwards in weights @ v and backwards in dlogits @ k and dlogits^T @ q.
        asked, answers = mask.any(axis=2)[:, :, None, None], mask.any(axis=1)[:, :, None, None]
        q, k, v = jnp.where(asked, q, 0), jnp.where(answers, k, 0), jnp.where(answers, v, 0)
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    group = heads // kv_heads
    # [B, K, G*T, H] x [B, K, S, H]: one plain matrix product for each row and kv head.
    q = (q * head_dim**-0.5).reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * length, head_dim)
    logits = jnp.einsum("bkqh,bskh->bkqs", q, k, preferred_element_type=accumulate)
    logits = logits.reshape(batch, kv_heads, group, length, keys)
    allowed = mask[:, None, None]
    logits = jnp.where(allowed, logits, jnp.finfo(accumulate).min)
    # Softmax does not depend on the peak; to differentiate through the maximum cost half the backward pass on CPU.
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(allowed, jnp.exp(logits - peak), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1)).astype(v.dtype)
    weights = weights.reshape(batch, kv_heads, group * length, keys)
    out = jnp.einsum("bkqs,bskh->bkqh", weights, v)
    out = out.reshape(batch, kv_heads, group, length, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, head_dim)
