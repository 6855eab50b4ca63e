"""Text to ids and back, chat templates, and continued conversations without re-encoding what was sampled."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers

from mas_jax.config import ConfigError

ROLES = ("user", "assistant", "system")
END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unk|>"
SPECIALS = (*(f"<|{role}|>" for role in ROLES), END, PAD)

# What templates are told the date is: the one that Llama's fall back on. With the clock's, tomorrow's prompts would have other ids.
TODAY = datetime.datetime(2024, 7, 26)
MARK = "\ue000content\ue001"

# What ByteTokenizer renders, as a template.
SIMPLE_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['user', 'assistant', 'system'] -%}"
    "{{ raise_exception('roles are user, assistant and system, not ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


@runtime_checkable
class Tokenizes(Protocol):
    """What the rest of the stack asks of a tokenizer."""

    stop_ids: tuple[int, ...]
    pad_id: int
    vocab: int

    def encode(self, text: str) -> list[int]: ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def render(self, messages: list[dict], *, generation_prompt: bool = True, options: dict | None = None) -> str: ...

    def require_template(self) -> None: ...

    def token_to_id(self, token: str) -> int | None: ...


class Tokenizer:
    """The tokenizer of a Hugging Face directory; `load` makes one."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path,
        template: str | None,
        named: Mapping[str, str],
        stop_ids: Sequence[int],
        pad_id: int,
    ) -> None:
        self._backend, self._path, self._template, self._named = backend, path, template, dict(named)
        self.stop_ids, self.pad_id = tuple(stop_ids), pad_id
        self.vocab = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of the text and nothing more: no BOS, no EOS; special tokens written in the text are recognised."""
        return self._backend.encode(_utf8(text), add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and for each the characters of `text` it came from: together they cover the text, in order.

        Tokens that share one character (the bytes of an emoji) all span it.
        """
        encoding = self._backend.encode(_utf8(text), add_special_tokens=False)
        offsets, reached = [], 0
        for begin, end in encoding.offsets:
            # Post-processors may trim blanks from offsets, and normalizers drop characters: the token after takes them.
            offsets.append((min(begin, reached), end))
            reached = end
        if offsets:
            offsets[-1] = (offsets[-1][0], len(text))
        return encoding.ids, offsets

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; ids beyond the vocabulary have none."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def render(self, messages: list[dict], *, generation_prompt: bool = True, options: dict | None = None) -> str:
        """The conversation as the model's chat template writes it, with `options` as its variables.

        Raises ConfigError without a template, where it refuses the messages, and for an option that it never reads.
        """
        self.require_template()
        own = {
            "messages": [{k: v for k, v in message.items() if v is not None} for message in messages],
            "add_generation_prompt": generation_prompt,
        }
        try:
            known = _variables(self._template) - set(own)
            if unread := sorted(set(options or {}) - known):
                remedy = f"the chat template of {self._path} reads no {', '.join(unread)}; it reads {', '.join(sorted(known))}"
                raise ConfigError("template", options, remedy)
            scope = self._named | {"tools": None, "documents": None} | (options or {}) | own
            return _compile(self._template).render(scope)
        except ConfigError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            roles = [message["role"] for message in messages]
            raise ConfigError("messages", roles, f"the chat template of {self._path} refuses them: {error}") from error

    def require_template(self) -> None:
        """Raise ConfigError if the directory brought no chat template."""
        if self._template is None:
            remedy = "no chat template (a base model?): add chat_template to tokenizer_config.json in this directory"
            raise ConfigError("path", str(self._path), remedy)

    def token_to_id(self, token: str) -> int | None:
        """Id of one token by its name in the vocabulary, None if it is not there."""
        return self._backend.token_to_id(token)


