"""The directories of callbacks: locked while a run writes, and its errors."""

import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import threading
import warnings

try:
    import fcntl
except ImportError:
    # Windows has no such locks.
    fcntl = None

from keras_posttrain import _remote
from keras_posttrain.distribution import processes

# Seconds between two copies of what a run has written to its address.
SECONDS = 30.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# By directory, its descriptor and how many callbacks of this process use it.
_locks = {}
# By address, the folder of this machine for it.
_copied = {}
# Held while that changes: some callbacks write in a thread.
_copied_lock = threading.RLock()


class Folder:
    """The directory of a callback, on this machine or at an address.

    Files for an address are written to a temporary folder, and copied twice
    a minute, at every checkpoint and at the end of a run. Of several
    processes, the first one copies.

    Args:
        directory: str or path, such as `"run/"` or `"gs://bucket/run"`.
        is_locked: bool, whether other processes may not use it meanwhile.

    Attributes:
        name: str, `directory`.
        is_remote: bool, whether it is an address.
        path: `pathlib.Path` of this machine.

    Raises:
        ValueError: nothing can be written there.
    """

    def __init__(self, directory, is_locked=True):
        self.name = check_name(directory)
        self._is_locked, self._is_used = is_locked, False
        self.is_remote = _remote.is_address(directory)
        if self.is_remote:
            self.name = self.name.rstrip("/")
            digest = hashlib.sha256(self.name.encode()).hexdigest()[:16]
            name = f"keras_posttrain-{os.getpid()}-{digest}"
            self.path = pathlib.Path(tempfile.gettempdir(), name)
            _check_address(self.name)
        else:
            self.path = pathlib.Path(directory)
            make_directory(self.path)

    def begin(self, *names):
        """Locks the directory; with an address copies files of these names."""
        if self.is_remote and not processes.is_first():
            return
        make_directory(self.path)
        if self._is_locked:
            lock(self.path)
        self._is_used = True
        if self.is_remote:
            with _copied_lock:
                if self.name not in _copied:
                    _copied[self.name] = _Copied(self.name, self.path)
                _copied[self.name].begin(names)

    def push(self):
        """Copies what was written to the address, if it is one."""
        if self._is_used and self.name in _copied:
            _copied[self.name].push()

    def end(self):
        """Copies what was written to the address, and unlocks.

        Returns:
            bool, whether all was copied.
        """
        if not self._is_used:
            return True
        self._is_used = False
        is_copied = True
        with _copied_lock:
            if self.name in _copied:
                is_copied, is_last = _copied[self.name].end()
                if is_last:
                    del _copied[self.name]
        if self._is_locked:
            unlock(self.path)
        return is_copied


class _Copied:
    """A temporary folder that callbacks of a run share, and its address."""

    def __init__(self, address, folder):
        self._mirror = _remote.Mirror(address, folder)
        self._owner = _remote.Owner(address)
        self._users, self._ended = 0, threading.Event()
        self._has_warned = self._is_others = False
        threading.Thread(target=self._tick, daemon=True).start()

    def begin(self, names):
        self._users += 1
        self._mirror.pull(*names)

    def push(self):
        """Copies; a log that cannot be copied does not end a run."""
        try:
            self._owner.check()
            self._mirror.push()
        except _remote.OtherRun as error:
            self._is_others = True
            self._warn(f"{error} Its logs are in {self._folder}.")
            return False
        except Exception as error:  # noqa: BLE001 - whatever the store raises
            self._warn(
                f"Files could not be copied to {self._mirror.address!r}; they "
                f"are in {self._folder}, and are copied later. "
                f"({type(error).__name__}: {str(error)[:500]})"
            )
            return False
        self._has_warned = False
        return True

    @property
    def _folder(self):
        return repr(str(self._mirror.folder))

    def _warn(self, message):
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=5)

    def end(self):
        """Copies for one user.

        Returns:
            bools, whether all was copied, and whether it was the last user.
        """
        is_copied = self.push()
        self._users -= 1
        is_last = not self._users
        if is_last:
            self._ended.set()
            if is_copied:
                shutil.rmtree(self._mirror.folder, ignore_errors=True)
            elif not self._is_others:
                warnings.warn(
                    f"Files of this run are not at {self._mirror.address!r}. "
                    f"Copy them from {self._folder}.",
                    stacklevel=4,
                )
        return is_copied, is_last

    def _tick(self):
        while not self._ended.wait(SECONDS):
            self.push()


def _check_address(address):
    try:
        _remote.Mirror(address, None).check()
    except Exception as error:
        raise _remote.not_writable(address, error) from error


def check_name(directory):
    """Returns the string of what a user passed as `directory`."""
    if not isinstance(directory, (str, os.PathLike)) or not str(directory):
        raise ValueError(
            "`directory` must be the path of a folder. "
            f"Received: directory={directory!r}"
        )
    return os.fspath(directory)


def shared_path(address):
    """Returns the path of an address that several processes write arrays to.

    Raises:
        ValueError: Orbax does not know its protocol.
    """
    if not address.startswith("gs://"):
        raise ValueError(
            "Several processes write checkpoints to gs:// or to a directory "
            "that all machines have, such as a mounted bucket. Received: "
            f"directory={address!r} and {processes.count()} processes"
        )
    # Orbax writes to Google's storage through it.
    from etils import epath

    return epath.Path(address)


def make_directory(directory):
    """Creates a directory, or raises an error if it is not writable."""
    directory = pathlib.Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as e:
        raise ValueError(
            "The directory must be writable; nothing was trained. "
            f"Received: directory={str(directory)!r} ({e.strerror})"
        ) from e


def lock(directory):
    """Locks a directory for this process, in which several may ask for it.

    Of several processes of a run the first one locks. Where the file system
    knows no locks, nothing is locked.

    Raises:
        ValueError: another run writes to the directory.
    """
    key = os.path.realpath(directory)
    if fcntl is None or not processes.is_first():
        return
    if key in _locks:
        opened, count = _locks[key]
        _locks[key] = opened, count + 1
        return
    # The lock is on the folder, so that no file is left behind.
    opened = os.open(key, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(opened)
        raise ValueError(
            "Another run writes to this directory; nothing was trained. Wait "
            "for its end, or use another directory. "
            f"Received: directory={str(directory)!r}"
        ) from e
    except OSError:
        os.close(opened)
        return
    _locks[key] = opened, 1


def unlock(directory):
    """Gives up one `lock` of a directory, if there is one."""
    key = os.path.realpath(directory)
    opened, count = _locks.pop(key, (None, 0))
    if count > 1:
        _locks[key] = opened, count - 1
    elif count:
        os.close(opened)


def advice(error, directory):
    """Returns what to do about an error of a file in a directory."""
    if _remote.is_address(str(directory)):
        return "Look after the storage"
    if not os.path.isdir(directory):
        return "The directory is gone; make it, or mount it again,"
    if _error_number(error) in NO_ROOM:
        return "Make room"
    return "Look after the disk"


def _error_number(error):
    """Returns the system's number of an error, which TensorStore writes."""
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        return int(found[1])
    return getattr(error, "errno", None)


def not_written(error, what, path):
    """Makes the `OSError` for a log of which something was not written."""
    return OSError(
        error.errno,
        f"{what} could not be written ({error.strerror}). "
        f"{advice(error, os.path.dirname(path))} and run the script again",
        str(path),
    )


def logged_lines(path):
    """Yields the intact lines of a log, bytes, with their `step`s.

    A line that a crash has cut off, or that is no JSON object with a step, is
    left out.
    """
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if isinstance(step, int) and line.endswith(b"\n"):
                yield line, row
