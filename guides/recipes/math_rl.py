"""RL on word problems with a checkable answer, in the form of GSM8K.

    python guides/recipes/math_rl.py RUN
    python guides/recipes/math_rl.py RUN --preset qwen3_4b_en \
        --data gsm8k_train.jsonl --eval-data gsm8k_test.jsonl

The first line trains a tiny model offline, in a minute; the second a real one.
Rows are {"prompt", "answer"}: a chat that asks to end with "#### " and the
number, and the right one. README.md makes them of GSM8K. Run it again to
resume. RUN gets logs, a report, checkpoints and the adapter.
"""

import argparse
import json
import os
import pathlib
import random

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

TINY = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 256},
    "rate": 5e-3,
    "compile": {"num_generations": 8, "max_completion_length": 24},
    "fit": {"batch_size": 16, "epochs": 3},
}
REAL = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 2048},
    "rate": 4e-5,
    "compile": {"num_generations": 16, "max_completion_length": 1024},
    "fit": {"batch_size": 64, "epochs": 1},
}

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
for name in ("--preset", "--data", "--eval-data"):
    parser.add_argument(name)
args = parser.parse_args()
settings = REAL if args.preset else TINY
keras.utils.set_random_seed(0)
random.seed(0)

# The data: files, or sums and a tiny model that knows the form and guesses.
if args.preset:
    preset, rows, held_out = args.preset, args.data, args.eval_data
else:
    rows = [
        {
            "prompt": f"{name} has {a} {first} and {b} {second}. Together?",
            "answer": f"{a} + {b} = {a + b}\n#### {a + b}",
        }
        for name in ("Ann", "Tom", "Eve", "Max")
        for first, second in (("pens", "cups"), ("nuts", "figs"))
        for a in range(1, 7)
        for b in range(1, 7)
    ]
    random.shuffle(rows)
    held_out, rows = rows[:48], rows[48:]
    guesses = []
    for row in random.choices(rows, k=3000):
        total = int(row["answer"].split()[-1]) + random.randint(0, 2)
        left = row["answer"].split(" = ")[0]
        said = f" {left} = {total}\n#### {total}"
        guesses.append({"prompt": row["prompt"], "completion": said})
    preset = kpt.examples.tiny_preset(args.out / "tiny", guesses, epochs=1)

# `NumericReward` reads the last number of the row's answer.
task = kpt.GRPOTask.from_preset(preset, truncation="drop", **settings["task"])
task.compile(
    optimizer=keras.optimizers.AdamW(
        settings["rate"], weight_decay=0.0, beta_2=0.95, epsilon=1e-8
    ),
    loss=kpt.losses.GRPOLoss(beta=0.0),
    rewards=[kpt.rewards.NumericReward(extract=r"####(.*)")],
    **settings["compile"],
)
sampled = {"num_generations": 4, "temperature": 1.0, "batch_size": 48}
before = task.evaluate(held_out, **sampled)
task.fit(
    rows,
    **settings["fit"],
    share_prefix=True,
    callbacks=[
        kpt.callbacks.Checkpoint(args.out, every="10min"),
        kpt.callbacks.MetricsLog(args.out),
        kpt.callbacks.CompletionsLog(args.out, every=10),
        kpt.callbacks.Report(args.out),
    ],
)
after = task.evaluate(held_out, **sampled)
task.save_adapter(args.out / "adapter")

print(f"held-out right: {before['pass@1']:.0%} -> {after['pass@1']:.0%}")
scores = {"before": before["pass@1"], "after": after["pass@1"]}
(args.out / "results.json").write_text(json.dumps(scores) + "\n")
