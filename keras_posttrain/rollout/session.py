"""Sampling in turns: requests join and leave while others are sampled."""

import concurrent.futures
import dataclasses
import threading
import time

import keras
import numpy as np

from keras_posttrain.distribution import processes
from keras_posttrain.rollout.interrupted import joined, unfinished
from keras_posttrain.rollout.request import Request

# Seconds between two looks whether an interrupted engine may sample again,
# and whether other processes have requests.
POLL_SECONDS = 0.005
# Seconds that the end of a session waits for the engine's last call.
CLOSE_SECONDS = 60


@dataclasses.dataclass(eq=False)
class Turn:
    """A request of a session, with what has been sampled for it.

    Attributes:
        owner: tuple `(process, number)`, who submitted it.
        parts: list for each sample of its `Completion`s so far: several if
            new weights interrupted it.
    """

    owner: tuple
    request: object
    parts: list

    @classmethod
    def of(cls, owner, request):
        return cls(
            owner, request, [[] for _ in range(request.num_generations)]
        )

    @property
    def is_sampled(self):
        """Bool, whether all samples have ended."""
        return all(
            pieces and pieces[-1].finish_reason != "interrupted"
            for pieces in self.parts
        )

    def whole(self):
        """Returns the request with the places of all its samples."""
        return self.request, [(self, g) for g in range(len(self.parts))]


