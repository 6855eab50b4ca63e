"""Behaviour cloning through the learner: demonstrations, or filtered traces of a run, become a starting point."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mas_jax import config as configs
from mas_jax import run_directory
from mas_jax.checkpoint import Checkpoints
from mas_jax.cluster import LocalGroup
from mas_jax.config import Cloning, ConfigError, Example
from mas_jax.data import TaskStream
from mas_jax.learners.packing import TrainRow
from mas_jax.learners.update import clone_loss
from mas_jax.mesh import make_mesh
from mas_jax.metrics import JsonLines, read
from mas_jax.models.tokenizer import Tokenizes
from mas_jax.progress import Reporter


def clone(cloning: Cloning, directory: Path, reporter: Reporter, *, force: bool = False) -> Path:
    """Train `base` to say the examples' responses, resuming what the directory holds; gives the exported directory.

    Raises ConfigError for what cannot work.
    """
    check(cloning)
    reporter.phase("loading examples")
    examples = list(cloning.examples())
    if not examples:
        raise ConfigError("examples", configs.function_name(cloning.examples), "gave no examples")
    run_directory.claim(directory, configs.fingerprint(cloning), force=force)
    reporter.phase("loading the model")
    sizes = cloning.mesh
    mesh = make_mesh(sizes.data, sizes.fsdp, sizes.tensor)
    group = LocalGroup("base", cloning.base, mesh, dtype=cloning.learner.dtype, seed=cloning.seed)
    group.add_learner(cloning.learner, cloning.optimizer, clone_loss)
    reporter.say(group.attention)
    group.load()
    stream = TaskStream(examples, cloning.batch, cloning.seed)
    metrics, checkpoints = JsonLines(directory / "metrics.jsonl"), Checkpoints(directory / "checkpoints")
    found = checkpoints.restore_latest({"base": group.abstract_state()})
    step, size = 0, 0
    if found is not None:
        step, states, meta = found
        group.restore(states["base"])
        stream.restore(meta["stream"])
        size = meta["metrics"]
        reporter.say(f"resuming {directory} after step {step}")
    metrics.truncate(size)
    shown = reporter.phase("cloning", cloning.steps)
    while step < cloning.steps:
        step += 1
        report = group.update(weighted([encode(group.tokenizer, example) for example in stream.next()]))
        metrics.append({"step": step, "epoch": stream.epoch} | report)
        nll = np.average([v for k, v in report.items() if k.endswith("/nll")])
        shown(step, f"nll {nll:.3f}")
        if step % max(1, cloning.steps // 10) == 0:
            reporter.say(f"step {step}/{cloning.steps} | nll {nll:.4f} | grad {report['params/base/grad_norm']:.2f}")
        if step % cloning.checkpoint_every == 0 or step == cloning.steps:
            checkpoints.save(step, {"base": group.state}, {"stream": stream.state(), "metrics": metrics.size})
    out = directory / "export"
    group.export(out)
    return out


def check(cloning: Cloning) -> None:
    """Refuse what cannot work. Raises ConfigError."""
    for name in ("steps", "batch", "checkpoint_every"):
        value = {"steps": cloning.steps, "batch": cloning.batch, "checkpoint_every": cloning.checkpoint_every}[name]
        if value < 1:
            raise ConfigError(name, value, "must be 1 or more")
    if not cloning.base.train:
        raise ConfigError("base.train", False, "cloning trains the base")


def encode(tokenizer: Tokenizes, example: Example) -> TrainRow:
    """One conversation of a user message and a reply; the reply and its stop token are trained."""
    text = example.prompt if example.rendered else tokenizer.render([{"role": "user", "content": example.prompt}])
    prompt = tokenizer.encode(text)
    reply = [*tokenizer.encode(example.response), end_of_turn(tokenizer)]
    tokens = np.asarray(prompt + reply, np.int32)
    sampled = np.arange(len(tokens)) >= len(prompt)
    zeros = np.zeros(len(tokens), np.float32)
    return TrainRow(example.role, tokens, sampled, 1.0, zeros, zeros, zeros, zeros)


def end_of_turn(tokenizer: Tokenizes) -> int:
    """The stop id that the chat template writes after a reply; a model may have others. Raises ConfigError without any."""
    if not tokenizer.stop_ids:
        raise ConfigError("base.path", tokenizer.stop_ids, "its files name no eos token: a reply would have no end")
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\ue000"}]
    _, _, after = tokenizer.render(messages, generation_prompt=False).partition("\ue000")
    return next((i for i in tokenizer.encode(after) if i in tokenizer.stop_ids), tokenizer.stop_ids[0])


def weighted(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Rows with the weights of a token mean over all of them."""
    total = sum(int(row.sampled.sum()) for row in rows)
    for row in rows:
        row.weight = row.sampled.astype(np.float32) / np.float32(total)
    return list(rows)


@dataclass(frozen=True)
class FromJsonl:
    """Examples from JSON lines with `prompt` and `response`, and perhaps `id` and `role`."""

    path: str

    def __call__(self) -> list[Example]:
        examples = []
        for number, record in enumerate(_records(self.path), 1):
            missing = [name for name in ("prompt", "response") if not isinstance(record.get(name), str)]
            if missing:
                raise ConfigError(f"{self.path}, line {number}", sorted(record), f"has no text under {missing}")
            examples.append(
                Example(
                    str(record.get("id", number)), record["prompt"], record["response"], record.get("role", "assistant")
                )
            )
        return examples


@dataclass(frozen=True)
class FromTraces:
    """The finished turns of a run's traces.jsonl whose reward is at least `reward`, of `roles` (all when empty).

    Prompts are the rendered conversations that were sampled from.
    """

    path: str
    reward: float = 1.0
    roles: tuple[str, ...] = ()

    def __call__(self) -> list[Example]:
        examples = []
        for trace in _records(self.path):
            for event in trace["events"]:
                wanted = event["type"] == "message" and event["finish"] == "stop" and event["reward"] >= self.reward
                if wanted and (not self.roles or event["role"] in self.roles):
                    examples.append(
                        Example(
                            f"{trace['trace_id']}:{event['id']}", event["prompt"], event["text"], event["role"], True
                        )
                    )
        return examples


def _records(path: str) -> list[dict]:
    if not Path(path).is_file():
        raise ConfigError("examples", path, "no such file")
    try:
        return read(path)
    except (ValueError, json.JSONDecodeError) as error:
        raise ConfigError("examples", path, str(error)) from error
