"""Examples of a stream, read ahead of the step that takes them."""

import collections
import copy
import threading
import weakref

from keras_posttrain.data.rows.streams import KEPT

# The most examples, and the most bytes of them, that are read ahead.
AHEAD = 2 * 2048
MAX_BYTES = 2**28
NAME = "keras_posttrain rows"


class Lookahead:
    """An iterator that reads one example ahead to know its end.

    A thread reads the examples after the first few, which an iterator that
    can be read only once may have to give again.

    Args:
        iterator: Grain's, of examples.

    Attributes:
        example: the next example, `None` at the end.
        state: the iterator's state before it.
    """

    def __init__(self, iterator):
        self._iterator, self._reader, self._count = iterator, None, 0
        self._look()

    def _look(self):
        self._count += 1
        if self._reader is None and self._count > KEPT:
            self._reader = _Reader(self._iterator)
            self._reader.start()
            # Whoever drops it without `close` is not waited for.
            weakref.finalize(self, self._reader.stop)
        if self._reader is None:
            self.state, self.example = _read(self._iterator)
        else:
            self.state, self.example = self._reader.get()

    @property
    def at_end(self):
        return self.example is None

    def take(self, count):
        """Returns at most `count` of the next examples."""
        taken = []
        while len(taken) < count and not self.at_end:
            taken.append(self.example)
            self._look()
        return taken

    def close(self):
        """Ends the thread, and waits for the row that it is reading."""
        if self._reader is not None:
            self._reader.close()


def _read(iterator):
    """Returns the state before the next example, and the example."""
    state = copy.deepcopy(iterator.get_state())
    return state, next(iterator, None)


class _Reader(threading.Thread):
    """Reads an iterator to its end, as far ahead as there is room."""

    def __init__(self, iterator):
        super().__init__(name=NAME, daemon=True)
        self._iterator, self._error = iterator, None
        self._found, self._bytes = collections.deque(), 0
        self._closed = self._ended = False
        self._changed = threading.Condition()

    def run(self):
        try:
            example = self
            while example is not None and self._has_room():
                pair = _read(self._iterator)
                example = pair[1]
                with self._changed:
                    self._bytes += _size(example)
                    self._found.append(pair)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _has_room(self):
        """Waits until there is room; returns `False` when it is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or (len(self._found) < AHEAD and self._bytes < MAX_BYTES)
                )
            )
            return not self._closed

    def get(self):
        """Returns the next state and example; raises what reading raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._found or self._ended)
            if not self._found:
                raise self._error or RuntimeError("The stream was closed.")
            pair = self._found.popleft()
            self._bytes -= _size(pair[1])
            self._changed.notify_all()
            return pair

    def stop(self):
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self):
        self.stop()
        self.join()


def _size(example):
    """Returns the bytes of an example, most of which are its images."""
    images = getattr(example, "images", None)
    return 0 if images is None else images.pixels.nbytes
