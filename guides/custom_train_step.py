"""
Title: A training step of your own
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Write the step in JAX; keep fit, the callbacks and resuming.
Accelerator: None
"""

"""
## Introduction

Research often changes one thing in the training step: what the gradient is
taken of, or what is done with it. A task's `train_step` is the place for that.
It is a pure function of arrays, which `fit` compiles with `jax.jit`. Around it
everything stays: data, packing, metrics, callbacks, checkpoints and resuming.

This guide writes three steps, from the smallest change to the largest:
sharpness-aware minimisation, gradients with noise, and a loss and update in
plain JAX. It stops a run in the middle and resumes it, and compares.

It runs in about a minute on two CPU cores with a tiny model. For a real one
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
import keras_hub
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/custom_train_step"
)
for name in ("straight", "stopped"):
    shutil.rmtree(folder / name, ignore_errors=True)  # begin anew
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## Rows, and a tiny preset

With a real preset only the rows are needed.
"""

rows = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
    for a in range(10)
    for b in range(10)
]

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [row["prompt"] + row["completion"] for row in rows],
    tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    ),
)
tokenizer = kpt.Tokenizer(bpe, {"eos_token": "<|endoftext|>"})
backbone = keras_hub.models.Qwen3Backbone(
    vocabulary_size=tokenizer.vocabulary_size,
    num_layers=2,
    num_query_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    hidden_dim=64,
    intermediate_dim=128,
    tie_word_embeddings=True,
)
causal_lm = keras_hub.models.Qwen3CausalLM(backbone, preprocessor=None)
preset = folder / "tiny_qwen3"
kpt.SFTTask(causal_lm, tokenizer).export(preset)

"""
## The two halves of a step

This is the step that every task has:

```python
def train_step(self, state, batch):
    gradients, logs = self.loss_and_gradients(state, batch)
    return self.apply_gradients(state, gradients, logs)
```

`state` is a dict of lists of arrays: `trainable`, `frozen`, `optimizer` and
`metrics`, in the order of the task's variables, and of two integers, `step`
and `seed`. `batch` is a dict of arrays with a leading axis of rows, such as
`token_ids` and `completion_mask`.

`loss_and_gradients` adds gradients up over micro-batches. `apply_gradients`
clips them, applies the optimizer, skips a step whose gradient is not finite,
and returns the logs and the new state.

## Sharpness-aware minimisation

[SAM](https://arxiv.org/abs/2010.01412) takes the gradient not where the
weights are but a little uphill of there. That is `loss_and_gradients` twice,
with other weights the second time.

What is added to `logs` is written to `metrics.jsonl`. `fingerprint` says what
must be the same for a run to be resumed; `rho` belongs to it.
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


task = SharpnessAwareTask.from_preset(preset, sequence_length=32)
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
[noise in the gradient](https://arxiv.org/abs/1511.06807). Drawn from `seed`
and `step` they are the same numbers in a run that was stopped and resumed.
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
To show it, one run goes straight through its 30 steps. Another is interrupted
after step 17, as by Ctrl-C or a crash, and is run again with the same
directory.
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
    task = NoisyGradientTask.from_preset(preset, sequence_length=32)
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

Nothing of the above has to be used. `using_weights` is a scope in which the
task's layers have the arrays that are given, so that `jax.grad` goes through
them; called with a batch, the task gives the log-probability of every token,
`(rows, length)`. Here the loss is that of
[flooding](https://arxiv.org/abs/2002.08709), which keeps it from falling
below a level.

`apply_gradients` is of use here too. Metrics of the task's loss that are not
in the logs are left out.
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


task = FloodingTask.from_preset(preset, sequence_length=32)
task.compile(optimizer=keras.optimizers.AdamW(3e-3))
history = task.fit(rows, batch_size=10, epochs=40, verbose=0)
print("metrics:", sorted(history.history))
print("loss of some epochs:", history.history["loss"][::6])

"""
## Next

- `sft.py`: the run around the step.
- `data_formats.py`: what is in a batch, and where it comes from.
"""
