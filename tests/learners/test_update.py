"""The learner: what the arithmetic may depend on and what not, in float64; and hand-worked losses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shapes import LENGTHS, ROWS, TINY

from mas_jax.config import AdamW, Loss
from mas_jax.learners import credit, methods
from mas_jax.learners.losses import KL, ppo_clip, safe_log_ratio
from mas_jax.learners.packing import MicroBatch, TrainRow, pack, unpack
from mas_jax.learners.update import (
    Compute,
    Learner,
    clone_loss,
    learning_rate,
    make_optimizer,
    on_device,
    policy_loss,
    sum_metrics,
)
from mas_jax.mesh import make_mesh
from mas_jax.models import transformer

LOSS = Loss(clip_low=0.2, clip_high=0.3, kl=0.05, entropy=0.01)
SHORT = LENGTHS[0]


def weights(dtype):
    fresh = jax.jit(transformer.init, static_argnums=(0, 2))(TINY, jax.random.key(0), dtype)
    return jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, fresh)


def learner(dtype, mesh=(1, 1, 1), remat=False):
    compute = Compute(jnp.dtype(dtype), remat)
    return Learner(TINY, make_mesh(*mesh), make_optimizer(AdamW(lr=1e-2)), partial(policy_loss, LOSS), compute)


@pytest.fixture(scope="module")
def wide():
    with jax.enable_x64(True):
        return learner("float64")


@pytest.fixture(scope="module")
def narrow():
    return learner("float32")


def make_rows(count=9, role="solver", seed=0, longest=SHORT):
    """Ragged rows with one or two sampled stretches, of every kind of ratio, advantage and weight."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(4 + (longest - 4) * rng.random() ** 2)
        sampled = np.zeros(length, bool)
        sampled[length // 2 :] = True
        sampled[2 * length // 3] = length > 20  # context between two turns
        real = lambda scale, shape=length: rng.normal(0, scale, shape).astype(np.float32)
        rows.append(
            TrainRow(
                role=role,
                tokens=rng.integers(0, TINY.vocab, length).astype(np.int32),
                sampled=sampled,
                temperature=float(rng.choice([1.0, 0.7])),
                advantage=np.where(sampled, real(1.0), 0).astype(np.float32),
                weight=np.where(sampled, rng.uniform(0.01, 0.1, length), 0).astype(np.float32),
                old_logprobs=np.where(sampled, real(0.5) - 5.5, 0).astype(np.float32),
                ref_logprobs=np.where(sampled, real(0.5) - 5.5, 0).astype(np.float32),
            )
        )
    return rows


def gradient(learner, batches):
    """Loss and flat gradient of micro-batches, in the learner's precision."""
    params = jax.device_put(weights(learner_dtype(learner)), learner.param_shardings)
    grads, metrics = learner.gradient(params, [on_device(batch, learner.mesh) for batch in batches])
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(grads)])
    assert flat.dtype == learner_dtype(learner)
    return sum(float(part["loss"]) for part in metrics), flat


def learner_dtype(learner):
    return learner.compute.dtype


def each_alone(rows, lines=1, length=SHORT):
    return [batch for row in rows for batch in pack([row], lines=lines, lengths=(length,))]


def corrupted(batches, what):
    """The same micro-batches with other things on padding, or on what is no action."""
    found = []
    for batch in batches:
        arrays = {name: value.copy() for name, value in batch.arrays.items()}
        padding, context = arrays["segments"] == 0, ~arrays["sampled"]
        rng = np.random.default_rng(3)
        if what == "tokens on padding":
            arrays["tokens"][padding] = rng.integers(0, TINY.vocab, padding.sum())
            arrays["positions"][padding] = rng.integers(0, 10**6, padding.sum())
        elif what == "NaN on padding":
            for name in ("temperature", "advantage", "weight", "old_logprobs", "ref_logprobs"):
                arrays[name][padding] = np.nan
        else:
            for name, bad in (("advantage", np.nan), ("old_logprobs", -np.inf), ("ref_logprobs", np.inf)):
                arrays[name][context] = bad
            arrays["weight"][context] = 7.0
        found.append(MicroBatch(batch.role, arrays, batch.places))
    return found


