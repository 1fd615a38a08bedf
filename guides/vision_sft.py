"""
Title: Supervised fine-tuning on images
Author: The keras_posttrain authors
Date created: 2026/11/24
Last modified: 2026/11/27
Description: Rows with images for a Gemma 3 or 4, and what is learnt.
Accelerator: None
"""

"""
## Introduction

This guide fine-tunes a Gemma 3 with its vision tower on questions about
pictures that it draws itself. It shows what a row with images looks like, what
it becomes, and that the answers come from the pictures.

It runs in half a minute on two CPU cores with a tiny model, and downloads
nothing. For a real model change one line: set `preset` to
`"hf://google/gemma-3-4b-it"`, or to a Gemma 4.
"""

import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/vision_sft")
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)

"""
## Pictures

A picture has one colour on the left and another on the right, with noise. It
is a uint8 array of shape `(height, width, 3)`; a Pillow image does as well.
Any size will do: the processor of Gemma 3 resizes all pictures to the one
that the model was made for, that of Gemma 4 to the largest of their shape that
has at most `max_soft_tokens` tokens, and so does this library, to the same
pixels.
"""

colours = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "white": (235, 235, 235),
}
names, values = list(colours), np.array(list(colours.values()))
rng = np.random.default_rng(0)
sides = rng.integers(0, 4, (400, 2))
sides = sides[sides[:, 0] != sides[:, 1]]
pictures = [
    np.clip(
        np.repeat(values[pair], 24, axis=0) + rng.normal(0, 20, (40, 48, 3)),
        0,
        255,
    ).astype("uint8")
    for pair in sides
]

"""
## Rows

A row has the column `images`, a list, next to its messages. Each part
`{"type": "image"}` of their contents stands for the next image. Where all
contents are strings, the images come before the first question. These are the
rows that TRL trains vision models on.
"""

rows = [
    {
        "images": [picture],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image"},
                    {"type": "text", "text": f"What is on the {side}?"},
                ],
            },
            {"role": "assistant", "content": names[pair[place]]},
        ],
    }
    for i, (picture, pair) in enumerate(zip(pictures, sides))
    for place, side in [(i % 2, ("left", "right")[i % 2])]
]
held_out, rows = rows[-40:], rows[:-40]

"""
## The preset

`tiny_preset(..., vision=True)` writes a small Gemma 3 with random weights,
which has a tower that makes four tokens of a picture. `vision=True` loads a
directory with its tower; without it the text model is loaded, as before, and
rows with images are refused.
"""

preset = kpt.examples.tiny_preset(folder / "tiny", rows, vision=True)
task = kpt.SFTTask.from_preset(preset, vision=True, sequence_length=32)

"""
The template writes a mark for each image, which becomes the tokens that the
model was trained on: a begin, the tokens of the image, and an end. Their
embeddings come from the tower. They see each other in both directions, as in
`transformers` (in a Gemma 4 whose config says so, and there in layers with a
window alone), also in packed rows, and carry no loss.
"""

examples, report = task.prepare(rows[:1])
print(task.tokenizer.decode(examples[0].token_ids, skip_special_tokens=False))
print(report)

"""
## Training

Everything else is as in [sft](sft.py): `lora=`, packing, micro-batches,
meshes and checkpoints work with images. So do `kpt.DPOTask`, where the prompt
may have images, and `kpt.GRPOTask` and `kpt.PPOTask`, whose rewards get the
column `images` too. The tower and its projector stay frozen. Here all weights
of the text model are trained, as they are random.
"""

task.compile(keras.optimizers.AdamW(3e-3))
task.fit(
    rows,
    batch_size=20,
    epochs=14,
    verbose=0,
    callbacks=[kpt.callbacks.MetricsLog(folder)],
)

"""
## What it has learnt

`generate` takes messages up to the answer, with their images. Of the same
questions about the mirrored pictures the model should answer the other colour,
and a model that does not look at the picture could be right in one of four.
"""

shares = {}
for way, flip in (("right", 1), ("mirrored", -1)):
    asked = [
        {
            "images": [row["images"][0][:, ::flip]],
            "messages": row["messages"][:1],
        }
        for row in held_out
    ]
    answers = task.generate(asked, temperature=0, max_tokens=8)
    print(asked[0]["messages"][0]["content"][1]["text"], answers[0])
    right = [
        answer.strip() == row["messages"][1]["content"]
        for answer, row in zip(answers, held_out)
    ]
    shares[way] = float(np.mean(right))
    print(f"{way}: {shares[way]:.0%} as in the rows")

"""
## Export

The export is a directory of `Gemma3ForConditionalGeneration` with the tower
and the files of its processor, which `transformers` and this library load.
"""

task.export(folder / "model")
(folder / "results.json").write_text(json.dumps(shares))
