"""
Title: LoRA on a base in four bits
Author: The keras_posttrain authors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: An adapter is trained on weights of a quarter of the memory.
Accelerator: None
"""

"""
## Introduction

Under LoRA the weights of the base are only read. They may be stored in fewer
bits: `quantize="int8"`, `"int4"` or `"nf4"` keeps the linear layers of the
decoder as codes, with a scale for each group of weights, as in
[QLoRA](https://arxiv.org/abs/2305.14314). In bfloat16 the weights of a model
of 8 billion parameters take 15 GiB, in four bits 5.5 GiB.

Rounding changes the base a little, and the adapter is trained on what was
rounded: samples, log-probabilities and exports are of that model.

It runs in about a minute on two CPU cores. For a real model set `preset` to
one such as `"llama3_8b_en"` or `"hf://Qwen/Qwen3-8B"`.
"""

import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/qlora")
keras.utils.set_random_seed(0)

"""
## A base, and what it shall learn

The tiny base adds. The adapter shall learn to take the difference.
"""

numbers = [(a, b) for a in range(2, 22) for b in range(2, 22)]
sums, differences = (
    [
        {
            "messages": [
                {"role": "user", "content": f"{a} {sign} {b} ="},
                {"role": "assistant", "content": str(a + factor * b)},
            ]
        }
        for a, b in numbers
    ]
    for sign, factor in (("+", 1), ("-", -1))
)
held_out = differences[::5]
trained = [row for i, row in enumerate(differences) if i % 5]
preset = kpt.examples.tiny_preset(folder / "tiny", sums, epochs=6)

"""
## The same run in floats and in fewer bits

`quantize` is all that changes. Tensors of a Hugging Face directory are
rounded as they are read: the floats of the base are never in memory together.

`kpt.Quantization` has the details: the size of the groups, and whether the
scales are rounded too, as here for nf4. Smaller groups follow the weights more
closely and take more memory.

For each kind these are shown: the bytes of the decoder's layers, how far the
log-probabilities of the base's own answers move by rounding, and the loss on
held-out rows after training.
"""

base = None
results = {}
kinds = {
    "floats": None,
    "int8": "int8",
    "int4": "int4",
    "nf4": kpt.Quantization("nf4", group_size=32, double=True),
}
for name, kind in kinds.items():
    keras.utils.set_random_seed(0)
    task = kpt.SFTTask.from_preset(
        preset,
        lora=kpt.LoRA(rank=8),
        quantize=kind,
        sequence_length=64,
    )
    layers = task.causal_lm.backbone.transformer_layers
    num_bytes = sum(v.value.nbytes for x in layers for v in x.variables)
    found = np.concatenate(task.log_probs(sums[:100]))
    base = found if kind is None else base
    task.compile(optimizer=keras.optimizers.Adam(5e-3))
    task.fit(trained, batch_size=20, epochs=6, packing=True, verbose=0)
    results[name] = {
        "bytes": num_bytes,
        "difference": float(np.abs(found - base).sum() / np.sum(base != 0)),
        "loss": task.evaluate(held_out)["loss"],
    }
    print(f"{name}: {results[name]}")

"""
## Sample, save, export

The last task is the one in nf4. The engine samples from its codes and the
adapter. `save_adapter` writes the adapter, which belongs to the base that was
rounded. `export` writes floats: the rounded base with the adapter added, which
every library reads and which has the same log-probabilities.
"""

question = [{"role": "user", "content": "17 - 5 ="}]
print(task.generate(question, max_tokens=4, temperature=0))
task.save_adapter(folder / "adapter")
task.export(folder / "export")
exported = kpt.SFTTask.from_preset(folder / "export", sequence_length=64)
ours, theirs = (
    np.concatenate(each.log_probs(held_out)) for each in (task, exported)
)
gap = np.abs(ours - theirs).max()
print(f"largest difference of log-probabilities after export: {gap:.1e}")

results["export"] = {"gap": float(gap)}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
What is in eight or four bits cannot be rounded again without loss. So
`merge_adapter` and `save_to_preset` are refused, and say what to use.

## A model that is not trained

With `trainable=False` no adapter is needed: such a task samples and evaluates,
and is the `teacher=` of a `DistillTask` or the `reference=` of a `DPOTask`.
Here a teacher in four bits trains a student whose base is in float32.
"""

teacher = kpt.SFTTask.from_preset(
    folder / "export", quantize="int4", trainable=False, sequence_length=64
)
student = kpt.DistillTask.from_preset(
    preset, teacher=teacher, lora=kpt.LoRA(rank=8), sequence_length=64
)
student.compile(optimizer=keras.optimizers.Adam(5e-3))
before = student.evaluate(held_out)["loss"]
student.fit(trained, batch_size=20, epochs=4, packing=True)
after = student.evaluate(held_out)["loss"]
print(f"divergence from the teacher: {before:.2f}, then {after:.2f}")
results["distilled"] = {"before": before, "after": after}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Checkpoints that are quantized already

A Hugging Face directory with a `quantization_config` needs no `quantize=`:
`from_preset("hf://Qwen/Qwen3-8B-AWQ", lora=kpt.LoRA(rank=16))` trains on its
codes, which are not rounded again. GPTQ, AWQ, bitsandbytes, FP8 and
compressed-tensors are read. A format whose numbers have no codes here, such as
FP8, is read as floats, and a line says so.

The same holds for a model that Keras has quantized, by
`causal_lm.quantize("int8")` or in int4, GPTQ or AWQ, before a task is made of
it, and for a preset saved after that (not of GPTQ and AWQ, which Keras 3.15
cannot read again itself). Keras runs such layers without an adapter, so the
task replaces them in the model. Such a preset keeps its own dtype: leave
`dtype` out. Three things differ then:

- In int8 Keras by default rounds the inputs of a layer too; here only weights
  are rounded.
- Keras quantizes the embedding and the head too, unless `filters=` leaves them
  out; here they become floats with the rounded values.
- Codes of AWQ, of GPTQ with `activation_order`, and in int4 those of Gemma's
  attention are on no grid of ours: these layers become floats.

## Next

- `GRPOTask`, `DPOTask`, `PPOTask` and `RewardTask` take `quantize` too.
- `kpt.AdamW8bit` trains all weights with a quarter of AdamW's state.
- `task.plan("v5e:1x1", batch_size=1)` says whether a quantized model fits.
"""
