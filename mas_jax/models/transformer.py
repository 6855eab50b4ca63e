"""One decoder for every family: NNX modules inside, plain trees of arrays outside.

It knows features (biases, windows, soft caps, ...), not families: which family has which is `models/families.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as memoize
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from mas_jax.config import ConfigError
from mas_jax.mesh import Rules, constrain_batch, fitted, shardings
from mas_jax.models.attention import attend, self_attend
from mas_jax.models.rope import Angles, Rope, rotary_angles, rotate

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}

# 128 MiB in float32. Backwards several arrays of that size stand at once, and with a vocabulary of 262,144 that is 128 tokens.
LOGITS_AT_ONCE = 2**25

# Nested dicts (lists, once unstacked) of arrays, or of what stands for them: shapes, shardings, axis names.
Params = dict[str, Any]
Cache = dict[str, list[Array]]


@dataclass(frozen=True)
class LayerKind:
    """How a layer sees positions: its rotary embedding (None: none), and how many keys back it attends (0: all)."""

    rope: Rope | None = Rope()
    window: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the features of a decoder; ConfigError where they contradict each other."""

    family: str
    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float = 1e-6
    tied: bool = True
    max_positions: int = 4096
    kinds: tuple[LayerKind, ...] = (LayerKind(),)
    """The kinds of layer that the model mixes."""
    pattern: tuple[int, ...] = ()
    """For each layer the index of its kind; empty where there is only one."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Normalise each head's queries and keys before they are rotated."""
    sandwich_norms: bool = False
    """Normalise also what attention and the feed-forward block add to the residual stream."""
    zero_centred_norms: bool = False
    """A norm multiplies by 1 + its weight, in float32."""
    activation: str = "silu"
    attention_scale: float | None = None
    """What logits of attention are multiplied by; None: head_dim ** -0.5."""
    attention_softcap: float = 0.0
    """Squash logits of attention x to cap * tanh(x / cap); 0: leave them."""
    final_softcap: float = 0.0
    """The same for the logits over the vocabulary."""
    scaled_embeddings: bool = False
    """Multiply embeddings by width ** 0.5, rounded to the precision of compute."""
    experts: int = 0
    """Feed-forward blocks of each layer, of width `mlp`, among which a router chooses for every token; 0: one for all."""
    experts_per_token: int = 0
    normed_gates: bool = False
    """Scale the weights of the chosen experts to sum to 1."""

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "width", "heads", "kv_heads", "head_dim", "mlp", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}", getattr(self, name), "must be positive")
        if self.heads % self.kv_heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"must divide heads = {self.heads}")
        if self.head_dim % 2:
            raise ConfigError("model.head_dim", self.head_dim, "rotary positions need an even head width")
        for name in ("norm_eps", "attention_softcap", "final_softcap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name}", getattr(self, name), "must be a number, and not negative")
        if self.attention_scale is not None and not 0 < self.attention_scale < math.inf:
            raise ConfigError("model.attention_scale", self.attention_scale, "must be positive")
        if self.activation not in ACTIVATIONS:
            raise ConfigError("model.activation", self.activation, f"use one of {sorted(ACTIVATIONS)}")
        if not 0 <= self.experts_per_token <= self.experts or bool(self.experts) != bool(self.experts_per_token):
            remedy = f"choose 1 to {self.experts} of the {self.experts} experts" if self.experts else "needs experts"
            raise ConfigError("model.experts_per_token", self.experts_per_token, remedy)
        if any(kind.window < 0 for kind in self.kinds):
            raise ConfigError("model.kinds", self.kinds, "a window is a number of keys, or 0 for all")
        named = self.pattern or (0,) * self.layers
        if len(named) != self.layers or not set(named) <= set(range(len(self.kinds))):
            remedy = f"give for each of {self.layers} layers an index into the {len(self.kinds)} kinds"
            raise ConfigError("model.pattern", self.pattern, remedy)

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """For each layer the index of its kind."""
        return self.pattern or (0,) * self.layers


def _weight(key: Key[Array, ""], shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.truncated_normal(key, -3, 3, shape, dtype), axes=axes)


def _bias(wanted: bool, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param | None:
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes) if wanted else None


def _norm(config: ModelConfig, size: int, axis: str, dtype: DTypeLike) -> nnx.Param:
    fill = jnp.zeros if config.zero_centred_norms else jnp.ones
    return nnx.Param(fill((size,), dtype), axes=(axis,))


