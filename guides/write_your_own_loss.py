"""
Title: A loss of your own
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: A token loss and a policy loss, by hand and in training.
Accelerator: None
"""

"""
## Introduction

A loss here is a small frozen class: its settings, and a pure function of
arrays. It sees no model and no tokenizer, so it can be called on numbers that
you have written down, and whatever you pass to `compile` is trained the same
way: in micro-batches, packed, resumed, without a change of a number.

This guide writes two losses and does both with each of them:

- a *token loss* for supervised fine-tuning, which bears with wrong answers in
  the data;
- a *policy loss* for reinforcement learning, without a clip.

It runs in about a minute on two CPU cores with a tiny model. For a real one
change one line: set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`,
or to `"hf://Qwen/Qwen3-0.6B"`.
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
import keras_hub
import numpy as np
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/write_your_own_loss"
)
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## A token loss

Most losses of supervised fine-tuning are a mean over tokens of a function of
each token's log-probability. For these there is `kpt.losses.TokenLoss`, which
wants that function and nothing else.

Ours is the
[generalised cross-entropy](https://arxiv.org/abs/1805.07836):
`(1 - p**q) / q`. Near `q = 0` it is the usual `-log p`; at `q = 1` it is
`1 - p`, whose gradient all but ignores a token that the model finds very
unlikely. That token may be a mistake in the data.
"""


@dataclasses.dataclass(frozen=True)
class RobustLoss(kpt.losses.TokenLoss):
    q: float = 0.7

    def token_loss(self, logps):
        return -jnp.expm1(self.q * logps) / self.q


"""
Called on a batch, a loss gives its value and its metrics. A batch has a row
for every sequence and a column for every token; `completion_mask` says which
tokens carry loss. Here they have the probabilities 1/4 and 1, so that the
loss is the mean of `(1 - sqrt(1/4)) / (1/2) = 1` and 0.
"""

batch = {"completion_mask": jnp.array([[0.0, 1.0, 1.0]])}
outputs = {"per_token_logps": jnp.log(jnp.array([[1.0, 0.25, 1.0]]))}
value, _ = RobustLoss(q=0.5)(batch, outputs)
print(f"RobustLoss by hand 0.5, by the class {value:.6f}")

"""
## Rows, and a tiny preset

With a real preset only the rows are needed. A prompt is three numbers, and
the answer is the larger of the first two. Two in five of the answers in our
rows are wrong.
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
## The token loss in training

First cross-entropy, then the same rows with our loss, which starts slowly
where nothing is probable yet. How probable are the right answers to prompts
that were held out? By cross-entropy the model comes to believe in the mistakes
as often as they were made; then it takes them for mistakes.
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

The losses of reinforcement learning share more: advantages, the ratio of the
policy to the one that took the samples, an optional KL term, masks. Their base
is `kpt.losses.PolicyLoss`. It wants `surrogate`, the loss of each token, and
takes the mean over all tokens of the batch; `token_weights` and `count` are
there to be changed where another mean is wanted.

Ours is
[simple policy optimisation](https://arxiv.org/abs/2401.16025): where PPO clips
the ratio, and so the gradient, it adds a penalty that grows with the square of
the ratio's distance from 1,

    -(ratio * A - |A| / (2 * epsilon) * (ratio - 1)**2)

whose best ratio is exactly `1 + epsilon` for a good token and `1 - epsilon`
for a bad one. A metric is given as what it is the mean of, and is named in
`own_metrics`; from there it finds its way into logs and files.
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
By hand again. Two completions of two tokens, one with an advantage of 1, the
other with -1. Before anything has moved all ratios are 1, and the losses -1
and 1 cancel. The derivative by a log-probability is `-A` times its weight, a
quarter. Then at the best ratios, 1.2 and 0.8, each token's derivative is 0.
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
What holds for a loss of the library can be asked of yours: the numbers of two
batches that differ in what is masked are the same.
"""

odd = {**batch, "old_per_token_logps": best.at[:, 0].set(jnp.nan)}
even = {**batch, "old_per_token_logps": best.at[:, 0].set(0.0)}
outputs = {"per_token_logps": batch["old_per_token_logps"]}
same = SPOLoss()(odd, outputs)[0] == SPOLoss()(even, outputs)[0]
print("what is masked does not matter:", bool(same))

"""
## The policy loss in training

The model that learned from the mistakes samples them too. The reward tells it
which of its samples were right. With `num_iterations=2` each rollout is used
for two updates, so that ratios leave 1 and the penalty has something to do.
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

- `custom_train_step.py`, where what changes is not the loss but the step.
- `grpo_arithmetic.py`, reinforcement learning with rewards of your own.
- The losses of the library are written like these two: read them in
  `keras_posttrain/losses/policy_gradient.py`.
"""
