"""The engine contract, and our engine: prefill in aligned chunks, insert, decode K steps on the device.

The contract is that of JetStream's `Engine` at its last version, with two changes. A `DecodeState` holds the page pool that prefill
writes into, so `prefill` takes and returns it and works on P rows at a time; and `insert` takes the request, whose key,
temperature, limits and stop ids make its tokens its own. There are two compiled programs, prefill [P, c] and generate [S slots,
K steps]; insertion happens at the head of generate. Same program, same shapes, same arithmetic per row: on CPU the tokens and
log-probabilities of a request are bit-equal whatever shares its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from mas_jax.config import ConfigError
from mas_jax.mesh import BATCH_AXES, ROLLOUT_RULES, fitted
from mas_jax.models import transformer
from mas_jax.models.transformer import Cache, ModelConfig, Params
from mas_jax.rollout.driver import Request
from mas_jax.rollout.scheduler import MAX_STOP_IDS, Chunks, Prefix, Shapes


class Slots(NamedTuple):
    """What each slot is doing: last token, where the next key goes, tokens sampled so far and allowed, and how to sample."""

    token: Int[Array, " S"]
    position: Int[Array, " S"]
    count: Int[Array, " S"]
    limit: Int[Array, " S"]
    active: Bool[Array, " S"]
    key: UInt32[Array, "S 2"]
    temperature: Float[Array, " S"]
    stop: Int[Array, "S E"]


class DeviceState(NamedTuple):
    """All that lives on the device: decode cache [S, C, K, H] and page pool [N, c, K, H] of every layer, and the slots."""

    cache: Cache
    pool: Cache
    slots: Slots


class Insertions(NamedTuple):
    """Up to S requests to put into slots; those from `count` on are empty. Hidden [S, D] predicts each one's first token."""

    count: Int[Array, ""]
    slot: Int[Array, " S"]
    table: Int[Array, "S M"]
    hidden: Float[Array, "S D"]
    slots: Slots


@dataclass(frozen=True)
class DecodeState:
    """Device arrays, with insertions and released slots that the next `generate` carries out."""

    device: DeviceState
    pending: tuple[tuple[int, Prefix, Request], ...] = ()
    freed: tuple[int, ...] = ()


