"""The decoder: what it reads, what it must not read, and that its two ways of computing agree."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import CHUNK, LENGTHS, ROWS, TINY

from mas_jax.config import ConfigError
from mas_jax.models import transformer
from mas_jax.models.rope import Rope
from mas_jax.models.transformer import LayerKind

T = LENGTHS[0]
# Every feature at once: layers of three kinds (a window, none, no rotary positions), biases, caps, norms on both sides.
MIXED = replace(
    TINY, layers=4, kinds=(LayerKind(window=6), LayerKind(Rope(1e6)), LayerKind(None)), pattern=(0, 1, 0, 2),
    qkv_bias=True, o_bias=True, mlp_bias=True, sandwich_norms=True, zero_centred_norms=True, activation="gelu_tanh",
    attention_scale=0.5, attention_softcap=3.0, final_softcap=5.0, scaled_embeddings=True,
)  # fmt: skip


def weights(config):
    """Weights large enough that attention is far from uniform and a wrong mask, norm or bias shows."""
    fresh = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0))
    noise = jax.random.split(jax.random.key(1), len(jax.tree.leaves(fresh)))
    noise = jax.tree.unflatten(jax.tree.structure(fresh), list(noise))
    grow = lambda x, key: x * 8 if x.ndim > 2 else x + 0.1 * jax.random.normal(key, x.shape)
    return fresh | {"layers": jax.tree.map(grow, fresh["layers"], noise["layers"])}


@pytest.fixture(scope="module")
def params():
    return weights(TINY)


@jax.jit
def logprobs(params, tokens, positions, segments):
    """Log-probabilities [B, T] of each token given those before it; entry t speaks of token t, entry 0 of nothing."""
    hidden = transformer.forward(TINY, params, tokens, positions, segments, dtype=jnp.float32)
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    ones = jnp.ones(tokens.shape, jnp.float32)
    scores, _ = transformer.token_logprobs(TINY, params, hidden, targets, ones, dtype=jnp.float32)
    return jnp.pad(scores[:, :-1], ((0, 0), (1, 0)))


def rows(seed=0):
    tokens = jax.random.randint(jax.random.key(seed), (ROWS, T), 0, TINY.vocab)
    positions = jnp.broadcast_to(jnp.arange(T)[None], (ROWS, T))
    return tokens, positions, jnp.ones((ROWS, T), int)


def plain_logprobs(params, hidden, targets, temperature):
    logits = transformer.head_logits(TINY, params, hidden, dtype=hidden.dtype) / temperature[:, :, None]
    logs = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
    return jnp.take_along_axis(logs, targets[:, :, None], axis=-1)[:, :, 0], entropy


@pytest.mark.parametrize("config", [TINY, MIXED], ids=["tiny", "mixed"])
def test_cached_chunks_and_single_tokens_give_the_hidden_states_of_one_full_forward(config):
    params = weights(config)
    tokens, positions, segments = rows()
    whole = jax.jit(transformer.forward, static_argnums=0, static_argnames="dtype")(
        config, params, tokens, positions, segments, dtype=jnp.float32
    )
    step = jax.jit(transformer.forward_cached, static_argnums=0, static_argnames="dtype")
    unstacked = jax.jit(transformer.unstack)(params)
    # Rows at different places in different chunks: row r lags r chunks behind, as slots of an engine do.
    cache = transformer.init_cache(config, ROWS, 2 * T, jnp.float32)
    cache = jax.tree.map(lambda x: x + 7, cache)  # what a former request left there
    hidden = np.zeros(whole.shape, np.float32)
    at = np.zeros(ROWS, int)
    sizes = [CHUNK] * 3 + [1] * CHUNK
    for size in sizes:
        tile = jnp.stack([tokens[r, at[r] : at[r] + size] for r in range(ROWS)])
        out, cache, chunk = step(config, unstacked, tile, jnp.asarray(at), cache, dtype=jnp.float32)
        for r in range(ROWS):
            hidden[r, at[r] : at[r] + size] = out[r]
            np.testing.assert_array_equal(cache["k"][1][r, at[r] : at[r] + size], chunk["k"][1][r])
        at += size
    np.testing.assert_allclose(hidden, whole, atol=1e-4)


def test_rows_of_a_cache_may_stand_at_different_positions(params):
    tokens, _, _ = rows()
    step = jax.jit(transformer.forward_cached, static_argnums=0, static_argnames="dtype")
    unstacked = jax.jit(transformer.unstack)(params)
    fresh = transformer.init_cache(TINY, ROWS, 2 * T, jnp.float32)
    first, cache, _ = step(TINY, unstacked, tokens[:, :CHUNK], jnp.zeros(ROWS, int), fresh, dtype=jnp.float32)
    second, _, _ = step(TINY, unstacked, tokens[:, CHUNK : 2 * CHUNK], jnp.full(ROWS, CHUNK), cache, dtype=jnp.float32)
    # Rows 0 and 1 start over while rows 2 and 3 go on.
    start = jnp.array([0, 0, CHUNK, CHUNK])
    mixed = jnp.where((start == 0)[:, None], tokens[:, :CHUNK], tokens[:, CHUNK : 2 * CHUNK])
    out, _, _ = step(TINY, unstacked, mixed, start, cache, dtype=jnp.float32)
    np.testing.assert_array_equal(out[:2], first[:2])
    np.testing.assert_array_equal(out[2:], second[2:])


@pytest.mark.parametrize("config", [TINY, MIXED], ids=["tiny", "mixed"])
def test_scanned_unrolled_and_rematerialised_layers_agree_in_value_and_gradient(config):
    @partial(jax.jit, static_argnames="remat")
    def run(params, remat):
        def loss(params):
            hidden = transformer.forward(config, params, *rows(), dtype=jnp.float32, remat=remat)
            return jnp.sum(hidden * hidden[::-1]), hidden

        grads, hidden = jax.grad(loss, has_aux=True)(params)
        return hidden, grads

    params = weights(config)
    scanned, along = run(params, remat=False)
    unrolled, each = run(transformer.unstack(params), remat=False)
    again, twice = run(params, remat=True)
    stacked = each | {"layers": jax.tree.map(lambda *layers: jnp.stack(layers), *each["layers"])}
    for hidden, grads in ((unrolled, stacked), (again, twice)):
        np.testing.assert_allclose(hidden, scanned, atol=1e-4)
        for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(along), strict=True):
            assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
            assert np.linalg.norm(other) > 0


def test_a_window_hides_all_but_the_last_keys():
    """Through L layers of window W a token depends on those up to L (W - 1) back, and on none before."""
    config = replace(TINY, kinds=(LayerKind(window=5),))
    params, (tokens, positions, segments) = weights(config), rows()
    run = jax.jit(lambda t: transformer.forward(config, params, t, positions, segments, dtype=jnp.float32))
    changed = tokens.at[:, 20].set((tokens[:, 20] + 1) % TINY.vocab)
    moved = np.any(np.asarray(run(tokens)) != np.asarray(run(changed)), axis=(0, 2))
    assert np.flatnonzero(moved).tolist() == list(range(20, 20 + 2 * 4 + 1))


def test_logprobs_do_not_depend_on_what_padding_holds(params):
    tokens, positions, _ = rows()
    segments = jnp.asarray(np.arange(T)[None] < np.array([T, 40, 9, 1])[:, None], int)
    other = jnp.where(segments == 1, tokens, (tokens + 101) % TINY.vocab)
    far = jnp.where(segments == 1, positions, 10**6)
    # The target after the last real token is padding: what it is asked does change, so compare real tokens alone.
    live = np.asarray(segments == 1)
    first, second = logprobs(params, tokens, positions, segments), logprobs(params, other, far, segments)
    np.testing.assert_array_equal(np.asarray(first)[live], np.asarray(second)[live])


@pytest.mark.parametrize("shift", [3, 17, 24])
def test_left_padding_gives_the_logprobs_of_right_padding(params, shift):
    tokens, positions, _ = rows()
    segments = jnp.where(positions < 40, 1, 0)
    right = logprobs(params, tokens, positions, segments)
    rolled = (jnp.roll(x, shift, axis=1) for x in (tokens, positions, segments))
    left = logprobs(params, *rolled)
    np.testing.assert_allclose(left[:, shift + 1 : shift + 40], right[:, 1:40], atol=1e-5)


def test_packed_neighbours_do_not_see_each_other(params):
    tokens, positions, segments = rows()
    alone = logprobs(params, tokens, positions, segments)
    half = T // 2
    # Every row holds the first halves of two rows, one behind the other.
    packed = jnp.concatenate([tokens[:, :half], jnp.roll(tokens, 1, axis=0)[:, :half]], axis=1)
    places = positions % half
    both = logprobs(params, packed, places, 1 + positions // half)
    np.testing.assert_allclose(both[:, 1:half], alone[:, 1:half], atol=1e-5)
    np.testing.assert_allclose(both[:, half + 1 :], jnp.roll(alone, 1, axis=0)[:, 1:half], atol=1e-5)
    # The trap: without segments the second row attends to the first, and its log-probs are other ones.
    unmarked = logprobs(params, packed, places, segments)
    assert np.abs(unmarked[:, half + 1 :] - jnp.roll(alone, 1, axis=0)[:, 1:half]).max() > 1e-2


def test_later_tokens_never_change_earlier_logprobs(params):
    tokens, positions, segments = rows()
    changed = tokens.at[:, 30:].set((tokens[:, 30:] + 1) % TINY.vocab)
    before, after = logprobs(params, tokens, positions, segments), logprobs(params, changed, positions, segments)
    np.testing.assert_array_equal(before[:, :30], after[:, :30])
    assert np.all(before[:, 30] != after[:, 30])


def test_nan_in_padding_reaches_neither_loss_nor_gradient(params):
    tokens, positions, _ = rows()
    pad = TINY.vocab - 1
    segments = jnp.where(positions < 40, 1, 0)
    tokens = jnp.where(segments == 1, tokens % pad, pad)
    targets = jnp.where(positions < 39, jnp.roll(tokens, -1, axis=1), -1)
    untied = replace(TINY, tied=False)  # so that no logit reads the poisoned embedding
    weights = params | {"lm_head": params["embed"].T}

    def loss(weights, temperature, poison):
        hidden = transformer.forward(untied, weights, tokens, positions, segments, dtype=jnp.float32)
        hidden = jnp.where((segments == 1)[:, :, None], hidden, poison)
        scores, entropy = transformer.token_logprobs(
            untied, weights, hidden, targets, temperature, dtype=jnp.float32, chunk=64
        )
        return jnp.sum(scores) + jnp.sum(entropy)

    run = jax.jit(jax.value_and_grad(loss))
    clean = run(weights, jnp.ones((ROWS, T)), 0.0)
    embed = weights["embed"].at[pad].set(jnp.nan)
    poisoned = run(weights | {"embed": embed}, jnp.where(targets >= 0, 1.0, jnp.nan), jnp.nan)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    assert np.abs(clean[1]["layers"]["attention"]["q"]).max() > 0


@pytest.mark.parametrize("chunk", [ROWS * 7, ROWS * 16, 1])
def test_chunked_logprobs_and_entropy_equal_plain_log_softmax_in_value_and_gradient(params, chunk):
    targets = rows()[0]
    hidden = jax.random.normal(jax.random.key(3), (ROWS, T, TINY.width))
    temperature = jax.random.uniform(jax.random.key(4), (ROWS, T), minval=0.5, maxval=2)
    weights = jax.random.normal(jax.random.key(5), (2, ROWS, T))

    def loss(score):
        return lambda params, hidden: sum(
            jnp.sum(x * w) for x, w in zip(score(params, hidden, targets, temperature), weights, strict=True)
        )

    def chunked(params, hidden, targets, temperature):
        return transformer.token_logprobs(TINY, params, hidden, targets, temperature, dtype=jnp.float32, chunk=chunk)

    args = (params, hidden, targets, temperature)
    for ours, plain in zip(jax.jit(chunked)(*args), plain_logprobs(*args), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)
    ours = jax.jit(jax.grad(loss(chunked), argnums=(0, 1)))(params, hidden)
    plain = jax.jit(jax.grad(loss(plain_logprobs), argnums=(0, 1)))(params, hidden)
    np.testing.assert_allclose(ours[0]["embed"], plain[0]["embed"], atol=1e-4)
    np.testing.assert_allclose(ours[1], plain[1], atol=1e-4)


def test_chunked_logprobs_never_hold_the_logits_of_all_tokens(params):
    targets = rows()[0]
    hidden, temperature = jnp.ones((ROWS, T, TINY.width)), jnp.ones((ROWS, T))

    def largest(chunk):
        def loss(embed, hidden):
            tree = params | {"embed": embed}
            out = transformer.token_logprobs(TINY, tree, hidden, targets, temperature, dtype=jnp.float32, chunk=chunk)
            return jnp.sum(out[0])

        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params["embed"], hidden).compile().as_text()
        return max(rows for rows in range(1, ROWS * T + 1) if f"[{rows},{TINY.vocab}]" in text)

    assert largest(ROWS * T) == ROWS * T
    assert largest(ROWS * 16) == ROWS * 16


def test_float64_is_computed_in_float64_throughout():
    with jax.enable_x64(True):
        params = transformer.init(TINY, jax.random.key(0), jnp.float64)
        tokens, positions, segments = rows()

        def entropy(params):
            hidden = transformer.forward(TINY, params, tokens, positions, segments, dtype=jnp.float64)
            ones = jnp.ones(tokens.shape, jnp.float64)
            return jnp.sum(transformer.token_logprobs(TINY, params, hidden, tokens, ones, dtype=jnp.float64)[0])

        text = jax.jit(jax.grad(entropy)).lower(params).as_text()
    assert "f64" in text
    assert "f32" not in text


def test_compute_in_bfloat16_leaves_masters_gradients_and_logits_in_float32(params):
    tokens, positions, segments = rows()
    ones = jnp.ones((ROWS, T))

    @jax.jit
    @jax.value_and_grad
    def run(params):
        hidden = transformer.forward(TINY, params, tokens, positions, segments, dtype=jnp.bfloat16)
        assert hidden.dtype == jnp.bfloat16
        return jnp.mean(transformer.token_logprobs(TINY, params, hidden, tokens, ones, dtype=jnp.bfloat16)[0])

    value, grads = run(params)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)} == {value.dtype}
    hidden = transformer.forward(TINY, params, tokens, positions, segments, dtype=jnp.float32)
    exact = jnp.mean(transformer.token_logprobs(TINY, params, hidden, tokens, ones, dtype=jnp.float32)[0])
    assert abs(value - exact) < 0.05


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_one_axis_name_for_each_dimension(tied):
    config = replace(TINY, tied=tied)
    names, shapes = transformer.logical_axes(config), transformer.abstract(config)
    sizes = {
        "layers": config.layers, "vocab": config.vocab, "embed": config.width, "heads": config.heads,
        "kv_heads": config.kv_heads, "head_dim": config.head_dim, "mlp": config.mlp,
    }  # fmt: skip
    assert ("lm_head" in shapes) != tied
    spelled = jax.tree.map(lambda axes: tuple(sizes[a] for a in axes), names, is_leaf=lambda x: isinstance(x, tuple))
    assert spelled == jax.tree.map(lambda leaf: leaf.shape, shapes, is_leaf=lambda x: hasattr(x, "shape"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_heads": 3}, "kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"layers": 0}, "layers"),
        ({"activation": "relu"}, "activation"),
        ({"experts": 4}, "experts_per_token"),
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token"),
        ({"experts_per_token": 1}, "experts_per_token"),
        ({"kinds": (LayerKind(window=-1),)}, "kinds"),
        ({"pattern": (0, 1)}, "pattern"),
        ({"pattern": (0,)}, "pattern"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_its_field(change, field):
    with pytest.raises(ConfigError, match=f"model.{field} = "):
        replace(TINY, **change)
