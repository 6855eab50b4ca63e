"""The numbers that tell a healthy run, by hand."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from mas_jax.config import Base, Experiment, Reward, Role, Task
from mas_jax.graph import Row, Trace, Turn
from mas_jax.learners import diagnostics
from mas_jax.learners.methods import METHODS


def turn(role="solver", logprobs=(-1.0, -2.0), reward=0.0, advantage=0.0, finish="stop"):
    n = len(logprobs)
    return Turn(
        "0", role, 0, "team", 1, [9], [5] * n, list(logprobs), [0] * n, "", finish, reward=reward, advantage=advantage
    )  # fmt: skip


def row(role, sampler, *, context=99.0):
    """A row of one context token and what was sampled; context holds a number that must never count."""
    said = turn(role, sampler)
    n = len(sampler)
    return Row(
        trace=Trace(Task("a", "p"), 0, "g", [said]),
        turns=[said],
        tokens=np.arange(n + 1, dtype=np.int32),
        sampled=np.array([False] + [True] * n),
        sampler_logprobs=np.array([context, *sampler], np.float32),
        versions=np.zeros(n + 1, np.int32),
        turn=np.array([-1] + [0] * n, np.int32),
    )


def scored(learner, entropy, context=np.nan):
    return {
        "logprobs": np.array([context, *learner], np.float32),
        "entropy": np.array([context, *entropy], np.float32),
    }


def test_gap_chi2_and_perplexity_ratio_by_hand():
    rows = [row("solver", [-1.0, -2.0]), row("critic", [-1.0]), row("solver", [-3.0])]
    found = [scored([-1.5, -2.0], [1.0, 2.0]), scored([-1.0], [0.5]), scored([-2.0], [6.0])]
    report = diagnostics.mismatch(rows, found, alarm=10.0)
    # learner - sampler of the solver: -0.5, 0, 1
    assert report["solver/gap"] == pytest.approx(0.5)
    assert report["solver/gap_max"] == pytest.approx(1.0)
    assert report["solver/rollout_chi2"] == pytest.approx((np.exp(-1) + 1 + np.exp(2)) / 3 - 1)
    assert report["solver/ppl_ratio"] == pytest.approx((np.exp(1.75) + np.exp(2)) / (np.exp(1.5) + np.exp(3)))
    assert report["solver/entropy"] == pytest.approx(3.0)
    assert report["critic/gap"] == report["critic/rollout_chi2"] == 0 and report["critic/ppl_ratio"] == 1


def test_context_never_counts_whatever_stands_there():
    clean = diagnostics.mismatch([row("a", [-1.0], context=0.0)], [scored([-1.25], [1.0], 0.0)], 1.0)
    dirty = diagnostics.mismatch([row("a", [-1.0], context=np.inf)], [scored([-1.25], [1.0], np.nan)], 1.0)
    assert clean == dirty


def test_a_gap_above_the_alarm_warns_with_role_and_size(caplog):
    rows, found = [row("solver", [-1.0]), row("critic", [-1.0])], [scored([-1.1], [1.0]), scored([-1.0], [1.0])]
    with caplog.at_level(logging.WARNING):
        diagnostics.mismatch(rows, found, alarm=0.05)
    (record,) = caplog.records
    assert "role solver is 0.1000" in record.getMessage() and "learner.gap_alarm = 0.05" in record.getMessage()


def test_a_gap_below_the_alarm_is_silent(caplog):
    with caplog.at_level(logging.WARNING):
        diagnostics.mismatch([row("solver", [-1.0])], [scored([-1.1], [1.0])], alarm=0.2)
    assert not caplog.records


def experiment():
    reward = lambda trace: 1.0
    return Experiment(
        workflow=reward, tasks=lambda: ([], []), rewards=(Reward(reward, name="right"), Reward(reward, name="rare")),
        params={"team": Base("m")}, roles={"solver": Role("team"), "critic": Role("team")},
    )  # fmt: skip


def test_a_rollout_is_counted_without_its_failed_episodes(caplog):
    def trace(turns, **rest):
        return Trace(Task("a", "p"), 0, "g", turns, **rest)

    traces = [
        trace([turn(reward=1.0), turn(reward=0.0, logprobs=(-1.0,) * 4, finish="length")], rewards={"right": 1.0}),
        trace([turn(reward=0.0, logprobs=(-1.0,) * 6), turn("critic")], rewards={"right": 0.0}, stop="budget"),
        trace([turn(reward=99.0)], rewards={"right": 99.0}, stop="failed", error="ValueError: no"),
    ]
    report = diagnostics.rollout(traces, experiment())
    assert (report["episodes"], report["failed"], report["budget_stops"]) == (3, 1, 1)
    assert report["reward/right"] == 0.5 and "reward/rare" not in report
    assert report["solver/reward"] == pytest.approx(1 / 3)
    assert report["solver/turns"] == 1.5 and report["critic/turns"] == 0.5
    assert report["solver/length"] == 4 and report["solver/cut_share"] == pytest.approx(1 / 3)
    assert "1 episodes failed with: ValueError: no" in caplog.text


def test_zero_variance_share_counts_the_groups_that_teach_nothing():
    turns = [turn(reward=r, advantage=a) for r, a in [(1.0, 0.0), (1.0, 0.0), (1.0, 0.5), (0.0, -0.5)]]
    ids = {name: np.zeros(4, int) for name in ("role", "agent", "turn")}
    ids |= {"task": np.array([0, 0, 1, 1]), "episode": np.arange(4)}
    report = diagnostics.credit_report(turns, ids, METHODS["grpo"])
    assert report["solver/zero_variance_share"] == 0.5
    assert report["solver/advantage_abs"] == 0.25
    assert report["solver/inflation"] == pytest.approx(1.0)


def test_the_line_of_a_step_shows_what_was_measured():
    report = {
        "reward/right": 0.25,
        "solver/gap": 1e-6,
        "critic/gap": 2e-5,
        "solver/entropy": 1.0,
        "critic/entropy": 2.0,
    }
    written = diagnostics.line(7, replace(experiment(), steps=120), report, {"time/step": 1.26})
    assert written == "step   7/120 | right 0.250 | entropy 1.50 | gap 2.0e-05 | 1.3s, about 2.4 min left"
