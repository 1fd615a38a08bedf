"""The preparation of a dataset's rows: encoded, checked, cut and counted."""

import dataclasses
from collections.abc import Callable

import numpy as np

from keras_posttrain.data.rows import columns, known_formats
from keras_posttrain.data.rows.images import (
    COLUMNS,
    ImageReader,
    refuse_images,
)

TRUNCATIONS = ("error", "drop", "cut")
NO_LOSS = "no token with loss"
TOO_LONG = "too long"
EMPTY = "None"


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """The settings that all kinds of rows are prepared with.

    Args:
        tokenizer: a `Tokenizer`, or `None` where all rows are tokenised.
        sequence_length: int, the most tokens of a sequence.
        vocabulary_size: int, how many token ids the model has.
        truncation: string, how longer rows are treated: `"error"`,
            `"drop"`, or `"cut"` off their ends.
        chat_template_kwargs: dict of further variables for the chat template,
            or `None`.
        name: string, the dataset's name in errors and the report.
        images: `ImageReader`, or `None` where rows have no images.
    """

    tokenizer: object
    sequence_length: int
    vocabulary_size: int
    truncation: str = "error"
    chat_template_kwargs: dict | None = None
    name: str = "dataset"
    images: ImageReader | None = None

    def __post_init__(self):
        # Keras wraps the dicts and lists of a model's attributes.
        kwargs = _plain(self.chat_template_kwargs)
        object.__setattr__(self, "chat_template_kwargs", kwargs)
        if self.sequence_length < 2:
            raise ValueError(
                "`sequence_length` must be at least 2: a token is predicted "
                "from one before it. Received: "
                f"sequence_length={self.sequence_length}."
            )
        if self.truncation not in TRUNCATIONS:
            raise ValueError(
                f"`truncation` must be one of {TRUNCATIONS}. Received: "
                f"truncation={self.truncation!r}."
            )


