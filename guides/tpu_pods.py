"""
Title: From a plan on a laptop to a run on a pod
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Ask what a step needs of a TPU pod, then run it on a mesh.
Accelerator: None
"""

"""
## Introduction

A pod is rented by the hour. Whether a model fits it, and what a step will
cost there, can be known before: the compiler for TPUs runs on any machine, and
it says how much memory a program takes and what its chips send each other.
`task.plan` gives it the very step that `fit` would run.

This guide

- plans the fine-tuning of a model of 0.6 billion parameters on TPUs, without
  weights and without a TPU;
- trains a tiny model on a mesh of eight devices, which are simulated here;
- goes on from its checkpoint on another mesh;
- says what to change for many hosts.

It runs in about two minutes on two CPU cores. The plan needs the package
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
# Eight devices out of one CPU, to be set before JAX is imported. On a host
# with GPUs or TPUs leave it out.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import keras
import keras_hub
import numpy as np
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tpu_pods")
shutil.rmtree(folder / "run", ignore_errors=True)  # begin anew
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## A plan

A plan needs shapes, and no numbers. Inside `shapes_only` a task is made in a
second and takes no memory, whatever the size of its model. A preset's name
would do; here it is a Hugging Face `config.json`, with the sizes of
Qwen3 0.6B.
"""

shapes = folder / "qwen3_0.6b"
shapes.mkdir(exist_ok=True)
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
Four v5e chips, all weights trained, eight rows of 2,048 tokens a step. The
layout is FSDP unless another is named: every weight, its float32 master and
its optimizer state are split over all chips, and gathered layer by layer.
"""

plan = big.plan("v5e:2x2", batch_size=8, remat="full")
print(plan)

"""
The first part is the memory of a chip: what lies there from step to step, and
what a step needs beside it. Then comes the work, and how much of it is the
model's own by the usual formula; the rest is what `remat="full"` does twice,
and attention. Then what a chip receives from the others, beside what this
layout sends by the book: each weight gathered twice, its gradient scattered
once. The program may send less. The last part is an estimate: the time that
the chip's published rates allow at best.

Only one and two layers were compiled. Layers are alike, so that all numbers of
28 lie on a line through both; `exact=True` compiles them all. For the 32
layers of Llama-3-8B, FLOPs and what is sent were the same then to 0.3 %, and
memory to 0.6 %, as long as it was not short. A compiler packs arrays loosely
first (`plan.set_aside`); where the chip is too small for that it packs them
closely: on 16 chips of v5e all layers came to 5 % more, those of Gemma-2-9B to
8 % less. A plan that needs such packing asks for `exact=True`.

Rows are as long as they may be. `packing` and `share_prefix` are those of
`fit`, for tasks whose rows they change.

A step that does not fit is no error. Its plan says by how much, and what to
change:

```python
plan = big.plan("v5e:2x2", batch_size=32, remat="none")
plan.fits, plan.advice
```

## Which layout?

`kpt.distribution.search` tries layouts, micro-batches and rematerialisation,
and puts first what fits and is fastest by the estimate. A layout is a function
that makes a distribution of devices. Each plan takes a minute or two on two
cores.

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
"""

"""
## Rows, and a tiny preset

With a real preset only the rows are needed.
"""

rows = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
    for a in range(10)
    for b in range(10)
]

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [row["prompt"] + row["completion"] for row in rows],
    tokenizers.trainers.BpeTrainer(
        vocab_size=304,
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
## On a mesh

One line comes before the model is made. All that follows is the script of one
device: the weights of the preset are read straight into their parts, each row
of a batch goes to one of the devices, and the losses are those of one device.
Batches that the devices do not share evenly are filled up with rows of
padding, which change nothing.
"""

keras.distribution.set_distribution(kpt.distribution.fsdp())

task = kpt.SFTTask.from_preset(preset, sequence_length=16)
task.compile(keras.optimizers.AdamW(3e-3))
task.fit(
    rows,
    batch_size=20,
    epochs=50,
    callbacks=[kpt.callbacks.Checkpoint(folder / "run")],
    verbose=0,
)
kernel = task.trainable_variables[1].value
print(kernel.shape, "of which a device holds",
      kernel.addressable_shards[0].data.shape)  # fmt: skip

"""
## On another mesh

A checkpoint belongs to a run, not to its mesh: more chips, fewer, or another
layout go on from it. Here the rest of the run has layers split over two
devices, and all of it over four.
"""

keras.distribution.set_distribution(
    kpt.distribution.fsdp_tensor_parallel(data=4, model=2)
)

task = kpt.SFTTask.from_preset(preset, sequence_length=16)
task.compile(keras.optimizers.AdamW(3e-3))
history = task.fit(
    rows,
    batch_size=20,
    epochs=150,
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
## On many hosts

A pod has many hosts, and each runs the same script. One line at its top,
before anything is made, brings them together; on a TPU pod it needs no
arguments:

```python
keras.distribution.initialize()
keras.distribution.set_distribution(kpt.distribution.fsdp())
```

Elsewhere each process is told where the first one listens, how many there are
and which it is:

```python
keras.distribution.initialize(
    job_addresses="10.0.0.1:8476", num_processes=2, process_id=0
)
```

All hosts are given the same rows. Each builds the rows of its own devices,
judges the samples of its share of the prompts, and reads and writes its parts
of a checkpoint, in a folder that all of them see. The first one writes logs
and exports. Where a host is lost the others end and say so, and the same
script, started on all again, goes on from the last checkpoint.

With [Pathways](https://github.com/AI-Hypercomputer/pathways-utils) one process
drives all chips. Then two lines come first, before JAX is used:

```python
import pathwaysutils
pathwaysutils.initialize()
```

## What a pod run wants

- `task.plan` with the settings of the run: does it fit, and do the chips
  send about what the layout calls for?
- `dtype="bfloat16"`: weights and what is sent take half; masters and the
  optimizer's state are float32.
- `remat="full"` for long rows, and `micro_batch_size` where one row a chip is
  still too much.
- `kpt.callbacks.Checkpoint` with `every=` such that what is lost is cheap.
"""
