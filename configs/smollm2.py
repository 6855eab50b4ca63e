"""The quickstart: the Eval-Opt team with a real model, SmolLM2-135M-Instruct, on products of one-digit numbers.

    make quickstart            # fetches the model (93 MB), then: mas-jax train configs/smollm2.py

Hardware: 2 CPU cores, 6 GB (float32, full weights). Time: 5 to 6 minutes. Score on held-out products, sampled at temperature 1:
the team .05 -> .74, the evaluator's verdicts .20 -> .74.
"""

from dataclasses import replace
from functools import partial

from mas_jax import AdamW, Base, Evaluation, Experiment, Learner, Reward, Role, Rollout
from mas_jax.learners.methods import METHODS
from mas_jax.rollout.parse import last_number
from mas_jax.rollout.tasks.reasoning import exact, reasoning
from mas_jax.rollout.workflows.eval_opt import Prompts, eval_opt
from mas_jax.rollout.workflows.eval_opt_rewards import AnswersWell, Correct, JudgesWell


def verdict(text):
    """yes is Correct, no is Incorrect, anything else is neither."""
    word = text.strip().lower()
    return "Correct" if word.startswith("yes") else "Incorrect" if word.startswith("no") else None


# Dr. MAS without its scale. Most first drafts are wrong, and an evaluator whose rare rewards are blown up by a small deviation learns to
# reject whatever it sees, long before the first right draft.
METHODS["dr_mas_unscaled"] = replace(METHODS["dr_mas"], scale="none")

SAY = Prompts(
    solve="{problem} Reply with the number only.",
    judge="{problem}{draft}\nIs that right? Reply yes or no.",
    refine="{problem} The answer is not {draft}. Reply with the right number only.",
    answer=last_number,
    verdict=verdict,
)
BRIEF = "You answer in one word."

experiment = Experiment(
    workflow=partial(eval_opt, rounds=1, say=SAY),
    tasks=reasoning(
        "products",
        train=60,
        heldout=20,
        short=False,
        options={"products": {"min_terms": 2, "max_terms": 2, "max_digits": 1}},
    ),
    rewards=(
        # The team's score is measured; each role learns from its own part of it, for the verdict changes no answer here.
        Reward(Correct(exact, SAY), weight=0.0, name="correct"),
        Reward(AnswersWell(exact, SAY), name="answers"),
        Reward(JudgesWell(exact, SAY), weight=0.0, name="judges"),
        Reward(JudgesWell(exact, SAY, rejection=0.2), name="judges_fairly"),
    ),
    params={"team": Base("assets/smollm2-135m")},
    roles={
        "generator": Role(params="team", max_tokens=8, system=BRIEF),
        "evaluator": Role(params="team", max_tokens=4, system=BRIEF),
    },
    method="dr_mas_unscaled",
    optimizers={"team": AdamW(lr=2e-5)},
    steps=8,
    batch=8,
    group_size=8,
    learner=Learner(rows=4, lengths=(256,)),
    rollout=Rollout(slots=16, context=96, prefill_rows=4, chunk=32, block=8),
    evaluation=Evaluation(tasks=20, samples=8),
)
