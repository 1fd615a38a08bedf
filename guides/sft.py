"""
Title: Supervised fine-tuning with LoRA on chats
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: What is trained on, packing, callbacks, resuming, and adapters.
Accelerator: None
"""

"""
## Introduction

This guide follows one fine-tuning run with LoRA from the rows to a model that
other programs load. It shows which tokens are trained on, how rows are packed
and batches are cut, what the callbacks write, and how a run goes on after it
was stopped.

It runs in about a minute on two CPU cores, with a tiny model of its own and
nothing to download. For a real model change one line: set `preset` to a
KerasHub preset such as `"qwen3_0.6b_en"`, or to `"hf://Qwen/Qwen3-0.6B"`.
"""

import importlib.util
import json
import os
import pathlib
import shutil
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import numpy as np
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sft")
shutil.rmtree(folder / "run", ignore_errors=True)  # begin anew
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## Chats

A chat is a list of messages. These have two turns, and the second question
can only be answered by who has read the first.
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
# The last way to ask is held out for some countries.
held_out, rows = rows[-5:], rows[:-5]

"""
## A tiny preset

With a real preset leave this section out. It trains a tokenizer and a small
Qwen3 model on a few sentences, the rows of which are plain text, and writes
them as a Hugging Face directory. The model then knows the words, but has
never seen a chat.
"""

texts = [
    {"text": text.format(country, *fact)}
    for country, fact in facts.items()
    for text in (
        "The capital of {0} is {1}. It is {1}. They speak {2}.",
        "They speak {2} in {0}. They speak {2} there. It is {1}.",
        "What is {1}? It is the capital of {0}.",
    )
]

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [row["text"] for row in texts]
    + [message["content"] for row in rows for message in row["messages"]],
    tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    ),
)
tokenizer = kpt.Tokenizer(
    bpe,
    {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    chat_template="""\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
)
backbone = keras_hub.models.Qwen3Backbone(
    vocabulary_size=tokenizer.vocabulary_size,
    num_layers=2,
    num_query_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    hidden_dim=64,
    intermediate_dim=256,
    tie_word_embeddings=True,
)
causal_lm = keras_hub.models.Qwen3CausalLM(backbone, preprocessor=None)
base = kpt.SFTTask(causal_lm, tokenizer, sequence_length=64)
base.compile(optimizer=keras.optimizers.AdamW(3e-3))
base.fit(texts, batch_size=10, epochs=150, verbose=0)
preset = folder / "tiny_qwen3"
base.export(preset)

"""
## A task with LoRA

`lora=` freezes the model and adds to each linear layer `x W` of the decoder
the product `(alpha / rank) (x A) B` of two small matrices, which are all that
is trained. `B` begins at zero, so that the task begins as the model it was
given.
"""

lora = kpt.LoRA(rank=16, alpha=32)
task = kpt.SFTTask.from_preset(preset, lora=lora, sequence_length=256)
trained = sum(int(np.prod(v.shape)) for v in task.trainable_variables)
print(f"{trained:,} of {task.count_params():,} weights are trained")

"""
`targets` chooses layers by their Hugging Face names, for example
`kpt.LoRA(rank=8, targets="q_proj|v_proj")`; `dropout` and `rslora` are there
too.

## What is trained on

`prepare` shows what `fit` will see: one example for each row, with the tokens
and the weight of each in the loss. By default the weight is 1 for what the
assistant wrote, the token that ends its turn included, and 0 for the rest.
Printed below are the tokens, and which of them are trained on.
"""

examples, report = task.prepare(rows[:1])
example = examples[0]
for token, weight in zip(example.token_ids, example.completion_mask):
    text = task.tokenizer.decode([token], skip_special_tokens=False)
    print("trained" if weight else "       ", repr(text))

"""
The report counts what became of the rows; `fit` prints it as well.
"""

print(report)

"""
`SFTTask.from_preset(..., train_on="completion")` would train on the last
answer alone, and `train_on="all"` on every token.

## Settings of the step

`batch_size` of `fit` is the rows of one optimizer step. With
`micro_batch_size=1` they pass through the model one at a time, which needs
less memory; the gradient is that of the whole batch, however many tokens each
part has. Gradients with a norm over `max_grad_norm` are scaled down.

The learning rate is high since the model is tiny; leave `optimizer` out to get
AdamW with a usual rate for LoRA.
"""

optimizer = keras.optimizers.AdamW(5e-3, weight_decay=0.0)
task.compile(optimizer=optimizer, micro_batch_size=1, max_grad_norm=1.0)

"""
## Train

`packing=True` fills each row of 256 tokens with several chats, which neither
see each other nor change each other's loss. `batch_size` counts the packed
rows then.

Three callbacks are at work. `Checkpoint` saves what is needed to go on,
`MetricsLog` writes a line for every step to `metrics.jsonl`, and Keras's
`EarlyStopping` ends the run when the loss of the held-out rows stops falling.
To have something to resume below, we stop after three epochs.
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

A run is resumed by running the same script with the same directory: after a
crash, a `kill`, or to train for more epochs as here. A new task stands for the
new process. It goes on with the next step, with the same weights, optimizer
state, random state and order of rows as if nothing had happened.
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
The log has one line for each step of both parts.
"""

lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
for line in (lines[0], lines[-1]):
    print(line)
steps = [json.loads(line)["step"] for line in lines]
print("steps 1 to", steps[-1], "without a gap:", steps == sorted(set(steps)))

"""
## Evaluate and chat

`evaluate` gives the loss and its metrics. With `num_samples` it also completes
rows, each from where its first token with loss stands.
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
Several turns are a list that grows:
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

`save_adapter` writes the adapter in PEFT's format. `export` writes the whole
model with the adapter merged in; the task itself stays as it is.
"""

task.save_adapter(folder / "adapter")
task.export(folder / "merged")

"""
A new task takes the adapter, its settings included.
"""

reloaded = kpt.SFTTask.from_preset(preset)
reloaded.load_adapter(folder / "adapter")
print(reloaded.generate(held_out[0]["messages"][:2], temperature=0))

"""
`merge_adapter` adds the adapter to the weights in place, for a model that is
a little faster; `unmerge_adapter` restores the weights bit for bit.
"""

reloaded.merge_adapter()
print(reloaded.generate(held_out[0]["messages"][:2], temperature=0))
reloaded.unmerge_adapter()

"""
Other programs read these files. Where `peft` and `transformers` are installed,
this compares their log-probabilities with ours.
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

- `data_formats.py`: rows that are no chats, weights, tools, long rows.
- `custom_train_step.py`: a training step of your own in the same `fit`.
"""
