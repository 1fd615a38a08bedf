import json
import sys
import zlib

import keras

from keras_posttrain.callbacks.checkpoint import Checkpoint
from keras_posttrain.distribution import processes
from keras_posttrain.distribution.watchdog import Peers


class ProcessGroup(keras.callbacks.Callback):
    """Keeps the processes of a run together; `fit` adds it where several run.

    Processes that would not train the same end before the first step, and
    one that is lost ends all, with a message.
    """

    reads_step_logs = True

    def __init__(self):
        super().__init__()
        self._peers = None

    def on_train_begin(self, logs=None):
        task = self._model
        self._handled = sys.exception()
        # What follows is computed by all together, on arrays of these shapes.
        shapes = [[v.path, list(v.shape)] for v in task.variables]
        digest = zlib.crc32(json.dumps(shapes).encode())
        processes.check_equal({"shapes of variables (checksum)": digest})
        processes.check_equal(task.run.agreement())
        places = [
            str(c.directory)
            for c in task.run.callbacks
            if isinstance(c, Checkpoint)
        ]
        self._peers = Peers(*places[:1])
        self._peers.start()
        self._peers.tell(task.step)

    def on_train_batch_end(self, batch, logs=None):
        self._peers.tell(self._model.step)

    def close(self):
        """Ends the watch; what is being raised is told to the others."""
        peers, self._peers = self._peers, None
        if peers is None:
            return
        error = sys.exception()
        if error is not None and error is not self._handled:
            peers.fail(error)
        peers.stop()
