"""From messages to prompt ids: continued conversations token in, token out, and the place of every quoted reply."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mas_jax.config import ConfigError
from mas_jax.graph import Read, Turn
from mas_jax.models.tokenizer import MARK, Tokenizes, continuation
from mas_jax.rollout.workflow import Message, Quote, Reply, Span, ToolResult


@dataclass(frozen=True)
class Prompt:
    """Prompt ids with what they came from; after sampling also the reply's ids."""

    ids: list[int]
    text: str
    messages: tuple[dict, ...]
    reads: tuple[Read, ...]
    agent: tuple[str, int]
    continues: str = ""
    reply: tuple[int, ...] = ()

    def sampled(self, turn: Turn) -> Prompt:
        """This prompt with the ids that were sampled after it."""
        return replace(self, reply=tuple(turn.tokens))


def source_of(value: Reply | Quote | ToolResult) -> str:
    """Id of the event a value came from."""
    if isinstance(value, Reply):
        return value.turn
    return value.source if isinstance(value, Quote) else value.event


def build(
    tokenizer: Tokenizes,
    items: Sequence[Message | Reply],
    options: dict,
    earlier: dict[str, Prompt],
    agent: tuple[str, int],
) -> Prompt:
    """Render messages and encode them.

    When the messages are an earlier prompt of this same agent, its reply as sampled, and more, and the template only appends, the
    ids are those of that prompt, the sampled ids, and the ids of what the template adds. Else the conversation is encoded afresh.
    Raises ConfigError, with the role's name, where the template refuses the messages or never reads an option.
    """
    messages = tuple(_plain(item) for item in items)
    text = render(tokenizer, messages, options, agent[0])
    for place in range(len(items) - 1, 0, -1):
        item = items[place]
        before = earlier.get(item.turn) if isinstance(item, Reply) else None
        if before is None or before.agent != agent or before.messages != messages[:place]:
            continue
        joined = continuation(
            tokenizer, list(before.messages), item.text, list(messages), before.ids, list(before.reply), options
        )
        if joined is None:
            break
        ids, added = joined
        kept = len(before.ids) + len(before.reply)
        own = Read(item.turn, len(before.ids), kept)
        fresh = _reads(tokenizer, items[place + 1 :], messages, place + 1, added, options, kept)
        return Prompt(ids, text, messages, (*before.reads, own, *fresh), agent, continues=item.turn)
    return Prompt(
        tokenizer.encode(text), text, messages, _reads(tokenizer, items, messages, 0, text, options, 0), agent
    )


def render(tokenizer: Tokenizes, messages: Sequence[dict], options: dict, role: str) -> str:
    """What the chat template makes of the messages of a role, with ConfigErrors that name the role.

    A system message that the template refuses is never moved elsewhere: who writes the prompt decides where its text goes.
    """
    try:
        return tokenizer.render(list(messages), options=options)
    except ConfigError as error:
        first, *others = messages
        if error.field == "messages" and first["role"] == "system" and others and _renders(tokenizer, others, options):
            remedy = f"begin the first user message with this text instead: {error.remedy}"
            raise ConfigError(f"roles.{role}.system", first["content"], remedy) from error
        raise ConfigError(f"roles.{role}.{error.field}", error.value, error.remedy) from error


def _renders(tokenizer: Tokenizes, messages: Sequence[dict], options: dict) -> bool:
    try:
        return bool(tokenizer.render(list(messages), options=options))
    except ConfigError:
        return False


def _plain(item: Message | Reply) -> dict:
    if isinstance(item, Reply):
        return {"role": "assistant", "content": item.text}
    return {"role": item.role, "content": item.content}


def _spans(item: Message | Reply) -> tuple[Span, ...]:
    return (Span(item.turn, 0, len(item.text)),) if isinstance(item, Reply) else item.spans


def _reads(
    tokenizer: Tokenizes,
    items: Sequence[Message | Reply],
    messages: Sequence[dict],
    first: int,
    text: str,
    options: dict,
    shift: int,
) -> tuple[Read, ...]:
    """Token places of the spans of `items`, which are messages[first:], in `text`, whose first token is number `shift`."""
    if not any(_spans(item) for item in items):
        return ()
    full = tokenizer.render(list(messages), options=options) if first else text
    skipped = len(full) - len(text)
    _, offsets = tokenizer.encode_with_offsets(text)
    begins, ends = [begin for begin, _ in offsets], [end for _, end in offsets]
    reads = []
    for place, item in enumerate(items, first):
        spans = _spans(item)
        start = _content_start(tokenizer, messages, place, full, options) if spans else None
        for span in spans:
            if start is None:
                reads.append(Read(span.source, -1, -1))
                continue
            begin, end = start + span.start - skipped, start + span.stop - skipped
            reads.append(
                Read(span.source, shift + bisect.bisect_right(ends, begin), shift + bisect.bisect_left(begins, end))
            )
    return tuple(reads)


def _content_start(tokenizer: Tokenizes, messages: Sequence[dict], place: int, full: str, options: dict) -> int | None:
    """Character at which a message's content begins in the rendering; None where the template rewrites that content."""
    message = messages[place]
    marked = [*messages[:place], message | {"content": MARK}, *messages[place + 1 :]]
    before, mark, after = tokenizer.render(marked, options=options).partition(MARK)
    return len(before) if mark and before + message["content"] + after == full else None
