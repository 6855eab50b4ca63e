"""Numbers that tell whether a run is healthy, per role. Numpy only; definitions as in verl's rollout-correction notes and Dr. MAS."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from mas_jax.config import Experiment
from mas_jax.graph import Row, Trace, Turn
from mas_jax.learners import credit

log = logging.getLogger(__name__)


def rollout(traces: Sequence[Trace], experiment: Experiment) -> dict[str, float]:
    """What was played: episodes by how they ended, rewards, and turns, tokens and finishes of each role."""
    ended = Counter(trace.stop for trace in traces)
    live = [trace for trace in traces if trace.stop != "failed"]
    report: dict[str, float] = {"episodes": len(traces), "failed": ended["failed"], "budget_stops": ended["budget"]}
    for reward in experiment.rewards:
        values = [trace.rewards[reward.name] for trace in live if reward.name in trace.rewards]
        if values:
            report[f"reward/{reward.name}"] = float(np.mean(values))
    for role in experiment.roles:
        turns = [turn for trace in live for turn in trace.of(role)]
        if turns:
            report[f"{role}/reward"] = float(np.mean([turn.reward for turn in turns]))
            report[f"{role}/turns"] = len(turns) / len(live)
            report[f"{role}/length"] = float(np.mean([len(turn.tokens) for turn in turns]))
            report[f"{role}/cut_share"] = float(np.mean([turn.finish != "stop" for turn in turns]))
    for error, times in Counter(trace.error for trace in traces if trace.stop == "failed").most_common(3):
        log.warning("%d episodes failed with: %s", times, error)
    return report


def mismatch(rows: Sequence[Row], scored: Sequence[Mapping[str, np.ndarray]], alarm: float) -> dict[str, float]:
    """Is the sampler the policy being trained? Learner against sampler log-probs of the sampled tokens, per role.

    `gap`: mean |learner - sampler|; `gap_max`; `rollout_chi2`: mean of ρ² - 1, ρ = learner over sampler probability; `ppl_ratio`:
    learner over sampler perplexity (means over rows). A gap above `alarm` is logged as a warning.
    """
    report: dict[str, float] = {}
    for role in sorted({row.role for row in rows}):
        own = [(row, found) for row, found in zip(rows, scored, strict=True) if row.role == role]
        learner = [found["logprobs"][row.sampled].astype(np.float64) for row, found in own]
        sampler = [row.sampler_logprobs[row.sampled].astype(np.float64) for row, _ in own]
        delta = np.concatenate(learner) - np.concatenate(sampler)
        perplexity = [np.mean([np.exp(-part.mean()) for part in side]) for side in (learner, sampler)]
        report |= {
            f"{role}/gap": float(np.abs(delta).mean()),
            f"{role}/gap_max": float(np.abs(delta).max()),
            f"{role}/rollout_chi2": float(np.expm1(2 * delta).mean()),
            f"{role}/ppl_ratio": float(perplexity[0] / perplexity[1]),
            f"{role}/entropy": float(np.concatenate([found["entropy"][row.sampled] for row, found in own]).mean()),
        }
        if report[f"{role}/gap"] > alarm:
            log.warning(
                "the sampler is not the policy being trained: mean |learner - sampler| log-probability of role %s is %.4f "
                "(learner.gap_alarm = %g)",
                role, report[f"{role}/gap"], alarm,
            )  # fmt: skip
    return report


def credit_report(turns: Sequence[Turn], ids: Mapping[str, np.ndarray], method: credit.Method) -> dict[str, float]:
    """Share of groups that teach nothing, size of advantages, and inflation factor, per role."""
    report: dict[str, float] = {}
    reward = np.array([turn.reward for turn in turns])
    advantage = np.array([turn.advantage for turn in turns])
    groups = credit.group_ids(ids, method.key)
    flat = {g for g in np.unique(groups) if (advantage[groups == g] == 0).all()}
    inflated = credit.inflation(reward, ids["role"], ids["task"])
    for number in np.unique(ids["role"]):
        members = ids["role"] == number
        role = turns[int(np.flatnonzero(members)[0])].role
        own = set(groups[members])
        report[f"{role}/zero_variance_share"] = len(own & flat) / len(own)
        report[f"{role}/advantage_abs"] = float(np.abs(advantage[members]).mean())
        if int(number) in inflated:
            report[f"{role}/inflation"] = inflated[int(number)]
    return report


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step's updates as one: means, the largest of what is a maximum, the last rate and count."""
    found: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: _join(name.rsplit("/", 1)[-1], values) for name, values in found.items()}


def _join(kind: str, values: Sequence[float]) -> float:
    if kind in ("lr", "updates"):
        return values[-1]
    return max(values) if kind.startswith("max_") else float(np.mean(values))


def line(number: int, experiment: Experiment, report: Mapping[str, float], times: Mapping[str, float]) -> str:
    """One step in one line for a person."""
    parts = [f"step {number:>{len(str(experiment.steps))}}/{experiment.steps}"]
    parts += [f"{r.name} {report[f'reward/{r.name}']:.3f}" for r in experiment.rewards if f"reward/{r.name}" in report]
    gaps = [value for name, value in report.items() if name.endswith("/gap")]
    entropies = [value for name, value in report.items() if name.endswith("/entropy") and name.count("/") == 1]
    norms = [value for name, value in report.items() if name.startswith("params/") and name.endswith("/grad_norm")]
    parts += [f"entropy {np.mean(entropies):.2f}"] if entropies else []
    parts += [f"grad {max(norms):.2f}"] if norms else []
    parts += [f"gap {max(gaps):.1e}"] if gaps else []
    minutes = (experiment.steps - number) * times["time/step"] / 60
    parts.append(f"{times['time/step']:.1f}s" + (f", about {minutes:.1f} min left" if minutes else ""))
    for prefix in sorted(
        {name.split("/")[1] for name in report if name.startswith("eval/")} & {r.name for r in experiment.rewards}
    ):
        parts.append(f"held-out {prefix} {report[f'eval/{prefix}']:.3f}")
    return " | ".join(parts)
