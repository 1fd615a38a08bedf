"""
Title: Supervised fine-tuning with LoRA on chats
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: What is trained on, packing, callbacks, resuming, and adapters.
Accelerator: None
"""

"""
## Introduction

This guide follows one fine-tuning run with LoRA, from rows of chats to a model
that other programs load. It shows which tokens are trained on, how rows are
packed and batches are split, what the callbacks write, and how an interrupted
run is resumed.

It runs in half a minute on two CPU cores with a tiny model, and downloads
nothing. For a real model change one line: set `preset` to a KerasHub preset
such as `"qwen3_0.6b_en"`, or to `"hf://Qwen/Qwen3-0.6B"`.
"""

import importlib.util
import json
import os
import pathlib
import shutil
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sft")
shutil.rmtree(folder / "run", ignore_errors=True)  # start from scratch
keras.utils.set_random_seed(0)

"""
## Chats

A chat is a list of messages. These have two turns, and only a model that has
read the first turn can answer the second question.
"""

facts = {
    "Austria": ("Vienna", "German"),
    "Brazil": ("Brasilia", "Portuguese"),
    "Chile": ("Santiago", "Spanish"),
    "Egypt": ("Cairo", "Arabic"),
    "France": ("Paris", "French"),
    "Greece": ("Athens", "Greek"),
    "Italy": ("Rome", "Italian"),
    "Japan": ("Tokyo", "Japanese"),
    "Kenya": ("Nairobi", "Swahili"),
    "Poland": ("Warsaw", "Polish"),
}
openings = (
    "What is the capital of {}?",
    "Name the capital of {}.",
    "Which city is the capital of {}?",
    "I need the capital of {}, please.",
)
rows = [
    {
        "messages": [
            {"role": "system", "content": "Answer in a sentence."},
            {"role": "user", "content": opening.format(country)},
            {"role": "assistant", "content": f"It is {capital}."},
            {"role": "user", "content": "What do people speak there?"},
            {"role": "assistant", "content": f"They speak {language}."},
        ]
    }
    for opening in openings
    for country, (capital, language) in facts.items()
]
# The last way to ask is held out for half of the countries.
held_out, rows = rows[-5:], rows[:-5]

"""
## The preset

`tiny_preset` writes a small model with its tokenizer and chat template, as a
Hugging Face directory. With `epochs` it first trains the model on plain texts:
the model then knows the countries, but has never seen a chat.
"""

texts = [
    text.format(country, *fact)
    for country, fact in facts.items()
    for text in (
        "The capital of {0} is {1}. It is {1}. They speak {2}.",
        "People in {0} speak {2}. They speak {2} there. It is {1}.",
        "What is {1}? It is the capital of {0}.",
    )
]
preset = kpt.examples.tiny_preset(folder / "tiny", texts, epochs=60)

"""
## A task with LoRA

`lora=` freezes the model. To each linear layer `x W` of the decoder it adds
`(alpha / rank) (x A) B`, and trains only the two small matrices `A` and `B`.
`B` starts at zero, so the task starts from the model's own outputs.
"""

lora = kpt.LoRA(rank=16, alpha=32)
task = kpt.SFTTask.from_preset(preset, lora=lora, sequence_length=256)
trained = sum(int(np.prod(v.shape)) for v in task.trainable_variables)
print(f"{trained:,} of {task.count_params():,} weights are trained")

"""
`targets` selects layers by their Hugging Face names, for example
`kpt.LoRA(rank=8, targets="q_proj|v_proj")`. `dropout` and `rslora` are
available too.

## What is trained on

`prepare` shows what `fit` will see: one example for each row, with its tokens
and the weight of each token in the loss. By default the weight is 1 for the
assistant's tokens, including the token that ends its turn, and 0 for all
others. This prints the tokens of the first row, and which are trained on.
"""

examples, report = task.prepare(rows[:1])
example = examples[0]
for token, weight in zip(example.token_ids, example.completion_mask):
    text = task.tokenizer.decode([token], skip_special_tokens=False)
    print("trained" if weight else "       ", repr(text))

"""
The report counts the rows that were kept, dropped and cut. `fit` prints it as
well.
"""

print(report)

"""
`SFTTask.from_preset(..., train_on="completion")` trains on the last answer
alone, and `train_on="all"` on every token.

## Settings of a step

The `batch_size` of `fit` is the number of rows in one optimizer step. With
`micro_batch_size=1` they pass through the model one at a time, which needs
less memory. The gradient is still exactly that of the full batch, even where
rows differ in their number of tokens. Gradients with a norm above
`max_grad_norm` are scaled down.

`suggest` proposes settings for a model and its data: the learning rate, the
batch size, the sequence length, packing, and what fits into the memory. Each
comes with its reason and source. `task.compile(**settings.compile)` and
`task.fit(rows, **settings.fit)` take them.
"""

