"""A run on rows, through Keras's own `fit`."""

import contextlib
import warnings

import jax
import keras

from keras_posttrain import _compiling, _console
from keras_posttrain._spans import span
from keras_posttrain.distribution import processes
from keras_posttrain.losses import TokenLoss
from keras_posttrain.training import callbacks as callback_lib
from keras_posttrain.training import checks, monitors, run_state
from keras_posttrain.training.step import counters


class RowRun:
    """One call of `fit` on rows.

    `model` is compiled, and has a `compiled_train_step` that `compile_step`
    returned and a `fingerprint`.
    """

    # A checkpoint may be taken after every step.
    at_rest = True

    def __init__(self, model, *, step, state, data, settings, validation):
        self.model, self.state, self.data = model, state, data
        self._step = step
        models = step.companions.values()
        frozen = [model for each in models for model in each]
        self._saved = run_state.Saved.of(
            step, {f"{x.role}_{i}": x for i, x in enumerate(frozen)}
        )
        self.validation, self.settings = validation, settings
        self._logs_are_read = callback_lib.read_logs(settings.callbacks)
        tests = metric_names(step) if validation is not None else ()
        trained = [tracker.name for tracker in step.train_trackers]
        monitors.prepare(settings.callbacks, trained, tests)
        self.callbacks = settings.ordered_callbacks()
        # The arrays that the last step was trained on, for callbacks.
        self.last_batch = None
        size = data.epoch_size
        self._steps = size and size * settings.epochs
        self._done = 0
        checks.skipped_are_run(settings.skip_steps, self._steps)
        data.keep_rows(processes.own_rows())
        data.share_rows(processes.row_share())
        state.begin(settings.seed)

    def fit(self):
        """Trains, and returns a Keras `History`."""
        # That of an earlier run reads its data.
        self.model.train_function = None
        # Keras reads it after `on_train_begin`, which restores checkpoints.
        self.model._initial_epoch = None
        try:
            with epochs_may_end(), _console.silenced(self.settings.silent):
                return keras.Model.fit(
                    self.model,
                    x=self.data,
                    epochs=self.settings.epochs,
                    verbose=0,
                    callbacks=self.callbacks,
                    validation_data=self.validation,
                )
        finally:
            callback_lib.close(self.callbacks)
            self.last_batch = None

    def train_function(self, program):
        """Returns the function that Keras calls for each batch.

        `program` is the model's `compiled_train_step`, made before Keras
        empties the variables.
        """
        model, state = self.model, self.state

        def train_function(values, iterator):
            trainable, frozen, optimizer, metrics = values
            # The weights are not lost if anything raises from here on.
            hand_back(model, values)
            try:
                with span("data"):
                    batch = next(iterator)
            except StopIteration:
                if state.consumed or not state.resumed:
                    raise
                # A stream was stopped behind the last batch of an epoch: no
                # batch is left, but Keras wants one step in each epoch.
                state.resumed = False
                return {}, values
            consumed = state.consumed + 1
            number = state.first_step + self.data.step_of(consumed)
            changing = {
                "trainable": trainable,
                "optimizer": optimizer,
                "metrics": metrics,
                **counters(number, state.seed),
            }
            held = self._step.held(frozen)
            self.last_batch = batch
            self._done += 1
            if self._steps and _compiling.is_due(
                self.settings.compile_ahead, self._steps, self._done
            ):
                self._compile_ahead(program, changing, held, batch)
            with span("train"):
                logs, new = program(changing, held, batch)
            state.consumed, state.step, state.logs = consumed, number, logs
            values = (
                new["trainable"],
                frozen,
                new["optimizer"],
                new["metrics"],
            )
            # Keras turns logs into numbers at once, which waits for the
            # device: they are handed out only where somebody reads them.
            return (logs if self._logs_are_read else {}), values

        return train_function

    def _compile_ahead(self, program, changing, held, batch):
        """Compiles the programs of the other shapes of batches."""
        if not hasattr(program, "lower"):
            # It runs eagerly.
            return
        shapes = list(self.data.other_shapes(batch, self.settings.epochs))
        if not shapes:
            return
        _compiling.compile_shapes(
            (
                program.lower(changing, held, processes.put_rows(other))
                for other in shapes
            ),
            len(shapes),
            processes.is_first(),
        )

    # The interface for checkpoints

    def at_epoch_end(self):
        """Returns whether the step just done was the last of its epoch."""
        size = self.data.epoch_size
        if not size:
            return False
        done = self.data.state_after(self.state.consumed)["step"]
        left = range(done + 1, -(-done // size) * size + 1)
        return self.settings.skip_steps.issuperset(left)

    def training_state(self):
        """Returns `(arrays, meta)` for a checkpoint, `meta` fit for JSON."""
        meta = {
            "step": self.state.step,
            "seed": self.state.seed,
            "data": self.data.state_after(self.state.consumed),
            "run": self.model.fingerprint(),
        }
        return self._saved.arrays(), meta

    def check(self, meta, directory, override=()):
        """Checks that a checkpoint is of this run; see `run_state.check`."""
        ours = self.model.fingerprint()
        seed = self.state.seed
        return run_state.check(meta, ours, seed, directory, override)

    def restore(self, arrays, meta):
        """Continues where `training_state` was taken."""
        self.data.set_state(meta["data"])
        self._saved.assign(arrays)
        self.state.restore(meta, self.settings.epochs)
        self.model._initial_epoch = self.state.initial_epoch

    def agreement(self):
        """Returns settings that all processes of the run must share."""
        return self.settings.agreement(
            self.model.fingerprint(),
            self.data.fingerprint,
            self.state.step,
            self.callbacks,
        )


def metric_names(step):
    """Returns the names of the metrics of `Task.evaluate` on rows."""
    own = ["perplexity"] if isinstance(step.loss, TokenLoss) else []
    return [tracker.name for tracker in step.test_trackers] + own


def test_function(model, step):
    """Returns the function that Keras calls for each batch it evaluates."""

    def run(metrics, trainable, held, batch):
        state = dict(trainable=trainable, metrics=metrics, **held)
        _, state = model.test_step(state, batch)
        return state["metrics"]

    program = run if model.run_eagerly else jax.jit(run, donate_argnums=0)

    def test_function(values, iterator):
        trainable, frozen, metrics = values
        hand_back(model, (trainable, frozen, None, metrics))
        batch = next(iterator)
        metrics = program(metrics, trainable, step.held(frozen), batch)
        return {}, (trainable, frozen, metrics)

    return test_function


def state_shardings(model):
    """Returns the shardings of a state's parts; `None` on one device."""
    if keras.distribution.distribution() is None:
        return None
    trainable, _, optimizer, metrics = model._get_state_sharding_spec()
    return dict(trainable=trainable, optimizer=optimizer, metrics=metrics)


def hand_back(model, values):
    """Lets Keras put back the variables that it has emptied."""
    names = ("trainable", "non_trainable", "optimizer", "metrics")
    model._jax_state = {
        f"{name}_variables": value for name, value in zip(names, values)
    }


@contextlib.contextmanager
def epochs_may_end():
    """Lets data of unknown or resumed length end an epoch quietly."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield
