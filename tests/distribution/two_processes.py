"""A user's script, as it is started on every host.

`two_processes.py CASE DIRECTORY [PORT COUNT INDEX]`: trains, and the first
process writes what came of it to `DIRECTORY/CASE.npz`. Without a port it is
one process, with all devices.
"""

import json
import pathlib
import sys

import keras

if len(sys.argv) > 3 and __name__ == "__main__":
    keras.distribution.initialize(
        f"127.0.0.1:{sys.argv[3]}", int(sys.argv[4]), int(sys.argv[5])
    )

import jax  # noqa: E402
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


def main(case, directory):
    kind, *arguments = case.split(":")
    found = {"train": train}[kind](*arguments)
    if processes.is_first():
        np.savez(pathlib.Path(directory) / "out.npz", **found)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
