"""The one layout of batches: groups of sequences to rows, with extras."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable

from keras_posttrain.data.batches import packing
from keras_posttrain.data.batches.assembly import Batch, Segment, assemble
from keras_posttrain.data.rows.examples import completion_example

# The most sequences that share a row. Fixed, so that the shapes of packed
# batches differ in their number of rows alone.
MAX_SEQUENCES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Sequences that begin with the same tokens.

    A sequence is any tokens with a mask: a text, a prompt and a completion,
    or a trajectory in which sampled text and the output of tools alternate.
    An `Example` is a group of one sequence, a `Preference` a group of one or
    two.

    Args:
        sequences: list of `Example`s.
        prefix_length: int, how many tokens all of them begin with. None of
            these carries loss.
    """

    sequences: list
    prefix_length: int

    @classmethod
    def of_completions(cls, prompt, completions, masks, row):
        """Makes the group of a prompt's completions.

        `completions` and `masks` are lists of what `completion_example` takes.
        """
        sequences = [
            completion_example(prompt, *pair, row)
            for pair in zip(completions, masks, strict=True)
        ]
        return cls(sequences, len(prompt))

    def shared_length(self):
        """Returns the number of tokens with the prefix counted once."""
        prefix = self.prefix_length
        return prefix + sum(len(x.token_ids) - prefix for x in self.sequences)


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Lays out groups of sequences as batches.

    Without a token budget a row holds one sequence or, with `share_prefix`,
    one group; the sequences of a group are neighbours. With a token budget
    rows hold several of them.

    Args:
        num_sequences: int, the most sequences of a batch.
        sequence_length: int, the most tokens of a sequence.
        lengths: function of the longest row's tokens to the lengths that
            rows may have, where there is no token budget.
        token_budget: int, the tokens of a packed row, or `None` for no
            packing.
        max_sequences: int, the most sequences of a packed row.
        together: int, how many neighbours of a group are in one row: 2 for
            pairs. Where it is 1 a group may be spread over rows.
        share_prefix: bool, whether a row stores the prefix of a group once
            for those of its sequences that it holds.
        row_multiple: int, of which the number of rows is a multiple.
        pad_id: int, the token id at padding.
        regroup: function of the groups of a batch to those that are laid
            out in their place, or `None`.
        size: function of a sequence to the tokens of a packed row that it
            takes up, or `None` for as many as it has.
        extras: function of a `Batch` and its groups that adds arrays, or
            `None`.
    """

    num_sequences: int
    sequence_length: int
    lengths: Callable = packing.coarse_lengths
    token_budget: int | None = None
    max_sequences: int = MAX_SEQUENCES
    together: int = 1
    share_prefix: bool = False
    row_multiple: int = 1
    pad_id: int = 0
    regroup: Callable | None = None
    size: Callable | None = None
    extras: Callable | None = None

    def __call__(self, groups, first=0, length=None):
        """Makes a batch.

        Args:
            groups: list of `Group`s, `Example`s or `Preference`s.
            first: int, the number of the first sequence.
            length: int, tokens of a row; `None` for the least that fits.
        """
        if self.regroup is not None:
            groups = self.regroup(groups)
        # A `Preference` makes its sequences when it is asked for them.
        whole = [Group(list(g.sequences), g.prefix_length) for g in groups]
        rows = self._rows(whole)
        if length is None:
            length = self._length(max(map(self._row_length, whole)))
        batch = self._assemble(
            rows,
            whole,
            first,
            length=length,
            num_rows=self._num_rows(len(rows)),
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
        number = itertools.count()
        return self._assemble(
            [[(next(number), [0]) for _ in row] for row in rows],
            [x for row in rows for x in row],
            first=0,
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
        members = [(group, x) for group in groups for x in group.sequences]
        length = None
        if equal_lengths:
            length = self._length(max(len(x.token_ids) for _, x in members))
        batches = []
        for first in range(0, len(members), self.num_sequences):
            part = members[first : first + self.num_sequences]
            pieces = [
                Group([x for _, x in piece], group.prefix_length)
                for group, piece in itertools.groupby(part, lambda m: m[0])
            ]
            batches.append(self(pieces, first, length))
        return batches

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

    def _num_rows(self, filled):
        """Returns the rows of a batch: a constant without packing."""
        if self.token_budget is not None:
            return packing.padded_rows(filled, self.row_multiple)
        each = self.together if self.share_prefix else 1
        return self._up(self.num_sequences // each)

    def _up(self, rows):
        return -(-rows // self.row_multiple) * self.row_multiple

    def _length(self, longest):
        if self.token_budget is not None:
            return self.token_budget
        lengths = self.lengths(max(longest, self.sequence_length))
        return lengths[bisect.bisect_left(lengths, longest)]

    def _row_length(self, group):
        if self.share_prefix:
            return group.shared_length()
        return max(len(x.token_ids) for x in group.sequences)

    def _assemble(self, rows, groups, first, **shape):
        arrays, places = assemble(
            [_segments(row, groups, self.share_prefix) for row in rows],
            pad_id=self.pad_id,
            share_prefix=self.share_prefix,
            **shape,
        )
        counts = [len(group.sequences) for group in groups]
        starts = list(itertools.accumulate(counts, initial=first))
        numbers = [starts[g] + i for row in rows for g, p in row for i in p]
        sequences = [x for group in groups for x in group.sequences]
        return Batch(
            arrays,
            sequences=dict(enumerate(sequences, first)),
            places=dict(sorted(zip(numbers, places, strict=True))),
        )


def _segments(row, groups, share_prefix):
    """Makes the segments of a row of pieces."""
    segments = []
    for g, piece in row:
        sequences = groups[g].sequences
        start, prefix = 0, None
        if share_prefix:
            start, prefix = groups[g].prefix_length, len(segments)
            tokens = sequences[0].token_ids[:start]
            segments.append(
                Segment(tokens, row=sequences[0].row, is_prefix=True)
            )
        segments += [
            Segment(
                sequences[i].token_ids[start:],
                sequences[i].completion_mask[start:],
                sequences[i].row,
                prefix,
            )
            for i in piece
        ]
    return segments
