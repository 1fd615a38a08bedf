"""Parts of local checkpoints: read, and sent to processes without them."""

import zlib

import numpy as np

from keras_posttrain import _hosts
from keras_posttrain.distribution import processes

# The most bytes of parts that a process sends to the others at once.
CHUNK = 2**25


class Reader:
    """Reads parts of files; an error is noted, and zeros are read.

    Attributes:
        error: str or `None`, the last error.
    """

    def __init__(self, files):
        self._files = {name: file for file in files for name in file.parts}
        self._opened = {}
        self._last = None, None
        self.error = None

    def has(self, part):
        file = self._files.get(part.name)
        return file is not None and file.parts[part.name][0] == part.size

    def checksum(self, part):
        return self._files[part.name].parts[part.name][1]

    def check(self, part, data, checksum):
        if self.error is None and zlib.crc32(data) != checksum:
            self.error = f"Checksum: that of {part.name} differs"

    def __call__(self, part):
        # Parts that are sent in several pieces are read once.
        if self._last[0] != part.name:
            data, error = tried(lambda: self._read(part.name))
            if error is not None:
                data = np.zeros(part.size, np.uint8)
                self.error = error
            self._last = part.name, data
        return self._last[1]

    def _read(self, name):
        file = self._files[name]
        if file.path not in self._opened:
            # Once, as a header may name thousands of parts.
            self._opened[file.path] = file.open()
        return self._opened[file.path].get_tensor(name)


def collected(parts, held, read):
    """Returns the parts that this process needs, by name.

    Args:
        parts: list of `Part`s.
        held: bool array of shape `(processes, parts)`.
        read: `Reader` of the files of this process.
    """
    here = processes.index()
    found, sent = {}, {}
    for part, is_held in zip(parts, held[here]):
        if is_held and here in part.needed_by:
            found[part.name] = read(part)
            read.check(part, found[part.name], read.checksum(part))
    for i, part in enumerate(parts):
        if not all(held[process, i] for process in part.needed_by):
            # By the first process that has it.
            sent.setdefault(int(held[:, i].argmax()), []).append(part)
    for source in sorted(sent):
        needed = {
            part.name
            for part in sent[source]
            if here in part.needed_by and part.name not in found
        }
        found |= _sent(sent[source], needed, source, read)
    return found


def _sent(parts, needed, source, read):
    """Returns the parts named in `needed` of those that `source` sends."""
    found = {
        part.name: np.empty(part.size, np.uint8)
        for part in parts
        if part.name in needed
    }
    is_source = processes.index() == source
    sums = [read.checksum(part) if is_source else 0 for part in parts]
    sums = _broadcast(np.array(sums, "uint32").view("uint8"), source)
    for pieces in _pieces(parts):
        ends = np.cumsum([stop - start for _, start, stop in pieces])
        data = np.zeros(ends[-1], np.uint8)
        if is_source:
            for end, (part, start, stop) in zip(ends, pieces):
                data[end - stop + start : end] = read(part)[start:stop]
        data = _broadcast(data, source)
        for end, (part, start, stop) in zip(ends, pieces):
            if part.name in found:
                found[part.name][start:stop] = data[end - stop + start : end]
    for part, checksum in zip(parts, sums.view("uint32").tolist()):
        if part.name in found:
            read.check(part, found[part.name], checksum)
    return found


def _broadcast(data, source):
    # Rounded up, so that few sizes are compiled.
    padded = np.zeros(1 << (len(data) - 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    return _hosts.broadcast(padded, source)[: len(data)]


def _pieces(parts):
    """Yields lists of `(part, start, stop)` of at most `CHUNK` bytes each."""
    pieces, room = [], CHUNK
    for part in parts:
        start = 0
        while start < part.size:
            stop = min(part.size, start + room)
            pieces.append((part, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pieces
                pieces, room = [], CHUNK
    if pieces:
        yield pieces


def tried(function):
    """Returns `(value, None)`, or `(None, error)` as text."""
    try:
        return function(), None
    except Exception as e:  # noqa: BLE001 - the others wait for this process
        text = str(e)[:500]
        return None, text if type(e) is ValueError else (
            f"{type(e).__name__}: {text}"
        )
