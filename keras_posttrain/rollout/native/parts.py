"""Divides the samples of a call among decoders that run at the same time.

On a CPU much of a step is small operations that use one core. With a thread
for each share of the slots, the other cores do those of the other threads
meanwhile (`benchmarks/rollout.py`).
"""

import threading

from keras_posttrain import _tracing
from keras_posttrain._cores import num_cores
from keras_posttrain.models import sharding
from keras_posttrain.workers.threads import in_thread

# The fewest slots of a part. Products of fewer rows take as long as reading
# their kernels, which each part does.
LEAST_SLOTS = 16


def count_parts(placement, requests, slots):
    """Returns the number of parts: one, or on a CPU at most one a core.

    Args:
        placement: `Placement` of the cache.
        requests: int, of a call. The samples of a request stay together,
            since they share its prompt.
        slots: int, the most that are in use at once.
    """
    if placement.mesh is not None or sharding.platform() != "cpu":
        return 1
    if _tracing.is_held():
        # In `task.using_weights(...)`.
        return 1
    return max(min(num_cores(), requests, slots // LEAST_SLOTS), 1)


def divide(samples, count):
    """Divides the `Samples` of a call by their requests.

    Each request goes to the part with the fewest samples so far.

    Returns:
        A list of `count` `Samples`.
    """
    requests, sizes = [set() for _ in range(count)], [0] * count
    for i, of_request in enumerate(samples.by_request()):
        part = sizes.index(min(sizes))
        sizes[part] += len(of_request)
        requests[part].add(i)
    return [samples.of_requests(part) for part in requests]


def one_at_a_time(function):
    """Returns a function that several threads may call, or `None`."""
    if function is None:
        return None
    lock = threading.Lock()

    def call(*args):
        with lock:
            return function(*args)

    return call


def run(works, is_interrupted):
    """Calls functions in threads until all have returned.

    The first is called in this thread. An exception ends the others.

    Args:
        works: list of functions of a function that says whether to end.
        is_interrupted: function that says so to all.
    """
    ended = threading.Event()

    def is_ended():
        return ended.is_set() or is_interrupted()

    def call(work):
        try:
            work(is_ended)
        except BaseException:
            ended.set()
            raise

    others = [in_thread(lambda work=work: call(work)) for work in works[1:]]
    try:
        call(works[0])
    finally:
        # Also those of an interrupted call: they use its cache.
        for other in others:
            other.exception()
    for other in others:
        other.result()
