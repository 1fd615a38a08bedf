"""Sequences and what their teachers read as the batches of the design."""

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

from keras_posttrain.data.batches import packing as packing_lib
from keras_posttrain.data.batches.preference_batch import (
    MAX_SEQUENCES,
    buckets,
)
from keras_posttrain.data.batches.shared_prefix import Place
from keras_posttrain.data.rows.distillation_example import Taught
from keras_posttrain.data.rows.examples import Example


@dataclasses.dataclass(frozen=True)
class DistillationLayout:
    """What batches of distillation look like.

    Without packing a row is a sequence. With packing a batch's own sequences
    share rows. Where the teacher reads other tokens, it has rows of its own
    beside those of the student: its version of each sequence is in the same
    row, under the same segment.

    A batch has, beside the arrays of every batch,

    - where the teacher reads other tokens: `teacher_token_ids`,
      `teacher_segment_ids` and `teacher_positions`, int32 of shape
      `(rows, teacher_length)`, and `teacher_source`, int32 of shape
      `(rows, length)`, the column of the teacher's row whose hidden state
      predicts the student's token;
    - where `lookup` gives the teacher's distributions: `teacher_ids` (int32)
      and `teacher_logps` (float32) of shape `(rows, length, k)`;
    - in both cases, where not every token has a distribution of the
      teacher's: `teacher_mask`, float32 of shape `(rows, length)`;
    - with several teachers: `teacher_weights`, float32 of shape
      `(rows, num_sequences, num_teachers)`.

    Args:
        batch_size: int, the most sequences of a batch.
        sequence_length: int, the most tokens of a sequence.
        teacher_length: int, the most tokens that a teacher reads of one;
            `None` for `sequence_length`.
        token_budget: int, the tokens of a packed row, or `None` for no
            packing.
        teacher_budget: int, the tokens of a teacher's packed row; `None` for
            as many times `token_budget` as `teacher_length` is of
            `sequence_length`. `fitted` finds a better one.
        row_multiple: int, what the number of rows is a multiple of.
        pad_id: int, the token id at padding.
        teacher_pad_id: int, the teacher's token id at padding.
        teacher_weights: tuple of floats, what each teacher counts, or `None`.
        num_teachers: int, how many teachers rows may name.
        lookup: function of an example to the teacher's most probable tokens,
            `{"ids": (tokens, k), "logps": (tokens, k)}`, for all of its
            tokens or for its last ones; or `None`. Called in several threads.

    Example:

    ```python
    layout = DistillationLayout(batch_size=8, sequence_length=256)
    adapter = BatchAdapter(
        examples, batch_size=8, sequence_length=256, build=layout
    )
    ```
    """

    batch_size: int
    sequence_length: int
    teacher_length: int | None = None
    token_budget: int | None = None
    teacher_budget: int | None = None
    row_multiple: int = 1
    pad_id: int = 0
    teacher_pad_id: int = 0
    teacher_weights: tuple | None = None
    num_teachers: int = 1
    lookup: Callable | None = None

    def row_length(self, examples):
        """The most tokens that one example of these takes in a row."""
        return max(len(example.token_ids) for example in examples)

    def fitted(self, examples):
        """The layout with a teacher's packed rows that fill as the student's.

        Args:
            examples: list of all examples of a run.

        Returns:
            A `DistillationLayout`.
        """
        if self.token_budget is None or not _reads_own(examples):
            return self
        ours = sum(len(example.token_ids) for example in examples)
        theirs = sum(len(example.teacher_ids) for example in examples)
        longest = max(len(example.teacher_ids) for example in examples)
        needed = max(longest, -(-theirs * self.token_budget // ours))
        return dataclasses.replace(self, teacher_budget=_bucket(needed))

    def __call__(self, rows):
        """The batch of a list of examples, each in a list of its own."""
        return self.arrange([x for row in rows for x in row])[0]

    def arrange(self, examples):
        """A batch, and where its sequences are.

        Args:
            examples: list of at most `batch_size` examples.

        Returns:
            Tuple of the dict of arrays, and a list with the `Place` of each
            example in the student's rows.
        """
        own = _reads_own(examples) and self.lookup is None
        rows = self._rows(examples, own)
        if self.token_budget is None:
            shape = {
                "num_rows": -(-self.batch_size // self.row_multiple)
                * self.row_multiple,
                "max_sequences": 1,
            }
            length = _bucket(self.row_length(examples))
        else:
            shape = {
                "num_rows": packing_lib.padded_rows(
                    len(rows), self.row_multiple
                ),
                "max_sequences": MAX_SEQUENCES,
            }
            length = self.token_budget
        batch = packing_lib.assemble(
            rows, length=length, pad_id=self.pad_id, **shape
        )
        if own:
            batch |= self._teacher_rows(rows, examples, shape)
        if _reads_own(examples):
            batch |= _sources(rows, batch["token_ids"].shape, own)
        if self.lookup is not None:
            batch |= self._most_probable(rows, batch["token_ids"].shape)
        if self.teacher_weights is not None or self.num_teachers > 1:
            batch["teacher_weights"] = self._weights(
                rows, batch["sequence_mask"].shape
            )
        found = {
            id(x): Place(r, s, start, start + len(x.token_ids))
            for r, s, start, x in _places(rows)
        }
        return batch, [found[id(x)] for x in examples]

    @property
    def _teacher_room(self):
        """The tokens of a teacher's packed row."""
        if self.teacher_budget is not None:
            return self.teacher_budget
        most = self.teacher_length or self.sequence_length
        return max(most, -(-self.token_budget * most // self.sequence_length))

    def _rows(self, examples, own):
        if self.token_budget is None:
            return [[example] for example in examples]
        sizes = [len(example.token_ids) for example in examples]
        if own:
            # In shares of a row, so that a row has room on both sides.
            room = self._teacher_room
            theirs = [
                -(-len(example.teacher_ids) * self.token_budget // room)
                for example in examples
            ]
            sizes = list(map(max, sizes, theirs))
        rows = packing_lib.pack(sizes, self.token_budget, MAX_SEQUENCES)
        return [[examples[i] for i in row] for row in rows]

    def _teacher_rows(self, rows, examples, shape):
        if self.token_budget is None:
            length = _bucket(max(len(x.teacher_ids) for x in examples))
        else:
            length = self._teacher_room
        batch = packing_lib.assemble(
            [
                [Example(x.teacher_ids, np.float32(0), x.row) for x in row]
                for row in rows
            ],
            length=length,
            pad_id=self.teacher_pad_id,
            **shape,
        )
        kept = ("token_ids", "segment_ids", "positions")
        return {f"teacher_{name}": batch[name] for name in kept}

    def _most_probable(self, rows, shape):
        batch = {}
        for r, _, start, example in _places(rows):
            found = self.lookup(example)
            ids, logps = np.asarray(found["ids"]), np.asarray(found["logps"])
            tokens = len(example.token_ids)
            if ids.shape != logps.shape or len(ids) > tokens or ids.ndim != 2:
                raise ValueError(
                    "A teacher's most probable tokens must have the shape "
                    "(tokens, k), as their log-probabilities have. Received: "
                    f"row {example.row} of the dataset with {tokens} tokens, "
                    f"ids of shape {ids.shape}, logps of shape {logps.shape}."
                )
            if not batch:
                batch = _no_tokens(shape, ids.shape[1])
            stop = start + tokens
            batch["teacher_ids"][r, stop - len(ids) : stop] = ids
            batch["teacher_logps"][r, stop - len(ids) : stop] = logps
        return batch

    def _weights(self, rows, shape):
        weights = self.teacher_weights
        count = self.num_teachers if weights is None else len(weights)
        array = np.zeros((*shape, count), np.float32)
        for r, row in enumerate(rows):
            for s, example in enumerate(row):
                index = getattr(example, "teacher_index", None)
                if index is not None:
                    array[r, s, index] = 1.0
                elif weights is not None:
                    array[r, s] = weights
                else:
                    raise ValueError(
                        "With several teachers a row must name its own, or "
                        "the teachers must have weights. Received: row "
                        f"{example.row} of the dataset without a name, "
                        f"num_teachers={count}, teacher_weights=None."
                    )
        return array


def _reads_own(examples):
    first = examples[0]
    return isinstance(first, Taught) and first.teacher_ids is not None


def _bucket(longest):
    lengths = buckets(longest)
    return lengths[bisect.bisect_left(lengths, longest)]


def _places(rows):
    """`(row, slot, column of its first token, example)` of every one."""
    for r, row in enumerate(rows):
        start = 0
        for s, example in enumerate(row):
            yield r, s, start, example
            start += len(example.token_ids)


def _sources(rows, shape, own):
    """Which tokens the teacher predicts, and from which of its columns."""
    batch = {"teacher_mask": np.zeros(shape, np.float32)}
    if own:
        batch["teacher_source"] = np.zeros(shape, np.int32)
    before = [0] * len(rows)
    for r, _, start, example in _places(rows):
        source = example.teacher_source
        place = slice(start, start + len(source))
        batch["teacher_mask"][r, place] = source >= 0
        if own:
            batch["teacher_source"][r, place] = np.where(
                source >= 0, source + before[r], 0
            )
        before[r] += len(example.teacher_ids)
    return batch


def _no_tokens(shape, k):
    """Well-formed distributions for tokens that carry no weight: equally
    probable different tokens, and the rest."""
    logps = np.full((*shape, k), -np.log(k + 1), np.float32)
    ids = np.broadcast_to(np.arange(k, dtype=np.int32), logps.shape)
    return {"teacher_ids": ids.copy(), "teacher_logps": logps}
