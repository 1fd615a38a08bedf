"""Two processes whose run is at an address of Google's storage.

`on_storage.py DIRECTORY PORT INDEX ADDRESS`: trains once with checkpoints in
`DIRECTORY`, and once at the address, where it is stopped and resumed.
"""

import sys

import etils.epath.gpath
import jax
import keras

if __name__ == "__main__":
    # With TensorFlow, `epath` has its client, which knows no other server.
    etils.epath.gpath._is_tf_installed = lambda: False
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))

import numpy as np  # noqa: E402

import keras_posttrain as kpt  # noqa: E402
from keras_posttrain.distribution import processes  # noqa: E402
from tests.distribution.runs import directory as directory_of  # noqa: E402
from tests.distribution.two_processes import write_programs  # noqa: E402
from tests.support import random_rows  # noqa: E402


class StopsAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self._model.step == self.step:
            self.model.stop_training = True


def train(directory, stop=None):
    """Returns the weights at the end."""
    keras.utils.set_random_seed(0)
    task = kpt.SFTTask.from_preset(
        directory_of("llama3-short"),
        sequence_length=64,
        lora=kpt.LoRA(rank=4, dropout=0.1),
    )
    task.compile(optimizer=keras.optimizers.Adam(1e-2))
    task.fit(
        random_rows(16),
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[
            kpt.callbacks.Checkpoint(directory, every=2),
            kpt.callbacks.MetricsLog(directory),
            StopsAt(stop),
        ],
    )
    return processes.fetch(
        {v.path: v.value for v in task.adapter.trainable_variables}
    )


def check_export(address):
    """The first process writes; where it cannot, no process waits for it."""
    path = directory_of("llama3-short")
    task = kpt.SFTTask.from_preset(path, sequence_length=64)
    task.export(f"{address}/model")
    try:
        task.export("gs://no-such-bucket/model")
    except (ValueError, OSError) as error:
        assert (type(error) is ValueError) == processes.is_first(), error
    else:
        raise AssertionError("nothing was raised")


def main():
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    straight = train(sys.argv[1])
    train(sys.argv[4], stop=5)
    resumed = train(sys.argv[4])
    for name, value in straight.items():
        np.testing.assert_array_equal(resumed[name], value, name)
    check_export(sys.argv[4])
    print("done")


if __name__ == "__main__":
    write_programs()
    main()
