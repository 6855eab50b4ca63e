"""Token in, token out; and where in a prompt each quoted reply stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.config import ConfigError
from mas_jax.graph import Read, Turn
from mas_jax.models.tokenizer import ByteTokenizer
from mas_jax.rollout import prompts
from mas_jax.rollout.workflow import Quote, Reply, assistant, system, user


class Trimming(ByteTokenizer):
    """A template that strips what it is given, as Llama's does."""

    def render(self, messages, *, generation_prompt=True, options=None):
        stripped = [message | {"content": message["content"].strip()} for message in messages]
        return super().render(stripped, generation_prompt=generation_prompt, options=options)


class Forgetful(ByteTokenizer):
    """A template that drops earlier assistant turns, as reasoning models' do with their thinking."""

    def render(self, messages, *, generation_prompt=True, options=None):
        kept = [m if m["role"] != "assistant" else m | {"content": ""} for m in messages]
        return super().render(kept, generation_prompt=generation_prompt, options=options)


class Strict(ByteTokenizer):
    """A template without a system role and with turns that alternate, as Gemma 2's is."""

    def render(self, messages, *, generation_prompt=True, options=None):
        if [message["role"] for message in messages] != (["user", "assistant"] * len(messages))[: len(messages)]:
            raise ConfigError("messages", len(messages), "the template refuses them")
        return super().render(messages, generation_prompt=generation_prompt, options=options)


class Talk:
    """A conversation as the driver keeps it: prompts by turn id, replies as sampled."""

    def __init__(self, tokenizer=None):
        self.tokenizer = tokenizer or ByteTokenizer()
        self.earlier = {}

    def say(self, messages, text, *, agent=("solver", 0), stopped=True, ids=None):
        """Build a prompt and let `agent` answer it: the prompt and the reply."""
        prompt = prompts.build(self.tokenizer, messages, {}, self.earlier, agent)
        ids = self.tokenizer.encode(text) if ids is None else ids
        tokens = ids + list(self.tokenizer.stop_ids) if stopped else ids
        said = self.tokenizer.decode(ids)
        turn = Turn(
            str(len(self.earlier)), *agent, "team", 1, prompt.ids, tokens, [0.0] * len(tokens), [0] * len(tokens), said, "stop"
        )  # fmt: skip
        self.earlier[turn.id] = prompt.sampled(turn)
        return prompt, Reply(turn), turn

    def quoted(self, prompt):
        """The text at each read of a prompt, by decoding its tokens."""
        return [(r.source, self.tokenizer.decode(prompt.ids[r.start : r.stop])) for r in prompt.reads]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>|"), max_size=12)


def test_a_fresh_prompt_is_the_templates_text_encoded():
    prompt, _, _ = Talk().say([system("s"), user("q"), assistant("a"), user("r")], "x")
    assert prompt.text == "<|system|>s<|end|><|user|>q<|end|><|assistant|>a<|end|><|user|>r<|end|><|assistant|>"
    assert prompt.ids == ByteTokenizer().encode(prompt.text)
    assert (prompt.continues, prompt.reads) == ("", ())


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.booleans())
def test_a_continued_prompt_is_the_previous_ids_what_was_sampled_and_the_rest(exchanges, stopped):
    talk, messages, before = Talk(), [], []
    for number, (question, answer) in enumerate(exchanges):
        messages.append(user(question))
        prompt, reply, turn = talk.say(messages, answer, stopped=stopped)
        assert prompt.ids[: len(before)] == before
        assert prompt.ids == talk.tokenizer.encode(prompt.text), (
            "canonical text: incremental ids are those of the whole"
        )
        assert prompt.continues == (str(number - 1) if number else "")
        before = prompt.ids + turn.tokens
        messages.append(reply)


def test_ids_that_encoding_would_not_give_are_kept_as_sampled():
    talk = Talk()
    # A byte of its own, which decodes to U+FFFD: encoding the text again would give three bytes.
    first, reply, turn = talk.say([user("q")], "", ids=[0x61, 0xC3, 0x62])
    assert reply.text == "a\ufffdb"
    second, _, _ = talk.say([user("q"), reply, user("r")], "x")
    rest = talk.tokenizer.encode("<|user|>r<|end|><|assistant|>")
    assert second.ids == first.ids + [0x61, 0xC3, 0x62, talk.tokenizer.stop_ids[0]] + rest
    assert second.ids != talk.tokenizer.encode(second.text)
    (own,) = second.reads
    assert second.ids[own.start : own.stop] == turn.tokens


def test_the_longest_earlier_conversation_is_continued():
    talk = Talk()
    _, one, _ = talk.say([user("a")], "b")
    _, two, turn = talk.say([user("a"), one, user("c")], "d")
    third, _, _ = talk.say([user("a"), one, user("c"), two, user("e")], "f")
    assert third.continues == "1"
    assert [r.source for r in third.reads] == ["0", "1"]
    assert third.ids[third.reads[1].start : third.reads[1].stop] == turn.tokens


@pytest.mark.parametrize("other", [("critic", 0), ("solver", 1)])
def test_another_agents_reply_is_context_encoded_as_text(other):
    talk = Talk()
    _, reply, _ = talk.say([user("q")], "", ids=[0x61, 0xC3, 0x62])
    second, _, _ = talk.say([user("q"), reply, user("r")], "x", agent=other)
    assert second.continues == ""
    assert second.ids == talk.tokenizer.encode(second.text)
    assert talk.quoted(second) == [("0", "a\ufffdb")]


