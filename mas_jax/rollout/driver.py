"""Plays episodes: drives workflow generators against policy groups, and defines what a policy group is.

The driver holds every live episode's generators. Whatever they wait for goes out at once: calls to the policy group of their role,
tool calls to a process pool. An episode that raises fails alone.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from mas_jax.config import ConfigError, Limits, Role, function_name
from mas_jax.graph import ToolEvent, Trace, Turn, path_key
from mas_jax.models.tokenizer import Tokenizes
from mas_jax.rollout import prompts
from mas_jax.rollout.sampling_plan import Plan
from mas_jax.rollout.tool_pool import ToolPool
from mas_jax.rollout.workflow import BudgetStop, Call, Left, Message, Quote, Reply, Team, Tool, ToolResult

# A poll decodes at least one token of each live request, so more than this many without an end is a dead sampler.
MOST_IDLE_POLLS = 100_000


@dataclass(frozen=True)
class Request:
    """One call, ready to sample. `key` [2] uint32 is its own random stream, whatever else shares the batch.

    `gate` [ΣR] float32 scales the adapter ranks of its policy; None: the base alone.
    """

    id: str
    role: str
    prompt: Sequence[int]
    text: str
    key: np.ndarray
    max_tokens: int
    temperature: float
    stop: tuple[int, ...]
    gate: np.ndarray | None = None


@dataclass(frozen=True)
class Completion:
    """What was sampled for a request: parallel ids, log-probs (nats) and policy versions, and why it ended."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str


@runtime_checkable
class Sampler(Protocol):
    """The half of a policy group that plays episodes."""

    name: str
    tokenizer: Tokenizes
    context: int

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""

    def poll(self) -> list[Completion]:
        """Run the sampler for one block and return what finished."""

    def cancel(self, ids: Sequence[str]) -> None:
        """Forget requests whose episode is over."""


@runtime_checkable
class PolicyGroup(Sampler, Protocol):
    """One base model with all that belongs to it: sampler, learner, optimizer. Numpy in, numpy out."""

    def score(self, rows: Sequence) -> list[dict[str, np.ndarray]]:
        """For each row, aligned with its tokens: `logprobs`, `entropy` and, with a reference, `ref_logprobs`."""

    def update(self, rows: Sequence) -> dict[str, float]:
        """One optimizer step on rows whose weights hold the denominators."""

    def push(self) -> int:
        """Give the learner's weights to the sampler; returns their version."""

    def export(self, path: str) -> None:
        """Write the learner's weights as a Hugging Face directory."""


class RolloutError(RuntimeError):
    """A batch cannot be played to its end: too many episodes failed, or the sampler stands still. Says which, and of what."""


@dataclass
class _Frame:
    """A running generator: the workflow itself or a branch of it."""

    generator: Generator
    path: tuple[int, ...]
    agent: int
    t: int
    turns: int
    tokens: int
    rng: np.random.Generator
    join: _Join | None = None
    place: int = 0
    step: int = 0
    at_start: tuple[int, int] = (0, 0)


@dataclass
class _Join:
    """What a frame waits for: results by place, and the budget that they spend."""

    frame: _Frame
    results: list
    waiting: int
    single: bool
    t: int
    turns: int = 0
    tokens: int = 0

    def put(self, place: int, result: object, t: int, turns: int, tokens: int) -> bool:
        """Store one result; True when it was the last."""
        self.results[place] = result
        self.t = max(self.t, t)
        self.turns += turns
        self.tokens += tokens
        self.waiting -= 1
        return self.waiting == 0


@dataclass
class _Episode:
    plan: Plan
    trace: Trace
    team: Team | None = None
    current: _Frame | None = None
    live: bool = True
    started: float = 0.0
    prompts: dict[str, prompts.Prompt] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)


@dataclass
class _Pending:
    """A call or tool call that is out: who waits for it and what is known of it."""

    episode: _Episode
    join: _Join
    place: int
    path: tuple[int, ...]
    agent: int
    t: int
    call: Call | Tool
    prompt: prompts.Prompt | None = None
    group: str = ""
    room: int = 0


