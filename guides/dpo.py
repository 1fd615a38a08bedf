"""
Title: Preference tuning with DPO
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Train on pairs of a chosen and a rejected completion.
Accelerator: None
"""

"""
## Introduction

Fine-tuning increases the probability of every completion in the rows. A
preference only says which of two completions is better. That is easier to ask
people for, and it also says what the model should *not* answer.

[Direct preference optimisation](https://arxiv.org/abs/2305.18290) (DPO) trains
on such pairs offline, without sampling and without a reward model. For each
pair it compares how much the log-probability of the chosen completion has
grown since the start of training with how much that of the rejected one has.
The model at the start of training is the *reference*, a frozen copy of the
policy.

Here two people have answered the questions that a tiny model is fine-tuned on.
One of them adds up, and the other repeats the question, so that the model does
either half of the time. Then the model is trained on which answers are
preferred.

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

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/dpo")
keras.utils.set_random_seed(0)

"""
## Rows

There are 360 questions, of which 60 are held out from all training. A pair has
a `prompt`, a `chosen` and a `rejected` completion. A row for fine-tuning has a
`prompt` and a `completion`. Each may be a list of messages instead of a
string.
"""

random.seed(0)
questions = [
    (f"{a} figs, {b} plums, {c} cups: how much fruit?", a, b)
    for a in range(1, 7)
    for b in range(1, 7)
    for c in range(10)
]
random.shuffle(questions)
pairs = [
    {"prompt": q, "chosen": f" {a + b}", "rejected": f" {a} and {b}"}
    for q, a, b in questions
]
held_out, pairs = pairs[:60], pairs[60:]
print(pairs[0])

demonstrations = [
    {"prompt": pair["prompt"], "completion": pair[side]}
    for side in ("chosen", "rejected")
    for pair in pairs
]

preset = kpt.examples.tiny_preset(folder / "tiny", demonstrations)

"""
## Fine-tune on both answers

A preference makes one of two completions more probable than the other. The
model should give both to begin with, so it is fine-tuned on both first.
"""

task = kpt.SFTTask.from_preset(preset, sequence_length=32)
task.compile(optimizer=keras.optimizers.AdamW(3e-3))
task.fit(demonstrations, batch_size=60, epochs=40, verbose=0)
task.export(folder / "both_ways")

prompts = [pair["prompt"] for pair in held_out]
answers = task.generate(prompts, max_tokens=8, seed=0)
before = sum(a == p["chosen"] for a, p in zip(answers, held_out)) / 60
for pair, answer in list(zip(held_out, answers))[:4]:
    print(pair["prompt"], answer)
print(f"held-out questions with the preferred answer: {before:.0%}")

"""
## Train on the preference

`DPOTask` makes the reference itself. With an adapter (`lora=kpt.LoRA(…)`) it
is the model with the adapter switched off, which takes no memory. Without one,
as here, it is a copy of the weights. `reference=` names another model instead.
`beta` sets how strongly the policy is held to the reference: a smaller value
lets it move further. A real model needs a far smaller learning rate, such as
the default of `optimizer`.
"""

task = kpt.DPOTask.from_preset(folder / "both_ways", sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-4),
    loss=kpt.losses.DPOLoss(beta=0.3),
)

"""
`batch_size` counts pairs. The loss starts at log 2 = 0.693, because the policy
equals its reference. `rewards/accuracies` is the share of pairs in which the
chosen completion has gained more than the rejected one, and `rewards/margins`
is the mean difference of the gains, times `beta`.
"""

start = task.evaluate(held_out)
print({k: round(v, 3) for k, v in start.items()})
history = task.fit(
    pairs,
    batch_size=30,
    epochs=8,
    validation_data=held_out,
    callbacks=[kpt.callbacks.MetricsLog(folder)],
    verbose=0,
).history
for name in ("loss", "rewards/accuracies", "rewards/margins"):
    print(name, [round(x, 2) for x in history[f"val_{name}"]])

answers = task.generate(prompts, max_tokens=8, seed=0)
after = sum(a == p["chosen"] for a, p in zip(answers, held_out)) / 60
for pair, answer in list(zip(held_out, answers))[:4]:
    print(pair["prompt"], answer)
print(f"held-out preferred answers: {before:.0%} -> {after:.0%}")

"""
## Plot the run

