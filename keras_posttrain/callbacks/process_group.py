import atexit
import json
import sys
import zlib

import keras

from keras_posttrain.callbacks.checkpoint import Checkpoint
from keras_posttrain.distribution import processes
from keras_posttrain.distribution.exit_message import ExitMessage


class ProcessGroup(keras.callbacks.Callback):
    """Checks that all processes run the same training, and ends them together.

    `fit` adds it where several processes run. Processes whose arguments, data
    or variables differ are refused before the first step. If a process is
    lost, JAX's heartbeat ends the others, and a message says how to resume.
    """

    reads_step_logs = True

    def __init__(self):
        super().__init__()
        self._exit_message = None

    def on_train_begin(self, logs=None):
        task = self._model
        self._handled = sys.exception()
        # The following checks are computed on arrays of these shapes by all
        # processes together.
        shapes = [[v.path, list(v.shape)] for v in task.variables]
        digest = zlib.crc32(json.dumps(shapes).encode())
        processes.check_equal({"shapes of variables (checksum)": digest})
        processes.check_equal(task.run.agreement())
        found = [
            (c.location, c.local_directory is not None)
            for c in task.run.callbacks
            if isinstance(c, Checkpoint)
        ]
        self._exit_message = ExitMessage(
            f"Process {processes.index()} of {processes.count()}",
            *(found[0] if found else ()),
        )
        self._exit_message.update(task.step)

    def on_train_batch_end(self, batch, logs=None):
        self._exit_message.update(self._model.step)

    def close(self):
        """Cancels the message, unless another process may have been lost."""
        exit_message, self._exit_message = self._exit_message, None
        if exit_message is None:
            return
        error = sys.exception()
        raised = error is not None and error is not self._handled
        if raised and processes.may_be_lost(error):
            # JAX reports the lost process, and ends this one, at its exit.
            return
        exit_message.cancel()
        if raised:
            atexit.register(processes.exit_after, error)
