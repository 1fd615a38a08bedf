"""Rows of a dataset to tokens with weights, checked and counted."""

import collections
import dataclasses

import numpy as np

from keras_posttrain.data.rows import columns, datasets, encoding

TRUNCATIONS = ("error", "drop", "cut")
NO_LOSS = "no token with loss"
TOO_LONG = "too long"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Example:
    """One sequence of tokens, ready for a batch.

    Args:
        token_ids: int32 array of shape `(length,)`.
        completion_mask: float32 array of shape `(length,)`, the weight of
            each token in the loss; 0 at the first, which nothing predicts.
        row: int, index of the dataset row.
    """

    token_ids: np.ndarray
    completion_mask: np.ndarray
    row: int

    # An example is a group of one sequence to a `BatchLayout`.

    @property
    def sequences(self):
        return [self]

    @property
    def prefix_length(self):
        return 0


def completion_example(prompt, completion, mask, row):
    """Makes the `Example` of a prompt, without loss, and a completion.

    Args:
        prompt: int32 array of shape `(tokens,)`.
        completion: int32 array of shape `(tokens,)`.
        mask: float32 array of the completion's shape.
        row: int, index of the dataset row.
    """
    before = np.zeros(len(prompt), np.float32)
    return Example(
        np.concatenate([prompt, completion]),
        np.concatenate([before, mask]),
        row,
    )


@dataclasses.dataclass
class DataReport:
    """What became of a dataset's rows.

    Args:
        name: string, what the dataset is called.
        rows: int, rows read.
        kept: int, rows that are trained on.
        dropped: dict of reasons to numbers of rows.
        cut: int, kept rows whose end was cut off.
        tokens: int, tokens of the kept rows.
        loss_tokens: int, those of them with a weight in the loss.
        longest: int, tokens of the longest row as it was read.
    """

    name: str = "dataset"
    rows: int = 0
    kept: int = 0
    dropped: dict = dataclasses.field(default_factory=collections.Counter)
    cut: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    longest: int = 0

    @property
    def loss_share(self):
        """Float, the share of tokens that carry loss."""
        return self.loss_tokens / self.tokens if self.tokens else 0.0

    def __str__(self):
        reasons = ", ".join(f"{n:,} {why}" for why, n in self.dropped.items())
        dropped = sum(self.dropped.values())
        return (
            f"{self.name}: {self.rows:,} rows, {self.kept:,} kept, "
            f"{dropped:,} dropped"
            + (f" ({reasons})" if reasons else "")
            + ", "
            f"{self.cut:,} cut; {self.tokens:,} tokens, "
            f"{self.loss_tokens:,} with loss ({self.loss_share:.1%}); "
            f"longest row {self.longest:,} tokens"
        )


def prepare_sft(
    dataset,
    tokenizer,
    *,
    sequence_length,
    truncation="error",
    train_on="auto",
    vocabulary_size,
    chat_template_kwargs=None,
    name="dataset",
):
    """Tokenizes and checks the rows of a dataset for supervised training.

    A row is one of
    - `{"text"}`: opened as the tokenizer opens a text, and ended;
    - `{"messages"}`, and `"tools"` where there are any;
    - `{"prompt", "completion"}`, each a string or a list of messages;
    - `{"prompt_ids", "completion_ids"}`, taken as they are;
    - `{"token_ids", "completion_mask"}`, taken as they are; the mask may hold
      weights.

    A `"weight"` of a row multiplies its mask. All rows of a dataset are of
    one type; other columns are left alone.

    Args:
        dataset: a list of dicts, a `datasets.Dataset`, a Grain `MapDataset`
            or `IterDataset`, or a path to `.jsonl`, `.json` or `.parquet`.
        tokenizer: a `Tokenizer`; `None` will do for tokenised rows.
        sequence_length: int, the most tokens of a row.
        truncation: what becomes of longer rows: `"error"`, `"drop"`, or
            `"cut"` off their ends.
        train_on: `"completion"` (of messages: the last assistant turn),
            `"assistant"` (all its turns), `"all"` tokens, or `"auto"`: the
            assistant's turns of messages, the completion of rows that have
            one, all of a text.
        vocabulary_size: int, how many token ids the model has.
        chat_template_kwargs: dict of further variables for the chat template,
            or `None`.
        name: string, what to call the dataset in errors and the report.

    Returns:
        Tuple `(examples, report)`: a list of `Example`s and a `DataReport`.
        Of a Grain `IterDataset` the examples are a Grain `IterDataset` that
        prepares rows as they are read, and the report fills as it goes.

    Raises:
        ValueError: a row cannot be used; the message names it.

    Example:

    ```python
    rows = [{"prompt_ids": [5, 6], "completion_ids": [7, 1]}]
    examples, report = prepare_sft(
        rows, None, sequence_length=8, vocabulary_size=10
    )
    examples[0].completion_mask  # [0, 0, 1, 1]
    ```
    """
    prepare = Preparation(
        tokenizer,
        sequence_length=sequence_length,
        truncation=truncation,
        train_on=train_on,
        vocabulary_size=vocabulary_size,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        report=DataReport(name),
    )
    return prepare_rows(dataset, prepare), prepare.report


