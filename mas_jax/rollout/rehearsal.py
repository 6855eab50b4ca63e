"""A rehearsal before a run: one episode with a mute sampler, so that a wrong role or tool name shows before any model is loaded."""

from __future__ import annotations

from collections.abc import Collection

from mas_jax.config import Experiment, Limits, Task
from mas_jax.rollout.driver import Driver
from mas_jax.rollout.sampling_plan import independent
from mas_jax.rollout.scripted import Scripted
from mas_jax.rollout.tool_pool import ToolPool
from mas_jax.rollout.workflow import Tool


class MuteTools(ToolPool):
    """Tools that run nothing."""

    def submit(self, call_id: str, tool: Tool) -> None:
        self._running[call_id] = (call_id, 0.0)

    def poll(self, *, wait: bool) -> list[tuple[str, tuple[object, str]]]:
        done = [(call_id, (None, "rehearsal")) for call_id in self._running]
        self._running.clear()
        return done

    def cancel(self, ids: Collection[str]) -> None:
        for call_id in ids:
            self._running.pop(call_id, None)


def rehearse(experiment: Experiment, task: Task) -> None:
    """Play `task` once with empty replies. Raises ConfigError for what the workflow asks for and the config lacks.

    Anything else that goes wrong may be due to the empty replies, and is left for the run to find.
    """
    mute = Scripted(lambda request: "", context=1 << 20)
    groups = {role.params: mute for role in experiment.roles.values()}
    limits = Limits(turns=experiment.limits.turns, failures=1.0)
    driver = Driver(experiment.workflow, experiment.roles, groups, limits=limits, tools=MuteTools(experiment.tools))
    driver.play(independent([task], 1, "rehearsal"))
