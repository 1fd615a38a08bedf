"""Runs a server and ends all its processes when the trainer ends.

The server's interpreter runs this file as a script. Its environment may not
have this package, so that only the standard library is imported.
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
POLL_SECONDS = 0.2


def watch(parent, command):
    """Runs a command until it ends or the process `parent` does.

    The command is terminated, and killed after `STOP_SECONDS`: vLLM's server
    may wait forever for an engine that has ended before it. This process must
    lead a process group, in which the command's processes are.

    Returns the exit status of the command, or 128 plus the number of the
    signal that ended it.
    """
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    server = subprocess.Popen(command)
    # A process whose parent has ended gets another parent.
    while server.poll() is None and not asked and os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(STOP_SECONDS)
    kill(os.getpid())
    code = server.wait()
    return code if code >= 0 else 128 - code


def end(process):
    """Ends a process of this script, a group's leader, and its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS + TRACKER_SECONDS + 1)
    # The script itself may have been killed or stopped.
    kill(process.pid)
    process.wait()


def kill(group):
    """Kills the processes of a group, except this one.

    Python's resource tracker gets some time after the others, as it removes
    the shared memory that they leave.
    """
    for pid, command in _running(group):
        if b"resource_tracker" not in command:
            _send(pid, signal.SIGKILL)
    for pid, _ in _running(group):
        # The resource tracker may have been stopped.
        _send(pid, signal.SIGCONT)
    limit = time.monotonic() + TRACKER_SECONDS
    while time.monotonic() < limit and any(_running(group)):
        time.sleep(0.05)
    for pid, _ in _running(group):
        _send(pid, signal.SIGKILL)


def _running(group):
    """Yields `(id, command line)` of a group's other running processes."""
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
