"""Times of a Keras `fit`."""

import time

import keras


class Clock(keras.callbacks.Callback):
    """The first step's logs and seconds, and the seconds of every epoch.

    Reading a loss waits for its step, which JAX only has begun.

    Attributes:
        first: dict of floats, what the first step logs.
        steps: int, those of an epoch.
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
        """Seconds of each epoch after the first, which is the warm-up."""
        ends = self._ends
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]
