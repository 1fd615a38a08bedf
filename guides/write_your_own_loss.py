"""
Title: Custom losses
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Write a token loss and a policy loss, check them, train with them.
Accelerator: None
"""

"""
## Introduction

A loss is a small frozen class: its settings, and a pure function of arrays. It
sees no model and no tokenizer, so it can be called on numbers that you write
down. Any loss passed to `compile` works with micro-batches, packing and
resuming, which do not change its values.

This guide writes two losses. It checks each by hand and then trains with it:

- a *token loss* for supervised fine-tuning that tolerates wrong answers in the
  data;
- a *policy loss* for reinforcement learning, without clipping.

It runs in a minute on two CPU cores with a tiny model. For a real one change
one line: set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
`"hf://Qwen/Qwen3-0.6B"`.
"""

import dataclasses
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/write_your_own_loss"
)
keras.utils.set_random_seed(0)

"""
## A token loss

Most losses of supervised fine-tuning are a mean over tokens of a function of
each token's log-probability. Their base class is `kpt.losses.TokenLoss`, and
only this function has to be written.

This one is
[generalised cross-entropy](https://arxiv.org/abs/1805.07836):
`(1 - p**q) / q`. Near `q = 0` it is the usual `-log p`. At `q = 1` it is
`1 - p`, whose gradient nearly vanishes for a token that the model finds very
unlikely, such as a mistake in the data.
"""


@dataclasses.dataclass(frozen=True)
class RobustLoss(kpt.losses.TokenLoss):
    q: float = 0.7

    def token_loss(self, logps):
        return -jnp.expm1(self.q * logps) / self.q


"""
Called on a batch and the outputs of the model, a loss returns its value and
its metrics. A batch has a row for every sequence and a column for every token.
`completion_mask` says which tokens carry loss. Here they have the
probabilities 1/4 and 1, so that the loss is the mean of `(1 - sqrt(1/4)) /
(1/2) = 1` and 0.
"""

batch = {"completion_mask": jnp.array([[0.0, 1.0, 1.0]])}
outputs = {"per_token_logps": jnp.log(jnp.array([[1.0, 0.25, 1.0]]))}
value, _ = RobustLoss(q=0.5)(batch, outputs)
print(f"RobustLoss by hand 0.5, by the class {value:.6f}")

"""
## Rows

A prompt is three numbers, and the answer is the larger of the first two. Two
in five of the rows' answers are `0` or `5` instead, and mostly wrong.
"""

random.seed(0)
prompts = [
    {"prompt": f"{a} {b} {c} ->", "answer": str(max(a, b))}
    for a in range(10)
    for b in range(10)
    for c in range(10)
]
random.shuffle(prompts)
held_out, prompts = prompts[:200], prompts[200:]
rows = [
    {
        "prompt": p["prompt"],
        "completion": " " + random.choice([p["answer"]] * 3 + [*"05"]),
    }
    for p in prompts
]
print(rows[0])

preset = kpt.examples.tiny_preset(folder / "tiny", rows)

"""
## The token loss in training

The model is first trained with cross-entropy, and then on the same rows with
`RobustLoss`, which would start slowly from a model that finds nothing
probable. How probable are the right answers to held-out prompts? With
cross-entropy the model gives mistakes the probability that they have in the
rows. With `RobustLoss` it learns to ignore them.
"""

right = [
    {"prompt": p["prompt"], "completion": " " + p["answer"]} for p in held_out
]
task = kpt.SFTTask.from_preset(preset, sequence_length=32)
for loss, epochs in ((kpt.losses.SFTLoss(), 12), (RobustLoss(), 6)):
    task.compile(optimizer=keras.optimizers.AdamW(2e-3), loss=loss)
    task.fit(rows, batch_size=32, epochs=epochs, verbose=0)
    # The last two tokens are the answer and the end.
    probabilities = [np.exp(x[-2:].sum()) for x in task.log_probs(right, 50)]
    name, share = type(loss).__name__, np.mean(probabilities)
    print(f"{name}: right answers have a probability of {share:.0%}")
    task.export(folder / name)

