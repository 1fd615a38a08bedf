"""The examples of a stream, which several processes make together."""

import dataclasses
import hashlib
import pickle

import grain

from keras_posttrain.data.rows.examples import hashed
from keras_posttrain.data.rows.parallel import UNSENDABLE
from keras_posttrain.data.rows.reading import bytes_of
from keras_posttrain.data.rows.records import Part


def shared(examples, share):
    """Returns a stream of `SharedRow`s, which has `compare` and `complete`.

    Args:
        examples: `PreparedStream`, of whose rows each process makes a share;
            or another Grain `IterDataset` of examples, such as what a task of
            a user's own prepares, which each process makes.
        share: `Share` of several processes.
    """
    if isinstance(examples, PreparedStream):
        return examples.shared(share)
    return ComparedStream(examples, share)


class PreparedStream(grain.IterDataset):
    """The examples of a stream of rows.

    Args:
        rows: Grain `IterDataset`.
        prepare: `Preparation`.
    """

    def __init__(self, rows, prepare):
        super().__init__(rows)
        self._rows, self._prepare = rows, prepare

    def __iter__(self):
        examples = self._rows.map_with_index(self._prepare)
        return iter(examples.filter(_is_some))

    def shared(self, share):
        """Returns the `SharedStream` of a `Share` of several processes."""
        return SharedStream(self._rows, self._prepare, share)


@dataclasses.dataclass(frozen=True, eq=False)
class SharedRow:
    """A row of a stream that several processes read.

    Args:
        index: int, its number in the stream.
        row: dict.
        maker: int, the index of the process that makes its example; `None`
            where each makes it.
        digest: bytes, a hash of the row, or of its example where `maker` is
            `None`.
        num_bytes: int, about what it takes of memory, the same everywhere.
        example: the example; `None` if it is dropped or made elsewhere.
        counts: dict of `DataReport.counts`; `None` if it is made elsewhere.
    """

    index: int
    row: dict
    maker: int | None
    digest: bytes
    num_bytes: int
    example: object = None
    counts: dict | None = None


class SharedStream(grain.IterDataset):
    """The `SharedRow`s of a stream, of which this process makes a share.

    All processes read all rows, which they compare, and exchange the
    examples. Rows with images, those that are not tokenized and those that
    cannot be pickled are prepared by each process: what they hold is large,
    or as quick to make as to send.

    Its positions are those of a `PreparedStream` of the same rows.

    Args:
        rows: Grain `IterDataset`.
        prepare: `Preparation`, whose report counts the rows of `complete`.
        share: `Share`, whose `compare` it has.
    """

    def __init__(self, rows, prepare, share):
        super().__init__(rows)
        self._rows, self._prepare, self._share = rows, prepare, share
        self.compare = share.compare
        self._is_shared = (
            prepare.key is not None and prepare.settings.images is None
        )

    def __iter__(self):
        return iter(self._rows.map_with_index(self._make).filter(_is_some))

    def complete(self, rows):
        """Returns the examples of `SharedRow`s, but for dropped ones.

        All processes call it with the same rows.

        Returns:
            List of pairs of a row's place in `rows` and its example.
        """
        made = self._share.exchange(pickle.dumps(self._made(rows)))
        made = [pickle.loads(data) for data in made]
        if not all(self._prepare.agrees(each.firsts) for each in made):
            # Rows that do not go together: preparing them says which.
            rows = [self._prepared(x.index, x.row) for x in rows]
        else:
            restore = self._prepare.restorer({x.index: x.row for x in rows})
            made = [each.examples(restore) for each in made]
        found = []
        for place, row in enumerate(rows):
            example, counts = row.example, row.counts
            if row.maker is not None:
                other, counts = next(made[row.maker])
                example = other if row.maker != self._share.index else example
            self._prepare.count(row.index, counts)
            if example is not None:
                found.append((place, example))
        return found

    def _make(self, index, row):
        """Returns the `SharedRow` of a row."""
        data = self._bytes_of(row)
        if data is None:
            return self._prepared(index, row)
        maker = index % self._share.count
        digest = hashlib.blake2b(data, digest_size=16).digest()
        shared = SharedRow(index, row, maker, digest, len(data))
        if maker != self._share.index:
            return shared
        example, counts = self._prepare.counted(index, row)
        return dataclasses.replace(shared, example=example, counts=counts)

    def _prepared(self, index, row):
        """Returns the `SharedRow` of a row that each process prepares."""
        return _made_here(index, row, *self._prepare.counted(index, row))

    def _bytes_of(self, row):
        """Returns a row as bytes, `None` where each process prepares it."""
        if not self._is_shared:
            return None
        try:
            return bytes_of(row)
        except (*UNSENDABLE, ValueError, RecursionError):
            return None

    def _made(self, rows):
        own = [x for x in rows if x.maker == self._share.index]
        return _Made(
            self._prepare.first_values(),
            [x.counts for x in own],
            [x.example is not None for x in own],
            Part.of([x.example for x in own if x.example is not None]),
        )


class ComparedStream(grain.IterDataset):
    """The `SharedRow`s of examples that each process makes.

    Args:
        examples: Grain `IterDataset` of examples.
        share: `Share`.
    """

    def __init__(self, examples, share):
        super().__init__(examples)
        self._examples, self.compare = examples, share.compare

    def __iter__(self):
        return iter(
            self._examples.map(lambda x: _made_here(None, None, x, None))
        )

    def complete(self, rows):
        """As of `SharedStream`."""
        return [(place, row.example) for place, row in enumerate(rows)]


def _made_here(index, row, example, counts):
    """Returns the `SharedRow` of an example that each process makes."""
    digest = b"" if example is None else hashed(example)
    images = getattr(example, "images", None)
    size = 0 if images is None else images.pixels.nbytes
    return SharedRow(index, row, None, digest, size, example, counts)


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a process has made of its share of some rows.

    Args:
        firsts: as of `Preparation.first_values`.
        counts: list of dicts, the counts of each row.
        is_kept: list of bools, whether a row has an example.
        part: `Part` of the examples.
    """

    firsts: list
    counts: list
    is_kept: list
    part: Part

    def examples(self, restore):
        """Yields `(example, counts)` of each row; some examples are `None`."""
        examples = iter(self.part.examples())
        if restore is not None:
            examples = map(restore, examples)
        for is_kept, counts in zip(self.is_kept, self.counts):
            yield next(examples) if is_kept else None, counts


def _is_some(value):
    return value is not None
