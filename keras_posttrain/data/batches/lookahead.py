"""Examples of a stream, read ahead of the step that takes them."""

import collections
import copy
import functools
import hashlib
import threading
import warnings
import weakref

from keras_posttrain.data import order
from keras_posttrain.data.rows import stream_shares
from keras_posttrain.data.rows.examples import digest_of
from keras_posttrain.data.rows.streams import KEPT

# The most examples, and the most bytes of them, that are read ahead.
AHEAD = 2 * 2048
MAX_BYTES = 2**28
NAME = "keras_posttrain rows"
# The most examples that processes compare at once, unless a window has more.
COMPARED = 2048
# How many examples a position knows of those that follow it.
RECORDED = 64


class Lookahead:
    """An iterator that reads one example ahead to know its end.

    A thread reads the examples after the first few, which an iterator that
    can be read only once may have to give again. Where epochs follow, it
    reads from the first example on, and reads into the next epoch.

    Args:
        iterator: Grain's, of examples.
        begin: function without arguments that returns an iterator of the
            next epoch's examples.
        epochs: int, how many there are, the first one included.
        shared: stream of `stream_shares.shared` whose rows the iterator
            gives, or `None` for one process. Each part of the rows is
            compared with those of other processes, and completed by their
            examples, before any of it is given, in the thread that takes
            them.
        window: int, how many examples are taken at once.

    Attributes:
        example: the next example, `None` at the end of an epoch.
        state: the iterator's state before it.
    """

    def __init__(self, iterator, begin=None, epochs=1, shared=None, window=1):
        self._pairs = _pairs(iterator, begin, epochs)
        self._reader, self._count, self._epochs = None, 0, epochs
        self._may_begin_again = epochs == 1
        self._shared, self._window = shared, window
        self._begin_epoch()

    def _begin_epoch(self):
        # Nothing is read here: it may be another thread that takes examples.
        self._pair, self._block = None, collections.deque()
        self._compared, self._size = 0, self._window

    @property
    def example(self):
        return self._next()[1]

    @property
    def state(self):
        return self._next()[0]

    @property
    def at_end(self):
        return self.example is None

    def _next(self):
        if self._pair is None:
            self._look()
        return self._pair

    def _look(self):
        while self._shared is not None and not self._block:
            self._read_block()
        self._pair = self._block.popleft() if self._block else self._get()

    def _get(self):
        self._count += 1
        first = self._may_begin_again and self._count <= KEPT
        if self._reader is None and not first:
            self._reader = _Reader(self._pairs, self._epochs)
            self._reader.start()
            # Whoever drops it without `close` is not waited for.
            weakref.finalize(self, self._reader.stop)
        if self._reader is None:
            return next(self._pairs)
        return self._reader.get()

    def _read_block(self):
        """Reads rows, and gets those of their examples made elsewhere."""
        pairs = []
        self._shared.compare(functools.partial(self._read_rows, pairs))
        states, rows = zip(*pairs)
        ends = rows[-1] is None
        rows = rows[:-1] if ends else rows
        for place, example in self._shared.complete(rows):
            self._block.append((states[place], example))
        if ends:
            self._block.append(pairs[-1])

    def _read_rows(self, pairs):
        """Reads rows into a list of pairs; returns what is compared."""
        # One more at the beginning: windows are known to end before it.
        size = self._size + (not self._compared)
        before, num_bytes = self._compared, 0
        while len(pairs) < size and num_bytes < MAX_BYTES:
            pairs.append(self._get())
            num_bytes += _size(pairs[-1][1])
            if pairs[-1][1] is None:
                break
        found = [x for _, x in pairs if x is not None]
        self._compared += len(found)
        self._size = min(2 * self._size, max(COMPARED, self._window))
        digest = hashlib.blake2b(digest_size=8)
        for row in found:
            digest.update(row.digest)
        return {
            "before": before,
            "rows": len(found),
            "ends": len(found) < len(pairs),
            "hash": digest.hexdigest(),
        }

    def take(self, count):
        """Returns at most `count` of the next examples of the epoch."""
        taken = []
        while len(taken) < count and not self.at_end:
            taken.append(self.example)
            self._look()
        return taken

    def next_epoch(self):
        """Begins the next epoch; returns `False` where there is none.

        There is none either before the end of this one was reached.
        """
        if self._pair is None or not self.at_end or self._epochs == 1:
            return False
        self._epochs -= 1
        self._begin_epoch()
        return True

    def close(self):
        """Ends the thread, and waits for the row that it is reading."""
        if self._reader is not None:
            self._reader.close()


