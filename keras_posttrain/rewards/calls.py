"""Calls of user functions, sync or async, with a time limit."""

import asyncio
import concurrent.futures
import inspect
import threading
import time

import keras

from keras_posttrain.rewards import reward

# Seconds in which an event loop must report that a call is cancelled.
GRACE = 1.0


class OutOfTime(Exception):
    """A call took longer than its limit."""


class Call:
    """A call that is running or done.

    All async functions run in one event loop in a background thread, so that
    a client or a lock can be used in several batches. Sync functions are done
    when the constructor returns. Without a time limit they run in the calling
    thread, with one in a new thread: Python cannot end a thread, so a function
    that never returns keeps running in the background.

    Args:
        function: callable.
        values: dict of keyword arguments.
        timeout: float, seconds, or `None`.
    """

    def __init__(self, function, values, timeout=None):
        self._timeout = timeout
        self._start = time.perf_counter()
        self.seconds = 0.0
        if reward.is_async(function):
            self._future = _submit(function(**values), timeout)
        else:
            self._future = _call(function, values, timeout)
            if self._future.done() and not self._future.exception():
                # The `__call__` of an object may be async too.
                result = self._future.result()
                if inspect.isawaitable(result):
                    self._future = _submit(result, timeout)
        self._future.add_done_callback(self._stop)

    def _stop(self, future):
        self.seconds = time.perf_counter() - self._start

    def result(self):
        """Returns the result, or raises the function's error or OutOfTime."""
        left = None
        if self._timeout is not None:
            passed = time.perf_counter() - self._start
            left = max(self._timeout - passed, 0.0) + GRACE
        try:
            return self._future.result(left)
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise  # The function raised it.
            # A call blocks the event loop, so the next one gets a new loop.
            _forget_loop()
            raise OutOfTime from None

    def cancel(self):
        self._future.cancel()


def _call(function, values, timeout):
    """Runs a sync call; returns a finished future."""
    future = concurrent.futures.Future()
    if timeout is None:
        try:
            future.set_result(function(**values))
        except Exception as error:
            future.set_exception(error)
        return future
    distribution = keras.distribution.distribution()

    def work():
        try:
            # Keras's distribution is thread-local.
            if distribution is not None:
                with distribution.scope():
                    future.set_result(function(**values))
            else:
                future.set_result(function(**values))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        future.exception(timeout)
    except concurrent.futures.TimeoutError:
        # The thread may still set the first future.
        future = concurrent.futures.Future()
        future.set_exception(OutOfTime())
    return future


class DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Runs each call in a daemon thread.

    The interpreter waits at its end for the threads of executors; a call that
    hangs would keep the process alive after the run.
    """

    def __init__(self, max_workers=32):
        super().__init__(max_workers)
        self._slots = threading.Semaphore(max_workers)

    def submit(self, function, /, *args, **kwargs):
        future = concurrent.futures.Future()

        def work():
            with self._slots:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future


async def _limited(awaitable, timeout):
    try:
        async with asyncio.timeout(timeout) as scope:
            return await awaitable
    except TimeoutError as error:
        if scope.expired():
            raise OutOfTime from error
        raise


_loop = None
_lock = threading.Lock()


def _submit(awaitable, timeout):
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_default_executor(DaemonThreads())
            threading.Thread(target=_loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(
            _limited(awaitable, timeout), _loop
        )


def _forget_loop():
    global _loop
    with _lock:
        _loop = None
