"""Which episodes are compared with one another."""

from mas_jax.config import Task
from mas_jax.rollout.sampling_plan import Plan, independent

TASKS = [Task("a", "1+1=", "2"), Task("b", "2+2=", "4")]


def test_independent_episodes_group_by_visit_to_a_task_never_by_task():
    plans = independent([TASKS[0], TASKS[1], TASKS[0]], 3, "7")
    assert [(p.task.id, p.sample) for p in plans] == [(t, i) for t in "aba" for i in range(3)]
    groups = [p.group for p in plans]
    assert groups == [g for g in dict.fromkeys(groups) for _ in range(3)] and len(set(groups)) == 3
    assert not {p.group for p in independent([TASKS[0]], 1, "8")} & set(groups)
    assert Plan(TASKS[0], 0, groups[0]) == plans[0]