"""
## A policy loss

The losses of reinforcement learning have more in common: advantages, the ratio
of the policy to the one that sampled, an optional KL term, and masks. Their
base class is `kpt.losses.PolicyLoss`. Only `surrogate` has to be written, the
loss of each token. The mean is taken over all tokens of the batch; override
`token_weights` and `count` for another mean.

This one is
[simple policy optimisation](https://arxiv.org/abs/2401.16025). PPO clips the
ratio, and thereby its gradient. This loss adds a penalty instead, which grows
with the square of the ratio's distance from 1,

    -(ratio * A - |A| / (2 * epsilon) * (ratio - 1)**2)

and is lowest at a ratio of exactly `1 + epsilon` for a token with a positive
advantage, and `1 - epsilon` for one with a negative advantage. `mean_metric`
reports a mean over tokens as a metric, and `own_metrics` names it, so that it
appears in logs and files.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SPOLoss(kpt.losses.PolicyLoss):
    epsilon: float = 0.2

    own_metrics = ("ratio_distance",)

    def surrogate(self, tokens, log_ratios):
        distance = jnp.expm1(log_ratios)
        penalty = jnp.abs(tokens.advantages) / (2 * self.epsilon) * distance**2
        losses = penalty - jnp.exp(log_ratios) * tokens.advantages
        metric = tokens.mean_metric(jnp.abs(distance))
        return losses, {"ratio_distance": metric}


"""
Again, check it by hand. There are two completions of two tokens, one with an
advantage of 1, the other of -1. Before any update all ratios are 1, and the
losses -1 and 1 cancel. The derivative with respect to a log-probability is
`-A` times its weight, a quarter. At the optimal ratios, 1.2 and 0.8, the
derivative of each token is 0.
"""

batch = {
    "segment_ids": jnp.array([[1, 1, 1], [1, 1, 1]]),
    "sequence_mask": jnp.ones((2, 1)),
    "completion_mask": jnp.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
    "advantages": jnp.array([[1.0], [-1.0]]),
    "old_per_token_logps": jnp.log(jnp.full((2, 3), 0.5)),
}
slope = jax.grad(
    lambda logps: SPOLoss(epsilon=0.2)(batch, {"per_token_logps": logps})[0]
)
value, metrics = SPOLoss(epsilon=0.2)(
    batch, {"per_token_logps": batch["old_per_token_logps"]}
)
print(f"SPOLoss on-policy {value:.6f}", metrics["ratio_distance"])
print("its slopes", slope(batch["old_per_token_logps"]).tolist())
best = batch["old_per_token_logps"] + jnp.log(jnp.array([[1.2], [0.8]]))
print("at the best ratios", float(jnp.abs(slope(best)).max()))

"""
Test your loss as those of the library are tested. For example, values at
masked tokens must not change the loss:
"""

odd = {**batch, "old_per_token_logps": best.at[:, 0].set(jnp.nan)}
even = {**batch, "old_per_token_logps": best.at[:, 0].set(0.0)}
outputs = {"per_token_logps": batch["old_per_token_logps"]}
same = SPOLoss()(odd, outputs)[0] == SPOLoss()(even, outputs)[0]
print("what is masked does not matter:", bool(same))

"""
## The policy loss in training

The model that was trained with cross-entropy samples the mistakes too. The
reward says which samples are right. With `num_iterations=2` each rollout is
used for two updates, so that ratios differ from 1 and the penalty takes
effect.
"""

task = kpt.GRPOTask.from_preset(folder / "SFTLoss", sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-3),
    loss=SPOLoss(epsilon=0.2),
    rewards=[kpt.rewards.ExactMatchReward()],
    num_generations=8,
    max_completion_length=4,
    num_iterations=2,
)
before = task.evaluate(held_out, 200, temperature=1.0)["reward"]
history = task.fit(prompts, batch_size=32, verbose=0)
after = task.evaluate(held_out, 200, temperature=1.0)["reward"]
print(f"held-out samples right: {before:.0%} -> {after:.0%}")
print(f"ratio_distance {history.history['ratio_distance'][-1]:.4f}")

"""
## Next

- `custom_train_step.py`: custom training steps.
- `grpo_arithmetic.py`: reinforcement learning with custom rewards.
- The losses of the library are written like these two: read
  `keras_posttrain/losses/policy_gradient.py`.
"""
