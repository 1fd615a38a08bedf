"""Rows of distillation to tokens: what the student and the teacher read."""

import numpy as np

from keras_posttrain.data.chat import alignment
from keras_posttrain.data.rows import columns, datasets, encoding
from keras_posttrain.data.rows.distillation_columns import (
    check_own_tokens,
    check_prompt,
    teacher_index,
    teacher_prompt_column,
)
from keras_posttrain.data.rows.distillation_example import (
    DistillationReport,
    Taught,
    behind_prompt,
)
from keras_posttrain.data.rows.examples import (
    TOO_LONG,
    Preparation,
    prepare_rows,
)


def prepare_distillation(
    dataset,
    tokenizer,
    *,
    sequence_length,
    vocabulary_size,
    teacher_tokenizer=None,
    teacher_length=None,
    teacher_vocabulary_size=None,
    teacher_column=None,
    teacher_names=None,
    truncation="error",
    train_on="auto",
    chat_template_kwargs=None,
    name="dataset",
):
    """Tokenizes and checks the rows of a dataset for distillation.

    Rows are those of supervised training. The teacher reads what the student
    reads, unless

    - a row has a `"teacher_prompt"` (a string or messages, beside
      `"prompt"` and `"completion"`) or `"teacher_prompt_ids"` (beside
      `"prompt_ids"` and `"completion_ids"`): then that prompt stands before
      the same completion;
    - the teacher has a tokenizer of its own: then rows are texts, which both
      tokenizers read, and a token can be taught where both have a token
      boundary before it.

    Args:
        dataset: a list of dicts, a `datasets.Dataset`, a Grain `MapDataset`,
            a path to `.jsonl`, `.json` or `.parquet`, or, where the teacher
            reads what the student reads, a Grain `IterDataset`.
        tokenizer: a `Tokenizer`; `None` will do for tokenised rows.
        sequence_length: int, the most tokens of a row.
        vocabulary_size: int, how many token ids the student has.
        teacher_tokenizer: a `Tokenizer` with another vocabulary, or `None`.
        teacher_length: int, the most tokens that the teacher reads of a row;
            `None` for `sequence_length`.
        teacher_vocabulary_size: int, how many token ids the teacher has;
            `None` for `vocabulary_size`.
        teacher_column: string, the column that names a row's teacher, or
            `None`.
        teacher_names: list of strings, the names of the teachers in their
            order, or `None`.
        truncation: what becomes of longer rows: `"error"`, `"drop"`, or
            `"cut"` off their ends.
        train_on: as of `prepare_sft`.
        chat_template_kwargs: dict of further variables for the chat
            templates, or `None`.
        name: string, what to call the dataset in errors and the report.

    Returns:
        Tuple `(examples, report)`: a list of `Example`s, which are `Taught`
        where the teacher reads other tokens or is named by the row (of a
        Grain `IterDataset`, another one), and a `DistillationReport`.

    Raises:
        ValueError: a row cannot be used; the message names it.

    Example:

    ```python
    rows = [{
        "prompt_ids": [5],
        "completion_ids": [7, 1],
        "teacher_prompt_ids": [8, 9, 5],
    }]
    [example], report = prepare_distillation(
        rows, None, sequence_length=8, vocabulary_size=10
    )
    example.teacher_ids  # [8, 9, 5, 7, 1]
    example.teacher_source  # [-1, 2, 3]
    ```
    """
    if (teacher_column is None) != (teacher_names is None):
        raise ValueError(
            "`teacher_column` and `teacher_names` go together: the column "
            f"holds one of the names. Received: {teacher_column=}, "
            f"{teacher_names=}."
        )
    if teacher_tokenizer is tokenizer:
        teacher_tokenizer = None
    prepare = _Preparation(
        tokenizer,
        teacher_tokenizer=teacher_tokenizer,
        teacher_limit=teacher_length or sequence_length,
        teacher_vocabulary_size=teacher_vocabulary_size or vocabulary_size,
        teacher_column=teacher_column,
        teacher_names=teacher_names,
        is_stream=datasets.is_stream(dataset),
        sequence_length=sequence_length,
        truncation=truncation,
        train_on=train_on,
        vocabulary_size=vocabulary_size,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        report=DistillationReport(name),
    )
    examples, report = prepare_rows(dataset, prepare), prepare.report
    if report.teacher_tokens and not report.taught_tokens:
        raise ValueError(
            "The teacher must predict a token of some row: one before which "
            "both tokenizers have a token boundary. Received: "
            f"{report}. Do both chat templates write the same words, and is "
            "`teacher_length` long enough?"
        )
    return examples, report


