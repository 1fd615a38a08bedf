import math

import keras

from keras_posttrain._spans import span

# Logs are read behind the step that runs, so that nothing waits for it.
BEHIND, READ_EVERY = 2, 16


class Divergence(keras.callbacks.Callback):
    """Stops a run whose gradients are not finite any more.

    A step whose gradient is not finite is skipped. Where as many in a row are
    skipped as `patience`, the weights no longer train. Every run has one.

    Args:
        patience: int, steps in a row.

    Raises:
        FloatingPointError: from `fit`, at the end of such steps.
    """

    reads_step_logs = True

    def __init__(self, patience=32):
        super().__init__()
        self.patience = patience

    def on_train_begin(self, logs=None):
        self._pending, self._lost = [], []

    def on_train_batch_end(self, batch, logs=None):
        self._pending.append((self._model.step, self._model.step_logs))
        if len(self._pending) >= READ_EVERY + BEHIND:
            self._read(BEHIND)

    def on_epoch_end(self, epoch, logs=None):
        self._read()

    def lost_since(self, step):
        """Returns whether every step after `step` was skipped, and one was."""
        self._read()
        return bool(self._lost) and self._lost[0] <= step + 1

    def _read(self, behind=0):
        """Reads the logs of all steps but the last `behind`."""
        count = max(len(self._pending) - behind, 0)
        read, self._pending = self._pending[:count], self._pending[count:]
        with span("device"):
            norms = [
                float(logs.get("grad_norm", 0.0)) if logs else 0.0
                for _, logs in read
            ]
        for (step, _), norm in zip(read, norms):
            self._lost = [] if math.isfinite(norm) else [*self._lost, step]
        if len(self._lost) >= self.patience:
            raise FloatingPointError(
                f"The gradients of the last {len(self._lost)} steps, "
                f"{self._lost[0]} to {self._lost[-1]}, were not finite, and "
                "none of them changed a weight: the run has diverged. Resume "
                "from an earlier checkpoint with a lower learning rate "
                "(`kpt.callbacks.Checkpoint(directory, from_step=...)`), or "
                "look at the rows of these steps."
            )
