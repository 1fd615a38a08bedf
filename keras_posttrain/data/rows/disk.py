"""Files that are read at any place, in any thread."""

import concurrent.futures
import functools
import hashlib
import os
import pathlib
import tempfile
import weakref

from keras_posttrain import _cache

# Bytes that are hashed at once.
BLOCK = 2**24


class DiskFile:
    """An open file; it is closed when nobody has it any more.

    Args:
        path: path of the file.

    Attributes:
        size: int, its bytes.
    """

    def __init__(self, path):
        self._take(os.open(path, os.O_RDONLY))

    def _take(self, file):
        self._file = file
        weakref.finalize(self, os.close, file)
        self.size = os.fstat(file).st_size

    def read(self, start, stop):
        """Returns the bytes between two places, fewer at the file's end.

        They are in a new `bytearray`.
        """
        data = bytearray(max(min(stop, self.size) - start, 0))
        view, done = memoryview(data), 0
        while done < len(data):
            count = os.preadv(self._file, [view[done:]], start + done)
            if not count:
                return data[:done]
            done += count
        return data


class ScratchFile(DiskFile):
    """A new file without a name, which ends with this process at the latest.

    It is in the user's cache, or in the system's temporary directory where
    there is none.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self):
        file, path = tempfile.mkstemp(suffix=".new", dir=_directory())
        os.unlink(path)
        self._take(file)

    def append(self, data):
        """Writes bytes at the end; only one thread may.

        Returns:
            `(start, stop)`, their place.

        Raises:
            OSError: the disk is full; what was written before is whole.
        """
        rest, start = memoryview(data), self.size
        stop = start
        while rest:
            count = os.pwrite(self._file, rest, stop)
            rest, stop = rest[count:], stop + count
        self.size = stop
        return start, stop


def _directory():
    folder = _cache.directory()
    if folder is not None:
        try:
            pathlib.Path(folder, "rows").mkdir(parents=True, exist_ok=True)
            return folder / "rows"
        except OSError:
            pass
    return None


def digest_of_files(files):
    """Returns a hash of the bytes of `DiskFile`s, 16 bytes."""
    digest = hashlib.blake2b(digest_size=16)
    # Hashing releases the interpreter.
    with concurrent.futures.ThreadPoolExecutor() as threads:
        for file in files:
            digest.update(str(file.size).encode())
            hash_block = functools.partial(_hash_block, file)
            starts = range(0, file.size, BLOCK)
            for part in threads.map(hash_block, starts):
                digest.update(part)
    return digest.digest()


def _hash_block(file, start):
    block = file.read(start, start + BLOCK)
    return hashlib.blake2b(block, digest_size=32).digest()
