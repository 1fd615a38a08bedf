"""Checkpoints on the machines of a run, each with what its devices hold."""

import contextlib
import os
import pathlib
import re
import threading
import uuid
import warnings
import zlib

import numpy as np

from keras_posttrain import _hosts
from keras_posttrain.callbacks import local_files
from keras_posttrain.callbacks.directories import make_directory
from keras_posttrain.callbacks.intervals import Interval
from keras_posttrain.distribution import processes

# The most bytes of parts that a process sends to the others at once.
CHUNK = 2**25
ID = re.compile(r"[0-9a-f]{32}")


def check(directory, every):
    """Raises a `ValueError` for arguments that do not fit each other."""
    if (directory is None) != (every is None):
        raise ValueError(
            "`local_directory` and `local_every` must be given together, such "
            'as local_directory="/dev/shm/run", local_every=20. Received: '
            f"local_directory={directory!r}, local_every={every!r}"
        )
    if directory is None:
        return
    is_path = isinstance(directory, (str, os.PathLike)) and str(directory)
    if not is_path or "://" in str(directory):
        raise ValueError(
            "`local_directory` must be the path of a folder of each machine. "
            f"Received: local_directory={directory!r}"
        )


class LocalCheckpoints:
    """Saves what each process holds of a state on its own machine.

    Once all processes have written a step, the steps before it are deleted:
    the machines together have one complete step, and at most a second one
    that is being written. A state is read from the parts of all machines.

    Args:
        directory: str or path of a folder of each machine.
        every: int or str, see `Interval`.

    Attributes:
        interval: `Interval` since the last step that was saved or resumed.
        saved: int or `None`, the last step whose writing began.
    """

    def __init__(self, directory, every):
        self.interval = Interval(every, "local_every")
        self.directory = pathlib.Path(directory).absolute()
        self._reset()

    def _reset(self):
        self.saved = self._folder = self._thread = self._error = None
        # The steps that all processes have written, and that they write.
        self._complete = self._pending = None
        self._has_warned = False

    def begin(self, directory):
        """Begins a `fit` whose checkpoints are in `directory`.

        Raises:
            ValueError: in all processes, if one cannot write to its folder.
        """
        self._reset()
        first = processes.is_first()
        name, error = _tried(lambda: run_id(directory) if first else None)
        name, self._run = processes.from_first([name, uuid.uuid4().hex])
        if error is None and name is not None:
            self._folder = self.directory / name
            _, error = _tried(lambda: make_directory(self._folder))
        errors = [x for x in processes.exchange(error) if x is not None]
        if errors:
            raise ValueError(errors[0])

    def find(self):
        """Returns the keys of what any machine has, the newest first.

        A key is that of `local_files.File`.
        """
        self._files = local_files.files_in(self._folder)
        own = [[*file.key, file.process] for file in self._files]
        self._held = processes.exchange(own)
        keys = {(s, run) for files in self._held for s, run, _ in files}
        good = {step for step, run in keys if run}
        keys = {(s, run) for s, run in keys if run or s not in good}
        return sorted(keys, reverse=True)

    def read_meta(self, key):
        """Returns `(meta, None)` or `(None, error)`, in all processes."""
        holders = [
            (writer, process)
            for process, files in enumerate(self._held)
            for *found, writer in files
            if tuple(found) == key
        ]
        _, source = min(holders)
        own = self._of(key) if processes.index() == source else []
        # The first process's, as in checkpoints of `directory`.
        own = min(own, key=lambda file: file.process, default=None)
        sent = own and [own.meta, own.error]
        return processes.exchange(sent)[source]

    def read_arrays(self, key, wanted):
        """Returns `(arrays, None)` or `(None, error)`, in all processes.

        What a process needs and does not have is sent by one that has it.

        Args:
            key: one of those of `find`.
            wanted: tree of `jax.ShapeDtypeStruct`s.
        """
        parts = local_files.parts_of(wanted)
        reader = _Reader(self._of(key))
        own = np.array([reader.has(part) for part in parts], bool)
        held = processes.exchange_arrays({"held": np.packbits(own)})
        held = np.stack([x["held"] for x in held])
        held = np.unpackbits(held, axis=1, count=len(parts)).astype(bool)
        missing = int(np.sum(~held.any(axis=0)))
        if missing:
            return None, (
                f"{missing} of {len(parts)} parts that the devices of this "
                "run need are on no machine"
            )
        found = _collected(parts, held, reader)
        errors = processes.exchange(reader.error)
        errors = [error for error in errors if error is not None]
        if errors:
            return None, errors[0]
        return local_files.assembled(wanted, found), None

    def _of(self, key):
        return [file for file in self._files if file.key == key]

    def keep_only(self, key, step):
        """Deletes all that `find` found but one key, or none if it is `None`.

        `step` is that of the state with which training continues.
        """
        for file in self._files:
            if file.key != key:
                _delete(file.path)
        self._complete = None if key is None else key[0]
        self.saved = self._complete
        self.interval.begin(step)

    def save(self, step, arrays, meta):
        """Starts to write the parts that this process holds."""
        self._finish()
        parts = local_files.own_parts(arrays)
        self.saved, self._pending, self._error = step, step, None
        self.interval.begin(step)
        self._thread = threading.Thread(
            target=self._write, args=(step, parts, meta)
        )
        self._thread.start()

    def _write(self, step, parts, meta):
        path = local_files.path_of(self._folder, step)
        _, self._error = _tried(
            lambda: local_files.write(path, parts, self._run, meta)
        )

    def _finish(self):
        """Waits for all processes, and deletes what is then redundant."""
        error, step = self.wait(), self._pending
        if step is None:
            return
        self._pending = None
        errors = processes.exchange(error)
        failed = [k for k, error in enumerate(errors) if error is not None]
        if failed:
            _delete(local_files.path_of(self._folder, step))
            self._warn(step, errors[failed[0]], failed[0])
            return
        self._complete = step
        self._delete_until(step - 1)

    def wait(self):
        """Waits for the file of this process; returns its error or `None`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error

    def _warn(self, step, error, process):
        """Warns once a run, where `process` is `None` in this process alone.

        Otherwise all processes call it, and the first one warns.
        """
        has_warned, self._has_warned = self._has_warned, True
        if has_warned or (process is not None and not processes.is_first()):
            return
        process = processes.index() if process is None else process
        rest = "none is complete"
        if self._complete is not None:
            rest = f"that of step {self._complete} is complete"
        where = f" in process {process}" * (processes.count() > 1)
        warnings.warn(
            f"The local checkpoint of step {step} could not be written to "
            f"{str(self._folder)!r}{where} ({error}); of the local ones "
            f"{rest}. Training continues, and later ones are tried without "
            "another warning.",
            stacklevel=2,
        )

    def close(self, stored):
        """Waits for this process, and deletes what is redundant.

        Args:
            stored: int or `None`, the newest step that is complete in the
                directory of the run.
        """
        error = self.wait()
        if self._folder is None:
            return
        if error is not None:
            self._warn(self._pending, error, process=None)
        if stored is not None:
            self._delete_until(stored)
        with contextlib.suppress(OSError):
            # Only an empty folder is removed.
            self._folder.rmdir()

    def _delete_until(self, step):
        """Deletes the files of this machine up to a step."""
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                name = local_files.NAME.fullmatch(path.name)
                if name and int(name[1]) <= step:
                    _delete(path)


class _Reader:
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
            data, error = _tried(lambda: self._read(part.name))
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


def _collected(parts, held, read):
    """Returns the parts that this process needs, by name.

    Args:
        parts: list of `Part`s.
        held: bool array of shape `(processes, parts)`.
        read: `_Reader` of the files of this process.
    """
    here = processes.index()
    found, sent = {}, {}
    for part, is_held in zip(parts, held[here]):
        if is_held and here in part.needed_by:
            found[part.name] = read(part)
            read.check(part, found[part.name], read.checksum(part))
    for i, part in enumerate(parts):
        if not all(held[process, i] for process in part.needed_by):
            # The first process that has it.
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


def run_id(directory):
    """Returns the random name of a run, which is in a file of its directory.

    A run that starts again in a new directory has another one.
    """
    path = directory / "run_id"
    found = path.read_text().strip() if path.exists() else ""
    if not ID.fullmatch(found):
        found = uuid.uuid4().hex
        path.write_text(found)
    return found


def _tried(function):
    """Returns `(value, None)`, or `(None, error)` as text."""
    try:
        return function(), None
    except Exception as e:  # noqa: BLE001 - the others wait for this process
        text = str(e)[:500]
        return None, text if type(e) is ValueError else (
            f"{type(e).__name__}: {text}"
        )


def _delete(path):
    # Another process of this machine may have deleted it.
    with contextlib.suppress(OSError):
        path.unlink()
