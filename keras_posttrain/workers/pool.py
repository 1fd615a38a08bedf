"""Calls functions in processes of bounded time and memory."""

import collections
import contextlib
import dataclasses
import json
import multiprocessing.connection
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
import weakref

from keras_posttrain._cores import num_cores

SCRIPT = pathlib.Path(__file__).with_name("child.py")
# The most seconds in which a worker imports what its function needs.
START_SECONDS = 300
# Processes of a pool.
COUNT = max(1, min(4, num_cores() - 1))


@dataclasses.dataclass(frozen=True)
class Failure:
    """A call without a result.

    Attributes:
        reason: string, how it ended, to follow the name of the function.
    """

    reason: str

    def __repr__(self):
        return self.reason


class Workers:
    """Processes that call one function.

    They are started when they are first needed and reused. One whose call
    takes too long, or which dies, is killed with all processes that it
    started, and replaced by the next call. They end with this process, even
    if it is killed. The function may hold the interpreter: it is another
    process's.

    No library does this for us: `concurrent.futures` cannot end a call, and
    `multiprocessing` runs the user's script again in each process that it
    starts, or copies a process in which JAX runs threads.

    Args:
        function: `(file, name, arguments...)`: a function in a file that
            imports nothing of this package, which loads what it needs and
            returns the function; or bytes, a pickle of a reward function.
        seconds: float, the time limit of a call.
        max_bytes: int, the memory that a process may allocate once the
            function is loaded.
        count: int, the most processes of one `map`.
    """

    def __init__(self, function, seconds, max_bytes, count=COUNT):
        self.arguments = function, seconds, max_bytes, count
        self.settings = {
            "function": function,
            "seconds": seconds,
            "max_bytes": max_bytes,
        }
        self.seconds, self.count = seconds, count
        self._idle, self._pid = [], os.getpid()
        self._started, self._closed = weakref.WeakSet(), False

    def close(self):
        """Kills all processes; calls that other threads wait for fail."""
        self._closed = True
        for worker in list(self._started):
            # Its connection is closed by the thread that reads it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)

    def map(self, calls):
        """Calls the function with each of several dicts of arguments.

        Several threads may call this at once; each uses other processes.

        Args:
            calls: list of dicts that can be pickled.

        Returns:
            List of results (what JSON holds, and a dict may hold bytes) or
            `Failure`s.

        Raises:
            RuntimeError: if the function cannot be loaded in a new process.
        """
        waiting = collections.deque(
            (i, pickle.dumps(call)) for i, call in enumerate(calls)
        )
        results, left = [None] * len(waiting), len(waiting)
        busy = {}

        def use(worker):
            """Gives a worker the next call, or puts it back."""
            if worker.ready and not waiting:
                self._put_back(worker)
                return
            busy[worker.connection] = worker
            if worker.ready:
                worker.begin(*waiting.popleft(), self.seconds)

        try:
            for _ in range(min(self.count, left)):
                use(self._take())
            while left:
                for worker in _ended(busy):
                    index, answer = worker.finish()
                    if index is not None:
                        results[index] = answer
                        left -= 1
                    if worker.ready:
                        use(worker)
                    elif waiting:
                        use(self._take())
            while busy:
                # Still starting, for the next `map`.
                self._put_back(busy.popitem()[1])
        finally:
            for worker in busy.values():
                worker.end()
        return results

    def call(self, **arguments):
        """Calls the function once; see `map`."""
        return self.map([arguments])[0]

    def __reduce__(self):
        # A copy has its own processes.
        return Workers, self.arguments

    def _take(self):
        if self._pid != os.getpid():
            # A forked process must not talk to the workers of its parent.
            self._idle, self._pid = [], os.getpid()
        if self._closed:
            raise RuntimeError("The workers were closed.")
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        worker = _Worker({**self.settings, "path": sys.path})
        self._started.add(worker)
        return worker

    def _put_back(self, worker):
        if len(self._idle) < self.count:
            self._idle.append(worker)
        else:
            worker.end()


class _Worker:
    """One process; in use by one thread at a time."""

    def __init__(self, settings):
        own, other = multiprocessing.connection.Pipe()
        command = [sys.executable, "-I", str(SCRIPT)]
        command += [str(other.fileno()), str(os.getpid())]
        with other:
            self.process = subprocess.Popen(
                command,
                # An accelerator is the trainer's.
                env={"OMP_NUM_THREADS": "1", **os.environ}
                | {"JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                # All its processes end together, and Ctrl-C is not for them.
                start_new_session=True,
            )
        self.connection, self.ready, self.index = own, False, None
        self.seconds = START_SECONDS
        self.deadline = time.monotonic() + START_SECONDS
        self.end = weakref.finalize(self, _end, self.process, own, os.getpid())
        with contextlib.suppress(OSError):
            own.send(settings)

    def begin(self, index, data, seconds):
        """Starts a call; a process that has died is found by `finish`."""
        self.index, self.seconds = index, seconds
        self.deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self.connection.send_bytes(data)

    def finish(self):
        """Reads an answer, or ends a process that gives none.

        Returns:
            Tuple of the index of a call and its result; `None` twice when
            the process has become ready for calls.
        """
        index, self.index = self.index, None
        try:
            if self.connection.poll():
                kind, value = _decode(self.connection.recv_bytes())
                if kind != "error":
                    self.ready = True
                    return index, value
                failure = Failure(f"raised {value}")
                if index is not None:
                    return index, failure
            else:
                failure = Failure(f"took longer than {self.seconds:g} s")
        except ValueError as error:
            failure = Failure(f"sent an answer that cannot be read ({error})")
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            failure = Failure(f"ended its process ({_status(self.end())})")
        self.ready = False
        self.end()
        if index is None:
            raise RuntimeError(
                f"A worker process could not load its function: {failure}. "
                "The function must be defined in the script or notebook "
                "itself, or in a module that a new process can import."
            )
        return index, failure


def _decode(answer):
    """Returns the arguments of `child.encode`.

    Raises:
        ValueError: if something else in the process wrote the answer.
    """
    line, _, data = answer.partition(b"\n")
    try:
        kind, value, sizes = json.loads(line)
        for name, size in sizes.items():
            value[name], data = data[:size], data[size:]
    except (AttributeError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
    return kind, value


def _ended(busy):
    """Waits for workers that answered, died or are late, and removes them."""
    soonest = min(worker.deadline for worker in busy.values())
    wait = max(soonest - time.monotonic(), 0.0)
    ended = multiprocessing.connection.wait(list(busy), wait)
    now = time.monotonic()
    late = [c for c, worker in busy.items() if worker.deadline <= now]
    return [busy.pop(c) for c in dict.fromkeys((*ended, *late))]


def _end(process, connection, owner):
    """Kills a process and those that it started; returns its status."""
    if os.getpid() != owner:
        return None
    connection.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _status(code):
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name
