"""The loop of reinforcement learning: sample, score, batch, step, sync.

`RolloutRun.fit` is the loop; its verbs follow in the order in which the loop
calls them, then the interface for checkpoints.
"""

import contextlib
import dataclasses
import math
import random
import time

import jax
import keras
import numpy as np

from keras_posttrain import _compiling, _console
from keras_posttrain._spans import span
from keras_posttrain.distribution import processes
from keras_posttrain.rl.async_sampler import AsyncSampler
from keras_posttrain.rl.collector import Round
from keras_posttrain.rollout.rollout import Expected
from keras_posttrain.training import callbacks as callback_lib
from keras_posttrain.training import checks, monitors, run_state
from keras_posttrain.training.step import counters


@dataclasses.dataclass
class Activity:
    """What a run is doing, for the progress that it shows.

    Attributes:
        name: str.
        since: float, when it began, by `time.perf_counter`.
        done, total: ints, samples; 0 of 0 where none are counted.
    """

    name: str
    since: float
    done: int = 0
    total: int = 0


class RolloutRun:
    """One call of `fit` on prompts, of a `model` as in `RowRun`.

    Args:
        frozen: dict by name of `FrozenPolicy`s that checkpoints hold.
        order: `PromptOrder` or `PromptStream`, the data of the run.
        collector: function of `generate` and `open_session` to a `Collector`.
        validate: function without arguments to a dict of floats, or `None`.
        opponents: dict by player of `FrozenOpponent`s, or `None`.
    """

    def __init__(
        self,
        model,
        *,
        step,
        frozen,
        state,
        engine,
        order,
        collector,
        settings,
        validate=None,
        opponents=None,
    ):
        self.model, self.state, self.engine = model, state, engine
        self.order = self.data = order
        self._step, self._validate = step, validate
        self.opponents, self.rollouts = opponents or {}, 0
        self._rollouts_of_fit = 0
        copies = {
            f"opponent_{name}": opponent.copy
            for name, opponent in self.opponents.items()
        }
        self._saved = run_state.Saved.of(step, frozen | copies)
        self.collector = collector(self.generate, self.open_session)
        self.settings = settings
        trained = [tracker.name for tracker in step.train_trackers]
        trained += [*self.collector.metric_names, *engine.metrics()]
        tests = () if validate is None else self.collector.validation_names
        monitors.prepare(settings.callbacks, trained, tests)
        self.callbacks = settings.ordered_callbacks()
        order.epoch_size = size = self._epoch_size()
        checks.skipped_are_run(
            settings.skip_steps, size and size * settings.epochs
        )
        state.begin(settings.seed)
        # A rollout that is cut into steps is not saved in its middle, where
        # the weights no longer are those that sampled it.
        self.at_rest = True
        self.is_running = False
        # Whether a rollout is sampled or scored, which may be interrupted.
        self.is_waiting = False
        self.async_sampler = self.last_rollout = self.collection = None
        self._means = Means()
        self._begin("sampling")

    def _begin(self, name):
        self.activity = Activity(name, time.perf_counter())

    def _epoch_size(self):
        """Steps of an epoch; `None` where it depends on rewards, or of a
        stream."""
        size, count = self.order.batch_size, self.order.num_prompts
        if self.collector.scoring.max_resamples or count is None:
            return None
        whole, rest = divmod(count, size)
        num_steps = self.collector.num_steps
        return whole * num_steps(size) + num_steps(rest)

    def _expected(self):
        """Returns what the engine will be asked for, an `Expected`."""
        order, sampling = self.order, self.collector.sampling
        count, (shortest, longest) = order.num_prompts, order.prompt_lengths
        if count is not None:
            count = -(-count // order.batch_size) * self.settings.epochs
        if longest is None:
            room = self.collector.layout.sequence_length
            longest = max(room - sampling.max_completion_length, 1)
        return Expected(
            count,
            order.batch_size,
            order.batch_size * sampling.num_generations,
            (shortest, longest),
        )

    def fit(self):
        """Trains, and returns a Keras `History`."""
        model, epochs, logs = self.model, self.settings.epochs, {}
        model.stop_training = False
        callbacks = keras.callbacks.CallbackList(
            [self.engine, *self.callbacks],
            add_history=True,
            model=model,
            epochs=epochs,
            steps=self.order.epoch_size,
            verbose=0,
        )
        with self._running():
            callbacks.on_train_begin()
            self._start_sampling()
            for epoch in range(self.state.initial_epoch or 0, epochs):
                self._reset_means()
                callbacks.on_epoch_begin(epoch)
                while round := self.next_round():
                    batches = self.collect(round)
                    for i, batch in enumerate(batches):
                        callbacks.on_train_batch_begin(i)
                        logs = self.update(batch)
                        if i + 1 == len(batches):
                            logs |= self.sync()
                        self.record(logs)
                        callbacks.on_train_batch_end(i, logs)
                    if model.stop_training:
                        break
                logs = self.epoch_logs() | self.validate(callbacks)
                callbacks.on_epoch_end(epoch, logs)
                if model.stop_training:
                    break
                self.order.next_epoch()
            self._stop_sampling()
            # As Keras's own `fit` ends: with `use_ema` the weights become
            # their averages.
            self._step.optimizer.finalize_variable_values(
                self._saved.weights.trainable
            )
            callbacks.on_train_end(logs)
        return model.history

    @contextlib.contextmanager
    def _running(self):
        """Ends the engine, the threads and the callbacks in any case."""
        engine, self.is_running = self.engine, True
        engine.overlaps = self.settings.max_staleness > 0
        try:
            with _console.silenced(self.settings.silent):
                yield
        except BaseException:
            self._stop_sampling()
            engine.stop()
            raise
        finally:
            self.is_running = False
            callback_lib.close(self.callbacks)
            self.collection = None

    def _start_sampling(self):
        self.engine.sync_weights()
        self.engine.expect(self._expected())
        for opponent in self.opponents.values():
            # A checkpoint may have restored it.
            opponent.use()
        if self.settings.max_staleness:
            self.async_sampler = AsyncSampler(
                self.engine,
                self.settings.max_staleness,
                sample=self.sample,
                score=self.score,
                num_steps=lambda x: self.collector.num_steps(len(x.prompts)),
                step=self.state.step,
                resamples=bool(self.collector.scoring.max_resamples),
            )

    def _stop_sampling(self):
        if self.async_sampler is not None:
            self.async_sampler.close()
        self.async_sampler, self.engine.overlaps = None, False

    # The verbs of the loop

    def next_round(self):
        """Returns the next scored `Round`, or `None` at an epoch's end.

        A failure loses none of the steps before it.
        """
        states = random.getstate(), np.random.get_state()
        self.is_waiting = True
        try:
            if self.async_sampler is not None:
                self._begin("waiting for samples")
                with span("wait"):
                    round = self.async_sampler.next()
            else:
                self._begin("sampling")
                round = self.sample(self.state.step)
                self._begin("scoring")
                round = self.score(round)
            self.is_waiting = False
        except BaseException:
            self.is_waiting = False
            # The random numbers that its rewards used are used again.
            random.setstate(states[0])
            np.random.set_state(states[1])
            for callback in self.callbacks:
                if hasattr(callback, "save_before_error"):
                    callback.save_before_error()
            raise
        self.state.step = round.step
        self.order.use(round.taken)
        return round if round.prompts else None

    def sample(self, step):
        """Samples a `Round`, without prompts at the end of the epoch."""
        while prompts := self.order.take(self.order.batch_size):
            after = step + self.collector.num_steps(len(prompts))
            steps = range(step + 1, after + 1)
            if self.settings.skip_steps.isdisjoint(steps):
                return self.collector.sample(prompts, step)
            step = after
        return Round(step, taken=self.order.taken)

    def generate(self, requests):
        """Returns the engine's completions of requests, a list of lists."""
        if self.async_sampler is not None:
            return self.async_sampler.generate(requests)
        if not self.settings.verbose:
            return self.engine.generate(requests)
        before, self.activity = (
            self.activity,
            Activity(
                "sampling",
                time.perf_counter(),
                total=sum(r.num_generations for r in requests),
            ),
        )
        try:
            return self.engine.generate(requests, progress=self._count)
        finally:
            self.activity = before

    @contextlib.contextmanager
    def open_session(self, episodes):
        """Opens a session of the engine for a number of episodes.

        It gives the session and a function that counts those that are done.
        """
        before, self.activity = (
            self.activity,
            Activity("sampling", time.perf_counter(), total=episodes),
        )
        if self.async_sampler is not None:
            self.async_sampler.take_turn()
        try:
            with self.engine.session() as session:
                yield session, self._count
        finally:
            self.activity = before

    def _count(self, samples):
        self.activity.done += samples

    def score(self, round):
        """Scores a sampled `Round`."""
        return self.collector.score(round) if round.prompts else round

    def collect(self, round):
        """Builds the batches of a rollout, one for each optimizer step."""
        self._begin("preparing batches")
        # Its arrays are not needed any more.
        self.collection = None
        with span("batches"):
            collection = self.collector.build(round)
        self.collection = collection
        self.at_rest = False
        self.last_rollout = collection.table
        self._rollout_metrics = collection.metrics
        iterations = self.collector.sampling.num_iterations
        return collection.batches * iterations

    def update(self, batch):
        """Makes one optimizer step and returns its metrics, floats."""
        self._begin("training")
        start, state = time.perf_counter(), self.state
        groups = self._saved.variables()
        with span("train"):
            logs, new = self.model.compiled_train_step(
                *self._step_state(), processes.put_rows(batch)
            )
            for name, variables in groups.items():
                for variable, value in zip(variables, new[name]):
                    variable.assign(value)
            # One transfer, which waits for the step.
            logs = {k: float(v) for k, v in jax.device_get(logs).items()}
        state.step += 1
        logs |= self._rollout_metrics
        # Seconds are reported once, with the rollout's first step.
        self._rollout_metrics = {
            k: v
            for k, v in self._rollout_metrics.items()
            if not k.startswith("time/")
        }
        return logs | {"time/train": time.perf_counter() - start}

    def _step_state(self):
        """Returns the parts of the state that a step changes and reads."""
        groups = self._saved.variables()
        changing = {k: [v.value for v in group] for k, group in groups.items()}
        changing |= counters(self.state.step + 1, self.state.seed)
        frozen = [v.value for v in self._saved.weights.frozen]
        return changing, self._step.held(frozen)

    def _compile_ahead(self):
        """Compiles the programs of training for other shapes of batches."""
        step = self.model.compiled_train_step
        if not hasattr(step, "lower"):
            # It runs eagerly.
            return
        shapes = list(
            self.collector.layout.other_shapes(
                self.collection.batches[0], self.order.prompt_lengths[0] + 1
            )
        )

        def lowered():
            for batch in shapes:
                batch = processes.put_rows(batch)
                yield step.lower(*self._step_state(), batch)
            yield from self.collector.forward.lowered(shapes)

        if shapes:
            _compiling.compile_shapes(
                lowered(), len(shapes), processes.is_first()
            )

    def sync(self):
        """Gives the engine the new weights after a rollout."""
        self._rollouts_of_fit += 1
        rollouts = self._expected().rollouts
        if _compiling.is_due(
            self.engine.compile_ahead, rollouts, self._rollouts_of_fit
        ):
            self._compile_ahead()
        self._begin("sending weights")
        start = time.perf_counter()
        with span("sync"):
            if self.async_sampler is None:
                self.engine.sync_weights()
            else:
                self.async_sampler.sync()
        self.rollouts += 1
        for opponent in self.opponents.values():
            opponent.after(self.rollouts)
        self.at_rest = True
        seconds = time.perf_counter() - start
        return {"time/sync": seconds, **self.engine.metrics()}

    def record(self, logs):
        """Keeps a step's metrics, for callbacks and for the epoch's means."""
        self.state.logs = logs
        own = {t.name for t in self._saved.trackers}
        self._means.add({k: v for k, v in logs.items() if k not in own})

    def epoch_logs(self):
        """Returns the means of an epoch, a dict of floats."""
        trackers = self._saved.trackers
        own = {t.name: t.result() for t in trackers if float(t.count)}
        return own | self._means.results()

    def validate(self, callbacks):
        """Evaluates the held-out rows, where there are any."""
        if self._validate is None:
            return {}
        self._begin("validating")
        callbacks.on_test_begin()
        logs = self._validate()
        callbacks.on_test_end(logs)
        return {f"val_{name}": value for name, value in logs.items()}

    def _reset_means(self):
        if not self.state.keep_metrics:
            self._means = Means()
        self.model.reset_metrics()

    # The interface for checkpoints

    def at_epoch_end(self):
        """Returns whether the step just done was the last of its epoch."""
        return self.order.left == 0

    def training_state(self):
        """Returns `(arrays, meta)` for a checkpoint, `meta` fit for JSON."""
        state = self.state
        kind, keys, place, has_gauss, gauss = np.random.get_state()
        meta = {
            "step": state.step,
            "seed": state.seed,
            "data": {
                "step": state.step - state.first_step,
                **self.order.state(),
            },
            "run": self._fingerprint(),
            "random": random.getstate(),
            "np_random": [kind, keys.tolist(), place, has_gauss, gauss],
            "means": self._means.sums,
            "baselines": self.collector.baselines,
            "rollouts": self.rollouts,
        }
        return self._saved.arrays(), meta

    def check(self, meta, directory, override=()):
        """Checks that a checkpoint is of this run; see `run_state.check`."""
        ours, seed = self._fingerprint(), self.state.seed
        return run_state.check(meta, ours, seed, directory, override)

    def restore(self, arrays, meta):
        """Continues where `training_state` was taken."""
        self.order.set_state(meta["data"])
        self._saved.assign(arrays)
        self.state.restore(meta, self.settings.epochs)
        version, keys, gauss = meta["random"]
        random.setstate((version, tuple(keys), gauss))
        np.random.set_state(meta["np_random"])
        self._means = Means(meta["means"])
        self.collector.baselines = meta.get("baselines", {})
        self.rollouts = meta.get("rollouts", 0)

    def agreement(self):
        """Returns settings that all processes of the run must share."""
        return self.settings.agreement(
            self._fingerprint(),
            self.order.fingerprint,
            self.state.step,
            self.callbacks,
        )

    def _fingerprint(self):
        # First: the loss of overlapping runs differs too.
        staleness = {"max_staleness": self.settings.max_staleness}
        return staleness | self.model.fingerprint()


class Means:
    """Running means of an epoch, on the host: `[sum, count]` by name."""

    def __init__(self, sums=()):
        self.sums = dict(sums)

    def add(self, values):
        """Adds a dict of numbers; one that is not finite has no weight."""
        for name, value in values.items():
            if math.isfinite(value):
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = [total + value, count + 1]

    def results(self):
        """Returns the means, a dict of floats."""
        return {name: total / n for name, (total, n) in self.sums.items()}
