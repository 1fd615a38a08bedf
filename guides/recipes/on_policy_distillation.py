"""On-policy distillation: a student learns from a teacher on its own samples.

    python guides/recipes/on_policy_distillation.py RUN
    python guides/recipes/on_policy_distillation.py RUN \
        --preset qwen3_1.7b_en --teacher qwen3_8b_en \
        --data prompts.jsonl --eval-data held_out.jsonl

The first line trains a tiny model offline, in a minute; the second a real one.
Rows are {"prompt"}; those of --eval-data have a numeric "answer". Run it again
to resume. RUN gets logs, a report, checkpoints and the adapter.
"""

import argparse
import json
import os
import pathlib
import random

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

# A student far from its teacher learns faster by the forward divergence: all
# that the teacher might say. The reverse one, the default, is for one that
# is good already: it learns to say nothing that the teacher would not say.
TINY = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 32},
    "rate": 5e-3,
    "compile": {
        "num_generations": 2, "max_completion_length": 4,
        "loss": kpt.losses.ForwardKLLoss(),
    },
    "fit": {"batch_size": 32, "epochs": 8},
}  # fmt: skip
REAL = {
    "task": {"lora": kpt.LoRA(rank=128, alpha=32), "sequence_length": 6144},
    "rate": 1e-4,
    "compile": {
        "num_generations": 4, "max_completion_length": 4096,
        "loss": kpt.losses.ReverseKLLoss(),
    },
    "fit": {"batch_size": 64, "epochs": 1},
}  # fmt: skip

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
for name in ("--preset", "--teacher", "--data", "--eval-data"):
    parser.add_argument(name)
args = parser.parse_args()
out, settings = args.out, REAL if args.preset else TINY
keras.utils.set_random_seed(0)
random.seed(0)

# The data: files, or days of the month, which a tiny teacher can count and a
# student of half its layers has only begun to learn.
if args.preset:
    preset, teacher, rows = args.preset, args.teacher, args.data
    lines = pathlib.Path(args.eval_data).read_text().splitlines()
    held_out = [json.loads(line) for line in lines]
else:
    rows = [
        {"prompt": f"{name}: day {a}, in {b} days it is day", "answer": a + b}
        for name in ("Ann", "Tom", "Eve", "Max", "Sue", "Jim")
        for a in range(1, 10)
        for b in range(1, 8)
    ]
    shown = [
        {"prompt": row["prompt"], "completion": f" {row['answer']}"}
        for row in rows
    ]
    teacher = kpt.examples.tiny_preset(out / "large", shown, epochs=12)
    preset = kpt.examples.tiny_preset(
        out / "small", shown, epochs=2, num_layers=1
    )
    random.shuffle(rows)
    held_out = rows[:58]
    rows = [{"prompt": row["prompt"]} for row in rows[58:]]

task = kpt.DistillTask.from_preset(
    preset,
    teacher=teacher,
    **settings["task"],
)
task.compile(
    optimizer=keras.optimizers.AdamW(
        settings["rate"], weight_decay=0.0, beta_2=0.95, epsilon=1e-8
    ),
    on_policy=True,
    **settings["compile"],
)


def score():
    answers = task.generate(
        [row["prompt"] for row in held_out],
        max_tokens=settings["compile"]["max_completion_length"],
        temperature=0,
    )
    grade, right = kpt.rewards.NumericReward(), [x["answer"] for x in held_out]
    return sum(grade(completions=answers, answer=right)) / len(answers)


before = score()
task.fit(
    rows,
    **settings["fit"],
    callbacks=[
        kpt.callbacks.Checkpoint(out, every="10min"),
        kpt.callbacks.MetricsLog(out),
        kpt.callbacks.CompletionsLog(out, every=10),
        kpt.callbacks.Report(out),
    ],
)
after = score()
task.save_adapter(out / "adapter")
print(f"held-out right: {before:.0%} -> {after:.0%}")
scores = {"before": before, "after": after}
(out / "results.json").write_text(json.dumps(scores) + "\n")
