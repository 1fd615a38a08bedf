"""Checkpoints on the machines of a run, each with what its devices hold."""

import contextlib
import os
import pathlib
import re
import threading
import uuid
import warnings

import numpy as np

from keras_posttrain.callbacks import local_files
from keras_posttrain.callbacks.directories import make_directory
from keras_posttrain.callbacks.intervals import Interval
from keras_posttrain.callbacks.part_exchange import Reader, collected, tried
from keras_posttrain.distribution import processes

ID = re.compile(r"[0-9a-f]{32}")


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

    @classmethod
    def of(cls, directory, every):
        """Checks the arguments, and returns `None` if there are none.

        Raises:
            ValueError: they do not fit each other.
        """
        if (directory is None) != (every is None):
            raise ValueError(
                "`local_directory` and `local_every` must be given together, "
                'such as local_directory="/dev/shm/run", local_every=20. '
                f"Received: local_directory={directory!r}, "
                f"local_every={every!r}"
            )
        if directory is None:
            return None
        is_path = isinstance(directory, (str, os.PathLike)) and str(directory)
        if not is_path or "://" in str(directory):
            raise ValueError(
                "`local_directory` must be the path of a folder of each "
                f"machine. Received: local_directory={directory!r}"
            )
        return cls(directory, every)

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
        name, error = tried(lambda: run_id(directory) if first else None)
        name, self._run = processes.from_first([name, uuid.uuid4().hex])
        if error is None and name is not None:
            self._folder = self.directory / name
            _, error = tried(lambda: make_directory(self._folder))
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
        reader = Reader(self._of(key))
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
        found = collected(parts, held, reader)
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
        _, self._error = tried(
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


def _delete(path):
    # Another process of this machine may have deleted it.
    with contextlib.suppress(OSError):
        path.unlink()
