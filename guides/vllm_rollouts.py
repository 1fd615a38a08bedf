"""
Title: Rollouts with vLLM
Author: The keras_posttrain authors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: Reinforcement learning whose samples come from vLLM.
Accelerator: None
"""

"""
## Introduction

Most of the time of reinforcement learning goes into sampling. The built-in
engine samples from the very arrays that are trained. [vLLM](
https://docs.vllm.ai) has a copy of them, and is for those who want its kernels
or a process of its own. An engine is an argument of `compile`:

```python
task.compile(rewards=[correct], rollout=kpt.rollout.VLLMRollout())
```

The danger of a copy is that it is another model than the one in training, and
nothing says so: learning just goes wrong. Here every set of weights that vLLM
is given is checked: it must give a probe sequence the log-probabilities that
the trainer gives it, or the run stops with both numbers.

This guide needs an environment with vLLM: `make vllm` makes one, and
`.venv-vllm/bin/python guides/vllm_rollouts.py` runs it there. It takes about
two minutes on two CPU cores, and most of that is vLLM's start. For a real
model change one line: set `preset` to a KerasHub preset such as
`"qwen3_0.6b_en"`, or to `"hf://Qwen/Qwen3-0.6B"`.
"""

import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/vllm_rollouts"
)
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## A small model and its reward

With a real preset this section falls away. Digits are words of the tokenizer,
and heads have a size that vLLM's kernels for CPUs know. vLLM is not given this
folder: it builds the model from a config that is written from the task's, and
gets its weights from the task.
"""

words = {"<|endoftext|>": 0, **{str(n): n + 1 for n in range(10)}}
digits = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0"))
digits.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = kpt.Tokenizer(digits, {"eos_token": "<|endoftext|>"})
backbone = keras_hub.models.Qwen3Backbone(
    vocabulary_size=tokenizer.vocabulary_size,
    num_layers=2,
    num_query_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    hidden_dim=64,
    intermediate_dim=128,
    tie_word_embeddings=True,
)
causal_lm = keras_hub.models.Qwen3CausalLM(backbone, preprocessor=None)
rows = [
    {
        "prompt": f"{a} {b}",
        "completion": " ".join(random.choices("0123456789", k=8)),
    }
    for a in range(10)
    for b in range(10)
]
task = kpt.SFTTask(causal_lm, tokenizer, sequence_length=16)
task.compile(optimizer=keras.optimizers.AdamW(1e-2))
task.fit(rows, batch_size=10, epochs=3, verbose=0)
preset = folder / "tiny_qwen3"
task.export(preset)

prompts = [{"prompt": row["prompt"]} for row in rows]

"""
By now it says digits, any of them alike. The reward is the share of fives in
what it says.
"""


def fives(completion_ids):
    return [ids.count(6) / max(len(ids), 1) for ids in completion_ids]


"""
## In the trainer's process

Nothing but `rollout` is new. Under LoRA vLLM is given the adapter alone: the
base never changes. Without it all weights are given after each step, and are
merged on the way where a rank is more than vLLM takes.
"""

task = kpt.GRPOTask.from_preset(
    preset, lora=kpt.LoRA(rank=8), sequence_length=16
)
task.compile(
    optimizer=keras.optimizers.AdamW(3e-3),
    rewards=[fives],
    rollout=kpt.rollout.VLLMRollout(),
    num_generations=8,
    max_completion_length=8,
)
inside = task.fit(
    prompts,
    batch_size=10,
    epochs=2,
    callbacks=[kpt.callbacks.MetricsLog(folder)],
    verbose=0,
)
print("reward:", [round(x, 2) for x in inside.history["reward"]])

"""
The engine adds numbers of its own to those of each step: how many bytes went
to vLLM after it and how long that took, how far the probe was off, how fast
vLLM drew, and how often it had to be started anew.
"""

lines = (folder / "metrics.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
for line in (log[0], log[-1]):
    print({k: v for k, v in line.items() if k.startswith("vllm/")})

"""
## As a server

PyTorch and JAX for GPUs each want CUDA libraries of their own, and both want
the memory. There vLLM has an environment and a process to itself: `python` is
that environment's interpreter, and the server ends with the run, however that
ends. Weights go through shared memory. A server that is killed, or does not
answer for `timeout` seconds, is started again and given the weights; what it
had sampled is kept, and no row is lost or trained on twice.

Here it is this environment's own interpreter. On GPUs further settings of
vLLM's are given by `engine_args`, such as `{"tensor_parallel_size": 4}`; a
server that is running already is named by `url` instead.
"""

task.compile(
    optimizer=keras.optimizers.AdamW(3e-3),
    rewards=[fives],
    rollout=kpt.rollout.VLLMRollout(python=sys.executable, timeout=120),
    num_generations=8,
    max_completion_length=8,
)
beside = task.fit(prompts, batch_size=10, epochs=1, verbose=0)
print("reward:", [round(x, 2) for x in beside.history["reward"]])

"""
## Sampling while training

With `max_staleness=1` the next rollout is sampled and judged while this one is
trained on: where a reward takes its time, or vLLM has a device of its own,
neither waits for the other. Tokens know the version of the weights that drew
them; the loss corrects for their age, which is never more than the bound.
`max_staleness=0`, the default, takes turns.
"""

ahead = task.fit(prompts, batch_size=10, epochs=1, max_staleness=1, verbose=0)
print("reward:", [round(x, 2) for x in ahead.history["reward"]])

results = {
    "rewards": [
        *inside.history["reward"],
        *beside.history["reward"],
        *ahead.history["reward"],
    ],
    "sync_bytes": log[-1]["vllm/sync_bytes"],
    "probe_difference": max(x["vllm/probe_difference"] for x in log),
}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Next

- `grpo_gsm8k.py`: a real model and GSM8K; add `rollout=`.
- On TPUs vLLM runs KerasHub's own model in the trainer's process, which has to
  be started with `KERAS_NNX_ENABLED=true`. That was written against the
  sources of tpu-inference and has not run on a TPU.
"""
