"""Ids are what the template says and nothing more, and a continued conversation keeps what was sampled."""

import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.config import ConfigError
from mas_jax.models.tokenizer import ByteTokenizer, continuation, load, save_char_tokenizer

OFFICIAL = Path(__file__).parents[2] / "assets" / "tokenizers"

# Written here in the manner of the families.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = """{%- if messages and messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}"""
QWEN3 = """{%- set ns = namespace(last=-1) %}
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
SMOLLM3 = """{%- set quiet = enable_thinking is defined and not enable_thinking %}
{{- '<|im_start|>system\\nDate: ' + strftime_now('%d %B %Y') + '\\nThinking: ' + ('off' if quiet else 'on') + '\\n' }}
{{- (messages[0].content if messages[0].role == 'system' else '') + '<|im_end|>\\n' }}
{%- for m in messages if m.role != 'system' %}
    {{- '<|im_start|>' + m.role + '\\n' + ('<think>\\n\\n</think>\\n' if quiet and m.role == 'assistant' else '') }}
    {{- m.content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if quiet else '') }}{%- endif %}"""
LLAMA2 = """{%- set preface = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- ' ' + m.content | trim + ' ' + eos_token }}
    {%- elif m.role == 'user' %}{{- bos_token + '[INST] ' + (preface if loop.index0 < 2 else '') + m.content | trim + ' [/INST]' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL = """{{- bos_token }}
{%- set preface = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('user and assistant take turns') }}{%- endif %}
    {%- if m.role == 'user' %}{{- '[INST] ' + (preface if loop.last else '') + m.content + '[/INST]' }}
    {%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- set talk = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nDate: ' + date_string + '\\n\\n' }}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{{- (messages[0].content | trim if messages[0].role == 'system' else '') + '<|eot_id|>' }}
{%- for m in talk %}
    {%- if m.role not in ['user', 'assistant'] %}{{- raise_exception('no role ' + m.role) }}{%- endif %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{- bos_token }}
{%- for m in talk %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('user and model take turns') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (preface if loop.first else '') }}
    {{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
GEMMA2 = """{%- if messages[0].role == 'system' %}{{- raise_exception('no system role here') }}{%- endif %}
{%- set talk, preface = messages, '' %}
""" + GEMMA  # fmt: skip
GEMMA3 = """{%- if messages[0].role == 'system' %}{%- set talk, preface = messages[1:], messages[0].content + '\\n\\n' %}
{%- else %}{%- set talk, preface = messages, '' %}{%- endif %}
""" + GEMMA  # fmt: skip
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML, "smollm2": DEFAULT_SYSTEM + CHATML, "qwen2.5": DEFAULT_SYSTEM + CHATML, "qwen3": QWEN3,
    "smollm3": SMOLLM3, "llama2": LLAMA2, "llama3": LLAMA3, "mistral": MISTRAL, "gemma2": GEMMA2, "gemma3": GEMMA3, "phi": PHI,
}  # fmt: skip
# As the families' files name it; Gemma 2 and Phi end turns with another token.
EOS = dict.fromkeys(("chatml", "smollm2", "smollm3", "qwen2.5", "qwen3"), "<|im_end|>")
EOS |= dict.fromkeys(("llama2", "mistral", "gemma2", "phi"), "</s>") | {
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
}
TURN_END = EOS | {"gemma2": "<end_of_turn>", "phi": "<|end|>", "bytes": "<|end|>"}
# Folders under assets/tokenizers, and the family whose manner they have. Those of base models get that family's template from here.
FROM_FILES = {
    "gemma2": "gemma2", "gemma3": "gemma3", "llama2": "llama2", "llama3_1": "llama3", "llama3_2": "llama3",
    "mistral_nemo": "mistral", "qwen2_5": "qwen2.5", "qwen3": "qwen3",
}  # fmt: skip
TRIMMING = ("llama3", "mistral", "gemma2", "gemma3")
SPECIALS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|user|>",
    "<|system|>", "<|assistant|>", "<start_of_turn>", "<end_of_turn>",
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


def write_sentencepiece(path, template, everywhere, **settings):
    """A tokenizer in Llama 2's manner: blanks are letters, unknown letters are bytes, and a text gets a blank in front.

    `everywhere`: so does whatever follows a special token (Llama 2's own file; Mistral's begins only the text with one).
    """
    letters = "abcdefghijklmnopqrstuvwxyz0123456789 .,?!+-*/=[]<>_\n".replace(" ", "\u2581")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "INST"]
    merges = [("\u2581", letter) for letter in letters] + [("a", "n"), ("an", "s"), ("\u2581t", "h"), ("\u2581th", "e")]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*tokens, *map("".join, merges)]))}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if everywhere:
        normalizers = tokenizers.normalizers
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    special = ["<unk>", "<s>", "</s>"] + ([] if everywhere else ["[INST]", "[/INST]"])
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return path


def write_family(path, family, **settings):
    """A small tokenizer directory in the manner of a family."""
    if family in ("llama2", "mistral"):
        return write_sentencepiece(path, TEMPLATES[family], everywhere=family == "llama2", **settings)
    return write_bpe(path, TEMPLATES[family], eos_token=EOS[family], **settings)


def official_files(name, scratch):
    """The directory of an official tokenizer, as it is or, where it brings no template, with ours beside it."""
    path = OFFICIAL / name
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"needs assets/tokenizers/{name}: make tokenizers")
    if "chat_template" in json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")):
        return path
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (scratch / file).symlink_to(path / file)
    (scratch / "chat_template.jinja").write_text(TEMPLATES[FROM_FILES[name]])
    return scratch


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: load(write_family(root / name, name)) for name in TEMPLATES} | {"bytes": ByteTokenizer()}


@pytest.fixture(scope="module")
def bpe(families):
    return families["chatml"]


EVERY_FAMILY = pytest.mark.parametrize("family", [*TEMPLATES, "bytes"])
# Where SentencePiece's own blanks are, text does not come back as it was around special tokens.
FAMILIES = pytest.mark.parametrize("family", [name for name in EOS if name not in ("llama2", "mistral")] + ["bytes"])
PIECES = st.sampled_from([*SPECIALS, " ", "\n", "7", "\U0001f642", "\u00e4"])
ANY_TEXT = st.text(max_size=40) | st.lists(PIECES).map("".join)
PLAIN = st.from_regex(r"[a-z]([a-z0-9 +.]*[a-z0-9])?", fullmatch=True).filter(lambda text: len(text) < 40)


# ---- encoding


def test_encoding_adds_no_token_of_its_own(bpe):
    ids = bpe.encode("What is 3 + 4 ? The answer is 7 ." * 3)
    assert not {0, 1} & set(ids)
    assert len(ids) > 8  # the file's truncation to 8 is off
    assert len(bpe.encode("a")) == 1  # and so is its padding


@pytest.mark.parametrize("family", ["llama2", "llama3", "mistral", "gemma2", "gemma3"])
def test_a_rendered_prompt_holds_the_one_bos_that_the_template_wrote_and_ends_in_no_eos(families, family):
    tokenizer = families[family]  # whose post-processor would add a BOS, and some an EOS
    ids = tokenizer.encode(tokenizer.render([user("hi")]))
    bos = tokenizer.token_to_id("<s>")
    assert ids.count(bos) == 1 and ids[0] == bos
    assert not set(ids[-2:]) & set(tokenizer.stop_ids)


@pytest.mark.parametrize("family", ["chatml", "smollm2", "qwen2.5", "qwen3", "smollm3", "phi"])
def test_where_the_template_writes_no_bos_there_is_none(families, family):
    ids = families[family].encode(families[family].render([user("hi"), assistant("a"), user("b")]))
    assert families[family].token_to_id("<s>") not in ids


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


@EVERY_FAMILY
def test_what_the_template_ends_a_reply_with_is_a_stop_whatever_eos_the_files_name(families, family):
    tokenizer = families[family]
    expected = {tokenizer.token_to_id(token) for token in (TURN_END[family], EOS.get(family, "<|end|>"))}
    assert tokenizer.stop_ids == tuple(sorted(expected))


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "{{ no(1) }}"]
)
def test_a_template_that_ends_replies_with_text_or_not_at_all_adds_no_stop(tmp_path, template):
    assert load(write_bpe(tmp_path, template)).stop_ids == (1,)


def test_an_end_of_turn_that_the_template_never_writes_is_no_stop(families):
    assert families["llama3"].token_to_id("<|im_end|>") not in families["llama3"].stop_ids


def test_padding_with_eos_leaves_eos_a_stop(tmp_path):
    tokenizer = load(write_bpe(tmp_path, CHATML, pad_token="</s>"))
    assert tokenizer.pad_id in tokenizer.stop_ids


def test_special_tokens_may_be_dicts_or_stand_in_the_special_tokens_map(tmp_path):
    path = write_bpe(tmp_path, LLAMA3, bos_token=None, eos_token={"content": "<|eot_id|>"})
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
    closed = families["qwen3"].render([user("hi")], options={"enable_thinking": False})
    assert closed.endswith("assistant\n<think>\n\n</think>\n\n")
    tools = families["llama3"].render([user("hi")], options={"tools": [{"name": "<\u00e4>"}]})
    assert '[{"name": "<\u00e4>"}]' in tools


@pytest.mark.parametrize("name", ["enable_thinking", "messages", "add_generation_prompt", "talk_to_me"])
def test_an_option_that_the_template_never_reads_is_refused_with_those_it_does(families, name):
    with pytest.raises(ConfigError, match=f"reads no {name}; it reads .*date_string") as caught:
        families["llama3"].render([user("hi")], options={name: True})
    assert caught.value.field == "template"
    with pytest.raises(ConfigError, match="reads no variables"):
        families["bytes"].render([user("hi")], options={name: True})


def test_templates_that_write_the_date_write_the_same_every_day(families):
    assert "Date: 26 Jul 2024\n" in families["llama3"].render([user("hi")])
    assert "Date: 26 July 2024\n" in families["smollm3"].render([user("hi")])
    assert "Date: 1 May 2031\n" in families["llama3"].render([user("hi")], options={"date_string": "1 May 2031"})


def test_generation_marks_leave_the_text_alone(bpe):
    assert bpe.render([user("hi")], generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_what_a_template_refuses_is_a_config_error_with_its_words(families):
    with pytest.raises(ConfigError, match="no role tool"):
        families["llama3"].render([{"role": "tool", "content": ""}])
    with pytest.raises(ConfigError, match="tool"):
        ByteTokenizer().render([{"role": "tool", "content": ""}])


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ 'a' + 1 }}", "{{ messages[7].content }}", "{% if %}"])
def test_a_template_that_fails_in_whatever_way_is_a_config_error(tmp_path, template):
    with pytest.raises(ConfigError, match="refuses them"):
        load(write_bpe(tmp_path, template)).render([user("hi")])


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


def as_sampled(tokenizer, prompt_text, reply):
    """Ids that a model would sample for a reply if it chose as the encoder does; its text may lack a first blank."""
    prompt, whole = tokenizer.encode(prompt_text), tokenizer.encode(prompt_text + reply)
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def go_on(tokenizer, before, reply, after, sampled=None, options=None):
    """The continuation of `before` by a reply that was sampled as its own encoding and a stop token, or as `sampled`."""
    prompt = tokenizer.encode(tokenizer.render(before, options=options))
    sampled = [*tokenizer.encode(reply), tokenizer.stop_ids[-1]] if sampled is None else sampled
    whole = [*before, assistant(reply), *after]
    return prompt, sampled, whole, continuation(tokenizer, before, reply, whole, prompt, sampled, options)


def first_blank(family):
    """What these templates write between a prompt and a reply."""
    return " " if family in ("llama2", "mistral") else ""


EXCHANGES = st.lists(st.tuples(PLAIN, st.booleans(), PLAIN), min_size=1, max_size=3)


def check_turn_by_turn(tokenizer, messages, exchanges, blank="", options=None):
    """Each prompt's ids, made of what came before, are those of its full rendering; the number of turns that went on in one row."""
    ids, joined = tokenizer.encode(tokenizer.render(messages, options=options)), 0
    for reply, cut, question in exchanges:
        sampled = as_sampled(tokenizer, tokenizer.render(messages, options=options), blank + reply)
        sampled += [] if cut else [tokenizer.stop_ids[-1]]
        longer = [*messages, assistant(reply), user(question)]
        whole = tokenizer.render(longer, options=options)
        result = continuation(tokenizer, messages, reply, longer, ids, sampled, options)
        if result is not None:
            assert result[0] == [*ids, *sampled, *tokenizer.encode(result[1])]
            assert whole.endswith(result[1])
            assert result[0] == tokenizer.encode(whole)
            joined += 1
        ids, messages = tokenizer.encode(whole), longer
    return joined


@EVERY_FAMILY
@given(system=st.none() | PLAIN, question=PLAIN, exchanges=EXCHANGES)
def test_ids_built_turn_by_turn_are_those_of_the_full_rendering_or_a_new_row_begins(
    families, family, system, question, exchanges
):
    has_system = system is not None and family != "gemma2"
    messages = [*([{"role": "system", "content": system}] if has_system else []), user(question)]
    joined = check_turn_by_turn(families[family], messages, exchanges, first_blank(family))
    # Llama 2 writes a blank before </s>, Mistral moves the system text to the last user message.
    begins_anew = family == "llama2" or (family == "mistral" and has_system)
    assert joined == (0 if begins_anew else len(exchanges))


@EVERY_FAMILY
def test_ids_that_no_encoder_would_choose_stay_as_sampled(families, family):
    tokenizer = families[family]
    letters = [tokenizer.token_to_id(letter) for letter in "answer"]
    if family == "mistral":
        letters = [tokenizer.token_to_id("\u2581"), *letters]
    assert (
        family == "bytes"
        or as_sampled(tokenizer, tokenizer.render([user("a")]), first_blank(family) + "answer") != letters
    )
    prompt, sampled, whole, joined = go_on(
        tokenizer, [user("a")], "answer", [user("c")], [*letters, tokenizer.stop_ids[-1]]
    )
    if family == "llama2":
        assert joined is None
        return
    ids, added = joined
    assert ids == [*prompt, *sampled, *tokenizer.encode(added)]
    assert tokenizer.decode(ids, False) == tokenizer.render(whole) or family == "phi"
    assert family == "bytes" or ids != tokenizer.encode(tokenizer.render(whole))


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


@EVERY_FAMILY
def test_an_empty_reply_goes_on(families, family):
    tokenizer = families[family]
    _, _, whole, joined = go_on(tokenizer, [user("a")], "", [user("c")], [tokenizer.stop_ids[-1]])
    if first_blank(family):  # the template writes a blank that was not sampled
        assert joined is None
    else:
        assert joined[0] == tokenizer.encode(tokenizer.render(whole))


@FAMILIES
@pytest.mark.parametrize("reply", [" b", "b ", "b\n", "\tb"])
def test_blanks_around_a_reply_go_on_except_where_the_template_trims_them(families, family, reply):
    joined = go_on(families[family], [user("a")], reply, [user("c")])[-1]
    assert (joined is None) == (family in TRIMMING)


@FAMILIES
def test_a_reply_that_spells_its_end_of_turn_in_letters_neither_ends_there_nor_is_encoded_anew(families, family):
    tokenizer = families[family]
    end = TURN_END[family]
    letters = [tokenizer.token_to_id(letter) for letter in f"a{end}b"]
    prompt, sampled, _, (ids, added) = go_on(
        tokenizer, [user("a")], f"a{end}b", [user("c")], [*letters, tokenizer.stop_ids[-1]]
    )
    assert ids == [*prompt, *sampled, *tokenizer.encode(added)]
    spelled = tokenizer.token_to_id(end)
    assert ids.count(spelled) == prompt.count(spelled) + 1 + added.count(end)


@EVERY_FAMILY
def test_of_several_stop_ids_only_the_templates_own_goes_on(families, family, tmp_path):
    if family == "bytes":
        tokenizer, other = ByteTokenizer(), ByteTokenizer().pad_id
        tokenizer.stop_ids = (*tokenizer.stop_ids, other)
    else:
        path = write_family(tmp_path / family, family)
        other = load(path).token_to_id("<s>")
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, load(path).stop_ids[0]]}))
        tokenizer = load(path)
    assert other in tokenizer.stop_ids and len(tokenizer.stop_ids) >= 2
    spoken = as_sampled(tokenizer, tokenizer.render([user("a")]), first_blank(family) + "b")
    ends = {
        stop: go_on(tokenizer, [user("a")], "b", [user("c")], [*spoken, stop])[-1] is not None
        for stop in tokenizer.stop_ids
    }
    own = tokenizer.token_to_id(TURN_END[family])
    assert ends == {stop: stop == own and family != "llama2" for stop in tokenizer.stop_ids}


