"""Files that are read at any place, in any thread."""

import os
import weakref


class DiskFile:
    """An open file; it is closed when nobody has it any more.

    Args:
        path: path of the file.

    Attributes:
        size: int, its bytes.
    """

    def __init__(self, path):
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size

    def read(self, start, stop):
        """Returns the bytes between two places, fewer at the file's end.

        They are in a new `bytearray`.
        """
        data = bytearray(stop - start)
        view, done = memoryview(data), 0
        while done < len(data):
            count = os.preadv(self._file, [view[done:]], start + done)
            if not count:
                return data[:done]
            done += count
        return data
