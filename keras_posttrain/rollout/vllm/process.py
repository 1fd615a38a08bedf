"""A server's process, and all that it starts, ended with their starter.

Run as a script beside the server, by the interpreter of the server's
environment, which need not have this package: only the standard library.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

STOP_SECONDS = 15
TRACKER_SECONDS = 5
LOOK_SECONDS = 0.2


def watch(starter, command):
    """Runs a command until it ends, or its starter does.

    vLLM's server may wait for ever for an engine that has ended before it;
    asked to stop, it is given `STOP_SECONDS`.

    What it starts must be a group of its own, that of this process.

    Args:
        starter: int, the process that started this one.
        command: list of str.

    Returns:
        int, what the command ended with (128 and the signal's number, if by
        one).
    """
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    server = subprocess.Popen(command)
    # A process whose parent has ended gets another.
    while server.poll() is None and not asked and os.getppid() == starter:
        time.sleep(LOOK_SECONDS)
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(STOP_SECONDS)
    kill(os.getpid())
    code = server.wait()
    return code if code >= 0 else 128 - code


def end(process):
    """Ends what `watch` runs, and all that it has started.

    Args:
        process: `subprocess.Popen` of this script, in a session of its own.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS + TRACKER_SECONDS + 1)
    # This script may itself have been killed or halted.
    kill(process.pid)
    process.wait()


def kill(group):
    """Kills a group of processes, but this one.

    The last is the one that removes what the others have left in shared
    memory.

    Args:
        group: int, its number.
    """
    for pid, command in _running(group):
        if b"resource_tracker" not in command:
            _send(pid, signal.SIGKILL)
    for pid, _ in _running(group):
        # It may have been halted.
        _send(pid, signal.SIGCONT)
    limit = time.monotonic() + TRACKER_SECONDS
    while time.monotonic() < limit and any(_running(group)):
        time.sleep(0.05)
    for pid, _ in _running(group):
        _send(pid, signal.SIGKILL)


def _running(group):
    """Yields `(id, command line)` of a group's others that run."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        pid = int(folder.name)
        if int(state[2]) == group and state[0] != "Z" and pid != os.getpid():
            yield pid, command


def _send(pid, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1]), [sys.executable, "-m", *sys.argv[2:]]))