def _plain(value):
    """Returns a value with Python's own dicts and lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(map(_plain, value))
    return value


class DroppedRow(Exception):
    """Raised by an encoder to leave a row out; the report counts it.

    Args:
        reason: string, a key of `DataReport.dropped`.
        length: int, tokens of the row, where the row was not encoded.
    """

    def __init__(self, reason, length=0):
        super().__init__(reason)
        self.reason, self.length = reason, length


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedRow:
    """A row as token ids, before it is checked and cut.

    Args:
        sides: list of `(token_ids, completion_mask)`, one for each of its
            sequences: int64 and float32 arrays of shape `(length,)`.
        build: function of the sides within the limit to an example.
        weight: float, by which the masks are multiplied.
        read: the columns that were read, or `None` where all are.
        num_image_tokens: int, how many tokens of images each side has.
        count: function of a report and the example that adds further numbers
            of the row to the report, or `None`.
    """

    sides: list
    build: Callable
    weight: float = 1.0
    read: tuple | None = None
    num_image_tokens: int = 0
    count: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Messages:
    """The errors of one kind of rows.

    Args:
        too_long: template with `where`, `length` and `limit`.
        no_loss: template with `where` and `length`; `None` where rows need
            no token with loss.
        none_left: template with `name` and `report`.
    """

    too_long: str
    no_loss: str | None
    none_left: str


class Preparation:
    """Prepares one row at a time: `(index, row)` to an example or `None`.

    Args:
        encode: function `(index, row, where)` to an `EncodedRow`; `where`
            names the row in errors. It may raise `DroppedRow`. `key` is a
            dict of its settings, `None` where its examples are not worth
            storing; `firsts` a list of dicts of what the first row of each
            source has set for the others, as `(index, value)`.
        settings: `RowSettings`.
        messages: `Messages`.
        report: `DataReport`, filled as rows are prepared.
        limit: int, the most tokens; `None` for `settings.sequence_length`.
        prompts: bool, whether rows are prompts to sample from. One that is
            cut keeps its end.
        converts: bool, whether rows of known formats are converted.
    """

    def __init__(
        self,
        encode,
        settings,
        messages,
        report,
        limit=None,
        prompts=False,
        converts=True,
    ):
        self.encode, self.settings = encode, settings
        self.messages, self.report = messages, report
        self.limit = limit or settings.sequence_length
        kept = slice(-self.limit, None) if prompts else slice(self.limit)
        self._kept, self._prompts, self._converts = kept, prompts, converts
        # The rows of a stream are counted when they are first read.
        self._counted = 0

    @property
    def key(self):
        """All that the examples of given rows depend on, or `None`."""
        if self.encode.key is None:
            return None
        settings = self.settings
        tokenizer = settings.tokenizer and settings.tokenizer.content
        return {
            "encoder": type(self.encode).__name__,
            "encoder settings": self.encode.key,
            "tokenizer": tokenizer,
            "limit": self.limit,
            "kept": (self._kept.start, self._kept.stop),
            "converts": self._converts,
        } | {
            name: getattr(settings, name)
            for name in (
                "sequence_length",
                "vocabulary_size",
                "truncation",
                "chat_template_kwargs",
                "images",
            )
        }

    def first_values(self):
        """Returns `encode.firsts` as lists that JSON can store."""
        return [
            # A thread that reads a stream may add one meanwhile.
            [[source, *first] for source, first in list(firsts.items())]
            for firsts in self.encode.firsts
        ]

    def agrees(self, first_values):
        """Takes over what rows elsewhere have set for the others.

        Args:
            first_values: as of `first_values`.

        Returns:
            Bool, `False` where they are not of the types of the rows before.
        """
        found = list(zip(self.encode.firsts, first_values, strict=True))
        for ours, theirs in found:
            for source, _, value in theirs:
                if source in ours and ours[source][1] != value:
                    return False
        for ours, theirs in found:
            for source, index, value in theirs:
                ours.setdefault(source, (index, value))
        return True

    def restorer(self, rows):
        """Returns the function of what is stored of an example to it.

        It is `None` where all of it is stored. Else it reads the rest in the
        example's row.
        """
        if not hasattr(self.encode, "restore"):
            return None

        def restore(example):
            new, _ = self._convert(rows[example.row], "row")
            return self.encode.restore(example, new)

        return restore

    def __call__(self, index, row):
        if index < self._counted:
            return self.counted(index, row)[0]
        self._counted = index + 1
        return self._prepare(index, row, self.report)

    def counted(self, index, row):
        """Returns the example of a row, and the `counts` of its report."""
        report = type(self.report)(self.report.name)
        return self._prepare(index, row, report), report.counts()

    def count(self, index, counts):
        """Adds the `counts` of a row to the report, if it is a new one."""
        if index >= self._counted:
            self._counted = index + 1
            self.report.add(counts)

    def _prepare(self, index, row, report):
        report.rows += 1
        where = f"row {index} of `{self.settings.name}`"
        if source := getattr(row, "source", None):
            where = f"row {index} of `{self.settings.name}`, from {source!r}"
            report.sources[source] += 1
        try:
            if row is None:
                raise DroppedRow(EMPTY)
            encoded = self._encoded(index, row, where, report)
            length = self._check(encoded.sides, where)
            report.longest = max(report.longest, length)
            sides = self._cut(encoded, length)
            example = encoded.build(sides)
        except DroppedRow as dropped:
            report.longest = max(report.longest, dropped.length)
            report.dropped[dropped.reason] += 1
            return None
        report.kept += 1
        report.cut += length > self.limit
        report.tokens += sum(len(ids) for ids, _ in sides)
        report.loss_tokens += sum(np.count_nonzero(m) for _, m in sides)
        if encoded.count is not None:
            encoded.count(report, example)
        return example

    def _encoded(self, index, row, where, report):
        """Returns the `EncodedRow`, of a row that is converted first."""
        try:
            new, format = self._convert(row, where)
            if format is not None:
                report.converted[format] += 1
                if hasattr(row, "source"):
                    new = columns.MixedRow(new, row.source)
            if self._converts and self.settings.images is None:
                refuse_images(new, where)
            encoded = self.encode(index, new, where)
        except RecursionError:
            raise ValueError(
                "A row must not be nested so deeply. Received: "
                f"{where} with the columns {list(map(str, row))}."
            ) from None
        except (UnicodeEncodeError, TypeError):
            columns.check_characters(row, where)
            raise
        if encoded.read is not None:
            unread = COLUMNS if self.settings.images is None else ()
            for column, value in new.items():
                is_read = column in encoded.read and column not in unread
                if value is not None and not is_read:
                    report.unused[column] += 1
        return encoded

    def _convert(self, row, where):
        """Returns a row in this library's format, and the one it had."""
        if not self._converts:
            return row, None
        tokenizer = self.settings.tokenizer
        return known_formats.convert(
            row,
            where,
            has_template=getattr(tokenizer, "chat_template", None),
            prompts=self._prompts,
        )

    def _check(self, sides, where):
        """Returns the tokens of the longest side.

        Raises:
            ValueError: a side cannot be used.
        """
        for ids, mask in sides:
            columns.check_token_ids(ids, self.settings.vocabulary_size, where)
            mask[:1] = 0.0
        longest = max(len(ids) for ids, _ in sides)
        if self.settings.truncation != "error":
            return longest
        if longest > self.limit:
            raise ValueError(
                self.messages.too_long.format(
                    where=where, length=longest, limit=self.limit
                )
            )
        for ids, mask in sides:
            if self.messages.no_loss is not None and not _has_loss(mask):
                raise ValueError(
                    self.messages.no_loss.format(where=where, length=len(ids))
                )
        return longest

    def _cut(self, encoded, length):
        """Returns the sides within the limit, their masks weighted."""
        if length > self.limit and self.settings.truncation == "drop":
            raise DroppedRow(TOO_LONG)
        sides = [(ids[self._kept], m[self._kept]) for ids, m in encoded.sides]
        if encoded.num_image_tokens:
            # An image is never cut.
            token = self.settings.images.token_id
            counts = [np.count_nonzero(ids == token) for ids, _ in sides]
            if min(counts) < encoded.num_image_tokens:
                raise DroppedRow(TOO_LONG)
        if self.messages.no_loss is not None:
            if not all(_has_loss(mask) for _, mask in sides):
                raise DroppedRow(NO_LOSS)
        weight = np.float32(encoded.weight)
        return [(ids.astype(np.int32), mask * weight) for ids, mask in sides]


def _has_loss(mask):
    # Of short arrays several times as fast as `mask.any()`.
    return np.count_nonzero(mask) > 0


def prepare_part(prepare, start, rows, filtered):
    """Prepares some rows of a dataset.

    Args:
        prepare: `Preparation`.
        start: int, the index of the first one.
        rows: list of rows.
        filtered: bool, whether `None` is a row that was filtered out.

    Returns:
        List of examples.
    """
    examples = []
    for index, row in enumerate(rows, start):
        if row is None and filtered:
            continue
        example = prepare(index, row)
        if example is not None:
            examples.append(example)
    return examples