def test_the_newline_after_the_stop_token_is_not_lost_and_the_stop_not_doubled(bpe):
    ids, added = go_on(bpe, [user("a")], "b", [user("c")])[-1]
    assert added == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert bpe.decode(ids, False).count("b<|im_end|>\n<|im_start|>") == 1


def test_a_reply_cut_by_length_gets_the_templates_end_of_turn(bpe):
    ids, added = go_on(bpe, [user("a")], "b", [user("c")], sampled=bpe.encode("b"))[-1]
    assert added.startswith("<|im_end|>\n<|im_start|>user")
    assert ids == bpe.encode(bpe.render([user("a"), assistant("b"), user("c")]))


def test_dropped_thinking_begins_a_new_row(families):
    qwen = families["qwen3"]
    assert go_on(qwen, [user("a")], "<think>\nhm\n</think>\n\nb", [user("c")])[-1] is None
    assert go_on(qwen, [user("a")], "b", [user("c")], options={"enable_thinking": False})[-1] is None
    tool = [{"role": "tool", "content": "c"}]
    assert go_on(qwen, [user("a")], "<think>\nhm\n</think>\n\nb", tool)[-1] is not None
    assert go_on(qwen, [user("a")], "<think>\nhm", [user("c")], qwen.encode("<think>\nhm"))[-1] is not None  # cut: kept


