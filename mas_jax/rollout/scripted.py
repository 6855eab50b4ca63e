"""A sampler that says what a function tells it to: for tests of workflows, and for the rehearsal before a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mas_jax.models.tokenizer import ByteTokenizer, Tokenizes
from mas_jax.rollout.driver import Completion, Request


class Scripted:
    """A policy group whose replies are `script(request)`; text is cut at the request's limit. `per_poll` replies come at a time."""

    def __init__(
        self,
        script: Callable[[Request], str],
        *,
        name: str = "scripted",
        tokenizer: Tokenizes | None = None,
        context: int = 4096,
        per_poll: int = 1 << 30,
    ) -> None:
        self.name, self.script, self.context, self.per_poll = name, script, context, per_poll
        self.tokenizer = tokenizer or ByteTokenizer()
        self.seen: list[Request] = []
        self._queue: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue += requests
        self.seen += requests

    def cancel(self, ids: Sequence[str]) -> None:
        self._queue = [request for request in self._queue if request.id not in ids]

    def poll(self) -> list[Completion]:
        now, self._queue = self._queue[: self.per_poll], self._queue[self.per_poll :]
        return [self._complete(request) for request in now]

    def _complete(self, request: Request) -> Completion:
        tokens = self.tokenizer.encode(self.script(request)) + list(request.stop[:1])
        finish = "stop" if len(tokens) <= request.max_tokens else "length"
        tokens = tokens[: request.max_tokens]
        return Completion(request.id, tokens, [-1.0] * len(tokens), [0] * len(tokens), finish)
