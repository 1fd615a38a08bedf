"""Sequences into rows, and rows into the batch that every loss sees."""

import bisect
import heapq

import numpy as np


def pack(lengths, capacity, max_sequences=64):
    """Packs sequences into rows, best fit first, longest first.

    Best-fit decreasing: each sequence, longest first, goes into the fullest
    row that still takes it. Of rows that are equally full the oldest is
    taken, so the result depends on the lengths alone.

    Args:
        lengths: sequence of ints.
        capacity: int, the tokens of a row.
        max_sequences: int, the most sequences of a row.

    Returns:
        List of rows, each a list of indices into `lengths`. Every sequence
        with tokens is in one row; empty sequences are in none.

    Raises:
        ValueError: a length over the capacity.

    Example:

    ```python
    pack([3, 4, 1], capacity=4)  # [[1], [0, 2]]
    ```
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if order and lengths[order[0]] > capacity:
        raise ValueError(
            "A sequence must fit into a row. Received: length "
            f"{lengths[order[0]]} of sequence {order[0]}, "
            f"capacity={capacity}. Use a larger `sequence_length`."
        )
    rows = []
    # For each amount of room, the rows that have it, and the amounts in
    # order: at most `capacity` of them, however many rows there are.
    with_room, rooms = {}, []
    for i in order:
        length = int(lengths[i])
        if length == 0:
            continue
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            queue = with_room[room]
            row = heapq.heappop(queue)
            if not queue:
                del with_room[room], rooms[at]
        rows[row].append(i)
        room -= length
        if room and len(rows[row]) < max_sequences:
            if room not in with_room:
                with_room[room] = []
                bisect.insort(rooms, room)
            heapq.heappush(with_room[room], row)
    return rows


def buckets(sequence_length):
    """The lengths that unpacked batches may have.

    Args:
        sequence_length: int, the longest.

    Returns:
        List of ints: powers of two from 64, and `sequence_length`.
    """
    lengths = []
    length = 64
    while length < sequence_length:
        lengths.append(length)
        length *= 2
    return [*lengths, sequence_length]


def padded_rows(filled, multiple=1):
    """How many rows a packed batch has, so that there are few such numbers.

    Args:
        filled: int, rows that hold sequences.
        multiple: int, what the number of rows is a multiple of.

    Returns:
        Int: the next power of two, or one and a half times one.
    """
    power = 1 << (filled - 1).bit_length()
    rows = power * 3 // 4 if filled <= power * 3 // 4 else power
    return -(-rows // multiple) * multiple


def assemble(rows, *, length, num_rows, max_sequences, pad_id):
    """Puts sequences into the arrays of a batch.

    Args:
        rows: list of at most `num_rows` lists of `Example`s.
        length: int, tokens of a row.
        num_rows: int, rows of the batch. Missing ones are empty: they have no
            sequence and no weight.
        max_sequences: int, the most sequences of a row.
        pad_id: int, the token id at padding.

    Returns:
        Dict of arrays: `token_ids`, `segment_ids` and `positions` (int32) and
        `completion_mask` (float32) of shape `(num_rows, length)`;
        `sequence_mask` (float32) and `sequence_ids` (int32, the dataset rows,
        0 where unused) of shape `(num_rows, max_sequences)`.
    """
    tokens = (num_rows, length)
    sequences = (num_rows, max_sequences)
    batch = {
        "token_ids": np.full(tokens, pad_id, np.int32),
        "segment_ids": np.zeros(tokens, np.int32),
        "positions": np.zeros(tokens, np.int32),
        "completion_mask": np.zeros(tokens, np.float32),
        "sequence_mask": np.zeros(sequences, np.float32),
        "sequence_ids": np.zeros(sequences, np.int32),
    }
    if len(rows) > num_rows:
        raise ValueError(
            "A batch must have room for its rows. Received: "
            f"{len(rows)} rows, num_rows={num_rows}."
        )
    for r, row in enumerate(rows):
        total = sum(len(example.token_ids) for example in row)
        if total > length or len(row) > max_sequences:
            raise ValueError(
                "A row must have room for its sequences. Received: row "
                f"{r} with {len(row)} sequences of {total} tokens, "
                f"length={length}, max_sequences={max_sequences}."
            )
        at = 0
        for s, example in enumerate(row):
            place = slice(at, at + len(example.token_ids))
            batch["token_ids"][r, place] = example.token_ids
            batch["segment_ids"][r, place] = s + 1
            batch["positions"][r, place] = np.arange(len(example.token_ids))
            batch["completion_mask"][r, place] = example.completion_mask
            # Nothing comes before a sequence's first token to predict it.
            batch["completion_mask"][r, at : at + 1] = 0.0
            batch["sequence_mask"][r, s] = 1.0
            batch["sequence_ids"][r, s] = example.row
            at = place.stop
    return batch
