"""
Title: Sampling from a model in training
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Text, token ids and log-probabilities from the built-in engine.
Accelerator: None
"""

"""
## Introduction

`task.generate` completes prompts. It uses an engine that you can also use
directly, `kpt.rollout.NativeRollout`. The engine samples from the same arrays
that are being trained, returns the log-probability of every sampled token, and
keeps a fixed number of *slots* busy, so that short samples do not wait for
long ones.

The tiny model of this guide knows half of a multiplication table. The guide
samples from it, and then fine-tunes it on its own correct answers. This is
rejection sampling, the simplest kind of reinforcement learning.

It runs in half a minute on two CPU cores. For a real model change one line:
set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
`"hf://Qwen/Qwen3-0.6B"`.
"""

import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sampling")
keras.utils.set_random_seed(0)

"""
## The model

`tiny_preset` writes a small model, and with `epochs` trains it on the rows
first. Half of these rows are wrong by one, so each answer of the model is a
guess between two numbers.
"""

pairs = [(a, b) for a in range(2, 12) for b in range(2, 12)]
rows = [
    {"prompt": f"{a} x {b} =", "completion": f" {a * b + wrong}"}
    for a, b in pairs
    for wrong in (0, 1)
]

preset = kpt.examples.tiny_preset(folder / "tiny", rows, epochs=25)
task = kpt.SFTTask.from_preset(preset, sequence_length=16)

"""
## Text

A prompt returns an answer, and a list of prompts a list of answers. With
`temperature=0` the most probable token is always taken. `num_generations`
samples several answers. An answer depends on the seed, its prompt and the
weights, and not on the other prompts.
"""

print(task.generate("6 x 7 =", temperature=0))
print(task.generate(["3 x 3 =", "4 x 5 ="], num_generations=4, seed=0))

"""
`on_text` is called with new text as it is sampled, a few tokens at a time.
"""

task.generate("2 x 9 =", seed=1, on_text=lambda i, text: print(i, repr(text)))

"""
## The engine

The engine takes token ids, with settings for each request. It returns token
ids, their log-probabilities, and why each sample ended. It is attached to a
task as Keras attaches a callback, by `set_model`.
"""

engine = kpt.rollout.NativeRollout(num_slots=64)
engine.set_model(task)

tokenizer = task.tokenizer
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
The 800 samples went through 64 slots. Each prompt was computed once for its
eight samples, and when a sample ended, the next one took its slot. On a CPU
samples that decode at once also read the keys and values of their prompt
together, if it is long enough for that to pay, and if it has several cores, a
thread on each takes a share of the slots and of the prompts. These programs
were compiled for it:
"""

print("\n".join(engine.programs))

"""
A training run of 200 rollouts and more compiles the programs of all other
lengths after its second rollout, in several threads, so that no later rollout
waits for one. `NativeRollout(compile_ahead=False)` compiles each when it is
needed.

The key-value cache takes at most half of the free memory.
`NativeRollout(cache_bytes=…)` sets another limit. If the limit does not hold
all slots, fewer are used. A layer with a sliding window, as five of six in
Gemma 3, needs the memory of that window, however long the sequences are.

A prompt of more than 1,024 tokens is computed in pieces of so many, each over
the cache of those before it: the memory of the computation does not grow with
prompts, nor with how many come at once. `NativeRollout(prefill_chunk=512)`
makes the pieces shorter. The beginning of a prompt up to its last image stays
whole.

With `NativeRollout(drafts=True)` a pass of the model may compute several
tokens of a sample. The next 3 or 7 are drafted from what followed the last
ones before: in the same sequence, in the samples of its group, or in those of
earlier calls, such as those of the last epoch. Each token is still sampled
with its own random key, and the draft is kept up to the first token that
differs, so that samples are those without drafts. That is faster where a few
samples decode at once and the policy repeats itself: on a CPU more than twice
for one or two samples of a prompt that it has seen (`benchmarks/drafts.py`).
With many samples at once the engine does not draft, nor where its drafts are
refused. `engine.metrics()`, and the log of a run, have the share of drafted
tokens that were right (`rollout/draft_acceptance`) and the tokens sampled in a
pass (`rollout/tokens_per_pass`).

The log-probabilities equal those that training computes, up to float rounding.
`score` returns them for any sequence. With `top_k` it also returns the most
probable tokens at each position.
"""

sequence = [*requests[0].token_ids, *first.token_ids]
score = engine.score([sequence], top_k=2)[0]
sampled = score.per_token_logps[-len(first.token_ids) :]
print("largest difference", np.abs(sampled - first.per_token_logps).max())
print("the two best last tokens", score.top_ids[-1], score.top_logps[-1])

"""
## Train on the correct samples

Keep the samples that are correct, and fine-tune on them as on any rows. Rows
of token ids are used unchanged.
"""

right = [
    {"prompt_ids": list(request.token_ids), "completion_ids": c.token_ids}
    for (a, b), request, group in zip(pairs, requests, samples)
    for c in group
    if tokenizer.decode(c.token_ids).strip() == str(a * b)
]
print(f"{len(right) / 800:.0%} of the samples are right")
task.compile(optimizer=keras.optimizers.AdamW(3e-3))
task.fit(right, batch_size=25, epochs=10, verbose=0)

"""
The engine already samples from the new weights, so nothing is copied.
`sync_weights` only increments the version of the weights, which is recorded
with each sample.
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
