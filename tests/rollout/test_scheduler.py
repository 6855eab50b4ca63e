"""The scheduler against an engine of plain tuples that knows what every page must hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.rollout.driver import Request
from mas_jax.rollout.scheduler import MAX_STOP_IDS, Scheduler, Shapes

STOP = 99


def request(id, prompt, *, max_tokens=3, stop=(STOP,), gate=None):
    gate = None if gate is None else np.asarray(gate, np.float32)
    return Request(id, "solver", list(prompt), "", np.zeros(2, np.uint32), max_tokens, 1.0, tuple(stop), gate)


def shapes(*, slots=2, chunks=4, chunk=4, prefill_rows=2, block=2, pages=0):
    return Shapes(
        slots, chunks * chunk, prefill_rows, chunk, block, pages or slots * chunks + prefill_rows * chunks + 1
    )


def said(request):
    """What the fake model answers: numbers of its own, and a stop id where the last digits of the id put one."""
    length = sum(map(ord, request.id)) % 7 + 1
    return [*range(1, length), request.stop[0]][: request.max_tokens]


class Group:
    """Scheduler and fake engine, polled as a policy group is."""

    def __init__(self, sizes=None, *, reuse=True):
        self.sizes = sizes or shapes()
        self.scheduler = Scheduler(self.sizes, reuse=reuse)
        self.pool = {}  # page -> every token to the end of its chunk
        self.gates = {}  # page -> the gate of whoever used it since it was written
        self.slots = {}
        self.operations = []

    def submit(self, *requests):
        self.scheduler.submit(requests)

    def prefill(self, work):
        c, before = self.sizes.chunk, dict(self.pool)
        written = [page for page in work.write.tolist() if page]
        assert len(set(written)) == len(written) > 0, "an operation writes something, and no page twice"
        hidden = np.zeros((self.sizes.prefill_rows, 1))
        for row, page in enumerate(work.write.tolist()):
            if page == 0:
                continue
            assert work.start[row] % c == 0, "chunks start at multiples of c"
            held = work.start[row] // c
            context = before[int(work.table[row, held - 1])] if held else ()
            for k in range(held):
                assert before[int(work.table[row, k])] == context[: (k + 1) * c]
            assert not work.table[row, held:].any()
            self.pool[page] = context + tuple(work.tokens[row, : work.last[row] + 1].tolist())
            self.gates.pop(page, None)
            hidden[row] = len(self.pool[page])
        self.operations.append(work)
        self.scheduler.prefilled(hidden)

    def insert(self, slot, prefix, request):
        assert slot not in self.slots, "a slot is filled when it is empty"
        prompt, c = tuple(request.prompt), self.sizes.chunk
        assert prefix.length == len(prompt) and len(prefix.pages) == -(-len(prompt) // c)
        for k, page in enumerate(prefix.pages):
            assert page != 0 and self.pool[page] == prompt[: (k + 1) * c], "the pages are those of the prompt"
            gate = None if request.gate is None else request.gate.tolist()
            assert self.gates.setdefault(page, gate) == gate, "one adapter's page serves another"
        assert prefix.hidden.tolist() == [len(prompt)]
        self.slots[slot] = (request, said(request))

    def generate(self, new):
        s = self.sizes
        tokens, logprobs = np.full((s.slots, s.block + 1), 777), np.full((s.slots, s.block + 1), np.nan)
        valid = np.zeros((s.slots, s.block + 1), bool)
        for slot, (_, rest) in list(self.slots.items()):
            columns = range(0 if slot in new else 1, s.block + 1)
            for column, token in zip(columns, list(rest), strict=False):
                tokens[slot, column], logprobs[slot, column], valid[slot, column] = token, -token / 100, True
                rest.pop(0)
            if not rest:
                del self.slots[slot]
        return tokens, logprobs, valid

    def poll(self):
        if not self.scheduler.busy:
            return []
        for _ in range(1000):
            if (work := self.scheduler.prefill_work()) is None:
                break
            self.prefill(work)
        else:
            raise AssertionError("prefill without end")
        for slot in self.scheduler.freed():
            self.slots.pop(slot, None)
        placed = self.scheduler.insertions()
        for slot, prefix, one in placed:
            self.insert(slot, prefix, one)
        return self.scheduler.decoded(*self.generate({slot for slot, _, _ in placed}))

    def drain(self):
        done = []
        for _ in range(1000):
            if not self.scheduler.busy:
                return done
            done += self.poll()
        raise AssertionError("requests without end")

    def check_pages(self):
        """Nothing is held, and every page but the scratch page is free or cached, once."""
        chunks = self.scheduler._chunks
        pages = self.scheduler._free_pages + [chunk.page for chunk in chunks.values()]
        assert sorted(pages) == list(range(1, self.sizes.pages))
        assert all(chunk.users == 0 for chunk in chunks.values())


def check_completion(done, asked):
    wanted = said(asked)
    assert (done.id, done.tokens) == (asked.id, wanted)
    assert done.logprobs == pytest.approx([-token / 100 for token in wanted])
    assert done.finish == ("stop" if wanted[-1] in asked.stop else "length")
    assert len(done.versions) == len(wanted)


@st.composite
def cases(draw):
    """Tiny engines with hardly a page to spare, prompts that share prefixes, arrivals in waves. Plain numbers: the type checker
    draws random ones, which a strategy must not."""
    chunk, chunks, rows = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    chunks = max(chunks, 2) if chunk == 1 else chunks
    sizes = {
        "slots": draw(st.integers(1, 4)), "chunks": chunks, "chunk": chunk, "prefill_rows": rows,
        "block": draw(st.integers(1, 3)), "pages": rows * chunks + 1 + draw(st.integers(0, 4)),
    }  # fmt: skip
    asked = st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=chunk * chunks - 1),
        st.integers(1, chunk * chunks),
        st.sampled_from([None, [1.0, 0.0], [0.0, 1.0]]),
    )
    waves = draw(st.lists(st.tuples(st.lists(asked, max_size=6), st.integers(0, 3)), min_size=1, max_size=4))
    return sizes, waves, draw(st.booleans())


def built(case):
    """Group and waves of requests, as `cases` drew them."""
    sizes, waves, reuse = case
    group, ready = Group(shapes(**sizes), reuse=reuse), []
    for wave, (asked, polls) in enumerate(waves):
        requests = [
            request(f"{wave}.{i}", prompt, max_tokens=min(new, group.sizes.context - len(prompt)), gate=gate)
            for i, (prompt, new, gate) in enumerate(asked)
        ]
        ready.append((requests, polls))
    return group, ready, reuse


@settings(max_examples=150)
@given(cases())
def test_every_request_gets_all_its_tokens_once_and_no_page_is_lost_or_overwritten_while_needed(case):
    (group, waves, reuse), done = built(case), []
    for asked, polls in waves:
        group.submit(*asked)
        for _ in range(polls):
            done += group.poll()
    done += group.drain()
    everything = [one for asked, _ in waves for one in asked]
    assert sorted(c.id for c in done) == sorted(one.id for one in everything)
    by_id = {one.id: one for one in everything}
    for completion in done:
        check_completion(completion, by_id[completion.id])
    group.check_pages()
    prompts = sum(len(one.prompt) for one in everything)
    assert group.scheduler.prefilled_tokens + group.scheduler.reused_tokens == prompts
    if not reuse:
        assert group.scheduler.reused_tokens == 0 and not group.scheduler._chunks


@settings(max_examples=150)
@given(cases(), st.data())
def test_what_is_cancelled_in_any_state_leaves_nothing_behind_and_disturbs_no_one(case, data):
    (group, waves, _), done, cancelled = built(case), [], set()
    everything = {one.id: one for asked, _ in waves for one in asked}
    for asked, polls in waves:
        group.submit(*asked)
        for _ in range(polls + 1):
            alive = [one.id for one in asked if one.id not in {c.id for c in done}]
            gone = set(data.draw(st.lists(st.sampled_from(alive), max_size=3))) if alive else set()
            group.scheduler.cancel(sorted(gone))
            cancelled |= gone
            done += group.poll()
    done += group.drain()
    assert sorted(c.id for c in done) == sorted(everything.keys() - cancelled)
    for completion in done:
        check_completion(completion, everything[completion.id])
    for slot in group.scheduler.freed():
        group.slots.pop(slot, None)
    group.check_pages()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13])
def test_prompts_at_and_around_a_multiple_of_the_chunk_are_prefilled_whole(length):
    group = Group()
    prompt = list(range(10, 10 + length))
    group.submit(request("a", prompt))
    (done,) = group.drain()
    check_completion(done, request("a", prompt))
    starts = [int(work.start[0]) for work in group.operations]
    assert starts == list(range(0, length, 4))
    assert [int(work.last[0]) + 1 for work in group.operations] == [min(4, length - start) for start in starts]


def test_a_prompt_shared_by_a_group_is_prefilled_once_and_inserted_many_times():
    group = Group(shapes(slots=8))
    group.submit(*[request(f"s{i}", range(10)) for i in range(8)])
    assert len(group.drain()) == 8
    assert (group.scheduler.prefilled_tokens, group.scheduler.reused_tokens) == (10, 70)


def test_the_next_turn_reuses_the_whole_chunks_of_the_last_and_prefills_the_rest():
    group = Group()
    group.submit(request("t0", range(10)))
    group.drain()
    group.submit(request("t1", range(13)))
    group.drain()
    # Chunks 0-3 and 4-7 are there; the third was prefilled with two tokens only, and is prefilled again.
    assert (group.scheduler.prefilled_tokens, group.scheduler.reused_tokens) == (10 + 5, 8)
    group.submit(request("t2", range(10)), request("t3", range(8)))
    group.drain()
    assert (group.scheduler.prefilled_tokens, group.scheduler.reused_tokens) == (15, 8 + 10 + 8)


def test_tokens_in_the_middle_are_not_a_prefix():
    group = Group()
    group.submit(
        request("a", [1, 2, 3, 4, 5, 6, 7, 8]), request("b", [5, 6, 7, 8]), request("c", [9, 2, 3, 4, 5, 6, 7, 8])
    )
    group.drain()
    assert group.scheduler.reused_tokens == 0


def test_adapters_never_share_what_they_prefilled():
    group = Group()
    for number, gate in enumerate([None, [1.0, 0.0], [0.0, 1.0], [0.5, 0.0], [0.0, 0.0]]):
        group.submit(request(f"g{number}", range(8), gate=gate))
        group.drain()
    assert group.scheduler.reused_tokens == 0
    group.submit(request("again", range(8), gate=[0.0, 1.0]))
    group.drain()
    assert group.scheduler.reused_tokens == 8


def test_a_gate_is_never_taken_for_tokens():
    # The bytes of four float zeros are those of four tokens of id 0.
    group = Group()
    group.submit(request("tokens", [0, 0, 0, 0, 5, 6, 7, 8]))
    group.drain()
    group.submit(request("gate", [5, 6, 7, 8], gate=[0.0] * 4))
    group.drain()
    assert group.scheduler.reused_tokens == 0


def test_without_reuse_nothing_is_ever_shared():
    group = Group(reuse=False)
    group.submit(*[request(f"s{i}", range(8)) for i in range(4)])
    group.drain()
    assert (group.scheduler.prefilled_tokens, group.scheduler.reused_tokens) == (32, 0)
    assert not group.scheduler._chunks


def test_new_weights_forget_what_was_prefilled_and_stamp_what_follows():
    group = Group()
    group.submit(request("a", range(8)))
    assert set(group.drain()[0].versions) == {0}
    group.scheduler.new_version(5)
    group.check_pages()
    group.pool.clear()
    group.submit(request("b", range(8)))
    assert set(group.drain()[0].versions) == {5}
    assert (group.scheduler.prefilled_tokens, group.scheduler.reused_tokens) == (16, 0)


@pytest.mark.parametrize("polls", [0, 1])
def test_weights_may_not_change_while_a_request_is_live(polls):
    group = Group(shapes(block=1))
    group.submit(request("e", range(3), max_tokens=8))
    for _ in range(polls):
        group.poll()
    with pytest.raises(RuntimeError, match="may not change while requests are being sampled"):
        group.scheduler.new_version(1)


def test_max_tokens_1_takes_one_token_and_no_decode_step():
    group = Group()
    group.submit(request("e", range(3), max_tokens=1))
    (done,) = group.poll()
    assert (len(done.tokens), done.finish) == (1, "length")
    assert not group.scheduler.busy


def test_any_of_several_stop_ids_ends_a_request_and_the_limit_reached_by_one_is_a_stop():
    sizes = shapes(slots=1, block=3)
    for stop in ((5, 6), (6, 5)):
        scheduler = Scheduler(sizes)
        scheduler.submit([request("a", [1, 2], max_tokens=3, stop=(4, *stop))])
        scheduler.prefilled(np.zeros((2, 1))) if scheduler.prefill_work() else None
        assert len(scheduler.insertions()) == 1
        tokens = np.array([[1, 2, 6, 777]])
        (done,) = scheduler.decoded(tokens, -tokens / 1.0, np.array([[True, True, True, False]]))
        assert (done.tokens, done.finish) == ([1, 2, 6], "stop")


def test_one_slot_serves_requests_in_order_of_arrival():
    group = Group(shapes(slots=1))
    group.submit(*[request(f"{i}", range(i, i + 6)) for i in range(12)])
    assert [done.id for done in group.drain()] == [f"{i}" for i in range(12)]


def test_no_prefill_runs_while_every_slot_is_busy():
    group = Group(shapes(slots=1, block=1))
    group.submit(request("e", range(3), max_tokens=8))
    group.poll()
    assert group.scheduler.decoding
    group.submit(request("later", range(9)))
    assert group.scheduler.prefill_work() is None


@pytest.mark.parametrize("state", ["waiting", "prefilled", "decoding"])
def test_a_cancelled_request_never_completes_and_its_slot_serves_the_next(state):
    group = Group(shapes(slots=1, block=1))
    first = request("e", range(3), max_tokens=8)
    group.submit(*([request("0", [7], max_tokens=8)] if state == "prefilled" else []), first)
    if state == "prefilled":
        group.poll()
    if state == "decoding":
        assert group.poll() == [] and 0 in group.slots
    group.scheduler.cancel(["e"])
    group.submit(request("next", [1, 2, 3]))
    done = group.drain()
    assert "e" not in [c.id for c in done] and done[-1].id == "next"
    check_completion(done[-1], request("next", [1, 2, 3]))
    group.check_pages()


def test_a_request_that_cannot_fit_is_refused_with_its_sizes():
    group = Group()
    for prompt, new in ((range(14), 3), ([], 3)):
        with pytest.raises(ValueError, match=rf"request big: prompt of {len(prompt)} \+ 3 new tokens .* context of 16"):
            group.submit(request("big", prompt, max_tokens=new))
    group.submit(request("fits", range(13), max_tokens=3))
    with pytest.raises(ValueError, match=r"9 stop ids, at most 8"):
        group.submit(request("stops", [1], stop=range(MAX_STOP_IDS + 1)))


def test_the_slot_of_a_cancelled_request_takes_no_one_until_the_engine_has_been_told():
    group = Group(shapes(slots=1, block=1))
    group.submit(request("e", range(3), max_tokens=8), request("next", range(3)))
    group.poll()
    group.scheduler.cancel(["e"])
    assert group.scheduler.prefill_work() is None
    assert group.scheduler.insertions() == []
    assert group.scheduler.freed() == [0]
    assert [(slot, one.id) for slot, _, one in group.scheduler.insertions()] == [(0, "next")]
