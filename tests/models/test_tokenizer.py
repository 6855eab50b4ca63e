"""Ids are what the template says and nothing more, and a continued conversation keeps what was sampled."""

import json
import pickle

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.config import ConfigError
from mas_jax.models.tokenizer import ByteTokenizer, continuation, load, save_char_tokenizer

# Written here in the manner of the families.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for m in messages %}
    {%- if m.role not in ['system', 'user', 'assistant'] %}{{- raise_exception('no role ' + m.role) }}{%- endif %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "qwen": QWEN, "llama": LLAMA, "phi": PHI}
SPECIALS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|user|>",
    "<|system|>", "<|assistant|>",
)  # fmt: skip
CORPUS = ["What is 3 + 4 ? The answer is 7 .\n\nThink: three and four make seven. \u00e4\u00f6 \U0001f642"] * 3


def write_bpe(path, template, generation=None, **settings):
    """A byte-level BPE tokenizer directory whose files would add BOS and EOS, truncate and pad, if they were let."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIALS))
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True, normalized=False)])
    around = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.post_processor = tokenizers.processors.Sequence([
        tokenizers.processors.ByteLevel(trim_offsets=True), around,
    ])  # fmt: skip
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | settings
    config |= {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    ends = {"chatml": "<|im_end|>", "qwen": "<|im_end|>", "llama": "<|eot_id|>", "phi": "<|end|>"}
    paths = {name: write_bpe(root / name, template, eos_token=ends[name]) for name, template in TEMPLATES.items()}
    return {name: load(path) for name, path in paths.items()} | {"bytes": ByteTokenizer()}


@pytest.fixture(scope="module")
def bpe(families):
    return families["chatml"]


FAMILIES = pytest.mark.parametrize("family", [*TEMPLATES, "bytes"])
PIECES = st.sampled_from([*SPECIALS, " ", "\n", "7", "\U0001f642", "\u00e4"])
ANY_TEXT = st.text(max_size=40) | st.lists(PIECES).map("".join)
PLAIN = st.from_regex(r"[a-z]([a-z0-9 +.]*[a-z0-9])?", fullmatch=True).filter(lambda text: len(text) < 40)


# ---- encoding


def test_encoding_adds_no_token_of_its_own(bpe):
    ids = bpe.encode("What is 3 + 4 ? The answer is 7 ." * 3)
    assert not {0, 1} & set(ids)
    assert len(ids) > 8  # the file's truncation to 8 is off
    assert len(bpe.encode("a")) == 1  # and so is its padding


def test_a_rendered_prompt_holds_the_one_bos_that_the_template_wrote(families):
    ids = families["llama"].encode(families["llama"].render([user("hi")]))
    assert ids.count(0) == 1 and ids[0] == 0
    assert ids[-1] != 1


def test_special_tokens_written_in_text_are_single_ids(bpe):
    assert bpe.encode("<|im_start|>") == [bpe.token_to_id("<|im_start|>")]
    assert ByteTokenizer().encode("a<|end|>") == [97, ByteTokenizer().token_to_id("<|end|>")]


@FAMILIES
@given(text=ANY_TEXT)
def test_decoding_gives_back_what_was_encoded(families, family, text):
    tokenizer = families[family]
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@FAMILIES
@given(text=ANY_TEXT)
def test_offsets_cover_the_text_in_order(families, family, text):
    ids, offsets = families[family].encode_with_offsets(text)
    assert ids == families[family].encode(text)
    assert len(ids) == len(offsets)
    covered = {place for begin, end in offsets for place in range(begin, end)}
    assert covered == set(range(len(text)))
    assert offsets == sorted(offsets)


def test_offsets_count_characters_and_the_bytes_of_one_share_it(families):
    text = "\U0001f642b"
    assert families["bytes"].encode_with_offsets(text)[1] == [(0, 1)] * 4 + [(1, 2)]
    begins, ends = zip(*families["chatml"].encode_with_offsets(text)[1], strict=True)
    assert (min(begins), max(ends)) == (0, 2)


def test_special_tokens_vanish_from_decoded_text_unless_asked_for(families):
    for family in ("chatml", "bytes"):
        ids = families[family].encode("a<|end|>")
        assert families[family].decode(ids) == "a"
        assert families[family].decode(ids, skip_special=False) == "a<|end|>"


def test_broken_utf8_and_lone_surrogates_never_raise(families):
    assert ByteTokenizer().decode([0xC3, 271, 0x28]) == "\ufffd("
    for tokenizer in families.values():
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_ids_beyond_the_vocabulary_decode_to_nothing(bpe):
    assert bpe.decode([*bpe.encode("a"), bpe.vocab + 5]) == "a"


def test_a_tokenizer_survives_pickling(bpe):
    other = pickle.loads(pickle.dumps(bpe))
    assert other.encode("seven") == bpe.encode("seven") and other.stop_ids == bpe.stop_ids
    assert other.render([user("hi")]) == bpe.render([user("hi")])


# ---- what the files say


def test_stop_ids_unite_generation_config_eos_and_the_templates_end_of_turn(tmp_path):
    tokenizer = load(write_bpe(tmp_path, CHATML, {"eos_token_id": [5, 6]}))
    assert tokenizer.stop_ids == tuple(sorted({5, 6, 1, tokenizer.token_to_id("<|im_end|>")}))
    assert load(write_bpe(tmp_path, CHATML, {"eos_token_id": 7})).stop_ids == (1, 3, 7)


def test_an_end_of_turn_that_the_template_never_writes_is_no_stop(families):
    assert families["llama"].token_to_id("<|im_end|>") not in families["llama"].stop_ids


def test_padding_with_eos_leaves_eos_a_stop(tmp_path):
    tokenizer = load(write_bpe(tmp_path, CHATML, pad_token="</s>"))
    assert tokenizer.pad_id in tokenizer.stop_ids


def test_special_tokens_may_be_dicts_or_stand_in_the_special_tokens_map(tmp_path):
    path = write_bpe(tmp_path, LLAMA, bos_token=None, eos_token={"content": "<|eot_id|>"})
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    tokenizer = load(path)
    assert tokenizer.render([user("hi")]).startswith("<s>")
    assert tokenizer.stop_ids == (tokenizer.token_to_id("<|eot_id|>"),)


def test_a_template_file_goes_before_the_config_and_of_a_list_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    path = write_bpe(tmp_path, named)
    assert load(path).render([]) == "yes"
    (path / "chat_template.jinja").write_text("file")
    assert load(path).render([]) == "file"


def test_a_directory_without_tokenizer_is_refused_with_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read it"):
        load(tmp_path)


def test_an_eos_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not in the vocabulary"):
        load(write_bpe(tmp_path, CHATML, eos_token="<|gone|>"))


def test_a_missing_template_is_refused_where_it_is_needed_and_only_there(tmp_path):
    tokenizer = load(write_bpe(tmp_path, None))
    assert tokenizer.encode("a")
    for call in (tokenizer.require_template, lambda: tokenizer.render([user("hi")])):
        with pytest.raises(ConfigError, match=r"add chat_template to tokenizer_config\.json") as caught:
            call()
        assert str(tmp_path) in str(caught.value)


def test_a_special_token_that_the_file_holds_as_a_plain_one_is_special(tmp_path):
    path = write_bpe(tmp_path, CHATML, eos_token="Th")
    tokenizer = load(path)
    assert tokenizer.decode(tokenizer.encode("a Th")) == "a "
    assert tokenizer.encode("aTh")[-1] == tokenizer.stop_ids[-1]


# ---- rendering


def test_a_field_of_none_is_a_field_that_is_not_there(tmp_path):
    tokenizer = load(write_bpe(tmp_path, "{% for m in messages %}{{ m.name is defined }}{% endfor %}"))
    assert tokenizer.render([user("hi") | {"name": None}]) == "False"


def test_templates_get_options_tools_and_plain_json(families):
    closed = families["qwen"].render([user("hi")], options={"enable_thinking": False})
    assert closed.endswith("assistant\n<think>\n\n</think>\n\n")
    tools = families["llama"].render([user("hi")], options={"tools": [{"name": "<\u00e4>"}]})
    assert '[{"name": "<\u00e4>"}]' in tools


def test_generation_marks_leave_the_text_alone(bpe):
    assert bpe.render([user("hi")], generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_what_a_template_refuses_is_a_config_error_with_its_words(families):
    with pytest.raises(ConfigError, match="no role tool"):
        families["llama"].render([{"role": "tool", "content": ""}])
    with pytest.raises(ConfigError, match="tool"):
        ByteTokenizer().render([{"role": "tool", "content": ""}])


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_templates_can_neither_reach_python_nor_change_their_input(tmp_path, template):
    tokenizer = load(write_bpe(tmp_path, template))
    with pytest.raises(ConfigError, match=r"unsafe|not safely"):
        tokenizer.render([])


# ---- character tokenizers


def test_a_character_tokenizer_renders_as_the_byte_tokenizer_and_gives_text_back(tmp_path):
    save_char_tokenizer(tmp_path, "0123456789+=* \n\u00e4")
    tokenizer = load(tmp_path)
    text = tokenizer.render([user("3 + 4 =\n\u00e4"), assistant("7")])
    assert text == ByteTokenizer().render([user("3 + 4 =\n\u00e4"), assistant("7")])
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.stop_ids == (tokenizer.token_to_id("<|end|>"),)
    assert tokenizer.encode("3z") == [tokenizer.token_to_id("3"), tokenizer.token_to_id("<|unk|>")]
    assert tokenizer.vocab == 16 + 6


def test_a_character_tokenizer_needs_characters(tmp_path):
    with pytest.raises(ConfigError, match="alphabet"):
        save_char_tokenizer(tmp_path, "")


# ---- token in, token out


def go_on(tokenizer, before, reply, after, sampled=None, options=None):
    """The continuation of `before` by a reply that was sampled as its own encoding and a stop token, or as `sampled`."""
    prompt = tokenizer.encode(tokenizer.render(before, options=options))
    sampled = [*tokenizer.encode(reply), tokenizer.stop_ids[-1]] if sampled is None else sampled
    whole = [*before, assistant(reply), *after]
    return prompt, sampled, whole, continuation(tokenizer, before, reply, whole, prompt, sampled, options)


@FAMILIES
@given(question=PLAIN, reply=PLAIN, more=PLAIN)
def test_continued_ids_are_those_of_the_whole_conversation(families, family, question, reply, more):
    tokenizer = families[family]
    prompt, sampled, whole, joined = go_on(tokenizer, [user(question)], reply, [user(more)])
    ids, added = joined
    assert ids == tokenizer.encode(tokenizer.render(whole))
    assert ids == [*prompt, *sampled, *tokenizer.encode(added)]
    assert tokenizer.render(whole).endswith(added)


@FAMILIES
@given(question=ANY_TEXT, reply=ANY_TEXT, more=ANY_TEXT, stopped=st.booleans())
def test_a_continuation_keeps_every_sampled_id_and_reads_as_the_whole_or_is_none(
    families, family, question, reply, more, stopped
):
    tokenizer = families[family]
    sampled = [*tokenizer.encode(reply), *([tokenizer.stop_ids[-1]] if stopped else [])]
    prompt, _, whole, joined = go_on(tokenizer, [user(question)], reply, [user(more)], sampled)
    if joined is not None:
        ids, added = joined
        assert ids == [*prompt, *sampled, *tokenizer.encode(added)]
        text = tokenizer.render(whole)
        swallowed = family == "phi"  # its stop token takes the blanks after it along
        assert tokenizer.decode(ids, False) == text or swallowed


def test_the_newline_after_the_stop_token_is_not_lost_and_the_stop_not_doubled(bpe):
    ids, added = go_on(bpe, [user("a")], "b", [user("c")])[-1]
    assert added == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert bpe.decode(ids, False).count("b<|im_end|>\n<|im_start|>") == 1


def test_a_reply_cut_by_length_gets_the_templates_end_of_turn(bpe):
    ids, added = go_on(bpe, [user("a")], "b", [user("c")], sampled=bpe.encode("b"))[-1]
    assert added.startswith("<|im_end|>\n<|im_start|>user")
    assert ids == bpe.encode(bpe.render([user("a"), assistant("b"), user("c")]))


def test_ids_that_no_encoder_would_choose_stay_as_sampled(bpe):
    letters = [bpe.token_to_id(letter) for letter in "answer"]
    assert bpe.encode("answer") != letters
    prompt, sampled, _, (ids, _) = go_on(bpe, [user("a")], "answer", [user("c")], [*letters, bpe.stop_ids[-1]])
    assert ids[len(prompt) :][: len(sampled)] == sampled


def test_three_turns_join_end_to_end(bpe):
    _, _, whole, (ids, _) = go_on(bpe, [user("a")], "b", [user("c")])
    sampled = [*bpe.encode("d"), bpe.stop_ids[-1]]
    longer = [*whole, assistant("d"), user("e")]
    again, _ = continuation(bpe, whole, "d", longer, ids, sampled, None)
    assert again == bpe.encode(bpe.render(longer))


def test_dropped_thinking_begins_a_new_row(families):
    qwen = families["qwen"]
    assert go_on(qwen, [user("a")], "<think>\nhm\n</think>\n\nb", [user("c")])[-1] is None
    assert go_on(qwen, [user("a")], "b", [user("c")], options={"enable_thinking": False})[-1] is None
    tool = [{"role": "tool", "content": "c"}]
    assert go_on(qwen, [user("a")], "<think>\nhm\n</think>\n\nb", tool)[-1] is not None


def test_trimmed_blanks_begin_a_new_row(families):
    assert go_on(families["llama"], [user("a")], " b", [user("c")])[-1] is None
    assert go_on(families["llama"], [user("a")], "b ", [user("c")])[-1] is None


@pytest.mark.parametrize("eos", ["</s>", "<|eot_id|>"])  # the template's own end, <|im_end|>, is as long as one of them
def test_a_stop_that_the_template_does_not_write_begins_a_new_row(tmp_path, eos):
    tokenizer = load(write_bpe(tmp_path, CHATML, eos_token=eos))
    sampled = [*tokenizer.encode("b"), tokenizer.token_to_id(eos)]
    assert go_on(tokenizer, [user("a")], "b", [user("c")], sampled)[-1] is None


def test_an_edited_reply_or_another_conversation_begins_a_new_row(bpe):
    prompt, sampled = bpe.encode(bpe.render([user("a")])), [*bpe.encode("4"), bpe.stop_ids[-1]]
    for whole in ([user("a"), assistant("42"), user("c")], [user("b"), assistant("4"), user("c")]):
        assert continuation(bpe, [user("a")], "4", whole, prompt, sampled, None) is None
    whole = [user("a"), assistant("5"), user("c")]
    assert continuation(bpe, [user("a")], "5", whole, prompt, sampled, None) is None  # not the text of those ids


def test_a_stop_token_that_swallows_blanks_loses_none_that_the_whole_would_keep(families):
    phi = families["phi"]
    _, _, whole, (ids, added) = go_on(phi, [user("a")], "b", [user("c")])
    assert ids == phi.encode(phi.render(whole))
    assert added.startswith("<|user|>")
