"""Held-out scores of a team, with 95 % intervals, and comparisons of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mas_jax.config import Evaluation, Experiment, Task
from mas_jax.graph import Trace
from mas_jax.rollout import rewards
from mas_jax.rollout.driver import Driver, check_failures
from mas_jax.rollout.sampling_plan import independent

Z95 = 1.959964


def evaluate(
    driver: Driver,
    experiment: Experiment,
    heldout: Sequence[Task],
    *,
    settings: Evaluation | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, float], list[Trace]]:
    """Play held-out tasks and score them.

    Gives flat metrics: for each reward its mean over the team, and for each role that it lands on differently the mean over that
    role's turns, each with `/low` and `/high` of its 95 % interval and `/n`. Every evaluation of a seed uses the same random
    streams, so two can be compared task by task.
    """
    settings = settings or experiment.evaluation
    tasks = list(heldout)[: settings.tasks]
    plans = independent(tasks, settings.samples, "eval")
    traces = driver.play(plans, temperature=settings.temperature, progress=progress)
    rewards.assign(traces, experiment.rewards, experiment.roles)
    check_failures(traces, experiment.limits.failures)
    return summarise(traces, [reward.name for reward in experiment.rewards], list(experiment.roles)), traces


def summarise(traces: Sequence[Trace], names: Sequence[str], roles: Sequence[str]) -> dict[str, float]:
    """Means and intervals by reward and role; the unit is the task, whose samples are averaged first."""
    found: dict[str, float] = {"episodes": len(traces), "failed": sum(trace.stop == "failed" for trace in traces)}
    for name in names:
        by_task: dict[str, list[float]] = {}
        for trace in traces:
            if name in trace.rewards:
                by_task.setdefault(trace.group, []).append(trace.rewards[name])
        found |= _interval(name, by_task)
        for role in roles:
            own: dict[str, list[float]] = {}
            for trace in traces:
                own.setdefault(trace.group, []).extend(t.rewards[name] for t in trace.of(role) if name in t.rewards)
            own = {group: values for group, values in own.items() if values}
            found |= _interval(f"{role}/{name}", own)
    return found


def _interval(name: str, by_task: dict[str, list[float]]) -> dict[str, float]:
    values = np.array([np.mean(v) for v in by_task.values()])
    if not len(values):
        return {}
    low, high = interval(values)
    return {name: float(values.mean()), f"{name}/low": low, f"{name}/high": high, f"{name}/n": len(values)}


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of independent values: Wilson's for zeros and ones, normal otherwise."""
    n, mean = len(values), float(values.mean())
    if np.isin(values, (0.0, 1.0)).all():
        centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * np.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n**2))
        return float(centre - half), float(centre + half)
    half = Z95 * float(values.std(ddof=1)) / np.sqrt(n) if n > 1 else np.inf
    return float(mean - half), float(mean + half)


def table(before: dict[str, float], after: dict[str, float], names: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Rows (what, before, after, verdict) for people; the verdict says whether the intervals are apart."""
    rows = []
    for name in names:
        ends = [metrics.get(f"{name}/{end}") for metrics in (before, after) for end in ("low", "high")]
        if any(end is None for end in ends):  # one task alone has no interval
            continue
        apart = after[f"{name}/low"] > before[f"{name}/high"] or after[f"{name}/high"] < before[f"{name}/low"]
        change = after[name] - before[name]
        verdict = f"{change:+.3f} " + ("outside the intervals" if apart else "within the intervals")
        rows.append((name, _cell(before, name), _cell(after, name), verdict))
    return rows


def _cell(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:.3f} [{metrics[f'{name}/low']:.3f}, {metrics[f'{name}/high']:.3f}]"
