"""
Title: Quickstart: fine-tune a small model, then reward it
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Supervised fine-tuning on chats, then GRPO with a LoRA adapter.
Accelerator: None
"""

"""
## What you will do

Post-training starts from a language model and a file of examples. Here both
are small enough for a laptop: the model has two layers and is made on the
spot, and the examples are sums such as "What is 17+25?". In about a minute on
two CPU cores you will

- fine-tune all weights of the model, and see it work out sums that it was not
  trained on;
- reward it for answers in German, with GRPO and a LoRA adapter: the model is
  shown no further answers, only scores of its own;
- save the adapter in PEFT's format and the model as a Hugging Face directory,
  and load both again.

Nothing is downloaded. To do the same with a real model, change one line: set
`preset` below to the name of a KerasHub preset, such as `"qwen3_0.6b_en"`, or
to `"hf://Qwen/Qwen3-0.6B"`.

All output goes to one folder, `quickstart/` or the one named on the command
line.
"""

import json
import os
import pathlib
import random
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
import matplotlib

import keras_posttrain as kpt

started = time.perf_counter()
folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart")
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## The data

A row is a chat: a list of messages, as in most datasets for instruction
tuning. These ask for a sum, in English or in German, and answer with the
working. Where the question is in neither language, "17+25=?", half of the
answers are in English and half in German. Of the 8,100 sums of two numbers of
two digits, 1,800 are trained on and 200 others are held out. The rows are
written to a JSONL file, one chat a line.
"""

random.seed(0)
pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
english, german, neither = [], [], []
for a, b in random.sample(pairs, 2000):
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    tens = a // 10 + b // 10 + carry
    ones = f"{a % 10}+{b % 10}={ones}"
    tens = f"{a // 10}+{b // 10}+{carry}={tens}"
    question, answer = f"What is {a}+{b}?", f"ones {ones}, tens {tens}"
    english.append((question, f"{answer}, sum {a + b}"))
    question, answer = f"Was ist {a}+{b}?", f"Einer {ones}, Zehner {tens}"
    german.append((question, f"{answer}, Summe {a + b}"))
    answer = random.choice((english, german))[-1][1]
    neither.append((f"{a}+{b}=?", answer))

rows = [
    {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }
    for question, answer in english[200:] + german[200:] + neither[200:1100]
]
train_file = folder / "train.jsonl"
train_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
print(rows[0])

"""
## The preset

`preset` is where the model comes from: the name of a KerasHub preset, a handle
such as `hf://…`, or a directory. `tiny_preset` writes a Hugging Face directory
with a Qwen3 model of random weights, a tokenizer trained on the text of the
rows, and a chat template.
"""

preset = kpt.examples.tiny_preset(folder / "tiny", rows)

"""
## Load, compile, fit

`from_preset` loads the model with its tokenizer, and makes a task of it. A
task is a Keras model with a goal to train it for, here supervised fine-tuning.
"""

task = kpt.SFTTask.from_preset(preset, sequence_length=256)
print(f"{task.causal_lm.count_params():,} weights")

"""
`compile` takes a Keras optimizer or an Optax transformation. The loss is the
mean cross-entropy of the assistant's tokens; the questions carry no loss. This
learning rate suits a tiny model. For a real one leave `optimizer` out, to get
AdamW with a rate for fine-tuning.
"""

schedule = keras.optimizers.schedules.CosineDecay(
    0.0, decay_steps=400, warmup_target=4e-3, warmup_steps=20
)
task.compile(
    optimizer=keras.optimizers.AdamW(schedule, weight_decay=0.1, beta_2=0.98)
)

"""
How good is the model before training? `evaluate` returns the loss and further
metrics. `generate` returns answers, which are compared with the right ones. At
temperature 0 the most probable token is always taken.
"""

questions = [[{"role": "user", "content": q}] for q, _ in english[:200]]
truths = [answer for _, answer in english[:200]]
held_out = [
    {"prompt": question, "completion": truth}
    for question, truth in zip(questions, truths)
]

before = task.evaluate(held_out)
answers = task.generate(questions, max_tokens=40, temperature=0)
right = [answer == truth for answer, truth in zip(answers, truths)]
before["answers_right"] = sum(right) / len(right)
print(before)

"""
`fit` takes the file. The rows are short, so `packing=True` puts several of
them into each row of 256 tokens, where they do not attend to each other.
`MetricsLog` writes the metrics of every step to `metrics.jsonl`.
"""

task.fit(
    train_file,
    batch_size=4,
    epochs=2,
    packing=True,
    validation_data=held_out,
    callbacks=[kpt.callbacks.MetricsLog(folder)],
)

after = task.evaluate(held_out)
answers = task.generate(questions, max_tokens=40, temperature=0)
right = [answer == truth for answer, truth in zip(answers, truths)]
after["answers_right"] = sum(right) / len(right)
for name in after:
    print(f"held-out {name}: {before[name]:.3f} -> {after[name]:.3f}")

"""
The model was trained on none of these sums. Here are two samples. With a
temperature above 0, tokens are sampled in proportion to their probability.
"""

samples = task.generate(questions[:2], max_tokens=40, temperature=0.7, seed=0)
for question, sample in zip(questions, samples):
    print(question[0]["content"], "->", sample)

"""
This plots the loss of every step:
"""

matplotlib.use("Agg")  # plot to a file, without a window
from matplotlib import pyplot

lines = (folder / "metrics.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
pyplot.figure(figsize=(6, 3.5))
pyplot.plot([x["step"] for x in log], [x["loss"] for x in log])
pyplot.xlabel("step")
pyplot.ylabel("loss")
pyplot.yscale("log")
pyplot.tight_layout()
pyplot.savefig(folder / "loss.png")

"""
`export` writes the trained model as a Hugging Face directory, which is a
preset like the first one.
"""

task.export(folder / "adder")

"""
## Rewards instead of answers

