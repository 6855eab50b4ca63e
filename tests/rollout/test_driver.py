"""The driver, with a scripted sampler: what a workflow gets, what the trace says, and who fails with whom."""

import dataclasses
import functools

import numpy as np
import pytest
import trace_schema
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.config import ConfigError, Limits, Role, Task
from mas_jax.graph import rows, to_json
from mas_jax.rollout.driver import Driver, RolloutError, stream_key
from mas_jax.rollout.rehearsal import rehearse
from mas_jax.rollout.sampling_plan import independent
from mas_jax.rollout.scripted import Scripted
from mas_jax.rollout.tool_pool import ToolPool
from mas_jax.rollout.workflow import BudgetStop, Call, Tool, assistant, system, user, workflow

TASKS = [Task("a", "1+1=", "2"), Task("b", "2+2=", "4")]
ROLES = {"solver": Role("team"), "critic": Role("team")}


def echo(request):
    """Says which role speaks and how long its prompt is: a function of the request alone."""
    return f"{request.role}{len(request.prompt)}"


def played(
    flow,
    *,
    script=echo,
    tasks=TASKS[:1],
    size=1,
    roles=ROLES,
    tools=None,
    seed=0,
    group=None,
    temperature=-1.0,
    pool=None,
    failures=0.0,
    **limits,
):
    """Traces of a workflow and the group that sampled for it."""
    group = group or Scripted(script)
    flow = flow if hasattr(flow, "roles") else workflow(roles=tuple(roles))(flow)
    pool = pool or ToolPool(tools or {}, workers=1)
    try:
        driver = Driver(flow, roles, {"team": group}, limits=Limits(failures=failures, **limits), tools=pool, seed=seed)
        return driver.play(independent(tasks, size, "0"), temperature=temperature), group
    finally:
        pool.close()


def one(flow, **rest):
    """The trace of one episode."""
    (trace,), _ = played(flow, **rest)
    trace_schema.check(to_json(trace))
    return trace


def calls(text, n, role="solver"):
    return [Call(role, [user(f"{text}{i}")]) for i in range(n)]


# What comes back


def test_a_call_gives_a_reply_and_the_result_is_what_was_returned():
    def flow(task, team):
        reply = yield Call("solver", [user(task.prompt)])
        return reply

    trace = one(flow, script=lambda r: "two")
    (turn,) = trace.turns
    assert (trace.stop, trace.answer, trace.result_source) == ("done", "two", "0")
    assert (turn.id, turn.t, turn.name, turn.policy, turn.finish) == ("0", 1, "solver/0", "team", "stop")
    assert turn.tokens == [*b"two", Scripted(echo).tokenizer.stop_ids[0]], "the stop token is sampled and trained"
    assert turn.text == "two" and turn.prompt_text == "<|user|>1+1=<|end|><|assistant|>"


def test_a_list_runs_in_parallel_and_gives_results_in_its_own_order():
    def flow(task, team):
        replies = yield calls("q", 3)
        last = yield Call("critic", [user("{a} {b} {c}", a=replies[0], b=replies[1], c=replies[2])])
        return [r.text for r in replies] + [last.text]

    trace = one(flow, group=Scripted(lambda r: r.text[8:10], per_poll=1))
    assert trace.result[:3] == ["q0", "q1", "q2"]
    assert [(t.id, t.t, t.name) for t in trace.turns] == [
        ("0.0", 1, "solver/0"), ("0.1", 1, "solver/1"), ("0.2", 1, "solver/2"), ("1", 2, "critic/0"),
    ]  # fmt: skip
    assert [read.source for read in trace.turns[3].reads] == ["0.0", "0.1", "0.2"]


def test_all_waiting_calls_of_all_live_episodes_go_out_at_once():
    batches = []

    class Watched(Scripted):
        def submit(self, requests):
            batches.append(len(requests))
            super().submit(requests)

    def flow(task, team):
        yield calls("q", 3)
        yield Call("solver", [user("last")])

    played(flow, group=Watched(echo), tasks=TASKS, size=4)
    assert batches == [8 * 3, 8]


