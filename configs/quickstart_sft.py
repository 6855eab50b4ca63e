"""The quickstart's starting point: a small Qwen3-type decoder, from scratch, cloned from careless demonstrators.

    mas-jax sft configs/quickstart_sft.py          # learns to add, to judge and to refine: about 10 minutes on 2 CPU cores
    mas-jax sft configs/quickstart_careless.py     # learns to slip: a minute; its export is assets/quickstart

Careful demonstrators first, careless ones last: a careless draft is right 6 times in 10, what an evaluator works out 7 in 10. So the
clone speaks every format of the team (draft, verdict, refinement) and is far from its best, which reinforcement learning then finds.
"""

import random
from dataclasses import dataclass

from mas_jax.config import AdamW, Base, Cloning, Example, Learner
from mas_jax.rollout.tasks.reasoning import reasoning

TASKS = reasoning(
    "chain_sum",
    train=6000,
    heldout=400,
    options={"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}},
)


@dataclass(frozen=True)
class Demonstrations:
    """Drafts, verdicts and refinements for training tasks; none for held-out ones."""

    copies: int = 4
    draft_right: float = 1.0
    verdict_right: float = 1.0
    seed: int = 0

    def __call__(self) -> list[Example]:
        rng = random.Random(self.seed)
        train, _ = TASKS()
        examples = []
        for copy in range(self.copies):
            for task in train:
                examples += self._demonstrate(task, rng, copy)
        return examples

    def _demonstrate(self, task, rng, copy):
        draft = self._answer(task, rng, self.draft_right)
        yield Example(f"{task.id}/draft/{copy}", task.prompt, draft, "generator")
        shown = self._answer(task, rng, 0.5)
        yield Example(
            f"{task.id}/judge/{copy}", f"{task.prompt}\n{shown}?", self._verdict(task, shown, rng), "evaluator"
        )
        wrong = slip(task.answer, rng)
        review = f"{self._answer(task, rng, 0.7)} Incorrect"
        better = self._answer(task, rng, self.draft_right)
        yield Example(f"{task.id}/refine/{copy}", f"{task.prompt}\n{wrong}\n{review}", better, "generator")

    def _answer(self, task, rng, right):
        return task.answer if rng.random() < right else slip(task.answer, rng)

    def _verdict(self, task, shown, rng):
        """The evaluator works the answer out for itself, then compares."""
        own = self._answer(task, rng, self.verdict_right)
        return f"{own} {'Correct' if own == shown else 'Incorrect'}"


def slip(answer: str, rng: random.Random) -> str:
    """A wrong answer of the kind people write: off by a little, or a digit wrong."""
    value = int(answer)
    while True:
        wrong = value + rng.choice([-10, -3, -2, -1, 1, 2, 3, 10])
        if value < 0 or wrong > 0:
            return str(wrong)


experiment = Cloning(
    base=Base("assets/quickstart", scratch=True),
    examples=Demonstrations(),
    optimizer=AdamW(lr=2e-3, warmup=50, schedule="cosine", decay_steps=1500, floor=0.1, weight_decay=0.01),
    steps=1500,
    batch=128,
    learner=Learner(rows=8, lengths=(256,)),
)
