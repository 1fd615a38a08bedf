"""
Title: Sampling from the model in training
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Text, token ids and log-probabilities by the built-in engine.
Accelerator: None
"""

"""
## Introduction

`task.generate` completes prompts. Behind it is an engine that you can use
yourself, `kpt.rollout.NativeRollout`: it samples from the very arrays that are
being trained, gives the log-probability of every token it draws, and keeps a
fixed number of *slots* busy, so that short samples do not wait for long ones.

This guide teaches a tiny model half of a multiplication table, samples from
it, and lets it learn from its own right answers: rejection sampling, the
simplest kind of reinforcement.

It runs in about a minute on two CPU cores. For a real model change one line:
set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
`"hf://Qwen/Qwen3-0.6B"`.
"""

import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import numpy as np
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sampling")
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## Rows, and a tiny preset

With a real preset only the rows are needed. The model learns to answer, but
is told a wrong number half of the time: what it gives is a guess of two.
"""

pairs = [(a, b) for a in range(2, 12) for b in range(2, 12)]
rows = [
    {"prompt": f"{a} x {b} =", "completion": f" {a * b + wrong}"}
    for a, b in pairs
    for wrong in (0, 1)
]

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [row["prompt"] + row["completion"] for row in rows],
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

task = kpt.SFTTask.from_preset(preset, sequence_length=64)
task.compile(optimizer=keras.optimizers.AdamW(3e-3))
task.fit(rows, batch_size=25, epochs=40, verbose=0)

"""
## Text

One prompt gives one answer, a list gives a list. `temperature=0` takes the
most probable token always; `num_generations` draws several answers. An answer
depends on the seed, its prompt and the weights, not on the other prompts.
"""

print(task.generate("6 x 7 =", temperature=0))
print(task.generate(["3 x 3 =", "4 x 5 ="], num_generations=4, seed=0))

"""
`on_text` is told of new text as it comes, a few tokens at a time.
"""

task.generate("2 x 9 =", seed=1, on_text=lambda i, text: print(i, repr(text)))

"""
## The engine

The engine takes token ids, each request with settings of its own, and gives
token ids, their log-probabilities and why the sample ended. It is bound to a
task as Keras binds a callback, by `set_model`.
"""

engine = kpt.rollout.NativeRollout(num_slots=64)
engine.set_model(task)

requests = [
    kpt.rollout.Request(
        tokenizer.encode(f"{a} x {b} ="),
        num_generations=8,
        max_tokens=8,
        temperature=1.0,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=0,
    )
    for a, b in pairs
]
samples = engine.generate(requests, progress=True)
first = samples[0][0]
print(first.token_ids, first.per_token_logps, first.finish_reason)

"""
800 samples went through 64 slots. Each prompt was computed once for its eight
samples, and a slot whose sample had ended took the next. The programs that
were compiled for it:
"""

print("\n".join(engine.programs))

"""
The cache takes at most half of the free memory; `NativeRollout(cache_bytes=…)`
sets another limit, and fewer slots are used where it does not hold all.

The log-probabilities are those that training sees, to float rounding.
`score` gives them for any sequence, with the best tokens at each place where
`top_k` asks for them.
"""

sequence = [*requests[0].token_ids, *first.token_ids]
score = engine.score([sequence], top_k=2)[0]
drawn = score.per_token_logps[-len(first.token_ids) :]
print("largest difference", np.abs(drawn - first.per_token_logps).max())
print("the two best last tokens", score.top_ids[-1], score.top_logps[-1])

"""
## Learning from one's own right answers

Keep the samples that are right, and train on them as on any rows. Tokenised
rows are taken as they are.
"""

right = [
    {"prompt_ids": list(request.token_ids), "completion_ids": c.token_ids}
    for (a, b), request, group in zip(pairs, requests, samples)
    for c in group
    if tokenizer.decode(c.token_ids).strip() == str(a * b)
]
print(f"{len(right) / 800:.0%} of the samples are right")
task.fit(right, batch_size=25, epochs=10, verbose=0)

"""
The engine samples from the weights as they are now: there is nothing to copy.
`sync_weights` only counts, so that samples say which weights drew them.
"""

print("weights", engine.sync_weights())
again = engine.generate(requests)
share = np.mean(
    [
        tokenizer.decode(c.token_ids).strip() == str(a * b)
        for (a, b), group in zip(pairs, again)
        for c in group
    ]
)
print(f"{share:.0%} of the samples are right")
