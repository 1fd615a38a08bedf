"""The prompts of a stream in order, with a position."""

import dataclasses

import numpy as np

from keras_posttrain.data import order
from keras_posttrain.data.batches.lookahead import (
    check_record,
    read_ahead,
    record,
)
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.data.rows.prompts import PromptOrder

# How many prompts are shuffled together.
WINDOW = 2048


def prompt_order(prompts, *, epochs=1, share=None, **settings):
    """Makes the `PromptOrder` of a list or the `PromptStream` of a stream."""
    if is_stream(prompts):
        settings |= {"epochs": epochs, "share": share}
        return PromptStream(prompts, **settings)
    return PromptOrder(prompts, **settings)


@dataclasses.dataclass
class _Window:
    """Prompts that are shuffled together.

    Attributes:
        prompts: list of `Prompt`s; empty once all were used.
        size: int, how many they were.
        before, after: the stream's state before them and after them.
        is_last: bool, whether the epoch ends with them.
        known: dict of `record`, of the first of them as the stream has them.
        next: the same of the first one after them, `None` at the end.
    """

    prompts: list
    size: int
    before: object
    after: object
    is_last: bool
    known: dict
    next: dict | None


class PromptStream:
    """The prompts of a stream in order, from a position on.

    The stream is read a window at a time, and its windows are shuffled. A
    position is the stream's state at the start of a window, and how many of
    the window's prompts were used. The next epoch's first window is read
    while the last prompts of the epoch before are used. See `PromptOrder`,
    which has the same methods.

    Args:
        prompts: Grain `IterDataset` of `Prompt`s.
        batch_size: int, prompts of a rollout.
        shuffle: bool; every epoch has another order.
        seed: int, of the order.
        epochs: int, how many epochs are read; none is read ahead after them.
        share: `Share` of this process of several, or `None`.
    """

    # How many there are is not known, nor how long they are.
    num_prompts, prompt_lengths = None, (0, None)

    def __init__(
        self,
        prompts,
        *,
        batch_size,
        shuffle=True,
        seed=0,
        epochs=1,
        share=None,
    ):
        self.epochs, self.share = epochs, share
        self.prompts = prompts
        self.batch_size = batch_size
        self.shuffle, self.seed = shuffle, seed
        self.fingerprint = {
            "batch_size": batch_size,
            "shuffle": bool(shuffle),
            "seed": int(seed),
            "stream": True,
        }
        self.epoch, self._iterator = 0, None
        # What is known of an epoch's first prompts, and of those behind
        # `_stream`; whether they are checked to be that.
        self._first = self._known = None
        self._restored = False
        self._begin()

    def _begin(self, stream=None, window=0, used=0, known=None, ahead=None):
        """Starts reading an epoch at a window, from a prompt of it on.

        `ahead` is a `Lookahead` at its start, if there is one.
        """
        if self._iterator is not ahead:
            self.close()
        self._iterator, self._stream, self._known = ahead, stream, known
        self._restored = False
        # All that were read, and the number in the epoch of the first one. A
        # window is there as a whole or not at all: a position may be asked
        # for while a thread reads, and after an error.
        self._windows, self._number = [], window
        # Prompts of the epoch, counted from the first window.
        self.taken = self.used = used

    def _after(self):
        """Returns the stream's state after the windows that were read."""
        return self._windows[-1].after if self._windows else self._stream

    def _read(self):
        """Reads the next window; returns whether there is one."""
        if self._windows and self._windows[-1].is_last:
            return False
        before, ahead = self._after(), self._iterator
        # Of one that fails no more is read.
        self._iterator = None
        if ahead is None:
            ahead = read_ahead(
                self.prompts,
                before,
                max(1, self.epochs - self.epoch),
                self.share,
                WINDOW,
            )
        prompts = ahead.take(WINDOW)
        if self._restored and not self._windows:
            begins = not (self._number or self.used)
            check_record(self._known, prompts, begins)
        if not prompts:
            raise ValueError(
                "A stream must have prompts to sample from. Received: a "
                "stream with none. Check its filter, its length, and the "
                "report of the rows that were dropped."
            )
        number = self._number + len(self._windows)
        known = record(prompts)
        if number == 0:
            self._first = known
        if self.shuffle:
            seeds = [self.seed % 2**32, self.epoch + 1, number]
            places = np.random.default_rng(seeds).permutation(len(prompts))
            prompts = [prompts[i] for i in places]
        self._iterator = ahead
        self._windows.append(
            _Window(
                prompts,
                len(prompts),
                before,
                ahead.state,
                ahead.at_end,
                known,
                None if ahead.at_end else record([ahead.example]),
            )
        )
        return True

    @property
    def left(self):
        """Int, prompts that are known of and not used; 0 at the end."""
        if not self._windows:
            return 1
        known = sum(window.size for window in self._windows)
        return known - self.used + (not self._windows[-1].is_last)

    def take(self, count):
        """Returns the next prompts of the epoch; fewer or none at its end."""
        found = []
        while len(found) < count:
            number, place = divmod(self.taken + len(found), WINDOW)
            if number >= len(self._windows) and not self._read():
                break
            window = self._windows[number]
            if place >= window.size:
                break
            found += window.prompts[place : place + count - len(found)]
        self.taken += len(found)
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
        ahead = self._iterator
        if ahead is None or not ahead.next_epoch():
            ahead = None
        self._begin(known=self._first, ahead=ahead)

    def close(self):
        """Stops reading ahead, until prompts are taken again."""
        ahead, self._iterator = self._iterator, None
        if ahead is not None:
            ahead.close()

    def state(self):
        """Returns the position as a dict that JSON can store."""
        position, known = self._position()
        return {
            "position": position,
            "data": self.fingerprint,
            "following": known,
            "first": self._first,
        }

    def _position(self):
        """Returns the position, and what is known of the prompts there."""
        if self._windows and not self.left:
            # The end of an epoch is the beginning of the next one.
            place = {"epoch": self.epoch + 1, "window": 0, "taken": 0}
            return place | {"stream": None}, self._first
        number, place = divmod(self.used, WINDOW)
        stream, known = self._after(), self._known
        if number < len(self._windows):
            window = self._windows[number]
            stream, known = window.before, window.known
        elif self._windows:
            known = self._windows[-1].next
        return {
            "epoch": self.epoch,
            "window": self._number + number,
            "taken": place,
            "stream": stream,
        }, known

    def set_state(self, state):
        """Resumes from a position."""
        order.check_same(self.fingerprint, state["data"])
        position = state["position"]
        self.epoch = position["epoch"]
        self._begin(
            position["stream"],
            position["window"],
            position["taken"],
            known=state.get("following"),
        )
        # States of earlier versions lack both.
        self._first, self._restored = state.get("first"), True
