"""The loop: rollout -> reward -> rows -> score -> credit -> update -> push, checkpointed so that a resumed run is the same run."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mas_jax import config as configs
from mas_jax import graph, run_directory
from mas_jax.archive import Archive
from mas_jax.checkpoint import Checkpoints
from mas_jax.cluster import LocalGroup, build_groups
from mas_jax.config import ConfigError, Experiment, Loss, Task
from mas_jax.data import TaskStream
from mas_jax.evaluate import evaluate
from mas_jax.graph import Row, Trace, Turn
from mas_jax.learners import credit, diagnostics, methods
from mas_jax.learners.packing import TrainRow
from mas_jax.metrics import JsonLines, read
from mas_jax.progress import Reporter
from mas_jax.rollout import rewards
from mas_jax.rollout.driver import Driver, check_failures
from mas_jax.rollout.rehearsal import rehearse
from mas_jax.rollout.sampling_plan import independent
from mas_jax.rollout.tool_pool import ToolPool

log = logging.getLogger(__name__)


class Preempted(BaseException):
    """SIGTERM came: the step under way is given up, the last whole one is saved."""


@dataclass
class Run:
    """Everything a run holds between steps; `step` steps are done."""

    experiment: Experiment
    directory: Path
    groups: dict[str, LocalGroup]
    driver: Driver
    stream: TaskStream
    heldout: Sequence[Task]
    method: credit.Method
    archive: Archive
    traces: JsonLines
    metrics: JsonLines
    checkpoints: Checkpoints
    reporter: Reporter
    step: int = 0
    saved: int = -1
    stopping: threading.Event = field(default_factory=threading.Event)


def train(
    experiment: Experiment,
    directory: Path,
    reporter: Reporter,
    *,
    force: bool = False,
    command: run_directory.Command | None = None,
) -> Run:
    """Train to `experiment.steps`, resuming what the directory holds. Raises ConfigError before anything is computed or lost.

    SIGTERM saves the last whole step and raises Preempted.
    """
    run = open_run(experiment, directory, reporter, force=force, command=command)
    previous = signal.signal(signal.SIGTERM, lambda *_: run.stopping.set()) if _in_main_thread() else None
    try:
        resume(run)
        if not run.metrics.size:  # a run preempted in its first step has these already
            run.metrics.append({"step": 0} | held_out(run))
        while run.step < experiment.steps:
            step(run)
            if run.step % experiment.checkpoint_every == 0 or run.step == experiment.steps or run.stopping.is_set():
                save(run)
            if run.stopping.is_set() and run.step < experiment.steps:
                raise Preempted
    except Preempted:
        if run.saved < run.step:
            save(run)
        raise
    finally:
        run.driver.tools.close()
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    export(run)
    return run


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def open_run(
    experiment: Experiment,
    directory: Path,
    reporter: Reporter,
    *,
    force: bool = False,
    command: run_directory.Command | None = None,
) -> Run:
    """Check the experiment, load tasks and models, open the run directory; nothing is played yet."""
    configs.validate(experiment)
    method = methods.lookup(experiment.method, experiment.group_size)
    reporter.phase("loading tasks")
    tasks, heldout = load_tasks(experiment)
    rehearse(experiment, tasks[0])
    run_directory.claim(
        directory, configs.fingerprint(experiment) | configs.fingerprint(method, "method"), force=force, command=command
    )
    reporter.phase("loading models")
    groups = build_groups(experiment)
    for group in groups.values():
        if group.learns:
            reporter.say(group.attention)
    tools = ToolPool(experiment.tools, workers=experiment.rollout.tool_workers, seconds=experiment.rollout.tool_seconds)
    return Run(
        experiment=experiment,
        directory=directory,
        groups=groups,
        driver=Driver(
            experiment.workflow, experiment.roles, groups, limits=experiment.limits, tools=tools, seed=experiment.seed
        ),
        stream=TaskStream(tasks, experiment.batch, experiment.seed),
        heldout=heldout,
        method=method,
        archive=Archive(directory / "rollouts.zarr"),
        traces=JsonLines(directory / "traces.jsonl"),
        metrics=JsonLines(directory / "metrics.jsonl"),
        checkpoints=Checkpoints(directory / "checkpoints", experiment.keep),
        reporter=reporter,
    )


def load_tasks(experiment: Experiment) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks. Raises ConfigError when either is empty or an id stands in both."""
    tasks, heldout = (list(part) for part in experiment.tasks())
    for name, part in (("training", tasks), ("held-out", heldout)):
        if not part:
            raise ConfigError("tasks", configs.function_name(experiment.tasks), f"gave no {name} tasks")
    shared = {task.id for task in tasks} & {task.id for task in heldout}
    if shared:
        raise ConfigError(
            "tasks", sorted(shared)[:3], "these ids are both trained on and held out; keep the sets apart"
        )
    return tasks, heldout


