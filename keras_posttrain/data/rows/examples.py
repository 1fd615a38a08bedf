"""A sequence that is ready for a batch, and the report on a dataset."""

import collections
import dataclasses
import hashlib

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Example:
    """One sequence of tokens, ready for a batch.

    Args:
        token_ids: int32 array of shape `(length,)`.
        completion_mask: float32 array of shape `(length,)`, the weight of
            each token in the loss; 0 at the first, which nothing predicts.
        row: int, index of the dataset row.
        images: `Images` of the sequence, or `None`.
    """

    token_ids: np.ndarray
    completion_mask: np.ndarray
    row: int
    images: object = None

    # An example is a group of one sequence to a `BatchLayout`.

    @property
    def sequences(self):
        return [self]

    @property
    def prefix_length(self):
        return 0

    @property
    def other_bytes(self):
        """Bytes of everything except the tokens and their mask."""
        return b"" if self.images is None else self.images.digest

    @property
    def summary(self):
        """Dict of ints: what is asked of all examples before training."""
        return {"tokens": len(self.token_ids)}


def completion_example(prompt, completion, mask, row, images=None):
    """Makes the `Example` of a prompt, without loss, and a completion.

    Args:
        prompt: int32 array of shape `(tokens,)`.
        completion: int32 array of shape `(tokens,)`.
        mask: float32 array of the completion's shape.
        row: int, index of the dataset row.
        images: `Images` of the prompt, or `None`.
    """
    before = np.zeros(len(prompt), np.float32)
    return Example(
        np.concatenate([prompt, completion]),
        np.concatenate([before, mask]),
        row,
        images,
    )


def hashed(example):
    """Returns the bytes of an example that identify it in a hash."""
    if own := getattr(example, "hashed", None):
        return own
    parts = [example.token_ids.tobytes(), example.completion_mask.tobytes()]
    # Everything that an example has in addition to one sequence.
    return b"".join([*parts, getattr(example, "other_bytes", b"")])


def digest_of(examples):
    """Returns the hash of examples, which those of a file know."""
    if known := getattr(examples, "digest", None):
        return known
    digest = hashlib.blake2b(digest_size=8)
    for example in examples:
        digest.update(hashed(example))
    return digest.hexdigest()


def columns_of(summaries):
    """Returns the summaries of examples as a dict of lists of ints.

    Examples of several kinds may be mixed: -1 stands for what one lacks.
    """
    summaries = list(summaries)
    names = dict.fromkeys(name for each in summaries for name in each)
    return {name: [x.get(name, -1) for x in summaries] for name in names}


def summary_of(examples):
    """Returns the summaries of examples, which a file has, as arrays.

    Returns:
        Dict of int32 arrays of shape `(len(examples),)`: `tokens`; of a
        `Preference` also `prompt`, `second` and `label`, of a
        `DistillationExample` also `teacher`.
    """
    known = getattr(examples, "summary", None)
    if known is not None:
        return known
    columns = columns_of(example.summary for example in examples)
    return {name: np.array(x, np.int32) for name, x in columns.items()}


@dataclasses.dataclass
class DataReport:
    """The numbers of a dataset's rows: kept, dropped and cut.

    Args:
        name: string, the dataset's name in messages.
        rows: int, rows read.
        kept: int, rows that are trained on.
        dropped: dict of reasons to numbers of rows.
        cut: int, kept rows whose end was cut off.
        tokens: int, tokens of the kept rows.
        loss_tokens: int, those of them with a weight in the loss.
        longest: int, tokens of the longest row before it was cut.
        converted: dict of formats, such as `"ShareGPT"`, to numbers of rows
            that were converted from them.
        unused: dict of columns that nothing reads to numbers of rows.
        sources: dict of the names of mixed datasets to numbers of rows.
    """

    name: str = "dataset"
    rows: int = 0
    kept: int = 0
    dropped: dict = dataclasses.field(default_factory=collections.Counter)
    cut: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    longest: int = 0
    converted: dict = dataclasses.field(default_factory=collections.Counter)
    unused: dict = dataclasses.field(default_factory=collections.Counter)
    sources: dict = dataclasses.field(default_factory=collections.Counter)

    def clear(self):
        """Sets all numbers back to those of no rows."""
        vars(self).update(vars(type(self)(self.name)))

    def add(self, counted):
        """Adds the numbers of further rows: `counts` of their report."""
        for name, value in counted.items():
            if isinstance(value, dict):
                getattr(self, name).update(value)
            elif name == "longest":
                self.longest = max(self.longest, value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def counts(self):
        """Returns all numbers as a dict that JSON can store."""
        values = {k: v for k, v in vars(self).items() if k != "name"}
        return {
            k: dict(v) if isinstance(v, dict) else int(v)
            for k, v in values.items()
        }

    @property
    def loss_share(self):
        """Float, the share of tokens that carry loss."""
        return self.loss_tokens / self.tokens if self.tokens else 0.0

    def __str__(self):
        return (
            f"{self.describe_rows('rows')}; {self.tokens:,} tokens, "
            f"{self.loss_tokens:,} with loss ({self.loss_share:.1%}); "
            f"longest row {self.longest:,} tokens" + self.describe_columns()
        )

    def describe_columns(self):
        """Returns where rows came from and what of them is not read."""
        text = ""
        if self.sources:
            text += f"; mixed of {_numbers(self.sources)}"
        for format, count in self.converted.items():
            text += f"; {count:,} converted from {format}'s format"
        if self.unused:
            names = ", ".join(map(repr, list(self.unused)[:8]))
            more = ", ..." if len(self.unused) > 8 else ""
            text += f"; columns that nothing reads: {names}{more}"
        return text

    def describe_rows(self, noun):
        """Returns the numbers of rows as a text that calls them `noun`."""
        reasons = _numbers(self.dropped)
        dropped = sum(self.dropped.values())
        return (
            f"{self.name}: {self.rows:,} {noun}, {self.kept:,} kept, "
            f"{dropped:,} dropped"
            + (f" ({reasons})" if reasons else "")
            + f", {self.cut:,} cut"
        )


def _numbers(counts):
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