def test_branches_are_generators_in_a_list_with_their_own_paths_times_and_agents():
    def branch(n):
        said = []
        for _ in range(n):
            said.append((yield Call("solver", [user("x")])))
        inner = yield [Call("critic", [user("y")])]
        return len(said), inner[0].turn

    def flow(task, team):
        found = yield [branch(1), Call("critic", [user("z")]), branch(2)]
        last = yield Call("solver", [user("end")])
        return found[0], found[2], last.turn

    trace = one(flow)
    assert trace.result == ((1, "0.0.1.0"), (2, "0.2.2.0"), "1")
    assert {(t.id, t.t, t.name) for t in trace.turns} == {
        ("0.0.0", 1, "solver/0"), ("0.0.1.0", 2, "critic/0"), ("0.1", 1, "critic/1"), ("0.2.0", 1, "solver/2"),
        ("0.2.1", 2, "solver/2"), ("0.2.2.0", 3, "critic/0"), ("1", 4, "solver/0"),
    }  # fmt: skip


def test_yield_from_is_plain_reuse():
    def twice(text):
        first = yield Call("solver", [user(text)])
        second = yield Call("solver", [user("again: {x}", x=first)])
        return second

    def flow(task, team):
        reply = yield from twice("go")
        return (yield Call("critic", [user("{x}", x=reply)]))

    trace = one(flow)
    assert [(t.id, t.t, [r.source for r in t.reads]) for t in trace.turns] == [
        ("0", 1, []),
        ("1", 2, ["0"]),
        ("2", 3, ["1"]),
    ]


def test_an_empty_list_gives_an_empty_list():
    def flow(task, team):
        return (yield []), (yield Call("solver", [user("x")])).turn

    assert one(flow).result == ([], "1")


def test_the_agent_is_the_place_in_the_list_unless_the_call_says_so():
    def flow(task, team):
        yield [Call("solver", [user("x")], agent=7), Call("solver", [user("x")])]
        yield Call("solver", [user("x")], agent=7)

    assert [t.agent for t in one(flow).turns] == [7, 1, 7]


def test_n_calls_of_one_role_are_n_events_with_n_rows():
    def flow(task, team):
        yield [Call("solver", [user("the same")]) for _ in range(9)]

    trace = one(flow)
    assert len({t.id for t in trace.turns}) == len({t.name for t in trace.turns}) == len(rows(trace)) == 9


# Random streams and repeatability


def branchy(task, team):
    """Replies, branches, the workflow's own randomness: everything a trace depends on."""

    def branch(n):
        for _ in range(n):
            reply = yield Call("solver", [user("{n}", n=int(team.rng.integers(1000)))])
            yield Call("critic", [user("{r} {n}", r=reply, n=int(team.rng.integers(1000)))])
        return reply

    n = int(team.rng.integers(1, 4))
    found = yield [branch(1 + (i + n) % 3) for i in range(n)]
    return (yield Call("critic", [user("pick {a}", a=found[-1])]))


def plain(trace):
    """A trace without its clock."""
    document = to_json(trace)
    del document["costs"]["wall_clock_s"]
    return document, [(t.prompt, t.tokens, t.reads) for t in trace.turns]


@functools.cache
def undisturbed():
    traces, group = played(branchy, tasks=TASKS, size=3)
    return [plain(trace) for trace in traces], {r.id: r.key.tolist() for r in group.seen}


@settings(max_examples=25)
@given(per_poll=st.integers(1, 12), shuffle=st.randoms(use_true_random=False))
def test_traces_do_not_depend_on_the_order_in_which_replies_arrive(per_poll, shuffle):
    class Shuffled(Scripted):
        def poll(self):
            shuffle.shuffle(self._queue)
            return super().poll()

    traces, group = played(branchy, tasks=TASKS, size=3, group=Shuffled(echo, per_poll=per_poll))
    wanted, keys = undisturbed()
    assert [plain(trace) for trace in traces] == wanted
    assert {r.id: r.key.tolist() for r in group.seen} == keys


def test_an_episode_played_alone_is_the_episode_played_among_others():
    wanted, _ = undisturbed()
    plan = independent(TASKS, 3, "0")[4]
    driver = Driver(
        workflow(roles=("solver", "critic"))(branchy), ROLES, {"team": Scripted(echo)}, limits=Limits(), tools=ToolPool({})
    )  # fmt: skip
    assert plain(driver.play([plan])[0]) == wanted[4]


def test_all_samples_of_a_group_draw_from_pairwise_different_streams_and_rerun_identically():
    def flow(task, team):
        yield calls("q", 2)
        yield Call("critic", [user("x")])

    runs = [played(flow, tasks=[TASKS[0], TASKS[0]], size=8, seed=seed)[1].seen for seed in (0, 0, 1)]
    keys = [{request.id: tuple(request.key.tolist()) for request in seen} for seen in runs]
    assert len(set(keys[0].values())) == len(keys[0]) == 2 * 8 * 3
    assert keys[0] == keys[1]
    assert not set(keys[0].values()) & set(keys[2].values())