def test_a_conversation_whose_earlier_messages_changed_is_rendered_afresh():
    talk = Talk()
    _, reply, _ = talk.say([user("q")], "a")
    second, _, _ = talk.say([user("Q"), reply, user("r")], "x")
    assert second.continues == "" and second.ids == talk.tokenizer.encode(second.text)


def test_a_template_that_drops_what_was_said_begins_anew_and_only_the_place_of_what_it_dropped_is_unknown():
    talk = Talk(Forgetful())
    _, reply, _ = talk.say([user("q")], "a")
    second, _, _ = talk.say([user("q"), reply, user("r {x}", x=reply)], "x")
    assert second.continues == "" and second.ids == talk.tokenizer.encode(second.text)
    dropped, quoted = second.reads
    assert (dropped.start, dropped.stop) == (-1, -1)
    assert talk.tokenizer.decode(second.ids[quoted.start : quoted.stop]) == "a"


@given(
    fresh=st.booleans(),
    quotes=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3),
    around=TEXT,
    later=st.lists(TEXT, min_size=1, max_size=2),
)
def test_reads_decode_to_exactly_the_quoted_text_in_a_fresh_and_in_a_continued_prompt(fresh, quotes, around, later):
    talk = Talk()
    literal = around.replace("{", "{{").replace("}", "}}")
    replies = [
        talk.say([user(question)], answer, agent=("critic", i))[1] for i, (question, answer) in enumerate(quotes)
    ]
    slots = {f"s{i}": reply for i, reply in enumerate(replies)}
    message = user(literal + literal.join(f"{{{name}}}" for name in slots) + literal, **slots)
    wanted = [(reply.turn, reply.text) for reply in replies]
    if fresh:
        prompt, _, _ = talk.say([system(around), message], "x")
        assert talk.quoted(prompt) == wanted
        return
    messages = [user("hello")]
    own = []
    for text in later:
        _, reply, _ = talk.say(messages, text)
        own.append((reply.turn, reply.text))
        messages += [reply, message]
    prompt, _, _ = talk.say(messages, "x")
    assert prompt.continues == own[-1][0]
    expected = [pair for said in own for pair in [said, *wanted]]
    assert talk.quoted(prompt) == expected


@given(TEXT, TEXT)
def test_a_quote_parsed_out_of_a_reply_is_found_where_it_stands(before, text):
    talk = Talk()
    _, reply, _ = talk.say([user("q")], text + "!", agent=("critic", 0))
    part = Quote(text, reply.turn)
    prompt, _, _ = talk.say([user("{b}{q}", b=before, q=part), user(part)], "x")
    assert talk.quoted(prompt) == [(reply.turn, text)] * 2


@given(st.text("ab ", min_size=1, max_size=6), st.booleans())
def test_where_a_template_trims_the_place_is_unknown_and_where_it_does_not_it_is_exact(text, continued):
    talk = Talk(Trimming())
    _, source, _ = talk.say([user("q")], text, agent=("critic", 0))
    messages = [user("hello")]
    if continued:
        _, own, _ = talk.say(messages, "well")
        messages = [*messages, own]
    prompt, _, _ = talk.say([*messages, user("{x}", x=source)], "x")
    read = prompt.reads[-1]
    assert prompt.continues == ("1" if continued else "")
    if text == text.strip():
        assert talk.tokenizer.decode(prompt.ids[read.start : read.stop]) == text
    else:
        assert read == Read("0", -1, -1)


def test_a_reply_with_blanks_around_it_under_a_trimming_template_begins_a_new_row():
    talk = Talk(Trimming())
    _, reply, _ = talk.say([user("q")], " a ")
    second, _, _ = talk.say([user("q"), reply, user("r")], "x")
    assert second.continues == "" and second.ids == talk.tokenizer.encode(second.text)


def test_a_text_that_spells_a_special_token_still_has_its_place():
    talk = Talk()
    _, source, _ = talk.say([user("q")], "", ids=list(b"a<|end|>b"), agent=("critic", 0))
    prompt, _, _ = talk.say([user("see {x}", x=source)], "x")
    (read,) = prompt.reads
    assert talk.tokenizer.decode(prompt.ids[read.start : read.stop], False) == "a<|end|>b"


def test_a_system_prompt_that_the_template_refuses_is_named_with_its_role_and_the_remedy():
    with pytest.raises(ConfigError, match=r"begin the first user message with this text instead") as caught:
        Talk(Strict()).say([system("Be brief."), user("q")], "x", agent=("critic", 2))
    assert (caught.value.field, caught.value.value) == ("roles.critic.system", "Be brief.")


@pytest.mark.parametrize("messages", [[user("q"), user("r")], [system("s"), user("q"), user("r")]])
def test_other_messages_that_the_template_refuses_are_not_blamed_on_the_system_prompt(messages):
    with pytest.raises(ConfigError, match="refuses them") as caught:
        Talk(Strict()).say(messages, "x")
    assert caught.value.field == "roles.solver.messages"


def test_an_option_that_the_template_never_reads_is_named_with_its_role():
    with pytest.raises(ConfigError, match=r"reads no variables") as caught:
        prompts.build(ByteTokenizer(), [user("q")], {"enable_thinking": False}, {}, ("solver", 0))
    assert caught.value.field == "roles.solver.template"


def test_a_text_that_stands_in_two_messages_has_its_own_place_in_each():
    talk = Talk()
    _, source, _ = talk.say([user("q")], "same", agent=("critic", 0))
    prompt, _, _ = talk.say([system("same"), user("same {x}", x=source), assistant("same"), user(source)], "x")
    assert talk.quoted(prompt) == [("0", "same")] * 2
    assert prompt.reads[0].start < prompt.reads[1].start