class _Preparation(Preparation):
    """Prepares one row at a time: `(index, row)` to an example or `None`."""

    def __init__(
        self,
        tokenizer,
        *,
        teacher_tokenizer,
        teacher_limit,
        teacher_vocabulary_size,
        teacher_column,
        teacher_names,
        is_stream,
        **settings,
    ):
        super().__init__(tokenizer, **settings)
        self.teacher_tokenizer = teacher_tokenizer
        self.teacher_limit = teacher_limit
        self.teacher_vocabulary_size = teacher_vocabulary_size
        self.teacher_column = teacher_column
        self.teacher_names = teacher_names
        self.is_stream = is_stream
        self.first_prompt = None
        # Tokenizers whose places can be compared, made when asked for.
        self.readers = None

    def __call__(self, index, row):
        where, kind = self.check(index, row)
        column = self._prompt_column(index, row, kind, where)
        teacher_ids = source = teacher = None
        if column is None and self.teacher_tokenizer is None:
            ids, mask = self._encode_row(row, kind, where)
        else:
            sides = self._tokens if kind == "token_pairs" else self._texts
            ids, mask, teacher_ids, source = sides(row, kind, column, where)
            if not self._teacher_fits(ids, teacher_ids, where):
                return None
        if self.teacher_column is not None:
            teacher = teacher_index(
                row, self.teacher_column, self.teacher_names, where
            )
        plain = teacher_ids is None and teacher is None
        if self.is_stream and not plain:
            raise ValueError(
                "Rows with a teacher's prompt, tokenizer or name must have "
                f"random access. Received: {where}, a Grain `IterDataset`. "
                "Use a Grain `MapDataset`, a list of dicts or a file."
            )
        weight = columns.weight(row, where)
        example = self.fit(index, ids, mask, weight, where)
        if example is None or plain:
            return example
        if teacher_ids is not None:
            source[mask == 0] = -1
            source = source[: len(example.token_ids)]
            source[source >= self.teacher_limit] = -1
            if len(teacher_ids) > self.teacher_limit:
                # A row that is cut on both sides is counted once.
                self.report.cut += len(example.token_ids) == len(ids)
            teacher_ids = teacher_ids[: self.teacher_limit].astype(np.int32)
            self._count(example, teacher_ids, source)
        return Taught(
            example.token_ids,
            example.completion_mask,
            index,
            teacher_ids,
            source,
            teacher,
        )

    def _encode_row(self, row, kind, where):
        return encoding.encode_row(
            row,
            kind,
            self.tokenizer,
            self.train_on,
            self.chat_template_kwargs,
            where,
        )

    def _prompt_column(self, index, row, kind, where):
        """The column of the teacher's own prompt, or `None`."""
        column = teacher_prompt_column(row, kind, self.teacher_column, where)
        has = column is not None
        if self.first_prompt is None:
            self.first_prompt = (index, has)
        first, expected = self.first_prompt
        if has != expected:
            one, other = (index, first) if has else (first, index)
            raise ValueError(
                "All rows of a dataset must have a teacher's prompt, or none. "
                f"Received: row {one} of `{self.report.name}` has one, row "
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
        return ids, mask, *behind_prompt(prompt, completion, len(ids))

    def _texts(self, row, kind, column, where):
        if self.readers is None and self.tokenizer is not None:
            self.readers = [
                alignment.with_whole_places(tokenizer or self.tokenizer)
                for tokenizer in (self.tokenizer, self.teacher_tokenizer)
            ]
        ours, theirs = self.readers or (None, None)
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

    def _encode_text(self, row, kind, tokenizer, where):
        return encoding.encode_text(
            row,
            kind,
            tokenizer,
            self.train_on,
            self.chat_template_kwargs,
            where,
        )

    def _teacher_fits(self, ids, teacher_ids, where):
        """Whether the row is kept as far as the teacher is concerned."""
        columns.check_token_ids(
            teacher_ids, self.teacher_vocabulary_size, f"{where} (teacher)"
        )
        length, limit = len(teacher_ids), self.teacher_limit
        if length <= limit or self.truncation == "cut":
            return True
        if self.truncation == "error":
            raise ValueError(
                "What the teacher reads must have at most `teacher_length` "
                f"tokens. Received: {where} with {length} tokens for the "
                f"teacher, teacher_length={limit}. Use "
                f"teacher_length={length} or more, truncation='drop' to "
                "leave out such rows, or truncation='cut' to cut their ends."
            )
        report = self.report
        report.rows += 1
        report.longest = max(report.longest, len(ids))
        report.dropped[f"{TOO_LONG} for the teacher"] += 1
        return False

    def _count(self, example, teacher_ids, source):
        taught = (source >= 0) & (example.completion_mask != 0)
        self.report.teacher_tokens += len(teacher_ids)
        self.report.taught_tokens += int(taught.sum())
        self.report.untaught += not taught.any()