def test_stream_keys_differ_where_any_part_differs_and_are_two_words():
    keys = [
        stream_key(*parts)
        for parts in [(0, "g", 1, "0"), (0, "g", 1, "1"), (0, "g", 2, "0"), (0, "h", 1, "0"), (1, "g", 1, "0")]
    ]
    assert len({tuple(key.tolist()) for key in keys}) == 5
    assert {(key.shape, key.dtype) for key in keys} == {((2,), np.dtype(np.uint32))}


def test_the_workflows_own_randomness_differs_by_sample_and_branch():
    def branch(team):
        drawn = [float(team.rng.random())]
        yield Call("solver", [user("x")])
        return drawn + [float(team.rng.random())]

    def flow(task, team):
        before = float(team.rng.random())
        found = yield [branch(team) for _ in range(3)]
        return [before, *found[0], *found[1], *found[2], float(team.rng.random())]

    traces, _ = played(flow, size=4)
    drawn = [number for trace in traces for number in trace.result]
    assert len(set(drawn)) == 4 * 8


# Prompts that reach the sampler


def test_the_ids_that_enter_the_sampler_are_those_of_the_template_and_nothing_more():
    group = Scripted(echo)
    conversation = [system("Be brief."), user("2+2="), assistant("4"), user("3+3=")]

    def flow(task, team):
        yield Call("solver", conversation)

    played(flow, group=group)
    plain_messages = [{"role": m.role, "content": m.content} for m in conversation]
    assert group.seen[0].prompt == group.tokenizer.encode(group.tokenizer.render(plain_messages))
    assert group.seen[0].text == group.tokenizer.render(plain_messages)


def test_a_roles_system_message_stands_first_unless_the_call_brings_one():
    roles = {"solver": Role("team", system="Be kind.")}

    def flow(task, team):
        yield Call("solver", [user("x")])
        yield Call("solver", [system("Be strict."), user("x")])

    _, group = played(flow, roles=roles)
    assert [r.text.partition("<|end|>")[0] for r in group.seen] == ["<|system|>Be kind.", "<|system|>Be strict."]


def test_a_continued_conversation_is_one_row_and_no_sampled_token_is_encoded_again():
    roles = {"solver": Role("team", system="Be kind.")}

    def flow(task, team):
        messages = [user("x")]
        for _ in range(3):
            reply = yield Call("solver", messages)
            messages += [reply, user("go on")]

    trace = one(flow, roles=roles)
    (row,) = rows(trace)
    assert [t.continues for t in trace.turns] == ["", "0", "1"]
    assert row.sampled.sum() == sum(len(t.tokens) for t in trace.turns)


def test_temperature_is_the_roles_own_unless_overridden():
    roles = {"solver": Role("team", temperature=0.7)}

    def flow(task, team):
        yield Call("solver", [user("x")])

    for override, wanted in ((-1.0, 0.7), (0.0, 0.0), (0.3, 0.3)):
        (trace,), group = played(flow, roles=roles, temperature=override)
        assert group.seen[0].temperature == trace.turns[0].temperature == wanted


# Limits


def test_max_tokens_of_a_call_may_only_lower_the_roles_limit():
    def flow(task, team):
        for limit in (None, 3, 99):
            yield Call("solver", [user("x")], max_tokens=limit)

    trace = one(flow, roles={"solver": Role("team", max_tokens=5)}, script=lambda r: "abcdefgh")
    assert [(t.text, t.finish, len(t.tokens)) for t in trace.turns] == [
        ("abcde", "length", 5),
        ("abc", "length", 3),
        ("abcde", "length", 5),
    ]


def test_a_reply_that_ends_exactly_at_its_limit_has_stopped():
    def flow(task, team):
        yield Call("solver", [user("x")], max_tokens=4)

    (turn,) = one(flow, script=lambda r: "abc").turns
    assert (turn.text, turn.finish, len(turn.tokens)) == ("abc", "stop", 4)


def test_a_reply_cut_by_the_window_says_so():
    def flow(task, team):
        yield Call("solver", [user("x")])

    (turn,) = one(flow, group=Scripted(lambda r: "abcdefgh", context=10)).turns
    assert len(turn.prompt) == 4 and (turn.text, turn.finish) == ("abcdef", "window")


