"""The program of a worker process: it calls one function, again and again.

The interpreter runs this file as a script. It imports only the standard
library, so that a worker starts in a moment and needs little memory.
"""

import importlib.util
import json
import multiprocessing.connection
import os
import pickle
import resource
import signal
import sys
import threading
import time

POLL_SECONDS = 1.0
# Characters of an error's message.
SHOWN = 1000


def serve(connection, parent):
    """Answers calls until the other end is closed.

    The first message is a dict of settings, every other one a dict of keyword
    arguments. All are pickled; the answers of `encode` are not, because what
    computed them may have been taken over by what it read.

    Args:
        connection: `multiprocessing.connection.Connection`.
        parent: int, the id of the process that started this one.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    settings = connection.recv()
    sys.path[:] = settings["path"]

    try:
        function = _load(settings["function"])
    except BaseException as error:
        connection.send_bytes(encode("error", _describe(error)))
        return
    _limit_memory(settings["max_bytes"])
    connection.send_bytes(encode("ready", None))
    while True:
        data = connection.recv_bytes()
        _limit_time(settings["seconds"])
        try:
            answer = encode("value", function(**pickle.loads(data)))
        except BaseException as error:
            answer = encode("error", _describe(error))
        connection.send_bytes(answer)


def encode(kind, value):
    """Returns an answer: a line of JSON, and the bytes values of a dict."""
    data = {}
    if isinstance(value, dict):
        data = {k: v for k, v in value.items() if isinstance(v, bytes)}
        value = {k: v for k, v in value.items() if k not in data}
    sizes = {name: len(part) for name, part in data.items()}
    line = json.dumps([kind, value, sizes]).encode()
    return b"".join([line, b"\n", *data.values()])


def _load(function):
    """Returns the function of a pickle, or of `(file, name, arguments...)`."""
    if isinstance(function, bytes):
        return Scorer(pickle.loads(function))
    file, name, *arguments = function
    spec = importlib.util.spec_from_file_location("kpt_worker", file)
    module = sys.modules["kpt_worker"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)(*arguments)


class Scorer:
    """Calls a reward function of one completion.

    Args:
        function: callable that returns a list of one reward, sync or async.
    """

    def __init__(self, function):
        self.function = function

    def __call__(self, **arguments):
        result = self.function(**arguments)
        if hasattr(result, "__await__"):
            # Slow to import.
            import asyncio

            result = asyncio.run(_awaited(result))
        values = (
            None if isinstance(result, (str, bytes, dict)) else list(result)
        )
        if values is None or len(values) != 1 or isinstance(values[0], str):
            raise ValueError(
                "a list of one reward was expected for one completion. "
                f"Received: {result!r}"
            )
        # What is no number, and no number of NumPy, is an error.
        return None if values[0] is None else float(values[0])


async def _awaited(awaitable):
    return await awaitable


def _describe(error):
    return f"{type(error).__name__}: {error}"[:SHOWN]


def _end_with(parent):
    """Ends this process when the parent has ended."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    _end()


def _end():
    """Ends this process, with those that calls have left behind."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _limit_memory(max_bytes):
    """Limits what is allocated from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except OSError:
        # macOS does not enforce the limit.
        return
    used = pages * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + max_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_time(seconds):
    """Limits the processor time of a call that nobody may be there to end.

    The other process ends late calls. If it was killed, the thread of
    `_end_with` does so, unless the call never releases the interpreter.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    room = (seconds + 2 * POLL_SECONDS) * (os.cpu_count() or 1)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime + room) + 1
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    try:
        serve(
            multiprocessing.connection.Connection(int(sys.argv[1])),
            int(sys.argv[2]),
        )
    except (EOFError, OSError):
        # The other process has ended, before it has read an answer or after.
        _end()
