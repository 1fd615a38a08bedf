"""Sequences that belong together in a batch."""

import dataclasses
import itertools

from keras_posttrain.data.batches.assembly import Segment
from keras_posttrain.data.batches.tree import tree_segments
from keras_posttrain.data.rows.examples import completion_example


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
            these carries loss. `None` to find what they share: as a tree, in
            which some may share more than others.
        units: list of ints, the unit of each sequence: adjacent sequences of
            one unit are the segments of one trajectory. `None` where each is
            a unit of its own.
    """

    sequences: list
    prefix_length: int | None
    units: list | None = None

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

    @classmethod
    def of(cls, group):
        """Makes one of a `Group`, an `Example` or a `Preference`.

        A `Preference` makes its sequences when it is asked for them.
        """
        units = getattr(group, "units", None)
        return cls(list(group.sequences), group.prefix_length, units)

    def slice(self, start, stop):
        """Returns the group of some neighbouring sequences."""
        units = None if self.units is None else self.units[start:stop]
        return Group(self.sequences[start:stop], self.prefix_length, units)

    def number_units(self, first=0):
        """Returns the number of each sequence's unit, counted from `first`.

        Raises:
            ValueError: `units` has not a number a sequence, or the sequences
                of a unit are not adjacent.
        """
        if self.units is None:
            return list(range(first, first + len(self.sequences)))
        runs = [(u, len(list(x))) for u, x in itertools.groupby(self.units)]
        numbers = {u for u, _ in runs}
        if len(self.units) != len(self.sequences) or len(numbers) < len(runs):
            raise ValueError(
                "`units` must have a number for each sequence, and the "
                "sequences of a unit must be adjacent. Received: "
                f"units={self.units} of {len(self.sequences)} sequences."
            )
        counts = enumerate(count for _, count in runs)
        return [first + k for k, count in counts for _ in range(count)]

    def shared(self, piece, by_sequence=False, number=0, slot=0):
        """Makes the `Segment`s that store prefixes of sequences once.

        Args:
            piece: list of indices of sequences.
            by_sequence: as of `BatchLayout`.
            number: int, the number of the first sequence of the group.
            slot: int, the slot of the first segment.
        """
        sequences = [self.sequences[i] for i in piece]
        numbers = [number + i for i in piece]
        if self.prefix_length is None:
            _refuse_images(sequences)
            return tree_segments(sequences, by_sequence, numbers, slot)
        start, row = self.prefix_length, self.sequences[0].row
        tokens = self.sequences[0].token_ids[:start]
        prefix = Segment(
            tokens,
            row=row,
            sequence=None,
            shared_by=len(piece),
            images=self.sequences[0].images,
        )
        return [prefix] + [
            Segment(
                x.token_ids[start:], x.completion_mask[start:], x.row, slot, i
            )
            for x, i in zip(sequences, numbers)
        ]

    def shared_size(self, piece=None, by_sequence=False):
        """Returns the tokens and the slots of `shared`, by default of all."""
        piece = range(len(self.sequences)) if piece is None else piece
        prefix = self.prefix_length
        if prefix is None:
            segments = self.shared(piece, by_sequence)
            return sum(len(x.token_ids) for x in segments), len(segments)
        tails = sum(len(self.sequences[i].token_ids) - prefix for i in piece)
        return prefix + tails, 1 + len(piece)


def _refuse_images(sequences):
    if any(x.images is not None for x in sequences):
        raise ValueError(
            "Sequences that share more than one prompt cannot have images. "
            f"Received: row {sequences[0].row} of the dataset, with images."
        )


def number_units(groups, first=0):
    """Returns the number of the unit of each sequence of groups, a list."""
    found = []
    for group in groups:
        found += group.number_units(found[-1] + 1 if found else first)
    return found


def slice_groups(groups, start, stop):
    """Returns the groups of the sequences from `start` to `stop`."""
    found, at = [], 0
    for group in groups:
        some = group.slice(max(start - at, 0), max(stop - at, 0))
        found += [some] if some.sequences else []
        at += len(group.sequences)
    return found


def refuse_segments(groups):
    """Raises a `ValueError` for a unit of several sequences."""
    for group in groups:
        for unit, many in itertools.groupby(group.number_units()):
            count = len(list(many))
            if count > 1:
                row = group.sequences[group.number_units().index(unit)].row
                raise ValueError(
                    "The loss computes one value for each sequence, such as "
                    "the ratio of a whole sequence, which it cannot of a "
                    "trajectory whose segments are separate. Received: a "
                    f"trajectory of {count} segments in row {row} of the "
                    "dataset. Use a loss whose ratios, masks and correction "
                    "are those of tokens, such as `GRPOLoss`, or "
                    "trajectories of one segment."
                )