@pytest.fixture(scope="module")
def truth(wide):
    """Loss and gradient of the packed rows that everything else must give."""
    with jax.enable_x64(True):
        batches = pack(make_rows(), lines=ROWS, lengths=LENGTHS)
        assert any(batch.arrays["segments"].max() > 1 for batch in batches)  # some line holds two rows
        return gradient(wide, batches)


def assert_same(found, truth):
    (loss, grads), (true_loss, true_grads) = found, truth
    norm = np.linalg.norm(true_grads)
    assert norm > 1e-3
    assert abs(loss - true_loss) <= 1e-9 * abs(true_loss)
    assert np.linalg.norm(grads - true_grads) <= 1e-9 * norm


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param(lambda rows: each_alone(rows, lines=ROWS), id="one row and the rest dummy lines"),
        pytest.param(lambda rows: pack(rows[::-1], lines=ROWS, lengths=LENGTHS), id="another order of rows"),
        pytest.param(lambda rows: pack(rows, lines=ROWS, lengths=LENGTHS)[::-1], id="another order of micro-batches"),
        pytest.param(lambda rows: pack(rows, lines=ROWS, lengths=LENGTHS[1:]), id="longer lines"),
        pytest.param(lambda rows: each_alone(rows, lines=1), id="micro-batches of one line, a row each"),
        pytest.param(lambda rows: pack(rows, lines=1, lengths=LENGTHS), id="micro-batches of one packed line"),
        pytest.param(lambda rows: pack(rows, lines=2, lengths=LENGTHS), id="micro-batches of two lines"),
    ],
)
def test_loss_and_gradient_do_not_depend_on_how_rows_are_laid_out(wide, truth, batches):
    with jax.enable_x64(True):
        assert_same(gradient(wide, batches(make_rows())), truth)


@pytest.mark.parametrize("what", ["tokens on padding", "NaN on padding", "NaN, inf and weight on context"])
def test_loss_and_gradient_do_not_depend_on_what_padding_and_context_hold(wide, truth, what):
    with jax.enable_x64(True):
        assert_same(gradient(wide, corrupted(pack(make_rows(), lines=ROWS, lengths=LENGTHS), what)), truth)


@pytest.mark.parametrize("count", [1, 3])
def test_micro_batches_of_nothing_but_padding_add_nothing(wide, truth, count):
    with jax.enable_x64(True):
        batches = pack(make_rows(), lines=ROWS, lengths=LENGTHS)
        dummy = {name: np.zeros_like(value) for name, value in batches[0].arrays.items()}
        dummy["temperature"] += 1
        assert_same(gradient(wide, batches + [MicroBatch("solver", dummy, [])] * count), truth)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 2), (1, 2, 4)])
def test_loss_and_gradient_do_not_depend_on_the_devices(truth, mesh):
    with jax.enable_x64(True):
        assert_same(gradient(learner("float64", mesh), pack(make_rows(), lines=ROWS, lengths=LENGTHS)), truth)


def test_rematerialising_changes_nothing(truth):
    with jax.enable_x64(True):
        assert_same(gradient(learner("float64", remat=True), pack(make_rows(), lines=ROWS, lengths=LENGTHS)), truth)


def test_roles_one_after_the_other_add_up_to_the_gradient_of_all(wide):
    """Role after role is how a group updates: their sum is the gradient of one loss over all rows."""
    rows = make_rows()
    with jax.enable_x64(True):
        _, together = gradient(wide, pack(rows, lines=ROWS, lengths=LENGTHS))
        for row in rows[::2]:
            row.role = "critic"
        batches = pack(rows, lines=ROWS, lengths=LENGTHS)
        assert [batch.role for batch in batches] == sorted(batch.role for batch in batches)
        parts = [gradient(wide, [b for b in batches if b.role == role])[1] for role in ("critic", "solver")]
        assert np.linalg.norm(sum(parts) - together) <= 1e-9 * np.linalg.norm(together)


