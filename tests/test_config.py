"""Configs: what cannot work is refused in words, and what changed between two runs is named."""

import dataclasses
import importlib.util
import json
import sys
from dataclasses import replace
from functools import partial

import pytest

from mas_jax.config import (
    FREE,
    AdamW,
    Base,
    ConfigError,
    Evaluation,
    Experiment,
    Learner,
    Limits,
    Loss,
    Mesh,
    Reward,
    Role,
    Rollout,
    Task,
    differences,
    fingerprint,
    function_name,
    validate,
)
from mas_jax.rollout.workflow import workflow


@workflow(roles=("solver", "critic"))
def solve(task, team):
    yield


def tasks():
    return [Task("a", "p")], []


def right(trace):
    return 1.0


BASE = Experiment(
    workflow=solve,
    tasks=tasks,
    rewards=(Reward(right),),
    params={"team": Base("model")},
    roles={"solver": Role("team"), "critic": Role("team")},
)
SOLVER, CRITIC = Role("team"), Role("team")


def roles(**solver):
    return {"roles": {"solver": Role(**{"params": "team"} | solver), "critic": CRITIC}}


def plain(task, team):
    yield


# change of the experiment -> field that the error names, value, words of the remedy
REFUSED = {
    "no params": ({"params": {}}, "params", {}, "name at least one"),
    "a role that the workflow calls and nobody configured": (
        {"roles": {"solver": SOLVER}}, "roles", ["solver"], "'critic', which has no entry"),
    "a role that the workflow does not know": (
        {"roles": BASE.roles | {"extra": SOLVER}}, "roles.extra", "extra", "['critic', 'solver']"),
    "a role without params": (roles(params="nobody"), "roles.solver.params", "nobody", "['team']"),
    "max_tokens 0": (roles(max_tokens=0), "roles.solver.max_tokens", 0, "1 or more"),
    "a reply as long as the window": (roles(max_tokens=512), "roles.solver.max_tokens", 512, "rollout.context = 512"),
    "temperature 0": (roles(temperature=0.0), "roles.solver.temperature", 0.0, "evaluation.temperature 0 is greedy"),
    "trainable params that no role uses": (
        {"params": {"team": Base("model"), "spare": Base("other")}}, "params.spare", "other", "train=False"),
    "all frozen": ({"params": {"team": Base("model", train=False)}}, "params", ["team"], "frozen"),
    "an undecorated workflow": ({"workflow": plain}, "workflow", "plain", "@workflow"),
    "a partial of an undecorated workflow": ({"workflow": partial(plain, x=1)}, "workflow", "plain", "@workflow"),
    "no rewards": ({"rewards": ()}, "rewards", (), "at least one"),
    "two rewards of one name": ({"rewards": (Reward(right), Reward(right))}, "rewards", ["right", "right"], "name="),
    "rewards without weight": ({"rewards": (Reward(right, weight=0.0),)}, "rewards", ["right"], "every weight is 0"),
    "an optimizer of nothing": ({"optimizers": {"tema": AdamW()}}, "optimizers.tema", "tema", "['team']"),
    "an unknown schedule": (
        {"optimizers": {"team": AdamW(schedule="step")}}, "optimizers.team.schedule", "step", "cosine"),
    "a decay without an end": (
        {"optimizers": {"team": AdamW(schedule="linear")}}, "optimizers.team.decay_steps", 0, "how many updates"),
    "a negative lr": ({"optimizers": {"team": AdamW(lr=-1.0)}}, "optimizers.team.lr", -1.0, "negative"),
    "a b2 of 1": ({"optimizers": {"team": AdamW(b2=1.0)}}, "optimizers.team.b2", 1.0, "[0, 1)"),
    "no turns": ({"limits": Limits(turns=0)}, "limits.turns", 0, "1 or more"),
    "failures in percent": ({"limits": Limits(failures=20.0)}, "limits.failures", 20.0, "from 0 to 1"),
    "tools without time": ({"rollout": Rollout(tool_seconds=0.0)}, "rollout.tool_seconds", 0.0, "above 0"),
    "an evaluation of nothing": ({"evaluation": Evaluation(tasks=0)}, "evaluation.tasks", 0, "1 or more"),
    "an unknown KL estimator": ({"loss": Loss(kl_estimator="k9")}, "loss.kl_estimator", "k9", "k1, k2 or k3"),
    "a negative clip": ({"loss": Loss(clip_low=-0.1)}, "loss.clip_low", -0.1, "negative"),
    "a negative KL weight": ({"loss": Loss(kl=-1.0)}, "loss.kl", -1.0, "negative"),
    "steps 0": ({"steps": 0}, "steps", 0, "1 or more"),
    "batch 0": ({"batch": 0}, "batch", 0, "1 or more"),
    "group_size 0": ({"group_size": 0}, "group_size", 0, "1 or more"),
    "slots 0": ({"rollout": Rollout(slots=0)}, "rollout.slots", 0, "1 or more"),
    "block 0": ({"rollout": Rollout(block=0)}, "rollout.block", 0, "1 or more"),
    "rows 0": ({"learner": Learner(rows=0)}, "learner.rows", 0, "1 or more"),
    "a window that is no multiple of the chunk": (
        {"rollout": Rollout(context=500)}, "rollout.context", 500, "rollout.chunk = 64"),
    "too few pages": ({"rollout": Rollout(pages=31)}, "rollout.pages", 31, "= 32 pages"),
    "four lengths": ({"learner": Learner(lengths=(1, 2, 3, 512))}, "learner.lengths", (1, 2, 3, 512), "one to three"),
    "lengths that fall": ({"learner": Learner(lengths=(512, 128))}, "learner.lengths", (512, 128), "rising"),
    "lengths that hold no whole row": (
        {"learner": Learner(lengths=(128, 511))}, "learner.lengths", (128, 511), "rollout.context = 512"),
    "an unknown dtype": ({"learner": Learner(dtype="float16")}, "learner.dtype", "float16", "bfloat16"),
    "more minibatches than episodes": (
        {"learner": Learner(minibatches=129)}, "learner.minibatches", 129, "batch x group_size = 128"),
}  # fmt: skip


