"""Sequences into micro-batches of fixed shape. Numpy only.

A line of a micro-batch holds one or more sequences of one role, end to end, told apart by segment ids (0 is padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class TrainRow:
    """One sequence as the learner sees it: all arrays [T], aligned with `tokens`, zero where they do not apply.

    `weight` is the share of each token in the loss, 0 for context. `old_logprobs` are those of the policy before the update,
    `ref_logprobs` those of the reference.
    """

    role: str
    tokens: np.ndarray
    sampled: np.ndarray
    temperature: float
    advantage: np.ndarray
    weight: np.ndarray
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray

    def __post_init__(self) -> None:
        names = ("tokens", "sampled", "advantage", "weight", "old_logprobs", "ref_logprobs")
        lengths = {name: len(self.__dict__[name]) for name in names}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a row of {self.role}: arrays differ in length: {lengths}")


FIELDS = {"advantage": np.float32, "weight": np.float32, "old_logprobs": np.float32, "ref_logprobs": np.float32}


@dataclass
class MicroBatch:
    """Rows of one role in a fixed shape [B, T].

    `arrays` has tokens, positions, segments (int32), sampled (bool), temperature and the fields of a row (float32). `places` says where
    each source row lies: (index, line, start).
    """

    role: str
    arrays: dict[str, np.ndarray]
    places: list[tuple[int, int, int]]


def pack(rows: Sequence[TrainRow], *, lines: int, lengths: Sequence[int]) -> list[MicroBatch]:
    """Micro-batches [lines, T], T out of `lengths`, roles in order of name.

    A row goes to the shortest length that holds it, longest rows first, into the first line with room. Raises ValueError for a row
    longer than every length.
    """
    batches = []
    for role in sorted({row.role for row in rows}):
        mine = [i for i, row in enumerate(rows) if row.role == role]
        for length, own in _by_length(rows, mine, lengths).items():
            packed = _first_fit(rows, own, length)
            for at in range(0, len(packed), lines):
                batches.append(_fill(rows, role, packed[at : at + lines], lines, length))
    return batches


def _by_length(rows: Sequence[TrainRow], indices: Sequence[int], lengths: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i in indices:
        size = len(rows[i].tokens)
        fitting = [length for length in lengths if length >= size]
        if not fitting:
            raise ValueError(
                f"a row of {rows[i].role} has {size} tokens; learner.lengths = {tuple(lengths)} hold at most {lengths[-1]}"
            )
        found.setdefault(fitting[0], []).append(i)
    return dict(sorted(found.items()))


def _first_fit(rows: Sequence[TrainRow], indices: Sequence[int], length: int) -> list[list[int]]:
    """Lines of row indices whose lengths add up to at most `length`."""
    packed: list[list[int]] = []
    room: list[int] = []
    for i in sorted(indices, key=lambda i: -len(rows[i].tokens)):
        size = len(rows[i].tokens)
        place = next((line for line, free in enumerate(room) if free >= size), None)
        if place is None:
            packed.append([])
            room.append(length)
            place = len(packed) - 1
        packed[place].append(i)
        room[place] -= size
    return packed


def _fill(rows: Sequence[TrainRow], role: str, packed: Sequence[Sequence[int]], lines: int, length: int) -> MicroBatch:
    shape = (lines, length)
    arrays = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segments")}
    arrays |= {name: np.zeros(shape, dtype) for name, dtype in FIELDS.items()}
    arrays |= {"sampled": np.zeros(shape, bool), "temperature": np.ones(shape, np.float32)}
    places = []
    for line, members in enumerate(packed):
        start = 0
        for segment, i in enumerate(members, 1):
            row = rows[i]
            at = (line, slice(start, start + len(row.tokens)))
            arrays["tokens"][at] = row.tokens
            arrays["positions"][at] = np.arange(len(row.tokens))
            arrays["segments"][at] = segment
            arrays["sampled"][at] = row.sampled
            arrays["temperature"][at] = row.temperature
            for name in FIELDS:
                arrays[name][at] = row.__dict__[name]
            places.append((i, line, start))
            start += len(row.tokens)
    return MicroBatch(role, arrays, places)


def unpack(batch: MicroBatch, values: np.ndarray, rows: Sequence[TrainRow], into: list[np.ndarray | None]) -> None:
    """Cut [B, T] values of a micro-batch back into rows: into[i] gets row i's [T]."""
    for i, line, start in batch.places:
        into[i] = values[line, start : start + len(rows[i].tokens)]
