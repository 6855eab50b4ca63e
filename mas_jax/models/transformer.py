"""One decoder for the Qwen3 and Llama families: NNX modules inside, plain trees of arrays outside."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from mas_jax.config import ConfigError
from mas_jax.mesh import constrain_batch
from mas_jax.models.attention import attend

FAMILIES = ("qwen3", "llama")

# Nested dicts (lists, once unstacked) of arrays, or of what stands for them: shapes, shardings, axis names.
Params = dict[str, Any]
Cache = dict[str, list[Array]]
Rope = tuple[Float[Array, "B T H"], Float[Array, "B T H"]]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; ConfigError where it is one that no family has."""

    family: str
    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = True
    qk_norm: bool = False
    max_positions: int = 4096

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError("model.family", self.family, f"use one of {FAMILIES}")
        if self.heads % self.kv_heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"must divide heads = {self.heads}")
        if self.head_dim % 2:
            raise ConfigError("model.head_dim", self.head_dim, "rotary positions need an even head width")
        if self.qk_norm != (self.family == "qwen3"):
            raise ConfigError("model.qk_norm", self.qk_norm, "True for qwen3 and only for qwen3")


def _weight(key: Key[Array, ""], shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.truncated_normal(key, -3, 3, shape, dtype), axes=axes)


def _ones(size: int, axis: str, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jnp.ones((size,), dtype), axes=(axis,))


def project(x: Float[Array, "..."], weight: nnx.Param, inner: int = 1) -> Float[Array, "..."]:
    """x [B, T, *in] times weight [*in, *out] over the first `inner` axes of the weight, as one 2-D matrix product.

    XLA's CPU backend transposes the operands of any other contraction, backwards most of all.
    """
    w = weight[...].astype(x.dtype)
    rows, outer = x.shape[: x.ndim - inner], w.shape[inner:]
    width = 1
    for size in w.shape[:inner]:
        width *= size
    return (x.reshape(-1, width) @ w.reshape(width, -1)).reshape(*rows, *outer)