@dataclass(frozen=True)
class ResultTokens:
    """A block: column 0 holds first tokens of requests inserted just now, columns 1..K the steps. Shapes [S, K+1]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    valid: np.ndarray


@runtime_checkable
class Engine(Protocol):
    """What a rollout backend offers (JetStream's names)."""

    shapes: Shapes

    def load_params(self, params: Params) -> Params:
        """Learner weights as the engine reads them."""

    def init_decode_state(self) -> DecodeState:
        """Empty slots, cache and pages."""

    def prefill(self, params: Params, state: DecodeState, chunks: Chunks) -> tuple[DecodeState, np.ndarray]:
        """Write chunks of prompts into their pages; also hidden [P, D] at each row's last token."""

    def insert(self, prefix: Prefix, state: DecodeState, slot: int, request: Request) -> DecodeState:
        """Start a request in a slot; its first token comes with the next block."""

    def bulk_insert(
        self, prefixes: Sequence[Prefix], state: DecodeState, slots: Sequence[int], requests: Sequence[Request]
    ) -> DecodeState:
        """`insert` for several."""

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        """Decode up to K steps in every slot."""

    def free_resource(self, slot: int, state: DecodeState) -> DecodeState:
        """Stop a slot whose request is no longer wanted."""


class NativeEngine:
    """Our engine over our decoder. `dtype` is the precision of compute and cache."""

    def __init__(self, config: ModelConfig, shapes: Shapes, *, dtype: jnp.dtype, mesh: Mesh) -> None:
        if shapes.context > config.max_positions:
            remedy = f"the model was made for {config.max_positions} positions"
            raise ConfigError("rollout.context", shapes.context, remedy)
        self.config, self.shapes, self.dtype, self.mesh = config, shapes, dtype, mesh
        ways = mesh.shape["data"] * mesh.shape["fsdp"]
        for name, size in (("slots", shapes.slots), ("prefill_rows", shapes.prefill_rows)):
            if size % ways:
                raise ConfigError(f"rollout.{name}", size, f"must be a multiple of mesh data x fsdp = {ways}")
        self._param_shardings = transformer.param_shardings(config, mesh, ROLLOUT_RULES)
        state = self._state_shardings()
        whole = NamedSharding(mesh, PartitionSpec())
        self._load = jax.jit(partial(_load, dtype=dtype), out_shardings=self._unstacked(self._param_shardings))
        self._init = jax.jit(partial(_init, config, shapes, dtype), out_shardings=state)
        self.prefill_program = jax.jit(
            partial(_prefill, config, shapes, dtype), donate_argnums=1, out_shardings=(state, whole)
        )
        self.generate_program = jax.jit(
            partial(_generate, config, shapes, dtype), donate_argnums=1, out_shardings=(state, whole, whole, whole)
        )

    def load_params(self, params: Params) -> Params:
        """A copy of learner weights in the engine's precision and layout, a list of layers; waits until it is there."""
        return jax.block_until_ready(self._load(params))

    def init_decode_state(self) -> DecodeState:
        return DecodeState(self._init())

    def prefill(self, params: Params, state: DecodeState, chunks: Chunks) -> tuple[DecodeState, np.ndarray]:
        device, hidden = self.prefill_program(
            params, state.device, chunks.tokens, chunks.start, chunks.last, chunks.table, chunks.write
        )
        return replace(state, device=device), np.asarray(hidden)

    def insert(self, prefix: Prefix, state: DecodeState, slot: int, request: Request) -> DecodeState:
        return self.bulk_insert([prefix], state, [slot], [request])

    def bulk_insert(
        self, prefixes: Sequence[Prefix], state: DecodeState, slots: Sequence[int], requests: Sequence[Request]
    ) -> DecodeState:
        return replace(state, pending=(*state.pending, *zip(slots, prefixes, requests, strict=True)))

    def free_resource(self, slot: int, state: DecodeState) -> DecodeState:
        return replace(state, freed=(*state.freed, slot))

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        keep = np.ones(self.shapes.slots, bool)
        keep[list(state.freed)] = False
        device, *block = self.generate_program(params, state.device, self._insertions(state.pending), keep)
        return DecodeState(device), ResultTokens(*(np.asarray(part) for part in block))

    def _insertions(self, pending: Sequence[tuple[int, Prefix, Request]]) -> Insertions:
        s = self.shapes
        slots = Slots(
            token=np.zeros(s.slots, np.int32),
            position=np.zeros(s.slots, np.int32),
            count=np.zeros(s.slots, np.int32),
            limit=np.ones(s.slots, np.int32),
            active=np.zeros(s.slots, bool),
            key=np.zeros((s.slots, 2), np.uint32),
            temperature=np.ones(s.slots, np.float32),
            stop=np.full((s.slots, MAX_STOP_IDS), -1, np.int32),
        )
        # An empty entry points one past the last slot, where a scatter with mode="drop" writes nothing.
        into = np.full(s.slots, s.slots, np.int32)
        table = np.zeros((s.slots, s.chunks), np.int32)
        hidden = np.zeros((s.slots, self.config.width), self.dtype)
        for i, (slot, prefix, request) in enumerate(pending):
            into[i] = slot
            table[i, : len(prefix.pages)] = prefix.pages
            hidden[i] = prefix.hidden
            slots.position[i] = prefix.length
            slots.limit[i] = request.max_tokens
            slots.active[i] = True
            slots.key[i] = request.key
            slots.temperature[i] = request.temperature
            slots.stop[i, : len(request.stop)] = request.stop
        return Insertions(np.int32(len(pending)), into, table, hidden, slots)

    def _unstacked(self, tree: Params) -> Params:
        drop = lambda sharding: NamedSharding(self.mesh, PartitionSpec(*sharding.spec[1:]))
        layer = jax.tree.map(drop, tree["layers"])
        return tree | {"layers": [layer] * self.config.layers}

    def _state_shardings(self) -> DeviceState:
        def at(*axes: object) -> NamedSharding:
            return NamedSharding(self.mesh, PartitionSpec(*axes))

        layers, heads = self.config.layers, fitted(ROLLOUT_RULES, self.config, self.mesh)["kv_heads"]
        cache = {name: [at(BATCH_AXES, None, heads)] * layers for name in ("k", "v")}
        pool = {name: [at(None, None, heads)] * layers for name in ("k", "v")}
        return DeviceState(cache, pool, Slots(*[at(BATCH_AXES)] * len(Slots._fields)))


def _load(params: Params, *, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), transformer.unstack(params))


def _init(config: ModelConfig, shapes: Shapes, dtype: jnp.dtype) -> DeviceState:
    s = shapes.slots
    whole = jnp.zeros(s, jnp.int32)
    slots = Slots(
        token=whole, position=whole, count=whole, limit=whole, active=jnp.zeros(s, bool), key=jnp.zeros((s, 2), jnp.uint32),
        temperature=jnp.ones(s, jnp.float32), stop=jnp.full((s, MAX_STOP_IDS), -1, jnp.int32),
    )  # fmt: skip
    cache = transformer.init_cache(config, s, shapes.context, dtype)
    return DeviceState(cache, transformer.init_cache(config, shapes.pages, shapes.chunk, dtype), slots)


