"""
Title: Prompt distillation
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Move the effect of a long system prompt into an adapter.
Accelerator: None
"""

"""
## Introduction

A long system prompt makes a model behave as it should, but is processed and
paid for with every question. *Context distillation* ([Askell et al.,
2021](https://arxiv.org/abs/2112.00861)) moves its effect into the weights. The
teacher is the model itself with the prompt. The student sees the question
alone, and is trained to answer as the teacher does.

With LoRA this needs no second model. The teacher is the model with the adapter
switched off, in the same step and without further memory. The result is an
adapter that replaces the prompt.

It runs in half a minute on two CPU cores. For a real model change one line:
set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
`"hf://Qwen/Qwen3-0.6B"`.
"""

import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/prompt_distillation"
)
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## A long prompt and its questions

The long prompt asks for the city and thanks, and the short prompt for one
word. Each question is asked in four ways. The fourth way is held out for the
last four countries.
"""

long_prompt = (
    "You are a clerk at the counter of a travel office and are asked about "
    "capitals. Whatever the guest wants to know, give the city first, and "
    "after that always thank the guest for the question."
)
short_prompt = "You fill in forms. Give one word."
capitals = {
    "Austria": "Vienna",
    "Egypt": "Cairo",
    "France": "Paris",
    "Greece": "Athens",
    "Italy": "Rome",
    "Poland": "Warsaw",
}
questions = [
    (opening.format(country), capital)
    for opening in (
        "What is the capital of {}?",
        "Name the capital of {}.",
        "Which city is the capital of {}?",
        "I need the capital of {}, please.",
    )
    for country, capital in capitals.items()
]
held_out, questions = questions[-4:], questions[:-4]
print(held_out[0])

"""
## A model that follows prompts

A model that is tuned on instructions does what the long prompt says. The tiny
one is trained for it here, on all questions with the long prompt, with the
short prompt and with none, where it answers in one word. The held-out
questions are held out from the distillation only.
"""

rows = []
for prompt, answer in (
    (long_prompt, "{}, and thank you for asking!"),
    (short_prompt, "{}"),
    (None, "{}"),
):
    system = [{"role": "system", "content": prompt}] if prompt else []
    rows += [
        {
            "messages": [
                *system,
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer.format(capital)},
            ]
        }
        for question, capital in questions + held_out
    ]

preset = kpt.examples.tiny_preset(folder / "tiny", rows, epochs=40)

"""
## With the prompt, and without

The model knows all capitals. Whether it thanks the guest depends on the
prompt.
"""

task = kpt.DistillTask.from_preset(
    preset, lora=kpt.LoRA(rank=8, alpha=16), sequence_length=128
)
asked = [[{"role": "user", "content": question}] for question, _ in held_out]
system = {"role": "system", "content": long_prompt}
prompted = task.generate(
    [[system, *chat] for chat in asked], temperature=0, max_tokens=24
)
before = task.generate(asked, temperature=0, max_tokens=24)
for (question, _), long_answer, answer in zip(held_out, prompted, before):
    print(question, "->", long_answer, "| without the prompt:", answer)

"""
## The rows

`prompt` is the question as the student sees it, and `teacher_prompt` as the
teacher sees it. Nobody has to write the answers: the model generates them with
the prompt.
"""

chats = [[{"role": "user", "content": question}] for question, _ in questions]
answers = task.generate(
    [[system, *chat] for chat in chats], temperature=0, max_tokens=24
)
rows = [
    {
        "prompt": chat,
        "teacher_prompt": [system, *chat],
        "completion": [{"role": "assistant", "content": answer}],
    }
    for chat, answer in zip(chats, answers)
]
print(rows[0])

"""
`prepare` shows the tokens of both. The student's sequence is much shorter, and
the completion is at other positions.
"""

examples, _ = task.prepare(rows[:1])
lengths = len(examples[0].token_ids), len(examples[0].teacher_ids)
print("tokens of the student and of the teacher:", lengths)

"""
## Distillation

Without `teacher=` the teacher is the student at the start of training, which
is the model with the adapter switched off. The default loss is the forward KL
divergence from the teacher's distribution at each token of the completion.

`compile(on_policy=True, ...)` trains on samples of the student instead. Then
rows need no `completion`.
"""

task.compile(optimizer=keras.optimizers.AdamW(1e-2, weight_decay=0.0))
history = task.fit(rows, batch_size=5, epochs=12, verbose=0)
divergence = history.history["divergence"]
print(f"divergence: {divergence[0]:.3f} -> {divergence[-1]:.4f}")

"""
## Without the prompt

The held-out questions are now answered as the prompt asks, without the prompt:
the capitals are right, and the guest is thanked.
"""

after = task.generate(asked, temperature=0, max_tokens=24)
for (question, _), answer in zip(held_out, after):
    print(question, "->", answer)

results = {
    name: sum(a == b for a, b in zip(given, prompted)) / len(prompted)
    for name, given in (("before", before), ("after", after))
}
results["right"] = sum(
    capital in answer for (_, capital), answer in zip(held_out, after)
) / len(after)
results["tokens"] = lengths
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
print(f"as with the prompt: {results['before']:.0%} -> {results['after']:.0%}")
print(f"tokens of a question and its answer: {lengths[1]} -> {lengths[0]}")

"""
The adapter now replaces the prompt, here and in other programs.
"""

task.save_adapter(folder / "adapter")

"""
## Next

- `distillation.py`: another model as the teacher.
- To distil several prompts into one adapter, use rows with different values of
  `teacher_prompt`, and a line in each `prompt` that selects one.
- `sft.py`: checkpoints, adapters, and how they are merged.
"""
