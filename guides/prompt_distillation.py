"""
Title: A prompt's behaviour, without the prompt
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: What a long prompt does is moved into an adapter.
Accelerator: None
"""

"""
## Introduction

A long system prompt makes a model behave as it should, and is read and paid
for with every question. *Context distillation*
([Askell et al., 2021](https://arxiv.org/abs/2112.00861)) moves what it does
into the weights: the teacher is the model itself, which reads the prompt; the
student reads the question alone, and learns to answer as if it had.

With LoRA this needs no second model. The teacher is the model with the adapter
off, in the same step and at no memory, and what comes out is an adapter in
place of the prompt.

It runs in about two minutes on two CPU cores. For a real model change one
line: set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
`"hf://Qwen/Qwen3-0.6B"`.
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

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/prompt_distillation"
)
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## A long prompt and its questions

The long prompt asks for the city and thanks, the short one for a word.
Of the questions, asked in four ways, the fourth is held out where it is about
one of the last four countries.
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

With a real preset leave this section out: a model that is tuned to follow
instructions does what the long prompt says. The tiny one is taught to here,
for all questions: with the long prompt, with the short one, and with none,
where it answers in a word. Held out is only what is distilled.
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

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [message["content"] for row in rows for message in row["messages"]],
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
base = kpt.SFTTask(causal_lm, tokenizer, sequence_length=128)
base.compile(optimizer=keras.optimizers.AdamW(3e-3))
base.fit(rows, batch_size=12, epochs=100, verbose=0)
preset = folder / "tiny_qwen3"
base.export(preset)

"""
## With the prompt, and without

The model knows all capitals. Whether it thanks the guest is up to the prompt.
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

A row has the question as the student reads it, `prompt`, and as the teacher
does, `teacher_prompt`. Nobody has to write the answers: the model gives them
itself, with the prompt.
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
`prepare` shows both sides. The student reads much less, and the completion,
which is taught, stands at other places.
"""

examples, _ = task.prepare(rows[:1])
lengths = len(examples[0].token_ids), len(examples[0].teacher_ids)
print("tokens of the student and of the teacher:", lengths)

"""
## Distil

There is no `teacher=`: it is the student when training began, that is, with
the adapter off. The loss is the default, the forward KL divergence from the
distribution that the teacher has at each token of the completion.

A run on the student's own samples is `compile(on_policy=True, ...)`. Its rows
need no `completion`.
"""

task.compile(optimizer=keras.optimizers.AdamW(1e-2, weight_decay=0.0))
history = task.fit(rows, batch_size=5, epochs=12, verbose=0)
divergence = history.history["divergence"]
print(f"divergence: {divergence[0]:.3f} -> {divergence[-1]:.4f}")

"""
## Without the prompt

The held-out questions are answered as the prompt asks, though nobody has
shown it: the capitals are right, and so are the manners.
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
The adapter stands for the prompt now, here and in other programs.
"""

task.save_adapter(folder / "adapter")

"""
## Next

- `distillation.py`: another model as the teacher.
- Several prompts at once are rows with several `teacher_prompt`s: a line of
  the user's, say, then chooses between them.
- `sft.py`: checkpoints, adapters, and how they are merged.
"""
