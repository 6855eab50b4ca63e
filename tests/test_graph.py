"""The waist: turns merge into rows by their ids, every sampled token is trained once, and a trace is valid public JSON."""

import json
from collections import Counter

import jsonschema
import numpy as np
import pytest
import trace_schema
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.graph import Read, Task, ToolEvent, Trace, Turn, messages_between, path_key, rows, to_json

TASK = Task("sum-1", "1+1=", "2")


def turn(id, prompt, tokens, *, role="solver", agent=0, t=1, policy="team", **rest):
    """A turn whose log-probs and versions can be told apart: -id/100 and the id of the token."""
    logprobs = [-token / 100 for token in tokens]
    return Turn(
        id, role, agent, policy, t, list(prompt), list(tokens), logprobs, list(tokens), "".join(map(chr, tokens)), "stop", **rest
    )  # fmt: skip


def trace(*turns, **rest):
    return Trace(TASK, 0, "0/sum-1", list(turns), **rest)


def test_a_turn_whose_prompt_goes_on_from_the_last_joins_its_row():
    merged = rows(trace(turn("0", [1, 2], [3, 4]), turn("1", [1, 2, 3, 4, 5], [6])))
    assert len(merged) == 1
    row = merged[0]
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.sampled.tolist() == [False, False, True, True, False, True]
    assert row.turn.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.versions.tolist() == [-1, -1, 3, 4, -1, 6]
    np.testing.assert_allclose(row.sampler_logprobs, [0, 0, -0.03, -0.04, 0, -0.06], rtol=1e-6)


def test_a_prompt_that_differs_in_one_id_of_the_reply_begins_a_new_row():
    split = rows(trace(turn("0", [1, 2], [3, 4]), turn("1", [1, 2, 3, 9, 5], [6])))
    assert [row.tokens.tolist() for row in split] == [[1, 2, 3, 4], [1, 2, 3, 9, 5, 6]]
    assert split[1].sampled.tolist() == [False] * 5 + [True]


def test_a_prompt_that_ends_inside_the_earlier_reply_begins_a_new_row():
    assert [len(row) for row in rows(trace(turn("0", [1], [2, 3, 4]), turn("1", [1, 2, 3], [7])))] == [4, 4]


def test_the_same_tokens_of_another_role_agent_or_policy_never_join():
    for other in ({"role": "critic"}, {"agent": 1}, {"policy": "other"}):
        assert len(rows(trace(turn("0", [1], [2]), turn("1", [1, 2, 3], [4], **other)))) == 2


def test_turns_sampled_at_different_temperatures_never_share_a_row():
    assert len(rows(trace(turn("0", [1], [2]), turn("1", [1, 2, 3], [4], temperature=0.5)))) == 2


def test_two_forks_of_one_turn_train_its_tokens_once():
    first, left, right = turn("0", [1], [2]), turn("1.0", [1, 2, 3], [4]), turn("1.1", [1, 2, 5], [6])
    forked = rows(trace(first, left, right))
    assert [[t.id for t in row.turns] for row in forked] == [["0", "1.0"], ["1.1"]]
    assert forked[1].sampled.tolist() == [False, False, False, True]


def test_a_turn_without_tokens_makes_no_row():
    assert rows(trace(turn("0", [1], []))) == []


def test_per_token_spreads_one_value_a_turn_and_leaves_context_at_zero():
    (row,) = rows(trace(turn("0", [1, 2], [3, 4]), turn("1", [1, 2, 3, 4, 5], [6])))
    assert row.per_token([0.5, -2.0]).tolist() == [0, 0, 0.5, 0.5, 0, -2.0]


TOKENS = st.lists(st.integers(1, 3), max_size=3)


# Fresh, continued or forked from turn `place`; who speaks; what is added to the prompt; what is said. Three ids only, so that chance
# prefixes abound. Turns are built in the test: the type checker draws random numbers, which a strategy must not.
STEP = st.tuples(
    st.sampled_from(["fresh", "continued", "forked"]),
    st.integers(0, 7),
    st.sampled_from("ab"),
    st.integers(0, 1),
    TOKENS,
    TOKENS,
)


def conversation(steps):
    turns = []
    for number, (kind, place, role, agent, added, tokens) in enumerate(steps):
        prompt = [0]
        if turns and kind != "fresh":
            before = turns[place % len(turns)]
            prompt = before.prompt + (before.tokens if kind == "continued" else [])
        turns.append(turn(str(number), prompt + added, tokens, role=role, agent=agent, t=number))
    return trace(*turns)


@given(st.lists(STEP, min_size=1, max_size=8))
def test_every_sampled_token_is_trained_in_exactly_one_row_however_many_prompts_hold_it(steps):
    episode = conversation(steps)
    merged = rows(episode)
    trained = Counter()
    for row in merged:
        assert {(t.role, t.agent) for t in row.turns} == {(row.role, row.agent)}
        for number, member in enumerate(row.turns):
            places = np.flatnonzero(row.turn == number)
            assert places.tolist() == list(range(len(member.prompt), len(member.prompt) + len(member.tokens)))
            assert row.tokens[: len(member.prompt)].tolist() == member.prompt
            assert row.tokens[places].tolist() == row.versions[places].tolist() == member.tokens
            trained[member.id] += 1
        assert (row.sampled == (row.turn >= 0)).all()
        assert (row.versions[~row.sampled] == -1).all() and (row.sampler_logprobs[~row.sampled] == 0).all()
    assert trained == Counter(t.id for t in episode.turns if t.tokens)
    assert sum(row.sampled.sum() for row in merged) == sum(len(t.tokens) for t in episode.turns)


