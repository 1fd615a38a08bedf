"""Sampled sequences as the batches of the design, and arrays to and fro."""

import bisect
import dataclasses

import numpy as np

from keras_posttrain.data import packing as packing_lib

# The most sequences that share a row. Fixed, so that the shapes of packed
# batches differ in their number of rows alone.
MAX_SEQUENCES = 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes that batches of a run may have.

    Args:
        num_sequences: int, the most sequences of a batch.
        sequence_length: int, the most tokens of a sequence.
        token_budget: int, the tokens of a packed row, or `None` for one
            sequence a row.
        row_multiple: int, what the number of rows is a multiple of.
        pad_id: int, the token id at padding.
    """

    num_sequences: int
    sequence_length: int
    token_budget: int | None = None
    row_multiple: int = 1
    pad_id: int = 0

    def lengths(self):
        """The lengths that rows may have."""
        if self.token_budget is not None:
            return [self.token_budget]
        return packing_lib.buckets(self.sequence_length)

    def num_rows(self, rows):
        """How many rows a batch of this many filled ones has: all of them
        where a row is a sequence, else the next power of two or one and a
        half times one."""
        if self.token_budget is None:
            rows = self.num_sequences
        else:
            power = 1 << (rows - 1).bit_length()
            rows = power * 3 // 4 if rows <= power * 3 // 4 else power
        return -(-rows // self.row_multiple) * self.row_multiple

    def batches(self, examples):
        """Batches of `num_sequences` neighbours each, the last with the rest.

        Args:
            examples: list of `Example`s.

        Returns:
            List of `RolloutBatch`es, of one length.
        """
        longest = max(len(example.token_ids) for example in examples)
        lengths = self.lengths()
        length = lengths[bisect.bisect_left(lengths, longest)]
        return [
            self._batch(examples, first, length)
            for first in range(0, len(examples), self.num_sequences)
        ]

    def _batch(self, examples, first, length):
        part = examples[first : first + self.num_sequences]
        if self.token_budget is None:
            rows, most = [[i] for i in range(len(part))], 1
        else:
            sizes = [len(example.token_ids) for example in part]
            most = MAX_SEQUENCES
            rows = packing_lib.pack(sizes, length, most)
        arrays = packing_lib.assemble(
            [[part[i] for i in row] for row in rows],
            length=length,
            num_rows=self.num_rows(len(rows)),
            max_sequences=most,
            pad_id=self.pad_id,
        )
        places = {}
        for r, row in enumerate(rows):
            start = 0
            for s, i in enumerate(row):
                stop = start + len(part[i].token_ids)
                places[first + i] = Place(r, s, start, stop)
                start = stop
        return RolloutBatch(arrays, places)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a sequence lies in a batch."""

    row: int
    slot: int
    start: int
    stop: int

    @property
    def tokens(self):
        return self.row, slice(self.start, self.stop)


@dataclasses.dataclass
class RolloutBatch:
    """A batch, and where each sequence of the rollout lies in it.

    Attributes:
        arrays: dict of arrays, the batch.
        places: dict of `Place`s by the sequence's number in the rollout.
    """

    arrays: dict
    places: dict

    def put_tokens(self, name, values):
        """Adds an array `(rows, length)`.

        Args:
            name: str, its key.
            values: list of arrays, a value for each of the last tokens of
                each sequence of the rollout; those before them have 0.
        """
        array = np.zeros(self.arrays["token_ids"].shape, np.float32)
        for i, place in self.places.items():
            given = values[i]
            array[place.row, place.stop - len(given) : place.stop] = given
        self.arrays[name] = array

    def put_sequences(self, name, values):
        """Adds an array `(rows, num_sequences)`, a value a sequence."""
        array = np.zeros(self.arrays["sequence_mask"].shape, np.float32)
        for i, place in self.places.items():
            array[place.row, place.slot] = values[i]
        self.arrays[name] = array

    def sequence_sums(self, values):
        """`{sequence: sum}` of an array `(rows, length)` over its tokens."""
        return {
            i: float(values[place.tokens].sum())
            for i, place in self.places.items()
        }
