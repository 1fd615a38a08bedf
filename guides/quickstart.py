"""
Title: Quickstart: teach a small model to add
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Fine-tune a causal language model on chats, then reward it.
Accelerator: None
"""

"""
## What you will do

Post-training starts from a language model and a file of examples. Here both
are small enough for a laptop: the model has two layers and is made on the
spot, and the examples are sums such as "What is 17 + 25?". In about two
minutes on two CPU cores you will

- fine-tune all weights of the model, and see it work out sums that it has
  never been shown;
- reward it for answers in German, with GRPO and a LoRA adapter: no answer is
  shown to it, but it is told which of its own are good;
- save the adapter in PEFT's format and the model as a Hugging Face directory,
  and load both again.

Nothing is downloaded. To do the same with a real model, change one line: set
`preset` below to the name of a KerasHub preset, such as `"qwen3_0.6b_en"`, or
to `"hf://Qwen/Qwen3-0.6B"`.

Everything that is written goes to one folder, `quickstart/` or the one that
you name on the command line.
"""

import json
import os
import pathlib
import random
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import matplotlib
import tokenizers

import keras_posttrain as kpt

started = time.perf_counter()
folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart")
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## The data

A row is a chat: a list of messages, as in most datasets for instruction
tuning. Ours ask for a sum, in English or in German, and answer with the
working. Where the question is in neither language, "17 + 25 = ?", half of the
answers are English and half are German. Of the 8,100 sums of two numbers of
two digits, 2,500 are learned from; 200 others are held out. The rows are
written to a JSONL file, one chat a line.
"""

random.seed(0)
pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
english, german, neither = [], [], []
for a, b in random.sample(pairs, 2700):
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    tens = a // 10 + b // 10 + carry
    ones = f"{a % 10} + {b % 10} = {ones}"
    tens = f"{a // 10} + {b // 10} + {carry} = {tens}"
    question, answer = f"What is {a} + {b}?", f"ones {ones}, tens {tens}"
    english.append((question, f"{answer}, sum {a + b}"))
    question, answer = f"Was ist {a} + {b}?", f"Einer {ones}, Zehner {tens}"
    german.append((question, f"{answer}, Summe {a + b}"))
    answer = random.choice((english, german))[-1][1]
    neither.append((f"{a} + {b} = ?", answer))

rows = [
    {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }
    for question, answer in english[200:] + german[200:] + neither[200:1450]
]
train_file = folder / "train.jsonl"
train_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
print(rows[0])

"""
## A small model to start from

With a real preset this section falls away. It makes what such a preset is: a
directory with weights, a tokenizer and a chat template.

The tokenizer is a byte-level BPE that is trained on our text, with the
control tokens of Qwen3. Like Qwen's own it splits numbers into digits.
"""

words = tokenizers.Regex(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
        tokenizers.pre_tokenizers.Split(words, "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        ),
    ]
)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [f"{m['role']}\n{m['content']}" for r in rows for m in r["messages"]],
    tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)
bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
bpe.add_tokens(["<think>", "</think>"])

"""
A chat template is the Jinja2 program that turns messages into text. This one
is ChatML, which the Qwen models use.
"""

chat_template = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
tokenizer = kpt.Tokenizer(
    bpe,
    {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    chat_template=chat_template,
)

"""
The model is KerasHub's Qwen3 with random weights. `export` writes it as a
directory that KerasHub, `transformers` and vLLM read.
"""

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
preset = str(folder / "tiny_qwen3")
kpt.SFTTask(causal_lm, tokenizer).export(preset)

"""
## Load, compile, fit