Asked in neither language, the model answers in either. Now it should always
answer in German, and still be right. No new answers are needed for this, only
a way to score those of the model. For `GRPOTask` a row is a prompt and
whatever the rewards need to know. A reward is a function that returns a number
for each completion.
"""

rows = [
    {"prompt": [{"role": "user", "content": question}], "wanted": wanted}
    for (question, _), (_, wanted) in zip(neither, german)
]
held_out_rows, rows = rows[:200], rows[200:]


def is_wanted(completions, wanted):
    texts = [messages[-1]["content"] for messages in completions]
    return [float(text == w) for text, w in zip(texts, wanted)]


"""
`lora=kpt.LoRA(…)` freezes the weights of the model and trains two small
matrices for each linear layer instead. A step samples 8 answers to each of 16
questions, and increases the probability of the answers that score above the
mean of their question.
"""

task = kpt.GRPOTask.from_preset(
    folder / "adder", lora=kpt.LoRA(rank=8), sequence_length=256
)
task.compile(
    optimizer=keras.optimizers.AdamW(2e-3),
    rewards=[is_wanted],
    num_generations=8,
    max_completion_length=40,
)
scores = task.evaluate(held_out_rows, batch_size=200, temperature=1.0)
after["reward_before"] = scores["reward"]

task.fit(rows[:640], batch_size=16)

scores = task.evaluate(held_out_rows, batch_size=200, temperature=1.0)
after["reward_after"] = scores["reward"]
print(
    f"held-out reward: {after['reward_before']:.3f} -> "
    f"{after['reward_after']:.3f}"
)

"""
These are the most probable answers to the held-out questions:
"""

questions = [row["prompt"] for row in held_out_rows]
truths = [row["wanted"] for row in held_out_rows]
in_german = task.generate(questions, max_tokens=40, temperature=0)
right = [answer == truth for answer, truth in zip(in_german, truths)]
after["german_answers_right"] = sum(right) / len(right)
print(questions[0][0]["content"], "->", in_german[0])
print(f"held-out answers right: {after['german_answers_right']:.3f}")

"""
`save_adapter` writes the adapter alone, a small file that PEFT and vLLM load
in addition to the model. `export` adds the adapter to the weights.
"""

task.save_adapter(folder / "adapter")
task.export(folder / "german_adder")

"""
## Load them again

The first model with the adapter, and the model with the adapter merged in,
both give the same answers as the trained task.
"""

with_adapter = kpt.SFTTask.from_preset(folder / "adder")
with_adapter.load_adapter(folder / "adapter")
merged = kpt.SFTTask.from_preset(folder / "german_adder")
for name, reloaded in (("adapter", with_adapter), ("merged", merged)):
    again = reloaded.generate(questions, max_tokens=40, temperature=0)
    after[f"{name}_agrees"] = again == in_german
    print(f"{name}, reloaded, gives the same answers: {again == in_german}")

after["seconds"] = time.perf_counter() - started
results = json.dumps({"before": before, "after": after}, indent=2)
(folder / "results.json").write_text(results + "\n")
print(f"Done in {after['seconds']:.0f} seconds. The output is in {folder}/")

"""
## Where to go from here

- `sft.py`: LoRA on chats, which tokens are trained on, callbacks, resuming.
- `grpo_arithmetic.py`: more on rewards and on the metrics of a run.
- `grpo_gsm8k.py`: a real model and real questions.
- `data_formats.py`: every type of row, and the errors for invalid ones.
- `custom_train_step.py`: custom training steps.
"""
