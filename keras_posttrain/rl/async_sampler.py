"""Samples and scores rollouts while others are trained on."""

import collections
import concurrent.futures
import functools
import threading
import time

import numpy as np

from keras_posttrain.distribution import processes
from keras_posttrain.rollout.interrupted import generate_whole
from keras_posttrain.workers.threads import in_thread

# Seconds between checks whether the engine waits for weights, while a rollout
# is waited for.
POLL_SECONDS = 0.05
# Seconds that a run that ends waits for its sampling thread.
CLOSE_SECONDS = 60


class Closed(Exception):
    """Raised in sampling threads when the run ends."""


class AsyncSampler:
    """Samples and scores rollouts while earlier ones are trained on.

    One thread samples, in order, and as many threads score as there are
    rollouts in flight. When the engine gets new weights, sampling is
    interrupted and continues with them. Rollout `n` begins when
    `n - max_staleness` rollouts have been trained on, so no token is sampled
    from weights that are more than `max_staleness` rollouts old when it is
    trained on.

    Where groups are resampled, sampling depends on rewards: the thread that
    samples scores too.

    With several processes nothing is interrupted, because they could not
    agree on the token at which it was. New weights wait for the rollouts in
    flight to be scored, so that each is sampled from the weights of one
    version, the same in all processes. Only if an engine fails, the rest of a
    rollout is sampled from new weights. Sampling and scoring exchange what
    they need without the trainer's devices. On CPUs, where processes must
    start all programs in one order, what is in flight is scored before its
    predecessor is trained on.

    Args:
        sample: function of the number of steps before to a `Round`.
        num_steps: function of a `Round`, its optimizer steps.
        resamples: bool, whether `score` samples again.
    """

    def __init__(
        self, engine, max_staleness, *, sample, score, num_steps, step,
        resamples,
    ):  # fmt: skip
        self._engine, self.max_staleness = engine, max_staleness
        self._sample, self._score = sample, score
        self._waits = processes.count() > 1
        self._takes_turns = (
            engine.uses_devices and processes.must_start_in_order()
        )
        self._num_steps = num_steps
        self._scores_in_turn = resamples or self._waits
        self._owner = threading.current_thread()
        self._changed = threading.Condition()
        self._closed = False
        # Rollouts in flight, the next one first, and their sampling.
        self._jobs = collections.deque()
        self._sampling = []
        self._begun = self._trained = 0
        self._step = step
        # How many rollouts had been trained on when a version was made.
        self._made = {engine.weight_version: 0}

    def next(self):
        """Returns the next scored `Round`; empty at an epoch's end."""
        start = time.perf_counter()
        while self._begun <= self._trained + self.max_staleness:
            self._begin()
        round = self._result(self._jobs.popleft())
        if self._takes_turns:
            self._settle()
        if not round.prompts:
            # Those begun after it found no prompts either.
            while self._jobs:
                self._result(self._jobs.popleft())
            self._begun = self._trained
            return round
        round.metrics |= self._staleness(round)
        round.metrics["time/wait"] = time.perf_counter() - start
        return round

    def sync(self, trained=True):
        """Gives the engine the new weights, whatever it is doing.

        `trained` says whether a rollout has been trained on since.
        """
        engine = self._engine
        self._trained += trained
        if self._waits:
            self._settle()
        else:
            engine.interrupt()
        try:
            with engine.turn:
                engine.sync_weights()
                self._made[engine.weight_version] = self._trained
        finally:
            with self._changed:
                engine.resume()
                self._changed.notify_all()

    def _settle(self):
        """Waits until all that is in flight is scored, or needs weights.

        Processes agree on both in the sampling thread: all see the same.
        """
        while not self._engine.needs_weights:
            if not concurrent.futures.wait(self._jobs, POLL_SECONDS).not_done:
                return

    def close(self):
        """Ends the threads; what is in flight is lost."""
        with self._changed:
            self._closed = True
            if not self._waits:
                self._engine.interrupt()
            self._changed.notify_all()
        if not self._waits:
            # Several processes might not cancel the same ones: each job asks
            # all of them when it begins.
            for job in (*self._sampling, *self._jobs):
                job.cancel()
        # An engine is not stopped while it samples, nor sampled from after.
        # A reward may be slow, so that nothing waits for it.
        begun = [job for job in self._sampling if not job.cancelled()]
        concurrent.futures.wait(begun, CLOSE_SECONDS)
        self._engine.resume()

    def generate(self, requests):
        """As `Rollout.generate`, through updates of the weights."""
        # In several processes all finish what they have begun.
        if self._closed and not self._waits:
            raise Closed()
        self.take_turn()
        return generate_whole(self._engine, requests, self._wait)

    def take_turn(self):
        """Waits, before the run's own thread samples for an evaluation.

        Several processes could not agree whether it or the rollout in flight
        is the next to use the engine.
        """
        if self._waits and threading.current_thread() is self._owner:
            self._settle()

    # The threads

    def _begin(self):
        self._begun += 1
        self._sampling = [job for job in self._sampling if not job.done()]
        sampled = in_thread(self._sample_next, after=self._sampling[-1:])
        self._sampling.append(sampled)
        if self._scores_in_turn:
            self._jobs.append(sampled)
        else:
            score = functools.partial(_scored, self._score, sampled)
            self._jobs.append(in_thread(score, after=[sampled]))

    def _sample_next(self):
        if not self._waits:
            return self._sample_round()
        with self._engine.scope():
            # All begin a rollout, or none of them does.
            if any(processes.exchange(self._closed)):
                raise Closed()
            return self._sample_round()

    def _sample_round(self):
        round = self._sample(self._step)
        self._step = round.step + self._num_steps(round)
        return self._score(round) if self._scores_in_turn else round

    def _result(self, job):
        """Waits for a job; gives the engine weights when it needs them."""
        while not concurrent.futures.wait([job], POLL_SECONDS).done:
            if self._engine.needs_weights:
                self.sync(trained=False)
        return job.result()

    def _wait(self):
        """After an interruption, until the engine may sample again."""
        engine = self._engine
        if threading.current_thread() is self._owner:
            # Only a failed engine gives the run's own thread parts.
            self.sync(trained=False)
            return
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or not (engine.is_interrupted or engine.needs_weights)
                )
            )
        if self._closed:
            raise Closed()

    def _staleness(self, round):
        """Computes the age of the sampling weights, in rollouts."""
        versions = [t.versions for g in round.groups for t in g.trajectories]
        versions = np.concatenate(versions) if versions else np.zeros(0)
        ages = self._trained - np.array([self._made[v] for v in versions])
        if not len(ages):
            return {}
        return {
            "staleness/mean": float(ages.mean()),
            "staleness/max": float(ages.max()),
        }


def _scored(score, sampled):
    return score(sampled.result())