def stream_key(*parts: object) -> np.ndarray:
    """A random stream by name: [2] uint32 from a hash of the parts."""
    digest = hashlib.blake2b("|".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u4").copy()


class Driver:
    """Plays a workflow with a team. `groups` maps a params entry to the group that samples for it."""

    def __init__(
        self,
        workflow: Callable,
        roles: dict[str, Role],
        groups: Mapping[str, Sampler],
        *,
        limits: Limits,
        tools: ToolPool,
        seed: int = 0,
    ) -> None:
        self.workflow, self.roles, self.groups = workflow, roles, groups
        self.limits, self.tools, self.seed = limits, tools, seed
        self._pending: dict[str, _Pending] = {}

    def play(
        self, plans: Sequence[Plan], *, temperature: float = -1.0, progress: Callable[[int, int], None] | None = None
    ) -> list[Trace]:
        """Play episodes to their end and return their traces in the order of `plans`.

        `temperature` other than -1 overrides the roles' own. Raises RolloutError when the share of failed episodes passes
        `limits.failures`, ConfigError when the workflow calls a role that is not configured.
        """
        self._temperature = temperature
        self._pending.clear()
        self._out: dict[str, list[Request]] = {}
        episodes = [self._start(plan) for plan in plans]
        tokens = idle = 0
        while self._pending:
            self._flush()
            worked = False
            for group in self.groups.values():
                for completion in group.poll():
                    worked = True
                    tokens += len(completion.tokens)
                    self._completed(completion)
            sampling = self._sampling()
            for call_id, outcome in self.tools.poll(wait=not worked and not sampling):
                self._tool_done(call_id, outcome)
            idle = 0 if worked or not sampling else idle + 1
            if idle > MOST_IDLE_POLLS:
                raise RolloutError(f"the sampler finished nothing in {idle} polls; still waiting: {self._oldest()}")
            if progress:
                progress(sum(not episode.live for episode in episodes), tokens)
        traces = [episode.trace for episode in episodes]
        for trace in traces:
            trace.turns.sort(key=lambda turn: (turn.t, path_key(turn.id)))
            trace.tools.sort(key=lambda tool: (tool.t, path_key(tool.id)))
        check_failures(traces, self.limits.failures)
        return traces

    def _oldest(self) -> str:
        """The call that has waited longest, for a person."""
        call_id, pending = next(iter(self._pending.items()))
        return f"{call_id} of role {pending.call.role}, task {pending.episode.trace.task.id!r}, and {len(self._pending) - 1} more"

    def _sampling(self) -> bool:
        return any(isinstance(pending.call, Call) for pending in self._pending.values())

    def _flush(self) -> None:
        for name, requests in self._out.items():
            self.groups[name].submit(requests)
        self._out = {}

    def _start(self, plan: Plan) -> _Episode:
        episode = _Episode(plan, Trace(plan.task, plan.sample, plan.group), started=time.monotonic())
        episode.team = Team(tuple(self.roles), lambda: self._view(episode))
        try:
            generator = self.workflow(plan.task, episode.team)
            if not inspect.isgenerator(generator):
                name = function_name(self.workflow)
                raise ConfigError("workflow", name, "it must be a generator function: yield Call(...) at least once")
        except ConfigError:
            raise
        except Exception as error:
            self._fail(episode, error)
            return episode
        self._resume(episode, self._frame(episode, generator, (), 0, None))
        return episode

    def _frame(
        self, episode: _Episode, generator: Generator, path: tuple[int, ...], agent: int, parent: _Frame | None
    ) -> _Frame:
        seed = stream_key(self.seed, episode.plan.group, episode.plan.sample, path, "rng")
        spent = (parent.turns, parent.tokens) if parent else (0, 0)
        start = parent.t if parent else 0
        return _Frame(generator, path, agent, start, *spent, np.random.default_rng(seed.tolist()), at_start=spent)

    def _view(self, episode: _Episode) -> tuple[np.random.Generator, Left]:
        frame = episode.current
        tokens = self.limits.tokens - frame.tokens if self.limits.tokens else None
        return frame.rng, Left(self.limits.turns - frame.turns, tokens)

    def _resume(
        self, episode: _Episode, frame: _Frame, value: object = None, error: BaseException | None = None
    ) -> None:
        """Run a generator to its next yield, and on through whatever that completes."""
        episode.current = frame
        try:
            yielded = frame.generator.throw(error) if error else frame.generator.send(value)
        except StopIteration as stop:
            self._returned(episode, frame, stop.value)
        except BudgetStop as stop:
            self._end(episode, "budget", str(stop))
        except ConfigError:
            raise
        except Exception as raised:
            self._fail(episode, raised)
        else:
            try:
                self._dispatch(episode, frame, yielded)
            except BudgetStop as stop:
                self._resume(episode, frame, error=stop)
            except ConfigError:
                raise
            except Exception as raised:
                self._fail(episode, raised)

    def _returned(self, episode: _Episode, frame: _Frame, value: object) -> None:
        if frame.join is None:
            episode.trace.result = value
            if isinstance(value, (Reply, Quote, ToolResult)):
                episode.trace.result_source = prompts.source_of(value)
            self._end(episode, "done")
            return
        spent = frame.turns - frame.at_start[0], frame.tokens - frame.at_start[1]
        self._deliver(episode, frame.join, frame.place, value, frame.t, *spent)

    def _deliver(
        self, episode: _Episode, join: _Join, place: int, value: object, t: int, turns: int, tokens: int
    ) -> None:
        if join.put(place, value, t, turns, tokens):
            frame = join.frame
            frame.t, frame.turns, frame.tokens = join.t, frame.turns + join.turns, frame.tokens + join.tokens
            self._resume(episode, frame, join.results[0] if join.single else join.results)

    def _dispatch(self, episode: _Episode, frame: _Frame, yielded: object) -> None:
        path = (*frame.path, frame.step)
        frame.step += 1
        single = not isinstance(yielded, (list, tuple))
        items = [yielded] if single else list(yielded)
        join = _Join(frame, [None] * len(items), len(items), single, frame.t)
        if not items:
            self._resume(episode, frame, [])
            return
        calls = sum(isinstance(item, Call) for item in items)
        if frame.turns + calls > self.limits.turns:
            raise BudgetStop(f"limits.turns = {self.limits.turns}")
        ready = []
        for place, item in enumerate(items):
            at = path if single else (*path, place)
            agent = frame.agent if single else place
            ready.append(self._prepare(episode, frame, join, place, at, agent, item))
        for item in ready:
            if not episode.live:
                return
            if isinstance(item, _Frame):
                self._resume(episode, item)
            else:
                self._send(item)

    def _prepare(
        self, episode: _Episode, frame: _Frame, join: _Join, place: int, path: tuple[int, ...], agent: int, item: object
    ) -> _Pending | _Frame:
        if isinstance(item, Call):
            return self._prepare_call(episode, frame, join, place, path, agent, item)
        if isinstance(item, Tool):
            if item.name not in self.tools.functions:
                raise ConfigError(
                    "tools", item.name, f"the workflow uses this tool; there are {sorted(self.tools.functions)}"
                )
            return _Pending(episode, join, place, path, agent, frame.t + 1, item)
        if inspect.isgenerator(item):
            child = self._frame(episode, item, path, agent, frame)
            child.join, child.place = join, place
            return child
        raise TypeError(
            f"a workflow may yield Call, Tool, or a list of calls, tools and generators, not {type(item).__name__}"
        )

    def _prepare_call(
        self, episode: _Episode, frame: _Frame, join: _Join, place: int, path: tuple[int, ...], agent: int, call: Call
    ) -> _Pending:
        if call.role not in self.roles:
            remedy = f"the workflow calls this role; configured are {sorted(self.roles)}"
            raise ConfigError("roles", call.role, remedy)
        role = self.roles[call.role]
        group = self.groups[role.params]
        agent = agent if call.agent is None else call.agent
        messages = list(call.messages)
        has_system = isinstance(messages[0], Message) and messages[0].role == "system"
        if role.system and not has_system:
            messages.insert(0, Message("system", role.system))
        prompt = prompts.build(group.tokenizer, messages, role.template, episode.prompts, (call.role, agent))
        room = group.context - len(prompt.ids)
        if room < 1:
            remedy = f"prompt of {len(prompt.ids)} tokens does not fit the window rollout.context = {group.context}"
            raise BudgetStop(f"{call.role}: {remedy}")
        if self.limits.tokens:
            room = min(room, self.limits.tokens - frame.tokens)
            if room < 1:
                raise BudgetStop(f"limits.tokens = {self.limits.tokens}")
        return _Pending(episode, join, place, path, agent, frame.t + 1, call, prompt, role.params, room)

    def _send(self, pending: _Pending) -> None:
        episode = pending.episode
        turn_id = ".".join(map(str, pending.path))
        call_id = f"{episode.trace.id}:{turn_id}"
        self._pending[call_id] = pending
        episode.waiting.add(call_id)
        if isinstance(pending.call, Tool):
            self.tools.submit(call_id, pending.call)
            return
        role = self.roles[pending.call.role]
        limit = min(role.max_tokens, pending.call.max_tokens or role.max_tokens, pending.room)
        request = Request(
            id=call_id,
            role=pending.call.role,
            prompt=pending.prompt.ids,
            text=pending.prompt.text,
            key=stream_key(self.seed, episode.plan.group, episode.plan.sample, turn_id),
            max_tokens=limit,
            temperature=role.temperature if self._temperature < 0 else self._temperature,
            stop=self.groups[pending.group].tokenizer.stop_ids,
        )
        self._out.setdefault(pending.group, []).append(request)

    def _completed(self, completion: Completion) -> None:
        pending = self._pending.pop(completion.id, None)
        if pending is None or not pending.episode.live:
            return
        episode, role = pending.episode, self.roles[pending.call.role]
        episode.waiting.discard(completion.id)
        tokenizer = self.groups[pending.group].tokenizer
        text_ids = completion.tokens[:-1] if completion.finish == "stop" else completion.tokens
        wanted = min(role.max_tokens, pending.call.max_tokens or role.max_tokens)
        window = completion.finish == "length" and len(completion.tokens) < wanted
        turn = Turn(
            id=".".join(map(str, pending.path)),
            role=pending.call.role,
            agent=pending.agent,
            policy=pending.group,
            t=pending.t,
            prompt=list(pending.prompt.ids),
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
            text=tokenizer.decode(text_ids),
            finish="window" if window else completion.finish,
            reads=pending.prompt.reads,
            continues=pending.prompt.continues,
            temperature=role.temperature if self._temperature < 0 else self._temperature,
            prompt_text=pending.prompt.text,
        )
        episode.trace.turns.append(turn)
        episode.prompts[turn.id] = pending.prompt.sampled(turn)
        self._deliver(episode, pending.join, pending.place, Reply(turn), pending.t, 1, len(turn.tokens))

    def _tool_done(self, call_id: str, outcome: tuple[object, str]) -> None:
        pending = self._pending.pop(call_id, None)
        if pending is None or not pending.episode.live:
            return
        episode, (value, error) = pending.episode, outcome
        episode.waiting.discard(call_id)
        event_id = ".".join(map(str, pending.path))
        text = f"Error: {error}" if error else str(value)
        episode.trace.tools.append(ToolEvent(event_id, pending.call.name, pending.agent, pending.t, text, error))
        result = ToolResult(text, event_id, value, error)
        self._deliver(episode, pending.join, pending.place, result, pending.t, 0, 0)

    def _fail(self, episode: _Episode, error: BaseException) -> None:
        self._end(episode, "failed", f"{type(error).__name__}: {error}")

    def _end(self, episode: _Episode, stop: str, error: str = "") -> None:
        episode.live = False
        episode.trace.stop, episode.trace.error = stop, error
        episode.trace.seconds = time.monotonic() - episode.started
        for call_id in sorted(episode.waiting):
            pending = self._pending.pop(call_id, None)
            if pending is not None and isinstance(pending.call, Tool):
                self.tools.cancel([call_id])
            elif pending is not None:
                self.groups[pending.group].cancel([call_id])
                out = self._out.get(pending.group, [])
                self._out[pending.group] = [request for request in out if request.id != call_id]
        episode.waiting.clear()


def check_failures(traces: Sequence[Trace], allowed: float) -> None:
    """Raise RolloutError, with the commonest cause, when more than this share of episodes failed."""
    failed = [trace for trace in traces if trace.stop == "failed"]
    if len(failed) > allowed * len(traces):
        cause, times = Counter(trace.error for trace in failed).most_common(1)[0]
        raise RolloutError(
            f"{len(failed)} of {len(traces)} episodes failed (limits.failures allows {allowed:.0%}); {times} of them with: {cause} "
            f"(first: episode {failed[0].id}, task {failed[0].task.id!r})"
        )
