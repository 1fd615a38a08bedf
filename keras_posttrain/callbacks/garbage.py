"""Python's garbage collector in a long run."""

import gc

import keras

# The step after which a run is taken for a long one.
AFTER = 50


class Garbage(keras.callbacks.Callback):
    """Spares the steps of a long run full collections of garbage.

    A full collection looks at all objects of the process, most of which are
    modules, programs and rows that a run keeps to its end: it stops all
    threads for a quarter of a second. After some steps garbage is collected
    once, and what is left is not looked at again before the run ends.
    Garbage of later steps is collected as always.
    """

    def __init__(self):
        super().__init__()
        self._steps, self._has_frozen = 0, False

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1
        # A script, or a run around this one, may have done it before.
        if self._steps == AFTER and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._has_frozen = True

    def close(self):
        """Lets full collections look at all objects again."""
        if self._has_frozen:
            gc.unfreeze()
        self._has_frozen = False
