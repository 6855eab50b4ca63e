"""Which episodes make a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mas_jax.graph import Task


@dataclass(frozen=True)
class Plan:
    """One episode to play: `sample` of `task`, compared with the others of its `group`."""

    task: Task
    sample: int
    group: str


def independent(tasks: Sequence[Task], group_size: int, label: str) -> list[Plan]:
    """`group_size` episodes of each task, drawn independently. `label` tells apart two visits to one task (a step, an evaluation)."""
    return [Plan(t, i, f"{label}/{place}/{t.id}") for place, t in enumerate(tasks) for i in range(group_size)]
