"""The quickstart in a minute: a generator and an evaluator of 0.8 million parameters learn to add.

    make quickstart-tiny       # mas-jax train configs/quickstart.py

Hardware: 2 CPU cores, 1 GB. Time: under two minutes, compilation included. Score: held-out accuracy .64 -> .9.
"""

from functools import partial

from mas_jax import AdamW, Base, Evaluation, Experiment, Learner, Reward, Role, Rollout
from mas_jax.rollout.tasks.reasoning import exact, reasoning
from mas_jax.rollout.workflows.eval_opt import Prompts, eval_opt
from mas_jax.rollout.workflows.eval_opt_rewards import AnswersWell, Correct, JudgesWell


def verdict(review):
    """The last word of a review such as "41 Incorrect"."""
    return review.split()[-1] if review.strip() else None


# The same words as in the demonstrations of quickstart_sft.py.
SAY = Prompts(
    solve="{problem}",
    judge="{problem}\n{draft}?",
    refine="{problem}\n{draft}\n{review}",
    answer=str.strip,
    verdict=verdict,
)

experiment = Experiment(
    workflow=partial(eval_opt, rounds=2, say=SAY),
    tasks=reasoning(
        "chain_sum",
        train=6000,
        heldout=400,
        options={"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}},
    ),
    rewards=(
        Reward(Correct(exact, SAY), name="correct"),
        Reward(AnswersWell(exact, SAY), weight=0.0, name="answers"),
        Reward(JudgesWell(exact, SAY), weight=0.5, name="judges"),
    ),
    params={"team": Base("assets/quickstart")},
    roles={
        "generator": Role(params="team", max_tokens=8),
        "evaluator": Role(params="team", max_tokens=16),
    },
    method="dr_mas",
    optimizers={"team": AdamW(lr=3e-4)},
    steps=60,
    batch=16,
    group_size=8,
    learner=Learner(rows=8, lengths=(256,)),
    rollout=Rollout(slots=64, context=64, prefill_rows=16, chunk=16, block=4),
    evaluation=Evaluation(tasks=400, every=10),
)
