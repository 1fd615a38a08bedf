"""
Title: Custom training steps
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Write the step in JAX; keep fit, the callbacks and resuming.
Accelerator: None
"""

"""
## Introduction

Research often changes one part of the training step: what the gradient is
computed from, or how it is applied. To do this, override a task's
`train_step`. It is a pure function of arrays, which `fit` compiles with
`jax.jit`. All the rest stays the same: data, packing, metrics, callbacks,
checkpoints and resuming.

This guide writes three steps, from the smallest change to the largest:
sharpness-aware minimisation, noise in the gradient, and a loss and update in
plain JAX. It also interrupts a run, resumes it, and compares it with a run
that was not interrupted.

It runs in half a minute on two CPU cores with a tiny model. For a real one
change one line: set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`,
or to `"hf://Qwen/Qwen3-0.6B"`.
"""

import json
import os
import pathlib
import shutil
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/custom_train_step"
)
for name in ("straight", "stopped"):
    shutil.rmtree(folder / name, ignore_errors=True)  # start from scratch
keras.utils.set_random_seed(0)

rows = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
    for a in range(10)
    for b in range(10)
]
preset = kpt.examples.tiny_preset(folder / "tiny", rows)

"""
## The two halves of a step

This is the step that every task has:

```python
def train_step(self, state, batch):
    gradients, logs = self.loss_and_gradients(state, batch)
    return self.apply_gradients(state, gradients, logs)
```

`state` is a dict. `trainable`, `frozen`, `optimizer` and `metrics` are lists
of arrays in the order of the task's variables; `step` and `seed` are integers.
`batch` is a dict of arrays whose first axis is the rows, such as `token_ids`
and `completion_mask`.

`loss_and_gradients` adds gradients up over micro-batches. `apply_gradients`
clips them, applies the optimizer, skips a step whose gradient is not finite,
and returns the logs and the new state.

## Sharpness-aware minimisation

[SAM](https://arxiv.org/abs/2010.01412) does not compute the gradient at the
current weights but at weights a small step uphill from them. So it calls
`loss_and_gradients` twice, the second time with other weights.

Entries added to `logs` are written to `metrics.jsonl`. `fingerprint` returns
the settings that must be equal for a run to be resumed, so `rho` is added.
"""


class SharpnessAwareTask(kpt.SFTTask):
    rho = 0.05

    def train_step(self, state, batch):
        gradients, here = self.loss_and_gradients(state, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        uphill = [
            w + self.rho * g / (norm + 1e-12)
            for w, g in zip(state["trainable"], gradients)
        ]
        gradients, logs = self.loss_and_gradients(
            {**state, "trainable": uphill}, batch
        )
        logs["sharpness"] = logs["loss"] - here["loss"]
        return self.apply_gradients(state, gradients, logs)

    def fingerprint(self):
        return {**super().fingerprint(), "rho": self.rho}


task = SharpnessAwareTask.from_preset(preset, sequence_length=16)
task.compile(optimizer=keras.optimizers.AdamW(3e-3), micro_batch_size=5)
task.fit(
    rows,
    batch_size=10,
    epochs=3,
    callbacks=[kpt.callbacks.MetricsLog(folder / "sam")],
)
lines = (folder / "sam" / "metrics.jsonl").read_text().splitlines()
print(lines[-1])

"""
## Randomness that can be resumed

A step may need random numbers, here for
[noise in the gradient](https://arxiv.org/abs/1511.06807). If they are derived
from `seed` and `step`, a resumed run uses the same numbers.
"""


class NoisyGradientTask(kpt.SFTTask):
    scale = 1e-3

    def train_step(self, state, batch):
        gradients, logs = self.loss_and_gradients(state, batch)
        key = jax.random.key(state["seed"])
        key = jax.random.fold_in(key, state["step"])
        keys = jax.random.split(key, len(gradients))
        gradients = [
            g + self.scale * jax.random.normal(k, g.shape, g.dtype)
            for g, k in zip(gradients, keys)
        ]
        return self.apply_gradients(state, gradients, logs)

    def fingerprint(self):
        return {**super().fingerprint(), "noise": self.scale}


"""
To show this, one run trains for 30 steps without a stop. Another is
interrupted after step 17, as by Ctrl-C or a crash, and is run again with the
same directory.
"""


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.step == 17:
            raise KeyboardInterrupt


for run, extra in (
    ("straight", []),
    ("stopped", [Interrupt()]),
    ("stopped", []),
):
    task = NoisyGradientTask.from_preset(preset, sequence_length=16)
    task.compile(optimizer=keras.optimizers.AdamW(3e-3))
    callbacks = [
        kpt.callbacks.Checkpoint(folder / run, every=5),
        kpt.callbacks.MetricsLog(folder / run),
    ]
    try:
        task.fit(rows, batch_size=10, epochs=3, callbacks=callbacks + extra)
    except KeyboardInterrupt:
        print(f"interrupted after step {task.step}")

losses = {}
for run in ("straight", "stopped"):
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    losses[run] = [json.loads(line)["loss"] for line in lines]
    print(f"{run}: {len(losses[run])} steps, last loss {losses[run][-1]}")
print("the same losses:", losses["straight"] == losses["stopped"])

"""
## A step in plain JAX

A step does not have to call `loss_and_gradients`. `using_weights` is a scope
in which the task's layers use the given arrays, so that `jax.grad` can
differentiate through them. Called with a batch, the task returns the
log-probability of every token, of shape `(rows, length)`. This loss is
[flooding](https://arxiv.org/abs/2002.08709), which keeps the training loss
from falling below a level.

`apply_gradients` is useful here too. Metrics that the task's own loss would
report may be missing from the logs.
"""


class FloodingTask(kpt.SFTTask):
    level = 0.5

    def train_step(self, state, batch):
        mask = batch["completion_mask"]

        def flooded(trainable):
            with self.using_weights(trainable, state["frozen"]):
                logps = self(batch)
            loss = -jnp.sum(mask * logps) / jnp.sum(mask)
            return jnp.abs(loss - self.level) + self.level

        loss, gradients = jax.value_and_grad(flooded)(state["trainable"])
        logs = {
            "loss": loss,
            "num_tokens": jnp.sum(batch["segment_ids"] > 0),
        }
        return self.apply_gradients(state, gradients, logs)


task = FloodingTask.from_preset(preset, sequence_length=16)
task.compile(optimizer=keras.optimizers.AdamW(3e-3))
history = task.fit(rows, batch_size=10, epochs=20, verbose=0)
print("metrics:", sorted(history.history))
print("loss of some epochs:", history.history["loss"][::3])

"""
## Next

- `sft.py`: a full run with checkpoints and adapters.
- `data_formats.py`: the rows that batches are made of.
"""
