"""
Title: GRPO on GSM8K
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Reinforcement learning on word problems with a checkable answer.
Accelerator: GPU
"""

"""
## Introduction

[GSM8K](https://arxiv.org/abs/2110.14168) has 7,473 word problems of
grade-school arithmetic to train on and 1,319 to test on. Each has a worked
answer that ends in `#### ` and a number. Whether a model's number is right can
be checked, and nothing else is needed: the reward is the teacher.

As it stands this guide runs offline in about two minutes on two CPU cores,
for two steps, with a tiny model and a few rows of GSM8K's shape. For the real
thing, on one GPU or TPU, change one line: set `preset` and `rows` as the
section "The one line" says.
"""

import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/grpo_gsm8k")
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

instruction = "\nThink step by step. End with #### and the answer."

"""
## Rows of GSM8K's shape, and a tiny preset

With a real preset and the real rows this section falls away. What `<<3*4=12>>`
stands for in GSM8K's answers is a calculator's note; it is kept.
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

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [row["question"] + "\n" + row["answer"] for row in tiny_rows],
    tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)
bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
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

"""
A pretrained model writes sentences; ours has to be shown some, or no sample
would ever be right.
"""

warm_up = [
    {
        "prompt": [{"role": "user", "content": row["question"] + instruction}],
        "completion": row["answer"],
    }
    for row in tiny_rows
]
task = kpt.SFTTask(causal_lm, tokenizer, sequence_length=128)
task.compile(optimizer=keras.optimizers.AdamW(3e-3))
task.fit(warm_up, batch_size=8, epochs=10, verbose=0)
task.export(folder / "tiny_qwen3")

"""
## The one line

For the real thing it is this line that you change, after
`from datasets import load_dataset`:

```python
preset, rows = "qwen3_0.6b_en", load_dataset("openai/gsm8k", "main")["train"]
```
"""

preset, rows = folder / "tiny_qwen3", tiny_rows[:32]

"""
## The rewards

GSM8K's answers can be used as they are: `NumericReward` compares the last
number of the answer with the number that the completion has after its last
`####`, so that `1,000` and `1000.0` are one number. A second reward, a tenth
as large, is for the form. Try rewards on completions that you make up, before
you pay for a run; to `evaluate` a completion is right from 1 on.
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

This is all of it. Prompts are chats, to which the model's own template is
applied. All further columns of a row, here `answer`, reach the rewards that
ask for them. The adapter is trained; the model's weights stay as they are, so
there is one copy of them for training and for sampling. 16 prompts are held
out.
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
Run it again after a crash, and it goes on with the next step.

## What to look at

`metrics.jsonl` has a line a step. `reward` shall rise, and with it `correct`;
`frac_reward_zero_std` is the share of prompts whose completions all earned the
same and taught nothing: near 1 the problems are too hard or too easy.
`completions/clipped_ratio` is the share that ran out of tokens.
"""

lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
names = ("step", "reward", "frac_reward_zero_std", "completions/clipped_ratio")
for line in lines:
    print({name: json.loads(line)[name] for name in names})

"""
`completions.jsonl` has a line a completion. Read some: a reward that can be
cheated will be.
"""

lines = (folder / "run" / "completions.jsonl").read_text().splitlines()
print(json.dumps(json.loads(lines[0]), indent=2))

"""
## Evaluate

One answer a prompt is the most probable one; of several, `pass@4` asks whether
any is right and `maj@4` whether the answer is right that most of them give.
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
## For the real thing

- The defaults are those of the field: 8 completions a prompt at temperature 1,
  GRPO without a KL term, AdamW at 1e-5 with an adapter.
- More memory: `micro_batch_size=8` in `compile` lets 8 packed rows through the
  model at once, and changes no number.
- Another algorithm is another object: `loss=kpt.losses.DAPOLoss()`.
- `max_resamples=3` replaces prompts that teach nothing by further ones.
- `grpo_arithmetic.py` goes through the parts one by one.
"""