def test_a_prompt_longer_than_the_window_is_a_budget_stop_and_the_episode_is_still_scored():
    def flow(task, team):
        yield Call("solver", [user("x")])
        yield Call("solver", [user("x" * 100)])

    trace = one(flow, group=Scripted(lambda r: "a", context=50))
    assert (trace.stop, trace.answer, len(trace.turns)) == ("budget", "", 1)
    assert trace.error == "solver: prompt of 103 tokens does not fit the window rollout.context = 50"


@pytest.mark.parametrize(("length", "stop"), [(6, "done"), (7, "budget")])
def test_a_prompt_needs_room_for_one_token(length, stop):
    def flow(task, team):
        yield Call("solver", [user("x" * length)])

    assert one(flow, group=Scripted(lambda r: "a", context=10)).stop == stop


def test_a_workflow_may_catch_a_budget_stop_and_return_what_it_has():
    def flow(task, team):
        best = yield Call("solver", [user("x")])
        try:
            while True:
                best = yield Call("solver", [user("more")])
        except BudgetStop as stop:
            return f"{best.turn} {stop}"

    trace = one(flow, turns=3)
    assert (trace.stop, trace.result) == ("done", "2 limits.turns = 3")


def test_after_a_caught_budget_stop_a_workflow_may_go_on_within_it():
    def flow(task, team):
        try:
            yield calls("q", 3)
        except BudgetStop:
            return [r.turn for r in (yield calls("q", 2))]

    trace = one(flow, turns=2)
    assert trace.result == ["1.0", "1.1"] and len(trace.turns) == 2


def test_a_workflow_that_never_heeds_its_budget_fails_alone():
    def flow(task, team):
        while True:
            try:
                yield Call("solver", [user("x")])
            except BudgetStop:
                if task.id == "b":
                    return "well"

    traces, _ = played(flow, tasks=TASKS, turns=1, failures=0.5)
    assert [trace.stop for trace in traces] == ["failed", "done"]


def test_turns_are_counted_along_a_branch_and_added_up_where_branches_join():
    def branch(team, n):
        for _ in range(n):
            yield Call("solver", [user("x")])
        return team.left.turns

    def flow(task, team):
        start = team.left.turns
        inside = yield [branch(team, 1), branch(team, 3)]
        return start, inside, team.left.turns

    assert one(flow, turns=10).result == (10, [9, 7], 6)


def test_tokens_are_counted_along_a_branch_and_cut_the_last_reply():
    def watched(task, team):
        seen.append(team.left.tokens)
        for _ in range(9):
            yield Call("solver", [user("x")])
            seen.append(team.left.tokens)

    seen = []
    trace = one(watched, script=lambda r: "abc", tokens=10)
    assert seen == [10, 6, 2, 0]
    assert [len(t.tokens) for t in trace.turns] == [4, 4, 2]
    assert (trace.stop, trace.error) == ("budget", "limits.tokens = 10")


def test_without_a_token_limit_nothing_is_left_to_tell():
    def flow(task, team):
        yield Call("solver", [user("x")])
        return team.left.tokens

    assert one(flow).result is None


# Failures


def test_an_episode_that_raises_fails_alone_and_the_others_are_as_without_it():
    def flow(task, team, bad=""):
        first = yield Call("solver", [user(task.prompt)])
        if task.id == bad:
            raise ValueError("boom")
        return (yield Call("critic", [user("{x}", x=first)]))

    broken, _ = played(functools.partial(flow, bad="a"), tasks=TASKS, size=2, failures=0.5)
    sound, _ = played(flow, tasks=TASKS, size=2)
    assert [(t.stop, t.error) for t in broken] == [("failed", "ValueError: boom")] * 2 + [("done", "")] * 2
    assert [plain(t) for t in broken[2:]] == [plain(t) for t in sound[2:]]


def raising(task, team):
    """Fails at once on task a."""
    if task.id == "a":
        raise KeyError("nothing there")
    yield Call("solver", [user("x")])


def test_a_workflow_that_raises_before_its_first_yield_fails_alone():
    traces, _ = played(raising, tasks=TASKS, failures=0.5)
    assert [(t.stop, t.error) for t in traces] == [("failed", "KeyError: 'nothing there'"), ("done", "")]


def test_past_the_threshold_the_run_stops_with_the_commonest_cause():
    with pytest.raises(
        RolloutError,
        match=r"^2 of 4 episodes failed .*allows 49%\); 2 of them with: KeyError: 'nothing there' .*0/0/a#0",
    ):
        played(raising, tasks=TASKS, size=2, failures=0.49)