def prepare_rows(dataset, prepare):
    """The examples of a dataset, as `prepare_sft` returns them.

    Args:
        dataset: as of `prepare_sft`.
        prepare: a `Preparation`.

    Returns:
        List of examples, or a Grain `IterDataset` of them.

    Raises:
        ValueError: a row cannot be used, or none is left.
    """
    if datasets.is_stream(dataset):
        return dataset.map_with_index(prepare).filter(_is_kept)
    name = prepare.report.name
    rows = datasets.read_rows(dataset, name)
    examples = [
        example
        for index in range(len(rows))
        if (row := rows[index]) is not None
        and (example := prepare(index, row)) is not None
    ]
    if not examples:
        raise ValueError(
            f"No row of `{name}` is left to train on. Received: "
            f"{prepare.report}. Use a larger `sequence_length`, or "
            "truncation='cut'."
        )
    return examples


def _is_kept(example):
    return example is not None


class Preparation:
    """Prepares one row at a time: `(index, row)` to an `Example` or `None`.

    Args:
        tokenizer: a `Tokenizer`, or `None` for tokenised rows.
        report: a `DataReport`, filled as rows are prepared.
        **settings: those of `prepare_sft`.
    """

    def __init__(
        self,
        tokenizer,
        *,
        sequence_length,
        truncation,
        train_on,
        vocabulary_size,
        chat_template_kwargs,
        report,
    ):
        if sequence_length < 2:
            raise ValueError(
                "`sequence_length` must be at least 2: a token is predicted "
                f"from one before it. Received: {sequence_length=}."
            )
        if truncation not in TRUNCATIONS:
            raise ValueError(
                f"`truncation` must be one of {TRUNCATIONS}. Received: "
                f"{truncation=}."
            )
        encoding.check_train_on(train_on)
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.truncation = truncation
        self.train_on = train_on
        self.vocabulary_size = vocabulary_size
        self.chat_template_kwargs = chat_template_kwargs
        self.report = report
        self.first = None

    def __call__(self, index, row):
        where, kind = self.check(index, row)
        ids, mask = encoding.encode_row(
            row,
            kind,
            self.tokenizer,
            self.train_on,
            self.chat_template_kwargs,
            where,
        )
        return self.fit(index, ids, mask, columns.weight(row, where), where)

    def check(self, index, row):
        """What to call the row in an error, and its type."""
        where = f"row {index} of `{self.report.name}`"
        kind = columns.row_kind(row, where)
        if self.first is None:
            self.first = (index, kind)
        if kind != self.first[1]:
            raise ValueError(
                "All rows of a dataset must be of one type. Received: row "
                f"{self.first[0]} has {columns.describe(self.first[1])}, "
                f"{where} has {columns.describe(kind)}. Train on them as two "
                "datasets, or turn them into one type."
            )
        return where, kind

    def fit(self, index, ids, mask, weight, where):
        """The `Example` within the limit, or `None` for a dropped row."""
        columns.check_token_ids(ids, self.vocabulary_size, where)
        mask[:1] = 0.0
        report, limit = self.report, self.sequence_length
        length = len(ids)
        if length > limit and self.truncation == "error":
            raise ValueError(
                "A row must have at most `sequence_length` tokens. Received: "
                f"{where} with {length} tokens, sequence_length={limit}. Use "
                f"sequence_length={length} or more, truncation='drop' to "
                "leave out such rows, or truncation='cut' to cut their ends."
            )
        if self.truncation == "error" and not mask.any():
            raise ValueError(
                "A row must have a token to learn: one with a weight in the "
                "loss that is not the row's first. Received: "
                f"{where} with {length} tokens, none of which carries loss. "
                "Remove the row, or use truncation='drop'."
            )
        report.rows += 1
        report.longest = max(report.longest, length)
        if length > limit and self.truncation == "drop":
            report.dropped[TOO_LONG] += 1
            return None
        ids, mask = ids[:limit], mask[:limit]
        if not mask.any():
            report.dropped[NO_LOSS] += 1
            return None
        report.cut += length > limit
        report.kept += 1
        report.tokens += len(ids)
        mask = mask * np.float32(weight)
        report.loss_tokens += int(np.count_nonzero(mask))
        return Example(ids.astype(np.int32), mask, index)