@pytest.mark.parametrize("options", [{"enable_thinking": False}, {"enable_thinking": True}])
def test_thinking_that_the_template_keeps_goes_on_in_the_same_row(families, options):
    smollm3 = families["smollm3"]
    reply = "b" if not options["enable_thinking"] else "<think>\nhm\n</think>\nb"
    assert check_turn_by_turn(smollm3, [user("a")], [(reply, False, "c"), (reply, True, "d")], options=options) == 2


def test_the_blank_that_sentencepiece_hides_at_the_start_of_a_reply_is_that_of_the_template(families):
    mistral = families["mistral"]
    blank, seven, end = (mistral.token_to_id(token) for token in ("\u25817", "7", "</s>"))
    assert mistral.decode([blank]) == "7"
    prompt, _, whole, (ids, _) = go_on(mistral, [user("a")], "7", [user("c")], [blank, end])
    assert ids == mistral.encode(mistral.render(whole)) and ids[len(prompt)] == blank
    assert go_on(mistral, [user("a")], "7", [user("c")], [seven, end])[-1] is None  # sampled without it


def test_text_that_would_get_a_blank_of_its_own_begins_a_new_row(tmp_path):
    lines = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = load(write_sentencepiece(tmp_path, lines, everywhere=True))
    assert go_on(tokenizer, [user("a")], "b", [user("c")], [tokenizer.token_to_id("b")])[-1] is None


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


