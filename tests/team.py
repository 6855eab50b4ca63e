"""The tiny team that tests train: a model directory, workflows of two agents with planted rules, and an experiment of both."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from shapes import BLOCK, CHUNK, CONTEXT, LENGTHS, PREFILL_ROWS, ROWS, SLOTS, TINY

from mas_jax import (
    AdamW,
    Base,
    Call,
    Evaluation,
    Experiment,
    Learner,
    Mesh,
    Reward,
    Role,
    Rollout,
    Task,
    user,
    workflow,
)
from mas_jax.config import Limits

# 266 characters and six specials: every id of the model has a text.
ALPHABET = "\n" + "".join(map(chr, (*range(32, 127), *range(0xA1, 0xA1 + 170))))
ONE_DEVICE = Mesh(data=1, fsdp=1, tensor=1)
ENGINE = Rollout(
    slots=SLOTS, context=CONTEXT, prefill_rows=PREFILL_ROWS, chunk=CHUNK, block=BLOCK, tool_workers=1, tool_seconds=30.0
)
LEARNER = Learner(rows=ROWS, lengths=LENGTHS, dtype="float32")


def save_model(path: Path, seed: int = 0, config=TINY) -> Path:
    """A Hugging Face directory of a tiny model with its tokenizer; logits are far from uniform, attention too."""
    import jax

    from mas_jax.models import hf, transformer
    from mas_jax.models.tokenizer import save_char_tokenizer

    params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(seed))
    params |= {
        "layers": jax.tree.map(lambda x: x * 8 if x.ndim > 2 else x, params["layers"]),
        "embed": params["embed"] * 8,
    }
    hf.save(path, config, params)
    save_char_tokenizer(path, ALPHABET)
    return path


@workflow(roles=("asker", "helper"))
def talk(task, team, rounds=3):
    """Two agents in conversation, each continuing its own; lengths are ragged, and some tasks break now and then."""
    asks, helps = [user("a{problem}", problem=task.prompt)], []
    for _ in range(rounds):
        question = yield Call("asker", asks, max_tokens=int(team.rng.integers(1, 7)))
        helps.append(user("h{question}", question=question))
        answer = yield Call("helper", helps, max_tokens=int(team.rng.integers(1, 7)))
        asks += [question, user("{answer}", answer=answer)]
        helps.append(answer)
        if task.answer == "breaks" and team.rng.random() < 0.15:
            raise ValueError("planted failure")
    return answer


@workflow(roles=("even", "odd"))
def parity(task, team):
    """One says something, the other answers it: `even` is rewarded for even ids, `odd` for odd ones."""
    said = yield Call("even", [user("e{problem}", problem=task.prompt)])
    return (yield Call("odd", [user("o{said}", said=said)]))


@dataclass(frozen=True)
class Parities:
    """For each role the share of its tokens that have the parity it should."""

    wanted: tuple[tuple[str, int], ...]

    def __call__(self, trace):
        return {
            role: float(np.mean([token % 2 == parity for turn in trace.of(role) for token in turn.tokens]))
            for role, parity in self.wanted
            if trace.of(role)
        }


@dataclass(frozen=True)
class Letters:
    """Tasks named by letters; every `broken`th breaks."""

    train: int = 7
    heldout: int = 4
    broken: int = 0

    def __call__(self):
        def task(i, name):
            return Task(f"{name}{i}", chr(97 + i % 26), "breaks" if self.broken and i % self.broken == 0 else "")

        return [task(i, "t") for i in range(self.train)], [task(i, "h") for i in range(self.heldout)]


def parity_team(model: Path, **changes) -> Experiment:
    """Learns its rule in 20 steps of a fifth of a second."""
    rule = Parities((("even", 0), ("odd", 1)))
    experiment = Experiment(
        workflow=parity,
        tasks=Letters(heldout=20),
        rewards=(Reward(rule, name="parity"),),
        params={"team": Base(str(model))},
        roles={"even": Role("team", max_tokens=4), "odd": Role("team", max_tokens=4)},
        method="dr_mas",
        optimizers={"team": AdamW(lr=2e-2)},
        steps=20,
        batch=4,
        group_size=16,
        checkpoint_every=100,
        learner=LEARNER,
        rollout=ENGINE,
        mesh=ONE_DEVICE,
        evaluation=Evaluation(tasks=20),
    )
    return replace(experiment, **changes)


def talking_team(model: Path, **changes) -> Experiment:
    """Ragged conversations of several turns, with failures, two epochs and two minibatches."""
    rule = Parities((("asker", 0), ("helper", 1)))
    experiment = Experiment(
        workflow=partial(talk, rounds=3),
        tasks=Letters(train=5, heldout=2, broken=3),
        rewards=(Reward(rule, name="parity"),),
        params={"team": Base(str(model))},
        roles={"asker": Role("team", max_tokens=6, temperature=0.8), "helper": Role("team", max_tokens=6)},
        method="grpo",
        optimizers={"team": AdamW(lr=3e-3, warmup=2)},
        steps=3,
        batch=3,
        group_size=4,
        checkpoint_every=1,
        limits=Limits(failures=0.9),
        learner=replace(LEARNER, epochs=2, minibatches=2),
        rollout=ENGINE,
        mesh=ONE_DEVICE,
        evaluation=Evaluation(tasks=2),
    )
    return replace(experiment, **changes)
