"""Every dataclass a user writes. A config is a Python file with one `experiment`; tyro turns its fields into flags."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from mas_jax.graph import Task, Trace

__all__ = [
    "AdamW",
    "Base",
    "Cloning",
    "ConfigError",
    "Evaluation",
    "Example",
    "Experiment",
    "Learner",
    "Limits",
    "Loss",
    "Mesh",
    "Reward",
    "Role",
    "Rollout",
    "Task",
    "TaskSets",
    "differences",
    "fingerprint",
    "validate",
]

TaskSets = Callable[[], tuple[Sequence[Task], Sequence[Task]]]
"""Called once at start: (training tasks, held-out tasks)."""


class ConfigError(ValueError):
    """A setting that cannot work: names the field, its value and the remedy. The command line prints it and exits with 2."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} = {value!r}: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy


@dataclass(frozen=True)
class Base:
    """A base model: one params entry of full weights."""

    path: str
    """A Hugging Face directory, or a hub id when online."""
    train: bool = True
    """False: frozen; its roles speak, and their text is context."""
    scratch: bool = False
    """True: draw fresh weights of the shape that config.json gives, instead of reading them (for `mas-jax sft`)."""


@dataclass(frozen=True)
class Role:
    """How one role speaks: which params it samples from, and its limits."""

    params: str
    """The params entry it uses."""
    max_tokens: int = 256
    temperature: float = 1.0
    """Above 0 in training; full support always (no top-k, no top-p): the learner's ratios are then those of the sampler."""
    system: str = ""
    """Put before the messages of a call that brings no system message of its own. Templates without a system role (Gemma 2's)
    refuse it."""
    template: dict = field(default_factory=dict)
    """Variables for the chat template, such as {"enable_thinking": False}. One that the template never reads is refused."""


@dataclass(frozen=True)
class Reward:
    """One named term of the return.

    `fn(trace)` gives a number (the whole team), None (does not apply; not the same as 0), or a dict whose keys are a role, an agent
    ("role/index") or a turn id. Terms with weight 0 are measured and never trained on.
    """

    fn: Callable[[Trace], float | dict[str, float] | None]
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", function_name(self.fn))


@dataclass(frozen=True)
class AdamW:
    """Optimizer of one params entry; its schedule counts updates of that entry."""

    lr: float = 1e-5
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    warmup: int = 0
    """Updates of linear warm-up; the last of them has the full rate."""
    schedule: str = "constant"
    """After warm-up: constant, or linear or cosine down to `floor` of lr."""
    decay_steps: int = 0
    """Updates from the end of warm-up to the floor."""
    floor: float = 0.0


