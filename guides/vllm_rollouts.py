"""
Title: Rollouts with vLLM
Author: The keras_posttrain authors
Date created: 2026/11/21
Last modified: 2026/11/26
Description: Reinforcement learning with samples from vLLM.
Accelerator: None
"""

"""
## Introduction

Reinforcement learning spends most of its time on sampling. The built-in engine
samples from the same arrays that are trained. [vLLM](https://docs.vllm.ai) has
its own copy of the weights. Use it for its kernels, or to sample in another
process. An engine is an argument of `compile`:

```python
task.compile(rewards=[correct], rollout=kpt.rollout.VLLMRollout())
```

A copy may differ from the model in training, and then training fails without
an error. So all weights are checked after they are sent to vLLM: it must give
a probe sequence the same log-probabilities as the trainer, or the run stops
with an error that shows both.

This guide needs an environment with vLLM. `make vllm` creates one, and
`.venv-vllm/bin/python guides/vllm_rollouts.py` runs the guide in it. It takes
about two minutes on two CPU cores, most of which vLLM needs to start. For a
real model change one line: set `preset` to a KerasHub preset such as
`"qwen3_0.6b_en"`, or to `"hf://Qwen/Qwen3-0.6B"`.
"""

import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/vllm_rollouts"
)
keras.utils.set_random_seed(0)

"""
## A model and its reward

A prompt is two digits. The tiny model is trained on random answers first, so
that it answers with eight digits, all equally probable. The reward is the
share of fives among them.
"""

rows = [
    {
        "prompt": f"{a}{b} ",
        "completion": "".join(random.choices("0123456789", k=8)),
    }
    for a in range(10)
    for b in range(10)
]
preset = kpt.examples.tiny_preset(folder / "tiny", rows, epochs=3)

prompts = [{"prompt": row["prompt"]} for row in rows]


def fives(completions):
    return [text.count("5") / max(len(text), 1) for text in completions]


"""
## In the trainer's process

The only new argument is `rollout`. vLLM does not read the preset's files: it
builds the model from a config derived from the task's, and gets its weights
from the task. With LoRA it is sent the adapter alone after each step, since
the base never changes. Without LoRA it is sent all weights. Where the rank is
above vLLM's limit, the adapter is merged into the weights first.
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
The engine adds metrics to those of each step: how many bytes were sent to vLLM
after it and how long that took, the largest difference on the probe sequence,
the sampling speed, and how often vLLM had to be restarted.
"""

lines = (folder / "metrics.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
for line in (log[0], log[-1]):
    print({k: v for k, v in line.items() if k.startswith("vllm/")})

"""
## As a server

On GPUs, PyTorch and JAX need different CUDA libraries, and both reserve
memory. So vLLM can run in its own environment and process: `python` is the
interpreter of that environment. The server stops when the run ends, for
whatever reason. Weights are sent through shared memory. If the server is
killed, or does not answer within `timeout` seconds, it is restarted and sent
the weights again. Its finished samples are kept, and no row is lost or trained
on twice.

Here the interpreter is that of this environment. On GPUs, further settings of
vLLM are passed in `engine_args`, such as `{"tensor_parallel_size": 4}`. To use
a server that is already running, pass its `url`.

More machines sample more: start a server on each and pass their `urls`.
Requests are spread over them; the samples of a prompt and the turns of a
conversation stay together. A server that dies costs no row, and is used again
from the next step at which it answers. The metric `vllm/replicas` counts those
in use.

The servers then read the weights from a `directory` that they share with the
trainer. If all weights are trained, `push="delta"` writes only the values that
have changed since the step before: at the learning rates of reinforcement
learning, one to ten of a hundred values of bfloat16. Each server verifies the
checksum of every tensor, and gets all weights if one differs. The price is
memory: a copy of all weights for the trainer, and one for each worker process
of a server. In this machine's memory, the default `push="full"` is faster.

A trainer of several processes uses the same arguments: each process sends its
part of the requests, and the first one starts the server, or sends the weights
to those that run. `clusters.md` says how processes are started.
"""

task.compile(
    optimizer=keras.optimizers.AdamW(3e-3),
    rewards=[fives],
    rollout=kpt.rollout.VLLMRollout(python=sys.executable, timeout=120),
    num_generations=8,
    max_completion_length=8,
)
in_server = task.fit(prompts, batch_size=10, epochs=1, verbose=0)
print("reward:", [round(x, 2) for x in in_server.history["reward"]])

"""
## Sampling while training

With `max_staleness=1` the next rollout is sampled and scored during the update
on the current one. This saves time if rewards are slow, or if vLLM has its own
device. Each token records the version of the weights that sampled it, and the
loss corrects for older versions, at most `max_staleness` steps old. The
default, `max_staleness=0`, alternates between sampling and training.
"""

overlapped = task.fit(
    prompts, batch_size=10, epochs=1, max_staleness=1, verbose=0
)
print("reward:", [round(x, 2) for x in overlapped.history["reward"]])

results = {
    "rewards": [
        *inside.history["reward"],
        *in_server.history["reward"],
        *overlapped.history["reward"],
    ],
    "sync_bytes": log[-1]["vllm/sync_bytes"],
    "probe_difference": max(x["vllm/probe_difference"] for x in log),
}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Next

- `grpo_gsm8k.py`: a real model and GSM8K; add `rollout=`.
- On TPUs, vLLM runs KerasHub's model in the trainer's process, which must be
  started with `KERAS_NNX_ENABLED=true`. This was written against the source
  code of tpu-inference and has not been run on a TPU.
"""
