"""
Title: A reward model, and GRPO against it
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: The three stages of RLHF in one script.
Accelerator: None
"""

"""
## Introduction

Where nobody can write down what a good answer is, people can still say which
of two answers is the better one. Reinforcement learning from human feedback
learns from that in [three stages](https://arxiv.org/abs/2203.02155):

1. fine-tune a model on demonstrations;
2. train a *reward model* on pairs of its answers, so that it gives the
   preferred one the higher score;
3. let the first model sample, the second one judge, and learn from that.

DPO goes from pairs to the policy at once (`dpo.py`). A reward model is worth
its own training where it is to judge what is sampled later, answers that are
in no pair.

Here the answers can be checked after all, so that this guide can show what is
hidden in life: whether what the reward model likes is what was meant.

It runs in about two minutes on two CPU cores. For a real model change one
line: set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
`"hf://Qwen/Qwen3-0.6B"`.
"""

import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import matplotlib
import numpy as np
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/reward_model"
)
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## Rows

360 questions, of which 60 are held out from all three stages. Those who wrote
the demonstrations did not agree: some added up, some repeated the question,
and some only estimated.
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

"""
## A small model to start from

With a real preset this section falls away.
"""

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [row["prompt"] + row["completion"] for row in demonstrations],
    tokenizers.trainers.BpeTrainer(
        vocab_size=400,
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

The pairs are the policy's own samples, two by two; where just one of them is
right, somebody preferred it. That is all that the reward model is told.
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
`RewardTask` puts a head on the model that gives a sequence a number, and its
loss is `-log sigmoid` of the chosen's score less the rejected's. It starts
from the fine-tuned model, which knows something of answers.
"""

judge = kpt.RewardTask.from_preset(folder / "policy", sequence_length=32)
judge.compile(optimizer=keras.optimizers.AdamW(1e-3))
history = judge.fit(
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
    (score,) = judge.score(
        [{"prompt": row["prompt"], "completion": row[kind]}]
    )
    print(f"{row['prompt']}{row[kind]}: {score:.2f}")

"""
`save_adapter` (with `lora=`) and `export` keep the head, in the formats that
others read: `kpt.RewardTask.from_preset` reads them back.
"""

judge.export(folder / "judge")
judge = kpt.RewardTask.from_preset(folder / "judge", sequence_length=32)

"""
## 3. GRPO against it

A trained `RewardTask` is a reward: `kpt.rewards.ModelReward(judge)`. Beside it
stands the truth, with a weight of 0: it is written down and teaches nothing.
"""


def right(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]


task = kpt.GRPOTask.from_preset(folder / "policy", sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(5e-4),
    loss=kpt.losses.GRPOLoss(beta=0.02),
    rewards=[kpt.rewards.ModelReward(judge), right],
    reward_weights=[1.0, 0.0],
    num_generations=8,
    max_completion_length=8,
)

"""
A reward model is only right about what is like its pairs, and a policy that
is trained for long finds what is not. `beta` holds the policy to where it
began; and what is sampled ought to be read at times, as `CompletionsLog` lets
you. `validation_data` is sampled and judged after every epoch.
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
## The run in a picture

The score of each step's samples, and the share of them that is right. Where
the score goes on rising and the truth does not, the policy has found where the
reward model is wrong: it is time to compare samples of the policy as it is
now, and to train the reward model on those, too.
"""

matplotlib.use("Agg")  # draws to a file; there is no window
from matplotlib import pyplot

lines = (folder / "metrics.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
steps = [line["step"] for line in log]
figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.2))
panels[0].plot(range(1, 9), accuracy, "o-")
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

- `dpo.py`: from the same pairs to the policy at once.
- `grpo_arithmetic.py`: rewards that check answers.
"""
