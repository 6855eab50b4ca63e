"""The jitted half of the learner: score, accumulate gradients, apply them.

Weights and optimizer stay in float32 (float64 in invariance tests); `dtype` is the precision of compute. Denominators come with the
rows' weights, so gradients of micro-batches simply add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from mas_jax.config import AdamW, Loss
from mas_jax.learners.losses import KL, ppo_clip, safe_log_ratio
from mas_jax.learners.packing import MicroBatch
from mas_jax.mesh import LEARNER_RULES, batch_sharding
from mas_jax.models import transformer
from mas_jax.models.transformer import ModelConfig, Params

Metrics = dict[str, Float[Array, ""]]
Objective = Callable[[ModelConfig, "Compute", Params, "Batch"], tuple[Float[Array, ""], Metrics]]


class Compute(NamedTuple):
    """How the learner runs a model: precision, whether layers are recomputed backwards, and which of attention.KERNELS."""

    dtype: jnp.dtype
    remat: bool = False
    kernel: str = "xla"


class Batch(NamedTuple):
    """A micro-batch on the device, all [B, T]."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    sampled: Bool[Array, "B T"]
    temperature: Float[Array, "B T"]
    advantage: Float[Array, "B T"]
    weight: Float[Array, "B T"]
    old_logprobs: Float[Array, "B T"]
    ref_logprobs: Float[Array, "B T"]


class State(NamedTuple):
    """What an update changes: weights, optimizer state, and how many updates there have been."""

    params: Params
    optimizer: optax.OptState
    updates: Int[Array, ""]


def on_device(batch: MicroBatch, mesh: Mesh) -> Batch:
    """Rows spread over the mesh's data and fsdp axes."""
    return Batch(**{name: jax.device_put(value, batch_sharding(mesh, 2)) for name, value in batch.arrays.items()})