def resume(run: Run) -> None:
    """Continue from the newest whole checkpoint, cutting every file back to it; without one, start afresh. Then push weights."""
    learning = {name: group for name, group in run.groups.items() if group.learns}
    found = run.checkpoints.restore_latest({name: group.abstract_state() for name, group in learning.items()})
    sizes = {"metrics": 0, "traces": 0, "archive": 0}
    if found is not None:
        run.step, states, meta = found
        run.saved = run.step
        sizes = meta["sizes"]
        run.stream.restore(meta["stream"])
        for name, group in learning.items():
            group.restore(states[name])
        run.reporter.say(f"resuming {run.directory} after step {run.step}")
    run.metrics.truncate(sizes["metrics"])
    run.traces.truncate(sizes["traces"])
    run.archive.truncate(sizes["archive"])
    for group in run.groups.values():
        group.push()


def save(run: Run) -> None:
    """A checkpoint of everything that the next step depends on."""
    run.reporter.phase("saving", quiet=True)
    states = {name: group.state for name, group in run.groups.items() if group.learns}
    sizes = {"metrics": run.metrics.size, "traces": run.traces.size, "archive": run.archive.length}
    run.checkpoints.save(run.step, states, {"stream": run.stream.state(), "sizes": sizes})
    run.saved = run.step


def step(run: Run) -> None:
    """One turn of the loop. Raises Preempted, with the run as it was, when SIGTERM comes before the update."""
    e, before, clock = run.experiment, run.stream.state(), Clock()
    number = run.step + 1
    try:
        tasks = run.stream.next()
        plans = independent(tasks, e.group_size, f"step {number}")
        traces = run.driver.play(plans, progress=watch(run, f"step {number}/{e.steps} rollout", len(plans)))
    except Preempted:
        run.stream.restore(before)
        raise
    clock.lap("rollout")
    rewards.assign(traces, e.rewards, e.roles)
    check_failures(traces, e.limits.failures)
    report = diagnostics.rollout(traces, e)
    report |= learn(run, traces, number, clock)
    keep(run, traces)
    clock.lap("archive")
    for group in run.groups.values():
        group.push()
    clock.lap("push")
    run.step = number
    if (e.evaluation.every and number % e.evaluation.every == 0) or number == e.steps:
        report |= held_out(run)
    times = clock.times()
    run.metrics.append({"step": number, "epoch": run.stream.epoch} | report | times)
    run.reporter.say(diagnostics.line(number, e, report, times))


