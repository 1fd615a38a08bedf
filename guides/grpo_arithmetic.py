"""
Title: From estimates to answers with GRPO
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/24
Description: Reinforcement learning with custom rewards, on a laptop.
Accelerator: None
"""

"""
## Introduction

Fine-tuning shows a model what to answer. Reinforcement learning only scores
the answers that the model gives. That is enough wherever an answer is easier
to check than to write.

[GRPO](https://arxiv.org/abs/2402.03300) samples several completions of each
prompt, scores them with rewards, and increases the probability of those that
score above the mean of their group. Here a tiny model is first fine-tuned on
estimates of how much fruit there is, so that it answers in the right format
and is right about one time in seven. Then GRPO trains it to count, and it is
evaluated on questions that it was never trained on.

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

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/grpo_arithmetic"
)
keras.utils.set_random_seed(0)

"""
## Prompts and estimates

A row for GRPO has a `prompt`. All its other columns are passed to the rewards.
There are 360 questions about the sum of two numbers, each with a third number
that does not count. 60 of them are held out: no step of this guide trains on
them. The most frequent answer, 7, is right for 17% of them.
"""

random.seed(0)
prompts = [
    {
        "prompt": f"{a} figs, {b} plums, {c} cups: how much fruit?",
        "answer": a + b,
    }
    for a in range(1, 7)
    for b in range(1, 7)
    for c in range(10)
]
random.shuffle(prompts)
held_out, prompts = prompts[:60], prompts[60:]
print(prompts[0])

"""
The rows for fine-tuning have the right format, but their answers are only
estimates: each is too large by 0 to 6.
"""

estimates = [
    {
        "prompt": row["prompt"],
        "completion": f" {row['answer'] + random.randint(0, 6)}",
    }
    for row in random.choices(prompts, k=9000)
]
print(estimates[0])

preset = kpt.examples.tiny_preset(folder / "tiny", estimates)

"""
## Fine-tune for the format

Reinforcement learning can only increase the probability of answers that are
sampled at least sometimes. So the model is first shown what an answer looks
like.
"""

task = kpt.SFTTask.from_preset(preset, sequence_length=32)
task.compile(optimizer=keras.optimizers.AdamW(3e-3))
task.fit(estimates, batch_size=50, verbose=0)
questions = [row["prompt"] for row in held_out[:3]]
for question, answers in zip(
    questions, task.generate(questions, num_generations=6, seed=0)
):
    print(question, answers)

task.export(folder / "estimator")

"""
## Rewards

A reward is a function. It is called once for all completions of a step, with
keyword arguments: `prompts`, `completions`, and the columns of your rows, each
if the function names it. It returns a number for each completion, or `None`
for one that it does not score. A custom reward checks the number:
"""


def correct(completions, answer):
    return [float(c.strip() == str(a)) for c, a in zip(completions, answer)]


print(correct(completions=[" 12", " 13", "12!"], answer=[12, 12, 12]))

"""
The rewards in `kpt.rewards` compare numbers and formulas, limit lengths, or
ask another model. This one checks that an answer is a number and nothing else:
"""

is_number = kpt.rewards.RegexReward(r" \d+", full=True)
print(is_number(completions=[" 12", " 13", "12!"]))

"""
## Train with GRPO

`compile` takes the rewards and their weights. `loss=` takes one of the
policy-gradient losses of `kpt.losses`; the default is that of GRPO. A real
model needs a far smaller learning rate, such as the default of `optimizer`.
"""

task = kpt.GRPOTask.from_preset(folder / "estimator", sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(2e-3),
    rewards=[correct, is_number],
    reward_weights=[1.0, 0.1],
    num_generations=8,
    max_completion_length=4,
)

"""
`evaluate` samples completions and scores them. `pass@1` is the share of
completions with a reward of at least 1, here those with the right number. By
default it takes the most probable completion of each prompt.
"""

before = task.evaluate(held_out, batch_size=60)
sampled = task.evaluate(held_out, batch_size=60, temperature=1.0)
print(f"held-out right: {before['pass@1']:.0%}")
print(f"of samples: {sampled['pass@1']:.0%}")

"""
One step takes 30 prompts, samples 8 completions of each, scores these 240 and
makes one update. `validation_data` is evaluated after every epoch.
`CompletionsLog` writes the completions to a file; with `num_rows` it also
prints some. `Report` writes a page, `report.html`, every 30 seconds. Open it
in a browser while the run lives: it shows what may be wrong and what to try,
curves of all metrics, completions with the log-probability and the advantage
of each token, and where the time goes. It needs no server and no network.
"""

history = task.fit(
    prompts,
    batch_size=30,
    epochs=10,
    validation_data=held_out,
    callbacks=[
        kpt.callbacks.MetricsLog(folder),
        kpt.callbacks.CompletionsLog(folder, every=50),
        kpt.callbacks.Report(folder),
    ],
)

after = task.evaluate(held_out, batch_size=60)
samples = task.evaluate(held_out, batch_size=60, temperature=1.0)
print(f"held-out right: {before['pass@1']:.0%} -> {after['pass@1']:.0%}")
print(f"of samples: {sampled['pass@1']:.0%} -> {samples['pass@1']:.0%}")
print(task.generate(questions, temperature=0))

"""
## Plot the run

`kpt.report(["runs/a", "runs/b"], "both.html")` lays the curves of several runs
over each other. For figures of your own there is `metrics.jsonl`. This plot
shows the reward of each step, and the accuracy on held-out questions.
"""

matplotlib.use("Agg")  # plot to a file, without a window
from matplotlib import pyplot

lines = (folder / "metrics.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
steps = [line["step"] for line in log]
held_out_right = [before["pass@1"], *history.history["val_pass@1"]]
epoch_ends = [
    i * steps[-1] / (len(held_out_right) - 1)
    for i in range(len(held_out_right))
]
pyplot.figure(figsize=(6, 3.5))
pyplot.plot(steps, [line["reward"] for line in log], label="reward")
pyplot.plot(epoch_ends, held_out_right, "o-", label="held-out questions right")
pyplot.xlabel("step")
pyplot.ylim(0, 1.15)
pyplot.legend()
pyplot.tight_layout()
pyplot.savefig(folder / "reward.png")

"""
Two other metrics show whether a run goes well. `entropy` falls as the model
becomes certain. `frac_reward_zero_std` is the share of prompts whose
completions all have the same reward, so that they do not change the model. It
rises towards the end.
"""

names = ("step", "reward", "entropy", "frac_reward_zero_std")
for line in log[:: max(1, len(log) // 5)]:
    print({name: round(line[name], 3) for name in names})

results = {
    "before": before["pass@1"],
    "before_sampled": sampled["pass@1"],
    "after": after["pass@1"],
    "after_sampled": samples["pass@1"],
}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Next

- `grpo_gsm8k.py`: the same for a real model and GSM8K.
- `write_your_own_loss.py`: a custom policy loss.
- To change the algorithm, pass another loss: `loss=kpt.losses.DrGRPOLoss()`,
  `GSPOLoss()`, or `ReinforceLoss()`, which here is RLOO.
"""