def test_a_yield_of_something_else_fails_the_episode_and_names_its_type():
    def flow(task, team):
        yield "solver"

    with pytest.raises(RolloutError, match=r"TypeError: a workflow may yield .* not str"):
        played(flow)


def test_an_f_string_in_a_workflow_fails_the_episode_with_the_remedy():
    def flow(task, team):
        reply = yield Call("solver", [user("x")])
        yield Call("critic", [user(f"{reply}")])

    with pytest.raises(RolloutError, match=r"TypeError: a Reply of 'solver' was put into an f-string.*draft=reply"):
        played(flow)


def test_a_failed_branch_cancels_every_other_request_of_its_episode_and_no_one_elses():
    def bad(task):
        yield Call("critic", [user("first")])
        if task.id == "a":
            raise ValueError("boom")

    def slow():
        for i in range(3):
            yield Call("solver", [user(f"slow {i}")])

    def flow(task, team):
        yield [bad(task), slow(), slow()]

    cancelled = []

    class Watched(Scripted):
        def cancel(self, ids):
            cancelled.extend(ids)
            super().cancel(ids)

    group = Watched(echo, per_poll=1)
    traces, _ = played(flow, tasks=TASKS, group=group, failures=0.5)
    assert [t.stop for t in traces] == ["failed", "done"]
    assert cancelled == ["0/0/a#0:0.1.0", "0/0/a#0:0.2.0"]
    assert [r.id for r in group.seen if r.id.startswith("0/0/a")] == ["0/0/a#0:0.0.0", *cancelled]
    assert not group._queue


def test_a_branch_that_raises_at_once_leaves_no_call_of_its_list_behind():
    def bad():
        raise ValueError("boom")
        yield

    def flow(task, team):
        yield [Call("solver", [user("before")]), bad(), Call("solver", [user("after")])]

    (trace,), group = played(flow, failures=1.0)
    assert trace.error == "ValueError: boom"
    assert group.seen == [], "nobody waits for these"


@pytest.mark.parametrize(
    ("what", "field", "value"),
    [(Call("judge", [user("x")]), "roles", "judge"), (Tool("python", "1"), "tools", "python")],
    ids=["role", "tool"],
)
def test_an_unknown_role_or_tool_stops_the_run_and_names_those_there_are(what, field, value):
    def flow(task, team):
        yield what

    with pytest.raises(ConfigError, match=r"\['critic', 'solver'\]" if field == "roles" else r"\['calc'\]") as caught:
        played(flow, tools={"calc": str}, failures=1.0)
    assert (caught.value.field, caught.value.value) == (field, value)


def test_a_workflow_that_never_yields_is_a_config_error():
    def flow(task, team):
        return "no generator"

    with pytest.raises(ConfigError, match=r"workflow = 'flow': it must be a generator function"):
        played(flow)


def test_progress_tells_finished_episodes_and_tokens():
    def flow(task, team):
        for _ in range(2):
            yield Call("solver", [user("x")])

    seen = []
    driver = Driver(
        workflow(roles=("solver",))(flow), ROLES, {"team": Scripted(lambda r: "abc")}, limits=Limits(), tools=ToolPool({})
    )  # fmt: skip
    driver.play(independent(TASKS, 2, "0"), progress=lambda *now: seen.append(now))
    assert seen == [(0, 16), (4, 32)]


# Tools


def double(x):
    return 2 * x


def forever():
    while True:
        pass


def broken(x):
    raise ValueError(f"cannot do {x}")


def suicide():
    import os

    os._exit(3)


def test_tools_give_values_errors_and_an_end_to_what_never_ends():
    """One pool of processes for all of it: what a tool returns, raises, and a real loop that is killed."""

    def flow(task, team):
        good = yield Tool("double", 21)
        both = yield [Tool("broken", "this"), Tool("double", "ab"), Call("solver", [user("x")])]
        stuck = yield Tool("forever", seconds=0.2)
        died = yield Tool("suicide")
        after = yield Tool("double", 4)
        reply = yield Call("critic", [user("{a} {b}", a=good, b=both[0])])
        return good, both, stuck, died, after, reply

    tools = {"double": double, "forever": forever, "broken": broken, "suicide": suicide}
    trace = one(flow, tools=tools)
    good, both, stuck, died, after, _ = trace.result
    assert (good.value, good.text, good.error) == (42, "42", "")
    assert (both[0].value, both[0].error) == (None, "ValueError: cannot do this")
    assert both[0].text == "Error: ValueError: cannot do this" and both[1].value == "abab"
    assert stuck.error == "no answer within 0.2 s; killed"
    assert died.error and died.value is None
    assert after.value == 8, "the pool lives on"
    assert [(e.id, e.tool, e.agent, e.t, bool(e.error)) for e in trace.tools] == [
        ("0", "double", 0, 1, False), ("1.0", "broken", 0, 2, True), ("1.1", "double", 1, 2, False),
        ("2", "forever", 0, 3, True), ("3", "suicide", 0, 4, True), ("4", "double", 0, 5, False),
    ]  # fmt: skip
    critic = trace.turns[-1]
    assert [read.source for read in critic.reads] == ["0", "1.0"]
    assert not any(row.sampled[: len(critic.prompt)].any() for row in rows(trace) if row.role == "critic")