def rms_norm(x: Float[Array, "*R D"], scale: nnx.Param, eps: float) -> Float[Array, "*R D"]:
    """x over its root mean square, computed in float32 or wider, times scale."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.broadcast_to(scale[...].astype(x.dtype), x.shape)


def rope(config: ModelConfig, positions: Int[Array, "B T"], dtype: DTypeLike) -> Rope:
    """Cosines and (first half negated) sines [B, T, H] of the rotary angles, in float32 or wider."""
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=wide) / config.head_dim)
    angles = positions[:, :, None].astype(wide) * frequencies[None, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(x: Float[Array, "B T N H"], angles: Rope) -> Float[Array, "B T N H"]:
    """x with its first and second halves turned into one another by the rotary angles (Hugging Face's layout)."""
    cos, sin = angles
    first, second = jnp.split(x, 2, axis=-1)
    swapped = jnp.concatenate([second, first], axis=-1)
    return (x * cos[:, :, None] + swapped * sin[:, :, None]).astype(x.dtype)


class Attention(nnx.Module):
    """Projections around attention; which keys are attended is the caller's affair."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        q, k, v, o = jax.random.split(key, 4)
        width, heads, kv_heads, head_dim = config.width, config.heads, config.kv_heads, config.head_dim
        self.q = _weight(q, (width, heads, head_dim), ("embed", "heads", "head_dim"), dtype)
        self.k = _weight(k, (width, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), dtype)
        self.v = _weight(v, (width, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), dtype)
        self.o = _weight(o, (heads, head_dim, width), ("heads", "head_dim", "embed"), dtype)
        if config.qk_norm:
            self.q_norm, self.k_norm = _ones(head_dim, "head_dim", dtype), _ones(head_dim, "head_dim", dtype)
        self.config = config

    def qkv(
        self, x: Float[Array, "B T D"], angles: Rope
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Rotated queries and keys, and values."""
        q, k, v = project(x, self.q), project(x, self.k), project(x, self.v)
        if self.config.qk_norm:
            q, k = rms_norm(q, self.q_norm, self.config.norm_eps), rms_norm(k, self.k_norm, self.config.norm_eps)
        return rotate(q, angles), rotate(k, angles), v

    def out(self, mixed: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Heads back to the width of the residual stream."""
        return project(mixed, self.o, inner=2)


class Mlp(nnx.Module):
    """The gated feed-forward block."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        gate, up, down = jax.random.split(key, 3)
        self.gate = _weight(gate, (config.width, config.mlp), ("embed", "mlp"), dtype)
        self.up = _weight(up, (config.width, config.mlp), ("embed", "mlp"), dtype)
        self.down = _weight(down, (config.mlp, config.width), ("mlp", "embed"), dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """x through the block, without the residual."""
        return project(jax.nn.silu(project(x, self.gate)) * project(x, self.up), self.down)


class Layer(nnx.Module):
    """One decoder layer, in the two halves between which attention happens."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        attention, mlp = jax.random.split(key)
        self.attention_norm = _ones(config.width, "embed", dtype)
        self.attention = Attention(config, attention, dtype)
        self.mlp_norm = _ones(config.width, "embed", dtype)
        self.mlp = Mlp(config, mlp, dtype)
        self.eps = config.norm_eps

    def qkv(
        self, h: Float[Array, "B T D"], angles: Rope
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries, keys and values of the residual stream."""
        return self.attention.qkv(rms_norm(h, self.attention_norm, self.eps), angles)

    def finish(self, h: Float[Array, "B T D"], mixed: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The residual stream after this layer, given what attention mixed."""
        h = h + self.attention.out(mixed)
        return h + self.mlp(rms_norm(h, self.mlp_norm, self.eps))


class Ends(nnx.Module):
    """What stands before the first layer and after the last."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        embed, head = jax.random.split(key)
        self.embed = _weight(embed, (config.vocab, config.width), ("vocab", "embed"), dtype)
        self.final_norm = _ones(config.width, "embed", dtype)
        if not config.tied:
            self.lm_head = _weight(head, (config.width, config.vocab), ("embed", "vocab"), dtype)
        self.config = config

    def start(self, tokens: Int[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
        """Embeddings of the tokens."""
        return self.embed[...][tokens].astype(dtype)

    def finish(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The residual stream as the head reads it."""
        return rms_norm(h, self.final_norm, self.config.norm_eps)

    def logits(self, hidden: Float[Array, "*R D"], dtype: DTypeLike) -> Float[Array, "*R V"]:
        """Logits in float32 or wider."""
        wide = jnp.promote_types(dtype, jnp.float32)
        x, width = hidden.astype(dtype).reshape(-1, hidden.shape[-1]), self.config.vocab
        head, axis = (self.embed, 1) if self.config.tied else (self.lm_head, 0)
        out = jax.lax.dot_general(x, head[...].astype(dtype), (((1,), (axis,)), ((), ())), preferred_element_type=wide)
        return out.reshape(*hidden.shape[:-1], width)


@memoize
def _abstract_module(kind: type[nnx.Module], config: ModelConfig) -> nnx.Module:
    return nnx.eval_shape(lambda: kind(config, jax.random.key(0), jnp.float32))


def _bind(kind: type[nnx.Module], config: ModelConfig, params: Params) -> nnx.Module:
    """The module of this kind with `params` for its weights."""
    return nnx.merge(nnx.graphdef(_abstract_module(kind, config)), params)


def _bind_ends(config: ModelConfig, params: Params) -> Ends:
    return _bind(Ends, config, {name: leaf for name, leaf in params.items() if name != "layers"})


def _arrays(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module))


def init(config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike = jnp.float32) -> Params:
    """Fresh weights, truncated normal of deviation about 0.02; layers stacked on a leading axis."""
    ends, layers = jax.random.split(key)
    params = _arrays(Ends(config, ends, dtype))
    stacked = jax.vmap(lambda one: _arrays(Layer(config, one, dtype)))(jax.random.split(layers, config.layers))
    return params | {"layers": stacked}


def abstract(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The tree of `init` with ShapeDtypeStruct leaves; nothing is computed."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))


def logical_axes(config: ModelConfig) -> Params:
    """The tree of `init` with a tuple of logical axis names for each array."""

    def axes(kind: type[nnx.Module], lead: tuple[str, ...]) -> Params:
        state = nnx.state(_abstract_module(kind, config))
        return nnx.to_pure_dict(
            jax.tree.map(
                lambda param: lead + param.get_metadata()["axes"],
                state,
                is_leaf=lambda node: isinstance(node, nnx.Param),
            )
        )

    return axes(Ends, ()) | {"layers": axes(Layer, ("layers",))}


def unstack(params: Params) -> Params:
    """params with `layers` as a list of per-layer trees, as decoding reads them; can be jitted."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    return params | {"layers": [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(count)]}


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    dtype: DTypeLike,
    remat: bool = False,
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm; each token attends back inside its own segment, and segment 0 is padding.

    Padding reads zeros and gives zeros, so nothing in it (NaN included) reaches a loss or a gradient. Stacked layers
    are scanned, unstacked ones are a loop; `remat` recomputes each layer in the backward pass.
    """
    live = (segments > 0)[:, :, None]
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None]
    mask = (segments[:, :, None] == segments[:, None, :]) & live & causal
    angles = rope(config, positions, dtype)
    ends = _bind_ends(config, params)
    # Selected before any arithmetic, as 0 * NaN is NaN in the gradient of the weights.
    h = constrain_batch(jnp.where(live, ends.start(tokens, dtype), 0))

    def layer(h: Float[Array, "B T D"], weights: Params) -> tuple[Float[Array, "B T D"], None]:
        bound = _bind(Layer, config, weights)
        return constrain_batch(bound.finish(h, attend(*bound.qkv(h, angles), mask, finite=True))), None

    step: Callable = jax.checkpoint(layer) if remat else layer
    if isinstance(params["layers"], list):
        for weights in params["layers"]:
            h, _ = step(h, weights)
    else:
        h, _ = jax.lax.scan(step, h, params["layers"])
    return jnp.where(live, ends.finish(h), 0)


def init_cache(config: ModelConfig, rows: int, length: int, dtype: DTypeLike) -> Cache:
    """An empty cache: under "k" and "v" one array [rows, length, K, H] for each layer."""
    shape = (rows, length, config.kv_heads, config.head_dim)
    return {name: [jnp.zeros(shape, dtype) for _ in range(config.layers)] for name in ("k", "v")}


def _write(
    cache: Float[Array, "B S K H"], new: Float[Array, "B c K H"], start: Int[Array, "B"]
) -> Float[Array, "B S K H"]:
    """The cache with `new` at positions start.. of each row."""

    def place(row: Array, chunk: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice(row, chunk, (at, 0, 0))

    return jax.vmap(place)(cache, new.astype(cache.dtype), start)


def forward_cached(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B c"],
    start: Int[Array, "B"],
    cache: Cache,
    *,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B c D"], Cache, Cache]:
    """Hidden states of c tokens at positions start..start+c-1, the cache with them written in, and what was written.

    `params` are unstacked. A query at position p attends the cache positions up to p; the caller keeps start + c within
    the cache, whose contents must be finite everywhere.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=start.dtype)[None]
    slots = jnp.arange(cache["k"][0].shape[1], dtype=start.dtype)
    mask = slots[None, None] <= positions[:, :, None]
    angles = rope(config, positions, dtype)
    ends = _bind_ends(config, params)
    h = ends.start(tokens, dtype)
    filled: Cache = {"k": [], "v": []}
    chunk: Cache = {"k": [], "v": []}
    for weights, old_k, old_v in zip(params["layers"], cache["k"], cache["v"], strict=True):
        bound = _bind(Layer, config, weights)
        q, k, v = bound.qkv(h, angles)
        chunk["k"].append(k.astype(old_k.dtype))
        chunk["v"].append(v.astype(old_v.dtype))
        filled["k"].append(_write(old_k, k, start))
        filled["v"].append(_write(old_v, v, start))
        keys, values = filled["k"][-1].astype(dtype), filled["v"][-1].astype(dtype)
        h = bound.finish(h, attend(q, keys, values, mask, finite=True))
    return ends.finish(h), filled, chunk


def head_logits(
    config: ModelConfig, params: Params, hidden: Float[Array, "*R D"], *, dtype: DTypeLike
) -> Float[Array, "*R V"]:
    """Logits of hidden states, multiplied in `dtype`, given in float32 (float64 for float64)."""
    return _bind_ends(config, params).logits(hidden, dtype)


def token_logprobs(
    config: ModelConfig,
    params: Params,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    temperature: Float[Array, "B T"],
    *,
    dtype: DTypeLike,
    chunk: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each target under softmax(logits / temperature) at its own index, and that softmax's entropy.

    Logits stand for about `chunk` tokens at a time and are recomputed backwards. A negative target asks nothing: it
    gets zeros, and neither its hidden state nor its temperature is read.
    """
    asked = targets >= 0
    hidden = jnp.where(asked[:, :, None], hidden, 0)
    temperature = jnp.where(asked, temperature, 1).astype(jnp.promote_types(dtype, jnp.float32))
    ends = _bind_ends(config, params)

    def score(
        hidden: Float[Array, "B C D"], targets: Int[Array, "B C"], temperature: Float[Array, "B C"]
    ) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
        logits = ends.logits(hidden, dtype) / temperature[:, :, None]
        total = jax.nn.logsumexp(logits, axis=-1)
        # A sum over a comparison, not a gather: its gradient is no scatter, and the vocabulary may be sharded.
        chosen = jnp.arange(logits.shape[-1])[None, None] == targets[:, :, None]
        logprobs = jnp.sum(jnp.where(chosen, logits, 0), axis=-1) - total
        entropy = total - jnp.sum(jnp.exp(logits - total[:, :, None]) * logits, axis=-1)
        return logprobs, entropy

    rows, length = targets.shape
    if rows * length <= chunk:
        logprobs, entropy = score(hidden, targets, temperature)
    else:
        # Cut along the length: each piece keeps every row, so a batch spread over devices stays spread.
        piece = max(1, chunk // rows)
        count = -(-length // piece)

        def cut(x: Array, fill: int = 0) -> Array:
            widths = [(0, 0), (0, count * piece - length)] + [(0, 0)] * (x.ndim - 2)
            padded = jnp.pad(x, widths, constant_values=fill)
            return jnp.moveaxis(padded.reshape(rows, count, piece, *x.shape[2:]), 1, 0)

        pieces = (cut(hidden), cut(targets), cut(temperature, fill=1))
        _, out = jax.lax.scan(lambda carry, xs: (carry, jax.checkpoint(score)(*xs)), None, pieces)
        logprobs, entropy = (jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length] for x in out)
    return jnp.where(asked, logprobs, 0), jnp.where(asked, entropy, 0)
