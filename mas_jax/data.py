"""Endless, seeded, resumable streams of tasks (Grain)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mas_jax.config import ConfigError, Example, Task

__all__ = ["TaskStream"]


class TaskStream:
    """Batches of tasks without end: each epoch is a fresh shuffle of all tasks, and a batch may span two epochs.

    The order depends on `seed` and the number of tasks only. Raises ConfigError for an empty task set, a batch below 1
    or a negative seed.
    """

    def __init__(self, tasks: Sequence[Task] | Sequence[Example], batch: int, seed: int) -> None:
        import grain  # imports jax

        if not tasks:
            raise ConfigError("tasks", len(tasks), "give at least one training task")
        if batch < 1:
            raise ConfigError("batch", batch, "use at least 1")
        if seed < 0:
            raise ConfigError("seed", seed, "use 0 or more")
        self.tasks = tuple(tasks)
        self.batch = batch
        self.seed = seed
        self._digest = hashlib.sha256("\0".join(task.id for task in self.tasks).encode()).hexdigest()
        self._order = grain.MapDataset.source(range(len(self.tasks))).seed(seed).shuffle().repeat()
        self._position = 0

    @property
    def epoch(self) -> float:
        """Passes over the task set so far; 1.25 is a quarter into the second."""
        return self._position / len(self.tasks)

    def next(self) -> list[Task] | list[Example]:
        """The next batch."""
        start, self._position = self._position, self._position + self.batch
        return [self.tasks[i] for i in self._order[start : self._position]]

    def state(self) -> dict:
        """Where the stream stands, for JSON."""
        return {"position": self._position, "seed": self.seed, "tasks": len(self.tasks), "digest": self._digest}

    def restore(self, state: dict) -> None:
        """Go to where `state` was taken; the batch size may differ. Raises ConfigError for another task set or seed."""
        if (state["tasks"], state["digest"]) != (len(self.tasks), self._digest):
            have = f"{len(self.tasks)} tasks with digest {self._digest[:8]}"
            saved = f"{state['tasks']} tasks with digest {state['digest'][:8]}"
            raise ConfigError("tasks", have, f"the checkpoint was made with {saved}; resume with the same task set")
        if state["seed"] != self.seed:
            raise ConfigError("seed", self.seed, f"the checkpoint was made with {state['seed']}; resume with the same")
        self._position = state["position"]
