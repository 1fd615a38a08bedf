"""Sampled sequences as the batches of the design, and arrays to and fro."""

import bisect
import dataclasses
import itertools

import numpy as np

from keras_posttrain.data.batches import packing as packing_lib
from keras_posttrain.data.batches import shared_prefix
from keras_posttrain.data.batches.shared_prefix import Place
from keras_posttrain.data.rows.examples import Example

# The most sequences that share a row. Fixed, so that the shapes of packed
# batches differ in their number of rows alone.
MAX_SEQUENCES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Sampled:
    """A completion to train on.

    Args:
        group: int, which prompt of the rollout it goes on from.
        prompt: int32 array of shape `(tokens,)`.
        completion: int32 array of shape `(tokens,)`.
        mask: float32 array of the completion's shape, its weights.
        row: int, the dataset row.
    """

    group: int
    prompt: np.ndarray
    completion: np.ndarray
    mask: np.ndarray
    row: int

    def __len__(self):
        return len(self.prompt) + len(self.completion)

    def example(self):
        ids = np.concatenate([self.prompt, self.completion])
        mask = np.zeros(len(ids), np.float32)
        mask[len(self.prompt) :] = self.mask
        return Example(ids, mask, self.row)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes that batches of a run may have.

    Args:
        num_sequences: int, the most completions of a batch.
        sequence_length: int, the most tokens of a prompt with a completion.
        token_budget: int, the tokens of a packed row, or `None` for one
            completion a row.
        share_prefix: bool, whether a packed row holds a prompt once for the
            completions of it that it holds.
        num_generations: int, completions a prompt.
        row_multiple: int, what the number of rows is a multiple of.
        pad_id: int, the token id at padding.
    """

    num_sequences: int
    sequence_length: int
    token_budget: int | None = None
    share_prefix: bool = False
    num_generations: int = 1
    row_multiple: int = 1
    pad_id: int = 0

    def lengths(self):
        """The lengths that rows may have."""
        if self.token_budget is not None:
            return [self.token_budget]
        return packing_lib.buckets(self.sequence_length)

    def num_rows(self, rows):
        """How many rows a batch of this many filled ones has: all of them
        where a row is a completion."""
        if self.token_budget is None:
            return -(-self.num_sequences // self.row_multiple) * (
                self.row_multiple
            )
        return packing_lib.padded_rows(rows, self.row_multiple)

    def batches(self, sampled):
        """Batches of `num_sequences` neighbours each, the last with the rest.

        Args:
            sampled: list of `Sampled`, those of a group neighbours.

        Returns:
            List of `RolloutBatch`es, of one length.
        """
        longest, lengths = max(map(len, sampled)), self.lengths()
        length = lengths[bisect.bisect_left(lengths, longest)]
        batch = self._shared if self.share_prefix else self._separate
        return [
            batch(sampled[first : first + self.num_sequences], first, length)
            for first in range(0, len(sampled), self.num_sequences)
        ]

    def _separate(self, part, first, length):
        rows, most = [[i] for i in range(len(part))], 1
        if self.token_budget is not None:
            most = MAX_SEQUENCES
            rows = packing_lib.pack([len(x) for x in part], length, most)
        arrays = packing_lib.assemble(
            [[part[i].example() for i in row] for row in rows],
            length=length,
            num_rows=self.num_rows(len(rows)),
            max_sequences=most,
            pad_id=self.pad_id,
        )
        places = {}
        for r, row in enumerate(rows):
            start = 0
            for s, i in enumerate(row):
                stop = start + len(part[i])
                places[first + i] = Place(r, s, start, stop)
                start = stop
        return RolloutBatch(arrays, places)

    def _shared(self, part, first, length):
        groups, numbers = [], {}
        by_group = itertools.groupby(enumerate(part), lambda x: x[1].group)
        for g, (_, members) in enumerate(by_group):
            members = list(members)
            numbers |= {(g, c): i for c, (i, _) in enumerate(members)}
            groups.append(
                shared_prefix.Group(
                    members[0][1].prompt,
                    [x.completion for _, x in members],
                    [x.mask for _, x in members],
                    members[0][1].row,
                )
            )
        # Room for a prompt and all that goes on from it.
        most = max(MAX_SEQUENCES, 1 << self.num_generations.bit_length())
        rows = shared_prefix.pack_groups(groups, length, max_sequences=most)
        arrays, places = shared_prefix.assemble_groups(
            rows,
            groups,
            length=length,
            num_rows=self.num_rows(len(rows)),
            max_sequences=most,
            pad_id=self.pad_id,
        )
        return RolloutBatch(
            arrays, {first + numbers[at]: p for at, p in places.items()}
        )


@dataclasses.dataclass
class RolloutBatch:
    """A batch, and where each completion of the rollout lies in it.

    Attributes:
        arrays: dict of arrays, the batch.
        places: dict of `Place`s by the completion's number in the rollout;
        a place may begin with its prompt.
    """

    arrays: dict
    places: dict

    def put_tokens(self, name, values):
        """Adds an array `(rows, length)`.

        Args:
            name: str, its key.
            values: list of arrays, a value for each token of each completion
                of the rollout; prompts have 0.
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
