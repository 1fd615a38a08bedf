"""The rows of Parquet files, which stay on disk."""

import bisect
import collections.abc
import contextlib
import io
import itertools
import operator
import threading
import warnings

import numpy as np

from keras_posttrain.data.rows.disk import (
    DiskFile,
    ScratchFile,
    digest_of_files,
)

# The most rows of a batch, and about how many bytes it has.
BATCH_ROWS, BATCH_BYTES = 256, 2**18


class ParquetRows(collections.abc.Sequence):
    """The rows of Parquet files.

    In memory are the sizes of row groups, and a batch of rows while it is
    read. A row group, of any size, is decoded once, when one of its rows is
    first read: its batches are kept in a temporary file, so that any row is
    read as fast as another.

    Args:
        paths: list of `pathlib.Path`s.
        name: string, the dataset's name in errors.

    Raises:
        ValueError: a file is no Parquet file; when a row is read, it is
            damaged.
        ImportError: pyarrow is not installed.
    """

    def __init__(self, paths, name):
        self._paths, self._name = paths, name
        self._arrow = _import(paths[0], name)
        # Of each row group its file and its number there.
        self._groups, counts, self._row_bytes = [], [], []
        for file, path in enumerate(paths):
            with self._errors(path):
                metadata = self._arrow.parquet.read_metadata(path)
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                self._groups.append((file, number))
                counts.append(group.num_rows)
                size = group.total_byte_size // max(group.num_rows, 1)
                self._row_bytes.append(size)
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        # Of each decoded group the first rows of its batches, and their data.
        self._batches, self._scratch, self._is_full = {}, None, False
        self._opened = (None, None)
        self._lock = threading.Lock()

    def __len__(self):
        return int(self._starts[-1])

    def __getitem__(self, index):
        count = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(count)
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return self._read(start, stop)
        index = operator.index(index)
        if not -count <= index < count:
            raise IndexError(index)
        index %= count
        return self._read(index, index + 1)[0]

    def content_digest(self):
        """Returns a hash of the files' bytes, 16 bytes."""
        return digest_of_files(map(DiskFile, self._paths))

    def _read(self, start, stop):
        rows = []
        while start < stop:
            group = int(np.searchsorted(self._starts, start, "right")) - 1
            firsts, places = self._decoded(group)
            place = bisect.bisect_right(firsts, start) - 1
            batch, before = self._load(places[place]), firsts[place]
            found = batch.slice(start - before, stop - start).to_pylist()
            rows += found
            start += len(found)
        return rows

    def _decoded(self, group):
        """Returns the first rows of a group's batches, and their places."""
        with self._lock:
            if group not in self._batches:
                self._batches[group] = self._decode(group)
            return self._batches[group]

    def _decode(self, group):
        file, number = self._groups[group]
        path = self._paths[file]
        size = BATCH_BYTES // max(self._row_bytes[group], 1)
        size = min(max(size, 1), BATCH_ROWS)
        counts, places = [int(self._starts[group])], []
        with self._errors(path):
            for batch in self._open(file).iter_batches(size, [number]):
                counts.append(len(batch))
                places.append(self._keep(self._as_bytes(batch)))
            *firsts, end = itertools.accumulate(counts)
            if end != self._starts[group + 1]:
                raise self._arrow.ArrowInvalid(
                    f"row group {number} has {end - counts[0]} rows, "
                    f"not {self._starts[group + 1] - counts[0]}"
                )
        return firsts, places

    def _open(self, file):
        """Returns the `ParquetFile` of a path; the last one stays open."""
        if self._opened[0] != file:
            # Column chunks are read in parts, not as a whole.
            opened = self._arrow.parquet.ParquetFile(
                self._paths[file], buffer_size=2**20, pre_buffer=False
            )
            self._opened = (file, opened)
        return self._opened[1]

    def _as_bytes(self, batch):
        # With its schema, and with the dictionaries of columns that have one.
        codec = "lz4" if self._arrow.Codec.is_available("lz4") else None
        options = self._arrow.ipc.IpcWriteOptions(compression=codec)
        sink, schema = io.BytesIO(), batch.schema
        with self._arrow.ipc.new_stream(
            sink, schema, options=options
        ) as stream:
            stream.write_batch(batch)
        return sink.getvalue()

    def _keep(self, data):
        """Returns the place of a batch's bytes, or the bytes themselves."""
        if self._is_full:
            return data
        try:
            if self._scratch is None:
                self._scratch = ScratchFile()
            return self._scratch.append(data)
        except OSError as error:
            self._is_full = True
            warnings.warn(
                f"Rows of `{self._name}` cannot be kept on disk ({error}): "
                "they stay in memory, compressed. The environment variable "
                "`KERAS_POSTTRAIN_CACHE` sets another directory.",
                stacklevel=2,
            )
            return data

    def _load(self, place):
        if isinstance(place, tuple):
            place = self._scratch.read(*place)
        with self._arrow.ipc.open_stream(self._arrow.py_buffer(place)) as file:
            return file.read_next_batch()

    @contextlib.contextmanager
    def _errors(self, path):
        try:
            yield
        except (OSError, self._arrow.ArrowInvalid) as error:
            raise ValueError(
                f"`{self._name}` must be a Parquet file. Received: "
                f"{str(path)!r}: {error}."
            ) from error


def _import(path, name):
    try:
        # An extra, which few need.
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "Reading a `.parquet` file needs pyarrow. Install it with "
            f"`pip install pyarrow`. Received: {name}={str(path)!r}."
        ) from error
    return pyarrow
