"""Tokenizes the rows of a dataset in several processes."""

import collections
import concurrent.futures
import itertools
import os
import pathlib
import pickle

from keras_posttrain.data.rows import reading
from keras_posttrain.data.rows.preparation import prepare_part
from keras_posttrain.data.rows.records import Part
from keras_posttrain.workers.pool import Failure, Workers

VARIABLE = "KERAS_POSTTRAIN_WORKERS"
PACKAGE = pathlib.Path(__file__).parents[2]
WORKER = pathlib.Path(__file__).with_name("worker.py")
# The rows of a call, the time that it may take and the memory.
SIZE = 256
SECONDS = 600.0
MAX_BYTES = 4 * 2**30
UNSENDABLE = (pickle.PicklingError, TypeError, AttributeError)


def num_workers():
    """Returns how many processes tokenize rows.

    As many as this process may use cores, unless the environment variable
    `KERAS_POSTTRAIN_WORKERS` says otherwise. 1 is this process alone.
    """
    setting = os.environ.get(VARIABLE, "")
    if not setting:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if not setting.isdecimal():
        raise ValueError(
            f"The environment variable `{VARIABLE}` must be a number of "
            f"processes. Received: {VARIABLE}={setting!r}."
        )
    return max(int(setting), 1)


def prepare_in_workers(rows, preparation, start, filtered):
    """Prepares the rows from `start` on in worker processes.

    Results and errors are those of `preparation.prepare_part` of all rows:
    where a worker cannot prepare its part, this process does.

    Yields:
        `(rows, part)`: how many rows were read, and the `Part` of their
        examples.
    """
    parts = reading.parts(rows, start, SIZE)
    for read, answer in _answers(parts, preparation, start, filtered):
        part = _part(preparation, answer)
        if part is None:
            found = prepare_part(preparation, start, read, filtered)
            part = Part.of(found)
        start += len(read)
        yield len(read), part


def _answers(parts, preparation, start, filtered):
    """Yields `(rows, answer)`; the answer is `None` where there is none."""
    count = num_workers()
    try:
        data = pickle.dumps(preparation)
    except UNSENDABLE:
        # Such as a function among the variables of a template.
        count = 1
    if count == 1:
        yield from ((read, None) for read in parts)
        return
    function = str(WORKER), "tokenizer_of_rows", str(PACKAGE), data
    workers = Workers(function, SECONDS, MAX_BYTES, count)
    threads = concurrent.futures.ThreadPoolExecutor(count)
    waiting = collections.deque()

    def submit(read):
        nonlocal start
        call = threads.submit(
            workers.call, start=start, rows=read, filtered=filtered
        )
        waiting.append((read, call))
        start += len(read)

    try:
        for read in itertools.islice(parts, 2 * count + 1):
            submit(read)
        while waiting:
            read, call = waiting.popleft()
            try:
                yield read, _result(call)
            except RuntimeError:
                # No worker can be started.
                break
            if (read := next(parts, None)) is not None:
                submit(read)
    finally:
        workers.close()
        threads.shutdown(cancel_futures=True)
    if waiting or read is not None:
        yield read, None
    yield from ((read, None) for read, _ in waiting)
    yield from ((read, None) for read in parts)


def _result(call):
    try:
        answer = call.result()
    except UNSENDABLE:
        return None
    return None if isinstance(answer, Failure) else answer


def _part(preparation, answer):
    """Returns the `Part` of an answer, and counts its rows.

    Returns `None` where the rows must be prepared here.
    """
    if not answer or not preparation.agrees(answer["firsts"]):
        return None
    preparation.report.add(answer["report"])
    return Part(
        answer["records"],
        answer["sizes"],
        answer["lengths"],
        answer["hashed"],
    )