def load(path: str | Path) -> Tokenizer:
    """Tokenizer of a Hugging Face directory; ConfigError without a tokenizer.json or with an eos token it lacks."""
    path = Path(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        remedy = "no tokenizer.json there: give a Hugging Face directory that holds one (older models: save_pretrained)"
        raise ConfigError("path", str(path), remedy)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises nothing narrower
        raise ConfigError("path", str(file), f"tokenizers cannot read it: {error}") from error
    # A saved tokenizer.json may hold the truncation and padding of somebody's last training run.
    backend.no_truncation()
    backend.no_padding()
    settings = _read_json(path / "tokenizer_config.json")
    named = _named_specials(_read_json(path / "special_tokens_map.json")) | _named_specials(settings)
    known = {name: token for name, token in named.items() if backend.token_to_id(token) is not None}
    if "eos_token" in named and "eos_token" not in known:
        raise ConfigError("eos_token", named["eos_token"], f"not in the vocabulary of {file}: name a token that is")
    _mark_special(backend, list(known.values()))
    eos = {backend.token_to_id(known["eos_token"])} if "eos_token" in known else set()
    pad = known.get("pad_token", known.get("eos_token"))
    pad_id = 0 if pad is None else backend.token_to_id(pad)
    tokenizer = Tokenizer(backend, path, _find_template(path, settings), named, (), pad_id)
    stops = eos | _eos_ids(path) | _turn_end(tokenizer, backend)
    tokenizer.stop_ids = tuple(sorted(stops))
    return tokenizer


def _utf8(text: str) -> str:
    """The text with lone surrogates, which no encoder takes, as question marks; as long as before."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_json(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("path", str(file), f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("path", str(file), "no JSON object: download it again")
    return content


def _named_specials(settings: dict) -> dict[str, str]:
    """bos_token, eos_token, ...: each a string, or a dict that holds one."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _mark_special(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Make the named tokens special where tokenizer.json has them as plain ones, as transformers does."""
    special = {added.content for added in backend.get_added_tokens_decoder().values() if added.special}
    plain = dict.fromkeys(token for token in tokens if token not in special)
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in plain])


def _find_template(path: Path, settings: dict) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError("path", str(file), f"not text in UTF-8: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):  # named templates
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if not isinstance(template, str | None):
        raise ConfigError("path", str(path / "tokenizer_config.json"), f"chat_template is no template: {template!r}")
    return template


def _eos_ids(path: Path) -> set[int]:
    file = path / "generation_config.json"
    eos = _read_json(file).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(one, int) for one in ids):
        raise ConfigError("path", str(file), f"eos_token_id = {eos!r} is neither an id nor a list of ids")
    return set(ids)