def learn(run: Run, traces: Sequence[Trace], number: int, clock: Clock) -> dict[str, float]:
    """Score, credit and update: `epochs` times `minibatches` optimizer steps on the episodes that did not fail."""
    e = run.experiment
    rows = [
        row for trace in traces if trace.stop != "failed" for row in graph.rows(trace) if run.groups[row.policy].learns
    ]
    if not rows:
        return {}
    run.reporter.phase(f"step {number}/{e.steps} score", quiet=True)
    train_rows = [bare_row(row) for row in rows]
    scored: list[dict] = [{}] * len(rows)
    for name, group in run.groups.items():
        own = [i for i, row in enumerate(rows) if row.policy == name]
        for i, found in zip(own, group.score([train_rows[i] for i in own]) if own else [], strict=True):
            scored[i] = found
    clock.lap("score")
    report = diagnostics.mismatch(rows, scored, e.learner.gap_alarm)
    report |= assign_credit(rows, run.method)
    run.reporter.phase(f"step {number}/{e.steps} update", quiet=True)
    updates: list[dict[str, float]] = []
    for epoch in range(e.learner.epochs):
        order = np.random.default_rng([e.seed, number, epoch])
        for part in minibatches(rows, e.learner.minibatches, order):
            prepare(rows, train_rows, scored, part, run.method, e)
            for name, group in run.groups.items():
                own = [train_rows[i] for i in part if rows[i].policy == name and teaches(train_rows[i], e.loss)]
                if own:
                    updates.append(group.update(own))
    clock.lap("update")
    return report | diagnostics.over_updates(updates)


def teaches(row: TrainRow, loss: Loss) -> bool:
    """Whether a row has any gradient: without KL and entropy terms, one whose advantages are all 0 has none."""
    return loss.kl > 0 or loss.entropy > 0 or bool(row.advantage.any())


def bare_row(row: Row) -> TrainRow:
    """A row with its tokens, before anything is known of its credit."""
    zeros = np.zeros(len(row), np.float32)
    return TrainRow(row.role, row.tokens, row.sampled, row.turns[0].temperature, zeros, zeros, zeros, zeros)


def assign_credit(rows: Sequence[Row], method: credit.Method) -> dict[str, float]:
    """Fill `turn.advantage` of every turn in the rows; also what the rewards looked like to the method."""
    turns = [(row, turn) for row in rows for turn in row.turns]
    ids = credit_ids(turns)
    reward = np.array([turn.reward for _, turn in turns])
    judged = np.array([turn.judged for _, turn in turns])
    for (_, turn), advantage in zip(turns, credit.advantages(reward, ids, method, judged), strict=True):
        turn.advantage = float(advantage)
    return diagnostics.credit_report([turn for _, turn in turns], ids, method)


def credit_ids(turns: Sequence[tuple[Row, Turn]]) -> dict[str, np.ndarray]:
    """Integer id vectors of turns, numbered by first appearance."""

    def number(values: list) -> np.ndarray:
        seen: dict = {}
        return np.array([seen.setdefault(value, len(seen)) for value in values], np.int64)

    places = {id(turn): place for row, _ in turns for place, turn in _numbered(row.trace)}
    return {
        "task": number([row.trace.group for row, _ in turns]),
        "episode": number([row.trace.id for row, _ in turns]),
        "role": number([turn.role for _, turn in turns]),
        "agent": number([(turn.role, turn.agent) for _, turn in turns]),
        "turn": np.array([places[id(turn)] for _, turn in turns], np.int64),
    }


def _numbered(trace: Trace) -> Iterator[tuple[int, Turn]]:
    """Each turn with its number among the turns of its agent."""
    seen: Counter[str] = Counter()
    for turn in trace.turns:
        yield seen[turn.name], turn
        seen[turn.name] += 1


def minibatches(rows: Sequence[Row], count: int, order: np.random.Generator) -> list[list[int]]:
    """Row indices of each minibatch: whole episodes, by a seeded permutation, as even as they go."""
    episodes = list(dict.fromkeys(row.trace.id for row in rows))
    parts = np.array_split(order.permutation(len(episodes)), min(count, len(episodes)))
    place = {episodes[i]: part for part, members in enumerate(parts) for i in members}
    found: list[list[int]] = [[] for _ in parts]
    for i, row in enumerate(rows):
        found[place[row.trace.id]].append(i)
    return found


