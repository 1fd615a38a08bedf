"""Where a run's time goes: spans, for callbacks that listen to them.

What takes time is done inside of `with span("rollout"):`. Where nobody
listens, that costs about a microsecond.
"""

import threading
import time
import typing

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
# Replaced as a whole, never changed: threads read it without the lock.
_listeners = ()


class Span(typing.NamedTuple):
    """A piece of time that something took.

    Attributes:
        name: string, such as `"rollout"`.
        start, end: floats, by `time.perf_counter`.
        label: string, what exactly: the name of a tool or of a program.
        thread: int, the identifier of the thread.
    """

    name: str
    start: float
    end: float
    label: str
    thread: int


class span:  # noqa: N801 - used as a function
    """Opens a scope that reports its time to listeners at its end."""

    __slots__ = ("name", "label", "start")

    def __init__(self, name, label=""):
        self.name, self.label = name, label

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *error):
        if _listeners:
            tell(self.name, self.start, time.perf_counter(), self.label)


def tell(name, start, end, label=""):
    """Gives a `Span` to all listeners."""
    found = Span(name, start, end, label, threading.get_ident())
    for listener in _listeners:
        listener(found)


def listen(listener):
    """Calls a function with each `Span` from now on, in any thread.

    Programs that are compiled are spans with the name `"compile"`.
    """
    global _listeners
    with _lock:
        if not _listeners:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
        _listeners = (*_listeners, listener)


def unlisten(listener):
    """Ends `listen`; a listener that is not there is no error."""
    global _listeners
    with _lock:
        left = tuple(x for x in _listeners if x != listener)
        if _listeners and not left:
            jax.monitoring.unregister_event_duration_listener(_on_event)
        _listeners = left


def _on_event(event, seconds, **about):
    if event == COMPILED:
        now = time.perf_counter()
        name = str(about.get("fun_name", ""))
        tell("compile", now - seconds, now, name)