def read_ahead(examples, state, epochs, share, window):
    """Returns the `Lookahead` of a stream at a state, over some epochs.

    Args:
        examples: Grain `IterDataset`.
        state: Grain's, or `None` for the beginning.
        epochs: int, how many are read, with this one.
        share: `Share` of this process of several, or `None`.
        window: int, how many examples are taken at once.
    """
    shared = None
    if share is not None:
        shared = stream_shares.shared(examples, share)
    stream = examples if shared is None else shared
    return Lookahead(
        resumed(stream, state),
        # Not a method of what takes them: the thread must not keep it alive.
        functools.partial(iter, stream),
        epochs,
        shared,
        window,
    )


def resumed(examples, state):
    """Returns an iterator of a Grain dataset at a state; `None` at its start.

    Raises:
        ValueError: the state is not one of such a dataset.
    """
    iterator = iter(examples)
    if state is None:
        return iterator
    try:
        iterator.set_state(state)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            "A position in the data can only be used with the same data and "
            f"settings. Received: a stream that has no position {state}: "
            f"{type(error).__name__}: {error}. Use the data of the run that "
            "saved it, or start a new run directory."
        ) from error
    return iterator


def record(examples):
    """Returns what identifies the first of some examples: fit for JSON."""
    examples = examples[:RECORDED]
    return {"rows": len(examples), "tokens": digest_of(examples)}


def check_record(known, examples, begins):
    """Raises where the first of some examples are not those of a record.

    Where an epoch `begins` with them it only warns: some streams give another
    order in each.
    """
    if known is None:
        return
    found = record(examples[: known["rows"]])
    names = {"rows": "rows at the position", "tokens": "their tokens"}
    ours, theirs = (
        {names[name]: value for name, value in each.items()}
        for each in (found, known)
    )
    if begins and ours != theirs:
        warnings.warn(
            "The run resumes where an epoch begins, and the stream does not "
            "begin with the rows that the epochs before began with: it has "
            "another order or is another stream. Received: "
            f"{ours} instead of {theirs}",
            stacklevel=2,
        )
        return
    order.check_same(ours, theirs)


def _pairs(iterator, begin, epochs):
    """Yields pairs of `_read`, over the ends of epochs."""
    for epoch in range(epochs):
        if epoch:
            iterator = begin()
        example = iterator
        while example is not None:
            state, example = _read(iterator)
            yield state, example


def _read(iterator):
    """Returns the state before the next example, and the example."""
    state = copy.deepcopy(iterator.get_state())
    return state, next(iterator, None)


class _Reader(threading.Thread):
    """Reads epochs to their end, as far ahead as there is room.

    It is never further ahead than the end of the epoch after the one whose
    examples are taken.
    """

    def __init__(self, pairs, epochs):
        super().__init__(name=NAME, daemon=True)
        self._pairs, self._epochs, self._error = pairs, epochs, None
        self._found, self._bytes, self._ends = collections.deque(), 0, 0
        self._closed = self._ended = False
        self._changed = threading.Condition()

    def run(self):
        try:
            left = self._epochs
            while left and self._has_room():
                pair = next(self._pairs)
                left -= pair[1] is None
                with self._changed:
                    self._count(pair[1], 1)
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
                    or (
                        len(self._found) < AHEAD
                        and self._bytes < MAX_BYTES
                        and self._ends < 2
                    )
                )
            )
            return not self._closed

    def _count(self, example, sign):
        self._bytes += sign * _size(example)
        self._ends += sign * (example is None)

    def get(self):
        """Returns the next state and example; raises what reading raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._found or self._ended)
            if not self._found:
                raise self._error or RuntimeError("The stream was closed.")
            pair = self._found.popleft()
            self._count(pair[1], -1)
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
    if (size := getattr(example, "num_bytes", None)) is not None:
        # Of a `SharedRow`.
        return size
    images = getattr(example, "images", None)
    return 0 if images is None else images.pixels.nbytes
