"""
Title: From a plan on a laptop to a run on a pod
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/26
Description: Ask what a step needs of a TPU pod, then run it on a mesh.
Accelerator: None
"""

"""
## Introduction

TPU pods are rented by the hour. Whether a model fits on one, and what a step
costs there, can be computed before. The compiler for TPUs runs on any machine,
and reports how much memory a program needs and what its chips send each other.
`task.plan` compiles the same step that `fit` would run.

This guide

- plans the fine-tuning of a model with 0.6 billion parameters on TPUs, without
  its weights and without a TPU;
- trains a tiny model on a mesh of eight simulated devices;
- resumes from its checkpoint on another mesh;
- samples on some of the devices while the others train;
- shows what to change for many hosts.

It runs in about a minute on two CPU cores. The plan needs the package
`libtpu`: `pip install 'keras_posttrain[plan]'`. To train a real model change
one line: set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, or to
`"hf://Qwen/Qwen3-0.6B"`.
"""

import json
import os
import pathlib
import shutil
import sys

os.environ["KERAS_BACKEND"] = "jax"
# Simulates eight devices on one CPU. It must be set before JAX is imported.
# Leave it out on a host with GPUs or TPUs.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import keras
import numpy as np

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tpu_pods")
shutil.rmtree(folder / "run", ignore_errors=True)  # start from scratch
keras.utils.set_random_seed(0)

"""
## A plan

A plan needs shapes, but no weights. Inside `shapes_only` a task is made in a
second and takes no memory, whatever the size of its model. It can be loaded
from any preset, and here from a Hugging Face `config.json` with the sizes of
Qwen3 0.6B.
"""

shapes = folder / "qwen3_0.6b"
shapes.mkdir(parents=True, exist_ok=True)
config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
(shapes / "config.json").write_text(json.dumps(config))

with kpt.distribution.shapes_only():
    big = kpt.SFTTask.from_preset(
        shapes, load_weights=False, dtype="bfloat16", sequence_length=2048
    )
big.compile(keras.optimizers.AdamW(1e-5))

"""
This plan is for four v5e chips, with all weights trained and eight rows of
2,048 tokens a step. The default layout is FSDP: every weight, its float32
master copy and its optimizer state are split over all chips, and gathered
layer by layer.
"""

plan = big.plan("v5e:2x2", batch_size=8, remat="full")
print(plan)