settings = task.suggest(rows)
print(settings)

"""
Here the learning rate is higher, because the model is tiny. Leave `optimizer`
out to get AdamW with a usual rate for LoRA.
"""

optimizer = keras.optimizers.AdamW(5e-3, weight_decay=0.0)
task.compile(optimizer=optimizer, micro_batch_size=1, max_grad_norm=1.0)

"""
## Train

`packing=True` fills each row of 256 tokens with several chats, which do not
attend to each other or change each other's loss. `batch_size` then counts
packed rows.

There are three callbacks. `Checkpoint` saves what is needed to resume,
`MetricsLog` writes a line for every step to `metrics.jsonl`, and Keras's
`EarlyStopping` ends the run when the loss of the held-out rows stops falling.
The run ends after three epochs, so that there is something to resume below.

On a CPU with Linux, a larger model trains faster if the script starts with
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python script.py`: large arrays then
have huge pages of memory. `fit` says so where it applies.
"""

callbacks = [
    kpt.callbacks.Checkpoint(folder / "run", every=10),
    kpt.callbacks.MetricsLog(folder / "run"),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=3),
]
task.fit(
    rows,
    batch_size=2,
    epochs=3,
    packing=True,
    validation_data=held_out,
    callbacks=callbacks,
)

"""
## Resume

To resume a run, run the same script with the same directory: after a crash,
after a `kill`, or to train for more epochs as here. A new task stands in for
the new process. It resumes at the next step with the same weights, optimizer
state, random state and order of rows.
"""

task = kpt.SFTTask.from_preset(preset, lora=lora, sequence_length=256)
optimizer = keras.optimizers.AdamW(5e-3, weight_decay=0.0)
task.compile(optimizer=optimizer, micro_batch_size=1, max_grad_norm=1.0)
callbacks = [
    kpt.callbacks.Checkpoint(folder / "run", every=10),
    kpt.callbacks.MetricsLog(folder / "run"),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=3),
]
task.fit(
    rows,
    batch_size=2,
    epochs=12,
    packing=True,
    validation_data=held_out,
    callbacks=callbacks,
)

"""
The log has one line for each step of both runs.
"""

lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
for line in (lines[0], lines[-1]):
    print(line)
steps = [json.loads(line)["step"] for line in lines]
print("steps 1 to", steps[-1], "without a gap:", steps == sorted(set(steps)))

"""
## Evaluate and chat

`evaluate` returns the loss and its metrics. With `num_samples` it also
completes rows, each from its first token with loss.
"""

scores = task.evaluate(held_out, num_samples=1, max_tokens=32)
for name, value in scores.items():
    print(name, value)

"""
`generate` takes a string, a list of messages, or a list of either.
"""

chats = [row["messages"][:2] for row in held_out]
for chat, answer in zip(chats, task.generate(chats, temperature=0)):
    print(chat[-1]["content"], "->", answer)

"""
For several turns, append each answer to the list:
"""

chat = list(held_out[0]["messages"][:2])
answer = task.generate(chat, temperature=0, max_tokens=32)
chat += [
    {"role": "assistant", "content": answer},
    {"role": "user", "content": "What do people speak there?"},
]
print(answer, task.generate(chat, temperature=0, max_tokens=32))

"""
## Save the adapter, and the model with it

`save_adapter` writes the adapter in PEFT's format. `export` writes the full
model with the adapter merged in, and leaves the task unchanged.
"""

task.save_adapter(folder / "adapter")
task.export(folder / "merged")

"""
`load_adapter` adds the adapter to another task, with its settings.
"""

reloaded = kpt.SFTTask.from_preset(preset)
reloaded.load_adapter(folder / "adapter")
print(reloaded.generate(held_out[0]["messages"][:2], temperature=0))

"""
`merge_adapter` adds the adapter to the weights in place, which makes the model
a little faster. `unmerge_adapter` restores the weights bit for bit.
"""

reloaded.merge_adapter()
print(reloaded.generate(held_out[0]["messages"][:2], temperature=0))
reloaded.unmerge_adapter()

"""
Other programs read these files. Where `peft` and `transformers` are installed,
this compares their log-probabilities with those of the task.
"""

if importlib.util.find_spec("peft") and importlib.util.find_spec("torch"):
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(preset)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter")
    ids = torch.tensor(np.array(example.token_ids))[None].long()
    with torch.no_grad():
        theirs = torch.log_softmax(model(ids).logits.float(), dim=-1)
    theirs = theirs[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    ours = task.log_probs(rows[:1])[0][1:]
    print(f"largest difference to PEFT: {np.abs(ours - theirs).max():.1e}")

"""
## Next

- `data_formats.py`: other types of rows, weights, tools, long rows.
- `custom_train_step.py`: a custom training step in the same `fit`.
"""
