"""The folder in which vLLM finds what it reads."""

import os
import pathlib
import shutil
import tempfile
import weakref

PREFIX = "kpt-vllm-"
LOCK = "lock"
SHARED_MEMORY = "/dev/shm"


class Folder:
    """A folder that goes with its owner, however that ends.

    What a killed process has left, which may be a model's weights in the
    machine's memory, is removed by the next one that makes a folder beside it.

    Args:
        parent: path or `None` for the machine's shared memory.
    """

    def __init__(self, parent=None):
        # Not of every system; nor is vLLM.
        import fcntl

        if parent is None and os.path.isdir(SHARED_MEMORY):
            parent = SHARED_MEMORY
        parent = parent or tempfile.gettempdir()
        for left in pathlib.Path(parent).glob(f"{PREFIX}*"):
            _remove_if_left(left)
        self.path = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Held until this process ends.
        self._lock = open(self.path / LOCK, "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.remove = weakref.finalize(self, _remove, self.path, self._lock)


def _remove(path, lock):
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _remove_if_left(path):
    import fcntl

    try:
        with open(path / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        # Another's, in use, or not made yet.
        return