# ---- the official files


@pytest.fixture(scope="module", params=sorted(FROM_FILES))
def official(request, tmp_path_factory):
    """A family's own tokenizer, with its own template where its files hold one: its name, ours, and the family."""
    return (
        request.param,
        load(official_files(request.param, tmp_path_factory.mktemp("official"))),
        FROM_FILES[request.param],
    )


@pytest.mark.slow
@given(exchanges=EXCHANGES)
def test_official_templates_turn_by_turn_give_the_ids_of_their_full_rendering(official, exchanges):
    _, tokenizer, family = official
    blank = " " if family == "llama2" else ""
    joined = check_turn_by_turn(tokenizer, [user("What is 3 + 4 ?")], exchanges, blank)
    assert joined == (0 if family == "llama2" else len(exchanges))


@pytest.mark.slow
def test_official_templates_take_a_system_message_or_refuse_it_in_words(official):
    name, tokenizer, family = official
    messages = [{"role": "system", "content": "Be brief."}, user("a")]
    if family == "gemma2":
        with pytest.raises(ConfigError, match="refuses them"):
            tokenizer.render(messages)
        return
    text = tokenizer.render(messages)
    assert text.count("Be brief.") == 1
    goes_on = family not in ("llama2", "mistral")
    assert check_turn_by_turn(tokenizer, messages, [("b", False, "c")], " " if name == "llama2" else "") == goes_on


