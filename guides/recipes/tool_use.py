"""RL with a tool: a model learns when to compute and when to answer.

    python guides/recipes/tool_use.py RUN
    python guides/recipes/tool_use.py RUN --preset qwen3_4b_en \
        --data questions.jsonl --eval-data held_out.jsonl

The first line trains a tiny model offline, in two minutes; the second a real
one, with a sandboxed Python as its tool. Rows are {"prompt", "answer"}: the
last number of the last message is compared with that of the answer. Run it
again to resume. RUN gets logs, a report, checkpoints and the adapter.
"""

import argparse
import itertools
import json
import os
import pathlib
import random

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

TINY = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 512},
    "rate": 5e-3,
    "limits": kpt.episodes.Limits(turns=3, tool_seconds=10),
    "compile": {"num_generations": 8, "max_completion_length": 64},
    "fit": {"batch_size": 8, "epochs": 4},
}
REAL = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 32768},
    "rate": 4e-5,
    "limits": kpt.episodes.Limits(turns=8, tool_seconds=30),
    "compile": {"num_generations": 8, "max_completion_length": 16384},
    "fit": {"batch_size": 128, "epochs": 1},
}

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
for name in ("--preset", "--data", "--eval-data"):
    parser.add_argument(name)
args = parser.parse_args()
out, settings = args.out, REAL if args.preset else TINY
keras.utils.set_random_seed(0)
random.seed(0)


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: such as "3 * 4".
    """
    return str(kpt.episodes.arithmetic(expression))


# The data: files, or questions and a tiny model that guesses most answers.
tool = kpt.episodes.python if args.preset else calculator
tools = kpt.episodes.Tools([tool], limits=settings["limits"])
if args.preset:
    preset, rows, held_out = args.preset, args.data, args.eval_data
else:
    rows = []
    for a, b in itertools.product(range(2, 8), repeat=2):
        rows.append({"prompt": f"{a} + {b}", "answer": a + b})
        rows.append({"prompt": f"{a} * {b}", "answer": a * b})
    random.shuffle(rows)
    chats = []
    for row in rows * 4:
        call = {"expression": row["prompt"]}
        call = {"name": calculator.__name__, "arguments": call}
        calls = [{"type": "function", "function": call}]
        says = {"role": "assistant", "content": str(row["answer"])}
        computes = [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {**says, "role": "tool", "name": calculator.__name__},
            says,
        ]
        guesses = [{**says, "content": str(random.randint(4, 49))}]
        asked = {"role": "user", "content": f"Compute {row['prompt']}"}
        chats.append([asked, *computes])
        plain = {"role": "user", "content": row["prompt"]}
        chats.append([plain, *random.choice([computes, *[guesses] * 3])])
    known = [{"messages": chat, "tools": tools.schemas} for chat in chats]
    preset = kpt.examples.tiny_preset(out / "tiny", known, epochs=6)
    held_out, rows = rows[:24], rows[24:]

task = kpt.GRPOTask.from_preset(preset, truncation="drop", **settings["task"])
task.compile(
    optimizer=keras.optimizers.AdamW(
        settings["rate"], weight_decay=0.0, beta_2=0.95, epsilon=1e-8
    ),
    loss=kpt.losses.GRPOLoss(beta=0.0),
    rewards=[kpt.rewards.NumericReward()],
    episode=tools,
    **settings["compile"],
)
sampled = {"num_generations": 4, "temperature": 1.0, "batch_size": 24}
before = task.evaluate(held_out, **sampled)
task.fit(
    rows,
    **settings["fit"],
    share_prefix=True,
    callbacks=[
        kpt.callbacks.Checkpoint(out, every="10min"),
        kpt.callbacks.MetricsLog(out),
        kpt.callbacks.CompletionsLog(out, every=10),
        kpt.callbacks.Report(out),
    ],
)
after = task.evaluate(held_out, **sampled)
task.save_adapter(out / "adapter")
for name in ("pass@1", "tools/calls"):
    print(f"held-out {name}: {before[name]:.2f} -> {after[name]:.2f}")
scores = {"before": before["pass@1"], "after": after["pass@1"]}
(out / "results.json").write_text(json.dumps(scores) + "\n")
