"""Calls functions in threads that do not keep the interpreter alive."""

import concurrent.futures
import queue
import threading

import keras


def in_thread(function, after=()):
    """Calls a function in a thread of its own.

    A thread pool would not serve: the interpreter waits at its end for the
    threads of pools, and a reward or a tool that hangs would keep the process
    alive.

    Args:
        function: callable without arguments.
        after: futures that are waited for first, whatever becomes of them.

    Returns:
        A `concurrent.futures.Future`.
    """
    future = concurrent.futures.Future()
    # Keras keeps the distribution for each thread.
    distribution = keras.distribution.distribution()

    def work():
        concurrent.futures.wait(after)
        keras.distribution.set_distribution(distribution)
        _resolve(future, function)

    threading.Thread(target=work, daemon=True).start()
    return future


class SerialThread:
    """One thread that calls functions, in the order in which they come.

    For objects that only the thread which made them may use, or that no two
    threads may use at once.
    """

    def __init__(self):
        self._calls = queue.SimpleQueue()
        in_thread(self._work)

    def submit(self, function):
        """Calls a function without arguments; see `in_thread`."""
        future = concurrent.futures.Future()
        self._calls.put((future, function))
        return future

    def end(self):
        """Ends the thread after the calls that wait."""
        self._calls.put(None)

    def _work(self):
        while call := self._calls.get():
            _resolve(*call)


def _resolve(future, function):
    """Puts what a function returns or raises into a future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
