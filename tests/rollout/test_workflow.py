"""The words a workflow author writes: where text came from is never lost in silence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.graph import Turn
from mas_jax.rollout.workflow import (
    Call,
    Message,
    Quote,
    Reply,
    Span,
    Tool,
    ToolResult,
    assistant,
    system,
    user,
    workflow,
)

FORMAT = "Judge: {}"


def reply(text="four", turn="0", role="solver"):
    return Reply(Turn(turn, role, 0, "team", 1, [1], [2, 3], [-0.5, -0.25], [7, 7], text, "stop"))


@pytest.mark.parametrize("spoil", [lambda r: f"Judge: {r}", lambda r: f"Judge: {r:>10}", lambda r: FORMAT.format(r)])
def test_a_reply_in_an_f_string_raises_with_the_remedy(spoil):
    with pytest.raises(TypeError, match=r"'solver'.*user\(\"\.\.\. \{draft\} \.\.\.\", draft=reply\).*str\(reply\)"):
        spoil(reply())


def test_a_reply_is_not_a_str_and_str_gives_its_text():
    said = reply()
    assert str(said) == said.text == "four"
    assert not isinstance(said, str)
    with pytest.raises(TypeError):
        "Judge: " + said


def test_a_reply_hands_out_copies_so_that_a_workflow_cannot_change_what_was_sampled():
    said = reply()
    said.tokens.append(9)
    said.logprobs.clear()
    assert (said.tokens, said.logprobs) == ([2, 3], [-0.5, -0.25])
    with pytest.raises(AttributeError):
        said.text = "five"


def test_slots_know_where_each_source_stands():
    message = user("A: {a}\nB: {b}, {n} again {a}", a=reply("xy", "0"), b=Quote("z", "3.1"), n=5)
    assert message == Message(
        "user", "A: xy\nB: z, 5 again xy", (Span("0", 3, 5), Span("3.1", 9, 10), Span("0", 20, 22))
    )


def test_a_tool_result_in_a_slot_keeps_its_event():
    message = user("Out: {out}", out=ToolResult("7", "2", value=7))
    assert message.spans == (Span("2", 5, 6),)


def test_a_quote_keeps_the_edge_of_the_reply_it_was_taken_from():
    assert user("Is it {x}?", x=reply("so: 4", "1.0").quote("4")).spans == (Span("1.0", 6, 7),)


def test_a_whole_reply_as_a_message_is_one_span():
    assert system(reply("be kind", "4")) == Message("system", "be kind", (Span("4", 0, 7),))


def test_text_without_slots_is_verbatim_with_slots_braces_are_doubled():
    assert user("set {x} and {{y}}").content == "set {x} and {{y}}"
    assert user("\\boxed{{}} {x}", x=1).content == "\\boxed{} 1"


def test_braces_in_what_fills_a_slot_stay_as_they_are():
    assert user("{a}", a=reply("{b} {{c}} {")).content == "{b} {{c}} {"


@given(
    st.lists(st.tuples(st.text(max_size=5), st.sampled_from(["0", "1.2", None])), min_size=1, max_size=5),
    st.text(max_size=5),
)
def test_every_span_cuts_out_exactly_what_filled_it(parts, between):
    literal = between.replace("{", "{{").replace("}", "}}")
    slots = {f"s{i}": reply(text, source) if source else text for i, (text, source) in enumerate(parts)}
    template = literal + literal.join(f"{{{name}}}" for name in slots)
    message = user(template, **slots)
    assert [message.content[s.start : s.stop] for s in message.spans] == [text for text, source in parts if source]
    assert [s.source for s in message.spans] == [source for _, source in parts if source]


@pytest.mark.parametrize("template", ["{missing}", "{0}", "{}", "{a.text}", "{a!r}", "{a:>4}", "{a[0]}"])
def test_a_slot_that_is_no_plain_name_given_is_refused_and_those_given_are_listed(template):
    with pytest.raises(ValueError, match=r"plain names out of: a"):
        user(template, a=1)


def test_a_slot_that_the_template_does_not_use_is_refused():
    with pytest.raises(ValueError, match=r"does not use the slots \['draft'\]"):
        user("Judge: {problem}", problem="p", draft=reply())


def test_roles_of_messages():
    assert [make("x").role for make in (user, system, assistant)] == ["user", "system", "assistant"]


def unchecked_call(messages):
    """A Call made past the type checker that only the tests have."""
    call = object.__new__(Call)
    for name, value in {"role": "solver", "messages": messages, "agent": None, "max_tokens": None}.items():
        object.__setattr__(call, name, value)
    call.__post_init__()


@pytest.mark.parametrize("messages", ["text", [], reply(), user("x")], ids=["str", "empty", "reply", "message"])
def test_a_call_wants_a_list_of_messages(messages):
    with pytest.raises(TypeError, match=r"Call\('solver', \.\.\.\) wants a list"):
        unchecked_call(messages)


def test_a_call_names_the_type_of_what_is_no_message():
    with pytest.raises(TypeError, match=r"not dict"):
        unchecked_call([user("x"), {"role": "user", "content": "x"}])


def test_a_call_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match=r"max_tokens=0"):
        Call("solver", [user("x")], max_tokens=0)


def test_a_tool_takes_its_arguments_as_they_are_called():
    tool = Tool("python", "1+1", 2, seconds=0.5)
    assert (tool.name, tool.args, tool.seconds) == ("python", ("1+1", 2), 0.5)


@pytest.mark.parametrize("roles", ["solver", (), ("a", "a")])
def test_a_workflow_names_each_of_its_roles_once(roles):
    with pytest.raises(TypeError, match="each once"):
        workflow(roles=roles)