@pytest.mark.parametrize("name", sorted(methods.METHODS))
@pytest.mark.parametrize("lines", [1, 2])
def test_denominators_are_those_of_the_whole_minibatch(wide, name, lines):
    """Weights are worked out once for all rows, so the number of micro-batches cancels out of loss and gradient."""
    rows = make_rows()
    lengths = np.array([row.sampled.sum() for row in rows])
    shares = credit.token_weights(lengths, np.zeros(len(rows), int), methods.METHODS[name], np.full(len(rows), 64.0))
    for row, share in zip(rows, shares, strict=True):
        row.weight = np.where(row.sampled, share, 0).astype(np.float32)
    with jax.enable_x64(True):
        assert_same(
            gradient(wide, pack(rows, lines=lines, lengths=LENGTHS)),
            gradient(wide, pack(rows, lines=ROWS, lengths=LENGTHS)),
        )


def test_tokens_of_weight_zero_give_no_gradient(wide, truth):
    """Sampled tokens that a filter left out keep their place as context, and what they hold is never read."""
    rows, more = make_rows(), make_rows(3, seed=8)
    for row in more:
        row.weight = np.zeros_like(row.weight)
        row.advantage = np.full_like(row.advantage, np.nan)
        row.old_logprobs = np.full_like(row.old_logprobs, np.inf)
    with jax.enable_x64(True):
        assert_same(gradient(wide, pack(rows + more, lines=ROWS, lengths=LENGTHS)), truth)


def test_a_stop_id_that_is_the_padding_id_carries_loss_and_padding_does_not(wide):
    row = make_rows(1)[0]
    row.tokens[-1] = 0
    with jax.enable_x64(True):
        params = weights(jnp.float64)
        (batch,) = pack([row], lines=ROWS, lengths=(SHORT,))
        scores = np.asarray(wide.score(params, on_device(batch, wide.mesh))[0])
        assert scores[0, len(row.tokens) - 1] < -1e-3
        assert (scores[0, len(row.tokens) :] == 0).all()
        _, whole = gradient(wide, [batch])
        row.weight[-1] = 0
        _, without = gradient(wide, pack([row], lines=ROWS, lengths=(SHORT,)))
        assert np.linalg.norm(whole - without) > 1e-3 * np.linalg.norm(whole)


def test_scores_are_zero_where_nothing_was_sampled_and_come_back_to_their_rows(narrow):
    rows = make_rows(longest=100)
    found, alone = [None] * len(rows), [None] * len(rows)
    params = weights(jnp.float32)
    for lines, into in ((ROWS, found), (2, alone)):
        for batch in pack(rows, lines=lines, lengths=LENGTHS):
            unpack(batch, np.asarray(narrow.score(params, on_device(batch, narrow.mesh))[0]), rows, into)
    for row, one, other in zip(rows, found, alone, strict=True):
        assert one.shape == row.tokens.shape
        assert (one[~row.sampled] == 0).all()
        assert (one[row.sampled] < 0).all()
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_the_ratio_of_the_first_epoch_is_1_and_nothing_is_clipped(narrow):
    """Scores from one set of micro-batches, the loss over another: unequal shapes, lines and neighbours."""
    rows, params = make_rows(13, longest=100), weights(jnp.float32)
    scored = [None] * len(rows)
    for batch in pack(rows, lines=ROWS, lengths=LENGTHS):
        unpack(batch, np.asarray(narrow.score(params, on_device(batch, narrow.mesh))[0]), rows, scored)
    for row, found in zip(rows, scored, strict=True):
        row.old_logprobs = found
    for lines, lengths in ((ROWS, LENGTHS), (2, LENGTHS[1:])):
        batches = [on_device(batch, narrow.mesh) for batch in pack(rows, lines=lines, lengths=lengths)]
        found = sum_metrics(narrow.gradient(params, batches)[1])
        assert found["tokens"] == sum(row.sampled.sum() for row in rows)
        np.testing.assert_allclose(found["ratio"] / found["tokens"], 1, atol=1e-5)
        np.testing.assert_allclose(found["max_ratio"], 1, atol=1e-4)
        assert found["clip_low"] == found["clip_high"] == 0
        assert abs(found["chi2"] / found["tokens"]) < 1e-5


