"""A user's script, as it is started on every host.

`two_processes.py CASE DIRECTORY [PORT COUNT INDEX]`: trains, and the first
process writes what came of it to `DIRECTORY/CASE.npz`. Without a port it is
one process, with all devices.
"""

import json
import os
import pathlib
import re
import signal
import sys

import jax
import keras

if len(sys.argv) > 3 and __name__ == "__main__":
    address, rank = f"127.0.0.1:{sys.argv[3]}", map(int, sys.argv[4:])
    if sys.argv[1].startswith("resume"):
        # The other way to start processes: a lost one is noticed sooner.
        jax.distributed.initialize(
            address, *rank, heartbeat_timeout_seconds=10
        )
        keras.utils.set_random_seed(0)
    else:
        keras.distribution.initialize(address, *rank)

import numpy as np  # noqa: E402

import keras_posttrain as kpt  # noqa: E402
from keras_posttrain.distribution import processes  # noqa: E402
from tests.distribution.same_numbers import make, mesh, odd  # noqa: E402
from tests.support import REFERENCE, random_rows  # noqa: E402


def train(directory, task, family, mode, layout):
    """Trains; a dict of what came of it."""
    keras.distribution.set_distribution(mesh(layout))
    made, fit = make(task, family, mode)
    history = made.fit(**fit, verbose=0).history
    assert made.compiled_train_step._cache_size() == 1, "compiled again"
    out = {k: v for k, v in history.items() if not k.startswith("time/")}
    if task == "grpo":
        rows = made.last_rollout
        out |= {k: rows[k] for k in ("odd", "advantage")}
        out["tokens"] = json.dumps(rows["completion"])
    return out | trained(made)


def use(directory, family, mode, layout):
    """What a model is used for; a dict of what came of it."""
    keras.distribution.set_distribution(mesh(layout))
    made, _ = make("sft", family, mode)
    rows = random_rows(5, seed=2)
    out = made.evaluate(rows, batch_size=4)
    out["log_probs"] = np.concatenate(made.log_probs(rows, batch_size=4))
    prompts = [{"prompt_ids": row["token_ids"]} for row in rows]
    kwargs = dict(max_tokens=6, stop_token_ids=None, return_token_ids=True)
    out["tokens"] = made.generate(prompts, seed=3, **kwargs)
    # A seed that all agree on.
    out["drawn"] = made.generate(prompts[0], **kwargs)
    assert processes.exchange(out["drawn"]) == (
        [out["drawn"]] * processes.count()
    )
    del out["drawn"]
    if mode == "lora":
        made.save_adapter(pathlib.Path(directory) / "adapter")
    made.export(pathlib.Path(directory) / "export")
    made.save_to_preset(pathlib.Path(directory) / "preset")
    return out


def trained(task):
    weights = processes.fetch([v.value for v in task.trainable_variables])
    return {f"weight {i}": x for i, x in enumerate(weights)}


class Dies(keras.callbacks.Callback):
    """Ends one process as something else may end it."""

    reads_step_logs = True

    def __init__(self, step, process, how):
        super().__init__()
        self.step, self.process, self.how = step, process, how

    def on_train_batch_begin(self, batch, logs=None):
        step = self._model.step
        if step == self.step and self.process in ("all", processes.index()):
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
        keras.callbacks.EarlyStopping(
            "loss", patience=2, restore_best_weights=True
        ),
    ]
    if death:
        step, process, how = death
        process = int(process) if process.isdigit() else process
        callbacks.append(Dies(int(step), process, how))
    made.fit(
        random_rows(48, seed=1),
        batch_size=8,
        epochs=2,
        callbacks=callbacks,
        verbose=0,
    )
    assert made.step == 12
    return trained(made)


def raises(pattern, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        assert re.search(pattern, str(error)), error
        return
    raise AssertionError(f"nothing was raised: {pattern}")


def refused(directory):
    """What processes that do not fit together are told, all of them."""
    path, rows = REFERENCE / "models/llama3", random_rows(8)
    task = kpt.SFTTask.from_preset(path, sequence_length=64)
    task.compile()
    raises("a distribution over 0 of them", task.fit, rows, verbose=0)
    keras.distribution.set_distribution(mesh("4x1"))
    task = kpt.SFTTask.from_preset(path, sequence_length=64)
    task.compile()
    raises("same data.* data tokens=.* in process 1", task.fit,
           random_rows(8, seed=processes.index()), verbose=0)  # fmt: skip
    raises("epochs=1 in process 0, epochs=2 in process 1", task.fit, rows,
           epochs=1 + processes.index(), verbose=0)  # fmt: skip
    task, fit = make("grpo", "llama3", "full")
    rewards = [broken if processes.index() == 1 else odd]
    rewards[0].__name__ = "odd"
    task.compile(rewards=rewards, num_generations=4, max_completion_length=4)
    raises("In process 1 of 2: .*'odd' raised KeyError: 'no such'", task.fit,
           **fit, verbose=0)  # fmt: skip
    return {}


def broken(completions):
    raise KeyError("no such")


def main(case, directory):
    kind, *arguments = case.split(":")
    kinds = {"train": train, "use": use, "resume": resume, "refused": refused}
    found = kinds[kind](directory, *arguments)
    if processes.is_first():
        np.savez(pathlib.Path(directory) / "out.npz", **found)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
