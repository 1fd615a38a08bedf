"""Packing loses nothing; the batch has the layout of the design."""

import numpy as np
import pytest

from keras_posttrain.data.batches.packing import assemble, buckets, pack
from keras_posttrain.data.rows.examples import Example


def example(ids, mask=None, row=0):
    mask = [0] + [1] * (len(ids) - 1) if mask is None else mask
    return Example(np.array(ids, np.int32), np.array(mask, np.float32), row)


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
def test_buckets(length, expected):
    assert buckets(length) == expected


def test_assemble_lays_out_a_batch():
    rows = [
        [example([11, 12, 13], row=7), example([14, 15], [1, 2], row=3)],
        [example([16, 17], [0, 0.5], row=9)],
    ]
    batch = assemble(rows, length=6, num_rows=3, max_sequences=2, pad_id=99)
    expected = {
        "token_ids": [
            [11, 12, 13, 14, 15, 99],
            [16, 17, 99, 99, 99, 99],
            [99] * 6,
        ],
        "segment_ids": [[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0], [0] * 6],
        "positions": [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0] * 6],
        # A segment's first token carries no loss, whatever its row said.
        "completion_mask": [
            [0, 1, 1, 0, 2, 0],
            [0, 0.5, 0, 0, 0, 0],
            [0] * 6,
        ],
        "sequence_mask": [[1, 1], [1, 0], [0, 0]],
        "sequence_ids": [[7, 3], [9, 0], [0, 0]],
    }
    assert batch.keys() == expected.keys()
    floats = ("completion_mask", "sequence_mask")
    for key, value in expected.items():
        assert batch[key].tolist() == value, key
        assert batch[key].dtype == (np.float32 if key in floats else np.int32)


def test_assemble_refuses_what_does_not_fit():
    row = [example([1, 2, 3]), example([4, 5])]
    with pytest.raises(ValueError, match="2 sequences of 5 tokens, length=4"):
        assemble([row], length=4, num_rows=1, max_sequences=2, pad_id=0)
    with pytest.raises(ValueError, match="max_sequences=1"):
        assemble([row], length=8, num_rows=1, max_sequences=1, pad_id=0)
    with pytest.raises(ValueError, match="2 rows, num_rows=1"):
        assemble([row, row], length=8, num_rows=1, max_sequences=2, pad_id=0)
