"""The contract of a workflow: a generator function `(task, team)` that yields calls and gets replies.

    @workflow(roles=("solver", "critic"))
    def solve(task, team):
        draft = yield Call("solver", [user(task.prompt)])
        review = yield Call("critic", [user("Problem: {problem}\\nAnswer: {draft}\\nRight?", problem=task.prompt, draft=draft)])
        return draft

What may be yielded: a `Call` (gives a `Reply`), a `Tool` (gives a `ToolResult`), or a list whose items are calls, tools or
generators; a list runs in parallel and gives the list of results. `yield from` is plain reuse. Nothing is async: the driver
batches every waiting call of every live episode. A workflow must be a deterministic function of its task, the replies, the tool
results and `team.rng`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mas_jax.graph import Turn

_LOSES_EDGE = (
    "{what} was put into an f-string or str.format, which loses where it came from: write "
    'user("... {{draft}} ...", draft=reply) instead, or str(reply) where it does not go into a prompt'
)


class BudgetStop(Exception):
    """Raised inside a workflow whose next call does not fit a budget or the window; uncaught, it ends the episode."""


class Reply:
    """What a role said. Pass it on in a message, whole: `user("Judge: {draft}", draft=reply)`; its place there becomes an edge.

    `text` is the decoded reply without its stop token; `finish` is "stop", "length" (max_tokens) or "window".
    """

    __slots__ = ("_turn",)

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    @property
    def text(self) -> str:
        return self._turn.text

    @property
    def tokens(self) -> list[int]:
        return list(self._turn.tokens)

    @property
    def logprobs(self) -> list[float]:
        return list(self._turn.logprobs)

    @property
    def finish(self) -> str:
        return self._turn.finish

    @property
    def turn(self) -> str:
        """Id of the turn in the trace: a reward may use it as a key."""
        return self._turn.id

    @property
    def role(self) -> str:
        return self._turn.role

    def quote(self, text: str) -> Quote:
        """Text that was parsed out of this reply: used in a message, it keeps the edge."""
        return Quote(str(text), self.turn)

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        raise TypeError(_LOSES_EDGE.format(what=f"a Reply of {self.role!r}"))

    def __repr__(self) -> str:
        return f"Reply({self.role!r}, turn={self.turn!r}, finish={self.finish!r}, text={self.text!r})"


@dataclass(frozen=True)
class Quote:
    """Text taken from a reply or a tool result, with the id of the event it came from."""

    text: str
    source: str

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        raise TypeError(_LOSES_EDGE.format(what="a Quote"))


@dataclass(frozen=True)
class ToolResult:
    """What a tool gave: `value` as returned, `text` for prompts, `error` in words when it failed or ran out of time."""

    text: str
    event: str
    value: Any = None
    error: str = ""

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        raise TypeError(_LOSES_EDGE.format(what="a ToolResult"))


Slot = str | int | float | Reply | Quote | ToolResult


@dataclass(frozen=True)
class Span:
    """Characters [start, stop) of a message's content that came from the event `source`."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True)
class Message:
    """One chat message: `content` is final text, `spans` says which parts of it came from which events."""

    role: str
    content: str
    spans: tuple[Span, ...] = ()


def user(template: str | Reply | Quote | ToolResult, /, **slots: Slot) -> Message:
    """A user message. With slots, `template` is filled like str.format ({{ and }} are braces); without, it is taken verbatim."""
    return _message("user", template, slots)


def system(template: str | Reply | Quote | ToolResult, /, **slots: Slot) -> Message:
    """A system message; slots as in `user`."""
    return _message("system", template, slots)


def assistant(template: str | Reply | Quote | ToolResult, /, **slots: Slot) -> Message:
    """An assistant message of given text; an agent's own earlier reply goes into the list of messages as it is."""
    return _message("assistant", template, slots)


def _source(value: object) -> str:
    if isinstance(value, Reply):
        return value.turn
    if isinstance(value, Quote):
        return value.source
    return value.event if isinstance(value, ToolResult) else ""


def _message(role: str, template: object, slots: dict[str, Slot]) -> Message:
    if not isinstance(template, str):
        text, source = str(template), _source(template)
        if not source:
            raise TypeError(f"a {role} message wants text or a Reply, not {type(template).__name__}")
        return Message(role, text, (Span(source, 0, len(text)),))
    if not slots:
        return Message(role, template)
    parts: list[str] = []
    spans: list[Span] = []
    used: set[str] = set()
    at = 0
    for literal, name, spec, conversion in string.Formatter().parse(template):
        parts.append(literal)
        at += len(literal)
        if name is None:
            continue
        if spec or conversion or name not in slots:
            have = ", ".join(sorted(slots))
            raise ValueError(f"message template {template!r} has {{{name}}}; slots are plain names out of: {have}")
        value = slots[name]
        text, source = str(value), _source(value)
        if source:
            spans.append(Span(source, at, at + len(text)))
        used.add(name)
        parts.append(text)
        at += len(text)
    if used != slots.keys():
        raise ValueError(f"message template {template!r} does not use the slots {sorted(slots.keys() - used)}")
    return Message(role, "".join(parts), tuple(spans))


@dataclass(frozen=True)
class Call:
    """A request to a role. `messages` holds messages and, as assistant turns, replies.

    `agent` tells apart several agents of one role; by default the place in the enclosing parallel list. `max_tokens` may only lower
    the role's own limit.
    """

    role: str
    messages: Sequence[Message | Reply]
    agent: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.messages, (str, Message, Reply)) or not self.messages:
            raise TypeError(f'Call({self.role!r}, ...) wants a list of messages, such as [user("...")]')
        for message in self.messages:
            if not isinstance(message, (Message, Reply)):
                raise TypeError(
                    f"Call({self.role!r}, ...): a message must be user(...), system(...), assistant(...) or a Reply, "
                    f"not {type(message).__name__}"
                )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"Call({self.role!r}, max_tokens={self.max_tokens}): must be 1 or more")


@dataclass(frozen=True)
class Tool:
    """Run `Experiment.tools[name](*args)` outside the engine, in another process, for at most `seconds`."""

    name: str
    args: tuple = field(default=())
    seconds: float | None = None

    def __init__(self, name: str, *args: Any, seconds: float | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "seconds", seconds)


@dataclass(frozen=True)
class Left:
    """What remains of the episode's budget along this branch; None where there is no limit."""

    turns: int
    tokens: int | None


@dataclass(frozen=True)
class Team:
    """What a workflow may see of its surroundings. `rng` is seeded by task, sample and branch; `left` is the remaining budget."""

    roles: tuple[str, ...]
    _view: Callable[[], tuple[np.random.Generator, Left]]

    @property
    def rng(self) -> np.random.Generator:
        return self._view()[0]

    @property
    def left(self) -> Left:
        return self._view()[1]


def workflow(*, roles: Sequence[str]) -> Callable[[Callable], Callable]:
    """Mark a generator function `(task, team, ...)` as a workflow and name the roles that it calls."""
    if isinstance(roles, str) or not roles or len(set(roles)) < len(roles):
        raise TypeError(f"@workflow(roles={roles!r}): give the names of the roles, each once, as a tuple")

    def mark(fn: Callable) -> Callable:
        fn.roles = tuple(roles)
        return fn

    return mark
