"""Times of a Keras `fit`."""

import time

import keras


class Clock(keras.callbacks.Callback):
    """Records the first step's logs and seconds, and each epoch's seconds.

    Reading a loss waits for its step, because JAX runs asynchronously.

    Attributes:
        first: dict of floats, the logs of the first step.
        steps: int, the number of steps in an epoch.
    """

    def __init__(self):
        super().__init__()
        self.first, self.steps = None, 0
        self._ends = []
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if self.first is None:
            self.first = {name: float(value) for name, value in logs.items()}
            self.first_step_s = time.perf_counter() - self._start
        self.steps = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        float(logs["loss"])
        self._ends.append(time.perf_counter())

    @property
    def pass_s(self):
        """List of seconds of each epoch after the first, the warm-up."""
        ends = self._ends
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]
