"""Credit against hand-worked numbers, and every slot value against plain Python loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.config import ConfigError
from mas_jax.learners.credit import CENTRES, EPSILON, ID_NAMES, SCALES, WEIGHTS, advantages, inflation, token_weights
from mas_jax.learners.methods import METHODS, lookup

METHOD = METHODS["grpo"]


def vectors(rows):
    """Rows of (reward, task, episode, role, agent, turn) -> reward vector and id vectors."""
    columns = list(zip(*rows, strict=True))
    return np.array(columns[0], float), {name: np.array(c) for name, c in zip(ID_NAMES, columns[1:], strict=True)}


def credit(name, rows, weight=None):
    reward, ids = vectors(rows)
    return advantages(reward, ids, METHODS[name] if isinstance(name, str) else name, weight)


# One task, three episodes with team rewards 1, 0, 0.5; the solver (role 0) speaks once, the critic (role 1) 2, 1 and 3 times.
TEAM = [
    (1.0, 0, 0, 0, 0, 0), (1.0, 0, 0, 1, 1, 0), (1.0, 0, 0, 1, 1, 1),
    (0.0, 0, 1, 0, 0, 0), (0.0, 0, 1, 1, 1, 0),
    (0.5, 0, 2, 0, 0, 0), (0.5, 0, 2, 1, 1, 0), (0.5, 0, 2, 1, 1, 1), (0.5, 0, 2, 1, 1, 2),
]  # fmt: skip


def test_grpo_compares_episodes_whatever_their_numbers_of_calls():
    # Episodes 1, 0, 0.5: mean 0.5, sample std 0.5.
    z = 0.5 / (0.5 + 1e-6)
    np.testing.assert_allclose(credit("grpo", TEAM), [z, z, z, -z, -z, 0, 0, 0, 0], rtol=1e-12, atol=1e-15)


def test_dr_grpo_takes_off_the_mean_and_divides_by_nothing():
    np.testing.assert_allclose(credit("dr_grpo", TEAM), [0.5] * 3 + [-0.5] * 2 + [0] * 4, atol=1e-15)


def test_rloo_compares_each_episode_with_the_mean_of_the_others():
    # 1 - 0.25, 0 - 0.75, 0.5 - 0.5
    np.testing.assert_allclose(credit("rloo", TEAM), [0.75] * 3 + [-0.75] * 2 + [0] * 4, atol=1e-15)


def test_dr_mas_weighs_a_roles_statistics_by_its_calls():
    # Solver: 1, 0, 0.5 as above. Critic over its calls: 1, 1, 0, 0.5, 0.5, 0.5: mean 3.5/6, sum of squares 2.75.
    mean, variance = 3.5 / 6, (2.75 - 3.5**2 / 6) / 5
    z, s = 0.5 / (0.5 + 1e-6), math.sqrt(variance) + 1e-6
    up, down, middle = (1 - mean) / s, -mean / s, (0.5 - mean) / s
    wanted = [z, up, up, -z, down, 0, middle, middle, middle]
    np.testing.assert_allclose(credit("dr_mas", TEAM), wanted, rtol=1e-12, atol=1e-15)


def test_dr_mas_is_grpo_when_every_role_speaks_once_an_episode():
    once = [(r, 0, e, k, k, 0) for e, r in enumerate([1.0, 0.0, 0.25]) for k in (0, 1)]
    np.testing.assert_allclose(credit("dr_mas", once), credit("grpo", once), rtol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_group_of_one_teaches_nothing(name):
    assert credit(name, [(0.7, 0, 0, 0, 0, 0), (0.2, 1, 1, 0, 0, 0)]).tolist() == [0, 0]


@pytest.mark.parametrize("name", METHODS)
@given(
    reward=st.floats(-100, 100), calls=st.lists(st.integers(1, 5), min_size=2, max_size=5)
)  # 0.1 three times sums to 0.30000000000000004: the mean of an episode need not be its reward
def test_exactly_equal_rewards_give_exactly_zero_however_many_calls_an_episode_has(name, reward, calls):
    rows = [(reward, 0, e, 0, 0, t) for e, n in enumerate(calls) for t in range(n)]
    assert (credit(name, rows) == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_rewards_equal_up_to_rounding_give_no_advantage_worth_the_name(name):
    rows = [(0.1 + 0.2, 0, 0, 0, 0, 0), (0.3, 0, 1, 0, 0, 0), (0.1 + 0.2, 0, 2, 0, 0, 0)]
    assert np.abs(credit(name, rows)).max() < 1e-9


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_episodes_of_equal_mean_never_divide_a_difference_within_them_by_nothing(name):
    # Both episodes average 0.2 (one only up to rounding), so no spread between episodes can scale what differs within one.
    rows = [(0.2, 0, 0, 0, 0, 0), (0.1, 0, 1, 0, 0, 0), (0.2, 0, 1, 0, 0, 1), (0.3, 0, 1, 0, 0, 2)]
    assert np.abs(credit(name, rows)).max() <= 0.2


@pytest.mark.parametrize("name", METHODS)
@given(data=st.data())
def test_entries_of_weight_zero_are_outside_every_statistic(name, data):
    rows = data.draw(st.lists(ROW, min_size=1, max_size=12))
    dead = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    wild = [(1e9 if gone else row[0], *row[1:]) for row, gone in zip(rows, dead, strict=True)]
    found = credit(name, wild, weight=1.0 - np.array(dead))
    assert (found[dead] == 0).all()
    kept = [row for row, gone in zip(rows, dead, strict=True) if not gone]
    if kept:
        np.testing.assert_array_equal(found[~np.array(dead)], credit(name, kept))


def test_n_calls_of_one_role_in_an_episode_keep_n_distinct_advantages():
    rows = [(float(10 * e + c), 0, e, 0, c, 0) for e in range(2) for c in range(4)]
    for name in METHODS:
        found = credit(name, rows)
        assert len(set(found.tolist())) == 8
        assert (np.diff(found) > 0).all()


def test_tasks_are_never_compared():
    alone = [(1.0, 0, 0, 0, 0, 0), (0.0, 0, 1, 0, 0, 0)]
    beside = alone + [(50.0, 1, 2, 0, 0, 0), (70.0, 1, 3, 0, 0, 0)]
    for name in METHODS:
        np.testing.assert_array_equal(credit(name, beside)[:2], credit(name, alone))


# Few ids, so that groups are ragged and collide; rewards on a grid, so that constant groups occur.
ROW = st.tuples(
    st.integers(-4, 4).map(lambda i: i / 4), st.integers(0, 1), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2),
    st.integers(0, 1),
)  # fmt: skip


def loop(rows, method):
    """The first four slots in plain Python."""
    found = []
    for row in rows:
        at = {name: row[1 + i] for i, name in enumerate(ID_NAMES)}
        group = [other for other in rows if all(other[1 + ID_NAMES.index(name)] == at[name] for name in method.key)]
        if method.centre == "none":
            found.append(row[0])
            continue
        if method.unit == "call":
            units = [[other] for other in group]
            mine = next(i for i, unit in enumerate(units) if unit[0] is row)
        else:
            names = sorted({other[2] for other in group})
            units = [[other for other in group if other[2] == name] for name in names]
            mine = names.index(row[2])
        samples = [math.fsum(other[0] for other in unit) / len(unit) for unit in units]
        if len(samples) < 2 or len({other[0] for other in group}) == 1:
            found.append(0.0)
            continue
        mean = math.fsum(samples) / len(samples)
        centre = mean
        if method.centre == "leave_one_out":
            others = samples[:mine] + samples[mine + 1 :]
            centre = math.fsum(others) / len(others)
        if method.scale == "none":
            found.append(row[0] - centre)
            continue
        if max(samples) - min(samples) < 1e-12:
            found.append(0.0)
            continue
        degrees = len(samples) - (1 if method.scale == "std" else 0)
        deviation = math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / degrees)
        found.append((row[0] - centre) / (deviation + EPSILON))
    return found


@given(
    rows=st.lists(ROW, max_size=16),
    key=st.lists(st.sampled_from(ID_NAMES), min_size=1, max_size=3, unique=True),
    unit=st.sampled_from(["call", "episode"]),
    centre=st.sampled_from(sorted(CENTRES)),
    scale=st.sampled_from(sorted(SCALES)),
)
def test_every_combination_of_slots_equals_plain_loops(rows, key, unit, centre, scale):
    method = replace(METHOD, key=tuple(key), unit=unit, centre=centre, scale=scale)
    rows = [(*row,) for row in rows]
    found = credit(method, rows).tolist() if rows else []
    assert found == pytest.approx(loop(rows, method), rel=1e-9, abs=1e-9)


@given(rows=st.lists(ROW, min_size=1, max_size=12), seed=st.integers(0, 9))
def test_the_order_of_calls_does_not_matter(rows, seed):
    order = np.random.default_rng(seed).permutation(len(rows))
    for name in METHODS:
        np.testing.assert_allclose(
            credit(name, [rows[i] for i in order]), credit(name, rows)[order], rtol=1e-9, atol=1e-9
        )


# Last slot


LENGTHS, ROLES, CONSTANT = np.array([2, 4, 0, 6]), np.array([0, 0, 0, 1]), np.array([10.0, 10.0, 10.0, 5.0])


@pytest.mark.parametrize(
    ("weight", "together", "apart"),
    [
        ("token_mean", [1 / 12, 1 / 12, 0, 1 / 12], [1 / 6, 1 / 6, 0, 1 / 6]),
        ("row_mean", [1 / 6, 1 / 12, 0, 1 / 18], [1 / 4, 1 / 8, 0, 1 / 6]),
        ("row_sum", [1 / 3, 1 / 3, 0, 1 / 3], [1 / 2, 1 / 2, 0, 1]),
        ("constant_length", [1 / 30, 1 / 30, 0, 1 / 15], [1 / 20, 1 / 20, 0, 1 / 5]),
    ],
)
def test_token_weights_by_hand_over_the_policy_and_per_role(weight, together, apart):
    method = replace(METHOD, weight=weight)
    np.testing.assert_allclose(token_weights(LENGTHS, ROLES, method, CONSTANT), together, rtol=1e-12)
    found = token_weights(LENGTHS, ROLES, replace(method, per_role=True), CONSTANT)
    np.testing.assert_allclose(found, apart, rtol=1e-12)


@given(
    calls=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=10),
    weight=st.sampled_from(sorted(WEIGHTS)),
    per_role=st.booleans(),
)
def test_token_weights_add_up_as_defined_and_dummy_calls_change_nothing(calls, weight, per_role):
    lengths, role = map(np.array, zip(*calls, strict=True))
    constant = np.full(len(calls), 8.0)
    method = replace(METHOD, weight=weight, per_role=per_role)
    found = token_weights(lengths, role, method, constant)
    assert (found[lengths == 0] == 0).all() and (found[lengths > 0] > 0).all()
    for scope in set(role.tolist()) if per_role else [None]:
        live = (lengths > 0) & ((role == scope) if per_role else True)
        if live.any():
            total = (found * lengths)[live].sum()
            mean = lengths[live].mean()
            assert total == pytest.approx({"row_sum": mean, "constant_length": mean / 8}.get(weight, 1.0))
    padded = token_weights(
        np.append(lengths, [0, 0, 0]), np.append(role, [0, 1, 7]), method, np.append(constant, [8.0, 8.0, 8.0])
    )
    np.testing.assert_array_equal(padded[:-3], found)
    assert (padded[-3:] == 0).all()


# Inflation


def test_the_inflation_factor_by_hand():
    # One group: role 0 gets 0, 0, 1, 1 (mean .5, variance .25), role 1 gets 1, 1 (mean 1, variance 0); all: mean 2/3, variance 2/9.
    found = inflation(np.array([0, 0, 1, 1, 1, 1.0]), np.array([0, 0, 0, 0, 1, 1]), np.zeros(6, int))
    assert found == pytest.approx({0: (0.25 + 1 / 36) / (2 / 9), 1: (1 / 9) / (2 / 9)})


def test_roles_with_one_distribution_are_not_inflated_and_flat_groups_do_not_count():
    reward = np.array([0, 1, 0, 1, 5, 5.0])
    role, group = np.array([0, 0, 1, 1, 0, 1]), np.array([0, 0, 0, 0, 1, 1])
    assert inflation(reward, role, group) == pytest.approx({0: 1.0, 1: 1.0})


def test_inflation_averages_to_one_over_the_calls_of_a_group():
    draw = np.random.default_rng(0)
    reward, role = draw.normal(size=40), draw.integers(0, 3, 40)
    found = inflation(reward, role, np.zeros(40, int))
    assert sum(found[int(k)] for k in role) / 40 == pytest.approx(1.0)


# The table


@pytest.mark.parametrize("name", METHODS)
def test_every_row_of_the_table_names_its_paper_and_passes_its_own_check(name):
    assert lookup(name, 2) is METHODS[name]
    assert "arXiv" in METHODS[name].paper and METHODS[name].formula


@pytest.mark.parametrize("name", METHODS)
def test_a_group_of_one_with_a_group_baseline_is_refused(name):
    with pytest.raises(ConfigError, match=r"group_size = 1: .*use 2 or more"):
        lookup(name, 1)


def test_an_unknown_method_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"method = 'grop': did you mean 'grpo'\? there are .*dr_mas"):
        lookup("grop", 8)


@pytest.mark.parametrize("slot", ["unit", "centre", "scale", "temporal", "weight"])
def test_a_slot_value_that_does_not_exist_is_refused(slot, monkeypatch):
    monkeypatch.setitem(METHODS, "mine", replace(METHOD, **{slot: "nonsense"}))
    with pytest.raises(ConfigError, match=rf"methods\['mine'\]\.{slot} = 'nonsense'"):
        lookup("mine", 8)


def test_a_group_key_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setitem(METHODS, "mine", replace(METHOD, key=("task", "colour")))
    with pytest.raises(ConfigError, match=r"key = 'colour'"):
        lookup("mine", 8)
