"""Pairs and labelled completions as the batches of the design."""

import bisect
import dataclasses

import numpy as np

from keras_posttrain.data.batches import packing as packing_lib
from keras_posttrain.data.batches.row_cache import RowCache, row_key
from keras_posttrain.data.batches.shared_prefix import (
    Group,
    Place,
    assemble_groups,
    pack_groups,
)
from keras_posttrain.data.rows.examples import Example

# The most sequences that share a row. Fixed, so that the shapes of packed
# batches differ in their number of rows alone.
MAX_SEQUENCES = 16


def buckets(longest):
    """The lengths that rows may have: multiples of 64 up to 768, then six to
    a doubling.

    Args:
        longest: int, tokens of the longest row.

    Returns:
        List of ints, the last one at least `longest`.
    """
    lengths, step = [64], 64
    while lengths[-1] < longest:
        if lengths[-1] >= 12 * step:
            step *= 2
        lengths.append(lengths[-1] + step)
    return lengths


@dataclasses.dataclass(frozen=True)
class PreferenceLayout:
    """What batches of pairs or labelled completions look like.

    Without packing a row is a sequence: chosen and rejected are neighbouring
    rows; with a shared prompt a row is a pair. With packing a row holds
    several pairs, none of which is split.

    Args:
        batch_size: int, the most examples of a batch.
        sequence_length: int, the most tokens of a prompt and a completion.
        labelled: bool, whether examples are labelled completions, not pairs.
        mismatched: bool, whether each completion of the batch is put under
            the next example's prompt as well, with role 1. Its end is cut
            where it is too long there: it serves an estimate alone.
        share_prefix: bool, whether a prompt is stored once for the
            completions that go on from it.
        token_budget: int, the tokens of a packed row, or `None` for no
            packing.
        row_multiple: int, what the number of rows is a multiple of.
        pad_id: int, the token id at padding.
        reference_cache: `RowCache` of the reference's log-probabilities, for
            batches with `ref_per_token_logps`, or `None`.
    """

    batch_size: int
    sequence_length: int
    labelled: bool = False
    mismatched: bool = False
    share_prefix: bool = False
    token_budget: int | None = None
    row_multiple: int = 1
    pad_id: int = 0
    reference_cache: RowCache | None = None

    @property
    def completions_per_example(self):
        return 2 if self.mismatched or not self.labelled else 1

    def row_length(self, examples):
        """The most tokens that one example of these may take in a row."""
        groups = self._groups(examples)
        if self.mismatched:
            # Under shuffling any completion may meet any prompt.
            longest = max(examples, key=lambda e: len(e.completions[0]))
            groups = [self._with_stranger(e, longest) for e in examples]
        if self.share_prefix:
            return max(map(len, groups))
        return max(sum(map(len, _sequences(group))) for group in groups)

    def __call__(self, rows):
        """The batch of a list of examples, each in a list of its own."""
        examples = [example for row in rows for example in row]
        groups = self._groups(examples)
        build = self._shared if self.share_prefix else self._apart
        batch, places = build(groups)
        shape = batch["sequence_mask"].shape
        for name, dtype, value in self._extras(examples):
            batch[name] = np.zeros(shape, dtype)
            for (g, i), place in places.items():
                batch[name][place.row, place.slot] = value(examples[g], i)
        if self.reference_cache is not None:
            batch["ref_per_token_logps"] = self._cached_logps(
                groups, places, batch["token_ids"].shape
            )
        return batch

    def _cached_logps(self, groups, places, shape):
        logps = np.zeros(shape, np.float32)
        for (g, i), place in places.items():
            found = self.reference_cache.read(completion_key(groups[g], i))
            has_loss = groups[g].masks[i] != 0
            logps[place.tokens] = found["logps"] * has_loss
        return logps

    def _groups(self, examples):
        if not self.mismatched or len(examples) < 2:
            return examples
        before = [examples[-1], *examples[:-1]]
        return [self._with_stranger(e, b) for e, b in zip(examples, before)]

    def _with_stranger(self, example, other):
        room = max(self.sequence_length - len(example.prompt), 0)
        return Group(
            prompt=example.prompt,
            completions=[
                example.completions[0],
                other.completions[0][:room],
            ],
            masks=[example.masks[0], other.masks[0][:room]],
            row=example.row,
        )

    def _extras(self, examples):
        """`(name, dtype, value of an example's completion)`."""
        if not self.labelled:
            # Read at the chosen one.
            return [("margins", np.float32, lambda e, i: e.margin * (i == 0))]
        extras = [("labels", np.int32, lambda e, i: e.label)]
        if self.mismatched:
            extras.append(("roles", np.int32, lambda e, i: i))
        return extras

    def _num_rows(self, rows, per_batch):
        """How many rows a batch of this many filled ones has: always the
        same without packing."""
        if self.token_budget is None:
            return -(-per_batch // self.row_multiple) * self.row_multiple
        return packing_lib.padded_rows(rows, self.row_multiple)

    def _length(self, longest):
        if self.token_budget is not None:
            return self.token_budget
        lengths = buckets(longest)
        return lengths[bisect.bisect_left(lengths, longest)]

    def _shared(self, groups):
        each = self.completions_per_example
        most = 1 + each
        rows = [
            [(g, list(range(len(group.completions))))]
            for g, group in enumerate(groups)
        ]
        if self.token_budget is not None:
            rows = pack_groups(
                groups,
                self.token_budget,
                max_sequences=MAX_SEQUENCES,
                together=each,
            )
            most = MAX_SEQUENCES
        batch, places = assemble_groups(
            rows,
            groups,
            length=self._length(max(map(len, groups))),
            num_rows=self._num_rows(len(rows), self.batch_size),
            max_sequences=most,
            pad_id=self.pad_id,
        )
        return batch, places

    def _apart(self, groups):
        sequences = [_sequences(group) for group in groups]
        each = self.completions_per_example
        if self.token_budget is None:
            rows = [
                [(g, i)]
                for g, group in enumerate(sequences)
                for i in range(len(group))
            ]
            most = 1
        else:
            sizes = [sum(map(len, group)) for group in sequences]
            rows = [
                [(g, i) for g in row for i in range(len(sequences[g]))]
                for row in packing_lib.pack(
                    sizes, self.token_budget, MAX_SEQUENCES // each
                )
            ]
            most = MAX_SEQUENCES
        tokens = [
            [sequences[g][i].example(groups[g].row) for g, i in row]
            for row in rows
        ]
        batch = packing_lib.assemble(
            tokens,
            length=self._length(max(len(s) for x in sequences for s in x)),
            num_rows=self._num_rows(len(rows), each * self.batch_size),
            max_sequences=most,
            pad_id=self.pad_id,
        )
        places = {}
        for r, row in enumerate(rows):
            stop = 0
            for slot, (g, i) in enumerate(row):
                stop += len(sequences[g][i])
                start = stop - len(groups[g].completions[i])
                places[g, i] = Place(r, slot, start, stop)
        return batch, places


def completion_key(group, i):
    """What a completion of a group is found by in a `RowCache`."""
    tokens = np.concatenate([group.prompt, group.completions[i]])
    return row_key(tokens, len(group.prompt))


@dataclasses.dataclass(frozen=True)
class _Sequence:
    token_ids: np.ndarray
    mask: np.ndarray

    def __len__(self):
        return len(self.token_ids)

    def example(self, row):
        return Example(self.token_ids, self.mask, row)


def _sequences(group):
    """The completions of a group, each behind a copy of the prompt."""
    before = np.zeros(len(group.prompt), np.float32)
    return [
        _Sequence(
            np.concatenate([group.prompt, completion]),
            np.concatenate([before, mask]),
        )
        for completion, mask in zip(group.completions, group.masks)
    ]