def project(
    x: Float[Array, "..."], weight: nnx.Param, bias: nnx.Param | None = None, inner: int = 1
) -> Float[Array, "..."]:
    """x [B, T, *in] times weight [*in, *out] over the first `inner` axes of the weight, as one 2-D matrix product.

    XLA's CPU backend transposes the operands of any other contraction, backwards most of all.
    """
    w = weight[...].astype(x.dtype)
    rows, outer = x.shape[: x.ndim - inner], w.shape[inner:]
    width = 1
    for size in w.shape[:inner]:
        width *= size
    out = (x.reshape(-1, width) @ w.reshape(width, -1)).reshape(*rows, *outer)
    return out if bias is None else out + jnp.broadcast_to(bias[...].astype(x.dtype), out.shape)


def rms_norm(config: ModelConfig, x: Float[Array, "*R D"], scale: nnx.Param) -> Float[Array, "*R D"]:
    """x over its root mean square, computed in float32 or wider, times scale (1 + scale, where norms are zero-centred)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_eps)
    if config.zero_centred_norms:
        return (normed * (1 + jnp.broadcast_to(scale[...].astype(wide.dtype), x.shape))).astype(x.dtype)
    return normed.astype(x.dtype) * jnp.broadcast_to(scale[...].astype(x.dtype), x.shape)


class Attention(nnx.Module):
    """Projections around attention; which keys are attended is the caller's affair."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        q, k, v, o = jax.random.split(key, 4)
        width, heads, kv_heads, head_dim = config.width, config.heads, config.kv_heads, config.head_dim
        self.q = _weight(q, (width, heads, head_dim), ("embed", "heads", "head_dim"), dtype)
        self.k = _weight(k, (width, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), dtype)
        self.v = _weight(v, (width, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), dtype)
        self.o = _weight(o, (heads, head_dim, width), ("heads", "head_dim", "embed"), dtype)
        biased = config.qkv_bias
        self.q_bias = _bias(biased, (heads, head_dim), ("heads", "head_dim"), dtype)
        self.k_bias = _bias(biased, (kv_heads, head_dim), ("kv_heads", "head_dim"), dtype)
        self.v_bias = _bias(biased, (kv_heads, head_dim), ("kv_heads", "head_dim"), dtype)
        self.o_bias = _bias(config.o_bias, (width,), ("embed",), dtype)
        if config.qk_norm:
            self.q_norm = _norm(config, head_dim, "head_dim", dtype)
            self.k_norm = _norm(config, head_dim, "head_dim", dtype)
        self.config = config

    def qkv(
        self, x: Float[Array, "B T D"], angles: Angles
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Rotated queries and keys, and values."""
        q, k = project(x, self.q, self.q_bias), project(x, self.k, self.k_bias)
        v = project(x, self.v, self.v_bias)
        if self.config.qk_norm:
            q, k = rms_norm(self.config, q, self.q_norm), rms_norm(self.config, k, self.k_norm)
        return rotate(q, angles), rotate(k, angles), v

    def out(self, mixed: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Heads back to the width of the residual stream."""
        return project(mixed, self.o, self.o_bias, inner=2)


class Mlp(nnx.Module):
    """The gated feed-forward block."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        gate, up, down = jax.random.split(key, 3)
        self.gate = _weight(gate, (config.width, config.mlp), ("embed", "mlp"), dtype)
        self.up = _weight(up, (config.width, config.mlp), ("embed", "mlp"), dtype)
        self.down = _weight(down, (config.mlp, config.width), ("mlp", "embed"), dtype)
        self.gate_bias = _bias(config.mlp_bias, (config.mlp,), ("mlp",), dtype)
        self.up_bias = _bias(config.mlp_bias, (config.mlp,), ("mlp",), dtype)
        self.down_bias = _bias(config.mlp_bias, (config.width,), ("embed",), dtype)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """x through the block, without the residual."""
        gate = ACTIVATIONS[self.activation](project(x, self.gate, self.gate_bias))
        return project(gate * project(x, self.up, self.up_bias), self.down, self.down_bias)


class Experts(nnx.Module):
    """Gated feed-forward blocks of which a router gives each token to the few it weighs most (Qwen3-MoE)."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        router, gate, up, down = jax.random.split(key, 4)
        experts, width, mlp = config.experts, config.width, config.mlp
        self.router = _weight(router, (width, experts), ("embed", "experts"), dtype)
        self.gate = _weight(gate, (experts, width, mlp), ("experts", "embed", "mlp"), dtype)
        self.up = _weight(up, (experts, width, mlp), ("experts", "embed", "mlp"), dtype)
        self.down = _weight(down, (experts, mlp, width), ("experts", "mlp", "embed"), dtype)
        self.config = config

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """x through its experts, weighted, without the residual."""
        config, each = self.config, self.config.experts_per_token
        rows = x.reshape(-1, config.width)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        chances = jax.nn.softmax(project(rows, self.router).astype(wide), axis=-1)
        weights, chosen = jax.lax.top_k(chances, each)
        if config.normed_gates:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        # Rows in the order of their experts, each as often as it was given to one.
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=config.experts).astype(jnp.int32)
        taken = rows[order // each]
        gate, up, down = (matrix[...].astype(x.dtype) for matrix in (self.gate, self.up, self.down))
        hidden = ACTIVATIONS[config.activation](jax.lax.ragged_dot(taken, gate, sizes))
        out = jax.lax.ragged_dot(hidden * jax.lax.ragged_dot(taken, up, sizes), down, sizes)
        out = out[jnp.argsort(order)].reshape(-1, each, config.width)
        return jnp.sum(out * weights.astype(x.dtype)[:, :, None], axis=1).reshape(x.shape)


class Layer(nnx.Module):
    """One decoder layer, in the two halves between which attention happens."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        attention, mlp = jax.random.split(key)
        self.attention_norm = _norm(config, config.width, "embed", dtype)
        self.attention = Attention(config, attention, dtype)
        self.mlp_norm = _norm(config, config.width, "embed", dtype)
        if config.experts:
            self.experts = Experts(config, mlp, dtype)
        else:
            self.mlp = Mlp(config, mlp, dtype)
        if config.sandwich_norms:
            self.attention_post_norm = _norm(config, config.width, "embed", dtype)
            self.mlp_post_norm = _norm(config, config.width, "embed", dtype)
        self.config = config

    def qkv(
        self, h: Float[Array, "B T D"], angles: Angles
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries, keys and values of the residual stream."""
        return self.attention.qkv(rms_norm(self.config, h, self.attention_norm), angles)

    def finish(self, h: Float[Array, "B T D"], mixed: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The residual stream after this layer, given what attention mixed."""
        config = self.config
        added = self.attention.out(mixed)
        h = h + (rms_norm(config, added, self.attention_post_norm) if config.sandwich_norms else added)
        added = (self.experts if config.experts else self.mlp)(rms_norm(config, h, self.mlp_norm))
        return h + (rms_norm(config, added, self.mlp_post_norm) if config.sandwich_norms else added)


class Ends(nnx.Module):
    """What stands before the first layer and after the last."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike) -> None:
        embed, head = jax.random.split(key)
        self.embed = _weight(embed, (config.vocab, config.width), ("vocab", "embed"), dtype)
        self.final_norm = _norm(config, config.width, "embed", dtype)
        if not config.tied:
            self.lm_head = _weight(head, (config.width, config.vocab), ("embed", "vocab"), dtype)
        self.config = config

    def start(self, tokens: Int[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
        """Embeddings of the tokens."""
        embedded = self.embed[...][tokens].astype(dtype)
        return embedded * jnp.asarray(self.config.width**0.5, dtype) if self.config.scaled_embeddings else embedded

    def finish(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The residual stream as the head reads it."""
        return rms_norm(self.config, h, self.final_norm)

    def logits(self, hidden: Float[Array, "*R D"], dtype: DTypeLike) -> Float[Array, "*R V"]:
        """Logits in float32 or wider."""
        wide = jnp.promote_types(dtype, jnp.float32)
        x, width = hidden.astype(dtype).reshape(-1, hidden.shape[-1]), self.config.vocab
        head, axis = (self.embed, 1) if self.config.tied else (self.lm_head, 0)
        out = jax.lax.dot_general(x, head[...].astype(dtype), (((1,), (axis,)), ((), ())), preferred_element_type=wide)
        if cap := self.config.final_softcap:
            out = cap * jnp.tanh(out / cap)
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


def param_shardings(config: ModelConfig, mesh: Mesh, rules: Rules) -> Params:
    """The tree of `init` with a NamedSharding for each array."""
    return shardings(logical_axes(config), mesh, fitted(rules, config, mesh))


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
    kernel: str = "xla",
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm; each token attends back inside its own segment, and segment 0 is padding.

    Padding reads zeros and gives zeros, so nothing in it (NaN included) reaches a loss or a gradient. Stacked layers
    are scanned, unstacked ones are a loop; `remat` recomputes each layer in the backward pass; `kernel` is one of
    `attention.KERNELS`.
    """
    live = (segments > 0)[:, :, None]
    ropes, windows, seen = _by_layer(config)
    angles = [rotary_angles(rope, config.head_dim, positions, dtype) for rope in ropes]
    attention = [partial(_self_attend, config, kernel, window, segments) for window in windows]
    ends = _bind_ends(config, params)
    # Selected before any arithmetic, as 0 * NaN is NaN in the gradient of the weights.
    h = constrain_batch(jnp.where(live, ends.start(tokens, dtype), 0))

    def layer(h: Float[Array, "B T D"], weights: Params, angles: Angles, mix: Callable) -> Float[Array, "B T D"]:
        bound = _bind(Layer, config, weights)
        return constrain_batch(bound.finish(h, mix(*bound.qkv(h, angles))))

    if isinstance(params["layers"], list):
        for weights, (rope, window) in zip(params["layers"], seen, strict=True):
            step = partial(layer, angles=angles[rope], mix=attention[window])
            h = (jax.checkpoint(step) if remat else step)(h, weights)
        return jnp.where(live, ends.finish(h), 0)

    # One body for all layers: where they differ, each picks its angles and its attention by number.
    cosines, sines = (jnp.stack(both) for both in zip(*angles, strict=True))

    def scanned(h: Float[Array, "B T D"], own: tuple[Params, Array, Array]) -> tuple[Float[Array, "B T D"], None]:
        weights, rope, window = own
        mix = attention[0] if len(attention) == 1 else partial(jax.lax.switch, window, attention)
        picked = angles[0] if len(angles) == 1 else (cosines[rope], sines[rope])
        return layer(h, weights, picked, mix), None

    numbers = jnp.asarray(seen, jnp.int32)
    body: Callable = jax.checkpoint(scanned) if remat else scanned
    h, _ = jax.lax.scan(body, h, (params["layers"], numbers[:, 0], numbers[:, 1]))
    return jnp.where(live, ends.finish(h), 0)


def _by_layer(config: ModelConfig) -> tuple[list[Rope | None], list[int], list[tuple[int, int]]]:
    """The distinct rotary embeddings and windows of a model, and for each layer the numbers of its own."""
    ropes = list(dict.fromkeys(kind.rope for kind in config.kinds))
    windows = list(dict.fromkeys(kind.window for kind in config.kinds))
    kinds = [config.kinds[number] for number in config.kind_of_layer]
    return ropes, windows, [(ropes.index(kind.rope), windows.index(kind.window)) for kind in kinds]


def _self_attend(
    config: ModelConfig,
    kernel: str,
    window: int,
    segments: Int[Array, "B T"],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
) -> Float[Array, "B T N H"]:
    return self_attend(
        q, k, v, segments, scale=config.attention_scale, window=window, softcap=config.attention_softcap, kernel=kernel
    )


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

    `params` are unstacked. A query at position p attends the cache positions up to p (from p - window + 1, where the
    layer has one); the caller keeps start + c within the cache, whose contents must be finite everywhere.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=start.dtype)[None]
    slots = jnp.arange(cache["k"][0].shape[1], dtype=start.dtype)
    ropes, windows, seen = _by_layer(config)
    angles = [rotary_angles(rope, config.head_dim, positions, dtype) for rope in ropes]
    past = slots[None, None] <= positions[:, :, None]
    masks = [past & (slots[None, None] > positions[:, :, None] - w) if w else past for w in windows]
    ends = _bind_ends(config, params)
    h = ends.start(tokens, dtype)
    filled: Cache = {"k": [], "v": []}
    chunk: Cache = {"k": [], "v": []}
    for weights, old_k, old_v, (rope, window) in zip(params["layers"], cache["k"], cache["v"], seen, strict=True):
        bound = _bind(Layer, config, weights)
        q, k, v = bound.qkv(h, angles[rope])
        chunk["k"].append(k.astype(old_k.dtype))
        chunk["v"].append(v.astype(old_v.dtype))
        filled["k"].append(_write(old_k, k, start))
        filled["v"].append(_write(old_v, v, start))
        keys, values = filled["k"][-1].astype(dtype), filled["v"][-1].astype(dtype)
        mixed = attend(
            q, keys, values, masks[window], scale=config.attention_scale, softcap=config.attention_softcap, finite=True
        )
        h = bound.finish(h, mixed)
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
    chunk: int | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each target under softmax(logits / temperature) at its own index, and that softmax's entropy.

    Logits stand for about `chunk` tokens at a time (None: for LOGITS_AT_ONCE on each device) and are recomputed
    backwards. A negative target asks nothing: it gets zeros, and neither its hidden state nor its temperature is read.
    """
    if chunk is None:
        mesh = jax.sharding.get_abstract_mesh()
        chunk = max(64, LOGITS_AT_ONCE // config.vocab) * (1 if mesh.empty else mesh.size)
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
