"""The waist of the house: what happened in an episode, as a graph of events, and the token rows read off it.

Everything upstream (workflows, sampling) writes a `Trace`; everything downstream (rewards, credit, learner, archive, reports)
reads one. Arrays line up with `tokens`: entry t speaks of token t.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

SCHEMA = "orchestration-trace/2020-12"  # the public schema (arXiv 2605.02801); our extras are extra keys of events


@dataclass(frozen=True)
class Task:
    """One problem: `prompt` is what the team sees, `answer` what a verifier compares with, `data` anything else."""

    id: str
    prompt: str
    answer: str = ""
    data: dict = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Read:
    """An edge of the graph: `source`'s text stands in the prompt of the turn that holds this, at tokens [start, stop).

    `start == stop == -1` when the chat template changed the text so that its place is unknown.
    """

    source: str
    start: int
    stop: int


@dataclass
class Turn:
    """One call to a role and what came back.

    `id` is the path of the call in the workflow ("2.0.1": third yield, first branch, second yield), `t` its logical time (length of
    the longest chain of events before it). `tokens`, `logprobs` and `versions` are parallel: ids sampled (stop id included),
    log-probability in nats under the distribution sampled from, and the number of updates the policy had had. `judged` is False where
    no reward applied, which is not a reward of 0: such a turn is context to the learner.
    """

    id: str
    role: str
    agent: int
    policy: str
    t: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    text: str
    finish: str
    reads: tuple[Read, ...] = ()
    continues: str = ""
    temperature: float = 1.0
    prompt_text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    judged: bool = True
    advantage: float = 0.0

    def __post_init__(self) -> None:
        lengths = {"tokens": len(self.tokens), "logprobs": len(self.logprobs), "versions": len(self.versions)}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"turn {self.id} of {self.role}: parallel fields differ in length: {lengths}")

    @property
    def name(self) -> str:
        """The agent, as `role/index`."""
        return f"{self.role}/{self.agent}"


@dataclass
class ToolEvent:
    """One tool call: `text` is what the workflow got, `error` why it failed (empty when it did not)."""

    id: str
    tool: str
    agent: int
    t: int
    text: str
    error: str = ""


@dataclass
class Trace:
    """One episode of a workflow on a task.

    `stop` is "done", "budget" (a window, turn or token budget ended it; still scored) or "failed" (dropped, with `error`).
    `result` is what the workflow returned; `answer` its text.
    """

    task: Task
    sample: int
    group: str
    turns: list[Turn] = field(default_factory=list)
    tools: list[ToolEvent] = field(default_factory=list)
    result: object = None
    result_source: str = ""
    stop: str = "done"
    error: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    extra: dict = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.group}#{self.sample}"

    @property
    def answer(self) -> str:
        """The text of the result; empty when the episode ended without one."""
        return "" if self.result is None else str(self.result)

    def of(self, role: str) -> list[Turn]:
        """The turns of one role, in order of time."""
        return [turn for turn in self.turns if turn.role == role]

    def turn(self, turn_id: str) -> Turn:
        """The turn with this id. Raises KeyError."""
        for turn in self.turns:
            if turn.id == turn_id:
                return turn
        raise KeyError(f"episode {self.id} has no turn {turn_id!r}; it has {[t.id for t in self.turns]}")


@dataclass
class Row:
    """One token sequence of one agent: turns whose prompts extend one another, joined.

    tokens [T] int32; sampled [T] bool, True where this row trains the token; sampler_logprobs [T] float32 and versions [T] int32,
    0 and -1 where nothing was sampled; turn [T] int32, index into `turns`, -1 for context.
    """

    trace: Trace
    turns: list[Turn]
    tokens: np.ndarray
    sampled: np.ndarray
    sampler_logprobs: np.ndarray
    versions: np.ndarray
    turn: np.ndarray

    @property
    def role(self) -> str:
        return self.turns[0].role

    @property
    def agent(self) -> int:
        return self.turns[0].agent

    @property
    def policy(self) -> str:
        return self.turns[0].policy

    def __len__(self) -> int:
        return len(self.tokens)

    def per_token(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """One value per turn of this row -> [T] float32, zero on context."""
        spread = np.append(np.asarray(values, np.float32), np.float32(0))
        return spread[self.turn]


def rows(trace: Trace) -> list[Row]:
    """Merge the turns of each agent into rows.

    A turn joins the row whose tokens its prompt starts with, whole; otherwise a new row begins. So every sampled token is trained in
    exactly one row, however many later prompts hold it, and a row never mixes agents.
    """
    open_rows: dict[tuple[str, int, str], list[list[Turn]]] = {}
    order: list[list[Turn]] = []
    for turn in trace.turns:
        if not turn.tokens:
            continue
        mine = open_rows.setdefault((turn.role, turn.agent, turn.policy), [])
        for chain in mine:
            last = chain[-1]
            end = len(last.prompt) + len(last.tokens)
            if turn.temperature == last.temperature and turn.prompt[:end] == last.prompt + last.tokens:
                chain.append(turn)
                break
        else:
            mine.append([turn])
            order.append(mine[-1])
    return [_row(trace, chain) for chain in order]


def _row(trace: Trace, chain: list[Turn]) -> Row:
    last = chain[-1]
    length = len(last.prompt) + len(last.tokens)
    row = Row(
        trace=trace,
        turns=chain,
        tokens=np.asarray(last.prompt + last.tokens, np.int32),
        sampled=np.zeros(length, bool),
        sampler_logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        turn=np.full(length, -1, np.int32),
    )
    for i, turn in enumerate(chain):
        at = slice(len(turn.prompt), len(turn.prompt) + len(turn.tokens))
        row.sampled[at] = True
        row.sampler_logprobs[at] = turn.logprobs
        row.versions[at] = turn.versions
        row.turn[at] = i
    return row


def path_key(turn_id: str) -> tuple[int, ...]:
    """Sort key of an event id: its path as integers."""
    return tuple(int(part) for part in turn_id.split(".")) if turn_id else ()


def to_json(trace: Trace, spans: dict[str, tuple[int, int]] | None = None) -> dict:
    """A trace as a JSON object, valid against the public orchestration-trace schema.

    `spans` maps turn id to the [start, stop) of its sampled tokens in the archive.
    """
    events: list[dict] = []
    edges: list[dict] = []
    last_of_agent: dict[str, str] = {}
    for turn in trace.turns:
        event = {
            "id": turn.id, "t": turn.t, "type": "message", "agent": turn.name, "role": turn.role, "policy": turn.policy,
            "prompt": turn.prompt_text, "text": turn.text, "finish": turn.finish, "prompt_tokens": len(turn.prompt),
            "sampled_tokens": len(turn.tokens), "temperature": turn.temperature,
            "version": turn.versions[0] if turn.versions else -1,
            "reward": turn.reward, "rewards": turn.rewards, "advantage": turn.advantage,
            "reads": [{"event": r.source, "tokens": [r.start, r.stop]} for r in turn.reads],
        }  # fmt: skip
        if turn.continues:
            event["continues"] = turn.continues
        if spans and turn.id in spans:
            event["tokens"] = list(spans[turn.id])
        events.append(event)
        edges += [{"src": r.source, "dst": turn.id, "type": "message"} for r in turn.reads]
        if turn.name in last_of_agent:
            edges.append({"src": last_of_agent[turn.name], "dst": turn.id, "type": "temporal"})
        last_of_agent[turn.name] = turn.id
    for tool in trace.tools:
        call = f"{tool.id}.call"
        events.append({"id": call, "t": tool.t, "type": "tool_call", "agent": f"tool/{tool.agent}", "tool": tool.tool})
        result = {"id": tool.id, "t": tool.t, "type": "tool_result", "agent": f"tool/{tool.agent}", "tool": tool.tool}
        events.append(result | {"text": tool.text, "error": tool.error})
        edges.append({"src": call, "dst": tool.id, "type": "tool_dependency"})
    last = max((event["t"] for event in events), default=0) + 1
    end = {"id": "end", "t": last, "type": "return", "agent": "workflow", "stop": trace.stop, "text": trace.answer}
    if trace.error:
        end["error"] = trace.error
    events.append(end)
    if trace.result_source:
        edges.append({"src": trace.result_source, "dst": "end", "type": "return"})
    sampled = sum(len(turn.tokens) for turn in trace.turns)
    return {
        "trace_id": trace.id,
        "task_id": trace.task.id,
        "system": "mas_jax",
        "topology": "unknown",
        "events": events,
        "edges": edges,
        "rewards": trace.rewards,
        "costs": {
            "tokens": sampled,
            "wall_clock_s": round(trace.seconds, 3),
            "tool_calls": len(trace.tools),
            "messages": len(trace.turns),
        },
    }


def messages_between(traces: Iterable[Trace]) -> Iterator[tuple[Trace, Read, Turn]]:
    """Every message edge: (trace, what was read and where, the turn that read it)."""
    for trace in traces:
        for turn in trace.turns:
            for read in turn.reads:
                yield trace, read, turn
