"""The share of a dataset's rows that this process of several tokenizes."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable

_of_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class Share:
    """One of several processes, which prepare the same rows at once.

    Args:
        index: int, that of this process.
        count: int, the number of processes.
        exchange: function of this process's bytes to a list of those of all;
            all processes must call it.
        compare: function of a function that reads rows and returns a dict of
            `before`, `rows`, `ends` and `hash`: how many rows were compared
            before, how many these are, whether the stream ends with them, and
            their hash. It raises a `ValueError` in all processes where these
            differ, or where the function raised an exception in one of them.
            All processes must call it.
    """

    index: int
    count: int
    exchange: Callable
    compare: Callable


@contextlib.contextmanager
def shared(share):
    """A scope in which each process tokenizes a `Share` of the rows."""
    before = current()
    _of_thread.share = share
    try:
        yield
    finally:
        _of_thread.share = before


def current():
    """Returns the `Share` of this thread, or `None`."""
    return getattr(_of_thread, "share", None)