Look at `logps/chosen` too. The loss only sees differences, so margins can grow
while *both* completions lose probability to an answer that is in no pair. If
that happens, use a larger `beta`, a smaller learning rate, or add a
fine-tuning term: `SumLoss([DPOLoss(), ChosenSFTLoss()])`.
"""

matplotlib.use("Agg")  # plot to a file, without a window
from matplotlib import pyplot

lines = (folder / "metrics.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
steps = [line["step"] for line in log]
epoch_ends = range(0, steps[-1] + 1, steps[-1] // len(history["val_loss"]))
figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.2))
for panel, name in zip(panels, ("accuracies", "margins")):
    name = f"rewards/{name}"
    panel.plot(steps, [line[name] for line in log], alpha=0.5, label="trained")
    held = [start[name], *history[f"val_{name}"]]
    panel.plot(epoch_ends, held, "o-", label="held out")
    panel.set_title(name)
for name in ("logps/chosen", "logps/rejected"):
    held = [start[name], *history[f"val_{name}"]]
    panels[2].plot(epoch_ends, held, "o-", label=f"held out, {name[6:]}")
panels[2].set_title("log-probabilities")
for panel in panels:
    panel.set_xlabel("step")
    panel.legend()
pyplot.tight_layout()
pyplot.savefig(folder / "preference.png")

results = {
    "before": before,
    "after": after,
    "accuracy": history["val_rewards/accuracies"][-1],
    "margins": history["val_rewards/margins"],
    "logps_chosen": [start["logps/chosen"], history["val_logps/chosen"][-1]],
}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## The same result for less

Three settings reduce the cost of a step and do not change its result:

- `share_prefix=True` computes the prompt of a pair once for both completions.
  It saves most where prompts are long.
- `packing=True` puts several pairs into a row, so that there is less padding.
- `reference_cache=` stores the reference's log-probabilities in a directory.
  They are computed once. After that, neither this run nor a later one with the
  same reference runs the reference or holds it in memory.
"""

ways = {
    "padded": {},
    "shared and packed": {"share_prefix": True, "packing": 128},
}
for name, way in ways.items():
    task = kpt.DPOTask.from_preset(folder / "both_ways", sequence_length=32)
    task.compile(
        optimizer=keras.optimizers.SGD(0.1),
        reference_cache=folder / "reference" if way else None,
    )
    logs = task.fit(
        pairs, batch_size=30, validation_data=held_out, verbose=0, **way
    ).history
    tokens, loss = logs["num_tokens"][-1], logs["val_loss"][-1]
    print(f"{name}: {tokens:.0f} tokens a step, held-out loss {loss:.6f}")

"""
## Other losses

To change the algorithm, pass another loss. `IPOLoss`, `APOZeroLoss`,
`SPPOHardLoss` and others compare with the reference. `SimPOLoss` and
`ORPOLoss` need no reference: SimPO compares the mean log-probabilities of the
completions' tokens. For single completions with a `label` instead of pairs
there is `KTOLoss`.
"""

task = kpt.DPOTask.from_preset(folder / "both_ways", sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-4), loss=kpt.losses.SimPOLoss()
)
task.fit(pairs, batch_size=30, epochs=4, share_prefix=True, verbose=0)
answers = task.generate(prompts, max_tokens=8, seed=0)
after = sum(a == p["chosen"] for a, p in zip(answers, held_out)) / 60
print(f"by SimPO: {before:.0%} -> {after:.0%}")

"""
## The next stage on the same model

`from_task` makes a task on the model of another one, so that stages follow
each other in one script without a file in between. Here they are SFT, DPO and
GRPO. The second stage trains the adapter of the first further. The third puts
an adapter of its own on top of it (`adapter="merge"` would add the earlier one
to the weights instead). What the last task saves is the work of all of them:
`save_adapter` writes both adapters as one.
"""

sft = kpt.SFTTask.from_preset(
    folder / "both_ways", lora=kpt.LoRA(rank=8), sequence_length=32
)
sft.compile(optimizer=keras.optimizers.AdamW(1e-3))
sft.fit(demonstrations, batch_size=60, epochs=2, verbose=0)

dpo = kpt.DPOTask.from_task(sft)
dpo.compile(optimizer=keras.optimizers.AdamW(1e-3))
dpo.fit(pairs, batch_size=30, epochs=2, verbose=0)


def preferred(completions, chosen, **columns):
    return [float(c == wanted) for c, wanted in zip(completions, chosen)]


grpo = kpt.GRPOTask.from_task(dpo, lora=kpt.LoRA(rank=4))
grpo.compile(
    optimizer=keras.optimizers.AdamW(1e-3),
    rewards=[preferred],
    num_generations=4,
    max_completion_length=8,
)
grpo.fit(pairs, batch_size=30, epochs=2, verbose=0)
answers = grpo.generate(prompts, max_tokens=8, seed=0)
after = sum(a == p["chosen"] for a, p in zip(answers, held_out)) / 60
print(f"by SFT, DPO and GRPO: {before:.0%} -> {after:.0%}")

grpo.save_adapter(folder / "adapter")
again = kpt.SFTTask.from_preset(folder / "both_ways", sequence_length=32)
again.load_adapter(folder / "adapter")
print("reloaded:", again.generate(prompts[:2], max_tokens=8, temperature=0))

"""
## Next

- `reward_model.py`: a reward model trained on pairs, and GRPO with it.
- `grpo_arithmetic.py`: rewards for answers that can be checked.
"""
