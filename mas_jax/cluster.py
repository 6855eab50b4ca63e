"""Policy groups: one base model with its sampler, learner and optimizer, in this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mas_jax.config import AdamW, Base, ConfigError, Experiment, Rollout
from mas_jax.config import Learner as LearnerSettings
from mas_jax.learners.packing import TrainRow, pack, unpack
from mas_jax.learners.update import (
    Compute,
    Learner,
    Objective,
    State,
    learning_rate,
    make_optimizer,
    on_device,
    policy_loss,
    sum_metrics,
)
from mas_jax.mesh import LEARNER_RULES, check_divisible, make_mesh
from mas_jax.models import attention, hf, tokenizer, transformer
from mas_jax.rollout import prompts
from mas_jax.rollout.driver import Completion, Request
from mas_jax.rollout.engine import DecodeState, NativeEngine
from mas_jax.rollout.scheduler import Scheduler, Shapes


def compute_dtype(name: str) -> jnp.dtype:
    """The precision of compute; auto is float32 on CPU, where bfloat16 is slower, and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name == "float64" and not jax.config.jax_enable_x64:
        raise ConfigError("learner.dtype", name, "jax computes in float32 unless JAX_ENABLE_X64=1 is set")
    return jnp.dtype(name)


def build_groups(experiment: Experiment, *, learn: bool = True) -> dict[str, LocalGroup]:
    """A group for each params entry that a role uses. Everything is checked before any weights are read."""
    e = experiment
    mesh = make_mesh(e.mesh.data, e.mesh.fsdp, e.mesh.tensor)
    groups = {}
    for name in sorted({role.params for role in e.roles.values()}):
        group = groups[name] = LocalGroup(name, e.params[name], mesh, dtype=e.learner.dtype, seed=e.seed)
        group.add_sampler(e.rollout)
        if learn and e.params[name].train:
            loss = partial(policy_loss, e.loss)
            group.add_learner(e.learner, e.optimizers.get(name, AdamW()), loss, reference=e.loss.kl > 0)
    for name, role in e.roles.items():
        talk = [{"role": "system", "content": role.system}] if role.system else []
        prompts.render(groups[role.params].tokenizer, [*talk, {"role": "user", "content": "?"}], role.template, name)
    for group in groups.values():
        group.load()
    return groups


