"""Rollouts that are sampled and judged while others are trained on."""

import collections
import concurrent.futures
import threading
import time

import keras
import numpy as np

from keras_posttrain.rollout.interrupted import generate_whole

# How often a rollout that is waited for is asked what it waits for itself.
POLL_SECONDS = 0.05
# How long a run that ends waits for its sampling thread.
CLOSE_SECONDS = 60


class Closed(Exception):
    """The run ends: what is being sampled is not wanted any more."""


class Ahead:
    """The rollouts of a run, begun before their turn.

    One thread samples, in order, and as many as there are rollouts in flight
    judge. When the engine gets new weights, what is being sampled is
    interrupted and goes on with them. Rollout `n` begins when `n - k`
    rollouts have been trained on, so no token is drawn from weights that are
    more than `k` rollouts old when it is trained on.

    With `max_resamples` what is sampled depends on rewards: the thread that
    samples judges too.

    Args:
        task: `RolloutTask`, in `fit`, whose engine has weights.
        max_staleness: int, `k`.
    """

    def __init__(self, task, max_staleness):
        self.task, self.max_staleness = task, max_staleness
        self._engine = task.rollout
        self._owner = threading.current_thread()
        self._changed = threading.Condition()
        self._closed = False
        # Rollouts in flight, the next one first, and their sampling.
        self._jobs = collections.deque()
        self._sampling = []
        self._begun = self._trained = 0
        self._step = task.step
        # How many rollouts had been trained on when a version was made.
        self._made = {self._engine.weight_version: 0}
        distribution = keras.distribution.distribution()
        settings = {
            # Keras keeps the distribution for each thread.
            "initializer": keras.distribution.set_distribution,
            "initargs": (distribution,),
        }
        pool = concurrent.futures.ThreadPoolExecutor
        self._sampler = pool(1, "sampling", **settings)
        self._judges = pool(max_staleness + 1, "judging", **settings)

    def next(self):
        """The next rollout, judged: a `Drawn`, without prompts at the end of
        an epoch."""
        start = time.perf_counter()
        while self._begun <= self._trained + self.max_staleness:
            self._begin()
        drawn = self._result(self._jobs.popleft())
        if not drawn.prompts:
            # Those begun after it found no prompts either.
            while self._jobs:
                self._result(self._jobs.popleft())
            self._begun = self._trained
            return drawn
        drawn.metrics |= self._staleness(drawn)
        drawn.metrics["time/wait"] = time.perf_counter() - start
        return drawn

    def sync(self, trained=True):
        """Gives the engine the new weights, whatever it is doing.

        Args:
            trained: bool, whether a rollout has been trained on since.
        """
        engine = self._engine
        self._trained += trained
        engine.interrupt()
        try:
            with engine.turn:
                engine.sync_weights()
                self._made[engine.weight_version] = self._trained
        finally:
            with self._changed:
                engine.resume()
                self._changed.notify_all()

    def close(self):
        """Ends the threads; what is in flight is lost."""
        with self._changed:
            self._closed = True
            self._engine.interrupt()
            self._changed.notify_all()
        for pool in (self._sampler, self._judges):
            pool.shutdown(wait=False, cancel_futures=True)
        # An engine is not stopped while it samples, nor sampled from after.
        # A reward may take its time: nobody waits for it.
        begun = [job for job in self._sampling if not job.cancelled()]
        concurrent.futures.wait(begun, CLOSE_SECONDS)
        self._engine.resume()

    def generate(self, requests):
        """As `Rollout.generate`, through updates of the weights."""
        if self._closed:
            raise Closed()
        return generate_whole(self._engine, requests, self._wait)

    # The threads

    def _begin(self):
        self._begun += 1
        sampled = self._sampler.submit(self._draw)
        self._sampling = [job for job in self._sampling if not job.done()]
        self._sampling.append(sampled)
        if self.task.max_resamples:
            self._jobs.append(sampled)
        else:
            self._jobs.append(self._judges.submit(self._judged, sampled))

    def _draw(self):
        task = self.task
        drawn = task.draw(self._step)
        self._step = drawn.step + task.steps_of(drawn.prompts)
        return task.judge(drawn) if task.max_resamples else drawn

    def _judged(self, sampled):
        return self.task.judge(sampled.result())

    def _result(self, job):
        """What a job gives; the engine gets weights while it needs them."""
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

    def _staleness(self, drawn):
        """How many rollouts old the weights are that drew the tokens."""
        versions = [
            c.token_versions for g in drawn.groups for c in g.completions
        ]
        versions = np.concatenate(versions) if versions else np.zeros(0)
        ages = self._trained - np.array([self._made[v] for v in versions])
        if not len(ages):
            return {}
        return {
            "staleness/mean": float(ages.mean()),
            "staleness/max": float(ages.max()),
        }
