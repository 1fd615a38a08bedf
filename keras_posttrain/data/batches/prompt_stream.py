"""The prompts of a stream in order, with a position."""

import dataclasses
import threading

import numpy as np

from keras_posttrain.data import order
from keras_posttrain.data.batches.streaming import Lookahead
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.data.rows.prompts import PromptOrder

# How many prompts are shuffled together.
WINDOW = 2048


def prompt_order(prompts, **settings):
    """Makes the `PromptOrder` of a list or the `PromptStream` of a stream."""
    kind = PromptStream if is_stream(prompts) else PromptOrder
    return kind(prompts, **settings)


@dataclasses.dataclass
class _Window:
    """Prompts that are shuffled together, and the stream's state before."""

    stream: object
    prompts: list
    size: int


class PromptStream:
    """The prompts of a stream in order, from a position on.

    The stream is read a window at a time, and its windows are shuffled. A
    position is the stream's state at the start of a window, and how many of
    the window's prompts were used. See `PromptOrder`, which has the same
    methods.

    Args:
        prompts: Grain `IterDataset` of `Prompt`s.
        batch_size: int, prompts of a rollout.
        shuffle: bool; every epoch has another order.
        seed: int, of the order.
    """

    # How many there are is not known.
    num_prompts = None

    def __init__(self, prompts, *, batch_size, shuffle=True, seed=0):
        self.prompts = prompts
        self.batch_size = batch_size
        self.shuffle, self.seed = shuffle, seed
        self.fingerprint = {
            "batch_size": batch_size,
            "shuffle": bool(shuffle),
            "seed": int(seed),
            "stream": True,
        }
        self.epoch = 0
        # A thread may take prompts while another one asks for the position.
        self._lock = threading.RLock()
        self._begin()

    def _begin(self, stream=None, window=0, used=0):
        """Starts reading an epoch at a window, from a prompt of it on."""
        self._iterator, self._stream = None, stream
        # All that were read, and the number in the epoch of the first one.
        self._windows, self._first = [], window
        # Prompts of the epoch, counted from the first window.
        self.taken = self.used = used

    def _read(self):
        """Reads the next window; returns whether there is one."""
        if self._iterator is None:
            iterator = iter(self.prompts)
            if self._stream is not None:
                iterator.set_state(self._stream)
            self._iterator = Lookahead(iterator)
            if self._iterator.at_end and not self.taken:
                raise ValueError(
                    "A stream must have prompts to sample from. Received: a "
                    "stream with none. Check its filter, its length, and the "
                    "report of the rows that were dropped."
                )
        if self._iterator.at_end:
            return False
        state, number = self._iterator.state, self._first + len(self._windows)
        found = self._iterator.take(WINDOW)
        if self.shuffle:
            seeds = [self.seed % 2**32, self.epoch + 1, number]
            places = np.random.default_rng(seeds).permutation(len(found))
            found = [found[i] for i in places]
        self._windows.append(_Window(state, found, len(found)))
        return True

    @property
    def left(self):
        """Int, prompts that are known of and not used; 0 at the end."""
        with self._lock:
            if self._iterator is None:
                return 1
            known = sum(window.size for window in self._windows)
            return known - self.used + (not self._iterator.at_end)

    def take(self, count):
        """Returns the next prompts of the epoch; fewer or none at its end."""
        with self._lock:
            found = self._next(count)
            self.taken += len(found)
            return found

    def _next(self, count):
        found = []
        while len(found) < count:
            number, place = divmod(self.taken + len(found), WINDOW)
            if number >= len(self._windows) and not self._read():
                break
            window = self._windows[number]
            if place >= window.size:
                break
            found += window.prompts[place : place + count - len(found)]
        return found

    def use(self, taken):
        """Records that the first `taken` of the epoch have been trained on.

        They may be fewer than were taken: `state` is the position after them.
        """
        self.used = taken
        for window in self._windows[: taken // WINDOW]:
            window.prompts = []

    def next_epoch(self):
        self.epoch += 1
        self._begin()

    def state(self):
        """Returns the position as a dict that JSON can store."""
        with self._lock:
            return {"position": self._position(), "data": self.fingerprint}

    def _position(self):
        number, place = divmod(self.used, WINDOW)
        if self._windows and not self.left:
            # The end of an epoch is the beginning of the next one.
            place = {"epoch": self.epoch + 1, "window": 0, "taken": 0}
            return place | {"stream": None}
        stream = self._stream
        if number < len(self._windows):
            stream = self._windows[number].stream
        elif self._iterator is not None:
            stream = self._iterator.state
        return {
            "epoch": self.epoch,
            "window": self._first + number,
            "taken": place,
            "stream": stream,
        }

    def set_state(self, state):
        """Resumes from a position."""
        order.check_same(self.fingerprint, state["data"])
        position = state["position"]
        self.epoch = position["epoch"]
        self._begin(position["stream"], position["window"], position["taken"])
