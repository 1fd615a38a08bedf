"""Runs in a process that has frozen no objects; prints what they found.

`test_garbage.py` starts it: what the garbage collector looks at is one thing
for a whole process.
"""

import functools
import gc
import json
import weakref

import keras

import keras_posttrain as kpt
from keras_posttrain.callbacks import garbage
from tests.support import REFERENCE, one_layer, random_rows, starts_again

ROWS = random_rows(12, seed=3)
PROMPTS = [{"prompt_ids": [3 + i, 40, 7]} for i in range(6)]


def score(completions):
    return [float(len(c)) for c in completions]


@functools.cache
def first_task(cls):
    return starts_again(functools.partial(make, cls))


def make(cls):
    task = cls.from_preset(
        one_layer(REFERENCE / "models" / "llama3"),
        sequence_length=64,
        lora=kpt.LoRA(rank=2),
    )
    settings = {}
    if cls is kpt.GRPOTask:
        settings = {"rewards": [score], "num_generations": 2}
        settings |= {"max_completion_length": 4}
    task.compile(keras.optimizers.SGD(1e-2), **settings)
    return task


def fit(cls, callback, epochs=2):
    """Two steps an epoch."""
    is_sft = cls is kpt.SFTTask
    task = first_task(cls)()
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=callback)
    task.fit(
        ROWS if is_sft else PROMPTS,
        batch_size=6 if is_sft else 3,
        epochs=epochs,
        callbacks=[callback],
        verbose=0,
    )


def long_run(cls):
    """What is spared after each step and the run, and what is looked at."""
    frozen, looked_at = [], []

    def read(batch, logs):
        frozen.append(gc.get_freeze_count())
        looked_at.append(len(gc.get_objects(generation=2)))

    fit(cls, read)
    return frozen + [gc.get_freeze_count()], looked_at


def short_run():
    frozen = []

    def read(batch, logs):
        frozen.append(gc.get_freeze_count())

    fit(kpt.SFTTask, read, epochs=1)
    return frozen


def later_garbage():
    """Whether the cycles of earlier steps are alive in each step."""

    class Node:
        pass

    made, alive = [], []

    def make(batch, logs):
        gc.collect()
        alive.append([ref() is not None for ref in made])
        node = Node()
        node.itself = node
        made.append(weakref.ref(node))

    fit(kpt.SFTTask, make, epochs=3)
    return alive


def run_that_fails():
    """What is spared when a step raises, and after it."""
    frozen = []

    def stop(batch, logs):
        if gc.get_freeze_count():
            frozen.append(gc.get_freeze_count())
            raise KeyError("stop")

    try:
        fit(kpt.SFTTask, stop)
    except KeyError:
        frozen.append(gc.get_freeze_count())
    return frozen


def frozen_by_the_script():
    """What a script has spared, before and after a run."""
    gc.freeze()
    before = gc.get_freeze_count()
    fit(kpt.SFTTask, lambda batch, logs: None)
    return before, gc.get_freeze_count()


if __name__ == "__main__":
    # Runs of three steps are long ones.
    garbage.AFTER = 3
    found = {
        "sft": long_run(kpt.SFTTask),
        "grpo": long_run(kpt.GRPOTask),
        "short": short_run(),
        "garbage": later_garbage(),
        "fails": run_that_fails(),
        "script": frozen_by_the_script(),
    }
    print(json.dumps(found))