From here on the code is that of any model. `from_preset` takes a KerasHub
preset, a handle such as `hf://…`, or a directory.
"""

task = kpt.SFTTask.from_preset(preset, sequence_length=256)
print(f"{task.causal_lm.count_params():,} weights")

"""
`compile` takes a Keras optimizer or an Optax transformation. The loss is the
mean cross-entropy of the tokens that the assistant wrote; the question is
only read. The rate here suits a model of this size: for a real one leave
`optimizer` out, and AdamW gets a rate for fine-tuning.
"""

schedule = keras.optimizers.schedules.CosineDecay(
    0.0, decay_steps=800, warmup_target=3e-3, warmup_steps=30
)
task.compile(
    optimizer=keras.optimizers.AdamW(schedule, weight_decay=0.1, beta_2=0.98)
)

"""
How good is it before training? `evaluate` gives the loss and what comes with
it; `generate` gives answers, which we compare with the right ones. At
temperature 0 the model says what it finds most probable.
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
them into each row of 256 tokens, where they do not see each other.
`MetricsLog` writes the numbers of every step to `metrics.jsonl`.
"""

task.fit(
    train_file,
    batch_size=8,
    epochs=5,
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
None of these sums was among the rows that it was trained on. Here are two
samples; with a temperature above 0 they are drawn, not chosen.
"""

samples = task.generate(questions[:2], max_tokens=40, temperature=0.7, seed=0)
for question, sample in zip(questions, samples):
    print(question[0]["content"], "->", sample)

"""
The loss, step by step:
"""

matplotlib.use("Agg")  # draws to a file; there is no window
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
`export` writes the trained model as a Hugging Face directory, a preset like
the one that we began with.
"""

task.export(folder / "adder")

"""
## Rewards instead of answers

Asked in neither language, the model answers in either. Now it shall always use
German, and still be right. Nothing new has to be shown to it: it is enough to
say which of its answers are wanted. For `GRPOTask` a row is a prompt, and what
the rewards need to know; a reward is a function that gives each completion a
number.
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
With `lora=kpt.LoRA(…)` the model's weights are frozen, and two small matrices
beside each linear layer are trained instead. A step samples 8 answers to each
of 32 questions, and makes those that earned more than the others of their
question more probable.
"""

task = kpt.GRPOTask.from_preset(
    folder / "adder", lora=kpt.LoRA(rank=8), sequence_length=256
)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-3),
    rewards=[is_wanted],
    num_generations=8,
    max_completion_length=40,
)
earned = task.evaluate(held_out_rows, batch_size=200, temperature=1.0)
after["reward_before"] = earned["reward"]

task.fit(rows[:1280], batch_size=32)

earned = task.evaluate(held_out_rows, batch_size=200, temperature=1.0)
after["reward_after"] = earned["reward"]
print(
    f"held-out reward: {after['reward_before']:.3f} -> "
    f"{after['reward_after']:.3f}"
)

"""
The held-out questions again, and the most probable answers:
"""

questions = [row["prompt"] for row in held_out_rows]
truths = [row["wanted"] for row in held_out_rows]
translated = task.generate(questions, max_tokens=40, temperature=0)
right = [answer == truth for answer, truth in zip(translated, truths)]
after["german_answers_right"] = sum(right) / len(right)
print(questions[0][0]["content"], "->", translated[0])
print(f"held-out answers right: {after['german_answers_right']:.3f}")

"""
`save_adapter` writes the adapter alone, a small file that PEFT and vLLM load
beside the model. `export` adds it to the weights.
"""

task.save_adapter(folder / "adapter")
task.export(folder / "german_adder")

"""
## Load them again

The first model with the adapter, and the model with the adapter merged in,
both answer as the task did that was trained.
"""

with_adapter = kpt.SFTTask.from_preset(folder / "adder")
with_adapter.load_adapter(folder / "adapter")
merged = kpt.SFTTask.from_preset(folder / "german_adder")
for name, reloaded in (("adapter", with_adapter), ("merged", merged)):
    again = reloaded.generate(questions, max_tokens=40, temperature=0)
    after[f"{name}_agrees"] = again == translated
    print(f"{name} reloaded, the same answers: {again == translated}")

after["seconds"] = time.perf_counter() - started
results = json.dumps({"before": before, "after": after}, indent=2)
(folder / "results.json").write_text(results + "\n")
print(f"Done in {after['seconds']:.0f} seconds; all of it is in {folder}/")

"""
## Where to go from here

- `sft.py`: LoRA on chats, what is trained on, callbacks, and how a run goes
  on after it was stopped.
- `grpo_arithmetic.py`: more on rewards, and a picture of a run.
- `grpo_gsm8k.py`: the same for a real model and real questions.
- `data_formats.py`: every type of row, and what is said about a bad one.
- `custom_train_step.py`: a training step of your own.
"""
