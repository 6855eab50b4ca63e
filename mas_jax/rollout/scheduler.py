"""Which engine operation next: continuous batching and prefix reuse. Numpy only; the device is told by lists of plain arrays.

A prompt is a list of chunks of `chunk` tokens, the last one perhaps partial. A chunk is known by a digest of every token up to its
end, and its keys and values live in one page of the engine's pool. Chunks that any request has prefilled serve every later request
that starts with the same tokens: across the samples of a group, the turns of a conversation, and the agents of a policy.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mas_jax.rollout.driver import Completion, Request

MAX_STOP_IDS = 8


@dataclass(frozen=True)
class Shapes:
    """The constants of an engine: S slots, C context, P prefill rows, c chunk, K block, N pages (page 0 is scratch)."""

    slots: int
    context: int
    prefill_rows: int
    chunk: int
    block: int
    pages: int

    @property
    def chunks(self) -> int:
        """Chunks of a full context."""
        return self.context // self.chunk


@dataclass(frozen=True)
class Chunks:
    """One prefill operation: P rows of c tokens, row p at position start[p] of a prompt whose pages are table[p].

    tokens [P, c], start [P], last [P] (index of the last real token), table [P, C/c], write [P] (page that receives the row; 0 for
    an idle row).
    """

    tokens: np.ndarray
    start: np.ndarray
    last: np.ndarray
    table: np.ndarray
    write: np.ndarray


@dataclass(frozen=True)
class Prefix:
    """A prefilled prompt: its pages in order, its length, and the hidden state [D] that predicts the next token."""

    pages: list[int]
    length: int
    hidden: np.ndarray


@dataclass
class _Chunk:
    page: int
    users: int = 0
    hidden: np.ndarray | None = None
    claimed: bool = False


@dataclass
class _Job:
    """A request with the digests of its chunks."""

    request: Request
    keys: list[bytes]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Scheduler:
    """Decides; never computes. `submit` and `cancel` from above, `prefill_work`, `insertions` and `decoded` towards the engine."""

    def __init__(self, shapes: Shapes, *, reuse: bool = True) -> None:
        self.shapes, self.reuse = shapes, reuse
        self.version = 0
        self.prefilled_tokens = self.reused_tokens = 0
        self._waiting: deque[_Job] = deque()
        self._admitted: list[_Job] = []
        self._slots: list[_Job | None] = [None] * shapes.slots
        self._freed: list[int] = []
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._free_pages = list(range(shapes.pages - 1, 0, -1))
        self._in_flight: list[tuple[bytes, int]] = []

    @property
    def busy(self) -> bool:
        """Whether any request is waiting, being prefilled or decoding."""
        return bool(self._waiting or self._admitted or any(self._slots))

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError for one that cannot fit; callers check first."""
        for request in requests:
            if not 1 <= len(request.prompt) <= self.shapes.context - request.max_tokens:
                raise ValueError(
                    f"request {request.id}: prompt of {len(request.prompt)} + {request.max_tokens} new tokens does not fit "
                    f"a context of {self.shapes.context}"
                )
            if len(request.stop) > MAX_STOP_IDS:
                raise ValueError(
                    f"request {request.id}: {len(request.stop)} stop ids, at most {MAX_STOP_IDS} are supported"
                )
            self._waiting.append(_Job(request, self._keys(request)))

    def cancel(self, ids: Sequence[str]) -> None:
        """Forget requests, wherever they are."""
        ids = set(ids)
        self._waiting = deque(job for job in self._waiting if job.request.id not in ids)
        for job in [job for job in self._admitted if job.request.id in ids]:
            self._admitted.remove(job)
            self._release(job)
        for slot, job in enumerate(self._slots):
            if job is not None and job.request.id in ids:
                self._slots[slot] = None
                self._freed.append(slot)

    def new_version(self, version: int) -> None:
        """The weights changed: forget every prefilled chunk. Raises RuntimeError while requests are live."""
        if self.busy:
            raise RuntimeError("the sampler's weights may not change while requests are being sampled")
        self.version = version
        self._chunks.clear()
        self._free_pages = list(range(self.shapes.pages - 1, 0, -1))

    def prefill_work(self) -> Chunks | None:
        """The next prefill operation, if slots stand idle for want of one; rows are filled from all that wait."""
        self._admit()
        ready = sum(self._ready(job) for job in self._admitted)
        if ready >= self._slots.count(None) or ready == len(self._admitted):
            return None
        s = self.shapes
        work = Chunks(
            tokens=np.zeros((s.prefill_rows, s.chunk), np.int32),
            start=np.zeros(s.prefill_rows, np.int32),
            last=np.zeros(s.prefill_rows, np.int32),
            table=np.zeros((s.prefill_rows, s.chunks), np.int32),
            write=np.zeros(s.prefill_rows, np.int32),
        )
        row = 0
        for job in self._admitted:
            if row == s.prefill_rows:
                break
            place = next((i for i, key in enumerate(job.keys) if self._chunks[key].hidden is None), None)
            if place is None or self._chunks[job.keys[place]].claimed:
                continue
            chunk = self._chunks[job.keys[place]]
            chunk.claimed = True
            tokens = job.request.prompt[place * s.chunk : (place + 1) * s.chunk]
            work.tokens[row, : len(tokens)] = tokens
            work.start[row] = place * s.chunk
            work.last[row] = len(tokens) - 1
            work.table[row, :place] = [self._chunks[key].page for key in job.keys[:place]]
            work.write[row] = chunk.page
            self._in_flight.append((job.keys[place], row))
            self.prefilled_tokens += len(tokens)
            row += 1
        return work

    def prefilled(self, hidden: np.ndarray) -> None:
        """Take in what the last prefill operation gave: hidden [P, D] at each row's last token."""
        for key, row in self._in_flight:
            self._chunks[key].hidden = hidden[row]
        self._in_flight.clear()

    def insertions(self) -> list[tuple[int, Prefix, Request]]:
        """Requests that go into free slots now, in order of arrival."""
        free = [slot for slot, job in enumerate(self._slots) if job is None and slot not in self._freed]
        placed = []
        for job in list(self._admitted):
            if not free:
                break
            if self._ready(job):
                slot = free.pop(0)
                chunks = [self._chunks[key] for key in job.keys]
                pages = [chunk.page for chunk in chunks]
                placed.append((slot, Prefix(pages, len(job.request.prompt), chunks[-1].hidden), job.request))
                self._slots[slot] = job
                self._admitted.remove(job)
                self._release(job)
        return placed

    def freed(self) -> list[int]:
        """Slots whose request was cancelled since the last call; the engine must stop them."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def decoding(self) -> bool:
        """Whether any slot is occupied."""
        return any(job is not None for job in self._slots)

    def decoded(self, tokens: np.ndarray, logprobs: np.ndarray, valid: np.ndarray) -> list[Completion]:
        """Take in a block: [S, K+1] ids, log-probs and which of them count. Returns the requests it completed."""
        done = []
        for slot, job in enumerate(self._slots):
            if job is None:
                continue
            keep = valid[slot]
            job.tokens += tokens[slot, keep].tolist()
            job.logprobs += logprobs[slot, keep].tolist()
            request = job.request
            stopped = bool(job.tokens) and job.tokens[-1] in request.stop
            if stopped or len(job.tokens) == request.max_tokens:
                versions = [self.version] * len(job.tokens)
                finish = "stop" if stopped else "length"
                done.append(Completion(request.id, job.tokens, job.logprobs, versions, finish))
                self._slots[slot] = None
        return done

    def _keys(self, request: Request) -> list[bytes]:
        """A digest for each chunk: of all tokens to its end, of the adapters that made it and, without reuse, of the request."""
        # In words, and ended: the bytes of a gate must not read as token ids.
        gate = "" if request.gate is None else request.gate.tobytes().hex()
        running = hashlib.blake2b(f"{gate}|{'' if self.reuse else request.id}|".encode(), digest_size=16)
        prompt = np.asarray(request.prompt, np.int32)
        keys = []
        for start in range(0, len(prompt), self.shapes.chunk):
            piece = prompt[start : start + self.shapes.chunk]
            running.update(piece.tobytes())
            keys.append(running.digest() + len(piece).to_bytes(4, "little"))
        return keys

    def _ready(self, job: _Job) -> bool:
        return all(self._chunks[key].hidden is not None for key in job.keys)

    def _admit(self) -> None:
        """Give pages to waiting requests, first come first served, as far as pages and a look-ahead of one full batch go."""
        while self._waiting and len(self._admitted) < self.shapes.slots + self.shapes.prefill_rows:
            job = self._waiting[0]
            if not self._pin(job):
                return
            self._admitted.append(self._waiting.popleft())

    def _pin(self, job: _Job) -> bool:
        """Hold or allocate a page for each chunk of a job; False, and nothing held, when pages run out."""
        reused = 0
        for place, key in enumerate(job.keys):
            if key not in self._chunks and not self._allocate(key):
                for held in job.keys[:place]:
                    self._chunks[held].users -= 1
                return False
            chunk = self._chunks[key]
            if chunk.users or chunk.hidden is not None:
                reused += min(self.shapes.chunk, len(job.request.prompt) - place * self.shapes.chunk)
            chunk.users += 1
            self._chunks.move_to_end(key)
        self.reused_tokens += reused
        return True

    def _allocate(self, key: bytes) -> bool:
        if not self._free_pages:
            idle = next((k for k, chunk in self._chunks.items() if chunk.users == 0), None)
            if idle is None:
                return False
            self._free_pages.append(self._chunks.pop(idle).page)
        self._chunks[key] = _Chunk(self._free_pages.pop())
        return True

    def _release(self, job: _Job) -> None:
        for key in job.keys:
            chunk = self._chunks[key]
            chunk.users -= 1
            if chunk.users == 0 and (not self.reuse or chunk.hidden is None):
                self._free_pages.append(self._chunks.pop(key).page)
