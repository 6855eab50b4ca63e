"""The engine: what a request gets is its own affair, and it is what the model says."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import BLOCK, CHUNK, CONTEXT, EXPERTS, GEMMA, SLOTS, TINY
from team import ENGINE, save_model

from mas_jax.cluster import LocalGroup
from mas_jax.config import Base, ConfigError
from mas_jax.mesh import make_mesh
from mas_jax.models import transformer
from mas_jax.rollout.driver import Request, stream_key
from mas_jax.rollout.engine import NativeEngine
from mas_jax.rollout.scheduler import Scheduler

NEVER = (TINY.vocab + 1,)  # a stop id that no token has


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


def sampler(model, mesh=(1, 1, 1)):
    group = LocalGroup("team", Base(str(model)), make_mesh(*mesh), dtype="float32", seed=0)
    group.add_sampler(ENGINE)
    group.load()
    group.push()
    return group


@pytest.fixture(scope="module")
def group(model):
    return sampler(model)


@pytest.fixture(autouse=True)
def fresh(request):
    """Every test starts with nothing prefilled, in an engine that is as the one before left it."""
    if "group" in request.fixturenames:
        group = request.getfixturevalue("group")
        group.scheduler = Scheduler(group.engine.shapes)


def ask(name, prompt, max_tokens=9, temperature=1.0, stop=NEVER):
    key = stream_key("test", name)
    return Request(str(name), "solver", list(prompt), "", key, max_tokens, temperature, tuple(stop))


def prompt(name, length):
    return np.random.default_rng(stream_key(name).tolist()).integers(0, TINY.vocab, length).tolist()


def play(group, requests, per_poll=None):
    """Completions by id; `per_poll` requests arrive at a time."""
    waiting, done, polls = list(requests), {}, 0
    while waiting or group.scheduler.busy:
        polls += 1
        assert polls < 3000, "an engine that never finishes"
        now, waiting = (waiting[:per_poll], waiting[per_poll:]) if per_poll else (waiting, [])
        group.submit(now)
        for completion in group.poll():
            assert completion.id not in done
            done[completion.id] = completion
    return done


def said(completion):
    return completion.tokens, completion.logprobs, completion.finish


def crowd(count=30):
    """Ragged requests, some of which share beginnings of several chunks, some all of a prompt."""
    shared = prompt("shared", 50)
    requests = []
    for i in range(count):
        own = prompt(i, 1 + (7 * i) % 40)
        start = shared[: (CHUNK, 33, 48, 50, 0)[i % 5]]
        tokens = shared if i % 10 == 9 else start + own
        requests.append(ask(i, tokens, max_tokens=1 + (5 * i) % 13, temperature=(1.0, 0.7, 1.3)[i % 3]))
    return requests


def full_forward(group, sequences, temperature=None):
    """Log-probability of each token given those before it, by the forward pass of training."""
    length = CONTEXT
    tokens = np.zeros((len(sequences), length), np.int32)
    segments = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
    warmth = np.ones((len(sequences), 1)) if temperature is None else np.asarray(temperature)[:, None]

    @jax.jit
    def logprobs(params, tokens, segments, warmth):
        positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
        hidden = transformer.forward(group.config, params, tokens, positions, segments, dtype=jnp.float32)
        logits = transformer.head_logits(group.config, params, hidden, dtype=jnp.float32) / warmth[:, :, None]
        logs = jax.nn.log_softmax(logits)[:, :-1]
        return jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[:, :, 0]

    return np.pad(np.asarray(logprobs(group.params, tokens, segments, warmth.astype(np.float32))), ((0, 0), (1, 0)))


def test_a_request_gets_the_same_bits_alone_in_a_crowd_in_any_order_with_and_without_reuse(group):
    requests = crowd()
    together = play(group, requests)
    assert group.scheduler.reused_tokens > 0
    for request in requests[::6]:
        group.scheduler = Scheduler(group.engine.shapes)
        assert said(play(group, [request])[request.id]) == said(together[request.id])
    for seed, per_poll in ((1, 30), (2, 3)):
        group.scheduler = Scheduler(group.engine.shapes)
        shuffled = [requests[i] for i in np.random.default_rng(seed).permutation(len(requests))]
        again = play(group, shuffled, per_poll)
        assert {i: said(c) for i, c in again.items()} == {i: said(c) for i, c in together.items()}
    group.scheduler = Scheduler(group.engine.shapes, reuse=False)
    afresh = play(group, requests)
    assert group.scheduler.reused_tokens == 0
    assert {i: said(c) for i, c in afresh.items()} == {i: said(c) for i, c in together.items()}


def test_a_request_gets_the_same_bits_after_other_weights_were_there(group):
    requests = crowd(10)
    before = play(group, requests)
    own = group._frozen
    group._frozen = jax.tree.map(lambda x: x * 1.5, own)
    group.push()
    between = play(group, requests)
    assert {i: said(c) for i, c in between.items()} != {i: said(c) for i, c in before.items()}
    group._frozen = own
    group.push()
    assert {i: said(c) for i, c in play(group, requests).items()} == {i: said(c) for i, c in before.items()}


def test_few_pages_change_no_bits(group, model):
    requests = crowd()
    plenty = play(group, requests)
    tight = LocalGroup("team", Base(str(model)), make_mesh(1, 1, 1), dtype="float32", seed=0)
    tight.add_sampler(replace(ENGINE, pages=1))
    tight.load()
    tight.push()
    assert tight.engine.shapes.pages < group.engine.shapes.pages
    assert {i: said(c) for i, c in play(tight, requests).items()} == {i: said(c) for i, c in plenty.items()}


def test_the_logprob_of_every_sampled_token_is_that_of_the_full_forward(group):
    requests = crowd()
    done = play(group, requests)
    truth = full_forward(
        group, [r.prompt + done[r.id].tokens for r in requests], [request.temperature for request in requests]
    )
    for row, request in zip(truth, requests, strict=True):
        begin, tokens = len(request.prompt), done[request.id].tokens
        np.testing.assert_allclose(done[request.id].logprobs, row[begin : begin + len(tokens)], atol=1e-4)


def test_what_shares_the_experts_of_a_request_changes_none_of_its_bits(tmp_path):
    group = sampler(save_model(tmp_path / "moe", config=EXPERTS))
    requests = crowd()
    together = play(group, requests)
    for request in requests[::6]:
        group.scheduler = Scheduler(group.engine.shapes)
        assert said(play(group, [request])[request.id]) == said(together[request.id])
    truth = full_forward(
        group, [r.prompt + together[r.id].tokens for r in requests], [request.temperature for request in requests]
    )
    for row, request in zip(truth, requests, strict=True):
        begin, tokens = len(request.prompt), together[request.id].tokens
        np.testing.assert_allclose(together[request.id].logprobs, row[begin : begin + len(tokens)], atol=1e-4)


@pytest.mark.parametrize("kind", ["whole", "windowed"])
def test_a_prompt_that_ends_at_in_and_after_a_chunk_is_read_whole(kind, group, tmp_path):
    if kind == "windowed":
        group = sampler(save_model(tmp_path / "gemma", config=GEMMA))
    sizes = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, CONTEXT - 9]
    requests = [ask(f"edge{size}", prompt(f"edge{size}", size)) for size in sizes]
    done = play(group, requests)
    truth = full_forward(group, [r.prompt + done[r.id].tokens for r in requests])
    for row, size, request in zip(truth, sizes, requests, strict=True):
        np.testing.assert_allclose(done[request.id].logprobs, row[size : size + 9], atol=1e-4)


def test_one_token_takes_no_decode_step_and_leaves_the_cache_beyond_the_prompt_alone(group):
    shapes, engine, params = group.engine.shapes, group.engine, group._sampler_params
    scheduler = Scheduler(shapes)
    request = ask("one", prompt("one", CHUNK + 3), max_tokens=1)
    scheduler.submit([request])
    state = engine.init_decode_state()
    while (work := scheduler.prefill_work()) is not None:
        state, hidden = engine.prefill(params, state, work)
        scheduler.prefilled(hidden)
    ((slot, prefix, _),) = scheduler.insertions()
    pages = [np.asarray(layer)[prefix.pages].reshape(-1, *layer.shape[2:]) for layer in state.device.pool["k"]]
    state, block = engine.generate(params, engine.insert(prefix, state, slot, request))
    assert block.valid.sum() == 1
    assert block.valid[slot, 0]
    for page, layer in zip(pages, state.device.cache["k"], strict=True):
        np.testing.assert_array_equal(np.asarray(layer)[slot, : len(page)], page)
    assert not np.asarray(state.device.slots.active).any()
    (completion,) = scheduler.decoded(block.tokens, block.logprobs, block.valid)
    assert (len(completion.tokens), completion.finish) == (1, "length")
    kept = jax.tree.map(np.asarray, state.device.cache)
    state, block = engine.generate(params, state)
    assert not block.valid.any()
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, state.device.cache))


def test_exactly_as_many_tokens_come_as_were_asked_for(group):
    sizes = range(1, 3 * BLOCK + 3)
    done = play(group, [ask(f"n{n}", prompt("same", 20), max_tokens=n) for n in sizes])
    for n in sizes:
        completion = done[f"n{n}"]
        assert (len(completion.tokens), completion.finish) == (n, "length")
        assert len(completion.logprobs) == len(completion.versions) == n


def test_a_stop_id_ends_a_request_early_is_returned_and_has_a_logprob(group):
    free = play(group, [ask("free", prompt("stop", 20), max_tokens=12)])["free"]
    for place in (0, 3, BLOCK, BLOCK + 1, 11):
        stop = free.tokens[place]
        first = free.tokens.index(stop)
        (done,) = play(group, [replace(ask("free", prompt("stop", 20), 12), stop=(TINY.vocab + 5, stop))]).values()
        assert done.tokens == free.tokens[: first + 1]
        assert done.logprobs == free.logprobs[: first + 1]
        assert done.finish == "stop"


def test_each_of_several_stop_ids_stops(group):
    free = [play(group, [ask(i, prompt("several", 20), max_tokens=12)])[str(i)].tokens for i in range(6)]
    stops = tuple({tokens[2] for tokens in free})
    assert len(stops) > 2
    for i, tokens in enumerate(free):
        done = play(group, [ask(i, prompt("several", 20), max_tokens=12, stop=stops)])[str(i)]
        cut = next(place for place, token in enumerate(tokens) if token in stops)
        assert (done.tokens, done.finish) == (tokens[: cut + 1], "stop")


def test_padding_that_is_also_the_stop_id_is_sampled_returned_and_scored(group):
    """Padding is id 0; a model whose end of turn is id 0 too stops at it and gets its log-probability."""
    requests = [ask(("pad", i), prompt("pad", 20), max_tokens=40, stop=(0,)) for i in range(60)]
    stopped = [c for c in play(group, requests).values() if c.finish == "stop"]
    assert stopped
    truth = full_forward(group, [prompt("pad", 20) + c.tokens for c in stopped])
    for row, completion in zip(truth, stopped, strict=True):
        assert completion.tokens[-1] == 0
        assert 0 not in completion.tokens[:-1]
        assert len(completion.logprobs) == len(completion.tokens)
        np.testing.assert_allclose(completion.logprobs, row[20 : 20 + len(completion.tokens)], atol=1e-4)


def test_first_tokens_and_second_ones_come_as_often_as_the_softmax_says(group):
    """Chi-square of 4000 keys over the likeliest tokens and the rest; p of such a failure below 1e-4."""
    start, count = prompt("histogram", 20), 4000
    done = play(group, [ask(("h", i), start, max_tokens=2) for i in range(count)])
    tokens = np.array([completion.tokens for completion in done.values()])
    given = {i: c.logprobs[0] for i, c in ((c.tokens[0], c) for c in done.values())}
    assert sum(np.exp(p) for p in given.values()) <= 1 + 1e-4
    probability = np.zeros(TINY.vocab)
    probability[list(given)] = np.exp(list(given.values()))
    assert chi_square(tokens[:, 0], probability) < 75  # 30 degrees of freedom
    most = Counter(tokens[:, 0].tolist()).most_common(1)[0][0]
    second = tokens[tokens[:, 0] == most, 1]
    rows = full_forward(group, [[*start, most, token] for token in range(TINY.vocab)])
    assert chi_square(second, np.exp(rows[:, 21])) < 75
    # Noise of one token that came back in the next would make it repeat itself too often.
    repeats = np.exp(full_forward(group, [[*start, token, token] for token in range(TINY.vocab)])[:, 21])[tokens[:, 0]]
    seen, expected, spread = (tokens[:, 0] == tokens[:, 1]).sum(), repeats.sum(), (repeats * (1 - repeats)).sum() ** 0.5
    assert abs(seen - expected) < 4 * spread + 1


def chi_square(drawn, probability, bins=30):
    top = np.argsort(-probability)[:bins]
    expected = np.append(probability[top], 1 - probability[top].sum()) * len(drawn)
    observed = np.bincount(drawn, minlength=TINY.vocab)[top]
    observed = np.append(observed, len(drawn) - observed.sum())
    keep = expected > 1
    return (((observed - expected) ** 2 / expected)[keep]).sum()


def test_the_samples_of_a_group_differ_and_rerun_identically(group):
    requests = [ask(("twin", i), prompt("twin", 20), max_tokens=12) for i in range(SLOTS)]
    done = play(group, requests)
    assert len({tuple(completion.tokens) for completion in done.values()}) == SLOTS
    assert {i: said(c) for i, c in play(group, requests).items()} == {i: said(c) for i, c in done.items()}


def test_temperature_0_takes_the_best_token_and_reports_its_logprob_at_temperature_1(group):
    done = play(group, [ask("greedy", prompt("greedy", 20), max_tokens=8, temperature=0.0)])["greedy"]
    again = play(group, [ask("another key", prompt("greedy", 20), max_tokens=8, temperature=0.0)])["another key"]
    assert done.tokens == again.tokens
    truth = full_forward(group, [prompt("greedy", 20) + done.tokens])[0, 20:28]
    np.testing.assert_allclose(done.logprobs, truth, atol=1e-4)
    others = full_forward(group, [[*prompt("greedy", 20), token] for token in range(TINY.vocab)])[:, 20]
    assert others.argmax() == done.tokens[0]


def test_two_programs_are_compiled_and_none_after_warm_up(group):
    play(group, crowd(3))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compiled.append(name) if name == "/jax/core/compile/backend_compile_duration" else None
    )
    try:
        play(group, crowd(20), per_poll=2)
        group.push()
        play(group, [ask("new", prompt("new", 100), max_tokens=20, temperature=0.0, stop=(1, 2, 3))])
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
    assert group.engine.prefill_program._cache_size() == 1
    assert group.engine.generate_program._cache_size() == 1


def test_the_counter_of_compilations_counts(group):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compiled.append(name) if name == "/jax/core/compile/backend_compile_duration" else None
    )
    try:
        jax.jit(lambda x: x * 3 - 1)(np.arange(11))
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled


def test_a_cancelled_request_frees_its_slot_and_disturbs_nobody(group):
    requests = [ask(i, prompt(i, 20), max_tokens=30) for i in range(SLOTS)]
    alone = play(group, requests)
    group.submit(requests)
    assert group.poll() == []
    group.cancel(["2", "5"])
    rest = {}
    later = ask("later", prompt("later", 25), max_tokens=5)
    group.submit([later])
    while group.scheduler.busy:
        rest |= {completion.id: completion for completion in group.poll()}
    assert set(rest) == {str(i) for i in range(SLOTS)} - {"2", "5"} | {"later"}
    assert all(said(rest[i]) == said(alone[i]) for i in rest if i != "later")
    assert not np.asarray(group._decode.device.slots.active).any()
    group.scheduler = Scheduler(group.engine.shapes)
    assert said(play(group, [later])["later"]) == said(rest["later"])


def test_a_freed_slot_stops_on_the_device(group):
    group.submit([ask(i, prompt(i, 20), max_tokens=60) for i in range(2)])
    group.poll()
    assert np.asarray(group._decode.device.slots.active).sum() == 2
    group.cancel(["0", "1"])
    group.submit([ask("next", prompt("next", 20), max_tokens=1)])
    play(group, [])
    assert np.asarray(group._decode.device.slots.active).sum() == 0


def test_weights_may_not_change_while_requests_are_live(group):
    group.submit([ask(0, prompt(0, 20), max_tokens=60)])
    group.poll()
    with pytest.raises(RuntimeError, match="may not change"):
        group.push()
    group.cancel(["0"])
    group.push()
    play(group, [ask(1, prompt(0, 20))])


def test_a_context_beyond_the_model_and_slots_that_do_not_divide_are_config_errors(group):
    long = replace(group.engine.shapes, context=2 * TINY.max_positions)
    with pytest.raises(ConfigError, match=r"rollout\.context = 256"):
        NativeEngine(TINY, long, dtype=jnp.dtype("float32"), mesh=group.mesh)
    with pytest.raises(ConfigError, match=r"rollout\.slots = 6"):
        NativeEngine(TINY, replace(group.engine.shapes, slots=6), dtype=jnp.dtype("float32"), mesh=make_mesh(2, 2, 2))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4)], ids=["each with a key head", "key heads whole"])
def test_eight_devices_say_what_one_says(group, model, sizes):
    requests = crowd(12)
    spread = sampler(model, sizes)
    done = play(spread, requests)
    truth = full_forward(
        group, [r.prompt + done[r.id].tokens for r in requests], [request.temperature for request in requests]
    )
    for row, request in zip(truth, requests, strict=True):
        begin, tokens = len(request.prompt), done[request.id].tokens
        np.testing.assert_allclose(done[request.id].logprobs, row[begin : begin + len(tokens)], atol=1e-4)
    one = play(group, requests)
    assert np.mean([done[r.id].tokens == one[r.id].tokens for r in requests]) > 0.9
