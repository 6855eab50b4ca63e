"""Attention with grouped queries: a plain reference, and the kernels that training may use instead."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mas_jax.config import ConfigError
from mas_jax.mesh import AXES, BATCH_AXES

# Queries that stand at once in `chunked`, and the rows up to which the reference is as good.
BLOCK = 512
# Of the TPU's vector registers: what the splash kernel's blocks must be multiples of.
LANES = 128


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    finite: bool = False,
) -> Float[Array, "B T N H"]:
    """Softmax attention of every query over the keys its mask row allows; a row that allows none gives zeros.

    Logits are scaled (by H ** -0.5 unless told otherwise) and then, with a `softcap`, squashed to cap * tanh(x / cap) as
    Gemma 2 has it. Masked values change no bit. `finite` promises that they are finite, and saves selecting NaN out of
    keys, values and queries that take no part (decoding: the cache would be copied for it each step).
    """
    batch, length, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    if not finite:
        # 0 * NaN is NaN, forwards in weights @ v and backwards in dlogits @ k and dlogits^T @ q.
        asked, answers = mask.any(axis=2)[:, :, None, None], mask.any(axis=1)[:, :, None, None]
        q, k, v = jnp.where(asked, q, 0), jnp.where(answers, k, 0), jnp.where(answers, v, 0)
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    group = heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    # [B, K, G*T, H] x [B, K, S, H]: one plain matrix product for each row and kv head.
    q = (q * scale).reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * length, head_dim)
    logits = jnp.einsum("bkqh,bskh->bkqs", q, k, preferred_element_type=accumulate)
    logits = logits.reshape(batch, kv_heads, group, length, keys)
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
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


def self_attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    kernel: str = "xla",
) -> Float[Array, "B T N H"]:
    """Causal attention inside segments, over the last `window` keys (the query's own among them) or, with 0, over all.

    Segment 0 is padding: nothing in it (NaN included) is read, and it gives zeros. `kernel` is one of KERNELS.
    """
    live = (segments > 0)[:, :, None, None]
    # With these zeros a kernel may let padding attend padding: the sum is zero.
    q, k, v = jnp.where(live, q, 0), jnp.where(live, k, 0), jnp.where(live, v, 0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return KERNELS[kernel](q, k, v, segments, scale=scale, window=window, softcap=softcap)


def _mask(
    segments: Int[Array, "B T"], window: int, queries: slice = slice(None), keys: slice = slice(None)
) -> Bool[Array, "B t s"]:
    """Which keys each query attends, for a block of queries and a block of keys."""
    rows = jnp.arange(segments.shape[1])
    ahead = rows[queries, None] - rows[None, keys]
    near = (ahead >= 0) & (ahead < window) if window else ahead >= 0
    return (segments[:, queries, None] == segments[:, None, keys]) & near[None]


def xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    *,
    scale: float,
    window: int,
    softcap: float,
) -> Float[Array, "B T N H"]:
    """The reference: all logits of a row at once."""
    return attend(q, k, v, _mask(segments, window), scale=scale, softcap=softcap, finite=True)


def chunked(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    *,
    scale: float,
    window: int,
    softcap: float,
    block: int = BLOCK,
) -> Float[Array, "B T N H"]:
    """The reference for one block of queries after another, with only the keys that the block may attend.

    Logits of one block stand at a time, and are recomputed backwards.
    """
    length = q.shape[1]
    if length <= block:
        return xla(q, k, v, segments, scale=scale, window=window, softcap=softcap)
    attend_block = jax.checkpoint(partial(attend, scale=scale, softcap=softcap, finite=True))
    out: list[Array] = []
    for start in range(0, length, block):
        end = min(start + block, length)
        first = max(0, start - window + 1) // LANES * LANES if window else 0
        queries, keys = slice(start, end), slice(first, end)
        mine = (q[:, queries], k[:, keys], v[:, keys])
        if out:
            # XLA would start all blocks at once: each waits for the one before, and backwards for the one after.
            mine, out[-1] = jax.lax.optimization_barrier((mine, out[-1]))
        out.append(attend_block(*mine, _mask(segments, window, queries, keys)))
    return jnp.concatenate(out, axis=1)


def cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    *,
    scale: float,
    window: int,
    softcap: float,
) -> Float[Array, "B T N H"]:
    """cuDNN's flash attention on NVIDIA GPUs: half precision, no soft cap, and a mask [B, 1, T, T] in memory."""
    if softcap:
        raise ConfigError("learner.attention", "cudnn", "it knows no soft cap: use chunked")
    mask = _mask(segments, window)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="cudnn")


def splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    *,
    scale: float,
    window: int,
    softcap: float,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """The Pallas kernel for TPUs, which skips blocks that no query may attend; rows are padded to a multiple of 128.

    Under a mesh each device attends its own rows and heads. `interpret` runs it on any platform, slowly.
    """
    length = q.shape[1]
    missing = -length % LANES
    if missing:
        q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
        segments = jnp.pad(segments, ((0, 0), (0, missing)))
    local = partial(_splash_on_one_device, window=window, softcap=softcap, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and tuple(mesh.axis_names) == AXES:
        rows = BATCH_AXES if q.shape[0] % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None
        ways = mesh.shape["tensor"]
        if q.shape[2] % ways == 0 and ways % k.shape[2] == 0:
            # Fewer key heads than devices: each device takes the one that its queries read.
            k, v = (jnp.repeat(x, ways // k.shape[2], axis=2) for x in (k, v))
        heads = "tensor" if k.shape[2] % ways == 0 else None
        spread = PartitionSpec(rows, None, heads, None)
        local = jax.shard_map(
            local,
            in_specs=(spread, spread, spread, PartitionSpec(rows, None)),
            out_specs=spread,
            check_vma=False,
        )
    return local(q * scale, k, v, segments)[:, :length]


def _splash_on_one_device(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    *,
    window: int,
    softcap: float,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    length, heads = q.shape[1:3]
    near = splash_attention_mask.LocalMask((length, length), (window - 1 if window else None, 0), offset=0)
    block = max(size for size in range(LANES, BLOCK + 1, LANES) if length % size == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([near] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(names, block)),
        attn_logits_soft_cap=softcap or None,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    ids = splash_attention_kernel.SegmentIds(segments, segments)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return jax.vmap(kernel)(q, k, v, ids).transpose(0, 2, 1, 3)


KERNELS: dict[str, Callable[..., Array]] = {"xla": xla, "chunked": chunked, "cudnn": cudnn, "splash": splash}


@runtime_checkable
class AttentionShape(Protocol):
    """What a model says of its attention."""

    @property
    def head_dim(self) -> int: ...
    @property
    def attention_softcap(self) -> float: ...


def choose(
    kernel: str, shape: AttentionShape, platform: str, lengths: tuple[int, ...], dtype: DTypeLike
) -> tuple[str, str]:
    """The name of the kernel to train with on rows of these lengths, and the reason in words.

    "auto" takes the fastest that the platform ("cpu", "gpu", "tpu") can run. ConfigError where a kernel asked for by
    name cannot work.
    """
    rows = f"rows of {max(lengths)} tokens on {platform}"
    obstacles = {name: _obstacle(name, shape, platform, lengths, dtype) for name in ("cudnn", "splash")}
    if kernel == "auto":
        fast = {"gpu": "cudnn", "tpu": "splash"}.get(platform)
        if fast and not obstacles[fast]:
            return fast, rows
        plain = "xla" if max(lengths) <= BLOCK else "chunked"
        return plain, f"{rows}; {fast} {obstacles[fast]}" if fast else rows
    if kernel not in KERNELS:
        raise ConfigError("learner.attention", kernel, f"use auto or one of {sorted(KERNELS)}")
    if obstacle := obstacles.get(kernel):
        raise ConfigError("learner.attention", kernel, f"{kernel} {obstacle}: use auto, chunked or xla")
    return kernel, rows


def _obstacle(name: str, shape: AttentionShape, platform: str, lengths: tuple[int, ...], dtype: DTypeLike) -> str:
    """Why a kernel cannot run here, or nothing."""
    needs = {"cudnn": "gpu", "splash": "tpu"}[name]
    if platform != needs:
        return f"needs a {needs.upper()}"
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if name == "splash":
        return "" if half or jnp.dtype(dtype) == jnp.float32 else f"does not compute in {jnp.dtype(dtype)}"
    if not half:
        return f"needs bfloat16 or float16, and this is {jnp.dtype(dtype)}"
    if shape.attention_softcap:
        return "knows no soft cap, and the model has one"
    if shape.head_dim % 8 or shape.head_dim > 128:
        return f"needs heads of a multiple of 8 up to 128, and these are {shape.head_dim}"
    if any(length % 2 for length in lengths):
        return "needs rows of even length"
    return ""