class Instead(ToolPool):
    """Runs tools here and now, in any order."""

    def submit(self, call_id, tool):
        self._running[call_id] = (self.functions[tool.name](*tool.args), "")

    def poll(self, *, wait):
        if not self._running:
            return []
        call_id = max(self._running)
        return [(call_id, self._running.pop(call_id))]

    def cancel(self, ids):
        """Too late: they are done."""


def test_traces_do_not_depend_on_the_order_in_which_tools_finish():
    def flow(task, team):
        results = yield [Tool("double", i) for i in range(4)]
        return [r.value for r in results]

    trace = one(flow, pool=Instead({"double": double}))
    assert trace.result == [0, 2, 4, 6]
    assert [e.id for e in trace.tools] == ["0.0", "0.1", "0.2", "0.3"]


def test_a_result_of_a_tool_whose_episode_has_failed_is_dropped():
    def bad():
        yield Call("solver", [user("x")])
        raise ValueError("boom")

    def helped():
        yield Tool("double", 1)
        raise AssertionError("resumed after its episode was over")

    def flow(task, team):
        yield [bad(), helped()]

    class Late(Instead):
        def poll(self, *, wait):
            return super().poll(wait=wait) if wait else []

    (trace,), _ = played(flow, pool=Late({"double": double}), failures=1.0)
    assert (trace.stop, trace.error, trace.tools) == ("failed", "ValueError: boom", [])


def test_a_tool_of_a_failed_episode_is_killed_and_its_worker_serves_the_next():
    def bad():
        yield Call("critic", [user("x")])
        raise ValueError("boom")

    def flow(task, team):
        if task.id == "b":
            return (yield Tool("double", 4)).value
        yield [Tool("forever", seconds=600), bad()]

    pool = ToolPool({"double": double, "forever": forever}, workers=1)
    driver = Driver(
        workflow(roles=("critic",))(flow), ROLES, {"team": Scripted(echo)}, limits=Limits(failures=1.0), tools=pool
    )
    try:
        (failed,) = driver.play(independent(TASKS[:1], 1, "0"))
        assert (failed.error, pool._running) == ("ValueError: boom", {})
        (sound,) = driver.play(independent(TASKS[1:], 1, "0"))
        assert sound.result == 8
    finally:
        pool.close()


# Rehearsal


def experiment(flow, **rest):
    from test_config import BASE

    return dataclasses.replace(BASE, workflow=flow, **rest)


def test_a_rehearsal_finds_a_wrong_tool_before_any_model_is_loaded_and_forgives_the_rest():
    @workflow(roles=("solver", "critic"))
    def wrong_tool(task, team):
        yield Call("solver", [user("x")])
        yield Tool("pyhton", "1")

    @workflow(roles=("solver", "critic"))
    def sound(task, team):
        result = yield Tool("calc", "1")
        reply = yield Call("solver", [user("{r}", r=result)])
        return int(reply.text)  # empty replies are no numbers

    def never(text):
        raise AssertionError("a rehearsal runs no tool")

    with pytest.raises(ConfigError, match=r"tools = 'pyhton'.*\['calc'\]"):
        rehearse(experiment(wrong_tool, tools={"calc": never}), TASKS[0])
    rehearse(experiment(sound, tools={"calc": never}), TASKS[0])


def test_a_sampler_that_stands_still_is_named_and_ends_the_batch(monkeypatch):
    monkeypatch.setattr("mas_jax.rollout.driver.MOST_IDLE_POLLS", 5)

    def flow(task, team):
        yield Call("solver", [user(task.prompt)])

    with pytest.raises(RolloutError, match=r"0/0/a#0:0 of role solver, task 'a', and 1 more"):
        played(flow, size=2, group=Scripted(echo, per_poll=0))
