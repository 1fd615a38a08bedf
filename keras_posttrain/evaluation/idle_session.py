"""An engine's session that is open while somebody samples."""

import contextlib
import threading

# Seconds without a request after which the session is closed.
IDLE_SECONDS = 2.0


class IdleSession:
    """Opens a session of an engine at the first request, closes it when idle.

    An open session keeps the keys and values of conversations, and its
    requests are sampled together.

    Args:
        source: `EvaluationEngine`.
        seconds: float, without a request, after which it is closed.
    """

    def __init__(self, source, seconds=IDLE_SECONDS):
        self._source, self._seconds = source, seconds
        self._lock = threading.Lock()
        self._session, self._users, self._timer = None, 0, None

    @property
    def is_open(self):
        return self._session is not None

    @contextlib.contextmanager
    def use(self):
        """A scope with the session, which has the task's present weights."""
        with self._lock:
            engine = self._source.sync()
            if self._session is not None and self._session.has_ended:
                # The engine failed.
                self._session = None
            if self._session is None:
                session = engine.session()
                self._session = session.__enter__()
            session = self._session
            self._users += 1
        try:
            yield session
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._close_later()

    def close(self):
        """Closes the session if it is open and nobody samples."""
        with self._lock:
            if self._session is not None and not self._users:
                self._session.__exit__(None, None, None)
                self._session = None

    def _close_later(self):
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._seconds, self._close_if_idle)
        self._timer.daemon = True
        self._timer.start()

    def _close_if_idle(self):
        # A later request has another timer.
        if self._timer is threading.current_thread():
            self.close()