@pytest.mark.slow
def test_official_prompts_hold_one_bos_or_none_and_end_in_no_stop(official):
    _, tokenizer, family = official
    ids = tokenizer.encode(tokenizer.render([user("a"), assistant("b"), user("c")]))
    bos = [tokenizer.token_to_id(token) for token in ("<s>", "<bos>", "<|begin_of_text|>")]
    found = sum(ids.count(token) for token in bos if token is not None)
    assert found == {"llama2": 2, "llama3": 1, "mistral": 1, "gemma2": 1, "gemma3": 1}.get(
        family, 0
    )  # Llama 2: one a turn
    assert ids[-1] not in tokenizer.stop_ids
    assert tokenizer.token_to_id(TURN_END[family]) in tokenizer.stop_ids


@pytest.mark.slow
@given(text=ANY_TEXT)
def test_official_offsets_cover_the_text_in_order(official, text):
    _, tokenizer, _ = official
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) and len(ids) == len(offsets)
    assert offsets == sorted(offsets)
    if ids:
        assert {place for begin, end in offsets for place in range(begin, end)} == set(range(len(text)))


@pytest.mark.slow
@given(reply=ANY_TEXT, stopped=st.booleans())
def test_official_continuations_keep_every_sampled_id(official, reply, stopped):
    _, tokenizer, _ = official
    sampled = [*tokenizer.encode(reply), *([tokenizer.stop_ids[-1]] if stopped else [])]
    said = tokenizer.decode(sampled[:-1] if stopped else sampled)
    prompt, _, whole, joined = go_on(tokenizer, [user("a")], said, [user("c")], sampled)
    if joined is not None:
        assert joined[0] == [*prompt, *sampled, *tokenizer.encode(joined[1])]
        assert tokenizer.render(whole).endswith(joined[1])


