"""
Title: From estimates to answers with GRPO
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Reinforcement learning with rewards of your own, on a laptop.
Accelerator: None
"""

"""
## Introduction

Fine-tuning shows a model what to say. Reinforcement learning only tells it how
good that was which it said: wherever an answer is easier to check than to
write down, that is enough.

[GRPO](https://arxiv.org/abs/2402.03300) samples several completions of each
prompt, has rewards judge them, and makes those that earned more than the
others of their group more probable. Here a tiny model is first taught, by
fine-tuning, what an answer looks like; it estimates how much fruit there is
and is right about one time in seven. Then GRPO makes it count, in questions
that it has never been shown as well.

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
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/grpo_arithmetic"
)
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## Prompts and estimates

A prompt for GRPO is a row with a `prompt`; all its other columns are kept for
the rewards. There are 360 questions for the sum of two numbers, with a third
one that does not count. 60 of them are held out: no step of this guide trains
on them. The most frequent answer of all, 7, is right for 17 % of them.
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
The rows for fine-tuning look right, but come from somebody who estimates: the
numbers are too large by anything from 0 to 6.
"""

estimates = [
    {
        "prompt": row["prompt"],
        "completion": f" {row['answer'] + random.randint(0, 6)}",
    }
    for row in random.choices(prompts, k=9000)
]
print(estimates[0])

"""
## A small model to start from

With a real preset this section falls away. Its tokenizer keeps numbers whole.
"""

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [row["prompt"] + row["completion"] for row in estimates],
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
## First the format, by fine-tuning

Reinforcement learning can only make more probable what is sampled at times.
So we show the model what an answer looks like.
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

A reward is a function. It is called once for all completions of a step, by
keywords, with those of `prompts`, `completions` and the columns of your rows
that it names, and gives a number for each completion, or `None` for one that
it does not judge. Whether the number is right is a reward of our own:
"""


def correct(completions, answer):
    return [float(c.strip() == str(a)) for c, a in zip(completions, answer)]


print(correct(completions=[" 12", " 13", "12!"], answer=[12, 12, 12]))

"""
That an answer is a number and no more is one that is ready to be used. Others
in `kpt.rewards` compare numbers and formulas, look at lengths, or ask a judge.
"""

is_number = kpt.rewards.RegexReward(r" \d+", full=True)
print(is_number(completions=[" 12", " 13", "12!"]))

"""
## Then the answers, by GRPO

`compile` takes the rewards and what they weigh, and `loss=` one of the
policy-gradient losses of `kpt.losses`; by default it is GRPO's. A learning
rate for a real model is far smaller, and is what `optimizer` is by default.
"""

task = kpt.GRPOTask.from_preset(folder / "estimator", sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-3),
    rewards=[correct, is_number],
    reward_weights=[1.0, 0.1],
    num_generations=8,
    max_completion_length=4,
)

"""
`evaluate` samples and judges. `pass@1` is the share of completions that earned
1 or more, here those with the right number. With one completion a prompt it
takes the most probable one.
"""

before = task.evaluate(held_out, batch_size=60)
sampled = task.evaluate(held_out, batch_size=60, temperature=1.0)
print(f"held-out right: {before['pass@1']:.0%}")
print(f"of samples: {sampled['pass@1']:.0%}")

"""
One step takes 30 prompts, samples 8 completions of each, judges these 240, and
makes one update. `validation_data` is evaluated after every epoch, and
`CompletionsLog` writes down what was sampled; with `num_rows` it also shows
some.
"""

history = task.fit(
    prompts,
    batch_size=30,
    epochs=32,
    validation_data=held_out,
    callbacks=[
        kpt.callbacks.MetricsLog(folder),
        kpt.callbacks.CompletionsLog(folder, every=100),
    ],
)

after = task.evaluate(held_out, batch_size=60)
samples = task.evaluate(held_out, batch_size=60, temperature=1.0)
print(f"held-out right: {before['pass@1']:.0%} -> {after['pass@1']:.0%}")
print(f"of samples: {sampled['pass@1']:.0%} -> {samples['pass@1']:.0%}")
print(task.generate(questions, temperature=0))

"""
## The run in a picture

The reward of each step, and the accuracy on questions never trained on.
"""

matplotlib.use("Agg")  # draws to a file; there is no window
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
Other numbers of a step say whether it goes well: `entropy` falls as the model
makes up its mind, and `frac_reward_zero_std`, the share of prompts that taught
nothing because all completions earned the same, rises in the end.
"""

names = ("step", "reward", "entropy", "frac_reward_zero_std")
for line in log[:: len(log) // 5]:
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
- `write_your_own_loss.py`: a policy loss of your own.
- Another algorithm is another object: `loss=kpt.losses.DrGRPOLoss()`,
  `GSPOLoss()`, or `ReinforceLoss()`, which is RLOO here.
"""