def test_ppo_clip_is_the_smaller_of_two_surrogates_with_a_bound_on_either_side():
    """low = 0.2, high = 0.5, by hand: -min(r A, clip(r, 0.8, 1.5) A)."""
    cases = [
        # ratio, advantage, loss, below, above
        (1.0, 2.0, -2.0, False, False),
        (1.4, 2.0, -2.8, False, False),
        (2.0, 2.0, -3.0, False, True),
        (2.0, -2.0, 4.0, False, False),
        (0.5, 2.0, -1.0, False, False),
        (0.5, -2.0, 1.6, True, False),
        (0.9, -2.0, 1.8, False, False),
        (3.0, 0.0, 0.0, False, False),
    ]
    ratio, advantage, loss, below, above = (jnp.array(column)[None] for column in zip(*cases, strict=True))
    found = ppo_clip(jnp.log(ratio), advantage, low=0.2, high=0.5)
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)
    np.testing.assert_array_equal(found[1], below)
    np.testing.assert_array_equal(found[2], above)
    slope = jax.grad(lambda x: ppo_clip(x, advantage, low=0.2, high=0.5)[0].sum())
    # d loss / d log r = -r A where the bound is not active, else nothing.
    want = np.where(below | above, 0, -ratio * advantage)
    np.testing.assert_allclose(slope(jnp.log(ratio)), want, rtol=1e-6)


def test_the_three_kl_estimators_by_hand():
    """x = log policy - log other = log 2: k1 = log 2, k2 = (log 2)^2 / 2, k3 = 1/2 - 1 + log 2."""
    x = jnp.log(jnp.array([[2.0, 1.0, 0.25]]))
    np.testing.assert_allclose(KL["k1"](x), [[0.6931472, 0, -1.3862944]], rtol=1e-6)
    np.testing.assert_allclose(KL["k2"](x), [[0.2402265, 0, 0.9609060]], rtol=1e-6)
    np.testing.assert_allclose(KL["k3"](x), [[0.1931472, 0, 1.6137056]], rtol=1e-6, atol=1e-7)


def test_k1_and_k3_have_the_kl_for_their_mean_under_the_policy():
    policy, other = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    kl = (policy * np.log(policy / other)).sum()
    x = jnp.log(jnp.array(policy / other))[None]
    for name in ("k1", "k3"):
        np.testing.assert_allclose((policy * np.asarray(KL[name](x))[0]).sum(), kl, rtol=1e-6)


def test_a_masked_log_ratio_is_zero_with_no_gradient_whatever_stands_there():
    mask = jnp.array([[True, False, False]])
    bad = jnp.array([[-1.0, jnp.nan, -jnp.inf]])
    value, slope = jax.value_and_grad(lambda x: jnp.exp(safe_log_ratio(x, bad, mask)).sum())(bad)
    assert value == 3
    np.testing.assert_array_equal(slope, [[1, 0, 0]])


def test_a_policy_loss_by_hand_from_the_logprobs(narrow):
    """Surrogate, KL and entropy of the same log-probabilities that `score` gives, in numpy."""
    rows, params = make_rows(5), weights(jnp.float32)
    total = 0.0
    batches = pack(rows, lines=ROWS, lengths=LENGTHS)
    for batch in batches:
        logprobs, entropy = (np.asarray(x) for x in narrow.score(params, on_device(batch, narrow.mesh)))
        a = batch.arrays
        ratio = np.exp(logprobs - a["old_logprobs"])
        surrogate = -np.minimum(ratio * a["advantage"], np.clip(ratio, 0.8, 1.3) * a["advantage"])
        x = logprobs - a["ref_logprobs"]
        whole = surrogate + 0.05 * (np.exp(-x) - 1 + x) - 0.01 * entropy
        total += (whole * a["weight"])[a["sampled"]].sum()
    loss, _ = gradient(narrow, batches)
    np.testing.assert_allclose(loss, total, rtol=1e-4)


