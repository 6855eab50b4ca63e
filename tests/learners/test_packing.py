"""Packing loses nothing, mixes nothing, and can be undone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.learners.packing import FIELDS, TrainRow, pack, unpack

LENGTHS = (4, 8, 16)


def row(role, size, seed, temperature=1.0):
    """A row in which every number differs from those of other rows."""
    draw = np.random.default_rng(seed)
    values = {name: draw.normal(size=size).astype(np.float32) for name in FIELDS}
    tokens = draw.integers(1, 10**6, size).astype(np.int32)
    return TrainRow(role, tokens, draw.random(size) < 0.5, temperature, **values)


@st.composite
def row_lists(draw):
    shapes = draw(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(1, LENGTHS[-1]), st.sampled_from([1.0, 0.5])), max_size=12
        )
    )
    return [row(role, size, i, temperature) for i, (role, size, temperature) in enumerate(shapes)]


@given(row_lists(), st.integers(1, 4))
def test_every_row_lies_in_exactly_one_place_with_all_that_belongs_to_it(rows, lines):
    batches = pack(rows, lines=lines, lengths=LENGTHS)
    assert sorted(i for batch in batches for i, _, _ in batch.places) == list(range(len(rows)))
    for batch in batches:
        covered = np.zeros(batch.arrays["tokens"].shape, int)
        for i, line, start in batch.places:
            own = rows[i]
            at = (line, slice(start, start + len(own.tokens)))
            covered[at] += 1
            assert own.role == batch.role
            for name in ("tokens", "sampled", *FIELDS):
                np.testing.assert_array_equal(batch.arrays[name][at], getattr(own, name))
            assert batch.arrays["positions"][at].tolist() == list(range(len(own.tokens)))
            assert set(batch.arrays["temperature"][at].tolist()) == {own.temperature}
            assert len(set(batch.arrays["segments"][at].tolist())) == 1
        assert covered.max() == 1
        padding = covered == 0
        assert (batch.arrays["segments"] > 0).tolist() == (covered == 1).tolist()
        for name in ("tokens", "positions", "sampled", *FIELDS):
            assert not batch.arrays[name][padding].any()
        assert (batch.arrays["temperature"][padding] == 1).all()


@given(row_lists(), st.integers(1, 4))
def test_segments_of_a_line_count_up_from_one(rows, lines):
    for batch in pack(rows, lines=lines, lengths=LENGTHS):
        for line in range(lines):
            starts = sorted(start for _, at, start in batch.places if at == line)
            segments = [int(batch.arrays["segments"][line, start]) for start in starts]
            assert segments == list(range(1, len(starts) + 1))


@given(row_lists(), st.integers(1, 4))
def test_a_batch_has_one_role_and_a_row_goes_to_the_shortest_length_that_holds_it(rows, lines):
    batches = pack(rows, lines=lines, lengths=LENGTHS)
    assert [batch.role for batch in batches] == sorted(batch.role for batch in batches)
    for batch in batches:
        shape = batch.arrays["tokens"].shape
        assert shape[0] == lines and {array.shape for array in batch.arrays.values()} == {shape}
        for i, _, _ in batch.places:
            assert shape[1] == next(length for length in LENGTHS if length >= len(rows[i].tokens))


@given(row_lists(), st.integers(1, 4))
def test_unpacking_what_was_packed_gives_the_rows(rows, lines):
    into = [None] * len(rows)
    for batch in pack(rows, lines=lines, lengths=LENGTHS):
        unpack(batch, batch.arrays["tokens"] * 3, rows, into)
    for own, back in zip(rows, into, strict=True):
        np.testing.assert_array_equal(back, own.tokens * 3)


@given(row_lists(), st.integers(0, 9))
def test_the_order_of_rows_does_not_change_how_much_room_they_take(rows, seed):
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = pack([rows[i] for i in order], lines=2, lengths=LENGTHS)
    shapes = [(batch.role, batch.arrays["tokens"].shape, int(batch.arrays["sampled"].size)) for batch in shuffled]
    assert shapes == [
        (b.role, b.arrays["tokens"].shape, int(b.arrays["sampled"].size)) for b in pack(rows, lines=2, lengths=LENGTHS)
    ]
    for name in ("tokens", *FIELDS):
        totals = [
            np.sort(np.concatenate([b.arrays[name][b.arrays["segments"] > 0] for b in batches])) if batches else []
            for batches in (shuffled, pack(rows, lines=2, lengths=LENGTHS))
        ]
        np.testing.assert_array_equal(*totals)


def test_short_rows_share_a_line_longest_first():
    (batch,) = pack([row("a", 2, 0), row("a", 6, 1), row("a", 8, 2)], lines=2, lengths=(8,))
    assert sorted(batch.places) == [(0, 1, 6), (1, 1, 0), (2, 0, 0)]
    assert batch.arrays["segments"].tolist() == [[1] * 8, [1] * 6 + [2] * 2]
    assert batch.arrays["positions"].tolist() == [list(range(8)), [0, 1, 2, 3, 4, 5, 0, 1]]


def test_a_row_longer_than_every_length_is_an_error_that_names_the_setting():
    with pytest.raises(
        ValueError, match=r"a row of judge has 17 tokens; learner\.lengths = \(4, 8, 16\) hold at most 16"
    ):
        pack([row("judge", 17, 0)], lines=2, lengths=LENGTHS)


@pytest.mark.parametrize("name", ["tokens", "sampled", *FIELDS])
def test_arrays_of_a_row_that_differ_in_length_are_an_error(name):
    arrays = {n: getattr(row("a", 3, 0), n) for n in ("tokens", "sampled", *FIELDS)}
    arrays[name] = arrays[name][:2]
    with pytest.raises(ValueError, match=rf"a row of a: .*'{name}': 2"):
        TrainRow(role="a", temperature=1.0, **arrays)
