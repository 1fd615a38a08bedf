"""Reads rows with random access, many at a time."""

import io
import pickle

# Rows that are read at once.
PART = 1024


def is_hugging_face(rows):
    """Returns whether rows are a Hugging Face `Dataset`."""
    return hasattr(rows, "with_format") and hasattr(rows, "features")


def read(rows, start, stop):
    """Returns a list of some rows."""
    if is_hugging_face(rows):
        columns = rows[start:stop]
        return [
            dict(zip(columns, values))
            for values in zip(*columns.values(), strict=True)
        ]
    if isinstance(rows, (list, tuple)) or hasattr(rows, "content_digest"):
        return rows[start:stop]
    return [rows[index] for index in range(start, stop)]


def parts(rows, start=0, size=PART):
    """Yields the rows from `start` on, `size` at a time."""
    for at in range(start, len(rows), size):
        yield read(rows, at, min(at + size, len(rows)))


def arrow_bytes(rows, size=16 * PART):
    """Yields the content of a Hugging Face `Dataset` as bytes.

    Its own fingerprint depends on the times of files.
    """
    yield repr(rows.features).encode()
    table = rows.with_format("arrow")
    for at in range(0, len(rows), size):
        part = table[at : at + size].combine_chunks()
        for batch in part.to_batches():
            yield memoryview(batch.serialize())


def bytes_of(value):
    """Pickles a value; equal values, and no others, give equal bytes.

    Without `fast` the bytes would depend on which equal parts are one object.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getbuffer()