"""
The first part is the memory of a chip: what stays there between steps, and
what a step needs in addition. Next is the work, and which share of it the
usual formula attributes to the model. The rest is attention, and what
`remat="full"` computes twice. The plan lists what each choice of `remat` would
keep and compute again. For LoRA on Llama-3-8B and sixteen v5p chips with a row
of 4,096 tokens each, a chip needs 5.0 GiB with `"full"`, 7.5 with
`"selective"`, 15.4 with `"attention"` and 56.8 with `"none"`, and computes
193, 182, 146 and 146 TFLOP. Then follows what a chip receives from the
others, compared with the minimum for this layout: each weight gathered twice,
its gradient scattered once. The program may send less. The last part estimates
the time of a step from the chip's published rates, as a lower bound.

Only models of one and of two layers were compiled. All layers are equal, so
the values for 28 layers follow from these two; `exact=True` compiles all of
them. For the 32 layers of Llama-3-8B both ways gave the same FLOPs and bytes
sent to 0.3 %, and the same memory to 0.6 % as long as memory was not short.
The compiler first places arrays with gaps (`plan.set_aside`), and without gaps
only where the chip is too small. There the exact value was 5 % higher on 16
chips of v5e, and 8 % lower for Gemma-2-9B. A plan that needs this asks for
`exact=True`.

A plan assumes rows of full length. `packing` and `share_prefix` have the same
meaning as in `fit`, for tasks whose rows they change.

A step that does not fit is not an error. The plan says by how much it exceeds
the memory, and what to change:

```python
plan = big.plan("v5e:2x2", batch_size=32, remat="none")
plan.fits, plan.advice
```

## Which layout?

`kpt.distribution.search` tries layouts, micro-batches and rematerialisation,
and sorts them by whether they fit and by estimated time. A layout is a
function that returns a distribution of devices. Each plan takes a minute or
two on two cores, and seconds the next time: what the compiler says is stored.

```python
both = functools.partial(kpt.distribution.fsdp_tensor_parallel, model=2)
print(
    kpt.distribution.search(
        big,
        "v5e:4x4",
        strategies=[kpt.distribution.fsdp, both],
        micro_batch_sizes=[None, 16],
        batch_size=32,
    )
)
```

With a model axis several devices share the work of a layer on the same rows.
The tokens between its products are split over them, and so is what a layer
keeps. By the plan, LoRA of Llama-3-70B on 64 v6e chips with a model axis of 4
needs 13.1 GiB a chip with `remat="full"`. It is faster with
`remat="selective"` (21.4 GiB), where attention's inputs are not gathered a
second time.

## Rows that one device cannot hold

Each device has whole rows of a batch, so that the longest row decides what
activations take. With `context`, several devices split the tokens of a row:

```python
pieces = functools.partial(kpt.distribution.fsdp, context=8)
print(big.plan("v5e:2x4", pieces, sequence_length=32_768, batch_size=1))
```

A device computes the attention of its own tokens to the keys and values of the
full row, which it gathers in every layer; everything else it computes of its
tokens alone. Packed rows, sliding windows and shared prompts give the numbers
of one device. Weights are split over all devices as before, and the engine
samples as before. Batches then have a multiple of `devices / context` rows,
not of `devices`. The devices of a row may be some of one host or all of
several, which then read the same rows. A model with recurrent layers, such as
Qwen 3.5, and rows with images are refused.

By the TPU compiler a step of Llama-3.1-8B on a row of 131,072 tokens, all
weights trained with `remat="full"`, takes 25.7 GiB of a v5p chip's 95.7 GiB on
eight chips with `context=8`. Keys, values and their gradients are half of the
bytes that a chip receives, and the step's time is that of its operations.
"""

rows = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
    for a in range(10)
    for b in range(10)
]
preset = kpt.examples.tiny_preset(folder / "tiny", rows)

"""
## Training on a mesh

One line before the model is made selects the distribution. The rest is the
same script as for one device. Each device reads its own part of the preset's
weights and gets its own rows of a batch, and the losses equal those of one
device. If the rows of a batch do not divide evenly, padding rows are added.
They have no effect on the results.
"""

keras.distribution.set_distribution(kpt.distribution.fsdp())

task = kpt.SFTTask.from_preset(preset, sequence_length=16)
task.compile(keras.optimizers.AdamW(3e-3))
task.fit(
    rows,
    batch_size=20,
    epochs=20,
    callbacks=[kpt.callbacks.Checkpoint(folder / "run")],
    verbose=0,
)
kernel = task.trainable_variables[1].value
print(kernel.shape, "of which each device holds",
      kernel.addressable_shards[0].data.shape)  # fmt: skip

"""
## Resuming on another mesh

A checkpoint does not depend on the mesh: a run can be resumed on more or fewer
chips, or with another layout. Here the rest of the run splits each layer over
two devices, and the rows over four.
"""

keras.distribution.set_distribution(
    kpt.distribution.fsdp_tensor_parallel(data=4, model=2)
)

task = kpt.SFTTask.from_preset(preset, sequence_length=16)
task.compile(keras.optimizers.AdamW(3e-3))
history = task.fit(
    rows,
    batch_size=20,
    epochs=60,
    callbacks=[kpt.callbacks.Checkpoint(folder / "run")],
    verbose=0,
)
answers = task.generate(
    [row["prompt"] for row in rows], max_tokens=4, temperature=0.0
)
right = np.mean([a == r["completion"] for a, r in zip(answers, rows)])
print(f"step {task.step}, loss {history.history['loss'][-1]:.4f}, "
      f"right {right:.0%}")  # fmt: skip
