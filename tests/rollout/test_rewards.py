"""A reward lands where its function says, and what cannot be a reward fails its episode alone."""

import math
import re

import pytest

from mas_jax.config import Reward
from mas_jax.graph import Task, Trace, Turn
from mas_jax.rollout.rewards import assign

ROLES = ("solver", "critic", "silent")


def trace(stop="done"):
    """Two solvers in parallel, then a critic, then solver 0 again."""
    who = [("0.0", "solver", 0), ("0.1", "solver", 1), ("1", "critic", 0), ("2", "solver", 0)]
    turns = [Turn(i, role, agent, "team", 1, [1], [2], [0.0], [0], "x", "stop") for i, role, agent in who]
    return Trace(Task("a", "p"), 0, "g", turns, stop=stop)


def landed(given, *, weight=1.0, found=None):
    """What each turn got from one reward that returns `given`."""
    found = found or trace()
    assign([found], [Reward(lambda t: given, weight, "r")], ROLES)
    return [turn.reward for turn in found.turns]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (0.5, [0.5, 0.5, 0.5, 0.5]),
        (True, [1, 1, 1, 1]),
        ({"solver": 1.0}, [1, 1, 0, 1]),
        ({"solver/1": 1.0}, [0, 1, 0, 0]),
        ({"2": 1.0}, [0, 0, 0, 1]),
        ({"solver": 1.0, "solver/0": 0.5, "2": -2.0, "critic": 4.0}, [1.5, 1.0, 4.0, -0.5]),
        ({"silent": 1.0}, [0, 0, 0, 0]),
        ({}, [0, 0, 0, 0]),
        (None, [0, 0, 0, 0]),
    ],
)
def test_lands_where_its_keys_say(given, wanted):
    assert landed(given) == wanted


def test_none_is_not_zero():
    for given, wanted in ((None, {}), (0.0, {"r": 0.0})):
        found = trace()
        landed(given, found=found)
        assert found.rewards == wanted
        assert found.turns[0].rewards == wanted


def test_the_return_is_the_weighted_sum_and_each_term_is_kept_unweighted():
    found = trace()
    terms = [
        Reward(lambda t: 1.0, 0.5, "a"),
        Reward(lambda t: {"critic": 3.0}, 2.0, "b"),
        Reward(lambda t: 7.0, 0.0, "c"),
    ]
    assign([found], terms, ROLES)
    assert [t.reward for t in found.turns] == [0.5, 0.5, 6.5, 0.5]
    assert found.turns[2].rewards == {"a": 1.0, "b": 3.0, "c": 7.0}
    assert found.turns[0].rewards == {"a": 1.0, "c": 7.0}


def test_the_episodes_value_is_the_mean_of_the_parts():
    found = trace()
    landed({"0.0": 1.0, "0.1": 0.0, "2": 0.5}, found=found, weight=3.0)
    assert found.rewards == {"r": 0.5}


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (math.nan, r"reward r: ValueError: gave nan for the team; a reward must be finite"),
        ({"critic": math.inf}, r"reward r: ValueError: gave inf for critic"),
        ({"sovler": 1.0}, r"reward r: KeyError: .*'sovler' is no role, agent or turn.*'critic', 'critic/0', 'solver'"),
        ({"solver/2": 1.0}, r"reward r: KeyError"),
        ("much", r"reward r: ValueError: could not convert"),
    ],
)
def test_what_cannot_be_a_reward_fails_the_episode_with_its_cause(given, cause):
    bad, good = trace(), trace()
    assign([bad, good], [Reward(lambda t: given if t is bad else 1.0, name="r")], ROLES)
    assert bad.stop == "failed" and re.match(cause, bad.error)
    assert good.stop == "done" and good.turns[0].reward == 1.0


def test_a_reward_that_raises_fails_its_episode_alone_and_names_itself():
    def judge(t):
        if t is bad:
            raise RuntimeError("no verdict")
        return 1.0

    bad, good = trace(), trace()
    assign([bad, good], [Reward(judge)], ROLES)
    assert (bad.stop, bad.error) == ("failed", "reward judge: RuntimeError: no verdict")
    assert good.rewards == {"judge": 1.0}


def test_failed_episodes_are_not_scored_and_budget_stops_are():
    failed, budget = trace("failed"), trace("budget")
    assign([failed, budget], [Reward(lambda t: 1.0, name="r")], ROLES)
    assert (failed.rewards, budget.rewards) == ({}, {"r": 1.0})