@pytest.mark.parametrize("short", ["tokens", "logprobs", "versions"])
def test_ids_logprobs_and_versions_of_unequal_length_are_an_error_that_names_the_turn(short):
    parallel = {"tokens": [5, 6], "logprobs": [-1.0, -1.0], "versions": [0, 0]}
    parallel[short] = parallel[short][:1]
    with pytest.raises(ValueError, match=rf"turn 3\.1 of solver.*'{short}': 1"):
        Turn("3.1", "solver", 0, "team", 1, [1], **parallel, text="", finish="stop")


def full_trace():
    """Two drafts in parallel, a tool, and a judge that reads all three."""
    drafts = [turn(f"0.{i}", [1], [50 + i], agent=i, rewards={"right": float(i)}, reward=float(i)) for i in range(2)]
    reads = (Read("0.0", 4, 5), Read("0.1", 6, 7), Read("1", -1, -1))
    judge = turn("2", [1, 9], [60], role="judge", t=3, reads=reads, continues="")
    last = turn("3", [1, 9, 60, 8], [61], role="judge", t=4, reads=(*reads, Read("2", 2, 3)), continues="2")
    tools = [ToolEvent("1", "python", 0, 2, "Error: boom", "boom")]
    return trace(
        *drafts, judge, last, tools=tools, result="61", result_source="3", rewards={"right": 0.5}, seconds=1.25
    )


def test_a_trace_is_valid_against_the_public_schema_and_survives_json():
    document = to_json(full_trace(), {"0.0": (0, 1), "2": (7, 8)})
    trace_schema.check(document)
    assert json.loads(json.dumps(document)) == document
    events = {event["id"]: event for event in document["events"]}
    assert events["2"]["tokens"] == [7, 8] and "tokens" not in events["3"]
    assert events["3"]["continues"] == "2" and "continues" not in events["2"]
    assert events["1"]["error"] == "boom" and events["end"]["text"] == "61"
    assert document["costs"] == {"tokens": 4, "wall_clock_s": 1.25, "tool_calls": 1, "messages": 4}


def test_edges_say_who_read_whom_and_what_was_returned():
    edges = {(e["src"], e["dst"], e["type"]) for e in to_json(full_trace())["edges"]}
    assert edges == {
        ("0.0", "2", "message"), ("0.1", "2", "message"), ("1", "2", "message"), ("0.0", "3", "message"),
        ("0.1", "3", "message"), ("1", "3", "message"), ("2", "3", "message"), ("2", "3", "temporal"),
        ("1.call", "1", "tool_dependency"), ("3", "end", "return"),
    }  # fmt: skip


def test_a_failed_episode_and_one_without_a_single_event_are_valid_too():
    trace_schema.check(to_json(trace(stop="failed", error="ValueError: no")))
    document = to_json(trace(turn("0", [1], [2]), stop="failed", error="ValueError: no"))
    trace_schema.check(document)
    assert document["events"][-1]["error"] == "ValueError: no"


def test_the_schema_of_these_tests_refuses_what_the_public_one_refuses():
    for break_it in (
        lambda d: d["edges"][0].update(weight=1),
        lambda d: d.update(more=1),
        lambda d: d["costs"].pop("tokens"),
        lambda d: d["events"][0].update(type="stop"),
    ):
        document = to_json(full_trace())
        break_it(document)
        with pytest.raises(jsonschema.ValidationError):
            trace_schema.check(document)


@given(st.integers(1, 12))
def test_n_calls_of_one_role_stay_n_distinct_events(n):
    episode = trace(*[turn(f"0.{i}", [1], [2], agent=i, reward=i / n) for i in range(n)])
    document = to_json(episode)
    trace_schema.check(document)
    messages = [event for event in document["events"] if event["type"] == "message"]
    assert len({event["id"] for event in messages}) == len({event["agent"] for event in messages}) == n
    assert [event["reward"] for event in messages] == [i / n for i in range(n)]


def test_event_ids_sort_by_their_path_not_by_their_letters():
    assert sorted(["10", "2", "2.10", "2.9", "", "2.9.0"], key=path_key) == ["", "2", "2.9", "2.9.0", "2.10", "10"]


def test_message_edges_are_walked_with_reader_and_place():
    found = [(read.source, reader.id) for _, read, reader in messages_between([full_trace()])]
    assert found == [(s, "2") for s in ("0.0", "0.1", "1")] + [(s, "3") for s in ("0.0", "0.1", "1", "2")]


def test_a_turn_is_found_by_its_id_and_a_wrong_id_lists_those_there_are():
    assert full_trace().turn("2").role == "judge"
    with pytest.raises(KeyError, match=r"'9'.*0\.0"):
        full_trace().turn("9")
