"""
Title: GRPO on GSM8K
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Reinforcement learning on word problems with a checkable answer.
Accelerator: GPU
"""

"""
## Introduction

[GSM8K](https://arxiv.org/abs/2110.14168) has 7,473 word problems of
grade-school arithmetic to train on and 1,319 to test on. Each has a worked
answer that ends in `#### ` and a number. A program can check whether a model's
number is right, so the reward needs no other supervision.

As written, this guide runs offline in a minute on two CPU cores, with a tiny
model, for two steps on a few rows in the format of GSM8K. For a real run on a
GPU or TPU, change one line: set `preset` and `rows` as the section "The one
line" says.
"""

import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/grpo_gsm8k")
keras.utils.set_random_seed(0)

instruction = "\nThink step by step. End with #### and the answer."

"""
## Rows in the format of GSM8K

With the real rows this section is not needed. `<<3*4=12>>` in GSM8K's answers
is an annotation for a calculator, and is kept.
"""

tiny_rows = [
    {
        "question": f"{name} buys {a} bags with {b} {thing} each. "
        f"How many {thing} does {name} have?",
        "answer": f"{name} has {a} * {b} = <<{a}*{b}={a * b}>>{a * b} "
        f"{thing}.\n#### {a * b}",
    }
    for name, thing in (("Ann", "pens"), ("Tom", "eggs"), ("Eve", "nuts"))
    for a in range(2, 6)
    for b in range(2, 6)
]
print(tiny_rows[0])

"""
A pretrained model writes sentences. The tiny one is first trained on the
answers, or none of its samples would be right.
"""

warm_up = [
    {
        "prompt": [{"role": "user", "content": row["question"] + instruction}],
        "completion": row["answer"],
    }
    for row in tiny_rows
]
tiny = kpt.examples.tiny_preset(folder / "tiny", warm_up, epochs=10)

"""
## The one line

For a real run change the line below to this one, after
`from datasets import load_dataset`:

```python
preset, rows = "qwen3_0.6b_en", load_dataset("openai/gsm8k", "main")["train"]
```
"""

preset, rows = tiny, tiny_rows[:32]

"""
## The rewards

The answers of GSM8K can be used directly: `NumericReward` compares the last
number of the answer with the number after the last `####` of the completion,
and takes `1,000` and `1000.0` for the same number. The second reward, weighted
by a tenth, is for the format. Try rewards on made-up completions before you
pay for a run. `evaluate` counts a completion as right if its reward is 1 or
more.
"""

correct = kpt.rewards.NumericReward(extract=r"####(.*)")
ends_well = kpt.rewards.RegexReward(r"#### -?[\d,.]+$")
made_up = [
    "3 * 4 = 12\n#### 12",
    "3 * 4 = 12.0\n#### 12.0",
    "3 * 4 = 13\n#### 13",
    "#### 12, I think",
    "It is 12.",
    "",
]
answers = ["Ann has 3 * 4 = <<3*4=12>>12 pens.\n#### 12"] * len(made_up)
print("correct", correct(completions=made_up, answer=answers))
print("ends_well", ends_well(completions=made_up))

"""
## The run

This is the entire run. Prompts are chats, to which the model's own template is
applied. All other columns of a row, here `answer`, are passed to the rewards
that name them. Only the adapter is trained, so training and sampling share one
copy of the model's weights. 16 prompts are held out.
"""

prompts = [
    {
        "prompt": [{"role": "user", "content": row["question"] + instruction}],
        "answer": row["answer"],
    }
    for row in rows
]
task = kpt.GRPOTask.from_preset(preset, lora=kpt.LoRA(rank=32))
task.compile(rewards=[correct, ends_well], reward_weights=[1.0, 0.1])
callbacks = [
    kpt.callbacks.Checkpoint(folder / "run"),
    kpt.callbacks.MetricsLog(folder / "run"),
    kpt.callbacks.CompletionsLog(folder / "run", num_rows=2),
]
task.fit(prompts[16:], batch_size=8, packing=True, callbacks=callbacks)

"""
If the run is interrupted, run the script again: it resumes at the next step.

## What to look at

`metrics.jsonl` has a line for each step. `reward` should rise, and with it
`correct`. `frac_reward_zero_std` is the share of prompts whose completions all
have the same reward and so do not change the model. If it is near 1, the
problems are too hard or too easy. `completions/clipped_ratio` is the share of
completions that reached the maximum length.
"""

lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
names = ("step", "reward", "frac_reward_zero_std", "completions/clipped_ratio")
for line in lines:
    print({name: json.loads(line)[name] for name in names})

"""
`completions.jsonl` has a line for each completion. Read some of them: if a
reward can be cheated, the model will learn to cheat it.
"""

lines = (folder / "run" / "completions.jsonl").read_text().splitlines()
print(json.dumps(json.loads(lines[0]), indent=2))

"""
## Evaluate

By default `evaluate` takes the most probable answer to each prompt. With
several answers, `pass@4` is the share of prompts with at least one right
answer in four, and `maj@4` the share whose most frequent answer is right.
"""

print(task.evaluate(prompts[:16], batch_size=16)["pass@1"])
vote = task.evaluate(
    prompts[:16],
    batch_size=16,
    num_generations=4,
    answer=lambda text: text.rpartition("####")[2].strip(),
)
print({name: vote[name] for name in ("pass@1", "pass@4", "maj@4")})
task.save_adapter(folder / "adapter")

"""
## For a real run

- The defaults are common in the field: 8 completions a prompt at temperature
  1, GRPO without a KL term, and AdamW at 1e-5 with an adapter.
- To save memory, `micro_batch_size=8` in `compile` passes 8 packed rows at a
  time through the model, with the same results.
- To change the algorithm, pass another loss: `loss=kpt.losses.DAPOLoss()`.
- `max_resamples=3` replaces prompts whose completions all have the same
  reward.
- `grpo_arithmetic.py` explains the parts one by one.
"""
