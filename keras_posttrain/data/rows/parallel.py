"""Tokenizes the rows of a dataset in several processes."""

import collections
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import pickle

from keras_posttrain._cores import num_cores
from keras_posttrain.data.rows import reading
from keras_posttrain.data.rows.preparation import prepare_part
from keras_posttrain.data.rows.records import Part
from keras_posttrain.workers.pool import Failure, Workers

VARIABLE = "KERAS_POSTTRAIN_WORKERS"
PACKAGE = pathlib.Path(__file__).parents[2]
WORKER = pathlib.Path(__file__).with_name("worker.py")
# The rows of a call, the time that it may take and the memory.
SIZE = 256
# The calls of a process between two exchanges with other processes.
ROUND = 4
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
        return num_cores()
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
    parts = _parts(rows, range(start, len(rows), SIZE))
    for start, read, answer in _answers(parts, preparation, filtered):
        part = _part(preparation, answer)
        if part is None:
            found = prepare_part(preparation, start, read, filtered)
            part = Part.of(found)
        yield len(read), part


def prepare_together(rows, preparation, filtered, share):
    """Prepares rows, each of several processes a share of them.

    Shares are prepared in worker processes; where there are none, each
    process prepares all rows.

    Args:
        share: `Share` of this process. All processes must have the same rows.

    Yields:
        As `prepare_in_workers`, of all rows, in all processes.
    """
    starts = range(0, len(rows), SIZE)
    own = _parts(rows, starts[share.index :: share.count])
    answers = _answers(own, preparation, filtered)
    with contextlib.closing(answers):
        for first in range(0, len(starts), ROUND * share.count):
            some = starts[first : first + ROUND * share.count]
            number = len(some[share.index :: share.count])
            found = [a for *_, a in itertools.islice(answers, number)]
            found = share.exchange(pickle.dumps(found))
            found = [pickle.loads(data) for data in found]
            for i, start in enumerate(some):
                stop = min(start + SIZE, len(rows))
                answer = found[i % share.count][i // share.count]
                part = _part(preparation, answer)
                if part is None:
                    read = reading.read(rows, start, stop)
                    here = prepare_part(preparation, start, read, filtered)
                    part = Part.of(here)
                yield stop - start, part


def _parts(rows, starts):
    """Yields `(start, rows)`, `SIZE` rows or those that are left."""
    for start in starts:
        yield start, reading.read(rows, start, min(start + SIZE, len(rows)))


def _answers(parts, preparation, filtered):
    """Yields `(start, rows, answer)`; an answer may be `None`."""
    count = num_workers()
    try:
        data = pickle.dumps(preparation)
    except UNSENDABLE:
        # Such as a function among the variables of a template.
        count = 1
    if count == 1:
        yield from ((start, read, None) for start, read in parts)
        return
    function = str(WORKER), "tokenizer_of_rows", str(PACKAGE), data
    workers = Workers(function, SECONDS, MAX_BYTES, count)
    threads = concurrent.futures.ThreadPoolExecutor(count)
    waiting = collections.deque()

    def submit(part):
        start, read = part
        call = threads.submit(
            workers.call, start=start, rows=read, filtered=filtered
        )
        waiting.append((part, call))

    part = None
    try:
        for part in itertools.islice(parts, 2 * count + 1):
            submit(part)
        while waiting:
            part, call = waiting.popleft()
            try:
                yield *part, _result(call)
            except RuntimeError:
                # No worker can be started.
                break
            if (part := next(parts, None)) is not None:
                submit(part)
    finally:
        workers.close()
        threads.shutdown(cancel_futures=True)
    if part is not None:
        yield *part, None
    yield from ((*part, None) for part, _ in waiting)
    yield from ((*part, None) for part in parts)


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
        answer["summary"],
        answer["hashed"],
    )
