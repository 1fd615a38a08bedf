"""A file of tokenized rows, from which examples are read one at a time."""

import array
import collections.abc
import hashlib
import json
import os
import zlib

import numpy as np

from keras_posttrain.data.rows import records
from keras_posttrain.data.rows.disk import DiskFile

MAGIC = b"keras_posttrain rows 2\n"
# The file ends with the footer's checksum and length.
TAIL = np.dtype([("checksum", "<u4"), ("length", "<u8")])
BLOCK = 2**22


class Damaged(Exception):
    """Raised for a file that was not written to its end, or has changed."""


class StoreWriter:
    """Writes a file of examples, part by part.

    Args:
        path: `pathlib.Path`, of a new file.
    """

    def __init__(self, path):
        self.path = path
        self.sizes, self.summary = array.array("q"), {}
        self.digest = hashlib.blake2b(digest_size=8)
        # Without a buffer, all that was added is in the file.
        self._file, self._checksum = open(path, "x+b", buffering=0), 0
        self._write(MAGIC)

    def _write(self, data):
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._checksum = zlib.crc32(data, self._checksum)

    def add(self, part):
        """Appends the examples of a `Part`.

        Raises:
            OSError: the disk is full; `examples` still returns all others.
        """
        self._write(part.records)
        self.digest.update(part.hashed)
        for name in dict.fromkeys([*self.summary, *part.summary]):
            before = array.array("i", [-1]) * len(self.sizes)
            column = self.summary.setdefault(name, before)
            column.extend(part.summary.get(name, [-1] * len(part.sizes)))
        self.sizes.extend(part.sizes)

    def finish(self, report):
        """Ends the file with its index; `report` is what JSON can store."""
        sizes = np.concatenate([[len(MAGIC)], self.sizes])
        offsets = np.cumsum(sizes, dtype=np.int64)
        self._write(offsets.astype("<i8").tobytes())
        for column in self.summary.values():
            self._write(np.array(column, "<i4").tobytes())
        footer = json.dumps(
            {
                "count": len(self.sizes),
                "summary": list(self.summary),
                "digest": self.digest.hexdigest(),
                "checksum": self._checksum,
                "report": report,
            }
        ).encode()
        tail = np.array((zlib.crc32(footer), len(footer)), TAIL)
        self._write(footer + tail.tobytes())
        os.fsync(self._file.fileno())
        self._file.close()

    def examples(self):
        """Returns the list of all examples that were added."""
        self._file.seek(len(MAGIC))
        with open(self._file.fileno(), "rb", closefd=False) as file:
            return [
                records.unpack(bytearray(file.read(size)))
                for size in self.sizes
            ]

    def close(self):
        """Closes and removes a file that cannot be finished."""
        self._file.close()
        self.path.unlink(missing_ok=True)


class StoredExamples(collections.abc.Sequence):
    """The examples of a file, of which only an index is in memory.

    They are read from the file each time: pages of a memory map would count
    as memory of this process.

    Args:
        path: path of the file.
        restore: function of what was stored to an example, or `None`.

    Attributes:
        summary: dict of int32 arrays, numbers of each example; see
            `summary_of`.
        digest: string, the hash of all tokens.
        report: dict, what the writer was given.

    Raises:
        Damaged: the file is not whole.
        OSError: it cannot be read.
    """

    def __init__(self, path, restore=None):
        self._restore = restore
        self._file = DiskFile(path)
        try:
            self._read_index()
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(str(error)) from error

    def _read_index(self):
        end = self._file.size - TAIL.itemsize
        tail = self._bytes(end, self._file.size)
        tail = np.frombuffer(tail, TAIL)[0]
        start = end - int(tail["length"])
        footer = self._bytes(start, end)
        if zlib.crc32(footer) != tail["checksum"]:
            raise Damaged("its footer has another checksum")
        footer = json.loads(footer)
        checksum = 0
        for at in range(0, start, BLOCK):
            block = self._bytes(at, min(at + BLOCK, start))
            checksum = zlib.crc32(block, checksum)
        if checksum != footer["checksum"]:
            raise Damaged("it has another checksum")
        if self._bytes(0, len(MAGIC)) != MAGIC:
            raise Damaged("it has another layout")
        count, names = footer["count"], footer["summary"]
        places = 8 * (count + 1)
        data = self._bytes(start - places - 4 * count * len(names), start)
        self._offsets = np.frombuffer(data, "<i8", count + 1)
        self.summary = {
            name: np.frombuffer(data, "<i4", count, places + 4 * count * i)
            for i, name in enumerate(names)
        }
        self.digest, self.report = footer["digest"], footer["report"]

    def _bytes(self, start, stop):
        data = self._file.read(start, stop) if start >= 0 else b""
        if len(data) < stop - start:
            raise Damaged("it is too short")
        return data

    def __len__(self):
        return len(self._offsets) - 1

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        count = len(self)
        if not -count <= index < count:
            raise IndexError(index)
        start, stop = self._offsets[index % count : index % count + 2]
        example = records.unpack(self._bytes(int(start), int(stop)))
        return example if self._restore is None else self._restore(example)
