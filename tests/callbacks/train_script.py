"""A user's script, run and killed by the tests: `train_script.py settings`.

Settings are JSON: see `DEFAULTS`. It writes to `directory` the log, the
checkpoints, local ones to `local` in it, the logs of each epoch
(`epoch-0.json` and so on) and, when it is done, the weights (`final.npz`).
"""

import json
import pathlib
import resource
import signal
import sys
import time

import grain
import keras
import numpy as np

import keras_posttrain as kpt
from tests.support import REFERENCE, one_layer, random_rows, weights

DEFAULTS = {
    "directory": None,
    "lora": True,
    "packing": False,
    "stream": False,
    "shuffle": True,
    "epochs": 3,
    # A save takes as much processor time as several of the steps.
    "every": 100,
    "keep": 2,
    "local_every": None,
    "patience": 50,
    "best": False,
    "min_delta": 0.0,
    "pause": 0.0,
    "file_limit": None,
    "model": None,
}


class Watch(keras.callbacks.Callback):
    """Saves the epochs' logs, and waits to allow a kill."""

    def __init__(self, directory, pause):
        super().__init__()
        self.directory, self.pause = directory, pause

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self.pause)

    def on_test_batch_begin(self, batch, logs=None):
        if self.pause:
            (self.directory / "validating").touch()
        time.sleep(self.pause)

    def on_epoch_end(self, epoch, logs=None):
        path = self.directory / f"epoch-{epoch}.json"
        path.write_text(json.dumps(logs))


def make_task(lora=True, family="llama3", model=None, **kwargs):
    lora = kpt.LoRA(rank=4, dropout=0.2) if lora is True else lora
    task = kpt.SFTTask.from_preset(
        model or one_layer(REFERENCE / "models" / family),
        sequence_length=64,
        lora=lora or None,
    )
    task.compile(optimizer=keras.optimizers.Adam(1e-2), **kwargs)
    return task


def fit(task, directory, callbacks=(), **settings):
    settings = DEFAULTS | settings
    directory = pathlib.Path(directory)
    local = settings["local_every"]
    rows = random_rows(22, seed=5)
    if settings["stream"]:
        rows = grain.MapDataset.source(rows).to_iter_dataset()
    return task.fit(
        rows,
        batch_size=2 if settings["packing"] else 4,
        epochs=settings["epochs"],
        shuffle=settings["shuffle"],
        packing=settings["packing"],
        validation_data=random_rows(6, seed=6),
        seed=3,
        verbose=2,
        callbacks=[
            kpt.callbacks.MetricsLog(directory),
            kpt.callbacks.Checkpoint(
                directory,
                every=settings["every"],
                keep=settings["keep"],
                local_directory=local and directory / "local",
                local_every=local,
            ),
            keras.callbacks.LearningRateScheduler(lambda e, lr: lr * 0.8),
            keras.callbacks.EarlyStopping(
                patience=settings["patience"],
                min_delta=settings["min_delta"],
                restore_best_weights=settings["best"],
            ),
            Watch(directory, settings["pause"]),
            *callbacks,
        ],
    )


def main(settings):
    settings = DEFAULTS | settings
    directory = pathlib.Path(settings["directory"])
    # Also where the tests run in a shell's background, which ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    task = make_task(settings["lora"], model=settings["model"])
    if settings["file_limit"]:
        # Like a full disk: writes beyond a number of bytes fail.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = settings["file_limit"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    fit(task, **settings)
    np.savez(directory / "final.npz", **weights(task))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
