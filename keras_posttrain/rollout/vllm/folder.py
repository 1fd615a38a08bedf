"""The temporary folder of the files that vLLM reads."""

import os
import pathlib
import shutil
import tempfile
import weakref

PREFIX = "kpt-vllm-"
LOCK = "lock"
SHARED_MEMORY = "/dev/shm"


class Folder:
    """A temporary folder that is removed with its owner.

    If a process is killed, its folder (which may have a model's weights in
    the machine's memory) is removed by the next process that creates one in
    the same parent. The default parent is the machine's shared memory.
    """

    def __init__(self, parent=None):
        # Not available on all systems, and only needed with vLLM.
        import fcntl

        if parent is None and os.path.isdir(SHARED_MEMORY):
            parent = SHARED_MEMORY
        parent = parent or tempfile.gettempdir()
        for folder in pathlib.Path(parent).glob(f"{PREFIX}*"):
            _remove_if_abandoned(folder)
        self.path = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # The lock is held until this process ends.
        self._lock = open(self.path / LOCK, "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.remove = weakref.finalize(self, _remove, self.path, self._lock)


def _remove(path, lock):
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _remove_if_abandoned(path):
    # See `Folder.__init__`.
    import fcntl

    try:
        with open(path / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        # The folder is in use or incomplete, or belongs to another user.
        return
