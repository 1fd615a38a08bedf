"""Encodes rows of distillation: what the student and the teacher read."""

import dataclasses
import functools

import numpy as np

from keras_posttrain.data.chat import alignment
from keras_posttrain.data.rows import columns, encoding
from keras_posttrain.data.rows.distillation_columns import (
    check_own_tokens,
    check_prompt,
    teacher_index,
    teacher_prompt_column,
)
from keras_posttrain.data.rows.distillation_example import (
    DistillationExample,
    teacher_view,
)
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.data.rows.preparation import (
    TOO_LONG,
    DroppedRow,
    EncodedRow,
)
from keras_posttrain.data.rows.sft_encoder import RowTypeCheck


@dataclasses.dataclass
class DistillationEncoder:
    """Encodes rows of distillation; see `prepare_distillation`."""

    settings: object
    train_on: str
    teacher_tokenizer: object
    teacher_limit: int
    teacher_vocabulary_size: int
    teacher_column: str | None
    teacher_names: list | None

    def __post_init__(self):
        encoding.check_train_on(self.train_on)
        if self.teacher_names is not None:
            self.teacher_names = list(self.teacher_names)
        self.row_type = RowTypeCheck()
        self.first_prompt = {}

    @property
    def firsts(self):
        return [self.row_type.first, self.first_prompt]

    @property
    def key(self):
        others = ("settings", "teacher_tokenizer")
        names = [f.name for f in dataclasses.fields(self)]
        teacher = self.teacher_tokenizer
        return {n: getattr(self, n) for n in names if n not in others} | {
            "teacher_tokenizer": teacher and teacher.content
        }

    def __call__(self, index, row, where):
        kind = self.row_type(index, row, where)
        column = self._prompt_column(index, row, kind, where)
        teacher_ids = source = teacher = None
        if column is None and self.teacher_tokenizer is None:
            ids, mask = self._encode_row(row, kind, where)
        else:
            sides = self._tokens if kind == "token_pairs" else self._texts
            ids, mask, teacher_ids, source = sides(row, kind, column, where)
            self._check_teacher_ids(ids, teacher_ids, where)
        if self.teacher_column is not None:
            teacher = teacher_index(
                row, self.teacher_column, self.teacher_names, where
            )
        build, count = functools.partial(Example, row=index), None
        if teacher_ids is not None or teacher is not None:
            build = functools.partial(
                self._build, index, mask, teacher_ids, source, teacher
            )
        if teacher_ids is not None:
            count = functools.partial(self._count, len(ids), len(teacher_ids))
        return EncodedRow(
            [(ids, mask)],
            lambda sides: build(*sides[0]),
            columns.weight(row, where),
            (*columns.read_columns(kind), column, self.teacher_column),
            count=count,
        )

    def _build(
        self, index, mask, teacher_ids, source, teacher, token_ids, weights
    ):
        if teacher_ids is not None:
            source[mask == 0] = -1
            source = source[: len(token_ids)]
            source[source >= self.teacher_limit] = -1
            teacher_ids = teacher_ids[: self.teacher_limit].astype(np.int32)
        return DistillationExample(
            token_ids,
            weights,
            index,
            teacher_ids=teacher_ids,
            teacher_source=source,
            teacher_index=teacher,
        )

    def _count(self, length, teacher_length, report, example):
        """Counts what the teacher reads of a row; lengths are uncut."""
        if teacher_length > self.teacher_limit:
            # A row that is cut on both sides is counted once.
            report.cut += len(example.token_ids) == length
        weights, source = example.completion_mask, example.teacher_source
        predicted = (source >= 0) & (weights != 0)
        report.teacher_tokens += len(example.teacher_ids)
        report.predicted_tokens += int(predicted.sum())
        report.unpredicted_rows += not predicted.any()

    def _encode_row(self, row, kind, where):
        return encoding.encode_row(
            row, kind, self.settings, self.train_on, where
        )

    def _prompt_column(self, index, row, kind, where):
        """The column of the teacher's own prompt, or `None`."""
        column = teacher_prompt_column(row, kind, self.teacher_column, where)
        has = column is not None
        first, expected = self.first_prompt.setdefault(None, (index, has))
        if has != expected:
            one, other = (index, first) if has else (first, index)
            raise ValueError(
                "All rows of a dataset must have a teacher's prompt, or none. "
                f"Received: row {one} of `{self.settings.name}` has one, row "
                f"{other} has none. Where the teacher reads no more than the "
                "student, repeat the row's prompt as the teacher's."
            )
        if has or self.teacher_tokenizer is not None:
            check_own_tokens(
                kind, self.teacher_tokenizer, self.train_on, where
            )
        return column

    def _tokens(self, row, kind, column, where):
        ids, mask = self._encode_row(row, kind, where)
        prompt = columns.int_array(row[column], where, column)
        completion = ids[len(row["prompt_ids"]) :]
        return ids, mask, *teacher_view(prompt, completion, len(ids))

    def _texts(self, row, kind, column, where):
        ours, theirs = self.readers
        student = self._encode_text(row, kind, ours, where)
        if column is not None:
            check_prompt(row, column, where)
            row = row | {"prompt": row[column]}
        try:
            teacher = self._encode_text(row, kind, theirs, where)
        except ValueError as error:
            raise ValueError(
                f"What the teacher reads cannot be made. {error}"
            ) from error
        if len(student.spans) != len(teacher.spans):
            raise ValueError(
                "The chat templates of the student and the teacher must "
                "write as many of the assistant's turns. Received: "
                f"{where} with {len(student.spans)} of the student's and "
                f"{len(teacher.spans)} of the teacher's. Do not use several "
                "`{% generation %}` blocks for one turn."
            )
        source = alignment.align(
            student, teacher, same_vocabulary=self.teacher_tokenizer is None
        )
        return student.token_ids, student.mask, teacher.token_ids, source

    @functools.cached_property
    def readers(self):
        """The settings of both sides, with offsets that can be compared."""
        tokenizer = self.settings.tokenizer
        if tokenizer is None:
            # Rows of text are refused.
            return self.settings, self.settings
        return [
            dataclasses.replace(
                self.settings, tokenizer=alignment.with_whole_places(reader)
            )
            for reader in (tokenizer, self.teacher_tokenizer or tokenizer)
        ]

    def _encode_text(self, row, kind, settings, where):
        return encoding.encode_text(row, kind, settings, self.train_on, where)

    def _check_teacher_ids(self, ids, teacher_ids, where):
        """Raises or drops the row where the teacher cannot read it."""
        columns.check_token_ids(
            teacher_ids, self.teacher_vocabulary_size, f"{where} (teacher)"
        )
        length, limit = len(teacher_ids), self.teacher_limit
        truncation = self.settings.truncation
        if length <= limit or truncation == "cut":
            return
        if truncation == "error":
            raise ValueError(
                "What the teacher reads must have at most `teacher_length` "
                f"tokens. Received: {where} with {length} tokens for the "
                f"teacher, teacher_length={limit}. Use "
                f"teacher_length={length} or more, truncation='drop' to "
                "leave out such rows, or truncation='cut' to cut their ends."
            )
        raise DroppedRow(f"{TOO_LONG} for the teacher", len(ids))