def aligned_logprobs(
    config: ModelConfig, compute: Compute, params: Params, batch: Batch
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each sampled token at its own index, and the entropy it was drawn from; 0 elsewhere.

    The shift by one is here and nowhere else: the hidden state at t speaks of token t + 1.
    """
    hidden = transformer.forward(config, params, batch.tokens, batch.positions, batch.segments, **compute._asdict())
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    targets = jnp.where(batch.sampled[:, 1:] & same, batch.tokens[:, 1:], -1)
    values = transformer.token_logprobs(
        config, params, hidden[:, :-1], targets, batch.temperature[:, 1:], dtype=compute.dtype
    )
    logprobs, entropy = (jnp.pad(value, ((0, 0), (1, 0))) for value in values)
    return logprobs, entropy


def policy_loss(
    loss: Loss, config: ModelConfig, compute: Compute, params: Params, batch: Batch
) -> tuple[Float[Array, ""], Metrics]:
    """Weighted sum of the clipped surrogate, the KL term and the entropy bonus."""
    logprobs, entropy = aligned_logprobs(config, compute, params, batch)
    mask = batch.sampled & (batch.weight > 0)
    weight = jnp.where(mask, batch.weight, 0)
    advantage = jnp.where(mask, batch.advantage, 0)
    log_ratio = safe_log_ratio(logprobs, batch.old_logprobs, mask)
    surrogate, below, above = ppo_clip(log_ratio, advantage, low=loss.clip_low, high=loss.clip_high)
    total = surrogate
    metrics = {
        "tokens": mask.sum(),
        "policy_loss": (weight * surrogate).sum(),
        "clip_low": below.sum(),
        "clip_high": above.sum(),
        "ratio": jnp.where(mask, jnp.exp(log_ratio), 0).sum(),
        "chi2": jnp.where(mask, jnp.exp(2 * log_ratio) - 1, 0).sum(),
        "approx_kl": jnp.where(mask, KL["k3"](-log_ratio), 0).sum(),
        "max_ratio": jnp.exp(log_ratio).max(),
    }
    if loss.kl > 0:
        kl = KL[loss.kl_estimator](safe_log_ratio(logprobs, batch.ref_logprobs, mask))
        metrics["kl"] = jnp.where(mask, kl, 0).sum()
        total = total + loss.kl * kl
    if loss.entropy > 0:
        total = total - loss.entropy * jnp.where(mask, entropy, 0)
    return (weight * total).sum(), {name: value.astype(weight.dtype) for name, value in metrics.items()}


def clone_loss(config: ModelConfig, compute: Compute, params: Params, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
    """Behaviour cloning: weighted sum of -log p of the given tokens."""
    logprobs, _ = aligned_logprobs(config, compute, params, batch)
    mask = batch.sampled & (batch.weight > 0)
    nll = -jnp.where(mask, logprobs, 0)
    metrics = {"tokens": mask.sum(), "nll": nll.sum()}
    loss = (jnp.where(mask, batch.weight, 0) * nll).sum()
    return loss, {name: value.astype(loss.dtype) for name, value in metrics.items()}


def make_optimizer(config: AdamW) -> optax.GradientTransformation:
    """Clipped AdamW; its schedule counts its own updates."""
    adamw = optax.adamw(
        partial(learning_rate, config), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw) if config.clip else adamw


def learning_rate(config: AdamW, updates: Int[Array, ""] | int) -> Float[Array, ""]:
    """The rate that update number `updates` (from 0) uses: a linear rise over `warmup` updates, then the schedule."""
    rise = jnp.minimum((updates + 1) / max(config.warmup, 1), 1.0)
    done = jnp.clip((updates - config.warmup) / max(config.decay_steps, 1), 0.0, 1.0)
    fall = {"constant": 0.0, "linear": done, "cosine": (1 - jnp.cos(jnp.pi * done)) / 2}[config.schedule]
    return config.lr * rise * (1 - fall * (1 - config.floor))


class Learner:
    """Compiled functions of one model shape: `score`, `accumulate`, `apply` and the little ones between.

    `objective(config, compute, params, batch) -> (loss, metrics)` is what `accumulate` differentiates.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        objective: Objective,
        compute: Compute,
    ) -> None:
        self.config, self.mesh, self.compute = config, mesh, compute
        objective = partial(objective, config, compute)
        self.param_shardings = transformer.param_shardings(config, mesh, LEARNER_RULES)
        self.state_shardings = self._state_shardings(optimizer)
        whole, grads = NamedSharding(mesh, PartitionSpec()), self.param_shardings
        rows = batch_sharding(mesh, 2)
        self._score = jax.jit(partial(aligned_logprobs, config, compute), out_shardings=(rows, rows))
        self._accumulate = jax.jit(partial(_accumulate, objective), donate_argnums=0, out_shardings=(grads, whole))
        self._apply = jax.jit(partial(_apply, optimizer), donate_argnums=0, out_shardings=(self.state_shardings, whole))
        self._init = jax.jit(partial(_init, optimizer), donate_argnums=0, out_shardings=self.state_shardings)
        self._zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like), out_shardings=grads)
        self._add = jax.jit(_add, donate_argnums=0, out_shardings=grads)
        self._norm = jax.jit(optax.tree.norm, out_shardings=whole)

    def init_state(self, params: Params) -> State:
        """A state at update 0 around these weights, which it takes over."""
        with self._on_mesh():
            return self._init(params)

    def score(self, params: Params, batch: Batch) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Log-probabilities and entropies of the sampled tokens."""
        with self._on_mesh():
            return self._score(params, batch)

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Params, list[Metrics]]:
        """Summed gradient of micro-batches, and each one's metrics."""
        with self._on_mesh():
            total, metrics = self._zeros(params), []
            for batch in batches:
                total, found = self._accumulate(total, params, batch)
                metrics.append(found)
            return total, metrics

    def add(self, total: Params, grads: Params) -> Params:
        """total + grads; `total` is used up."""
        return self._add(total, grads)

    def norm(self, grads: Params) -> Float[Array, ""]:
        """Global norm of a gradient."""
        return self._norm(grads)

    def apply(self, state: State, grads: Params) -> tuple[State, Metrics]:
        """One optimizer step; where the gradient's norm is not finite, the state as it was. `state` is used up."""
        with self._on_mesh():
            return self._apply(state, grads)

    def _on_mesh(self) -> jax.sharding.set_mesh:
        return jax.set_mesh(self.mesh)

    def _state_shardings(self, optimizer: optax.GradientTransformation) -> State:
        params = transformer.abstract(self.config)
        whole = NamedSharding(self.mesh, PartitionSpec())
        inner = optax.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, params),
            self.param_shardings,
            transform_non_params=lambda _: whole,
        )
        return State(self.param_shardings, inner, whole)


def _init(optimizer: optax.GradientTransformation, params: Params) -> State:
    return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def _accumulate(objective: Callable, grads: Params, params: Params, batch: Batch) -> tuple[Params, Metrics]:
    (loss, metrics), new = jax.value_and_grad(objective, has_aux=True)(params, batch)
    return _add(grads, new), metrics | {"loss": loss}


def _add(total: Params, grads: Params) -> Params:
    return jax.tree.map(jnp.add, total, grads)


def _apply(optimizer: optax.GradientTransformation, state: State, grads: Params) -> tuple[State, Metrics]:
    norm = optax.tree.norm(grads)
    fine = jnp.isfinite(norm)
    updates, inner = optimizer.update(grads, state.optimizer, state.params)
    new = State(optax.apply_updates(state.params, updates), inner, state.updates + 1)
    kept = jax.tree.map(lambda new, old: jnp.where(fine, new, old), new, state)
    return kept, {"grad_norm": norm, "skipped": 1 - fine.astype(jnp.float32)}


def sum_metrics(parts: Sequence[Metrics]) -> dict[str, float]:
    """Sums over micro-batches; names that begin with max_ take the largest. Waits for the device."""
    parts = [{name: float(value) for name, value in part.items()} for part in jax.device_get(list(parts))]
    names = parts[0] if parts else {}
    join = {name: max if name.startswith("max_") else sum for name in names}
    return {name: join[name]([part[name] for part in parts]) for name in names}