class Session:
    """An engine's work on conversations of several turns.

    Requests are submitted from any thread, while others are sampled, and each
    has a future. Its samples are those that `Rollout.generate` gives for the
    request alone. New weights (`max_staleness`) interrupt a sample, which
    then continues with them.

    With several processes each submits requests of its own, and all sample
    those of all, or with an engine of servers its own. They must begin and end
    the session together.

    This class samples in a thread of its own by calls of `generate`, for all
    that waits at once, and so serves every engine. Engines whose requests can
    join a running batch have a subclass, which overrides `run`.

    Args:
        engine: `Rollout`.

    Example:

    ```python
    with engine.session() as session:
        request = kpt.rollout.Request(ids, max_tokens=4, seed=0)
        [first] = session.submit(request).result()
        more = [*ids, *first.token_ids, *task.tokenizer.encode(" Next:")]
        request = kpt.rollout.Request(more, max_tokens=4, seed=1)
        [second] = session.submit(request).result()
        session.release([*more, *second.token_ids])
    ```
    """

    # Whether each of several processes samples its own requests.
    _samples_alone = False

    def __init__(self, engine):
        self.engine = engine
        self.closed = False
        self._changed = threading.Condition()
        # What no call of `next` has returned yet.
        self._submitted, self._released = [], []
        self._futures, self._number, self._error = {}, 0, None

    def __enter__(self):
        # Keras keeps the distribution for each thread.
        distribution = keras.distribution.distribution()

        def work():
            keras.distribution.set_distribution(distribution)
            try:
                self.run()
                self._end(concurrent.futures.CancelledError())
            except BaseException as error:
                self._end(error)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind, error, traceback):
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        # An engine is not stopped while it samples, and other processes need
        # this one until all have closed the session.
        alone = processes.count() == 1
        self._thread.join(CLOSE_SECONDS if alone else None)

    @property
    def has_ended(self):
        """Bool, whether it takes no requests any more."""
        return self.closed or self._error is not None

    def submit(self, request):
        """Asks for the samples of a request.

        Args:
            request: `kpt.rollout.Request`; with several processes, one with
                a seed.

        Returns:
            A `concurrent.futures.Future` of a list of `Completion`s. It
            raises what the engine raises.

        Raises:
            ValueError: for an invalid request.
            RuntimeError: the session has ended.
        """
        [request] = self.engine.checked([request])
        if request.images is not None:
            raise ValueError(
                "Conversations of several turns have no images. Received: a "
                f"request with {len(request.images.pixels)} images. Sample "
                "it by the engine's `generate`."
            )
        # Equal requests are not counted: no call has all of them.
        request = dataclasses.replace(
            request,
            first_sample=request.first_sample or 0,
            seed=_seed(request),
        )
        future = concurrent.futures.Future()
        with self._changed:
            if self.has_ended:
                raise RuntimeError(
                    "A session takes requests until it ends. Submit them "
                    "inside of `with engine.session() as session:`."
                ) from self._error
            self._number += 1
            owner = processes.index(), self._number
            self._futures[owner] = future
            self._submitted.append(Turn.of(owner, request))
            self._changed.notify_all()
        return future

    def release(self, token_ids):
        """Says that no request will continue a conversation.

        Args:
            token_ids: ints, all of its tokens.
        """
        with self._changed:
            self._released.append([int(x) for x in token_ids])

    # In the thread of the session

    def run(self):
        """Samples until the session ends."""
        pending = []
        while (new := self.next(is_busy=bool(pending))) is not None:
            pending += [turn.whole() for turn in new[0]]
            found = self.engine.generate([request for request, _ in pending])
            pending = self._take(pending, found)

    def _take(self, pending, found):
        """Keeps what was sampled and returns what is still to be sampled."""
        rest = []
        for (request, places), samples in zip(pending, found):
            for (turn, g), completion in zip(places, samples):
                turn.parts[g].append(completion)
            rest += unfinished(request, places, samples)
        turns = {id(turn): turn for _, places in pending for turn, _ in places}
        for turn in turns.values():
            if turn.is_sampled:
                self.resolve(turn)
        return rest

    def submitted(self):
        """Returns the `Turn`s that have come since, without waiting."""
        with self._changed:
            turns, self._submitted = self._submitted, []
        return turns

    def next(self, is_busy):
        """Returns the new turns and released conversations.

        They are those of all processes, unless `_samples_alone`. Waits while
        there is nothing to do, and while the engine waits for weights.

        Args:
            is_busy: bool, whether earlier turns are still to be sampled.

        Returns:
            A list of `Turn`s and one of lists of ints; `None` at the end.
        """
        alone = processes.count() == 1 or self._samples_alone
        while True:
            with self._changed:
                if alone:
                    self._changed.wait_for(
                        lambda: is_busy or self._submitted or self.closed
                    )
                turns, self._submitted = self._submitted, []
                released, self._released = self._released, []
                closed = self.closed
            if not alone:
                turns, released, closed = _of_all(turns, released, closed)
            if closed:
                return None
            if is_busy or turns:
                self._wait_for_weights()
                return turns, released
            time.sleep(POLL_SECONDS)

    def _wait_for_weights(self):
        engine = self.engine
        while engine.is_interrupted or engine.needs_weights:
            if self.closed:
                return
            time.sleep(POLL_SECONDS)

    def resolve(self, turn):
        """Gives a turn's samples to the thread that waits for them."""
        with self._changed:
            # Another process waits for those of its own requests.
            future = self._futures.pop(turn.owner, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result([joined(parts) for parts in turn.parts])

    def _end(self, error):
        with self._changed:
            self._error = error
            futures, self._futures = self._futures, {}
        for future in futures.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _seed(request):
    if request.seed is not None:
        return request.seed
    if processes.count() > 1:
        raise ValueError(
            "With several processes a request of a session needs a `seed`, "
            "the same in all that share it. Received: seed=None"
        )
    return np.random.randint(2**31)


def _of_all(turns, released, closed):
    """Returns what all processes have in place of what this one has."""
    own = [(turn.owner, dataclasses.asdict(turn.request)) for turn in turns]
    found = processes.exchange([own, released, closed])
    turns = [
        Turn.of(tuple(owner), Request(**fields))
        for part, _, _ in found
        for owner, fields in part
    ]
    released = [ids for _, part, _ in found for ids in part]
    return turns, released, all(part for _, _, part in found)
