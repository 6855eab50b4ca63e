"""Rewards and measures of the Eval-Opt team. `right(task, answer)` says whether an answer solves a task."""

from collections.abc import Callable
from dataclasses import dataclass

from mas_jax.graph import Task, Trace, Turn
from mas_jax.rollout.workflows.eval_opt import PLAIN, Prompts

Right = Callable[[Task, str], bool]


@dataclass(frozen=True)
class Correct:
    """1 if the team's last draft is right, else 0; to every turn of the episode."""

    right: Right
    say: Prompts = PLAIN

    def __call__(self, trace: Trace) -> float:
        return float(self.right(trace.task, self.say.answer(trace.answer) or ""))


@dataclass(frozen=True)
class AnswersWell:
    """To each turn of the generator: whether its own draft is right."""

    right: Right
    say: Prompts = PLAIN

    def __call__(self, trace: Trace) -> dict[str, float]:
        return {
            turn.id: float(self.right(trace.task, self.say.answer(turn.text) or "")) for turn in trace.of("generator")
        }


@dataclass(frozen=True)
class JudgesWell:
    """To each turn of the evaluator: 1 for accepting a right draft, `rejection` for rejecting a wrong one, else 0.

    While most drafts are wrong, an evaluator that is paid the same for both learns to reject whatever it sees.
    """

    right: Right
    say: Prompts = PLAIN
    rejection: float = 1.0

    def __call__(self, trace: Trace) -> dict[str, float]:
        return {turn.id: self._worth(trace, turn) for turn in trace.of("evaluator")}

    def _worth(self, trace: Trace, turn: Turn) -> float:
        draft = trace.turn(turn.reads[0].source)
        truth = self.right(trace.task, self.say.answer(draft.text) or "")
        if self.say.verdict(turn.text) != ("Correct" if truth else "Incorrect"):
            return 0.0
        return 1.0 if truth else self.rejection
