"""The arrays of a batch: segments of tokens in rows, and their places."""

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a sequence is stored: columns `start` to `stop` of a row.

    Behind a shared prefix these are the columns of the tokens after it.
    """

    row: int
    slot: int
    start: int
    stop: int

    @property
    def tokens(self):
        return self.row, slice(self.start, self.stop)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Tokens that are stored in one piece: a sequence, or a shared prefix.

    Args:
        token_ids: ints of shape `(tokens,)`.
        completion_mask: float32 array of the same shape, or 0.
        row: int, index of the dataset row.
        prefix: int, the slot of the prefix that the tokens continue, or
            `None`.
        is_prefix: bool.
    """

    token_ids: np.ndarray
    completion_mask: np.ndarray | float = 0.0
    row: int = 0
    prefix: int | None = None
    is_prefix: bool = False


def assemble(
    rows, *, length, num_rows, max_sequences, pad_id, share_prefix=False
):
    """Puts segments into the arrays of a batch.

    Args:
        rows: list of at most `num_rows` lists of `Segment`s.
        length: int, tokens of a row.
        num_rows: int, rows of the batch. Missing ones are empty: they have no
            sequence and no weight.
        max_sequences: int, the most segments of a row.
        pad_id: int, the token id at padding.
        share_prefix: bool, whether there are prefixes.

    Returns:
        `(batch, places)`: a dict of `token_ids`, `segment_ids` and
        `positions` (int32) and `completion_mask` (float32) of shape
        `(num_rows, length)`; `sequence_mask` (float32) and `sequence_ids`
        (int32, the dataset rows, 0 where unused) of shape
        `(num_rows, max_sequences)`; with `share_prefix` also
        `predicted_by` of shape `(num_rows, length)` and `prefix_segments` of
        shape `(num_rows, max_sequences)`, both int32. A prefix has a slot,
        whose `sequence_mask` is 0. And a list of the `Place`s of the
        sequences, row by row.

    Raises:
        ValueError: the rows do not fit.
    """
    if len(rows) > num_rows:
        raise ValueError(
            "A batch must have room for its rows. Received: "
            f"{len(rows)} rows, num_rows={num_rows}."
        )
    tokens, slots = (num_rows, length), (num_rows, max_sequences)
    batch = {
        "token_ids": np.full(tokens, pad_id, np.int32),
        "segment_ids": np.zeros(tokens, np.int32),
        "positions": np.zeros(tokens, np.int32),
        "completion_mask": np.zeros(tokens, np.float32),
        "sequence_mask": np.zeros(slots, np.float32),
        "sequence_ids": np.zeros(slots, np.int32),
    }
    if share_prefix:
        before = np.maximum(np.arange(length, dtype=np.int32) - 1, 0)
        batch["predicted_by"] = np.broadcast_to(before, tokens).copy()
        batch["prefix_segments"] = np.zeros(slots, np.int32)
    places = []
    for r, row in enumerate(rows):
        total = sum(len(segment.token_ids) for segment in row)
        if total > length or len(row) > max_sequences:
            raise ValueError(
                "A row must have room for its sequences. Received: row "
                f"{r} with {len(row)} sequences of {total} tokens, "
                f"length={length}, max_sequences={max_sequences}."
            )
        stops = [0]
        for s, segment in enumerate(row):
            start = stops[s]
            stops.append(start + len(segment.token_ids))
            place = Place(r, s, start, stops[-1])
            first = 0
            if segment.prefix is not None:
                end = stops[segment.prefix + 1]
                first = end - stops[segment.prefix]
                batch["predicted_by"][r, start : start + 1] = end - 1
                batch["prefix_segments"][r, s] = segment.prefix + 1
            batch["token_ids"][place.tokens] = segment.token_ids
            batch["segment_ids"][place.tokens] = s + 1
            batch["positions"][place.tokens] = first + np.arange(
                place.stop - start
            )
            batch["completion_mask"][place.tokens] = segment.completion_mask
            if not first:
                # Nothing comes before a sequence's first token to predict it.
                batch["completion_mask"][r, start : start + 1] = 0.0
            batch["sequence_ids"][r, s] = segment.row
            if not segment.is_prefix:
                batch["sequence_mask"][r, s] = 1.0
                places.append(place)
    return batch, places


@dataclasses.dataclass
class Batch:
    """A batch, and where its sequences are stored.

    Sequences are numbered in the order of the groups they were given in. The
    numbers of a rollout's minibatches run on from one to the next.

    Attributes:
        arrays: dict of arrays.
        sequences: dict of `Example`s by number.
        places: dict of `Place`s by number.
    """

    arrays: dict
    sequences: dict
    places: dict

    def rows(self):
        """Returns the numbers of each filled row's sequences, in order."""
        places = self.places
        order = sorted(places, key=lambda i: (places[i].row, places[i].slot))
        by_row = itertools.groupby(order, lambda i: places[i].row)
        return [list(numbers) for _, numbers in by_row]

    def put_tokens(self, name, values, dtype=np.float32):
        """Adds an array of shape `(rows, length, ...)`.

        Args:
            name: str, its key.
            values: list or dict by number, the values of the last tokens of
                each sequence, such as those of its completion. Other tokens
                have 0.
            dtype: the array's.
        """
        shape = self.arrays["token_ids"].shape
        array = np.zeros(shape, dtype)
        for i, place in self.places.items():
            given = values[i]
            count = min(len(given), place.stop - place.start)
            columns = slice(place.stop - count, place.stop)
            array[place.row, columns] = given[len(given) - count :]
        self.arrays[name] = array

    def put_sequences(self, name, values, dtype=np.float32):
        """Adds an array of shape `(rows, max_sequences)`.

        Args:
            name, dtype: as of `put_tokens`.
            values: list, array or dict by number, a value a sequence.
        """
        array = np.zeros(self.arrays["sequence_mask"].shape, dtype)
        for i, place in self.places.items():
            array[place.row, place.slot] = values[i]
        self.arrays[name] = array

    def sequence_sums(self, values):
        """Returns `{number: sum}` of an array `(rows, length)`."""
        return {
            i: float(values[place.tokens].sum())
            for i, place in self.places.items()
        }