@dataclass(frozen=True)
class Loss:
    """Policy loss: PPO's clipped surrogate with its own bound on either side, and a KL term to the reference."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    """Weight of KL(policy || reference); the reference is the weights the run started from, loaded afresh."""
    kl_estimator: str = "k3"
    """k1, k2 or k3 (Schulman's estimators, per sampled token); as a loss k1 has no gradient on average: k2 and k3 pull."""
    entropy: float = 0.0
    """Weight of an entropy bonus."""
    constant_length: int = 0
    """Length that `dr_grpo` divides by; 0: the role's max_tokens."""


@dataclass(frozen=True)
class Learner:
    """Shapes and precision of the learner."""

    rows: int = 8
    """Rows of a micro-batch."""
    lengths: tuple[int, ...] = (128, 512)
    """Row lengths that are compiled, at most three; a row goes to the shortest that holds it."""
    epochs: int = 1
    minibatches: int = 1
    """Optimizer steps per epoch of a rollout; a minibatch is whole episodes."""
    dtype: str = "auto"
    """Compute precision: float32, bfloat16, float64, or auto (float32 on CPU, else bfloat16). Weights and optimizer stay float32."""
    remat: bool = True
    """Recompute activations in the backward pass: far less memory, and on CPU faster too."""
    attention: str = "auto"
    """Kernel: xla (the reference), chunked (long rows), cudnn (GPU), splash (TPU), or auto: the fastest that this model, these
    lengths and this device allow; the log names it."""
    gap_alarm: float = 0.05
    """Warn when the mean |learner - sampler| log-probability of a role exceeds this."""


@dataclass(frozen=True)
class Rollout:
    """Shapes of the rollout engine; constants of a run: two programs are compiled, never more."""

    slots: int = 32
    """Requests decoded at once."""
    context: int = 512
    """Longest prompt plus reply, in tokens; a multiple of `chunk`."""
    prefill_rows: int = 4
    chunk: int = 64
    """Prompts are prefilled in chunks that start at multiples of this."""
    block: int = 8
    """Tokens decoded on the device between two looks of the host."""
    pages: int = 0
    """Prefilled chunks kept for reuse; 0: as many as fill all slots."""
    reuse: bool = True
    """Reuse prefilled chunks across calls; changes speed, never tokens."""
    tool_workers: int = 2
    tool_seconds: float = 10.0
    """Time limit of a tool call that names none."""


@dataclass(frozen=True)
class Limits:
    """Budgets of one episode, counted along a branch, and of a batch."""

    turns: int = 64
    tokens: int = 0
    """Sampled tokens; 0: no limit."""
    failures: float = 0.2
    """Share of failed episodes in a batch past which the run stops with their cause."""


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis; -1: all that remain."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@dataclass(frozen=True)
class Evaluation:
    """Held-out evaluation."""

    every: int = 0
    """Steps between evaluations; 0: before the first step and after the last only."""
    tasks: int = 128
    samples: int = 1
    """Episodes per held-out task."""
    temperature: float = -1.0
    """-1: each role's own; 0: greedy."""


@dataclass(frozen=True)
class Experiment:
    """A team, its tasks and how it learns."""

    workflow: Callable
    tasks: TaskSets
    rewards: tuple[Reward, ...]
    params: dict[str, Base]
    roles: dict[str, Role]
    optimizers: dict[str, AdamW] = field(default_factory=dict)
    """By params entry; an entry without one uses AdamW()."""
    method: str = "grpo"
    """A row of the methods table: see `mas-jax methods`."""
    tools: dict[str, Callable] = field(default_factory=dict)
    steps: int = 100
    batch: int = 16
    """Tasks of one step."""
    group_size: int = 8
    """Episodes of each task, compared with one another."""
    seed: int = 0
    checkpoint_every: int = 10
    keep: int = 2
    """Checkpoints kept."""
    loss: Loss = Loss()
    learner: Learner = Learner()
    rollout: Rollout = Rollout()
    limits: Limits = Limits()
    mesh: Mesh = Mesh()
    evaluation: Evaluation = Evaluation()


@dataclass(frozen=True)
class Example:
    """One demonstration: to `prompt` (one user message, or a whole conversation already `rendered`) the role says `response`."""

    id: str
    prompt: str
    response: str
    role: str = "assistant"
    rendered: bool = False


@dataclass(frozen=True)
class Cloning:
    """Behaviour cloning of demonstrations, or of filtered traces, through the same learner (`mas-jax sft`)."""

    base: Base
    examples: Callable[[], Sequence[Example]]
    optimizer: AdamW = AdamW(lr=1e-4)
    steps: int = 100
    batch: int = 32
    seed: int = 0
    checkpoint_every: int = 500
    learner: Learner = Learner()
    mesh: Mesh = Mesh()


def function_name(fn: Callable) -> str:
    """The name a person gave a function, a partial of one, or a callable object."""
    if isinstance(fn, partial):
        return function_name(fn.func)
    return fn.__name__ if inspect.isroutine(fn) else type(fn).__name__


# Fields that change how fast a run goes or how long it is, not what it computes; a resumed run may change them.
FREE = ("steps", "checkpoint_every", "keep", "limits.failures", "rollout.tool_workers", "learner.gap_alarm")


def fingerprint(value: object, name: str = "") -> dict[str, object]:
    """A config as flat JSON-able {dotted field: value}; functions by name and a digest of their source."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, _field(value, f.name)) for f in dataclasses.fields(value)]
        flat = {name: f"{function_name(value)}@{_source_digest(value)}"} if callable(value) else {}
    elif isinstance(value, dict):
        items, flat = list(value.items()), {}
    elif isinstance(value, (list, tuple)):
        items, flat = list(enumerate(value)), {}
    elif isinstance(value, partial):
        items, flat = [("args", value.args), ("keywords", value.keywords), ("func", value.func)], {}
    elif callable(value):
        return {name: f"{function_name(value)}@{_source_digest(value)}"}
    else:
        return {name: value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)}
    for key, item in items:
        flat |= fingerprint(item, f"{name}.{key}" if name else str(key))
    return flat


def _field(value: object, name: str) -> object:
    return object.__getattribute__(value, name)


def _source_digest(fn: Callable) -> str:
    code = inspect.unwrap(fn) if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn)
    try:
        source = inspect.getsource(code)
    except OSError:  # typed at a prompt
        source = f"{code.__module__}.{code.__qualname__}"
    except TypeError:  # built in, such as str.strip, whose repr holds no address
        source = code.__qualname__
    return hashlib.blake2b(source.encode(), digest_size=4).hexdigest()


def differences(old: dict[str, object], new: dict[str, object]) -> list[str]:
    """What changed between two fingerprints, one line each, fields that may change left out."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if not any(key == free or key.startswith(free + ".") for free in FREE) and old.get(key) != new.get(key):
            lines.append(f"{key}: {old.get(key)!r} -> {new.get(key)!r}")
    return lines


def validate(experiment: Experiment) -> None:
    """Refuse what cannot work, before anything is loaded. Raises ConfigError."""
    for check in _checks(experiment):
        raise check


def _positive(section: str, holder: object, names: Sequence[str]) -> Iterator[ConfigError]:
    for name in names:
        value = _field(holder, name)
        if value < 1:
            yield ConfigError(f"{section}{name}", value, "must be 1 or more")


def _checks(e: Experiment) -> Iterator[ConfigError]:
    yield from _check_roles(e)
    yield from _positive("", e, ("steps", "batch", "group_size", "checkpoint_every", "keep"))
    yield from _check_shapes(e)
    names = [reward.name for reward in e.rewards]
    if not e.rewards:
        yield ConfigError("rewards", e.rewards, "give at least one Reward")
    if len(set(names)) < len(names):
        yield ConfigError("rewards", names, "two rewards have one name; set Reward(name=...)")
    if e.rewards and all(reward.weight == 0 for reward in e.rewards):
        yield ConfigError("rewards", names, "every weight is 0, so nothing would be learned; give one a weight")
    for name, optimizer in e.optimizers.items():
        if name not in e.params:
            yield ConfigError(f"optimizers.{name}", name, f"no such params entry; there are {sorted(e.params)}")
        if optimizer.schedule not in ("constant", "linear", "cosine"):
            yield ConfigError(f"optimizers.{name}.schedule", optimizer.schedule, "use constant, linear or cosine")
        if optimizer.schedule != "constant" and optimizer.decay_steps < 1:
            yield ConfigError(
                f"optimizers.{name}.decay_steps", optimizer.decay_steps, "say how many updates the decay takes"
            )
        for field_name in ("lr", "clip", "weight_decay", "warmup", "floor"):
            if _field(optimizer, field_name) < 0:
                yield ConfigError(
                    f"optimizers.{name}.{field_name}", _field(optimizer, field_name), "must not be negative"
                )
        for field_name in ("b1", "b2"):
            if not 0 <= _field(optimizer, field_name) < 1:
                yield ConfigError(f"optimizers.{name}.{field_name}", _field(optimizer, field_name), "must be in [0, 1)")
    if e.loss.kl_estimator not in ("k1", "k2", "k3"):
        yield ConfigError("loss.kl_estimator", e.loss.kl_estimator, "use k1, k2 or k3")
    yield from _positive("limits.", e.limits, ("turns",))
    yield from _positive("evaluation.", e.evaluation, ("tasks", "samples"))
    if e.limits.tokens < 0:
        yield ConfigError("limits.tokens", e.limits.tokens, "must be 1 or more, or 0 for no limit")
    if not 0 <= e.limits.failures <= 1:
        yield ConfigError("limits.failures", e.limits.failures, "is a share of a batch: from 0 to 1")
    if e.rollout.tool_seconds <= 0:
        yield ConfigError("rollout.tool_seconds", e.rollout.tool_seconds, "must be above 0")
    if e.evaluation.every < 0:
        yield ConfigError("evaluation.every", e.evaluation.every, "must be 1 or more, or 0 for first and last only")
    for name in ("clip_low", "clip_high", "kl", "entropy", "constant_length"):
        if _field(e.loss, name) < 0:
            yield ConfigError(f"loss.{name}", _field(e.loss, name), "must not be negative")


def _check_roles(e: Experiment) -> Iterator[ConfigError]:
    if not e.params:
        yield ConfigError("params", e.params, "name at least one, such as {'team': Base('path/to/model')}")
    declared = set(_roles_of(e.workflow))
    for name in sorted(declared - set(e.roles)):
        yield ConfigError("roles", sorted(e.roles), f"the workflow calls role {name!r}, which has no entry; add it")
    for name in sorted(set(e.roles) - declared):
        yield ConfigError(f"roles.{name}", name, f"the workflow has no such role; it has {sorted(declared)}")
    for name, role in e.roles.items():
        if role.params not in e.params:
            remedy = f"no such params entry; there are {sorted(e.params)}"
            yield ConfigError(f"roles.{name}.params", role.params, remedy)
        if role.max_tokens < 1:
            yield ConfigError(f"roles.{name}.max_tokens", role.max_tokens, "must be 1 or more")
        if role.max_tokens >= e.rollout.context:
            remedy = f"leaves no room for a prompt in rollout.context = {e.rollout.context}"
            yield ConfigError(f"roles.{name}.max_tokens", role.max_tokens, remedy)
        if role.temperature <= 0:
            remedy = "training samples from the whole distribution: set a temperature above 0 (evaluation.temperature 0 is greedy)"
            yield ConfigError(f"roles.{name}.temperature", role.temperature, remedy)
    used = {role.params for role in e.roles.values()}
    for name, entry in e.params.items():
        if entry.train and name not in used:
            yield ConfigError(
                f"params.{name}", entry.path, "trainable, but no role uses it; remove it or set train=False"
            )
    if e.params and not any(entry.train for entry in e.params.values()):
        yield ConfigError("params", sorted(e.params), "every entry is frozen, so nothing would be learned")


def _roles_of(workflow: Callable) -> tuple[str, ...]:
    try:
        return _roles_of(workflow.func) if isinstance(workflow, partial) else workflow.roles
    except AttributeError:
        raise ConfigError(
            "workflow", function_name(workflow), "decorate the generator function with @workflow(roles=(...))"
        ) from None


def _check_shapes(e: Experiment) -> Iterator[ConfigError]:
    rollout, learner = e.rollout, e.learner
    yield from _positive("rollout.", rollout, ("slots", "context", "prefill_rows", "chunk", "block", "tool_workers"))
    yield from _positive("learner.", learner, ("rows", "epochs", "minibatches"))
    if rollout.context % rollout.chunk:
        yield ConfigError("rollout.context", rollout.context, f"must be a multiple of rollout.chunk = {rollout.chunk}")
    need = rollout.context // rollout.chunk * rollout.prefill_rows
    if rollout.pages and rollout.pages < need:
        remedy = f"prefill_rows x context / chunk = {need} pages are needed at least (0 chooses)"
        yield ConfigError("rollout.pages", rollout.pages, remedy)
    if not 1 <= len(learner.lengths) <= 3 or list(learner.lengths) != sorted(set(learner.lengths)):
        yield ConfigError("learner.lengths", learner.lengths, "give one to three lengths in rising order")
    elif learner.lengths[-1] < rollout.context:
        remedy = f"the longest must hold a whole row: at least rollout.context = {rollout.context}"
        yield ConfigError("learner.lengths", learner.lengths, remedy)
    if learner.dtype not in ("auto", "float32", "bfloat16", "float64"):
        yield ConfigError("learner.dtype", learner.dtype, "use auto, float32, bfloat16 or float64")
    if learner.attention not in ("auto", "xla", "chunked", "cudnn", "splash"):
        yield ConfigError("learner.attention", learner.attention, "use auto, xla, chunked, cudnn or splash")
    if learner.minibatches > e.batch * e.group_size:
        remedy = f"a minibatch is whole episodes, and a step has batch x group_size = {e.batch * e.group_size}"
        yield ConfigError("learner.minibatches", learner.minibatches, remedy)