def _prefill(
    config: ModelConfig,
    shapes: Shapes,
    dtype: jnp.dtype,
    params: Params,
    state: DeviceState,
    tokens: Int[Array, "P c"],
    start: Int[Array, " P"],
    last: Int[Array, " P"],
    table: Int[Array, "P M"],
    write: Int[Array, " P"],
) -> tuple[DeviceState, Float[Array, "P D"]]:
    """P chunks of prompts: context gathered from pages, new keys and values written to pages."""
    context = jax.tree.map(lambda pool: _gather(pool, table), state.pool)
    hidden, _, chunk = transformer.forward_cached(config, params, tokens, start, context, dtype=dtype)
    pool = jax.tree.map(lambda pool, new: pool.at[write].set(new), state.pool, chunk)
    rows = jnp.arange(shapes.prefill_rows)
    return state._replace(pool=pool), hidden[rows, last]


def _gather(pool: Float[Array, "N c K H"], table: Int[Array, "P M"]) -> Float[Array, "P C K H"]:
    pages = pool[table]
    return pages.reshape(table.shape[0], -1, *pool.shape[2:])


def _sample(
    config: ModelConfig, dtype: jnp.dtype, params: Params, hidden: Float[Array, "S D"], slots: Slots
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """One token a row, and its log-probability under what was sampled from (temperature 0: the best token, at temperature 1).

    Token number n of a request uses the request's key folded with n, so its noise depends on nothing else.
    """
    logits = transformer.head_logits(config, params, hidden, dtype=dtype).astype(jnp.float32)
    greedy = (slots.temperature <= 0)[:, None]
    scaled = logits / jnp.where(greedy, 1.0, slots.temperature[:, None])

    def noise(key: UInt32[Array, " 2"], count: Int[Array, ""]) -> Float[Array, " V"]:
        stream = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), count)
        return jax.random.gumbel(stream, (config.vocab,), jnp.float32)

    gumbel = jax.vmap(noise)(slots.key, slots.count)
    token = jnp.argmax(jnp.where(greedy, logits, scaled + gumbel), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(scaled, axis=-1)


def _advance(slots: Slots, token: Int[Array, " S"]) -> Slots:
    """Slots after each active one sampled `token`: stopped by a stop id or by its limit."""
    count = slots.count + slots.active
    stopped = jnp.any(token[:, None] == slots.stop, axis=-1) | (count >= slots.limit)
    token = jnp.where(slots.active, token, slots.token)
    return slots._replace(token=token, count=count, active=slots.active & ~stopped)


def _generate(
    config: ModelConfig,
    shapes: Shapes,
    dtype: jnp.dtype,
    params: Params,
    state: DeviceState,
    new: Insertions,
    keep: Bool[Array, " S"],
) -> tuple[DeviceState, Int[Array, "S K1"], Float[Array, "S K1"], Bool[Array, "S K1"]]:
    """Insert, sample the first tokens of what was inserted, then decode until K steps are done or every slot has stopped."""
    shape = (shapes.slots, shapes.block + 1)
    out = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool)
    slots = state.slots._replace(active=state.slots.active & keep)
    cache = jax.lax.fori_loop(0, new.count, partial(_copy_pages, state.pool, new), state.cache)

    def first(slots: Slots) -> tuple[Slots, tuple]:
        token, logprob = _sample(config, dtype, params, new.hidden, new.slots)
        fresh = _advance(new.slots, token)
        put = lambda old, value: old.at[new.slot].set(value, mode="drop")
        begun = jax.tree.map(put, slots, fresh)
        columns = (token, logprob, new.slots.active)
        return begun, tuple(buffer.at[new.slot, 0].set(c, mode="drop") for buffer, c in zip(out, columns, strict=True))

    slots, out = jax.lax.cond(new.count > 0, first, lambda slots: (slots, out), slots)

    def going(carry: tuple) -> Bool[Array, ""]:
        step, slots, _, _ = carry
        return (step <= shapes.block) & jnp.any(slots.active)

    def decode(carry: tuple) -> tuple:
        step, slots, cache, out = carry
        hidden, cache, _ = transformer.forward_cached(
            config, params, slots.token[:, None], slots.position, cache, dtype=dtype
        )
        token, logprob = _sample(config, dtype, params, hidden[:, 0], slots)
        columns = (token, logprob, slots.active)
        out = tuple(buffer.at[:, step].set(c) for buffer, c in zip(out, columns, strict=True))
        moved = slots._replace(position=jnp.minimum(slots.position + slots.active, shapes.context - 1))
        return step + 1, _advance(moved, token), cache, out

    _, slots, cache, out = jax.lax.while_loop(going, decode, (1, slots, cache, out))
    return DeviceState(cache, state.pool, slots), *out


def _copy_pages(pool: Cache, new: Insertions, i: Int[Array, ""], cache: Cache) -> Cache:
    """Insertion i: its pages, end to end, become its slot's cache."""

    def copy(pool: Float[Array, "N c K H"], cache: Float[Array, "S C K H"]) -> Float[Array, "S C K H"]:
        row = _gather(pool, new.table[i][None])
        return jax.lax.dynamic_update_slice(cache, row, (new.slot[i], 0, 0, 0))

    return jax.tree.map(copy, pool, cache)
