"""Eval-Opt: a generator answers, an evaluator judges, the generator refines, until the evaluator is satisfied.

The cleaned form of the workflow in "When Does Multi-Agent RL Improve LLM Workflows?" (arXiv 2605.24202): every call is a
conversation of its own, with the draft and the review inside the user message.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mas_jax.rollout.parse import boxed
from mas_jax.rollout.workflow import Call, user, workflow


@dataclass(frozen=True)
class Prompts:
    """What the team says to each other. `answer` reads the answer in a draft, `verdict` the evaluator's judgement."""

    solve: str = "{problem}\n\nSolve it step by step and end with the final answer in \\boxed{{}}."
    judge: str = (
        "{problem}\n\nProposed solution:\n{draft}\n\nIs it right? Check each step, name the main mistake if there is one without "
        "giving the answer away, and end with \\boxed{{Correct}} or \\boxed{{Incorrect}}."
    )
    refine: str = (
        "{problem}\n\nAn earlier solution:\n{draft}\n\nA teacher's review of it:\n{review}\n\nWrite a new solution by another way, "
        "and end with the final answer in \\boxed{{}}."
    )
    answer: Callable[[str], str | None] = boxed
    verdict: Callable[[str], str | None] = boxed


PLAIN = Prompts()


@workflow(roles=("generator", "evaluator"))
def eval_opt(task, team, rounds=3, say=PLAIN):
    """The generator answers, the evaluator judges, until satisfied or `rounds` judgements have been passed."""
    draft = yield Call("generator", [user(say.solve, problem=task.prompt)])
    for i in range(rounds):
        review = yield Call("evaluator", [user(say.judge, problem=task.prompt, draft=draft)])
        if say.verdict(review.text) == "Correct" or i == rounds - 1:
            break
        draft = yield Call("generator", [user(say.refine, problem=task.prompt, draft=draft, review=review)])
    return draft
