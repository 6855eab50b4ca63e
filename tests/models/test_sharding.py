"""Every family on eight devices: the loss, the gradients and the decoding of one, in float64."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mas_jax.mesh import BATCH_AXES, LEARNER_RULES, ROLLOUT_RULES, batch_sharding, make_mesh, shardings
from mas_jax.models import hf, transformer

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = sorted(GOLDENS.glob("*/config.json"))
# One model of each family, the last by name; some have a head of their own, some share the embedding.
NAMES = sorted({json.loads(path.read_text())["model_type"]: path.parent.name for path in MODELS}.values())
MESHES = [(8, 1, 1), (2, 2, 2), (1, 4, 2)]
ROWS, LENGTH = 8, 32
CHUNK, CONTEXT = 16, 32
# Nearly all of the time goes into compiling.
QUICK = {"xla_backend_optimization_level": 0}


def packed(vocab):
    """Rows of two sequences and padding, no two rows alike: tokens, positions, segments, targets, and two weights a token."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (ROWS, LENGTH))
    at = np.arange(LENGTH)[None]
    first, last = 9 + 2 * np.arange(ROWS)[:, None], LENGTH - np.arange(ROWS)[:, None]
    segments = np.where(at < first, 1, np.where(at < last, 2, 0))
    positions = np.where(at < first, at, at - first)
    following = np.roll(segments, -1, axis=1)
    targets = np.where((segments > 0) & (segments == following), np.roll(tokens, -1, axis=1), -1)
    targets[:, -1] = -1
    return tokens, positions, segments, targets, rng.normal(size=(ROWS, LENGTH)), rng.normal(size=(ROWS, LENGTH))


@jax.jit(static_argnums=0, compiler_options=QUICK)
@partial(jax.value_and_grad, argnums=1)
def loss_and_gradient(config, params, tokens, positions, segments, targets, value, spread):
    hidden = transformer.forward(config, params, tokens, positions, segments, dtype=jnp.float64, remat=True)
    ones = jnp.ones(tokens.shape, jnp.float64)
    logprobs, entropy = transformer.token_logprobs(
        config, params, hidden, targets, ones, dtype=jnp.float64, chunk=ROWS * LENGTH // 4
    )
    return jnp.sum(logprobs * value + entropy * spread)


@jax.jit(static_argnums=0, compiler_options=QUICK)
def prefill_and_decode(config, params, tokens, cache):
    """Logits of the last token of a chunk and of the token after it, and the cache."""
    params, start = transformer.unstack(params), jnp.zeros(ROWS, int)
    chunk, cache, _ = transformer.forward_cached(config, params, tokens[:, :CHUNK], start, cache, dtype=jnp.float64)
    token = tokens[:, CHUNK : CHUNK + 1]
    step, cache, _ = transformer.forward_cached(config, params, token, start + CHUNK, cache, dtype=jnp.float64)
    hidden = jnp.concatenate([chunk[:, -1:], step], axis=1)
    return transformer.head_logits(config, params, hidden, dtype=jnp.float64), cache


@pytest.fixture(scope="module", params=NAMES)
def alone(request):
    """A model, and what one device computes with it."""
    with jax.enable_x64(True):
        config, params = hf.load(GOLDENS / request.param, dtype=jnp.float64)
        batch = packed(config.vocab)
        cache = transformer.init_cache(config, ROWS, CONTEXT, jnp.float64)
        learned = loss_and_gradient(config, params, *batch)
        sampled = prefill_and_decode(config, params, batch[0], cache)
        return config, *jax.device_get((params, learned, sampled))


def shard_shapes(params):
    return {
        "/".join(part.key for part in path): leaf.addressable_shards[0].data.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def matrices(config, fsdp, tensor):
    """The part of each matrix that one device holds where width lies over `fsdp` devices, and the rest over `tensor`."""
    layers, width, head_dim = config.layers, config.width // fsdp, config.head_dim
    heads, kv_heads, mlp, vocab = (size // tensor for size in (config.heads, config.kv_heads, config.mlp, config.vocab))
    parts = {
        "embed": (vocab, width),
        "layers/attention/q": (layers, width, heads, head_dim),
        "layers/attention/k": (layers, width, kv_heads, head_dim),
        "layers/attention/v": (layers, width, kv_heads, head_dim),
        "layers/attention/o": (layers, heads, head_dim, width),
    }
    kind, lead = ("experts", (layers, config.experts)) if config.experts else ("mlp", (layers,))
    parts |= {f"layers/{kind}/{name}": (*lead, width, mlp) for name in ("gate", "up")}
    parts[f"layers/{kind}/down"] = (*lead, mlp, width)
    if not config.tied:
        parts["lm_head"] = (width, vocab)
    if config.qkv_bias:
        parts["layers/attention/q_bias"] = (layers, heads, head_dim)
        parts["layers/attention/k_bias"] = (layers, kv_heads, head_dim)
    return parts


def assert_equal(ours, theirs):
    norm = np.linalg.norm(theirs)
    assert norm > 0
    assert np.linalg.norm(np.asarray(ours) - theirs) <= 1e-9 * norm


@pytest.mark.parametrize("sizes", MESHES)
def test_a_learner_on_eight_devices_has_the_loss_and_gradients_of_one(alone, sizes):
    config, params, (loss, gradient), _ = alone
    mesh = make_mesh(*sizes)
    with jax.enable_x64(True), jax.set_mesh(mesh):
        params = jax.device_put(params, shardings(transformer.logical_axes(config), mesh, LEARNER_RULES))
        assert matrices(config, *sizes[1:]).items() <= shard_shapes(params).items()
        batch = jax.device_put(packed(config.vocab), batch_sharding(mesh, 2))
        together = loss_and_gradient(config, params, *batch)
        np.testing.assert_allclose(together[0], loss, rtol=1e-9)
        jax.tree.map(assert_equal, together[1], gradient)


@pytest.mark.parametrize("sizes", MESHES)
def test_a_rollout_on_eight_devices_has_the_logits_and_the_cache_of_one(alone, sizes):
    config, params, _, (logits, cache) = alone
    mesh = make_mesh(*sizes)
    with jax.enable_x64(True):
        params = jax.device_put(params, shardings(transformer.logical_axes(config), mesh, ROLLOUT_RULES))
        assert matrices(config, 1, sizes[2]).items() <= shard_shapes(params).items()
        tokens = jax.device_put(packed(config.vocab)[0], batch_sharding(mesh, 2))
        places = NamedSharding(mesh, PartitionSpec(BATCH_AXES, None, "tensor"))
        empty = jax.device_put(transformer.init_cache(config, ROWS, CONTEXT, jnp.float64), places)
        together = prefill_and_decode(config, params, tokens, empty)
        assert_equal(together[0], logits)
        jax.tree.map(assert_equal, together[1], cache)
