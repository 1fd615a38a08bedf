import numbers
import random

import keras
import numpy as np

from keras_posttrain.callbacks import checks
from keras_posttrain.distribution import processes


class Evaluate(keras.callbacks.Callback):
    """Evaluates the model between steps, by a function of yours.

    The results are logged with the metrics of the step as `name/key`: by
    `MetricsLog`, `Report` and the trackers, and in the logs of epochs, so that
    `keras.callbacks.EarlyStopping(monitor="name/key", mode="max")` watches
    them. An epoch without an evaluation repeats the last results. A run that
    evaluates makes the same updates as one that does not, and one that is
    resumed from a `Checkpoint` evaluates at the same steps.

    Args:
        function: function of the task to a dict of floats, such as one that
            calls `task.evaluate` or `kpt.evaluation.win_rate`. It must not
            train the task.
        every: int, steps between two evaluations; where a rollout makes
            several steps, after the rollout's last one. The end of training
            is evaluated too.
        name: str, what the names of the results begin with.

    Raises:
        ValueError: at the start of training, if another `Evaluate` has the
            same name; in training, for a result that is no dict of numbers.

    Example:

    ```python
    def held_out(task):
        return task.evaluate(rows, metrics=[kpt.metrics.ExactMatch()])

    task.fit(rows, callbacks=[
        kpt.callbacks.Evaluate(held_out, every=50, name="held_out"),
        kpt.callbacks.MetricsLog("run/"),
    ])
    ```
    """

    reads_step_logs = True

    def __init__(self, function, every=50, name="evaluate"):
        super().__init__()
        if not callable(function):
            raise ValueError(
                "`function` must be a function of a task that returns a dict "
                f"of floats. Received: function={function!r}"
            )
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"`name` must be a string. Received: name={name!r}"
            )
        self.function, self.name = function, name
        self.every = checks.positive("every", every)
        # The last results and their step, which checkpoints keep.
        self.evaluated, self.evaluated_at = {}, -1

    def on_train_begin(self, logs=None):
        others = [
            c
            for c in self.model.run.callbacks
            if isinstance(c, Evaluate) and c.name == self.name
        ]
        if len(others) > 1:
            raise ValueError(
                "Each `Evaluate` must have a name of its own. Received: "
                f"{len(others)} with name={self.name!r}"
            )
        self.evaluated, self.evaluated_at = {}, -1
        self._before = None

    def on_epoch_begin(self, epoch, logs=None):
        if self._before is None:
            # Only now is the step of a resumed run known.
            self._before = self._model.step

    def on_train_batch_end(self, batch, logs=None):
        step = self._model.step
        is_due = step // self.every != self._before // self.every
        if is_due and self._model.run.at_rest:
            self._evaluate()
            self._before = step

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == self.params["epochs"]:
            self._evaluate()
        if logs is not None:
            logs.update(self._named())

    def on_train_end(self, logs=None):
        # Of a run that has trained, and that a callback has stopped.
        if self._before is not None:
            self._evaluate()

    def _named(self):
        return {f"{self.name}/{k}": v for k, v in self.evaluated.items()}

    def _evaluate(self):
        """Evaluates the present step, once, and logs the results."""
        task = self.model
        if self.evaluated_at == task.step:
            return
        # Keras has emptied the variables.
        task.jax_state_sync()
        states = random.getstate(), np.random.get_state()
        try:
            found = self.function(task)
        except Exception as error:
            called = getattr(self.function, "__name__", repr(self.function))
            error.add_note(
                f"{called!r} of Evaluate(name={self.name!r}) raised this at "
                f"step {task.step}."
            )
            raise
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        self.evaluated = processes.from_first(self._checked(found))
        self.evaluated_at = task.step
        # What other callbacks log is this dict.
        task.run_state.logs.update(self._named())

    def _checked(self, found):
        """Returns a dict of floats, or raises a `ValueError`."""
        if not isinstance(found, dict):
            raise ValueError(
                f"The function of Evaluate(name={self.name!r}) must return a "
                f"dict of floats. Received: {found!r:.200}"
            )
        floats = {key: _float(value) for key, value in found.items()}
        for key, value in floats.items():
            if not isinstance(key, str) or value is None:
                raise ValueError(
                    f"The function of Evaluate(name={self.name!r}) must "
                    "return numbers by name. Received: "
                    f"{key!r}: {found[key]!r:.200}"
                )
        return floats


def _float(value):
    """Returns a number or an array of one as a float, others as `None`."""
    is_number = isinstance(value, numbers.Real)
    if not is_number and getattr(value, "shape", None) != ():
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
