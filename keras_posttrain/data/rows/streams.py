"""Rows that can only be read one after the other, as Grain reads them."""

import itertools

import grain

# The rows of an iterator that are kept, so that it can be looked into.
KEPT = 64


class RowStream(grain.IterDataset):
    """The rows of an iterable, with a position.

    A position is a number of rows: resuming there reads them again, without
    tokenizing them. That is exact where the iterable always gives the same
    rows.

    Args:
        make: function without arguments to an iterable of rows.
        plain: function of a row to a row of Python's types.
    """

    def __init__(self, make, plain):
        super().__init__()
        self.make, self.plain = make, plain

    def __iter__(self):
        return _RowIterator(self)


class _RowIterator(grain.DatasetIterator):
    def __init__(self, stream):
        super().__init__()
        self._stream = stream
        self.set_state({"rows": 0})

    def __next__(self):
        row = next(self._rows)
        self._count += 1
        return self._stream.plain(row)

    def get_state(self):
        return {"rows": self._count}

    def set_state(self, state):
        self._count = int(state["rows"])
        rows = iter(self._stream.make())
        self._rows = itertools.islice(rows, self._count, None)


class Once:
    """An iterator that can be begun again while few rows were read.

    Args:
        iterator: such as a generator.
        name: string, the dataset's name in errors.
    """

    def __init__(self, iterator, name):
        self.iterator, self.name = iterator, name
        self.first, self.count = [], 0

    def __call__(self):
        if self.count > len(self.first):
            raise ValueError(
                f"`{self.name}` can be read only once. Received: a "
                f"{type(self.iterator).__name__} of which {self.count} rows "
                "were read. Pass a function that makes it, such as "
                f"`{self.name}=make_rows` where `make_rows()` is the "
                "generator, or a list."
            )
        return self._rows()

    def _rows(self):
        yield from self.first
        for row in self.iterator:
            self.count += 1
            if self.count <= KEPT:
                self.first.append(row)
            yield row


def sources(stream):
    """Yields a Grain dataset and all that it is made of."""
    yield stream
    # Datasets of users may not have called Grain's constructor.
    for parent in getattr(stream, "_parents", ()):
        yield from sources(parent)


def check_epochs(examples, epochs):
    """Refuses several epochs of rows that can be read only once."""
    if epochs < 2 or not isinstance(examples, grain.IterDataset):
        return
    for source in sources(examples):
        make = getattr(source, "make", None)
        if isinstance(make, Once):
            raise ValueError(
                f"`{make.name}` can be read only once. Received: "
                f"epochs={epochs} and a {type(make.iterator).__name__}. Pass "
                f"a function that makes it, such as `{make.name}=make_rows` "
                "where `make_rows()` is the generator, or a list; or use "
                "epochs=1."
            )
