"""A user's script, as it is started on every host.

`two_processes.py CASE DIRECTORY [PORT COUNT INDEX]`: trains, and the first
process writes what came of it to `DIRECTORY/CASE.npz`. Without a port it is
one process, with all devices.
"""

import os
import pathlib
import signal
import sys

import keras

if len(sys.argv) > 3 and __name__ == "__main__":
    keras.distribution.initialize(
        f"127.0.0.1:{sys.argv[3]}", int(sys.argv[4]), int(sys.argv[5])
    )

import numpy as np  # noqa: E402

import keras_posttrain as kpt  # noqa: E402
from keras_posttrain.distribution import processes  # noqa: E402
from tests.distribution.same_numbers import make, mesh  # noqa: E402
from tests.support import random_rows  # noqa: E402


def train(task, family, mode, layout):
    """Trains, and uses the model; a dict of what came of it."""
    keras.distribution.set_distribution(mesh(layout))
    made, fit = make(task, family, mode)
    history = made.fit(**fit, verbose=0).history
    assert made.compiled_train_step._cache_size() == 1, "compiled again"
    out = {k: v for k, v in history.items() if not k.startswith("time/")}
    weights = processes.fetch([v.value for v in made.trainable_variables])
    return out | {f"weight {i}": x for i, x in enumerate(weights)}


class Dies(keras.callbacks.Callback):
    """Ends one process as something else may end it."""

    reads_step_logs = True

    def __init__(self, step, process, how):
        super().__init__()
        self.step, self.process, self.how = step, process, how

    def on_train_batch_begin(self, batch, logs=None):
        step = self._model.step
        if step == self.step and processes.index() == self.process:
            if self.how == "raise":
                raise OSError("No space left on device")
            os.kill(os.getpid(), getattr(signal, self.how))


def resume(directory, mode, layout, *death):
    """A run with checkpoints; `death` is the step, the process and how."""
    keras.distribution.set_distribution(mesh(layout))
    made, _ = make("sft", "llama3", mode)
    callbacks = [
        kpt.callbacks.Checkpoint(directory, every=2),
        kpt.callbacks.MetricsLog(directory),
    ]
    if death:
        step, process, how = death
        callbacks.append(Dies(int(step), int(process), how))
    made.fit(
        random_rows(48, seed=1),
        batch_size=8,
        epochs=2,
        callbacks=callbacks,
        verbose=0,
    )
    assert made.step == 12
    weights = processes.fetch([v.value for v in made.trainable_variables])
    return {f"weight {i}": x for i, x in enumerate(weights)}


def main(case, directory):
    kind, *arguments = case.split(":")
    if kind == "train":
        found = train(*arguments)
    else:
        found = resume(directory, *arguments)
    if processes.is_first():
        np.savez(pathlib.Path(directory) / "out.npz", **found)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