def test_cloning_is_the_weighted_negative_log_probability_and_its_gradient_falls_along_it():
    with jax.enable_x64(True):
        compute = Compute(jnp.dtype("float64"))
        cloner = Learner(TINY, make_mesh(1, 1, 1), make_optimizer(AdamW()), clone_loss, compute)
        batches = pack(make_rows(4), lines=ROWS, lengths=(SHORT,))
        loss, grads = gradient(cloner, batches)
        params = weights(jnp.float64)
        scores = [np.asarray(cloner.score(params, on_device(batch, cloner.mesh))[0]) for batch in batches]
        by_hand = -sum((s * b.arrays["weight"]).sum() for s, b in zip(scores, batches, strict=True))
        np.testing.assert_allclose(loss, by_hand, rtol=1e-12)
        assert_same(gradient(cloner, each_alone(make_rows(4), lines=ROWS)), (loss, grads))


def state_of(learner):
    return learner.init_state(jax.device_put(weights(jnp.float32), learner.param_shardings))


def copied(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_leaves_weights_moments_and_count_as_they_were(narrow, bad):
    state = state_of(narrow)
    grads = jax.tree.map(jnp.ones_like, state.params)
    state, first = narrow.apply(state, grads)
    assert (float(first["skipped"]), int(state.updates)) == (0, 1)
    before = copied(state)
    grads["layers"]["mlp"]["up"] = grads["layers"]["mlp"]["up"].at[1, 2, 3].set(bad)
    state, found = narrow.apply(state, grads)
    assert float(found["skipped"]) == 1
    assert not np.isfinite(found["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, before, copied(state))
    grads = jax.tree.map(jnp.ones_like, state.params)
    state, found = narrow.apply(state, grads)
    assert (float(found["skipped"]), int(state.updates)) == (0, 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(copied(state)))


SCHEDULES = {
    "constant": AdamW(lr=0.5, clip=0.0),
    "warm-up": AdamW(lr=0.5, clip=0.0, warmup=4),
    "linear": AdamW(lr=0.5, clip=0.0, warmup=3, schedule="linear", decay_steps=6, floor=0.1),
    "linear, no warm-up": AdamW(lr=0.5, clip=0.0, schedule="linear", decay_steps=5),
    "cosine": AdamW(lr=0.5, clip=0.0, warmup=3, schedule="cosine", decay_steps=6, floor=0.2),
    "cosine, no warm-up": AdamW(lr=0.5, clip=0.0, schedule="cosine", decay_steps=6),
}


@pytest.mark.parametrize("config", SCHEDULES.values(), ids=SCHEDULES)
def test_the_reported_learning_rate_is_the_one_that_is_applied(config):
    """A constant gradient makes Adam's step the learning rate itself."""
    optimizer, params = make_optimizer(config), {"w": jnp.zeros(3)}
    state = optimizer.init(params)
    for count in range(14):
        updates, state = optimizer.update({"w": jnp.ones(3)}, state, params)
        np.testing.assert_allclose(-updates["w"], learning_rate(config, count), rtol=1e-5, atol=1e-7)


def test_a_schedule_rises_over_its_warm_up_and_falls_to_its_floor():
    linear = AdamW(lr=1.0, warmup=4, schedule="linear", decay_steps=4, floor=0.2)
    rates = [float(learning_rate(linear, count)) for count in range(10)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2], rtol=1e-6)
    cosine = AdamW(lr=2.0, schedule="cosine", decay_steps=4)
    rates = [float(learning_rate(cosine, count)) for count in range(5)]
    np.testing.assert_allclose(rates, [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0], rtol=1e-5, atol=1e-6)


def test_a_gradient_is_clipped_by_the_norm_of_all_its_leaves():
    config = AdamW(clip=1.0)
    params = {"a": jnp.zeros(9), "b": jnp.zeros(16)}
    clip = make_optimizer(config)
    state = clip.init(params)
    _, state = clip.update({"a": jnp.ones(9), "b": jnp.ones(16)}, state, params)
    moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(moment["b"], (1 - config.b1) / 5, rtol=1e-6)
