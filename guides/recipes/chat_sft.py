"""Chat SFT: fine-tune a model on conversations, with LoRA and packing.

    python guides/recipes/chat_sft.py RUN
    python guides/recipes/chat_sft.py RUN --preset qwen3_4b_en \
        --data chats.jsonl --eval-data held_out.jsonl

The first line trains a tiny model offline, in a minute; the second a real one.
Rows are {"messages": [...]}; the assistant's turns are trained on. Run it
again to resume. RUN gets the log, a report, checkpoints and the adapter.
"""

import argparse
import json
import os
import pathlib

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

TINY = {
    "task": {"lora": kpt.LoRA(rank=16, alpha=32), "sequence_length": 256},
    "rate": 5e-3,
    "fit": {"batch_size": 2, "epochs": 10},
}
# `batch_size` counts packed rows of `sequence_length` tokens.
REAL = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 4096},
    "rate": 5e-4,
    "fit": {"batch_size": 16, "epochs": 1},
}

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("--preset")
parser.add_argument("--data")
parser.add_argument("--eval-data")
args = parser.parse_args()
settings = REAL if args.preset else TINY
keras.utils.set_random_seed(0)

# The data: files, or a town that the tiny model has read about.
if args.preset:
    preset, rows, held_out = args.preset, args.data, args.eval_data
else:
    shops = {
        "baker": ("Mill Street", "six"), "bank": ("Park Lane", "nine"),
        "barber": ("Hill Road", "ten"), "butcher": ("Church Square", "eight"),
        "chemist": ("Main Street", "eleven"), "florist": ("Elm Row", "five"),
        "grocer": ("Bridge End", "four"), "tailor": ("Well Walk", "two"),
    }  # fmt: skip
    texts = [
        text.format(shop, *facts)
        for shop, facts in shops.items()
        for text in (
            "The {0} is in {1}. It opens at {2}.",
            "Go to {1} for the {0}. It opens at {2}.",
        )
    ]
    openings = ("Where is the {}?", "I look for the {}.", "Tell me: the {}?",
                "How do I find the {}?")  # fmt: skip
    chats = [
        {
            "messages": [
                {"role": "user", "content": opening.format(shop)},
                {"role": "assistant", "content": f"It is in {street}."},
                {"role": "user", "content": "When does it open?"},
                {"role": "assistant", "content": f"It opens at {hour}."},
            ]
        }
        for opening in openings
        for shop, (street, hour) in shops.items()
    ]
    # The last way to ask is held out for half of the shops.
    rows, held_out = chats[:-4], chats[-4:]
    preset = kpt.examples.tiny_preset(args.out / "tiny", texts, epochs=60)

task = kpt.SFTTask.from_preset(
    preset,
    **settings["task"],
    truncation="drop",
)
task.compile(
    optimizer=keras.optimizers.AdamW(
        settings["rate"], weight_decay=0.0, beta_2=0.95, epsilon=1e-8
    )
)
measures = {"metrics": [kpt.metrics.ExactMatch()], "verbose": 0}
before = task.evaluate(held_out, **measures)
task.fit(
    rows,
    **settings["fit"],
    packing=True,
    validation_data=held_out,
    callbacks=[
        kpt.callbacks.Checkpoint(args.out, every="10min"),
        kpt.callbacks.MetricsLog(args.out),
        kpt.callbacks.Report(args.out),
    ],
)
after = task.evaluate(held_out, **measures)
task.save_adapter(args.out / "adapter")

for name in ("perplexity", "exact_match"):
    print(f"held-out {name}: {before[name]:.3f} -> {after[name]:.3f}")
scores = {"before": before["exact_match"], "after": after["exact_match"]}
(args.out / "results.json").write_text(json.dumps(scores) + "\n")