def _turn_end(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> set[int]:
    """The special token that the template writes after a reply (<|im_end|>, <|eot_id|>, ...): some families' eos is another."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    try:
        after = tokenizer.render(talk, generation_prompt=False).partition(MARK)[2].lstrip()
    except ConfigError:  # without a template, or with one that is refused when it is used
        return set()
    return set(tokenizer.encode(after)[:1]) & set(backend.get_added_tokens_decoder())


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text in training templates; its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> jinja2.Environment:
    """What transformers gives a template, but for the date: its text comes from a model hub and is not trusted."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    """Names that a template reads and may not have set itself."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))


class ByteTokenizer:
    """UTF-8 bytes and five special tokens, needing no files: `<|role|>content<|end|>` a message."""

    def __init__(self) -> None:
        self._ids = {token: 256 + i for i, token in enumerate(SPECIALS)}
        self._names = {i: token for token, i in self._ids.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")
        self.stop_ids, self.pad_id, self.vocab = (self._ids[END],), self._ids[PAD], 272

    def encode(self, text: str) -> list[int]:
        """Ids of the text; special tokens written in it are recognised."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and for each the characters it came from; the bytes of one character all span it."""
        ids, offsets, at = [], [], 0
        for piece in self._split.split(text):
            if piece in self._ids:
                ids.append(self._ids[piece])
                offsets.append((at, at + len(piece)))
            else:
                for place, character in enumerate(piece, at):
                    raw = character.encode("utf-8", "replace")
                    ids.extend(raw)
                    offsets.extend([(place, place + 1)] * len(raw))
            at += len(piece)
        return ids, offsets

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD, ids without a meaning become nothing."""
        names = {} if skip_special else self._names
        return b"".join(bytes([i]) if i < 256 else names.get(int(i), "").encode() for i in ids).decode(errors="replace")

    def render(self, messages: list[dict], *, generation_prompt: bool = True, options: dict | None = None) -> str:
        """The conversation. ConfigError for a role it does not know, and for options: it has none."""
        if options:
            raise ConfigError("template", options, "the byte tokenizer reads no variables: leave them out")
        for message in messages:
            if message["role"] not in ROLES:
                raise ConfigError("messages", message["role"], f"the roles are {', '.join(ROLES)}")
        turns = [f"<|{message['role']}|>{message['content']}{END}" for message in messages]
        return "".join(turns) + ("<|assistant|>" if generation_prompt else "")

    def require_template(self) -> None:
        """It has one."""

    def token_to_id(self, token: str) -> int | None:
        """Id of a special token, or of a text of one byte."""
        raw = token.encode("utf-8", "replace")
        return raw[0] if len(raw) == 1 else self._ids.get(token)


def save_char_tokenizer(path: str | Path, alphabet: str) -> None:
    """Write the tokenizer files of a character model; ConfigError without characters."""
    characters = list(dict.fromkeys(_utf8(alphabet)))
    if not characters:
        raise ConfigError("alphabet", alphabet, "give the characters that the model reads and writes")
    specials = [*SPECIALS, UNKNOWN]
    vocab = {token: i for i, token in enumerate(characters + specials)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in specials])
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "eos_token": END, "pad_token": PAD, "unk_token": UNKNOWN, "chat_template": SIMPLE_TEMPLATE,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def continuation(
    tokenizer: Tokenizes,
    previous_messages: list[dict],
    reply_text: str,
    messages: list[dict],
    previous_ids: list[int],
    sampled_ids: list[int],
    options: dict | None,
) -> tuple[list[int], str] | None:
    """Ids of a conversation that goes on after a sampled reply, and the text the template adds after what was sampled.

    The ids are `previous_ids + sampled_ids + encode(that text)`: nothing sampled is encoded again. None where the
    longer rendering does not begin with the shorter one and the reply (a template that drops earlier thinking, say),
    or where the reply ended in another way than the template writes: the caller then renders afresh, in a new row.
    """
    after = tokenizer.render(messages, options=options)
    stopped = bool(sampled_ids) and sampled_ids[-1] in tokenizer.stop_ids
    spoken = sampled_ids[:-1] if stopped else sampled_ids
    before = tokenizer.render(previous_messages, options=options)
    before += _swallowed(tokenizer, previous_ids, spoken) + reply_text
    if not after.startswith(before) or reply_text not in (tokenizer.decode(spoken), tokenizer.decode(spoken, False)):
        return None
    added = after[len(before) :]
    wanted = tokenizer.encode(added)
    if not stopped:  # cut by length: the template's own end of turn is part of what is added
        # SentencePiece puts a blank before a text encoded on its own, which it has not where it stands.
        there = _swallowed(tokenizer, sampled_ids, wanted) + tokenizer.decode(wanted, False)
        return ([*previous_ids, *sampled_ids, *wanted], added) if _blanks(there) == _blanks(added) else None
    stop = tokenizer.decode(sampled_ids[-1:], False)
    if wanted[:1] != sampled_ids[-1:] or not added.startswith(stop):
        return None
    # A stop token may swallow the blanks after it (Phi-3), so that what is encoded on its own must begin behind them.
    for rest in (added[len(stop) :], added[len(stop) :].lstrip()):
        if tokenizer.encode(rest) == wanted[1:]:
            return [*previous_ids, *sampled_ids, *wanted[1:]], rest
    return None


def _blanks(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _swallowed(tokenizer: Tokenizes, before: list[int], ids: list[int]) -> str:
    """The blank that ids begin with where they stand, and that SentencePiece's decoders drop from ids on their own."""
    anchor, alone = before[-1:], tokenizer.decode(ids, False)
    whole = tokenizer.decode([*anchor, *ids], False)
    return whole[len(tokenizer.decode(anchor, False)) : len(whole) - len(alone)] if whole.endswith(alone) else ""
