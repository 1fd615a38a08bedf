"""The directories of callbacks: locked while a run writes, and its errors."""

import errno
import json
import os
import pathlib
import tempfile

try:
    import fcntl
except ImportError:
    # Windows has no such locks.
    fcntl = None

from keras_posttrain.distribution import processes

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# By directory, its descriptor and how many callbacks of this process use it.
_locks = {}


def as_path(directory):
    """Returns the `pathlib.Path` of what a user passed as `directory`."""
    if not isinstance(directory, (str, os.PathLike)) or not str(directory):
        raise ValueError(
            "`directory` must be the path of a folder. "
            f"Received: directory={directory!r}"
        )
    return pathlib.Path(directory)


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
    """Returns what to do about an `OSError` of a file in a directory."""
    if not os.path.isdir(directory):
        return "The directory is gone; make it, or mount it again,"
    if getattr(error, "errno", None) in NO_ROOM:
        return "Make room"
    return "Look after the disk"


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
