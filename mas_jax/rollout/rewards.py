"""From traces to rewards: each term lands where its function says."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from mas_jax.config import Reward
from mas_jax.graph import Trace


def assign(traces: Sequence[Trace], rewards: Sequence[Reward], roles: Collection[str]) -> None:
    """Fill `turn.reward`, `turn.rewards` and `trace.rewards` in place.

    A number goes to every turn of the episode, a dict to the turns of its keys (a role, an agent "role/index", a turn id), None
    nowhere. `turn.reward` is the weighted sum. A function that raises, gives what is not finite, or addresses neither one of `roles`
    nor an agent or turn of the episode, fails its episode with that cause.
    """
    for trace in traces:
        if trace.stop == "failed":
            continue
        for turn in trace.turns:
            turn.judged = False
        try:
            for reward in rewards:
                _land(trace, reward, roles)
        except Exception as error:
            trace.stop, trace.error = "failed", f"reward {reward.name}: {type(error).__name__}: {error}"


def _land(trace: Trace, reward: Reward, roles: Collection[str]) -> None:
    given = reward.fn(trace)
    if given is None:
        return
    parts = given if isinstance(given, dict) else {"": given}
    if not parts:
        return
    for key, value in parts.items():
        value = float(value)
        if not math.isfinite(value):
            raise ValueError(f"gave {value} for {key or 'the team'}; a reward must be finite")
        turns = [turn for turn in trace.turns if key in ("", turn.role, turn.name, turn.id)]
        if not turns and key and key not in roles:
            known = sorted({turn.role for turn in trace.turns} | {turn.name for turn in trace.turns})
            raise KeyError(f"{key!r} is no role, agent or turn of this episode; there are {known} and its turn ids")
        for turn in turns:
            turn.rewards[reward.name] = turn.rewards.get(reward.name, 0.0) + value
            turn.reward += reward.weight * value
            turn.judged = turn.judged or reward.weight != 0
    trace.rewards[reward.name] = sum(float(v) for v in parts.values()) / len(parts)
