"""Runs whose output `test_progress.py` reads at the file descriptors.

`silent FOLDER`: every task trains, resumes and is evaluated with `verbose=0`;
what it writes is in `FOLDER/<task>`. `terminal WIDTH ...`: a run with skipped
steps and validation, and rollouts, in terminals of these widths.
"""

import dataclasses
import fcntl
import os
import struct
import sys
import termios
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras

import keras_posttrain as kpt
from tests.support import random_rows
from tests.tasks import contract


def output_to(path):
    """Sends both streams, also those of other languages, to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)


def silent(folder):
    output_to(os.devnull)
    # Keras imports TensorFlow for this where it is installed, which prints, as
    # libtpu does on some machines without a TPU when JAX looks for devices.
    keras.utils.set_random_seed(0)
    jax.devices()
    for name, case in contract.TASKS.items():
        output_to(f"{folder}/{name}")
        compiled = {}
        if "rewards" in case.compiled:
            # Nothing to learn from, and a reward that fails.
            compiled = {
                "rewards": [lambda completions: 1 / 0, contract.odd],
                "on_reward_error": "skip",
            }
        # A second run is finished before it begins, which is not said either.
        for _ in range(1 + (name in ("sft", "grpo"))):
            task = contract.make(
                case, keras.optimizers.SGD(1e-3), compiled=compiled
            )
            held_out = {"validation_data": case.rows[:2]}
            if name == "distill_on_policy":
                held_out = {"validation_data": contract.COMPLETIONS[:2]}
            task.fit(
                case.rows,
                batch_size=2,
                epochs=1,
                verbose=0,
                callbacks=[
                    kpt.callbacks.Checkpoint(f"{folder}/of_{name}"),
                    kpt.callbacks.MetricsLog(f"{folder}/of_{name}"),
                ],
                **held_out,
            )
        too_long = {"token_ids": [5] * 80, "completion_mask": [1] * 80}
        rows = held_out["validation_data"]
        if name in ("sft", "distill"):
            task.truncation = "drop"
            rows = [*rows, too_long]
        task.evaluate(rows, verbose=0)
        if name == "sft":
            task.generate([{"prompt_ids": [5, 6]}], max_tokens=2, verbose=0)
    output_to(os.devnull)


class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.15)


def slow(completions):
    time.sleep(1.2)
    return contract.odd(completions)


def terminal(*widths):
    rows = random_rows(24, seed=2)
    rows = [{**row, "weight": float(i > 7)} for i, row in enumerate(rows)]
    # Of two layers, whose compilation takes long enough to be named.
    sft, grpo = (
        contract.make(
            dataclasses.replace(
                contract.TASKS[name], preset=contract.TWO_LAYERS[0]
            ),
            keras.optimizers.SGD(1e-3),
            compiled=compiled,
        )
        for name, compiled in (("sft", None), ("grpo", {"rewards": [slow]}))
    )
    for width in widths:
        size = struct.pack("HHHH", 24, int(width), 0, 0)
        fcntl.ioctl(1, termios.TIOCSWINSZ, size)
        print(f"width {width}", flush=True)
        sft.fit(
            rows,
            batch_size=4,
            epochs=2,
            shuffle=False,
            validation_data=rows[8:10],
            callbacks=[Slow()],
        )
        grpo.fit(contract.PROMPTS, batch_size=2)


if __name__ == "__main__":
    {"silent": silent, "terminal": terminal}[sys.argv[1]](*sys.argv[2:])
