"""
Title: Teaching a preference with DPO
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Which of two answers is better, from pairs, without sampling.
Accelerator: None
"""

"""
## Introduction

Fine-tuning makes a model say what its rows say, all of it. A preference only
tells which of two answers is the better one: that is easier to ask people for,
and it also says what *not* to answer.

[Direct preference optimisation](https://arxiv.org/abs/2305.18290) learns from
such pairs offline: nothing is sampled, and there is no reward model. It
compares how much more probable than before training the chosen completion has
become with how much more the rejected one has. "Before training" is the
*reference*, a frozen copy of the policy.

Here two people have answered the questions that a tiny model is fine-tuned
on. One of them adds up; the other repeats the question, so that the model does
that half of the time, too. Then it is told which answers are preferred.

It runs in about a minute on two CPU cores. For a real model change one line:
set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
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
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/dpo")
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## Rows

There are 360 questions; 60 are held out from all training. A row for
fine-tuning has a prompt and a completion. A pair has a `prompt`, a `chosen`
and a `rejected` completion; each may be a list of messages instead.
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
## First what an answer looks like, by fine-tuning

A preference makes one of two answers more probable than the other. Both should
be answers that the model gives: so it is fine-tuned on them first.
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
## Then the preference

`DPOTask` makes the reference by itself: with an adapter (`lora=kpt.LoRA(…)`)
it is the model with the adapter off and costs no memory; else, as here, a copy
of the weights; or another model, `reference=preset`. `beta` says how strongly
the policy is held to it: the smaller, the further it goes. A real model wants
a far smaller learning rate, which is what `optimizer` is by default.
"""

task = kpt.DPOTask.from_preset(folder / "both_ways", sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-4),
    loss=kpt.losses.DPOLoss(beta=0.3),
)

"""
`batch_size` counts pairs. The loss starts at log 2 = 0.693, where the policy
is its reference. `rewards/accuracies` is the share of pairs whose chosen
completion has gained more than the rejected one, and `rewards/margins` by how
much.
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
## The run in a picture

Look at `logps/chosen` too. The loss only sees differences: margins can grow
while *both* completions lose probability to something that nobody asked for.
Then a larger `beta`, a smaller learning rate or a term of fine-tuning helps:
`SumLoss([DPOLoss(), ChosenSFTLoss()])`.
"""

matplotlib.use("Agg")  # draws to a file; there is no window
from matplotlib import pyplot

lines = (folder / "metrics.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
steps = [line["step"] for line in log]
epoch_ends = range(0, steps[-1] + 1, steps[-1] // 8)
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

Three settings change what a step costs and not what it does:

- `share_prefix=True` computes the prompt of a pair once, and both completions
  go on from it. It saves most where prompts are long.
- `packing=True` puts several pairs into a row, so that there is less padding.
- `reference_cache=` keeps the reference's log-probabilities in a directory.
  They are computed once; from then on, in this run and in any later one with
  this reference, no step runs the reference, and no memory holds it.
"""

ways = {
    "as they are": {},
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
## Another loss is another object

`IPOLoss`, `APOZeroLoss`, `SPPOHardLoss` and more compare with the reference.
`SimPOLoss` and `ORPOLoss` need none: SimPO compares the mean log-probabilities
of the completions' tokens. Where there are no pairs but single completions
that are good or bad, `KTOLoss` takes rows with `label`.
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
## Next

- `reward_model.py`: a model of what is preferred, and GRPO against it.
- `grpo_arithmetic.py`: where answers can be checked, nobody has to prefer.
"""
