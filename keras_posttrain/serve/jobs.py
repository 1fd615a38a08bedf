"""Work that waits for the one thread that computes, and its results."""

import collections
import concurrent.futures
import dataclasses
import threading

from keras_posttrain.serve.refused import Refused, unknown

# Results that are kept, the newest. A client fetches one within seconds.
MAX_RESULTS = 20_000


@dataclasses.dataclass(frozen=True)
class Reply:
    """The body of an answer, and whether the connection ends with it."""

    data: bytes
    content_type: str
    is_last: bool = False


@dataclasses.dataclass(eq=False)
class Job:
    """A function to call in the thread that computes.

    Attributes:
        run: function without arguments that returns a `Reply`.
        is_wanted: function without arguments that returns whether a client
            still waits for it.
        future: `concurrent.futures.Future` of the `Reply`.
    """

    run: object
    is_wanted: object
    future: object = dataclasses.field(
        default_factory=concurrent.futures.Future
    )


@dataclasses.dataclass(eq=False)
class SampleJob:
    """A request for samples; jobs of the same weights are sampled together.

    Attributes:
        weights: `sessions.Weights`.
        request: `sampling.SampleRequest`.
        is_wanted, future: as of `Job`.
    """

    weights: object
    request: object
    is_wanted: object
    future: object = dataclasses.field(
        default_factory=concurrent.futures.Future
    )


class Results:
    """The futures of requests by their id, the newest `MAX_RESULTS`."""

    def __init__(self, size=MAX_RESULTS):
        self._size = size
        self._futures = collections.OrderedDict()
        self._lock = threading.Lock()

    def add(self, request_id, make):
        """Adds the future of a job.

        A client may send a request again whose answer it has not got; then
        nothing is done twice.

        Args:
            request_id: str.
            make: function without arguments that submits a job and returns
                its future; called if the id is new.
        """
        with self._lock:
            if request_id not in self._futures:
                self._futures[request_id] = make()
            while len(self._futures) > self._size:
                self._futures.popitem(last=False)

    def get(self, request_id):
        """Returns the future of a request."""
        with self._lock:
            future = self._futures.get(request_id)
        if future is None:
            raise unknown("request", request_id)
        return future


class Queue:
    """Jobs in the order in which they came, for one thread."""

    def __init__(self):
        self._jobs = collections.deque()
        self._sampled = collections.deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def submit(self, job):
        """Appends a job and returns its future."""
        with self._changed:
            if self._is_closed:
                raise Refused("The server is being stopped.", 503)
            self._jobs.append(job)
            self._changed.notify_all()
        return job.future

    def close(self):
        """Ends the thread after its present job; the others are refused."""
        with self._changed:
            self._is_closed = True
            for job in self._jobs:
                job.future.set_exception(Refused("The server was stopped."))
            self._jobs.clear()
            self._changed.notify_all()

    def sampled(self, job, future):
        """Says that samples of a `SampleJob` are ready."""
        with self._changed:
            self._sampled.append((job, future))
            self._changed.notify_all()

    def next(self):
        """Waits for a job and returns it; `None` at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return None
                if (job := self._pop()) is not None:
                    return job

    def next_of(self, weights, is_busy):
        """Waits for samples, or for more jobs of the same weights.

        A job behind one of another kind waits until that has run.

        Args:
            weights: `sessions.Weights`.
            is_busy: bool, whether samples are being made.

        Returns:
            `(sampled, jobs)`, two lists. Both are empty where another job
            waits, or at the end.
        """
        with self._changed:
            while True:
                self._changed.wait_for(
                    lambda: (
                        self._sampled
                        or self._is_next(weights)
                        or (not is_busy and (self._jobs or self._is_closed))
                    )
                )
                sampled = list(self._sampled)
                self._sampled.clear()
                jobs = []
                while self._is_next(weights):
                    if (job := self._pop()) is not None:
                        jobs.append(job)
                if sampled or jobs or not is_busy:
                    return sampled, jobs

    def _is_next(self, weights):
        return (
            bool(self._jobs)
            and getattr(self._jobs[0], "weights", None) is weights
        )

    def _pop(self):
        """Returns the first job, or `None` if nobody waits for it."""
        job = self._jobs.popleft()
        if job.is_wanted():
            return job
        job.future.set_exception(Refused("The client has gone.", 410))
        return None
