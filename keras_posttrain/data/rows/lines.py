"""The rows of large files with a JSON object a line, which stay on disk."""

import collections.abc

import numpy as np

from keras_posttrain.data.rows.disk import DiskFile, digest_of_files

# Bytes that are searched for lines at once.
BLOCK = 2**24


class LineRows(collections.abc.Sequence):
    """The rows of files with a JSON object a line.

    Only the places of the lines are in memory. A line is parsed each time
    that it is read.

    Args:
        paths: list of `pathlib.Path`s of files that are not compressed.
        parse: function `(path, line, number)` of the bytes of a line to its
            row; `number` is a function that returns the line's, for errors.
    """

    def __init__(self, paths, parse):
        self._paths, self._parse = paths, parse
        self._files = [DiskFile(path) for path in paths]
        self._places = None

    def _lines(self):
        """Returns the file, start and length of each row, as arrays."""
        if self._places is None:
            found = [_find_lines(path) for path in self._paths]
            counts = [len(starts) for starts, _ in found]
            self._places = (
                np.repeat(np.arange(len(found), dtype=np.int32), counts),
                np.concatenate([starts for starts, _ in found]),
                np.concatenate([sizes for _, sizes in found]),
            )
        return self._places

    def __len__(self):
        return len(self._lines()[0])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        files, starts, sizes = self._lines()
        number, start = int(files[index]), int(starts[index])
        path, file = self._paths[number], self._files[number]
        line = file.read(start, start + int(sizes[index]))

        def line_number():
            return file.read(0, start).count(b"\n") + 1

        return self._parse(path, line, line_number)

    def content_digest(self):
        """Returns a hash of the files' bytes, 16 bytes."""
        return digest_of_files(self._files)


def _find_lines(path):
    """Returns the starts and the sizes of lines that are not blank."""
    size = path.stat().st_size
    if not size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    data = np.memmap(path, np.uint8, "r")
    ends = [
        at + np.flatnonzero(data[at : at + BLOCK] == ord("\n"))
        for at in range(0, size, BLOCK)
    ]
    # The last line may end without a newline.
    stops = np.concatenate([*ends, [size]]).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1])
    kept = starts < stops
    first = data[starts[kept]]
    # Few begin with a space, or with a byte that may be part of one.
    unclear = (first <= ord(" ")) | (first >= 0x80)
    for i in np.flatnonzero(kept)[unclear]:
        line = data[starts[i] : stops[i]].tobytes()
        kept[i] = bool(line.decode("utf-8-sig", "replace").strip())
    # With the newline, as a file is read.
    sizes = np.minimum(stops + 1, size) - starts
    return starts[kept], sizes[kept]