task.export(folder / "model")
(folder / "results.json").write_text(
    json.dumps(
        {
            "fits": plan.fits,
            "needed_gib": plan.needed / 2**30,
            "step": task.step,
            "right": float(right),
        }
    )
)

"""
## Sampling on devices of its own

In reinforcement learning, training and sampling can share all devices and take
turns, which is the default. Or each has devices of its own and works at the
same time: `kpt.distribution.split` divides them, and the engine gets its own
distribution. A layout that splits heads suits sampling, FSDP suits training.
After each rollout the new weights are copied from device to device.

With `max_staleness=1` a rollout is sampled while the one before it is trained
on, from weights that are one rollout old; the loss corrects for that. Divide
the devices so that both halves take about as long: `time/wait` in the logs is
what the trainer waits for samples.
"""

trainer, sampler = kpt.distribution.split(trainer=4, sampler=4)
keras.distribution.set_distribution(kpt.distribution.fsdp(devices=trainer))

policy = kpt.GRPOTask.from_preset(folder / "model", sequence_length=16)
policy.compile(
    keras.optimizers.AdamW(1e-3),
    rewards=[kpt.rewards.ExactMatchReward()],
    num_generations=4,
    max_completion_length=4,
    rollout=kpt.rollout.NativeRollout(
        distribution=kpt.distribution.tensor_parallel(2, devices=sampler)
    ),
)
prompts = [{"prompt": r["prompt"], "answer": r["completion"]} for r in rows]
history = policy.fit(prompts[:40], batch_size=10, max_staleness=1, verbose=0)
print("age of the weights that sampled, in rollouts:",
      history.history["staleness/max"])  # fmt: skip

"""
## Many hosts

A pod has many hosts, and each runs the same script. One line at the top of the
script connects them. On a TPU pod it needs no arguments:

```python
keras.distribution.initialize()
keras.distribution.set_distribution(kpt.distribution.fsdp())
```

Elsewhere, pass the address of the first process, the number of processes, and
the index of this one:

```python
keras.distribution.initialize(
    job_addresses="10.0.0.1:8476", num_processes=2, process_id=0
)
```

All hosts read the same rows. Each builds the rows of its own devices, scores
the samples of its share of the prompts, and reads and writes its part of a
checkpoint, in a folder that all hosts can access. The first host writes logs
and exports. If a host fails, the others report it and exit. Run the same
script on all hosts again to resume from the last checkpoint. The page
[clusters](clusters.md) has the commands for Slurm, GKE and TPU VMs.

With [Pathways](https://github.com/AI-Hypercomputer/pathways-utils) one process
controls all chips. Add these two lines before JAX is used:

```python
import pathwaysutils
pathwaysutils.initialize()
```

## Several slices

Several TPU slices train one model with `kpt.distribution.hybrid()`. Weights
are split over the chips of a slice and replicated over slices, so that between
slices only gradients are sent, once per step. A plan for four slices, each a
full v5e pod, counts what goes over both networks:

```python
plan = big.plan("v5e:16x16 x 4", batch_size=2048, remat="full")
plan.collective_bytes, plan.dcn_bytes, plan.seconds
```

## Before you start a run on a pod

- Call `task.plan` with the settings of the run. Does it fit, and do the chips
  send about as much as the minimum for the layout?
- Use `dtype="bfloat16"`. It halves the memory of the weights and the bytes
  that are sent. Master weights and the optimizer's state stay in float32.
- Choose what layers keep for the backward pass: `remat="auto"` takes the most
  that a chip holds. For long rows use `remat="full"`, and `micro_batch_size`
  if one row on each chip is still too much.
- Choose `every=` of `kpt.callbacks.Checkpoint` so that you can afford to lose
  the steps since the last checkpoint.
"""
