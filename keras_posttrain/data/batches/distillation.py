"""The layout of sequences to distil, and what their teachers read."""

import dataclasses
from collections.abc import Callable

import numpy as np

from keras_posttrain.data.batches.assembly import Segment, assemble
from keras_posttrain.data.batches.layout import BatchLayout
from keras_posttrain.data.batches.packing import fine_lengths
from keras_posttrain.data.rows.examples import summary_of


def distillation_layout(
    *,
    batch_size,
    sequence_length,
    teacher_length=None,
    token_budget=None,
    teacher_budget=None,
    row_multiple=1,
    pad_id=0,
    **settings,
):
    """Makes the layout of sequences to distil.

    Without packing a row is a sequence. With packing a batch's own sequences
    share rows. Where the teacher reads other tokens, it has rows of its own
    next to those of the student: its version of each sequence is in the same
    row, under the same segment. `TeacherExtras` lists the arrays.

    Args:
        batch_size: int, the most sequences of a batch.
        sequence_length: int, the most tokens of a sequence.
        teacher_length: int, the most tokens that a teacher reads of one;
            `None` for `sequence_length`.
        token_budget: int, the tokens of a packed row, or `None` for no
            packing.
        teacher_budget: int, the tokens of a teacher's packed row; `None` for
            as many times `token_budget` as `teacher_length` is of
            `sequence_length`. `fit_teacher_rows` finds a better one.
        row_multiple: int, of which the number of rows is a multiple.
        pad_id: int, the token id at padding.
        **settings: those of `TeacherExtras`.

    Returns:
        A `BatchLayout` of `Example`s.
    """
    if token_budget is None:
        teacher_budget = None
    elif teacher_budget is None:
        most = teacher_length or sequence_length
        share = -(-token_budget * most // sequence_length)
        teacher_budget = max(most, share)
    layout = BatchLayout(
        num_sequences=batch_size,
        sequence_length=sequence_length,
        lengths=fine_lengths,
        token_budget=token_budget,
        row_multiple=row_multiple,
        pad_id=pad_id,
    )
    return _with_extras(
        layout, TeacherExtras(token_budget, teacher_budget, **settings)
    )


def _with_extras(layout, extras):
    return dataclasses.replace(layout, extras=extras, size=extras.size)


def with_lookup(layout, lookup):
    """Returns a layout with the `lookup` that `TeacherExtras` explains."""
    return _with_extras(
        layout, dataclasses.replace(layout.extras, lookup=lookup)
    )


def fit_teacher_rows(layout, examples):
    """Returns a layout whose teacher's rows fill as the student's do.

    `examples` are all those of a run.
    """
    if layout.token_budget is None or not _reads_other_tokens(examples):
        return layout
    summary = summary_of(examples)
    ours = int(summary["tokens"].sum(dtype=np.int64))
    theirs = int(summary["teacher"].sum(dtype=np.int64))
    longest = int(summary["teacher"].max())
    needed = max(longest, -(-theirs * layout.token_budget // ours))
    return _with_extras(
        layout,
        dataclasses.replace(
            layout.extras, teacher_budget=fine_lengths(needed)[-1]
        ),
    )


@dataclasses.dataclass(frozen=True)
class TeacherExtras:
    """Adds the arrays of the teachers to a batch.

    - Where the teacher reads other tokens: `teacher_token_ids`,
      `teacher_segment_ids` and `teacher_positions`, int32 of shape
      `(rows, teacher_length)`, and `teacher_source`, int32 of shape
      `(rows, length)`, the column of the teacher's row whose hidden state
      predicts the student's token;
    - where `lookup` gives the teacher's distributions: `teacher_ids` (int32)
      and `teacher_logps` (float32) of shape `(rows, length, k)`;
    - in both cases, where not every token has a distribution of the
      teacher's: `teacher_mask`, float32 of shape `(rows, length)`;
    - with several teachers: `teacher_weights`, float32 of shape
      `(rows, max_sequences, num_teachers)`.

    Args:
        token_budget, teacher_budget: int, the tokens of the student's and
            the teacher's packed rows; `None` for no packing.
        teacher_pad_id: int, the teacher's token id at padding.
        teacher_weights: tuple of floats, the weight of each teacher, or
            `None`.
        num_teachers: int, how many teachers rows may name.
        lookup: function of an example to the teacher's most probable tokens,
            `{"ids": (tokens, k), "logps": (tokens, k)}`, for all of its
            tokens or for its last ones; or `None`. Called in several threads.
    """

    token_budget: int | None = None
    teacher_budget: int | None = None
    teacher_pad_id: int = 0
    teacher_weights: tuple | None = None
    num_teachers: int = 1
    lookup: Callable | None = None

    # Rows of the teacher have lengths of their own.
    has_lengths = True

    def size(self, example):
        """Returns the tokens of a packed row that a sequence takes up."""
        own = len(example.token_ids)
        if self.lookup is not None or not _reads_other_tokens([example]):
            return own
        # In shares of a row, so that a row has room on both sides.
        theirs = len(example.teacher_ids) * self.token_budget
        return max(own, -(-theirs // self.teacher_budget))

    def __call__(self, batch, groups):
        del groups  # the sequences say it all
        if _reads_other_tokens(list(batch.sequences.values())):
            sources = {i: x.teacher_source for i, x in batch.sequences.items()}
            predicted = {i: source >= 0 for i, source in sources.items()}
            if self.lookup is None:
                self._put_teacher_rows(batch, sources)
            batch.put_tokens("teacher_mask", predicted)
        if self.lookup is not None:
            self._put_distributions(batch)
        if self.teacher_weights is not None or self.num_teachers > 1:
            self._put_weights(batch)

    def _put_teacher_rows(self, batch, sources):
        rows = batch.rows()
        teacher_ids = {i: x.teacher_ids for i, x in batch.sequences.items()}
        length = self.teacher_budget
        if length is None:
            length = fine_lengths(max(map(len, teacher_ids.values())))[-1]
        num_rows, max_sequences = batch.arrays["sequence_mask"].shape
        arrays, places = assemble(
            [[Segment(teacher_ids[i]) for i in row] for row in rows],
            length=length,
            num_rows=num_rows,
            max_sequences=max_sequences,
            pad_id=self.teacher_pad_id,
        )
        for name in ("token_ids", "segment_ids", "positions"):
            batch.arrays[f"teacher_{name}"] = arrays[name]
        numbers = [i for row in rows for i in row]
        columns = {
            i: np.where(sources[i] >= 0, sources[i] + place.start, 0)
            for i, place in zip(numbers, places, strict=True)
        }
        batch.put_tokens("teacher_source", columns, np.int32)

    def _put_distributions(self, batch):
        shape = batch.arrays["token_ids"].shape
        found = {}
        for i, place in batch.places.items():
            example = batch.sequences[i]
            given = self.lookup(example)
            ids, logps = np.asarray(given["ids"]), np.asarray(given["logps"])
            tokens = len(example.token_ids)
            if ids.shape != logps.shape or len(ids) > tokens or ids.ndim != 2:
                raise ValueError(
                    "A teacher's most probable tokens must have the shape "
                    "(tokens, k), as their log-probabilities have. Received: "
                    f"row {example.row} of the dataset with {tokens} tokens, "
                    f"ids of shape {ids.shape}, logps of shape {logps.shape}."
                )
            found = found or _padding_distributions(shape, ids.shape[1])
            columns = slice(place.stop - len(ids), place.stop)
            found["teacher_ids"][place.row, columns] = ids
            found["teacher_logps"][place.row, columns] = logps
        batch.arrays |= found

    def _put_weights(self, batch):
        weights = self.teacher_weights
        count = self.num_teachers if weights is None else len(weights)
        shape = batch.arrays["sequence_mask"].shape
        array = np.zeros((*shape, count), np.float32)
        for i, place in batch.places.items():
            example = batch.sequences[i]
            index = getattr(example, "teacher_index", None)
            if index is not None:
                array[place.row, place.slot, index] = 1.0
            elif weights is not None:
                array[place.row, place.slot] = weights
            else:
                raise ValueError(
                    "With several teachers a row must name its own, or "
                    "the teachers must have weights. Received: row "
                    f"{example.row} of the dataset without a name, "
                    f"num_teachers={count}, teacher_weights=None."
                )
        batch.arrays["teacher_weights"] = array


def _reads_other_tokens(examples):
    return getattr(examples[0], "teacher_ids", None) is not None


def _padding_distributions(shape, k):
    """Returns well-formed distributions for tokens without weight in the
    loss: `k` tokens and the rest, all equally probable."""
    logps = np.full((*shape, k), -np.log(k + 1), np.float32)
    ids = np.broadcast_to(np.arange(k, dtype=np.int32), logps.shape)
    return {"teacher_ids": ids.copy(), "teacher_logps": logps}
