"""Packing loses nothing, fills rows and keeps groups in one piece."""

import numpy as np
import pytest

from keras_posttrain.data.batches.layout import BatchLayout
from keras_posttrain.data.batches.packing import (
    coarse_lengths,
    fine_lengths,
    pack,
    pack_groups,
    padded_rows,
)
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.data.rows.examples import Example
from tests.data.support import SIZES, random_groups


@pytest.mark.parametrize(
    "sequences, capacity, packed",
    [
        (
            [[1, 2, 3], [4, 5, 6, 7], [8]],
            4,
            [[4, 5, 6, 7], [1, 2, 3, 8]],
        ),
        (
            [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10], [11, 12, 13]],
            5,
            [[1, 2, 3, 4, 5], [7, 8, 9, 10, 6], [11, 12, 13]],
        ),
        ([[1, 2], [], [3, 4, 5], [], [6]], 4, [[3, 4, 5, 6], [1, 2]]),
    ],
)
def test_best_fit_decreasing(sequences, capacity, packed):
    rows = pack([len(s) for s in sequences], capacity)
    assert [sum((sequences[i] for i in row), []) for row in rows] == packed


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_sequences", [2, 64])
def test_nothing_is_lost_and_nothing_overflows(seed, max_sequences):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 33, 500).tolist()
    rows = pack(lengths, 64, max_sequences)
    assert sorted(sum(rows, [])) == list(range(500))
    for row in rows:
        assert sum(lengths[i] for i in row) <= 64
        assert len(row) <= max_sequences
    assert rows == pack(lengths, 64, max_sequences)
    if max_sequences == 64:
        fill = sum(lengths) / 64 / len(rows)
        assert fill > 0.98


def test_the_fullest_row_that_fits_is_taken():
    """After 7, 5 and 4 (of 10), the 3 goes to the 7, the 5 takes the 4."""
    assert pack([7, 5, 4, 3, 1], 10) == [[0, 3], [1, 2, 4]]


def test_many_sequences_pack_in_little_time():
    import time

    lengths = np.random.default_rng(0).integers(2, 512, 100_000)
    start = time.perf_counter()
    rows = pack(lengths, 512)
    # Quadratic packing takes minutes.
    assert time.perf_counter() - start < 10
    assert sum(map(len, rows)) == 100_000


def test_a_sequence_over_the_capacity_is_refused():
    with pytest.raises(ValueError, match="length 5 of sequence 1, capacity=4"):
        pack([3, 5], 4)


def test_no_sequences_make_no_rows():
    assert pack([], 4) == []
    assert pack_groups([], 4) == []
    # Nor do sequences without tokens.
    assert pack([2, 0, 3, 0, 1], 4) == [[2, 4], [0]]


def test_a_row_holds_at_most_64_sequences():
    assert [len(row) for row in pack([1] * 65, 100)] == [64, 1]
    [group] = random_groups([(1, [1] * 64)])
    rows = pack_groups([group], 100)
    assert [[len(i) for _, i in row] for row in rows] == [[63], [1]]


@pytest.mark.parametrize(
    "length, expected",
    [
        (8, [8]),
        (64, [64]),
        (65, [64, 65]),
        (512, [64, 128, 256, 512]),
        (600, [64, 128, 256, 512, 600]),
    ],
)
def test_coarse_lengths(length, expected):
    assert coarse_lengths(length) == expected


def test_lengths_waste_at_most_a_seventh():
    lengths = fine_lengths(3000)
    assert lengths[:5] == [64, 128, 192, 256, 320]
    assert lengths[10:14] == [704, 768, 896, 1024]
    assert lengths[-1] >= 3000
    # No longer than needed.
    assert fine_lengths(64) == [64]
    assert fine_lengths(128) == [64, 128]
    assert fine_lengths(129) == [64, 128, 192]
    grown = np.diff(lengths) / np.array(lengths[:-1])
    assert (grown[5:] <= 1 / 6).all()


@pytest.mark.parametrize(
    "filled, multiple, expected",
    [
        *[(n, 1, n) for n in (1, 2, 3, 4, 6, 8, 12, 16)],
        (5, 1, 6),
        (7, 1, 8),
        (9, 1, 12),
        (13, 1, 16),
        (5, 4, 8),
        (3, 3, 3),
        (4, 3, 6),
    ],
)
def test_padded_rows(filled, multiple, expected):
    assert padded_rows(filled, multiple) == expected


def test_a_row_holds_at_most_so_many_prefixes_and_sequences():
    """Groups of 1 + 2: two of them fit into 6 slots, not three."""
    groups = random_groups([(2, [1, 1])] * 4)
    rows = pack_groups(groups, 64, max_sequences=6)
    assert [[g for g, _ in row] for row in rows] == [[0, 1], [2, 3]]
    # A group that needs more slots is cut.
    [group] = random_groups([(2, [1] * 5)])
    rows = pack_groups([group], 64, max_sequences=4)
    assert rows == [[(0, [0, 1, 2])], [(0, [3, 4])]]


def test_rows_hold_each_completion_once():
    groups = random_groups(SIZES)
    rows = pack_groups(groups, 64)
    pieces = [piece for row in rows for piece in row]
    assert sorted((g, i) for g, cs in pieces for i in cs) == [
        (g, i) for g, (_, cs) in enumerate(SIZES) for i in range(len(cs))
    ]
    # None is cut that fits; each row keeps to its tokens.
    assert sorted(g for g, _ in pieces) == [0, 1, 2, 3]
    for row in rows:
        assert sum(groups[g].shared_size()[0] for g, _ in row) <= 64


@pytest.mark.parametrize("tokens, most", [(1024, 16), (16_384, 256)])
def test_long_rows_have_room_for_more_sequences(tokens, most):
    layout = BatchLayout(600, tokens, token_budget=tokens)
    assert layout.max_sequences == most
    sequences = [Example(np.arange(80), np.ones(80), 0)] * 600
    segments = layout(sequences).arrays["segment_ids"]
    assert (segments > 0).sum(axis=1).max() == tokens // 80 * 80


def test_long_rows_are_filled_by_short_documents():
    """64 documents of a row would leave two thirds of it empty."""
    rows = [Example(np.arange(80), np.ones(80), 0)] * 600
    data = BatchAdapter(
        rows, batch_size=1, packing=True, sequence_length=16_384
    )
    filled = [(x["segment_ids"] > 0).mean() for x in data.get_jax_iterator()]
    assert filled[0] > 0.98


def test_a_group_over_the_capacity_is_cut():
    groups = random_groups([(10, [8] * 6)])
    # The third of three is a unit of its own.
    odd = random_groups([(10, [8] * 3)])
    assert pack_groups(odd, 40, together=2) == [[(0, [0, 1, 2])]]
    assert pack_groups(groups, 58) == [[(0, list(range(6)))]]
    rows = pack_groups(groups, 30)
    assert [[cs for _, cs in row] for row in rows] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
    ]
    rows = pack_groups(groups, 40, together=2)
    assert [[cs for _, cs in row] for row in rows] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
    ]
    with pytest.raises(ValueError) as error:
        pack_groups(groups, 25, together=2)
    for part in ("prompt of 10 tokens", "16 tokens", "capacity=25"):
        assert part in str(error.value)
