"""The one layout of batches: groups of sequences to rows, with extras."""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from keras_posttrain.data.batches import packing
from keras_posttrain.data.batches.assembly import Batch, Segment, assemble
from keras_posttrain.data.batches.group import (
    Group,
    number_units,
    refuse_segments,
    slice_groups,
)

# The most sequences that share a row, see `packing.most_sequences`. Fixed, so
# that the shapes of packed batches differ in their number of rows alone.
MAX_SEQUENCES = 16


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Lays out groups of sequences as batches.

    Without a token budget a row holds one sequence or, with `share_prefix`,
    one group; the sequences of a group are neighbours. With a token budget
    rows hold several of them.

    Args:
        num_sequences: int, the most units of a batch. A unit is a sequence,
            or the segments of one trajectory.
        sequence_length: int, the most tokens of a sequence.
        lengths: function of the longest row's tokens to the lengths that
            rows may have, where there is no token budget.
        token_budget: int, the tokens of a packed row, or `None` for no
            packing.
        max_sequences: int, the most sequences of a packed row, or `None` for a
            number that depends on `token_budget`.
        together: int, how many neighbours of a group are in one row: 2 for
            pairs. Where it is 1 a group may be spread over rows.
        share_prefix: bool, whether a row stores the prefix of a group once
            for those of its sequences that it holds. Groups without a
            `prefix_length` need a token budget.
        row_multiple: int, of which the number of rows is a multiple.
        pad_id: int, the token id at padding.
        regroup: function of the groups of a batch to those that are laid
            out in their place, or `None`.
        size: function of a sequence to the tokens of a packed row that it
            takes up, or `None` for as many as it has.
        extras: function of a `Batch` and its groups that adds arrays, or
            `None`.
        by_sequence: bool, whether the loss needs all loss tokens of a unit
            in one slot, as `PolicyLoss.by_sequence`.
    """

    num_sequences: int
    sequence_length: int
    lengths: Callable = packing.coarse_lengths
    token_budget: int | None = None
    max_sequences: int | None = None
    together: int = 1
    share_prefix: bool = False
    row_multiple: int = 1
    pad_id: int = 0
    regroup: Callable | None = None
    size: Callable | None = None
    extras: Callable | None = None
    by_sequence: bool = False

    def __post_init__(self):
        if self.max_sequences is None:
            most = packing.most_sequences(self.token_budget, MAX_SEQUENCES)
            object.__setattr__(self, "max_sequences", most)

    def __call__(self, groups, first=0, length=None, first_unit=None):
        """Makes a batch.

        Args:
            groups: list of `Group`s, `Example`s or `Preference`s.
            first: int, the number of the first sequence.
            length: int, tokens of a row; `None` for the least that fits.
            first_unit: int, the number of the first unit; `None` for
                `first`.

        Raises:
            ValueError: the groups do not fit, or a unit has several
                sequences and the loss is `by_sequence`.
        """
        if self.regroup is not None:
            groups = self.regroup(groups)
        whole = [Group.of(group) for group in groups]
        units = number_units(
            whole, first if first_unit is None else first_unit
        )
        several = len(set(units)) < len(units)
        if several and self.by_sequence:
            refuse_segments(whole)
        rows = self._rows(whole)
        if length is None:
            length = self._length(map(self._row_length, whole))
        batch = self._assemble(
            rows,
            whole,
            dict(enumerate(units, first)),
            length=length,
            num_rows=self._num_rows(len(rows), several),
            max_sequences=self._slots(),
        )
        if self.extras is not None:
            self.extras(batch, groups)
        return batch

    def of_rows(self, rows):
        """Makes a batch of rows that are packed already.

        Args:
            rows: list of at most `num_sequences` lists of `Example`s.
        """
        groups = [Group.of(x) for row in rows for x in row]
        number = itertools.count()
        return self._assemble(
            [[(next(number), [0]) for _ in row] for row in rows],
            groups,
            dict(enumerate(range(len(groups)))),
            length=self.token_budget,
            num_rows=self._up(self.num_sequences),
            max_sequences=self.max_sequences,
        )

    def minibatches(self, groups, equal_lengths=True):
        """Makes batches of `num_sequences` neighbours, the last with the rest.

        Args:
            groups: list of groups.
            equal_lengths: bool, whether the rows of all batches have one
                length.

        Returns:
            List of `Batch`es.
        """
        groups = [Group.of(group) for group in groups]
        units = number_units(groups)
        length = None
        if equal_lengths:
            length = self._length(
                len(x.token_ids) for g in groups for x in g.sequences
            )
        batches, at = [], 0
        while at < len(units):
            first_unit = units[at]
            stop = bisect.bisect_left(units, first_unit + self.num_sequences)
            pieces = slice_groups(groups, at, stop)
            batches.append(self(pieces, at, length, first_unit))
            at = stop
        return batches

    @property
    def pads_by_length(self):
        """Bool, whether the examples' lengths alone give those of rows."""
        varies = getattr(self.extras, "has_lengths", False)
        varies = varies or self.regroup is not None
        return self.token_budget is None and not varies

    def row_lengths(self, summary):
        """Returns the tokens of each example's longest row, without packing.

        Args:
            summary: dict of int32 arrays; see `summary_of`.
        """
        if "second" not in summary:
            return summary["tokens"]
        first = summary["tokens"] - summary["prompt"]
        second = np.maximum(summary["second"], 0)
        both = (
            first + second if self.share_prefix else np.maximum(first, second)
        )
        return summary["prompt"] + both

    def other_shapes(self, batch, least=1):
        """Yields zeros in the other shapes that batches like one may have.

        Packed batches differ in their rows: those of half to twice as many
        are given. Others differ in the length of rows.

        Args:
            batch: dict of arrays, those of a batch of this layout.
            least: int, tokens of the shortest sequence.
        """
        rows, length = batch["token_ids"].shape
        if self.token_budget is None:
            lengths = self.lengths(self.sequence_length)
            shapes = [(rows, n) for n in lengths if n >= least]
        else:
            most = min(2 * rows, self._up(self.num_sequences))
            counts = {
                packing.padded_rows(n, self.row_multiple)
                for n in range(max(rows // 2, 1), most + 1)
            }
            shapes = [(n, length) for n in sorted(counts)]
        for shape in shapes:
            if shape != (rows, length):
                yield {
                    name: _zeros(x, rows, length, shape)
                    for name, x in batch.items()
                }

    def _rows(self, groups):
        """Lists of pieces `(group, its sequences)`, one a row."""
        many = [range(len(group.sequences)) for group in groups]
        if self.token_budget is None:
            if self.share_prefix:
                return [[(g, list(each))] for g, each in enumerate(many)]
            return [[(g, [i])] for g, each in enumerate(many) for i in each]
        if self.share_prefix:
            return packing.pack_groups(
                groups,
                self.token_budget,
                max_sequences=self.max_sequences,
                together=self.together,
                by_sequence=self.by_sequence,
            )
        size = self.size or (lambda x: len(x.token_ids))
        units = [
            (g, list(each[i : i + self.together]))
            for g, each in enumerate(many)
            for i in range(0, len(each), self.together)
        ]
        sizes = [
            sum(size(groups[g].sequences[i]) for i in unit)
            for g, unit in units
        ]
        most = self.max_sequences // self.together
        packed = packing.pack(sizes, self.token_budget, most)
        return [[units[u] for u in row] for row in packed]

    def _slots(self):
        if self.token_budget is not None:
            return self.max_sequences
        return 1 + self.together if self.share_prefix else 1

    def _num_rows(self, filled, several):
        """Returns the rows of a batch: a constant without packing.

        Where units have `several` sequences, there may be more.
        """
        padded = packing.padded_rows(filled, self.row_multiple)
        if self.token_budget is not None:
            return padded
        each = self.together if self.share_prefix else 1
        rows = self._up(self.num_sequences // each)
        return padded if several and filled > rows else rows

    def _up(self, rows):
        return -(-rows // self.row_multiple) * self.row_multiple

    def _length(self, lengths):
        """Returns the tokens of a row, from those that each one needs."""
        if self.token_budget is not None:
            return self.token_budget
        return self.padded(max(lengths))

    def padded(self, longest):
        """Returns the tokens of rows of which the longest has so many."""
        lengths = self.lengths(max(longest, self.sequence_length))
        return lengths[bisect.bisect_left(lengths, longest)]

    def _row_length(self, group):
        if self.share_prefix:
            return group.shared_size()[0]
        return max(len(x.token_ids) for x in group.sequences)

    def _assemble(self, rows, groups, units, **shape):
        counts = [len(group.sequences) for group in groups]
        numbers = list(
            itertools.accumulate(counts, initial=next(iter(units), 0))
        )
        rows = [self._segments(row, groups, numbers) for row in rows]
        arrays, places = assemble(
            rows,
            pad_id=self.pad_id,
            share_prefix=self.share_prefix,
            **shape,
        )
        owners = (x.sequence for row in rows for x in row)
        owners = (i for i in owners if i is not None)
        parts = collections.defaultdict(list)
        for i, place in zip(owners, places, strict=True):
            parts[i].append(place)
        sequences = (x for group in groups for x in group.sequences)
        batch = Batch(
            arrays,
            sequences=dict(zip(units, sequences)),
            parts=dict(sorted(parts.items())),
            units=units,
        )
        _weigh_units(batch)
        return batch

    def _segments(self, row, groups, numbers):
        """Makes the segments of a row of pieces.

        `numbers` has that of the first sequence of each group.
        """
        segments = []
        for g, piece in row:
            if self.share_prefix:
                segments += groups[g].shared(
                    piece, self.by_sequence, numbers[g], len(segments)
                )
                continue
            for i in piece:
                x = groups[g].sequences[i]
                tokens = (x.token_ids, x.completion_mask, x.row)
                segments.append(
                    Segment(*tokens, sequence=numbers[g] + i, images=x.images)
                )
        return segments


def _weigh_units(batch):
    """Gives each slot of a unit its share of the unit's loss tokens.

    The shares of a unit add up to 1 in `sequence_mask`, so that every mean
    over sequences is one over units. A unit without loss tokens counts in its
    first slot.
    """
    mask = batch.arrays["completion_mask"]
    for places in batch.unit_parts().values():
        if len(places) == 1:
            continue
        counts = [mask[x.tokens].sum(dtype=np.float64) for x in places]
        counts[0] += not any(counts)
        for place, count in zip(places, counts):
            share = count / sum(counts)
            batch.arrays["sequence_mask"][place.row, place.slot] = share


def _zeros(array, rows, length, shape):
    """Returns zeros for an array of a batch of other rows and length."""
    sizes = list(array.shape)
    if sizes[:1] == [rows]:
        sizes[0] = shape[0]
        if sizes[1:2] == [length]:
            sizes[1] = shape[1]
    return np.zeros(sizes, array.dtype)
