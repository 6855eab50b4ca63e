"""Attention: the reference against a softmax written out by hand, and every kernel against the reference."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mas_jax.config import ConfigError
from mas_jax.mesh import batch_sharding, make_mesh
from mas_jax.models import attention
from mas_jax.models.attention import attend, self_attend

T = 300  # no multiple of a block: neither of chunked's 64 nor of splash's 128
# For each row (start, end, segment); what they leave is padding: behind, in front, between, nowhere.
SEGMENTS = [
    [(0, 100, 1), (100, 250, 2)],
    [(9, 140, 1), (140, 300, 2)],
    [(0, 60, 3), (130, 131, 1), (131, 290, 2)],
    [(0, 300, 1)],
]
MASKS = {"whole": (0, 0.0), "capped": (0, 3.0), "window": (50, 0.0), "capped window": (200, 3.0), "wide": (1000, 0.0)}
KERNELS = ("xla", "chunked", "splash")

masks = pytest.mark.parametrize(("window", "softcap"), MASKS.values(), ids=MASKS)
kernels = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(autouse=True)
def on_cpu_in_small_blocks(monkeypatch):
    monkeypatch.setitem(attention.KERNELS, "chunked", partial(attention.chunked, block=64))
    monkeypatch.setitem(attention.KERNELS, "splash", partial(attention.splash, interpret=True))


def segments():
    ids = np.zeros((len(SEGMENTS), T), np.int32)
    for row, pieces in zip(ids, SEGMENTS, strict=True):
        for start, end, segment in pieces:
            row[start:end] = segment
    return jnp.asarray(ids)


def tensors(dtype=jnp.float32, rows=4, length=T, heads=4, kv_heads=2, head_dim=8):
    """Queries, keys, values, and weights to sum the result with; logits of about 3, so that a wrong mask shows."""
    keys = jax.random.split(jax.random.key(1), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    q, k, v, weights = (
        jax.random.normal(key, (rows, length, n, head_dim), dtype) for key, n in zip(keys, counts, strict=True)
    )
    return 3 * q, k, v, weights


def run(kernel, q, k, v, weights, ids, **options):
    """What a kernel gives, and the gradients of its weighted sum with respect to queries, keys and values."""

    @jax.jit
    def both(q, k, v, weights, ids):
        def loss(q, k, v):
            out = self_attend(q, k, v, ids, kernel=kernel, **options)
            return jnp.sum(out * weights), out

        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    return both(q, k, v, weights, ids)


def assert_close(ours, reference, atol):
    for x, y in zip(ours, reference, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def by_hand(q, k, v, ids, window, softcap, scale):
    """Softmax over the keys of each query, one query at a time."""
    q, k, v, ids = (np.asarray(x) for x in (q, k, v, ids))
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t] > 0 and (not window or t - s < window)]
        if seen:
            logits = scale * k[b, seen, n // group] @ q[b, t, n]
            logits = softcap * np.tanh(logits / softcap) if softcap else logits
            out[b, t, n] = np.exp(logits) @ v[b, seen, n // group] / np.exp(logits).sum()
    return out


@masks
def test_the_reference_equals_a_softmax_written_out_query_by_query(window, softcap):
    with jax.enable_x64(True):
        q, k, v, _ = tensors(jnp.float64)
        for scale in (None, 0.2):
            out = self_attend(q, k, v, segments(), window=window, softcap=softcap, scale=scale)
            plain = by_hand(q, k, v, segments(), window, softcap, 8**-0.5 if scale is None else scale)
            np.testing.assert_allclose(out, plain, rtol=0, atol=1e-12)


def test_a_dense_mask_equals_a_softmax_written_out_query_by_query():
    q, k, v, _ = tensors(length=8)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((8, 8), bool)), (len(q), 8, 8))
    out = attend(q, k, v, mask)
    np.testing.assert_allclose(out, by_hand(q, k, v, np.ones((len(q), 8)), 0, 0, 8**-0.5), rtol=0, atol=1e-5)
    out = attend(q, k, v, mask, scale=0.2, softcap=3.0, finite=True)
    np.testing.assert_allclose(out, by_hand(q, k, v, np.ones((len(q), 8)), 0, 3, 0.2), rtol=0, atol=1e-5)


def test_masked_keys_values_and_queries_may_be_nan_forwards_and_backwards():
    q, k, v, _ = tensors(rows=2, length=8)
    live = jnp.arange(8)[None] < jnp.array([8, 5])[:, None]
    mask = live[:, :, None] & live[:, None, :] & jnp.tril(jnp.ones((8, 8), bool))[None]

    @jax.jit
    def squares(q, k, v):
        return jax.value_and_grad(lambda *x: jnp.sum(attend(*x, mask) ** 2), argnums=(0, 1, 2))(q, k, v)

    spoil = lambda x, value: jnp.where(live[:, :, None, None], x, value)
    clean = squares(*(spoil(x, 0.0) for x in (q, k, v)))
    poisoned = squares(*(spoil(x, jnp.nan) for x in (q, k, v)))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(attend(q, k, v, mask)[1, 5:], 0)


@kernels
def test_a_window_of_three_averages_the_last_three_values_where_all_logits_are_equal(kernel):
    zeros, ids = jnp.zeros((1, 6, 1, 8)), jnp.ones((1, 6), int)
    values = jnp.broadcast_to(jnp.arange(6.0)[None, :, None, None], (1, 6, 1, 8))
    out = self_attend(zeros, zeros, values, ids, window=3, kernel=kernel)
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 0.5, 1, 2, 3, 4], rtol=1e-6)


@masks
def test_blocks_of_queries_give_the_reference_to_the_last_digits_in_float64(window, softcap):
    with jax.enable_x64(True):
        args, options = (*tensors(jnp.float64), segments()), {"window": window, "softcap": softcap, "scale": 0.3}
        assert_close(run("chunked", *args, **options), run("xla", *args, **options), atol=1e-12)


def test_a_row_of_one_block_is_the_reference_bit_for_bit(monkeypatch):
    monkeypatch.setitem(attention.KERNELS, "chunked", attention.chunked)
    args = (*tensors(), segments())
    jax.tree.map(np.testing.assert_array_equal, run("chunked", *args, window=50), run("xla", *args, window=50))


@masks
def test_splash_gives_the_reference_within_the_rounding_of_float32(window, softcap):
    # Values are about 1 and gradients up to about 30: sums of 300 terms, taken in another order.
    args, options = (*tensors(), segments()), {"window": window, "softcap": softcap, "scale": 0.3}
    assert_close(run("splash", *args, **options), run("xla", *args, **options), atol=5e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("kernel", ["chunked", "splash"])
def test_each_group_of_query_heads_reads_its_own_key_head(kernel, heads, kv_heads):
    args = (*tensors(heads=heads, kv_heads=kv_heads), segments())
    assert_close(run(kernel, *args), run("xla", *args), atol=5e-5)


@kernels
def test_nan_in_padding_reaches_neither_values_nor_gradients(kernel):
    q, k, v, weights = tensors()
    live = (segments() > 0)[:, :, None, None]
    spoil = lambda x, value: jnp.where(live, x, value)
    clean = run(kernel, q, k, v, weights, segments(), window=200)
    poisoned = run(kernel, *(spoil(x, jnp.nan) for x in (q, k, v)), weights, segments(), window=200)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    for x in poisoned:
        np.testing.assert_array_equal(np.where(live, 0, x), 0)


@pytest.mark.parametrize("kernel", ["chunked", "splash"])
@pytest.mark.parametrize(
    ("sizes", "rows", "heads", "kv_heads"),
    [((2, 2, 2), 4, 4, 2), ((2, 2, 2), 3, 4, 2), ((1, 2, 4), 4, 8, 2), ((2, 2, 2), 4, 3, 3)],
    ids=["divides", "rows do not divide", "fewer key heads than devices", "heads do not divide"],
)
def test_eight_devices_give_the_values_and_gradients_of_one(kernel, sizes, rows, heads, kv_heads):
    args = (*tensors(rows=rows, heads=heads, kv_heads=kv_heads), segments()[:rows])
    one = run(kernel, *args, window=100)
    mesh = make_mesh(*sizes)
    with jax.set_mesh(mesh):
        if rows == 4:
            args = tuple(jax.device_put(x, batch_sharding(mesh, x.ndim)) for x in args)
        many = run(kernel, *args, window=100)
    assert_close(many, one, atol=1e-5)
    if kernel == "splash" and heads % sizes[2] == 0:
        assert many[0].sharding.shard_shape(many[0].shape)[2] == heads // sizes[2]  # each device attended its own


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_splash_can_be_lowered_for_a_tpu_under_a_mesh(head_dim):
    shape = lambda n: jax.ShapeDtypeStruct((4, 1000, n, head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4, 1000), jnp.int32)

    def loss(q, k, v, ids):
        out = attention.splash(q, k, v, ids, scale=0.1, window=300, softcap=50.0)
        return jnp.sum(out.astype(jnp.float32))

    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(shape(4), shape(2), shape(2), ids)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3  # forwards, and backwards for queries and for keys with values


def test_long_rows_in_blocks_never_hold_the_logits_of_all_pairs_of_tokens():
    length = 4096
    shape = lambda n: jax.ShapeDtypeStruct((1, length, n, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def compiled(kernel, window):
        def loss(q, k, v, ids):
            return jnp.sum(kernel(q, k, v, ids, scale=0.25, window=window, softcap=0.0) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape(2), shape(1), shape(1), ids).compile()

    reference, whole, near = (
        compiled(attention.xla, 0),
        compiled(attention.chunked, 0),
        compiled(attention.chunked, 512),
    )
    assert f"{length},{length}]" in reference.as_text()
    assert f"{length},{length}]" not in whole.as_text()
    assert f",{length}," not in "".join(line for line in near.as_text().splitlines() if " dot(" in line)
    pairs = 4 * 2 * length**2
    temporaries = lambda program: program.memory_analysis().temp_size_in_bytes
    assert temporaries(reference) > 3 * pairs
    # Of the causal half as before jax 0.12, whose XLA starts all blocks at once on CPU; of one block in eight since.
    assert temporaries(whole) < (3 * pairs if jax.__version_info__ < (0, 12) else pairs)
    assert temporaries(near) < temporaries(whole) / 2


@dataclass(frozen=True)
class Shape:
    head_dim: int = 64
    attention_softcap: float = 0.0


CHOICES = {
    # name: (asked for, shape, platform, lengths, dtype, chosen, part of the reason)
    "short rows on CPU": ("auto", Shape(), "cpu", (256, 512), jnp.float32, "xla", "rows of 512 tokens on cpu"),
    "long rows on CPU": ("auto", Shape(), "cpu", (512, 4096), jnp.float32, "chunked", "rows of 4096 tokens on cpu"),
    "half precision on GPU": ("auto", Shape(), "gpu", (4096,), jnp.bfloat16, "cudnn", "rows of 4096 tokens on gpu"),
    "float32 on GPU": ("auto", Shape(), "gpu", (4096,), jnp.float32, "chunked", "cudnn needs bfloat16 or float16"),
    "soft cap on GPU": ("auto", Shape(256, 50.0), "gpu", (512,), jnp.bfloat16, "xla", "cudnn knows no soft cap"),
    "wide heads on GPU": ("auto", Shape(256), "gpu", (4096,), jnp.bfloat16, "chunked", "multiple of 8 up to 128"),
    "odd heads on GPU": ("auto", Shape(12), "gpu", (4096,), jnp.bfloat16, "chunked", "and these are 12"),
    "odd rows on GPU": ("auto", Shape(), "gpu", (4095,), jnp.bfloat16, "chunked", "rows of even length"),
    "TPU": ("auto", Shape(), "tpu", (512,), jnp.bfloat16, "splash", "rows of 512 tokens on tpu"),
    "soft cap on TPU": ("auto", Shape(256, 50.0), "tpu", (4096,), jnp.float32, "splash", "rows of 4096"),
    "float64 on TPU": ("auto", Shape(), "tpu", (4096,), jnp.float64, "chunked", "splash does not compute in float64"),
    "reference asked for": ("xla", Shape(), "tpu", (4096,), jnp.bfloat16, "xla", "rows of 4096 tokens on tpu"),
    "blocks asked for": ("chunked", Shape(), "cpu", (256,), jnp.float32, "chunked", "rows of 256 tokens on cpu"),
    "cuDNN asked for": ("cudnn", Shape(), "gpu", (256,), jnp.float16, "cudnn", "rows of 256 tokens on gpu"),
}


@pytest.mark.parametrize(
    ("kernel", "shape", "platform", "lengths", "dtype", "chosen", "why"), CHOICES.values(), ids=CHOICES
)
def test_the_kernel_follows_platform_precision_and_length(kernel, shape, platform, lengths, dtype, chosen, why):
    name, reason = attention.choose(kernel, shape, platform, lengths, dtype)
    assert name == chosen
    assert why in reason


REFUSALS = {
    "unknown": ("flash", Shape(), "gpu", jnp.bfloat16, "use auto or one of"),
    "splash on CPU": ("splash", Shape(), "cpu", jnp.float32, "splash needs a TPU"),
    "cuDNN on TPU": ("cudnn", Shape(), "tpu", jnp.bfloat16, "cudnn needs a GPU"),
    "cuDNN in float32": ("cudnn", Shape(), "gpu", jnp.float32, "this is float32"),
    "cuDNN with a soft cap": ("cudnn", Shape(64, 30.0), "gpu", jnp.bfloat16, "knows no soft cap"),
}


@pytest.mark.parametrize(("kernel", "shape", "platform", "dtype", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_kernel_that_cannot_work_is_refused_in_words(kernel, shape, platform, dtype, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        attention.choose(kernel, shape, platform, (1024,), dtype)
    assert (refusal.value.field, refusal.value.value) == ("learner.attention", kernel)


@pytest.mark.accelerator
@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [0, 50])
def test_cudnn_gives_the_reference_within_the_rounding_of_bfloat16(window):
    args = (*tensors(jnp.bfloat16, head_dim=64), segments())
    wide = (*(x.astype(jnp.float32) for x in args[:4]), segments())
    for ours, reference in zip(run("cudnn", *args, window=window), run("xla", *wide, window=window), strict=True):
        difference = np.linalg.norm(np.asarray(ours, np.float32) - reference)
        assert difference < 2e-2 * np.linalg.norm(reference)
