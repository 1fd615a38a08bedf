"""
Title: A reward model, and GRPO with it
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: The three stages of RLHF in one script.
Accelerator: None
"""

"""
## Introduction

Where nobody can write down what a good answer is, people can still say which
of two answers is better. Reinforcement learning from human feedback trains on
such comparisons in [three stages](https://arxiv.org/abs/2203.02155):

1. fine-tune a model on demonstrations;
2. train a *reward model* on pairs of answers, so that it gives the preferred
   answer the higher score;
3. sample from the fine-tuned model, score the samples with the reward model,
   and train on the scores.

DPO goes from pairs to the policy in one stage (`dpo.py`). A separate reward
model is worth its cost where it scores new samples, which are in no pair.

In this guide the answers can be checked. So it can show what is usually not
known: whether an answer with a high score is also a right one.

It runs in a minute on two CPU cores. For a real model change one line: set
`preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
`"hf://Qwen/Qwen3-0.6B"`.
"""

import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import matplotlib
import numpy as np

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/reward_model"
)
keras.utils.set_random_seed(0)

"""
## Rows

There are 360 questions, of which 60 are held out from all three stages. The
authors of the demonstrations did not agree: some added up, some repeated the
question, and some only estimated.
"""

random.seed(0)
rows = [
    {
        "prompt": f"{a} figs, {b} plums, {c} cups: how much fruit?",
        "answer": f" {a + b}",
        "repeated": f" {a} and {b}",
        "estimated": f" {a + b + random.choice([-1, 1, 2])}",
    }
    for a in range(1, 7)
    for b in range(1, 7)
    for c in range(10)
]
random.shuffle(rows)
held_out, rows = rows[:60], rows[60:]
print(rows[0])

demonstrations = [
    {"prompt": row["prompt"], "completion": row[kind]}
    for kind in ("answer", "repeated", "estimated")
    for row in rows
]

preset = kpt.examples.tiny_preset(folder / "tiny", demonstrations)

"""
## 1. Fine-tuning
"""

policy = kpt.SFTTask.from_preset(preset, sequence_length=32)
policy.compile(optimizer=keras.optimizers.AdamW(3e-3))
policy.fit(demonstrations, batch_size=60, epochs=30, verbose=0)
policy.export(folder / "policy")

prompts = [row["prompt"] for row in rows + held_out]
answers = policy.generate(prompts, max_tokens=8, num_generations=16, seed=0)
print(prompts[0], answers[0])

"""
## 2. The reward model

The pairs are two samples of the policy each. Where exactly one of the two is
right, it is the preferred one. The reward model sees nothing but these pairs.
"""

pairs = [
    {
        "prompt": row["prompt"],
        "chosen": first if first == row["answer"] else second,
        "rejected": second if first == row["answer"] else first,
    }
    for row, samples in zip(rows + held_out, answers)
    for first, second in zip(samples[::2], samples[1::2])
    if (first == row["answer"]) != (second == row["answer"])
]
unseen = {row["prompt"] for row in held_out}
held_out_pairs = [pair for pair in pairs if pair["prompt"] in unseen]
pairs = [pair for pair in pairs if pair["prompt"] not in unseen]
print(len(pairs), "pairs,", len(held_out_pairs), "held out, such as", pairs[0])

"""
`RewardTask` adds a head to the model that gives a sequence a score. Its loss
is `-log sigmoid` of the chosen completion's score minus the rejected one's. It
starts from the fine-tuned model, which already knows what answers look like.
"""

scorer = kpt.RewardTask.from_preset(folder / "policy", sequence_length=32)
scorer.compile(optimizer=keras.optimizers.AdamW(1e-3))
history = scorer.fit(
    pairs,
    batch_size=30,
    epochs=8,
    validation_data=held_out_pairs,
    verbose=0,
).history
accuracy = history["val_accuracy"]
print("held-out pairs in the right order:", [round(x, 2) for x in accuracy])

row = held_out[0]
for kind in ("answer", "repeated", "estimated"):
    (score,) = scorer.score(
        [{"prompt": row["prompt"], "completion": row[kind]}]
    )
    print(f"{row['prompt']}{row[kind]}: {score:.2f}")

"""
`save_adapter` (with `lora=`) and `export` include the head, in the formats of
other libraries. `kpt.RewardTask.from_preset` reads them back.
"""

scorer.export(folder / "reward_model")
scorer = kpt.RewardTask.from_preset(
    folder / "reward_model", sequence_length=32
)

"""
## 3. GRPO with the reward model

`kpt.rewards.ModelReward` makes a reward of a trained `RewardTask`. The true
answer is a second reward with a weight of 0: it is logged, and has no effect
on training.
"""


def right(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]


task = kpt.GRPOTask.from_preset(folder / "policy", sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(5e-4),
    loss=kpt.losses.GRPOLoss(beta=0.02),
    rewards=[kpt.rewards.ModelReward(scorer), right],
    reward_weights=[1.0, 0.0],
    num_generations=8,
    max_completion_length=8,
)

"""
A reward model is only reliable for answers like those in its pairs. A policy
that is trained for long moves away from them and finds answers that are scored
too high. `beta` holds the policy to its start. Read some samples as well, in
the file that `CompletionsLog` writes. `validation_data` is sampled and scored
after every epoch.
"""

task.fit(
    rows,
    batch_size=30,
    epochs=12,
    validation_data=held_out,
    callbacks=[
        kpt.callbacks.MetricsLog(folder),
        kpt.callbacks.CompletionsLog(folder, every=40),
    ],
    verbose=0,
)

questions = [row["prompt"] for row in held_out]
shares = []
for model in (policy, task):
    samples = model.generate(
        questions, max_tokens=8, num_generations=8, seed=1
    )
    shares.append(
        np.mean(
            [s == r["answer"] for r, g in zip(held_out, samples) for s in g]
        )
    )
before, after = map(float, shares)
print(f"held-out answers right: {before:.0%} -> {after:.0%}")

"""
## Plot the run

The plot shows the mean score of each step's samples, and the share of them
that are right. If the score rises and the share does not, the policy has found
the errors of the reward model. Then compare samples of the current policy, and
train the reward model on those pairs too.
"""

matplotlib.use("Agg")  # plot to a file, without a window
from matplotlib import pyplot

lines = (folder / "metrics.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
steps = [line["step"] for line in log]
figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.2))
panels[0].plot(range(1, len(accuracy) + 1), accuracy, "o-")
panels[0].set_title("reward model: held-out pairs in order")
panels[0].set_xlabel("epoch")
scores = [line["rewards/model/mean"] for line in log]
shares = [line["rewards/right/mean"] for line in log]
panels[1].plot(steps, scores, label="score of the reward model")
panels[1].set_title("GRPO")
panels[1].set_xlabel("step")
panels[1].set_ylabel("score")
truth = panels[1].twinx()
truth.plot(steps, shares, "C1", label="right")
truth.set_ylim(0, 1)
truth.set_ylabel("share right")
figure.legend(loc="lower right", bbox_to_anchor=(0.9, 0.2))
pyplot.tight_layout()
pyplot.savefig(folder / "rewards.png")

results = {
    "reward_model_accuracy": accuracy[-1],
    "scores": [np.mean(scores[:5]), np.mean(scores[-5:])],
    "before": before,
    "after": after,
}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Next

- `dpo.py`: trains the policy on pairs directly.
- `grpo_arithmetic.py`: rewards that check answers.
"""