def test_a_sound_experiment_passes():
    assert validate(BASE) is None
    assert validate(replace(BASE, workflow=partial(solve, rounds=2))) is None


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_with_field_value_and_remedy(what):
    change, field, value, remedy = REFUSED[what]
    with pytest.raises(ConfigError) as caught:
        validate(replace(BASE, **change))
    error = caught.value
    assert (error.field, error.value) == (field, value)
    assert remedy in error.remedy
    assert str(error) == f"{field} = {value!r}: {error.remedy}"


def test_frozen_params_that_no_role_uses_are_allowed():
    assert validate(replace(BASE, params={"team": Base("model"), "spare": Base("other", train=False)})) is None


def test_a_reward_takes_the_name_of_its_function_unless_named():
    assert Reward(right).name == Reward(partial(right)).name == "right"
    assert Reward(right, name="mine").name == "mine"

    class Judge:
        def __call__(self, trace):
            return 1.0

    assert function_name(Judge()) == "Judge"


def test_the_fingerprint_is_the_same_after_json_and_in_the_same_process():
    flat = fingerprint(BASE)
    assert differences(json.loads(json.dumps(flat)), fingerprint(replace(BASE))) == []


CHANGES = {
    "roles.solver.temperature": {"roles": {"solver": Role("team", temperature=0.7), "critic": CRITIC}},
    "params.team.path": {"params": {"team": Base("elsewhere")}},
    "learner.lengths.1": {"learner": Learner(lengths=(128, 1024))},
    "optimizers.team.lr": {"optimizers": {"team": AdamW(lr=0.5)}},
    "rewards.0.weight": {"rewards": (Reward(right, weight=0.5),)},
    "seed": {"seed": 1},
    "mesh.fsdp": {"mesh": Mesh(fsdp=2)},
    "evaluation.samples": {"evaluation": Evaluation(samples=3)},
}


@pytest.mark.parametrize("field", CHANGES)
def test_what_changed_is_named_with_old_and_new_value(field):
    new = fingerprint(replace(BASE, **CHANGES[field]))
    lines = differences(fingerprint(BASE), new)
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    assert line.endswith(f"-> {new[field]!r}")
    assert all(line.startswith(field.rpartition(".")[0]) for line in lines)


def test_fields_that_change_only_speed_or_length_may_change():
    longer = replace(
        BASE,
        steps=999,
        checkpoint_every=1,
        keep=5,
        limits=Limits(failures=0.9),
        rollout=Rollout(tool_workers=7),
        learner=Learner(gap_alarm=1.0),
    )
    assert fingerprint(longer) != fingerprint(BASE)
    assert differences(fingerprint(BASE), fingerprint(longer)) == []


def test_every_free_field_is_a_field():
    assert set(FREE) <= fingerprint(BASE).keys()


def test_a_free_field_does_not_free_another_that_begins_alike():
    assert differences({"steps": 1, "steps_more": 1, "keep.x": 1}, {"steps": 2, "steps_more": 2, "keep.x": 2}) == [
        "steps_more: 1 -> 2"
    ]


def score_in(path, source):
    """The fingerprint of `score` in a config file of this text, loaded as the command line loads it."""
    path.parent.mkdir()
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("config_of_a_test", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return fingerprint({"fn": module.score})
    finally:
        del sys.modules[spec.name]


FUNCTION = "def score(trace):\n    return {}\n"
LAMBDA = "score = lambda trace: {}\n"
OBJECT = "class Judge:\n    def __call__(self, trace):\n        return {}\n\nscore = Judge()\n"
DATACLASS = (
    "import dataclasses\n\n@dataclasses.dataclass(frozen=True)\nclass Judge:\n    bonus: float = 0.0\n\n"
    "    def __call__(self, trace):\n        return {}\n\nscore = Judge()\n"
)


@pytest.mark.parametrize(
    "kind", [FUNCTION, LAMBDA, OBJECT, DATACLASS], ids=["function", "lambda", "object", "dataclass"]
)
def test_a_changed_source_of_a_reward_is_noticed_and_an_unchanged_one_is_not(tmp_path, kind):
    old, new, again = (
        score_in(tmp_path / name / "mine.py", kind.format(value))
        for name, value in [("old", "1.0"), ("new", "2.0"), ("again", "1.0")]
    )
    assert len(differences(old, new)) == 1 and differences(old, new)[0].startswith("fn")
    assert differences(old, again) == []


def test_arguments_bound_by_partial_are_part_of_the_fingerprint():
    one, two = (fingerprint(replace(BASE, workflow=partial(solve, rounds=rounds))) for rounds in (2, 3))
    assert differences(one, two) == ["workflow.keywords.rounds: 2 -> 3"]


def test_no_field_of_a_config_can_be_overlooked_by_the_fingerprint():
    flat = fingerprint(BASE)
    for field in dataclasses.fields(Experiment):
        value = object.__getattribute__(BASE, field.name)
        assert value == {} or any(key == field.name or key.startswith(f"{field.name}.") for key in flat)


def test_a_built_in_function_has_a_fingerprint_without_an_address():
    flat = fingerprint(replace(BASE, workflow=partial(solve, say=str.strip)))
    assert flat == fingerprint(replace(BASE, workflow=partial(solve, say=str.strip)))
    assert flat["workflow.keywords.say"].startswith("strip@")