@pytest.mark.slow
def test_official_thinking_begins_a_new_row_when_it_is_dropped_or_switched_off(official):
    name, tokenizer, _ = official
    if name != "qwen3":
        with pytest.raises(ConfigError, match="reads no enable_thinking"):
            tokenizer.render([user("a")], options={"enable_thinking": False})
        return
    assert go_on(tokenizer, [user("a")], "<think>\nhm\n</think>\n\nb", [user("c")])[-1] is None
    assert go_on(tokenizer, [user("a")], "b", [user("c")], options={"enable_thinking": False})[-1] is None
    assert tokenizer.render([user("a")], options={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert "<think>" not in tokenizer.render([user("a")])


@pytest.mark.slow
def test_official_dates_stand_still(official):
    name, tokenizer, _ = official
    assert ("26 Jul 2024" in tokenizer.render([user("a")])) == (name == "llama3_2")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"[]", "no JSON object"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "chat_template is no template"),
        ("special_tokens_map.json", b"null", "no JSON object"),
        ("generation_config.json", b"\xff", "not JSON"),
        ("generation_config.json", b'{"eos_token_id": "</s>"}', "eos_token_id = '</s>' is neither"),
        ("generation_config.json", b'{"eos_token_id": [[1]]}', "is neither an id nor a list"),
        ("chat_template.jinja", b"\xff", "not text in UTF-8"),
    ],
)
def test_side_files_that_are_not_what_they_should_be_are_refused_in_words(name, content, message, tmp_path):
    save_char_tokenizer(tmp_path, "abc")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
