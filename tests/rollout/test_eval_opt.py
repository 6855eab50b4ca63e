"""The Eval-Opt team: the method's loop, in few lines, and its rewards."""

import functools
import inspect

import pytest

from mas_jax.config import Limits, Role, Task
from mas_jax.rollout.driver import Driver
from mas_jax.rollout.sampling_plan import independent
from mas_jax.rollout.scripted import Scripted
from mas_jax.rollout.tool_pool import ToolPool
from mas_jax.rollout.workflows.eval_opt import eval_opt
from mas_jax.rollout.workflows.eval_opt_rewards import AnswersWell, Correct, JudgesWell

TASK = Task("a", "6*7=", "42")
RIGHT, WRONG = "It is \\boxed{42}", "It is \\boxed{41}"
YES, NO, MUMBLE = "\\boxed{Correct}", "\\boxed{Incorrect}", "hard to say"


def right(task, answer):
    return answer == task.answer


def play(*said, **settings):
    """The trace of a team that says these things, one after the other."""
    replies = iter(said)
    roles = {"generator": Role("team"), "evaluator": Role("team")}
    group = Scripted(lambda request: next(replies))
    flow = functools.partial(eval_opt, **settings)
    driver = Driver(flow, roles, {"team": group}, limits=Limits(failures=0.0), tools=ToolPool({}))
    (trace,) = driver.play(independent([TASK], 1, "0"))
    assert next(replies, None) is None, "something was left unsaid"
    return trace


def spoken(trace):
    return "".join(turn.role[0] for turn in trace.turns)


def test_stops_as_soon_as_the_evaluator_is_satisfied():
    trace = play(RIGHT, YES)
    assert (spoken(trace), trace.answer, trace.result_source) == ("ge", RIGHT, "0")


@pytest.mark.parametrize("verdict", [NO, MUMBLE, "", "\\boxed{correct}", "Correct"])
def test_refines_on_any_verdict_but_correct(verdict):
    trace = play(WRONG, verdict, RIGHT, YES)
    assert (spoken(trace), trace.answer) == ("gege", RIGHT)


def test_after_the_last_round_the_draft_stands_and_nobody_refines_it():
    trace = play(WRONG, NO, WRONG, NO, RIGHT, NO)
    assert (spoken(trace), trace.answer, trace.result_source) == ("gegege", RIGHT, "4")


def test_rounds_bound_the_judgements():
    assert spoken(play(WRONG, NO, rounds=1)) == "ge"
    assert spoken(play(WRONG, NO, WRONG, NO, rounds=2)) == "gege"


def test_the_evaluator_reads_the_draft_and_the_generator_both_draft_and_review():
    trace = play(WRONG, NO, RIGHT, YES)
    assert [[read.source for read in turn.reads] for turn in trace.turns] == [[], ["0"], ["0", "1"], ["2"]]
    assert WRONG in trace.turns[1].prompt_text and NO in trace.turns[2].prompt_text
    assert "6*7=" in trace.turns[0].prompt_text and "\\boxed{}." in trace.turns[0].prompt_text


def test_the_workflow_reads_like_the_method_in_under_40_lines():
    assert len(inspect.getsource(eval_opt).splitlines()) < 40


def test_the_team_is_right_when_its_last_draft_is():
    assert Correct(right)(play(WRONG, NO, RIGHT, YES)) == 1.0
    assert Correct(right)(play(RIGHT, NO, WRONG, YES)) == 0.0
    assert Correct(right)(play("no box", YES)) == 0.0


def test_each_draft_is_judged_by_itself():
    assert AnswersWell(right)(play(RIGHT, NO, WRONG, YES)) == {"0": 1.0, "2": 0.0}


def test_an_evaluator_is_right_when_it_agrees_with_the_truth_about_the_draft_it_read():
    trace = play(RIGHT, NO, WRONG, MUMBLE, RIGHT, YES)
    assert JudgesWell(right)(trace) == {"1": 0.0, "3": 0.0, "5": 1.0}
    assert JudgesWell(right)(play(WRONG, NO, WRONG, YES)) == {"1": 1.0, "3": 0.0}


def test_a_right_rejection_may_be_worth_less_than_a_right_acceptance():
    judge = JudgesWell(right, rejection=0.2)
    assert judge(play(WRONG, NO, RIGHT, YES)) == {"1": 0.2, "3": 1.0}
    assert judge(play(RIGHT, NO, WRONG, MUMBLE, WRONG, YES)) == {"1": 0.0, "3": 0.0, "5": 0.0}