class LocalGroup:
    """A policy group on local devices: a base with, as needed, a sampler and a learner. `load` reads the weights, last of all."""

    def __init__(self, name: str, base: Base, mesh: Mesh, *, dtype: str, seed: int) -> None:
        self.name, self.base, self.mesh, self.seed = name, base, mesh, seed
        try:
            self.path = hf.resolve(base.path)
            self.config = hf.read_config(self.path)
            self.tokenizer = tokenizer.load(self.path)
            self.tokenizer.require_template()
        except ConfigError as error:
            raise ConfigError(f"params.{name}.{error.field}", error.value, error.remedy) from error
        check_divisible(self.config, mesh)
        if self.tokenizer.vocab > self.config.vocab:
            remedy = f"the tokenizer knows {self.tokenizer.vocab} ids, the model {self.config.vocab}: they do not belong together"
            raise ConfigError(f"params.{name}.path", base.path, remedy)
        self.dtype = compute_dtype(dtype)
        self.learner: Learner | None = None
        self.engine: NativeEngine | None = None
        self.reference: transformer.Params | None = None
        self._decode: DecodeState | None = None

    def add_sampler(self, rollout: Rollout) -> None:
        """An engine of these shapes, with its scheduler."""
        self.context = rollout.context
        row_pages = rollout.context // rollout.chunk
        pages = rollout.pages or rollout.slots * row_pages
        pages = max(pages, rollout.prefill_rows * row_pages) + 1
        shapes = Shapes(rollout.slots, rollout.context, rollout.prefill_rows, rollout.chunk, rollout.block, pages)
        self.engine = NativeEngine(self.config, shapes, dtype=self.dtype, mesh=self.mesh)
        self.scheduler = Scheduler(shapes, reuse=rollout.reuse)

    def add_learner(
        self, settings: LearnerSettings, optimizer: AdamW, objective: Objective, *, reference: bool = False
    ) -> None:
        """A learner of `objective`; with `reference` the starting weights are kept to compare with."""
        ways = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        if settings.rows % ways:
            raise ConfigError("learner.rows", settings.rows, f"must be a multiple of mesh data x fsdp = {ways}")
        self.settings, self.optimizer_config, self._wants_reference = settings, optimizer, reference
        kernel, reason = attention.choose(
            settings.attention, self.config, jax.default_backend(), settings.lengths, self.dtype
        )
        self.attention = f"params {self.name}: attention {kernel} ({reason})"
        compute = Compute(self.dtype, settings.remat, kernel)
        self.learner = Learner(self.config, self.mesh, make_optimizer(optimizer), objective, compute)

    @property
    def learns(self) -> bool:
        """Whether this group's weights change."""
        return self.learner is not None

    def load(self) -> None:
        """Read (or draw) the weights, and the reference where the loss needs one."""
        params = self._draw() if self.base.scratch else self._read()
        if self.learner is None:
            self._frozen = params
            return
        self.state = self.learner.init_state(params)
        if self._wants_reference:
            self.reference = self._read()

    def _read(self) -> transformer.Params:
        wide = jnp.float64 if self.dtype == jnp.float64 else jnp.float32
        try:
            return hf.load(self.path, mesh=self.mesh, rules=LEARNER_RULES, dtype=wide)[1]
        except ConfigError as error:
            raise ConfigError(f"params.{self.name}.{error.field}", error.value, error.remedy) from error

    def _draw(self) -> transformer.Params:
        place = transformer.param_shardings(self.config, self.mesh, LEARNER_RULES)
        return jax.jit(partial(transformer.init, self.config), out_shardings=place)(jax.random.key(self.seed))

    @property
    def params(self) -> transformer.Params:
        """The learner's weights (the frozen ones, if nothing is learned)."""
        return self.state.params if self.learns else self._frozen

    @property
    def version(self) -> int:
        """Updates that the weights have had."""
        return int(self.state.updates) if self.learns else 0

    # Sampling

    def push(self) -> int:
        """Copy the learner's weights to the sampler and forget what was prefilled under the old ones."""
        version = self.version
        self.scheduler.new_version(version)
        self._sampler_params = self.engine.load_params(self.params)
        if self._decode is None:
            self._decode = self.engine.init_decode_state()
        return version

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ConfigError for one that asks for adapters."""
        for request in requests:
            if request.gate is not None:
                raise ConfigError(f"roles.{request.role}", request.id, "asks for adapters, and this base has none")
        self.scheduler.submit(requests)

    def cancel(self, ids: Sequence[str]) -> None:
        """Forget requests."""
        self.scheduler.cancel(ids)

    def poll(self) -> list[Completion]:
        """Prefill while slots want it, then decode one block."""
        if not self.scheduler.busy:
            return []
        while (work := self.scheduler.prefill_work()) is not None:
            self._decode, hidden = self.engine.prefill(self._sampler_params, self._decode, work)
            self.scheduler.prefilled(hidden)
        for slot in self.scheduler.freed():
            self._decode = self.engine.free_resource(slot, self._decode)
        placed = self.scheduler.insertions()
        if placed:
            slots, prefixes, requests = zip(*placed, strict=True)
            self._decode = self.engine.bulk_insert(prefixes, self._decode, slots, requests)
        self._decode, block = self.engine.generate(self._sampler_params, self._decode)
        return self.scheduler.decoded(block.tokens, block.logprobs, block.valid)

    # Learning

    def score(self, rows: Sequence[TrainRow]) -> list[dict[str, np.ndarray]]:
        """`logprobs` and `entropy` of each row under the current weights, and `ref_logprobs` under the reference."""
        batches = pack(rows, lines=self.settings.rows, lengths=self.settings.lengths)
        names = ["logprobs", "entropy"] + (["ref_logprobs"] if self.reference is not None else [])
        found: dict[str, list] = {name: [None] * len(rows) for name in names}
        queued = []
        for batch in batches:
            placed = on_device(batch, self.mesh)
            values = [*self.learner.score(self.state.params, placed)]
            if self.reference is not None:
                values.append(self.learner.score(self.reference, placed)[0])
            queued.append((batch, values))
        for batch, values in queued:
            for name, value in zip(names, values, strict=True):
                unpack(batch, np.asarray(value), rows, found[name])
        return [dict(zip(names, per_row, strict=True)) for per_row in zip(*found.values(), strict=True)]

    def update(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """One optimizer step: gradients role after role, summed, applied. Metrics are `role/what` and `params/name/what`."""
        batches = pack(rows, lines=self.settings.rows, lengths=self.settings.lengths)
        total, norms, metrics = None, {}, {}
        rate = float(learning_rate(self.optimizer_config, self.version))
        for role, own in itertools.groupby(batches, key=lambda batch: batch.role):
            grads, parts = self.learner.gradient(self.state.params, [on_device(batch, self.mesh) for batch in own])
            norms[role] = self.learner.norm(grads)
            total = grads if total is None else self.learner.add(total, grads)
            metrics |= _per_token(role, sum_metrics(parts))
        self.state, applied = self.learner.apply(self.state, total)
        norms = {role: float(norm) for role, norm in norms.items()}
        for role, norm in norms.items():
            metrics[f"{role}/grad_norm"] = norm
            metrics[f"{role}/grad_share"] = norm / (sum(norms.values()) or 1.0)
        own = {name: float(value) for name, value in applied.items()} | {"lr": rate, "updates": self.version}
        return metrics | {f"params/{self.name}/{name}": value for name, value in own.items()}

    # Keeping

    def abstract_state(self) -> State:
        """Shapes and places of the state, for restoring."""
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            self.state,
            self.learner.state_shardings,
        )

    def restore(self, state: State) -> None:
        """Take over a restored state. The caller pushes."""
        self.state = state

    def export(self, path: str | Path) -> None:
        """Write the learner's weights as a Hugging Face directory, with the base's configuration, tokenizer and template."""
        hf.save(Path(path), self.config, self.params, source=self.path)


def _per_token(role: str, sums: dict[str, float]) -> dict[str, float]:
    """Sums over tokens as means; loss terms, whose weights hold their denominators, as they are."""
    tokens = sums.pop("tokens") or 1.0
    whole = ("loss", "policy_loss")
    return {f"{role}/{n}": v if n in whole or n.startswith("max_") else v / tokens for n, v in sums.items()}