def prepare(
    rows: Sequence[Row],
    train_rows: Sequence[TrainRow],
    scored: Sequence[dict],
    part: Sequence[int],
    method: credit.Method,
    e: Experiment,
) -> None:
    """Fill the learner's rows of one minibatch: advantages, log-probs, and weights over the whole minibatch of each policy."""
    for policy in sorted({rows[i].policy for i in part}):
        own = [i for i in part if rows[i].policy == policy]
        turns = [turn for i in own for turn in rows[i].turns]
        constant = [e.loss.constant_length or e.roles[turn.role].max_tokens for turn in turns]
        names = sorted({turn.role for turn in turns})
        weights = credit.token_weights(
            np.array([len(turn.tokens) * turn.judged for turn in turns]),
            np.array([names.index(turn.role) for turn in turns]),
            method,
            np.array(constant, np.float64),
        )
        at = 0
        for i in own:
            row, ready = rows[i], train_rows[i]
            ready.weight = row.per_token(weights[at : at + len(row.turns)])
            ready.advantage = row.per_token([turn.advantage for turn in row.turns])
            ready.old_logprobs = scored[i]["logprobs"]
            ready.ref_logprobs = scored[i].get("ref_logprobs", ready.ref_logprobs)
            at += len(row.turns)


def keep(run: Run, traces: Sequence[Trace]) -> None:
    """Append token-level rows to the archive, then the traces that point into it."""
    rows = [row for trace in traces for row in graph.rows(trace)]
    spans: dict[str, dict[str, tuple[int, int]]] = {trace.id: {} for trace in traces}
    if rows:
        at, _ = run.archive.append(
            tokens=np.concatenate([row.tokens for row in rows]),
            sampler_logprobs=np.concatenate([row.sampler_logprobs for row in rows]),
            version=np.concatenate([row.versions for row in rows]),
            sampled=np.concatenate([row.sampled for row in rows]),
            advantage=np.concatenate([row.per_token([turn.advantage for turn in row.turns]) for row in rows]),
        )
        for row in rows:
            for turn in row.turns:
                start = at + len(turn.prompt)
                spans[row.trace.id][turn.id] = (start, start + len(turn.tokens))
            at += len(row)
    run.traces.extend(graph.to_json(trace, spans[trace.id]) for trace in traces)


def held_out(run: Run) -> dict[str, float]:
    """Evaluation metrics, their names under `eval/`."""
    total = min(run.experiment.evaluation.tasks, len(run.heldout)) * run.experiment.evaluation.samples
    shown = watch(run, f"evaluating after step {run.step}", total, interrupt=run.step == 0)
    metrics, traces = evaluate(run.driver, run.experiment, run.heldout, progress=shown)
    lines = JsonLines(run.directory / f"eval_{run.step}.jsonl")
    lines.truncate(0)
    lines.extend(graph.to_json(trace) for trace in traces)
    return {f"eval/{name}": value for name, value in metrics.items()}


def watch(run: Run, name: str, total: int, *, interrupt: bool = True) -> Callable[[int, int], None]:
    """A progress function for the driver; with `interrupt` it gives up the rollout when SIGTERM has come."""
    shown = run.reporter.phase(name, total, quiet=True)
    started = time.monotonic()

    def progress(done: int, tokens: int) -> None:
        if interrupt and run.stopping.is_set():
            raise Preempted
        shown(done, f"{done}/{total} episodes, {tokens / max(time.monotonic() - started, 1e-3):.0f} tok/s")

    return progress


def export(run: Run) -> None:
    """Hugging Face directories of what was trained, under export/."""
    for name, group in run.groups.items():
        if group.learns:
            group.export(run.directory / "export" / name)


def evaluations(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, evaluation metrics) of a run, in order."""
    found = []
    for record in read(directory / "metrics.jsonl"):
        own = {name.removeprefix("eval/"): value for name, value in record.items() if name.startswith("eval/")}
        if own:
            found.append((record["step"], own))
    return found


class Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self._last = self._start = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End a lap."""
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def times(self) -> dict[str, float]:
        """Seconds by lap and in all, named `time/...`."""
        return {f"time/{name}": round(s, 4) for name, s in self._laps.items()} | {
            "time/step": round(time.monotonic() - self._start, 4)
        }
