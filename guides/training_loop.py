"""
Title: A training loop of your own
Author: The keras_posttrain authors
Date created: 2026/11/24
Last modified: 2026/11/24
Description: Sample, score, add up gradients and step, with `kpt.Loop`.
Accelerator: None
"""

"""
## Introduction

`fit` runs the loop of reinforcement learning for you. This guide writes it
out, for an algorithm that `fit` does not offer. `kpt.Loop` has the four
primitives of [Tinker](https://tinker-docs.thinkingmachines.ai), on your own
device:

- `sample` completions from the present weights,
- `forward_backward` adds the gradients of some data,
- `optim_step` updates the weights,
- `save_state` and `load_state`.

They run the programs that `fit` compiles: with one `forward_backward` a step,
the weights are those of `fit` bit for bit.

It runs in half a minute on two CPU cores with a tiny model, and downloads
nothing. For a real model change one line: set `preset` to a KerasHub preset
such as `"qwen3_0.6b_en"`, or to `"hf://Qwen/Qwen3-0.6B"`.
"""

import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/training_loop"
)
keras.utils.set_random_seed(0)

"""
## A model

The tiny model has seen sums with the right answer in two of five rows.
"""

sums = [(a, b) for a in range(5) for b in range(5)]
texts = [
    {"prompt": f"{a}+{b}=", "completion": str((a + b + error) % 10)}
    for a, b in sums
    for error in (0, 0, 1, 2, 3)
]
preset = kpt.examples.tiny_preset(folder / "tiny", texts, epochs=6)
task = kpt.SFTTask.from_preset(preset, sequence_length=8)
task.compile(optimizer=keras.optimizers.Adam(1e-3))

"""
## The loop

The task was compiled as for `fit`. `forward_backward` takes any loss of
`kpt.losses`, by default that of the task. What it reads of a sequence is
passed to `kpt.Datum` by name: a number is a value of the sequence, an array
has one for each token of the completion.

A reward need not be a function of a single completion here. This one compares
the samples of a prompt with each other: a right answer counts more, the fewer
samples have it. Its advantages are their differences to the mean.
"""


loss = kpt.losses.ReinforceLoss()
prompts = [task.tokenizer.encode(f"{a}+{b}=") for a, b in sums]
shares = []
with kpt.Loop(task) as loop:
    for step in range(15):
        groups = loop.sample(
            [
                kpt.rollout.Request(
                    ids, num_generations=8, max_tokens=2, seed=step
                )
                for ids in prompts
            ]
        )
        data, right = [], []
        for (a, b), ids, group in zip(sums, prompts, groups):
            answers = [task.tokenizer.decode(c.token_ids) for c in group]
            found = np.array([x.strip() == str((a + b) % 10) for x in answers])
            rewards = found * (2.0 - found.mean())
            right.append(found.mean())
            data += [
                kpt.Datum(ids, c.token_ids, advantages=r - rewards.mean())
                for c, r in zip(group, rewards)
            ]
        result = loop.forward_backward(data, loss)
        logs = loop.optim_step()
        shares.append(float(np.mean(right)))
        print(
            f"step {step}: {shares[-1]:.0%} right, loss "
            f"{float(result.metrics['loss']):.4f}, gradient "
            f"{float(logs['grad_norm']):.3f}"
        )

"""
The results are JAX arrays, which are computed while Python goes on: reading
one waits for it.

## Several calls

Gradients add up over calls, and are divided once by what all of the data are
normalized by. Two calls with half of the data make the update of one with all.
So a step can be larger than the memory, or have data of different kinds.

## A loss of your own

`kpt.losses.FunctionLoss` makes a loss of any function of the batch and of the
policy's outputs, which becomes a part of the compiled step.
"""

from jax import numpy as jnp


def imitate_the_right(batch, outputs):
    mask = batch["completion_mask"] * (batch["advantages"] > 0)
    logps = outputs["per_token_logps"]
    count = jnp.maximum(mask.sum(), 1.0)
    return -(mask * logps).sum() / count, {"imitated": mask.sum()}


imitation = kpt.losses.FunctionLoss(imitate_the_right)

"""
## Stop and resume

`save_state` writes weights, optimizer, step and the state of random numbers.
A loop that loads it goes on as if it had not stopped; so does one that loads a
step of `kpt.callbacks.Checkpoint`.
"""

with kpt.Loop(task) as loop:
    loop.save_state(folder / "state")
    result = loop.forward_backward(data, imitation)
    loop.optim_step(learning_rate=5e-4)
    print("tokens imitated:", int(result.metrics["imitated"]))
    before = loop.log_probs(data[:1])[0]
    loop.load_state(folder / "state")
    loop.forward_backward(data, imitation)
    loop.optim_step(learning_rate=5e-4)
    after = loop.log_probs(data[:1])[0]
print("the same after resuming:", bool((before == after).all()))

folder.joinpath("results.json").write_text(json.dumps({"right": shares}))

"""
## Next

- `write_your_own_loss.py`: losses as classes, and their tests.
- `custom_train_step.py`: another step inside `fit`.
"""
