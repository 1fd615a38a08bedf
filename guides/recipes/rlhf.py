"""RLHF in three stages: fine-tuning, a reward model, and GRPO with it.

    python guides/recipes/rlhf.py RUN
    python guides/recipes/rlhf.py RUN --preset qwen3_4b_en \
        --data chats.jsonl --pairs pairs.jsonl --eval-pairs held_out.jsonl

The first line trains a tiny model offline, in a minute; the second a real one.
Rows are {"prompt", "completion"}, and {"prompt", "chosen", "rejected"}. Run it
again to resume, in whichever stage. RUN gets a folder a stage.
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
    "rank": 32, "sequence_length": 64, "max_completion_length": 12,
    "sft": {"rate": 5e-3, "fit": {"batch_size": 28, "epochs": 12}},
    "reward": {"rate": 3e-3, "fit": {"batch_size": 20, "epochs": 5}},
    "rl": {"rate": 2e-3, "fit": {"batch_size": 20, "epochs": 5},
           "group": 8, "beta": 0.1},
}  # fmt: skip
REAL = {
    "rank": 64, "sequence_length": 2048, "max_completion_length": 1024,
    "sft": {"rate": 2e-4, "fit": {"batch_size": 64}},
    "reward": {"rate": 3e-4, "fit": {"batch_size": 64}},
    "rl": {"rate": 1e-5, "fit": {"batch_size": 64}, "group": 4, "beta": 0.02},
}  # fmt: skip

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
for name in ("--preset", "--data", "--pairs", "--eval-pairs"):
    parser.add_argument(name)
args = parser.parse_args()
out, settings, truth = args.out, REAL if args.preset else TINY, []
keras.utils.set_random_seed(0)
random.seed(0)

# The data: files, or requests that people prefer polite and with a name.
if args.preset:
    preset, rows = args.preset, args.data
    pairs, eval_pairs = (
        [json.loads(x) for x in pathlib.Path(p).read_text().splitlines()]
        for p in (args.pairs, args.eval_pairs)
    )
else:
    rows, pairs = [], []
    for name in ("Ann", "Tom", "Eve", "Max", "Sue", "Jim", "Liz", "Ned"):
        for thing in ("salt", "bread", "milk", "jam", "tea", "rice", "soup"):
            best = f"Please pass the {thing}, {name}."
            worse = (f"Please pass the {thing}.", f"Give me the {thing}!")
            prompt = f"Ask {name} for the {thing}: "
            said = (*worse, *worse, best)
            rows += [{"prompt": prompt, "completion": x} for x in said]
            both = {"prompt": prompt, "chosen": best, "best": best}
            pairs += [[both | {"rejected": x} for x in worse]]
    random.shuffle(pairs)
    pairs, eval_pairs = sum(pairs[:-16], []), sum(pairs[-16:], [])
    preset = kpt.examples.tiny_preset(out / "tiny", rows, epochs=4)

    # Logged and not trained on: the reward model has to find it.
    truth = [kpt.rewards.ExactMatchReward(column="best")]


def task_of(kind, model, stage, **kwargs):
    lora = kpt.LoRA(rank=settings["rank"], alpha=32)
    length = {"sequence_length": settings["sequence_length"]}
    task = kind.from_preset(model, lora=lora, truncation="drop", **length)
    rate = settings[stage]["rate"]
    task.compile(keras.optimizers.AdamW(rate, weight_decay=0.0), **kwargs)
    return task


def fit(task, rows, stage, **kwargs):
    task.fit(
        rows,
        **settings[stage]["fit"],
        callbacks=[
            kpt.callbacks.Checkpoint(out / stage, every="10min"),
            kpt.callbacks.MetricsLog(out / stage),
            kpt.callbacks.Report(out / stage),
        ],
        **kwargs,
    )
    task.export(out / stage / "model")
    return out / stage / "model"


policy = fit(task_of(kpt.SFTTask, preset, "sft"), rows, "sft", packing=True)
scorer = task_of(kpt.RewardTask, policy, "reward")
fit(scorer, pairs, "reward", validation_data=eval_pairs)

task = task_of(
    kpt.GRPOTask, policy, "rl",
    loss=kpt.losses.GRPOLoss(beta=settings["rl"]["beta"]),
    rewards=[kpt.rewards.ModelReward(scorer), *truth],
    reward_weights=[1.0] + [0.0] * len(truth),
    num_generations=settings["rl"]["group"],
    max_completion_length=settings["max_completion_length"],
)  # fmt: skip
prompts, held_out = (
    list({json.dumps(row["prompt"]): row for row in some}.values())
    for some in (pairs, eval_pairs)
)
sampled = {"num_generations": 8, "temperature": 1.0, "batch_size": 16}
before = task.evaluate(held_out, **sampled)
fit(task, prompts, "rl")
after = task.evaluate(held_out, **sampled)
name = "rewards/exact_match/mean" if truth else "rewards/model/mean"
print(f"held-out {name}: {before[name]:.2f} -> {after[name]:.2f}")
scores = {"before": before[name], "after": after[name]}
(out / "results.json").write_text(json.dumps(scores) + "\n")
